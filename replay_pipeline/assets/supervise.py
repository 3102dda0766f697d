"""Run a program, and stop it with all its children: `python -P -m replay_pipeline.assets.supervise PROGRAM ...`.

The first process of a container must forward signals and adopt orphaned processes. Dagster's
servers do neither: when they stop, the runs that they started go on and spend money. This program
sends SIGTERM to every process below it, and ends after the last of them. A run ends when its paid
answers are stored. It never kills a process.

It loads little, because a first process ignores signals until it has set its handlers.
"""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Sequence

_POLL_S = 0.05
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main(command: Sequence[str]) -> int:
    """Run `command` until it and all its children have ended, and return its exit status.

    A second process does the work. It gets a signal to stop if this process is killed, because
    nobody else could tell it then.
    """
    asked: list[int] = []
    for number in _STOPS:
        signal.signal(number, lambda number, _: asked.append(number))
    here = os.getpid()
    if worker := os.fork():
        return _stand_before(worker, asked)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != here:  # killed in between
        return 128 + signal.SIGKILL
    return _supervise(command, asked)


def _stand_before(worker: int, asked: list[int]) -> int:
    while True:
        process, status = os.waitpid(worker, os.WNOHANG)
        if process:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        if asked:
            asked.clear()
            os.kill(worker, signal.SIGTERM)
        time.sleep(_POLL_S)


def _supervise(command: Sequence[str], asked: list[int]) -> int:
    import psutil  # noqa: PLC0415 -- after the handlers are set

    # Whatever this process was started deaf to, the program hears.
    first = os.posix_spawnp(command[0], list(command), os.environ, setsigdef=_STOPS)  # noqa: TID251
    status, told = 0, set[psutil.Process]()
    while (ended := _reap()) is not None:
        if first in ended:
            status = ended[first]
            asked.append(signal.SIGTERM)  # what it leaves behind ends as well
        if asked:
            # Again and again: a server may start one more before it hears.
            for process in set(psutil.Process().children(recursive=True)) - told:
                told.add(process)
                with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    process.terminate()
        if not ended:
            time.sleep(_POLL_S)
    return status


def _reap() -> dict[int, int] | None:
    """Exit statuses of the children that have ended since; `None` when none is left."""
    ended: dict[int, int] = {}
    while True:
        try:
            process, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended or None
        if not process:
            return ended
        code = os.waitstatus_to_exitcode(status)
        ended[process] = code if code >= 0 else 128 - code


def _prctl(what: int, value: int) -> None:
    """Ask Linux to hand on orphans, or to tell of a parent's end; elsewhere there is no such thing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(what, value, 0, 0, 0)


if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit("usage: python -P -m replay_pipeline.assets.supervise PROGRAM [ARGUMENT ...]")
    sys.exit(main(sys.argv[1:]))
