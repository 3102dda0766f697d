"""`replay-pipeline`: every stage as one command, without Dagster.

Each group of commands has a module. Importing it adds the commands, in the order of `--help`.
"""

import atexit
import gc
import os
import signal
import sys
import traceback

# isort: off
from replay_pipeline.cli import whole, sessions, replay, pairs, dataset  # noqa: F401
from replay_pipeline.cli import workspaces, harness, around  # noqa: F401

# isort: on
from replay_pipeline.cli.app import app
from replay_pipeline.cli.console import err, escape
from replay_pipeline.errors import ConfigError, MissingDependencyError, ReplayPipelineError
from replay_pipeline.storage.processes import DEBUG, environment

__all__ = ["app", "main"]


def main() -> None:
    """Run the command line. An error prints one line and sets the exit code. `--debug` adds the stack."""
    _hear_stops()
    _put_debug_first()
    # At its end the interpreter looks through every object for garbage. That takes a while, and now and
    # then it crashed in one of a compiled package, after everything was done.
    atexit.register(gc.freeze)
    try:
        app(standalone_mode=True)
    except ReplayPipelineError as error:
        _show_stack()
        err.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        sys.exit(2 if isinstance(error, ConfigError | MissingDependencyError) else 1)
    except ModuleNotFoundError as error:
        from replay_pipeline.stages.views.doctor import in_one_line

        if (line := in_one_line(error)) is None:
            raise
        _show_stack()
        err.print(f"[bold red]error:[/] {escape(line)}", soft_wrap=True)
        sys.exit(2)
    except Stopped as stopped:
        err.print("stopped; what was paid for is kept, and the same command goes on from here")
        sys.stdout.flush()
        sys.stderr.flush()
        # All is closed. To take the interpreter apart as well would take seconds of a grace period.
        os._exit(stopped.status)


def _put_debug_first() -> None:
    """Let `--debug` stand anywhere before a `--`: people add it to the command that failed."""
    own, dashes, rest = sys.argv[1:], [], []
    if "--" in own:
        at = own.index("--")
        own, dashes, rest = own[:at], ["--"], own[at + 1 :]
    if "--debug" in own:
        own = ["--debug", *(word for word in own if word != "--debug")]
        sys.argv[1:] = [*own, *dashes, *rest]


def _show_stack() -> None:
    if environment(DEBUG):
        err.print(escape(traceback.format_exc()), soft_wrap=True, highlight=False)


class Stopped(SystemExit):
    """A request to stop the program. A replay still waits for the answers that are paid for."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


def _hear_stops() -> None:
    """Let SIGTERM do what Ctrl-C does, also where this process was started deaf to either.

    A shell starts background jobs deaf to SIGINT, and the kernel spares the first process of a
    container every signal that it does not listen to.
    """

    def stop(number: int, frame: object) -> None:
        del frame
        raise Stopped(128 + number)

    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, name):  # Windows has no SIGHUP
            signal.signal(getattr(signal, name), stop)
