"""Read batches ahead in other processes, one batch per process.

The result equals reading the batches here one after the other. The caller checks that no decision
in a result belongs to another batch, and otherwise reads the batch again.
"""

import json
import logging
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import IO, Any, Self

import msgspec

from replay_pipeline.errors import ReplayPipelineError
from replay_pipeline.ingesters import IngestResult, TraceBatch, ingest, write_traces
from replay_pipeline.ingesters.base import SourceSlice
from replay_pipeline.ingesters.conversations import KnownConversation
from replay_pipeline.ingesters.corpus import IngestReport
from replay_pipeline.processes import python, start_environment
from replay_pipeline.storage.schemas import INGESTED
from replay_pipeline.storage.tables import WrittenTable

logger = logging.getLogger(__name__)

WORTH_BYTES = 64_000_000
"""Smallest size of logs for a process. Starting one takes as long as reading some ten megabytes."""


class ReadAhead:
    """The readers of batches, which stay a few batches ahead of the caller.

    Args:
        batches: the batches, in the order in which the caller wants them.
        redact: whether texts are redacted.
        hash_project: whether to replace the project folder by a hash.
        salt: makes the placeholders of this installation different from others.
        n_processes: number of processes. By default, one for each usable core.
    """

    def __init__(
        self,
        batches: Iterable[TraceBatch],
        *,
        redact: bool,
        hash_project: bool,
        salt: str,
        n_processes: int | None = None,
    ) -> None:
        self._waiting = {batch.key: batch for batch in batches}
        self._options = {"redact": redact, "hash_project": hash_project, "salt": salt}
        n_bytes = sum(batch.n_bytes for batch in self._waiting.values())
        n_cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
        self._n = min(n_processes or n_cores, len(self._waiting))
        if self._n < 2 or n_bytes < WORTH_BYTES:
            self._n, self._waiting = 0, {}
        self._pool = ThreadPoolExecutor(max(1, self._n))
        self._idle: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()
        self._started: list[subprocess.Popen[bytes]] = []
        self._running: dict[str, Future[Path | None]] = {}
        self._folder = TemporaryDirectory()

    def __enter__(self) -> Self:
        for _ in range(self._n):
            process = subprocess.Popen(
                python("replay_pipeline.stages.read_ahead"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=start_environment(),
            )
            self._started.append(process)
            self._idle.put(process)
        self._go_on()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:  # nobody waits for what is being read
            for process in self._started:
                process.kill()
        self._pool.shutdown(cancel_futures=True)
        for process in self._started:
            with suppress(BrokenPipeError), process:
                pass
        self._folder.cleanup()

    def result(self, batch: TraceBatch) -> IngestResult | None:
        """Return the rows of a batch, or None if they weren't or couldn't be read."""
        self._waiting.pop(batch.key, None)
        future = self._running.pop(batch.key, None)
        self._go_on()
        folder = future.result() if future is not None else None
        return None if folder is None else _result_in(folder)

    def _go_on(self) -> None:
        """Start the next batches; not all, since their tables wait in memory."""
        while self._waiting and len(self._running) <= self._n:
            key = next(iter(self._waiting))
            self._running[key] = self._pool.submit(self._read, self._waiting.pop(key))

    def _read(self, batch: TraceBatch) -> Path | None:
        """Have a batch read into a folder; `None` if that failed: reading it here tells why."""
        folder = Path(self._folder.name) / batch.key
        slices = [[str(s.path), s.start, s.end, s.revision] for s in batch.slices]
        process = self._idle.get()
        try:
            question = {"slices": slices, "into": str(folder), "options": self._options}
            _pipe(process.stdin).write(json.dumps(question).encode() + b"\n")
            _pipe(process.stdin).flush()
            is_read = _pipe(process.stdout).readline() == _DONE
        except OSError:
            is_read = False
        finally:
            self._idle.put(process)
        if not is_read:
            logger.info("%s: could not be read ahead", batch.key)
        return folder if is_read else None


class _Conversations(msgspec.Struct):
    of: Mapping[str, str]
    by_name: Mapping[str, KnownConversation]


_DONE = b"done\n"


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


def _result_in(folder: Path) -> IngestResult:
    parts = {name: WrittenTable(folder / f"{name}.parquet", name) for name in INGESTED}
    fields: dict[str, Any] = json.loads((folder / "report.json").read_text())
    fields |= {name: Counter(fields[name]) for name in ("skipped_files", "outcomes", "usage")}
    decided = frozenset((folder / "decided").read_text().split())
    told = msgspec.json.decode((folder / "conversations.json").read_bytes(), type=_Conversations)
    return IngestResult(
        parts=parts,
        report=IngestReport(**fields),
        decided=decided,
        conversation_of=told.of,
        conversations=told.by_name,
    )


def _serve() -> None:
    """Read the batches that are named on standard input, until it ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    sys.stdout = sys.stderr  # whatever else is printed is no answer
    for line in sys.stdin.buffer:
        question = json.loads(line)
        folder = Path(question["into"])
        slices = [
            SourceSlice(Path(path), start, end, revision)
            for path, start, end, revision in question["slices"]
        ]
        try:
            result = ingest(slices, **question["options"])
            write_traces(result, folder)
            (folder / "decided").write_text("\n".join(sorted(result.decided)))
            told = _Conversations(result.conversation_of, result.conversations)
            (folder / "conversations.json").write_bytes(msgspec.json.encode(told))
            answers.write(_DONE)
        except (ReplayPipelineError, OSError) as error:
            answers.write(repr(str(error)).encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    _serve()
