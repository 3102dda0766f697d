"""Processes of their own that need not load torch and TRL anew: forked by a server that has."""

import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping
from functools import cache
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from tests.support.forked import LOADED


class Preloaded:
    """A process that calls a function: its result is the exit status, as for `sys.exit`.

    Args:
        call: a function of a module.
        arguments: what it is called with.
        errors: the file that takes what the process writes to standard error.
        environment: variables that are put over those of this process.
    """

    def __init__(
        self,
        call: Callable[..., object],
        *arguments: Any,
        errors: Path,
        environment: Mapping[str, str],
    ) -> None:
        self._errors = errors
        variables = {**os.environ, **environment}
        target = (call, arguments, str(errors), variables)
        self._process = _server().Process(target=_run, args=target)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout: float) -> tuple[int | None, str]:
        """Wait for the end. Gives the exit status and what was written to standard error."""
        self._process.join(timeout)
        return self._process.exitcode, self._errors.read_text()


@cache
def _server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(LOADED["trainer"]))
    return context


def _run(
    call: Callable[..., object], arguments: tuple[Any, ...], errors: str, variables: dict[str, str]
) -> None:
    os.environ.clear()
    os.environ.update(variables)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(call(*arguments))
