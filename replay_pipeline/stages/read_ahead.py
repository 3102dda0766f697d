"""Batches that are read ahead by other processes, one batch each.

What comes out is what reading them here, one after the other, gives: whoever asks for a result
checks that no decision in it belongs to another batch, and reads the batch again if one does.
"""

import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue
from types import TracebackType
from typing import IO, Self, cast

from replay_pipeline.ingesters import IngestResult, TraceBatch, ingest
from replay_pipeline.processes import python, start_environment

logger = logging.getLogger(__name__)

WORTH_BYTES = 64_000_000
"""Of logs: a process takes as long to start as it takes to read some ten megabytes."""


class ReadAhead:
    """Reads batches in processes of their own, a few ahead of the one that is asked for.

    Args:
        batches: what is read, in the order in which it will be asked for.
        redact: whether texts are redacted.
        hash_project: whether the project folder becomes a hash.
        salt: what makes the placeholders of this installation unlike others.
        n_processes: how many; by default as many as this process may use cores.
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
        self._running: dict[str, Future[IngestResult]] = {}

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

    def result(self, batch: TraceBatch) -> IngestResult | None:
        """Give what was read of a batch; `None` if it was not, or could not be read."""
        self._waiting.pop(batch.key, None)
        future = self._running.pop(batch.key, None)
        self._go_on()
        if future is None:
            return None
        try:
            return future.result()
        except Exception as error:  # what is wrong is found again, and told, by reading it here
            logger.info("%s: not read ahead (%r)", batch.key, error)
            return None

    def _go_on(self) -> None:
        """Start the next batches; not all, since their tables wait in memory."""
        while self._waiting and len(self._running) <= self._n:
            key = next(iter(self._waiting))
            self._running[key] = self._pool.submit(self._read, self._waiting.pop(key))

    def _read(self, batch: TraceBatch) -> IngestResult:
        process = self._idle.get()
        try:
            pickle.dump((batch.slices, self._options), _pipe(process.stdin))
            _pipe(process.stdin).flush()
            answer = pickle.load(_pipe(process.stdout))
        finally:
            self._idle.put(process)
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return cast("IngestResult", answer)


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


def _serve() -> None:
    """Read the batches that are named on standard input, until it ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    sys.stdout = sys.stderr  # whatever else is printed is no answer
    while True:
        try:
            slices, options = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer: IngestResult | str = ingest(slices, **options)
        except Exception as error:
            answer = repr(error)
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    _serve()
