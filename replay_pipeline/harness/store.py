"""Harnesses on disk: one file per agent and version, below the data root."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import msgspec

from replay_pipeline.errors import ConfigError, StorageError
from replay_pipeline.harness.harness import Harness
from replay_pipeline.storage.outages import translated
from replay_pipeline.storage.store import Place, files_below, written_whole

FOLDER = "harness"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True, eq=False)
class FoundHarness:
    """The harness for a version. It may be that of an older version."""

    harness: Harness
    note: str | None = None
    """How it differs from what was asked for."""


class HarnessStore:
    """The harnesses below a data root.

    Args:
        root: the data root.
    """

    def __init__(self, root: Place) -> None:
        self._folder = root / FOLDER
        self._found: dict[tuple[str, str | None], FoundHarness | None] = {}

    def keep(self, harness: Harness) -> Place:
        """Write a harness, replacing an earlier one of the same version, and return its path.

        Raises:
            ConfigError: its version can't be a file name.
            StorageError: the file can't be written.
        """
        if not _NAME.fullmatch(harness.version) or not _NAME.fullmatch(harness.agent):
            raise ConfigError(
                f"agent {harness.agent!r}, version {harness.version!r}: not usable as a file name"
            )
        place = self._folder / harness.agent / f"{harness.version}.json"
        data = msgspec.json.format(msgspec.json.encode(harness), indent=1)
        with written_whole(place) as file:
            file.write(data + b"\n")
        self._found.clear()
        self.__dict__.pop("_names", None)
        return place

    def __iter__(self) -> Iterator[Harness]:
        """Yield every harness, by agent and version."""
        for agent, version in self._names:
            yield self._read(agent, version)

    @property
    def is_empty(self) -> bool:
        """Return whether the store is empty."""
        return not self._names

    def find(self, agent: str, version: str | None) -> FoundHarness | None:
        """Return the harness for a version of a client, or that of the nearest older version.

        Args:
            agent: the agent that wrote the session.
            version: its version. Without one, nothing is found.
        """
        key = (agent, version)
        if key not in self._found:
            self._found[key] = self._nearest(agent, version) if version else None
        return self._found[key]

    @cached_property
    def _names(self) -> list[tuple[str, str]]:
        with translated(self._folder, "listed"):
            names = files_below(self._folder)
        paths = (name.split("/") for name in names if name.endswith(".json"))
        found = [(path[0], path[1].removesuffix(".json")) for path in paths if len(path) == 2]
        return sorted(found, key=lambda name: (name[0], _numbers(name[1])))

    def _nearest(self, agent: str, version: str) -> FoundHarness | None:
        versions = [each for of, each in self._names if of == agent]
        if version in versions:
            return FoundHarness(self._read(agent, version))
        older = [each for each in versions if _numbers(each) <= _numbers(version)]
        if not older:
            return None
        note = f"of {older[-1]}, the nearest older version; {version} was not asked"
        return FoundHarness(self._read(agent, older[-1]), note)

    def _read(self, agent: str, version: str) -> Harness:
        place = self._folder / agent / f"{version}.json"
        try:
            return msgspec.json.decode(place.read_bytes(), type=Harness)
        except (OSError, msgspec.DecodeError) as error:
            raise StorageError(
                f"{place}: not a harness file ({error}); delete it, or learn the harness again"
            ) from error


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))
