"""The commands that take sessions through every stage."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from replay_pipeline.cli.app import (
    BudgetOption,
    DataOption,
    JsonOption,
    SettingsOption,
    TeachersOption,
    YesOption,
    app,
)
from replay_pipeline.cli.bars import progress_bars
from replay_pipeline.cli.console import (
    near,
    next_step,
    print_report,
    say,
    show_pairs,
    show_ranked,
    show_run,
    show_summary,
)
from replay_pipeline.cli.shared import (
    confirm,
    exit_if_failed,
    exit_if_most_failed,
    load,
    prepare_demo,
    ranked_row,
)
from replay_pipeline.storage.store import as_path

if TYPE_CHECKING:
    from replay_pipeline.stages.pipeline import Pipeline
    from replay_pipeline.stages.project import OnProgress


@app.command()
def run(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Session files or folders. By default Claude Code's own folder.", metavar="PATHS"
        ),
    ] = None,
    data: DataOption = None,
    settings: SettingsOption = None,
    teachers: TeachersOption = None,
    max_total_usd: BudgetOption = None,
    train: Annotated[bool, typer.Option(help="Train on the dataset at the end.")] = True,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Take all sessions through every stage. Only new work runs, and you pay for nothing twice."""
    from replay_pipeline.stages import pipeline
    from replay_pipeline.stages.receipts import now
    from replay_pipeline.stages.views import doctor

    loaded = load(settings, data, max_total_usd=max_total_usd, sources=paths, teachers=teachers)
    with progress_bars() as on_progress:
        work = pipeline.Pipeline(loaded, on_progress=on_progress)
        doctor.require_extras(loaded, with_training=train)
        work.check_settings()
        began = now()
        work.ingest_new()
    confirm(work, yes=yes)
    with progress_bars() as on_progress:
        summary = pipeline.run(loaded, with_training=train, since=began, on_progress=on_progress)
    print_report(summary, as_json=as_json, show=show_run)
    exit_if_failed(summary)
    exit_if_most_failed(summary["open"])


@app.command()
def demo(
    data: Annotated[
        Path, typer.Option("--data", help="Folder of the demo.", parser=as_path, metavar="DIR")
    ] = Path("demo"),
    model: Annotated[
        Path | None,
        typer.Option(
            "--model",
            help="Folder of a pretrained model to train by adapters, instead of a tiny one.",
            exists=True,
            file_okay=False,
            metavar="DIR",
        ),
    ] = None,
    until_pairs: Annotated[
        bool,
        typer.Option(
            "--until-pairs",
            help="Stop when pairs are there, which needs neither Dagster nor a trainer. The same "
            "command without it goes on from here.",
        ),
    ] = False,
    yes: YesOption = False,
) -> None:
    """Run the whole product on the bundled sample, under Dagster.

    You need no key, no GPU, and no network: a local server plays the teachers from recorded
    answers. With `OPENROUTER_API_KEY` and `REPLAY_TEACHERS=openrouter`, the same command asks real
    teachers, after it shows the cost.
    """
    from replay_pipeline.stages.views.page import write_page_of
    from replay_pipeline.stages.views.summary import summary_of

    if until_pairs:
        _show_pairs_of_demo(data, model, yes=yes)
        return
    from replay_pipeline.assets.code_location import run_jobs
    from replay_pipeline.stages.views.page import page_of
    from replay_pipeline.storage.store import written_whole

    with progress_bars() as on_progress:
        work, began = _open_demo(data, model, on_progress)
    if work.settings.played is None:
        confirm(work, yes=yes)
    with progress_bars() as on_progress:
        run_jobs(work, on_progress=on_progress)
    (data / _BEGAN).unlink(missing_ok=True)
    summary = summary_of(work, since=began)
    with written_whole(data / "report.json") as file:
        file.write(json.dumps(summary, indent=1).encode())
    write_page_of(work)
    show_summary(summary)
    say(
        f"Everything is in {data}: the page {near(str(page_of(work.settings)))}, the figures in report.json."
    )
    next_step(f"`replay-pipeline ui --data {data}` opens the page, beside Dagster")


_BEGAN = "began.txt"
"""When a demo began that stopped at the pairs: what it did counts as done now."""


def _open_demo(data: Path, model: Path | None, on_progress: "OnProgress") -> "tuple[Pipeline, str]":
    """Set the demo up and read its sessions. Gives the time when it began, too."""
    from replay_pipeline.stages.pipeline import Pipeline
    from replay_pipeline.stages.receipts import now

    prepare_demo(data, model)
    work = Pipeline(load(data / "settings.toml", data), on_progress=on_progress)
    noted = data / _BEGAN
    began = noted.read_text("utf-8") if noted.exists() else now()
    work.ingest_new()
    return work, began


def _show_pairs_of_demo(data: Path, model: Path | None, *, yes: bool) -> None:
    from replay_pipeline.stages.views.page import page_of, write_page_of
    from replay_pipeline.stages.views.summary import ranked_pairs
    from replay_pipeline.storage.store import written_whole

    with progress_bars() as on_progress:
        work, began = _open_demo(data, model, on_progress)
    with written_whole(data / _BEGAN) as file:
        file.write(began.encode())
    confirm(work, yes=yes)
    with progress_bars() as on_progress:
        work.on_progress = on_progress
        replay = work.replay_within(batches=work.batches())
        for batch in work.batches():
            replay(batch)
        reports = {batch: work.pairs(batch).report for batch in work.batches()}
    show_pairs(reports, is_last=False)
    show_ranked({"pairs": [ranked_row(pair) for pair in ranked_pairs(work)[:5]]}, is_last=False)
    write_page_of(work)
    next_step(f"open {near(str(page_of(work.settings)))} in a browser: all of them side by side")
