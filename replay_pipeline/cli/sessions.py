"""The commands that read session logs."""

from pathlib import Path
from typing import Annotated

import typer

from replay_pipeline.cli.app import app
from replay_pipeline.cli.console import (
    escape,
    out,
    print_report,
    progress_bars,
    show_ingest,
    show_look,
)
from replay_pipeline.cli.options import DataOption, JsonOption, SettingsOption
from replay_pipeline.cli.shared import exit_if_failed, load
from replay_pipeline.errors import ConfigError
from replay_pipeline.settings import redaction_salt


@app.command()
def look(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(help="Session files or folders. By default Claude Code's own folder."),
    ] = None,
    page: Annotated[
        Path, typer.Option("--page", help="The HTML file to write.", metavar="FILE")
    ] = Path("look.html"),
    review: Annotated[
        Path,
        typer.Option(
            "--review",
            help="The review page; where it is there, decisions link to their pairs.",
        ),
    ] = Path("data/review.html"),
    as_json: JsonOption = False,
) -> None:
    """See your sessions: what they did, what they cost, where they failed. Nothing is sent.

    Needs no key and no settings. The page is one file, redacted, with every session as a tree.
    """
    from replay_pipeline.look import look as look_at

    with progress_bars() as on_progress:
        overview = look_at(
            paths,
            page=page,
            review=review if review.exists() else None,
            salt=redaction_salt(),
            on_progress=on_progress,
        )
    print_report(overview, as_json=as_json, show=show_look)
    if not as_json:
        out.print(f"Every session as a tree: open {escape(str(page))} in a browser.")


@app.command()
def ingest(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Session files or folders, or hf://datasets/OWNER/NAME or hf://buckets/OWNER/NAME. "
            "By default Claude Code's own folder."
        ),
    ] = None,
    out_dir: Annotated[
        Path | None,
        typer.Option("--out", help="Write plain tables here, outside any data root."),
    ] = None,
    as_atif: Annotated[
        bool, typer.Option("--atif", help="With --out: ATIF trajectories instead of tables.")
    ] = False,
    data: DataOption = None,
    settings: SettingsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Sessions to states. Into the data root as batches, or with `--out` to one folder."""
    from replay_pipeline import ingesters
    from replay_pipeline.ingesters.atif_export import write_trajectories
    from replay_pipeline.stages import pipeline
    from replay_pipeline.stages.hub_sources import fetch_sessions
    from replay_pipeline.stages.summary import summarize

    if as_atif and out_dir is None:
        raise ConfigError("--atif needs --out: the folder for the trajectories")
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
            if as_atif:
                report["n_trajectories"] = write_trajectories(result, out_dir)
            else:
                ingesters.write_traces(result, out_dir)
        else:
            work = pipeline.Pipeline(loaded, on_progress=on_progress)
            before = work.receipts.stamps()
            work.ingest_new()
            report = summarize(work.receipts.all(since=before))
            report |= {"failed_batches": work.failed, "written_to": str(work.root.path)}
    print_report(report, as_json=as_json, show=show_ingest)
    exit_if_failed(report)
