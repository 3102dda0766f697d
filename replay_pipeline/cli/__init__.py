"""`replay-pipeline`: every stage as one command, without Dagster.

One module a group of commands; importing it adds them to the program, in the order of `--help`.
"""

import sys

# isort: off
from replay_pipeline.cli import whole, sessions, replay, pairs, dataset, model, around  # noqa: F401

# isort: on
from replay_pipeline.cli.app import app
from replay_pipeline.cli.console import err, escape
from replay_pipeline.errors import ConfigError, ReplayPipelineError

__all__ = ["app", "main"]


def main() -> None:
    """Run the command line; a user's mistake ends with one line and a code, never a trace."""
    try:
        app(standalone_mode=True)
    except ReplayPipelineError as error:
        err.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:
        err.print("stopped; what was paid for is kept, and the same command goes on from here")
        sys.exit(130)
