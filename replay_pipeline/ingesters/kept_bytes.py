"""Copies of the session bytes that were read, because agents delete their logs after some weeks.

Each slice is one compressed file, so every byte of a log is stored once: `<folder>/<hash of its
path>/<revision>/<start>-<end>.zst`. The copies aren't redacted, so only their owner can read them,
and they never leave this machine.
"""

import logging
import shutil
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

from replay_pipeline.errors import StorageError
from replay_pipeline.ingesters.base import SourceSlice
from replay_pipeline.ingesters.batches import TraceBatch, tail_sha
from replay_pipeline.ingesters.log_rows import sha_of
from replay_pipeline.storage.store import written_whole

logger = logging.getLogger(__name__)

_FRAME_BYTES = 1 << 22
_CODEC = pa.Codec("zstd", compression_level=1)


def keep(batch: TraceBatch, folder: Path) -> None:
    """Store the bytes of a batch that are still in their files and not stored yet."""
    for source, cursor in zip(batch.slices, batch.cursors, strict=True):
        piece = _piece(source, folder)
        if (
            piece.exists()
            or _has_parts_elsewhere(source.path)
            or not is_there(source, cursor.tail_sha)
        ):
            continue
        try:
            with written_whole(piece, is_private=True) as out:
                _pack(source.path, out, source.start, source.end or 0)
        except (OSError, StorageError) as error:
            logger.warning("%s: no copy of the session was stored (%s)", source.path, error)


def kept_files(batch: TraceBatch, folder: Path) -> list[Path]:
    """Name the files that store bytes of a batch."""
    pieces = (_piece(source, folder) for source in batch.slices)
    return [piece for piece in pieces if piece.exists()]


def is_there(source: SourceSlice, tail: str) -> bool:
    """Return whether the file still has the bytes of the slice, judged by its last bytes."""
    try:
        return tail_sha(source.path, source.end or 0) == tail
    except OSError:
        return False


def is_kept(source: SourceSlice, folder: Path) -> bool:
    """Return whether every byte up to the end of the slice is stored."""
    return bool(_pieces(source, folder))


def restore(source: SourceSlice, folder: Path, into: Path) -> Path:
    """Unpack a log up to the end of the slice into the folder `into`, under its old name."""
    path = into / sha_of(str(source.path)) / source.path.parent.name / source.path.name
    path.parent.mkdir(parents=True)
    with path.open("wb") as out:
        for piece in _pieces(source, folder):
            with pa.CompressedInputStream(pa.OSFile(str(piece)), "zstd") as packed:
                shutil.copyfileobj(packed, out, _FRAME_BYTES)
    return path


def _pieces(source: SourceSlice, folder: Path) -> list[Path]:
    """Return the pieces that make up the log until the end of the slice; none if one is missing."""
    pieces: list[Path] = []
    position = 0
    for piece in sorted(_folder(source, folder).glob("*.zst")):
        start, end = map(int, piece.stem.split("-"))
        if start == position and end <= (source.end or 0):
            pieces.append(piece)
            position = end
    return pieces if position == source.end else []


def _piece(source: SourceSlice, folder: Path) -> Path:
    return _folder(source, folder) / f"{source.start:015d}-{source.end or 0:015d}.zst"


def _folder(source: SourceSlice, folder: Path) -> Path:
    return folder / sha_of(str(source.path)) / (source.revision or "first")


def _has_parts_elsewhere(path: Path) -> bool:
    """Return whether the file is only the head of a session, whose messages are files of their own."""
    return len(path.parents) > 2 and (path.parents[2] / "message").is_dir()


def _pack(path: Path, out: BinaryIO, start: int, end: int) -> None:
    """Write a range of a file as frames of zstandard: one after the other they are one file."""
    with path.open("rb") as file:
        file.seek(start)
        while start < end and (data := file.read(min(_FRAME_BYTES, end - start))):
            out.write(_CODEC.compress(data, asbytes=True))
            start += len(data)
