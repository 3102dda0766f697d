"""Keep answers that could not be booked next to the ledger, until a later process books them.

The disk may be full or the file system gone when a paid answer arrives. Then the answer is written
next to the ledger or, if that fails too, to the user's cache folder.
"""

import contextlib
import glob
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from replay_pipeline.errors import LedgerError
from replay_pipeline.replay.money.calls import NewCall, Settlement

Pair = tuple[NewCall, Settlement]


def name_of(pair: Pair) -> str:
    """Return a name for an answer from its contents, since it may have been written twice."""
    return hashlib.sha256(msgspec.json.encode(pair)).hexdigest()[:32]


class Unbooked:
    """The side files of one ledger. One process writes each, and the name says which."""

    def __init__(self, ledger: str, owner: int) -> None:
        self.owner = owner
        name = hashlib.sha256(ledger.encode()).hexdigest()[:16]
        self._stems = [Path.home() / ".cache" / "replay-pipeline" / f"{name}-unbooked-"]
        if "://" not in ledger:
            path = Path(ledger)
            self._stems.insert(0, path.with_name(f"{path.name}-unbooked-"))

    def keep(self, pairs: Sequence[Pair]) -> Path:
        """Write calls and their outcomes, and wait for the disk.

        Raises:
            LedgerError: they can't be written to any of the places.
        """
        data = b"".join(b"\n" + msgspec.json.encode(pair) for pair in pairs)
        errors = []
        for stem in self._stems:
            path = stem.with_name(f"{stem.name}{self.owner}.jsonl")
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("ab") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as error:
                errors.append(f"{path}: {error}")
            else:
                return path
        raise LedgerError("; ".join(errors))

    def left_behind(self, is_alive: Callable[[int], bool]) -> Iterator[tuple[Path, list[Pair]]]:
        """Read the files of processes that have ended."""
        decode = msgspec.json.Decoder(Pair).decode
        for stem in self._stems:
            for path in sorted(stem.parent.glob(f"{glob.escape(stem.name)}*.jsonl")):
                owner = int(path.stem.rpartition("-")[2])
                if owner != self.owner and is_alive(owner):
                    continue
                try:
                    lines = path.read_bytes().splitlines()
                except FileNotFoundError:
                    continue  # another process has just booked it
                pairs = []
                for line in lines:
                    # A line that was cut short was written once more, to the other place.
                    with contextlib.suppress(msgspec.DecodeError):
                        pairs.append(decode(line))
                yield path, pairs
