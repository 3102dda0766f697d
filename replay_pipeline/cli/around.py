"""The commands that inspect a data root, and open Dagster on it."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from replay_pipeline.cli.app import DataOption, JsonOption, SettingsOption, TeachersOption, app
from replay_pipeline.cli.bars import progress_bars
from replay_pipeline.cli.console import (
    escape,
    out,
    print_report,
    show_findings,
    show_lost_calls,
    show_stale,
    show_status,
    show_verify,
)
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
    lost: Annotated[
        bool, typer.Option("--lost", help="List the calls that were sent but got no answer.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Report finished work, its cost, and open work."""
    from replay_pipeline.stages.budget.spending import stale_work

    if stale:
        work = open_pipeline(settings, data, teachers=teachers)
        print_report(stale_work(work), as_json=as_json, show=show_stale)
    elif lost:
        from replay_pipeline.replay import lost_calls

        found = lost_calls(load(settings, data, teachers=teachers).ledger_url())
        report = {"lost_calls": [asdict(each) for each in found]}
        print_report(report, as_json=as_json, show=show_lost_calls)
    else:
        from replay_pipeline.stages.receipts import Overview
        from replay_pipeline.stages.views.status import status_of

        report = status_of(Overview(load(settings, data, teachers=teachers)))
        print_report(report, as_json=as_json, show=show_status)


@app.command()
def verify(
    data: DataOption = None, settings: SettingsOption = None, as_json: JsonOption = False
) -> None:
    """Check that no table, shard of the dataset, or ledger has changed since it was written.

    The command reads the whole data root and changes nothing. The exit code is 1 if it finds damage.
    """
    from replay_pipeline.stages.views.verify import verify

    report = verify(open_pipeline(settings, data))
    print_report(report, as_json=as_json, show=show_verify)
    if report["damaged"]:
        raise typer.Exit(1)


@app.command()
def doctor(
    data: DataOption = None,
    settings: SettingsOption = None,
    trust: Annotated[
        str | None,
        typer.Option(
            "--trust",
            help="Only trust a settings file in the current folder, as it is now, and print it; or, with "
            "`--key`, a host (`name` or `name:port`).",
            metavar="WHAT",
        ),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(
            "--key", help="The environment variable whose key may go to that host.", metavar="NAME"
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check this machine and these settings: packages, keys, teachers, disk, folders.

    What you trust is stored in your own configuration folder. After each change, you have to trust a file
    again.
    """
    from replay_pipeline.stages.views.doctor import examined

    if trust is not None:
        _trust(trust, key)
        return
    work = open_pipeline(settings, data)
    findings = examined(work)
    print_report({"findings": findings}, as_json=as_json, show=show_findings)
    if any(not finding["ok"] for finding in findings):
        raise typer.Exit(1)


def _trust(what: str, key: str | None) -> None:
    from replay_pipeline.settings import config_dir
    from replay_pipeline.storage.trust import trust_file, trust_host

    if key is not None:
        trust_host(what, key=key, folder=config_dir())
        out.print(f"{escape(key)} may be sent to {escape(what)} from now on.")
        return
    data = trust_file(Path(what), folder=config_dir())
    out.print(escape(data.decode("utf-8", "replace")), highlight=False, soft_wrap=True)
    out.print(f"{escape(what)} is trusted as it is now.")


@app.command()
def ui(
    data: DataOption = None,
    port: Annotated[int, typer.Option(min=1, max=65535, metavar="PORT")] = 3000,
    sample: Annotated[
        bool, typer.Option("--demo", help="Prepare the data root like `demo`.")
    ] = False,
    is_served: Annotated[
        bool,
        typer.Option(
            "--serve/--no-serve",
            help="Without it, only bring Dagster's view up to date with the files.",
        ),
    ] = True,
    runs_are_here: Annotated[
        bool,
        typer.Option(
            "--runs-are-here",
            help="Say that all runs are processes of this machine, so that runs without a process end, "
            "even if Dagster's records are on a server.",
        ),
    ] = False,
    settings: SettingsOption = None,
) -> None:
    """Open the page of `look`, and Dagster, on the data root. The server listens on this machine only.

    The command prints an address with a token. Only a browser that opens this address gets access.
    """
    from replay_pipeline.assets.instance import ui_command
    from replay_pipeline.assets.records import sync
    from replay_pipeline.stages.views.page import write_page_of

    if sample:
        data = data or Path("demo")
        if not (data / "settings.toml").exists():
            prepare_demo(data)
    with progress_bars() as on_progress:
        work = open_pipeline(settings, data, on_progress=on_progress)
        n_added = sync(work, runs_are_here=runs_are_here)
        if is_served and work.batches():
            write_page_of(work)
    if not is_served:
        out.print(f"{n_added} materializations added")
        return
    command, environment = ui_command(work.settings, port=port)
    if settings is not None:
        # Dagster's processes load the settings themselves.
        environment["REPLAY_SETTINGS"] = str(settings.absolute())
    out.print(f"Starting Dagster on [bold]{work.root.path}[/]")
    os.execve(command[0], command, environment)
