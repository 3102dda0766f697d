"""The commands that look at the files behind states."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from replay_pipeline.cli.app import DataOption, JsonOption, SettingsOption, workspace_app
from replay_pipeline.cli.console import out, print_report, show_workspace
from replay_pipeline.cli.shared import load

if TYPE_CHECKING:
    from replay_pipeline.stages.work.workspaces import Workspaces

SourcesOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--sessions",
        help="A folder or file of sessions; can be repeated. By default those of the settings.",
        metavar="PATH",
    ),
]
RepositoriesOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--repository",
        help="The git repository of the project; can be repeated. By default it is found from "
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
    from replay_pipeline.stages.work.workspaces import Workspaces

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
    """Show the files at a state: the commit it was at, and the differences from it."""
    report = _workspaces(settings, data, sessions, repository).show(state)
    print_report(report, as_json=as_json, show=show_workspace)


@workspace_app.command("serve")
def workspace_serve(
    dataset: Annotated[
        str | None,
        typer.Option(
            help="Offer the states of this dataset instead: a folder or Hub id.", metavar="DATASET"
        ),
    ] = None,
    data: DataOption = None,
    settings: SettingsOption = None,
    sessions: SourcesOption = None,
    repository: RepositoriesOption = None,
    host: Annotated[str, typer.Option(help="Where to listen.", metavar="ADDRESS")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free port.", metavar="PORT")] = 8000,
    limit: Annotated[int, typer.Option(min=1, help="How many states to offer.", metavar="N")] = 200,
    max_calls: Annotated[
        int, typer.Option(min=1, help="Most calls in an episode.", metavar="N")
    ] = 32,
) -> None:
    """Offer states as an environment that OpenEnv's clients speak to.

    With `--dataset` they are the recorded states of a published dataset, and the reward is the agreement
    with the consensus. Else they are states of sessions, and the reward is the project's check. This needs
    `workspaces.execute = "commands"` and `workspaces.checks`, and anyone who reaches the address can run
    commands in the sandbox: bind it to a network you trust.
    """
    from replay_pipeline.stages.work.environment import serve_checked, serve_recorded

    def on_ready(address: str) -> None:
        out.print(address, highlight=False)

    if dataset is not None:
        serve_recorded(dataset, host=host, port=port, on_ready=on_ready)
        return
    options = load(settings, data)
    work = _workspaces(settings, data, sessions, repository)
    serve_checked(
        work, options.workspaces, host=host, port=port, limit=limit, max_calls=max_calls,
        on_ready=on_ready,
    )  # fmt: skip
