"""The commands that make the dataset, change it, and train on it."""

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from replay_pipeline.cli.app import (
    BatchOption,
    DataOption,
    JsonOption,
    SettingsOption,
    TeachersOption,
    app,
)
from replay_pipeline.cli.bars import progress_bars
from replay_pipeline.cli.console import err, print_report, show_normalize, show_publish, show_train
from replay_pipeline.cli.shared import chosen, given, open_pipeline
from replay_pipeline.errors import ConfigError
from replay_pipeline.storage.store import as_path


@app.command()
def normalize(
    data: DataOption = None,
    settings: SettingsOption = None,
    batch: BatchOption = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            help="`agent`, `default`, `tool_calls`, `strict`, `lint`, `none` or a YAML file.",
            metavar="NAME",
        ),
    ] = None,
    allow_operator: Annotated[
        list[str] | None,
        typer.Option(
            help="Let the recipe use this operator, which may run programs; can be repeated.",
            metavar="NAME",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Keep the pairs that are fit to publish, and store the others separately, each with its reason."""
    changes = given("normalize", recipe=recipe, allow_operators=allow_operator)
    work = open_pipeline(settings, data, changes=changes)
    reports = {key: work.normalize(key).report for key in chosen(work, batch)}
    print_report(reports, as_json=as_json, show=show_normalize)


@app.command()
def publish(
    data: DataOption = None,
    settings: SettingsOption = None,
    teachers: TeachersOption = None,
    to: Annotated[
        Path | None,
        typer.Option("--to", help="Dataset folder or URL.", parser=as_path, metavar="DIR"),
    ] = None,
    repo: Annotated[
        str | None, typer.Option(help="Hub dataset `owner/name`; needs `HF_TOKEN`.", metavar="REPO")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write the dataset folder, and push it to the Hub if you name a repository."""
    changes = given("publish", folder=to, repo_id=repo)
    with progress_bars() as on_progress:
        work = open_pipeline(
            settings, data, teachers=teachers, changes=changes, on_progress=on_progress
        )
        report = work.publish().report
    print_report(report, as_json=as_json, show=show_publish)


@app.command()
def retract(
    session: Annotated[
        list[str] | None,
        typer.Option("--session", help="Id of a session; can be repeated.", metavar="ID"),
    ] = None,
    batch: Annotated[
        list[str] | None,
        typer.Option("--batch", help="A whole trace batch; can be repeated.", metavar="KEY"),
    ] = None,
    data: DataOption = None,
    settings: SettingsOption = None,
    repo: Annotated[
        str | None,
        typer.Option(help="Also remove them from this Hub dataset, `owner/name`.", metavar="REPO"),
    ] = None,
    erase: Annotated[
        bool, typer.Option(help="Forget the history of the Hub dataset too. Can't be undone.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove sessions or batches from the dataset for good. They are never published again.

    The pipeline's own tables and the sessions stay on this machine.
    """
    work = open_pipeline(settings, data, changes=given("publish", repo_id=repo))
    if (session or batch) and not yes:
        named = f"{len(session or ())} sessions and {len(batch or ())} batches"
        if not sys.stdin.isatty():
            raise ConfigError(f"retracting {named} can't be undone: pass --yes to confirm")
        if not typer.confirm(f"Take {named} out of {work.settings.dataset_dir()} for good?"):
            raise ConfigError("stopped; nothing was changed")
    report = work.retract(session_ids=session or (), batches=batch or (), erase=erase)
    print_report(report.to_json(), as_json=as_json, show=partial(show_publish, title="Retracted"))
    if report.not_found:
        err.print(
            f"not in the dataset: {', '.join(report.not_found)}. If the name is wrong, what you meant is "
            "still published; `replay-pipeline look` shows the ids of sessions",
            markup=False,
            soft_wrap=True,
        )
        raise typer.Exit(1)


@app.command()
def train(
    data: DataOption = None,
    settings: SettingsOption = None,
    config: Annotated[
        Path | None, typer.Option(help="The trainer's YAML file.", metavar="FILE")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Train on the published dataset."""
    with progress_bars() as on_progress:
        work = open_pipeline(
            settings, data, changes=given("train", config=config), on_progress=on_progress
        )
        report = work.train().report
    print_report(report, as_json=as_json, show=show_train)
