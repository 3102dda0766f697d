"""The commands that record what clients put around a conversation."""

from typing import Annotated

import typer

from replay_pipeline.cli.app import DataOption, JsonOption, SettingsOption, harness_app
from replay_pipeline.cli.console import Report, escape, out, print_report
from replay_pipeline.cli.shared import open_pipeline


@harness_app.command("record")
def harness_record(
    command: Annotated[
        list[str],
        typer.Argument(
            help="The client and what you say to it: `-- claude -p hi`.", metavar="CLIENT"
        ),
    ],
    agent: Annotated[
        str | None,
        typer.Option(
            help="The client's name in logs, if its request doesn't say it.", metavar="NAME"
        ),
    ] = None,
    version: Annotated[
        str | None,
        typer.Option(help="Its version, if its request doesn't name it.", metavar="NUMBER"),
    ] = None,
    timeout_s: Annotated[
        float,
        typer.Option(
            "--timeout", help="Longest time until its request, in seconds.", metavar="SECONDS"
        ),
    ] = 60.0,
    data: DataOption = None,
    settings: SettingsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Start a client on loopback, and keep the system prompt and tools of its first request.

    Nothing of yours is read or changed: the client gets an empty home and folder, no key, and a server on
    this machine. It is stopped as soon as its request is there.
    """
    from replay_pipeline.stages.views.harness import record_harness

    report = record_harness(
        open_pipeline(settings, data), command, agent=agent, version=version, timeout_s=timeout_s
    )
    print_report(report, as_json=as_json, show=_show_recorded)


@harness_app.command("list")
def harness_list(
    data: DataOption = None, settings: SettingsOption = None, as_json: JsonOption = False
) -> None:
    """Report the recorded harnesses, and which one is used for the sessions of each client."""
    from replay_pipeline.stages.views.harness import list_harnesses

    print_report(list_harnesses(open_pipeline(settings, data)), as_json=as_json, show=_show_list)


def _show_recorded(report: Report) -> None:
    _show_one(report)
    out.print(f"kept: {escape(report['kept'])}")
    out.print(
        "States of this client are shown below it from now on, and the next replay asks their teachers "
        'again, for money: `replay-pipeline estimate` says what that costs. `harness = "neutral"` under '
        "\\[ingest] keeps things as they were."
    )


def _show_one(report: Report) -> None:
    out.print(
        f"[bold]{escape(report['agent'])} {escape(report['version'])} {escape(report['entrypoint'])}[/] ({report['sha']})"
    )
    out.print(
        f"  system {report['system_chars']:,} characters, {report['tools']} tools "
        f"({report['tool_chars']:,}), {report['reminders']} reminders; "
        f"slots: {', '.join(report['slots']) or 'none'}"
    )


def _show_list(report: Report) -> None:
    for harness in report["harnesses"]:
        _show_one(harness)
    if not report["harnesses"]:
        out.print("nothing was recorded yet: `replay-pipeline harness record -- claude -p hi`")
    for each in report["clients"]:
        out.print(
            escape(
                f"{each['agent']} {each['version']} {each['entrypoint']}: {each['sessions']} sessions, {each['harness']}"
            )
        )
