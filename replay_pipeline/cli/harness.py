"""The commands that learn what clients put around a conversation."""

from pathlib import Path
from typing import Annotated

import typer

from replay_pipeline.cli.app import DataOption, JsonOption, SettingsOption, harness_app
from replay_pipeline.cli.console import Report, escape, out, print_report
from replay_pipeline.cli.shared import open_pipeline

AgentOption = Annotated[
    str,
    typer.Option(
        "--agent",
        help="The client: claude_code, codex, opencode, copilot, or gemini_cli.",
        metavar="NAME",
    ),
]


@harness_app.command("learn")
def harness_learn(
    agent: AgentOption = "claude_code",
    command: Annotated[
        str | None,
        typer.Option(
            "--command",
            help="The command that starts the client, with its options; by default the installed client.",
        ),
    ] = None,
    version: Annotated[
        str | None,
        typer.Option("--version", help="The version of Claude Code to get from npm."),
    ] = None,
    request: Annotated[
        Path | None,
        typer.Option(
            "--from", help="Use this recorded request instead of a client.", metavar="FILE"
        ),
    ] = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout", help="Longest time for a start, in seconds.")
    ] = 10.0,
    data: DataOption = None,
    settings: SettingsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Start a client in an empty home, on loopback, and keep the system prompt and tools it sends.

    Nothing of yours is read or changed: the client gets a home and a folder of its own, no key, and a
    server on this machine. The command ends the client after a few seconds and removes its folders.
    """
    from replay_pipeline.stages.harness import learn_harness

    report = learn_harness(
        open_pipeline(settings, data),
        agent=agent,
        command=command,
        version=version,
        request=request,
        timeout_s=timeout_s,
    )
    print_report(report, as_json=as_json, show=_show_learned)


@harness_app.command("list")
def harness_list(
    data: DataOption = None, settings: SettingsOption = None, as_json: JsonOption = False
) -> None:
    """Report the learned harnesses, and which one is used for the sessions of each client."""
    from replay_pipeline.stages.harness import list_harnesses

    print_report(list_harnesses(open_pipeline(settings, data)), as_json=as_json, show=_show_list)


@harness_app.command("show")
def harness_show(
    version: Annotated[str, typer.Argument(help="The version, as `harness list` names it.")],
    agent: AgentOption = "claude_code",
    data: DataOption = None,
    settings: SettingsOption = None,
    as_json: JsonOption = False,
) -> None:
    """The whole harness of a version: system prompt, tools, reminders, parameters, slots."""
    from replay_pipeline.stages.harness import show_harness

    report = show_harness(open_pipeline(settings, data), version, agent=agent)
    print_report(report, as_json=as_json, show=_show_harness)


def _show_learned(report: Report) -> None:
    _show_one(report)
    out.print(f"kept: {escape(report['kept'])}")
    if n_states := report["states_shown_anew"]:
        out.print(
            f"{n_states:,} states are shown below it from now on. Teachers that were asked there "
            "answered another question: the next replay asks them again, for money. `replay-pipeline "
            'estimate` says what that costs; the setting `harness = "neutral"` under \\[ingest] keeps '
            "things as they were."
        )


def _show_one(report: Report) -> None:
    out.print(f"[bold]{escape(report['agent'])} {escape(report['version'])}[/] ({report['sha']})")
    for kind in ("main", "subagent"):
        if found := report.get(kind):
            out.print(
                f"  {kind}: system {found['system_chars']:,} characters, {found['tools']} tools "
                f"({found['tool_chars']:,}), {found['reminders']} reminders; "
                f"slots: {', '.join(found['slots']) or 'none'}"
            )
            for each in found["left_out"]:
                out.print(escape(f"    left out: {each}"), soft_wrap=True)


def _show_list(report: Report) -> None:
    for harness in report["harnesses"]:
        _show_one(harness)
    if not report["harnesses"]:
        out.print("nothing was learned yet: `replay-pipeline harness learn`")
    for each in report["clients"]:
        out.print(
            escape(
                f"{each['agent']} {each['version']}: {each['sessions']} sessions, {each['harness']}"
            )
        )


def _show_harness(report: Report) -> None:
    out.print(f"[bold]{escape(report['agent'])} {escape(report['version'])}[/] ({report['sha']})")
    for kind in ("main", "subagent"):
        if found := report.get(kind):
            out.rule(kind, align="left")
            for text in (*found["system"], *found["before"]):
                out.print(escape(text), soft_wrap=True, highlight=False)
            for message in found["after"]:
                out.print(escape(f"{message['role']}: {message['content']}"), soft_wrap=True)
            for name, text in found["reminders"].items():
                out.print(escape(f"{name}: {text}"), soft_wrap=True, highlight=False)
            for tool in found["tools"]:
                function = tool["function"]
                out.rule(escape(function["name"]), align="left")
                out.print(escape(function.get("description", "")), soft_wrap=True, highlight=False)
                out.print_json(data=function["parameters"])
