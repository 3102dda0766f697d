"""The commands that look at the files behind states."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from replay_pipeline.cli.app import workspace_app
from replay_pipeline.cli.console import print_report, show_fidelity, show_workspace
from replay_pipeline.cli.options import DataOption, JsonOption, SettingsOption
from replay_pipeline.cli.shared import load

if TYPE_CHECKING:
    from replay_pipeline.stages.workspaces import Workspaces

SourcesOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--sessions",
        help="A folder or file of sessions; may be given again. By default those of the settings.",
        metavar="PATH",
    ),
]
RepositoriesOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--repository",
        help="The git repository of the project; may be given again. By default it is found from "
        "the folders that sessions name.",
        metavar="DIR",
    ),
]


def _workspaces(
    settings: Path | None,
    data: Path | None,
    sessions: list[Path] | None,
    repository: list[Path] | None,
) -> "Workspaces":
    from replay_pipeline.stages.workspaces import Workspaces

    return Workspaces(load(settings, data), sources=sessions or (), repositories=repository or ())


@workspace_app.command("show")
def workspace_show(
    state: Annotated[str, typer.Argument(help="Id of the state, or its first characters.")],
    data: DataOption = None,
    settings: SettingsOption = None,
    sessions: SourcesOption = None,
    repository: RepositoriesOption = None,
    as_json: JsonOption = False,
) -> None:
    """The files at a state: the commit it stood at, and what was different from it."""
    report = _workspaces(settings, data, sessions, repository).show(state)
    print_report(report, as_json=as_json, show=show_workspace)


@workspace_app.command("fidelity")
def workspace_fidelity(
    data: DataOption = None,
    settings: SettingsOption = None,
    sessions: SourcesOption = None,
    repository: RepositoriesOption = None,
    before_only: Annotated[
        bool,
        typer.Option(
            "--before-only", help="Use only what the log shows before each call, not what follows."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """How many recorded calls the rebuilt files reproduce, each without its own answer."""
    work = _workspaces(settings, data, sessions, repository)
    report = work.fidelity(is_later_used=not before_only)
    print_report(report, as_json=as_json, show=show_fidelity)
