"""The commands that record what clients put around a conversation."""

import json
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from replay_pipeline.cli.app import DataOption, JsonOption, SettingsOption, harness_app
from replay_pipeline.cli.console import Report, escape, out, print_report
from replay_pipeline.cli.shared import load, open_pipeline

if TYPE_CHECKING:
    from replay_pipeline.ingesters.harness.harness import Harness


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
    from replay_pipeline.ingesters.harness.harness import HarnessStore
    from replay_pipeline.ingesters.harness.record import record

    store = HarnessStore(load(settings, data).data_dir)
    harness = record(command, agent=agent, version=version, timeout_s=timeout_s)
    report = {**_summary(harness), "kept": str(store.keep(harness))}
    print_report(report, as_json=as_json, show=_show_recorded)


@harness_app.command("list")
def harness_list(
    data: DataOption = None, settings: SettingsOption = None, as_json: JsonOption = False
) -> None:
    """Report the recorded harnesses, and which one is used for the sessions of each client."""
    from replay_pipeline.ingesters.harness.harness import HarnessStore

    project = open_pipeline(settings, data)
    store = HarnessStore(project.root.path)
    sessions: Counter[tuple[str, str, str]] = Counter()
    for batch in project.root.batches("sessions"):
        table = project.root.read("sessions", batch, columns=["agent", "versions", "entrypoint"])
        for row in table.to_pylist():
            version = (row["versions"] or [""])[-1]
            sessions[row["agent"] or "", version, row["entrypoint"] or ""] += 1
    clients = []
    for (agent, version, entrypoint), n_sessions in sorted(sessions.items()):
        found = store.find(agent, version or None, entrypoint or None)
        is_on = project.settings.ingest.harness == "auto"
        shown = "neutral" if found is None or not is_on else found.note or found.harness.version
        clients.append(
            {
                "agent": agent,
                "version": version,
                "entrypoint": entrypoint,
                "sessions": n_sessions,
                "harness": shown,
            }
        )
    report = {"harnesses": [_summary(harness) for harness in store], "clients": clients}
    print_report(report, as_json=as_json, show=_show_list)


def _summary(harness: "Harness") -> dict[str, Any]:
    return {
        "agent": harness.agent,
        "version": harness.version,
        "entrypoint": harness.entrypoint,
        "sha": harness.sha,
        "system_chars": sum(map(len, harness.system)),
        "tools": len(harness.tools),
        "tool_chars": len(json.dumps(harness.tools)),
        "reminders": len(harness.before) + len(harness.after),
        "slots": harness.slots(),
    }


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
