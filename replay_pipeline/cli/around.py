"""The commands that inspect a data root, and open Dagster on it."""

import os
from pathlib import Path
from typing import Annotated

import typer

from replay_pipeline.cli.app import app
from replay_pipeline.cli.bars import progress_bars
from replay_pipeline.cli.console import (
    err,
    escape,
    out,
    print_report,
    show_findings,
    show_stale,
    show_status,
    show_verify,
)
from replay_pipeline.cli.options import DataOption, JsonOption, SettingsOption, TeachersOption
from replay_pipeline.cli.shared import load, open_pipeline, prepare_demo


@app.command()
def status(
    data: DataOption = None,
    settings: SettingsOption = None,
    teachers: TeachersOption = None,
    stale: Annotated[
        bool,
        typer.Option(
            "--stale",
            help="List the stale results, the reasons, and the cost to redo them.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Report finished work, its cost, and open work."""
    if stale:
        work = open_pipeline(settings, data, teachers=teachers)
        print_report(work.stale(), as_json=as_json, show=show_stale)
    else:
        from replay_pipeline.stages.overview import Overview
        from replay_pipeline.stages.status import status_of

        report = status_of(Overview(load(settings, data, teachers=teachers)))
        print_report(report, as_json=as_json, show=show_status)


@app.command()
def verify(
    data: DataOption = None, settings: SettingsOption = None, as_json: JsonOption = False
) -> None:
    """Check that no table, shard of the dataset, or ledger has changed since it was written.

    The command reads the whole data root and changes nothing. The exit code is 1 if it finds damage.
    """
    report = open_pipeline(settings, data).verify()
    print_report(report, as_json=as_json, show=show_verify)
    if report["damaged"]:
        raise typer.Exit(1)


@app.command()
def doctor(
    data: DataOption = None,
    settings: SettingsOption = None,
    probe: Annotated[
        bool,
        typer.Option(
            "--probe",
            help="Also ask each teacher three tiny questions: do tools reach it, does its cache hit,  "
            "does its price match? Says first what that costs.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check this machine and these settings: packages, keys, teachers, disk, folders."""
    work = open_pipeline(settings, data)
    findings = work.examine()
    if probe:
        cost = work.probe_estimate()
        err.print(
            f"asking {len(cost.teachers)} teachers three questions each, for about "
            f"${cost.expected_usd:.4f} (at most ${cost.bound_usd * 1.5:.4f})"
        )
        findings += work.probe()
    print_report({"findings": findings}, as_json=as_json, show=show_findings)
    if any(not finding["ok"] for finding in findings):
        raise typer.Exit(1)


@app.command()
def trust(
    file: Annotated[Path, typer.Argument(help="A settings file.", metavar="FILE")],
) -> None:
    """Trust a settings file in the current folder, as it is now.

    The command shows the contents first. After each change, you have to trust the file again.
    """
    from replay_pipeline.settings import config_dir
    from replay_pipeline.storage.trust import trust_file

    data = trust_file(file, folder=config_dir())
    out.print(escape(data.decode("utf-8", "replace")), highlight=False, soft_wrap=True)
    out.print(f"{escape(str(file))} is trusted as it is now.")


@app.command()
def ui(
    data: DataOption = None,
    port: Annotated[int, typer.Option(min=1, max=65535)] = 3000,
    sample: Annotated[
        bool, typer.Option("--demo", help="Prepare the data root like `demo`.")
    ] = False,
    settings: SettingsOption = None,
) -> None:
    """Open the page of `look`, and Dagster, on the data root. The server listens on this machine only.

    The command prints an address with a token. Only a browser that opens this address gets access.
    """
    from replay_pipeline.assets.records import sync
    from replay_pipeline.orchestration.instance import ui_command

    if sample:
        data = data or Path("demo")
        if not (data / "settings.toml").exists():
            prepare_demo(data)
    with progress_bars() as on_progress:
        work = open_pipeline(settings, data, on_progress=on_progress)
        sync(work)
        if work.batches():
            work.write_page()
    command, environment = ui_command(work.settings, port=port)
    if settings is not None:
        # Dagster's processes load the settings themselves.
        environment["REPLAY_SETTINGS"] = str(settings.absolute())
    out.print(f"Starting Dagster on [bold]{work.root.path}[/]")
    os.execve(command[0], command, environment)


@app.command()
def sync(
    data: DataOption = None,
    settings: SettingsOption = None,
    runs_are_here: Annotated[
        bool,
        typer.Option(
            "--runs-are-here",
            help="Say that all runs are processes of this machine, so that runs without a process end, "
            "even if Dagster's records are on a server.",
        ),
    ] = False,
) -> None:
    """Bring Dagster's view up to date with the files, even after Dagster's home was lost."""
    from replay_pipeline.assets import records

    work = open_pipeline(settings, data)
    n_added = records.sync(work, runs_are_here=runs_are_here)
    out.print(f"{n_added} materializations added")
