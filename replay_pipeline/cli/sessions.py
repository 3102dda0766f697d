"""The commands that read session logs."""

from datetime import date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from replay_pipeline.cli.app import DataOption, JsonOption, SettingsOption, app
from replay_pipeline.cli.bars import progress_bars
from replay_pipeline.cli.console import (
    near,
    next_step,
    nothing_read,
    print_report,
    show_ingest,
    show_look,
)
from replay_pipeline.cli.shared import exit_if_failed, load, open_pipeline
from replay_pipeline.errors import ConfigError
from replay_pipeline.settings import redaction_salt

if TYPE_CHECKING:
    from replay_pipeline.stages.pipeline import Pipeline
    from replay_pipeline.stages.project import OnProgress


@app.command()
def look(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Session files or folders. By default the data root, if there is one, else Claude "
            "Code's own folder.",
            metavar="PATHS",
        ),
    ] = None,
    data: DataOption = None,
    settings: SettingsOption = None,
    to: Annotated[
        Path | None,
        typer.Option(
            "--to", help="Folder of the page: by default `look`, in the data root.", metavar="DIR"
        ),
    ] = None,
    since: Annotated[
        datetime | None,
        typer.Option(help="The first day to show.", formats=["%Y-%m-%d"], metavar="DAY"),
    ] = None,
    until: Annotated[
        datetime | None,
        typer.Option(help="The last day to show.", formats=["%Y-%m-%d"], metavar="DAY"),
    ] = None,
    timezone: Annotated[
        str | None,
        typer.Option(
            help="Time zone of days and times, e.g. Europe/Berlin; by default that of this machine.",
            metavar="ZONE",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show your sessions: their actions, costs, and failures. Nothing is sent.

    You need no key and no settings. After a replay, the page also shows what the teachers would
    have done, pairs to mark, the dataset, and the training. The page is redacted, and works from
    disk.
    """
    from replay_pipeline.stages.pages.look import Days

    days = Days(
        timezone=timezone,
        since=since.date() if since else date.min,
        until=until.date() if until else date.max,
    )
    with progress_bars() as on_progress:
        work = None if paths else _root_with_batches(settings, data, on_progress)
        if work is not None:
            from replay_pipeline.stages.views.page import page_of, write_page_of

            place = to or page_of(work.settings).parent
            overview = write_page_of(work, place, days=days)
        else:
            from replay_pipeline.stages.pages.look import look as look_at

            place = to or Path("look")
            overview = look_at(
                paths, to=place, days=days, salt=redaction_salt(), on_progress=on_progress
            )  # fmt: skip
    print_report(overview, as_json=as_json, show=show_look)
    if not as_json:
        next_step(f"open {near(str(place / 'index.html'))} in a browser")


def _root_with_batches(
    settings: Path | None, data: Path | None, on_progress: "OnProgress"
) -> "Pipeline | None":
    """Open the data root, if it has sessions."""
    loaded = load(settings, data)
    if isinstance(loaded.data_dir, Path) and not (loaded.data_dir / "batches").is_dir():
        return None
    work = open_pipeline(settings, data, on_progress=on_progress)
    return work if work.batches() else None


@app.command()
def ingest(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Session files or folders, or hf://datasets/OWNER/NAME. "
            "By default Claude Code's own folder.",
            metavar="PATHS",
        ),
    ] = None,
    out_dir: Annotated[
        Path | None,
        typer.Option(
            "--out", help="Write plain tables here, outside any data root.", metavar="DIR"
        ),
    ] = None,
    data: DataOption = None,
    settings: SettingsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Turn sessions into states, as batches in the data root or, with `--out`, as tables in one folder."""
    from replay_pipeline import ingesters
    from replay_pipeline.stages import pipeline
    from replay_pipeline.stages.receipts import now
    from replay_pipeline.stages.views.summary import summarize
    from replay_pipeline.stages.work.discovery import fetch_sessions

    loaded = load(settings, data, sources=paths)
    with progress_bars() as on_progress:
        if out_dir is not None:
            if not paths:
                raise ConfigError("--out needs the sessions to read: name files or folders")
            result = ingesters.ingest(
                [fetch_sessions(path, loaded.local_dir()) for path in paths],
                redact=loaded.ingest.is_redacted,
                hash_project=loaded.ingest.is_project_hashed,
                salt=redaction_salt(),
                on_progress=on_progress,
            )
            report = result.report.to_json() | {"written_to": str(out_dir)}
            ingesters.write_traces(result, out_dir)
        else:
            work = pipeline.Pipeline(loaded, on_progress=on_progress)
            before = now()
            work.ingest_new()
            report = summarize(list(work.receipts.all(since=before)))
            report |= {"failed_batches": work.failed, "written_to": str(work.root.path)}
    print_report(report, as_json=as_json, show=show_ingest)
    exit_if_failed(report)
    if nothing_read(report):
        raise typer.Exit(1)
