"""The program: its groups of commands, and options that all commands share."""

import importlib.metadata
import logging
from typing import Annotated, Any

import typer
from rich.logging import RichHandler
from typer.core import TyperOption

from replay_pipeline.cli.console import PrintableFormatter, err, out
from replay_pipeline.processes import set_debug

_with_type = TyperOption.display_type


def _type_in_help(self: TyperOption, ctx: Any) -> str:
    """Return the type of an option that takes a value; a flag takes none, so `<bool>` says nothing."""
    return "" if self.is_flag else _with_type(self, ctx)


# Typer makes its options itself, the one of `--help` among them, and takes no class of ours for them.
TyperOption.display_type = _type_in_help

app = typer.Typer(
    name="replay-pipeline",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Turn Claude Code sessions into a preference dataset, and train on it.\n\n"
    "Sessions → states → teacher answers → pairs → normalized pairs → dataset → model. "
    "`run` does all of it; each other command does one step of it.",
)
teachers_app = typer.Typer(no_args_is_help=True, help="Look at the teachers, or serve local ones.")
pairs_app = typer.Typer(invoke_without_command=True, help="Extract pairs, and look at them.")
workspace_app = typer.Typer(
    no_args_is_help=True, help="Look at the files behind states, as they were."
)
harness_app = typer.Typer(
    no_args_is_help=True,
    help="Learn and show the harness of clients: the prompt and tools around a conversation.",
)
app.add_typer(teachers_app, name="teachers")
app.add_typer(pairs_app, name="pairs")
app.add_typer(workspace_app, name="workspace")
app.add_typer(harness_app, name="harness")


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        out.print(importlib.metadata.version("replay-pipeline"), highlight=False)
        raise typer.Exit


def _set_debug(is_wanted: bool) -> None:
    if is_wanted:
        set_debug()


@app.callback()
def _every_command(
    version: Annotated[  # noqa: ARG001
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what happens.")] = False,
    debug: Annotated[  # noqa: ARG001
        bool,
        typer.Option(
            "--debug",
            callback=_set_debug,
            is_eager=True,
            help="Show the stack below an error. Works after the command's name as well.",
        ),
    ] = False,
) -> None:
    handler = RichHandler(console=err, show_path=False)
    handler.setFormatter(PrintableFormatter("%(message)s"))
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, handlers=[handler])
