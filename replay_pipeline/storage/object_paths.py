"""A path on an object store whose every request ends in an answer or in a `StorageError`."""

from collections.abc import Iterator
from typing import Any

from upath.extensions import ProxyUPath

from replay_pipeline.storage.outages import translated


class ObjectPath(ProxyUPath):
    """What `UPath` gives, with the errors of the store's client told in plain words.

    A question whether something is there is answered by the store or not at all: a store that
    cannot be reached is no empty one.
    """

    __slots__ = ()

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        """Whether there is an object, or a prefix of objects."""
        del follow_symlinks
        return self._kind() is not None

    def is_dir(self) -> bool:
        """Whether this is a prefix of objects."""
        return self._kind() == "directory"

    def is_file(self) -> bool:
        """Whether there is an object."""
        return self._kind() == "file"

    def _kind(self) -> str | None:
        try:
            return self._told("looked for", lambda: self.fs.info(self.path)["type"])
        except FileNotFoundError:
            return None

    def stat(self, *, follow_symlinks: bool = True) -> Any:
        """Size and times of the object."""
        return self._told("looked at", super().stat, follow_symlinks=follow_symlinks)

    def iterdir(self) -> Iterator[Any]:
        """What is directly below this prefix."""
        return iter(self._told("listed", lambda: list(super(ObjectPath, self).iterdir())))

    def glob(self, pattern: str, **options: Any) -> Iterator[Any]:
        """What is below this prefix and matches."""
        found = self._told("listed", lambda: list(super(ObjectPath, self).glob(pattern, **options)))
        return iter(found)

    def rglob(self, pattern: str, **options: Any) -> Iterator[Any]:
        """What is anywhere below this prefix and matches."""
        found = self._told(
            "listed", lambda: list(super(ObjectPath, self).rglob(pattern, **options))
        )
        return iter(found)

    def read_bytes(self) -> bytes:
        """The object, with one request."""
        return self._told("read", self.fs.cat_file, self.path)

    def read_text(self, *arguments: Any, **options: Any) -> str:
        """The object as text."""
        return self._told("read", super().read_text, *arguments, **options)

    def write_bytes(self, data: bytes) -> int:
        """Put the object."""
        return self._told("written", super().write_bytes, data)

    def write_text(self, data: str, *arguments: Any, **options: Any) -> int:
        """Put the object, from text."""
        return self._told("written", super().write_text, data, *arguments, **options)

    def unlink(self, missing_ok: bool = False) -> None:  # noqa: FBT001, FBT002 - as `Path` has it
        """Delete the object."""
        self._told("deleted", super().unlink, missing_ok=missing_ok)

    def _told(self, what: str, ask: Any, *arguments: Any, **options: Any) -> Any:
        with translated(self, what):  # type: ignore[arg-type]
            try:
                return ask(*arguments, **options)
            except FileNotFoundError as error:
                missing = error
        raise missing
