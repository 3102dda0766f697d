"""The program: its groups of commands, and options that several commands share."""

import importlib.metadata
import logging
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.logging import RichHandler
from typer.core import TyperArgument, TyperOption

from replay_pipeline.cli.console import PrintableFormatter, err, out
from replay_pipeline.storage.processes import set_debug
from replay_pipeline.storage.store import as_path

_with_type = TyperOption.display_type


def _type_in_help(self: TyperOption, ctx: Any) -> str:
    """Return the type of an option that takes a value; a flag takes none, so `<bool>` says nothing."""
    return "" if self.is_flag else _with_type(self, ctx)


def _no_type(self: TyperArgument, ctx: Any) -> str:  # noqa: ARG001
    """Return nothing for an argument: its help says what it takes, and `<list[Path]>` doesn't."""
    return ""


# Typer makes its options itself, the one of `--help` among them, and takes no class of ours for them.
TyperOption.display_type = _type_in_help
TyperArgument.display_type = _no_type

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
    help="Record and list the harness of clients: the prompt and tools around a conversation.",
)
app.add_typer(teachers_app, name="teachers")
app.add_typer(pairs_app, name="pairs")
app.add_typer(workspace_app, name="workspace")
app.add_typer(harness_app, name="harness")

DataOption = Annotated[
    Path | None,
    typer.Option(
        "--data",
        help="Data root: a folder, or a URL such as `s3://bucket/root`. By default `REPLAY_DATA`, "
        "else `data`.",
        metavar="DIR",
        parser=as_path,
    ),
]
SettingsOption = Annotated[
    Path | None,
    typer.Option(
        "--settings",
        help="TOML settings. By default `REPLAY_SETTINGS`, else `settings.toml` in the data root.",
        metavar="FILE",
    ),
]
TeachersOption = Annotated[
    str | None,
    typer.Option(
        "--teachers",
        help="The teachers to ask: `openrouter`, `frontier`, `sample` (recorded answers for the sample), "
        "or `rehearsal` (made-up answers for your own sessions, without a key). By default "
        "`REPLAY_TEACHERS`, else the settings.",
        metavar="WHO",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]
BatchOption = Annotated[
    list[str] | None,
    typer.Option("--batch", help="Only this batch; can be repeated.", metavar="KEY"),
]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before paying.")]
BudgetOption = Annotated[
    float | None,
    typer.Option("--budget", help="Hard ceiling for this run, in US dollars.", metavar="USD"),
]


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
