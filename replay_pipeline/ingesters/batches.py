"""Trace batches: the bytes of session files that are processed together.

A batch is a fixed list of file slices, written once as a manifest. Whatever no manifest covers is
new. Agents delete their logs after some weeks, so copies of the bytes that were read are kept: each
slice is one compressed file, `<folder>/<hash of its path>/<revision>/<start>-<end>.zst`. The copies
aren't redacted, so only their owner can read them, and they never leave this machine.
"""

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

import msgspec
import pyarrow as pa

from replay_pipeline.errors import IngestError, StorageError
from replay_pipeline.ingesters.base import SourceSlice
from replay_pipeline.ingesters.corpus import session_files
from replay_pipeline.ingesters.log_rows import sha_of
from replay_pipeline.storage.processes import environment
from replay_pipeline.storage.store import Place, written_whole

logger = logging.getLogger(__name__)

_TAIL_BYTES = 4_096
_FRAME_BYTES = 1 << 22
_CODEC = pa.Codec("zstd", compression_level=1)
_VERSION = 1
_NS = 1_000_000_000
_CLOCK_SLACK_S = 60.0


class ReadMark(msgspec.Struct, frozen=True):
    """The bytes of a file that a batch has, and the state of the file when it was made."""

    path: Path
    offset: int = msgspec.field(name="end")
    """The position up to which it was read."""
    size_bytes: int
    mtime_ns: int
    tail_sha: str
    """Hash of the bytes before `offset`."""
    revision: str = ""
    ctime_ns: int = 0
    """The file's ctime, which no program can set; 0 if unknown."""
    start: int = 0


@dataclass(frozen=True, slots=True)
class TraceBatch:
    """The unit of work: a key without commas, and the slices it stands for."""

    key: str
    slices: tuple[SourceSlice, ...]
    cursors: tuple[ReadMark, ...] = ()
    """One per slice."""

    @property
    def n_bytes(self) -> int:
        """Return the number of bytes of session files in the batch."""
        return sum((source.end or 0) - source.start for source in self.slices)

    def to_json(self) -> str:
        """Return the manifest: equal batches give equal text."""
        files = [msgspec.to_builtins(mark, enc_hook=str) for mark in self.cursors]
        for file in files:
            if not file["ctime_ns"]:
                del file["ctime_ns"]
        manifest = {"files": files, "key": self.key, "version": _VERSION}
        return json.dumps(manifest, indent=2, sort_keys=True) + "\n"


def default_sources() -> list[Path]:
    """Return the folders where Claude Code keeps this user's sessions."""
    configured = environment("CLAUDE_CONFIG_DIR")
    roots = [Path(part) for part in (configured or "").split(",") if part.strip()]
    if not roots:
        home = environment("HOME") or environment("USERPROFILE")
        roots = [Path(home) / ".claude", Path(home) / ".config" / "claude"] if home else []
    folders = [root.expanduser() / "projects" for root in roots]
    return [folder for folder in folders if folder.is_dir()]


def discover(
    sources: Sequence[Path] = (),
    *,
    known: Mapping[str, TraceBatch] | Iterable[TraceBatch] = (),
    max_batch_bytes: int = 32_000_000,
    max_batch_sessions: int = 64,
    settle_s: float = 0.0,
    now: datetime | None = None,
) -> list[TraceBatch]:
    """Return batches of everything in `sources` that no batch in `known` covers.

    Without `sources`, the folders of this user's Claude Code are searched. A session and its
    subagents always go into the same batch. With `settle_s`, a file that was written to less than
    that many seconds before `now` waits for the next call, so that no message is half written.

    Raises:
        IngestError: a source does not exist.
    """
    known = list(known.values() if isinstance(known, Mapping) else known)
    cursors = _last_cursors(known)
    now = now or datetime.now(UTC)
    groups: list[list[tuple[SourceSlice, ReadMark]]] = []
    for group in _groups(_files(sources)):
        new = [found for path in group if (found := _new_bytes(path, cursors, settle_s, now))]
        if new:
            groups.append(new)
    late_ns = _NS * (now.timestamp() + _CLOCK_SLACK_S)
    ahead = [cursor.path for group in groups for _, cursor in group if cursor.mtime_ns > late_ns]
    if ahead:
        logger.warning(
            "%d session files have a time in the future, which is treated as now: %s%s",
            len(ahead), ahead[0], " and others" if ahead[1:] else "",
        )  # fmt: skip
    batches: list[TraceBatch] = []
    last_key = max((batch.key for batch in known), default="")
    for members in _packed(groups, max_batch_bytes, max_batch_sessions):
        last_key = _next_key(last_key, members, now)
        batches.append(
            TraceBatch(last_key, tuple(s for s, _ in members), tuple(c for _, c in members))
        )
    return batches


def _next_key(last_key: str, members: list[tuple[SourceSlice, ReadMark]], now: datetime) -> str:
    """Return a key that sorts after `last_key`: day of the newest file, number on that day, content.

    A file from the future counts as one of today: the days of later keys never go back.
    """
    newest_s = min(now.timestamp(), max(cursor.mtime_ns for _, cursor in members) // _NS)
    day = max(datetime.fromtimestamp(newest_s, UTC).date().isoformat(), last_key[:10])
    number = int(last_key[11:15]) + 1 if last_key[:10] == day else 1
    return f"{day}-{number:04d}-{_content_hash(members)}"


def _files(sources: Sequence[Path]) -> list[Path]:
    files: set[Path] = set()
    for source in sources or default_sources():
        path = Path(source).expanduser()
        if path.is_dir():
            files.update(session_files(path))
        elif path.is_file():
            files.add(path)
        else:
            raise IngestError(f"{path}: no such file or folder; check the ingest sources")
    return sorted(path.resolve() for path in files)


def _groups(files: list[Path]) -> list[list[Path]]:
    """Return files of one session: `<id>.jsonl` and whatever lies under `<id>/`."""
    stems = {path.with_suffix("") for path in files}
    groups: dict[Path, list[Path]] = {}
    for path in files:
        owner = next((above for above in path.parents if above in stems), path.with_suffix(""))
        groups.setdefault(owner, []).append(path)
    return [groups[owner] for owner in sorted(groups)]


def _last_cursors(batches: Iterable[TraceBatch]) -> dict[Path, ReadMark]:
    cursors: dict[Path, ReadMark] = {}
    for batch in sorted(batches, key=lambda b: b.key):
        for cursor in batch.cursors:
            cursors[cursor.path] = cursor
    return cursors


def _new_bytes(
    path: Path, cursors: Mapping[Path, ReadMark], settle_s: float, now: datetime
) -> tuple[SourceSlice, ReadMark] | None:
    """Return the slice of a file that no cursor covers, and the cursor after it."""
    try:
        stat = path.stat()
        last = cursors.get(path)
        age_s = now.timestamp() - stat.st_mtime
        # A clock that is a little ahead is no reason to take a file that is being written to.
        if abs(age_s) < settle_s:
            return None
        is_same = last is not None and (stat.st_size, stat.st_mtime_ns) == (
            last.size_bytes,
            last.mtime_ns,
        )
        ctime_ns = _settled_ctime(stat)
        if last is not None and is_same and ctime_ns and ctime_ns == last.ctime_ns:
            return None
        start, revision = 0, ""
        if last is not None:
            if tail_sha(path, last.offset) == last.tail_sha:
                start, revision = last.offset, last.revision
                if is_same:
                    return None
            else:
                revision = tail_sha(path, stat.st_size)[:6]
        end = _complete_end(path, stat.st_size)
        if end <= start:
            return None
        tail = tail_sha(path, end)
        cursor = ReadMark(
            path, end, stat.st_size, stat.st_mtime_ns, tail, revision, ctime_ns, start
        )
    except OSError as error:
        logger.warning("%s: cannot be read (%s); tried again next time", path, error.strerror)
        return None
    return SourceSlice(path, start, end, revision), cursor


def _settled_ctime(stat: os.stat_result) -> int:
    """Return when the file last changed, or 0 if a write to come could have the same time.

    On Windows this field is when the file was made.
    """
    is_settled = os.name == "posix" and time.time_ns() - stat.st_ctime_ns > _NS
    return stat.st_ctime_ns if is_settled else 0


def tail_sha(path: Path, offset: int) -> str:
    """Hash the bytes right before `offset`; nothing if the file is shorter."""
    with path.open("rb") as file:
        start = max(0, offset - _TAIL_BYTES)
        file.seek(start)
        tail = file.read(offset - start)
    if len(tail) < offset - start:
        return ""
    return hashlib.blake2b(tail, digest_size=8).hexdigest()


def _complete_end(path: Path, n_bytes: int) -> int:
    """End of the last whole line; a last line that is valid JSON counts as whole."""
    position, step = n_bytes, 1 << 16
    tail = b""
    with path.open("rb") as file:
        while position > 0:
            # Steps grow, so that a long line is not copied once per step.
            step = min(step + len(tail), position)
            position -= step
            file.seek(position)
            tail = file.read(step) + tail
            cut = tail.rfind(b"\n")
            if cut >= 0:
                position += cut + 1
                tail = tail[cut + 1 :]
                break
    if not tail.strip():
        return n_bytes
    try:
        json.loads(tail)
    except (ValueError, RecursionError):
        return position
    return n_bytes


def _packed(
    groups: list[list[tuple[SourceSlice, ReadMark]]], max_bytes: int, max_sessions: int
) -> list[list[tuple[SourceSlice, ReadMark]]]:
    """Return sessions in order, a new batch where a limit would be passed; none is ever empty."""
    packed: list[list[tuple[SourceSlice, ReadMark]]] = []
    n_bytes = n_sessions = 0
    for group in groups:
        size = sum((s.end or 0) - s.start for s, _ in group)
        if not packed or n_bytes + size > max_bytes or n_sessions + 1 > max_sessions:
            packed.append([])
            n_bytes = n_sessions = 0
        packed[-1].extend(group)
        n_bytes += size
        n_sessions += 1
    return packed


def _content_hash(members: list[tuple[SourceSlice, ReadMark]]) -> str:
    text = "\n".join(f"{s.path.name}:{s.start}:{s.end}:{c.tail_sha}" for s, c in members)
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=3).hexdigest()


def _manifest_path(root: Place, key: str) -> Place:
    return root / "batches" / f"{key}.json"


def write_manifest(batch: TraceBatch, root: Place) -> Place:
    """Write `<root>/batches/<key>.json`, unless it is there already.

    Raises:
        StorageError: the folder cannot be written, or another batch has this key.
    """
    path = _manifest_path(root, batch.key)
    text = batch.to_json()
    if path.exists():
        if path.read_text("utf-8") != text:
            raise StorageError(f"{path}: another batch has this key; manifests never change")
        return path
    with written_whole(path) as file:
        file.write(text.encode())
    return path


def read_manifest(key: str, root: Place) -> TraceBatch:
    """Return the batch that was written under `key`.

    Raises:
        StorageError: there is no such batch, or its manifest is not readable.
        IngestError: there is no such batch, or its manifest is damaged.
    """
    path = _manifest_path(root, key)
    try:
        return manifest_from(path.read_bytes(), path)
    except FileNotFoundError as error:
        raise IngestError(f"{path}: no such batch; discover it first") from error
    except StorageError:
        raise
    except OSError as error:
        raise IngestError(f"{path}: not a readable manifest ({error})") from error


class _Manifest(msgspec.Struct, frozen=True):
    """A batch at rest."""

    files: list[ReadMark]
    key: str
    version: int


def manifest_from(text: bytes, path: Place | str) -> TraceBatch:
    """Read a manifest; `path` is where it was found.

    Raises:
        IngestError: it is damaged, or of a version that is not known.
    """
    try:
        # A path takes longer to make than all the rest.
        manifest = msgspec.json.decode(text, type=_Manifest, dec_hook=lambda kind, name: kind(name))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise IngestError(f"{path}: not a readable manifest ({error})") from error
    if manifest.version != _VERSION:
        raise IngestError(f"{path}: manifest version {manifest.version}, expected {_VERSION}")
    slices = (SourceSlice(m.path, m.start, m.offset, m.revision) for m in manifest.files)
    return TraceBatch(manifest.key, tuple(slices), tuple(manifest.files))


def keep(batch: TraceBatch, folder: Path) -> None:
    """Store the bytes of a batch that are still in their files and not stored yet."""
    for source, cursor in zip(batch.slices, batch.cursors, strict=True):
        piece = _piece(source, folder)
        if piece.exists() or not is_there(source, cursor.tail_sha):
            continue
        try:
            with written_whole(piece, is_private=True) as out:
                _pack(source.path, out, source.start, source.end or 0)
        except (OSError, StorageError) as error:
            logger.warning("%s: no copy of the session was stored (%s)", source.path, error)


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


def _pack(path: Path, out: BinaryIO, start: int, end: int) -> None:
    """Write a range of a file as frames of zstandard: one after the other they are one file."""
    with path.open("rb") as file:
        file.seek(start)
        while start < end and (data := file.read(min(_FRAME_BYTES, end - start))):
            out.write(_CODEC.compress(data, asbytes=True))
            start += len(data)
