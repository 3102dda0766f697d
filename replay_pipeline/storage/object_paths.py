"""A path on an object store. Every request returns an answer or raises a `StorageError`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from upath.extensions import ProxyUPath

from replay_pipeline.storage.outages import translated


@contextmanager
def _asked(path: "ObjectPath", what: str) -> Iterator[None]:
    """Translate errors; the answer that there is no such object is an answer, but for a write.

    Raises:
        FileNotFoundError: the object to write to does not exist.
    """
    missing: FileNotFoundError | None = None
    with translated(path, what):
        try:
            yield
        except FileNotFoundError as error:
            if what == "written":  # there is no such bucket
                raise
            missing = error
    if missing:
        raise missing


class ObjectPath(ProxyUPath):
    """A `UPath` that reports the errors of the store's client in plain words.

    An existence check is either answered by the store or fails. A store that can't be reached
    doesn't count as empty.
    """

    __slots__ = ()

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        """Return whether there is an object, or a prefix of objects."""
        del follow_symlinks
        return self._kind() is not None

    def is_dir(self) -> bool:
        """Return whether this is a prefix of objects."""
        return self._kind() == "directory"

    def is_file(self) -> bool:
        """Return whether there is an object."""
        return self._kind() == "file"

    def _kind(self) -> str | None:
        try:
            with _asked(self, "looked for"):
                return str(self.fs.info(self.path)["type"])
        except FileNotFoundError:
            return None

    def read_bytes(self) -> bytes:
        """Fetch the object, with one request."""
        with _asked(self, "read"):
            content: Any = self.fs.cat_file(self.path)
            return content


def _telling(inherited: Callable[..., Any], what: str) -> Callable[..., Any]:
    @wraps(inherited)
    def told(*arguments: Any, **options: Any) -> Any:
        with _asked(arguments[0], what):
            found = inherited(*arguments, **options)
            # Listings come page by page: all are fetched while an error can still be told.
            return iter(list(found)) if isinstance(found, Iterator) else found

    return told


for _name, _what in {
    "stat": "looked at",
    "iterdir": "listed",
    "glob": "listed",
    "rglob": "listed",
    "read_text": "read",
    "write_bytes": "written",
    "write_text": "written",
    "unlink": "deleted",
}.items():
    setattr(ObjectPath, _name, _telling(getattr(ProxyUPath, _name), _what))
