"""The command that trains."""

from pathlib import Path
from typing import Annotated

import typer

from replay_pipeline.cli.app import app
from replay_pipeline.cli.bars import progress_bars
from replay_pipeline.cli.console import print_report, show_train
from replay_pipeline.cli.options import DataOption, JsonOption, SettingsOption
from replay_pipeline.cli.shared import open_pipeline


@app.command()
def train(
    data: DataOption = None,
    settings: SettingsOption = None,
    config: Annotated[Path | None, typer.Option(help="The trainer's YAML file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Train on the published dataset."""
    changes = {} if config is None else {"train": {"config": config}}
    with progress_bars() as on_progress:
        work = open_pipeline(settings, data, changes=changes, on_progress=on_progress)
        report = work.train().report
    print_report(report, as_json=as_json, show=show_train)
