"""The commands that ask teachers or estimate the cost."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from replay_pipeline.cli.app import (
    BatchOption,
    BudgetOption,
    DataOption,
    JsonOption,
    SettingsOption,
    TeachersOption,
    YesOption,
    app,
    teachers_app,
)
from replay_pipeline.cli.bars import progress_bars
from replay_pipeline.cli.console import (
    draw_facts,
    escape,
    open_words,
    out,
    print_report,
    say,
    show_compare,
    show_estimate,
    show_price,
    show_replay,
    show_teachers,
    show_verdict,
)
from replay_pipeline.cli.shared import (
    chosen,
    confirm,
    estimate_of,
    exit_if_most_failed,
    load,
    of_now,
    open_pipeline,
)


@app.command()
def estimate(
    data: DataOption = None,
    settings: SettingsOption = None,
    teachers: TeachersOption = None,
    batch: BatchOption = None,
    max_total_usd: BudgetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Estimate the cost of a replay at today's prices, and how much of it a budget covers. This is free."""
    from replay_pipeline.stages.pipeline import Pipeline

    work = Pipeline(load(settings, data, max_total_usd=max_total_usd, teachers=teachers))
    report = estimate_of(work, chosen(work, batch))
    print_report(report, as_json=as_json, show=show_estimate)


@app.command()
def replay(
    data: DataOption = None,
    settings: SettingsOption = None,
    teachers: TeachersOption = None,
    batch: BatchOption = None,
    max_total_usd: BudgetOption = None,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Ask the teachers, under a hard ceiling. A second run never asks for an answer that you paid for."""
    from replay_pipeline.stages import pipeline
    from replay_pipeline.stages.replay import open_work

    loaded = load(settings, data, max_total_usd=max_total_usd, teachers=teachers)
    work = pipeline.Pipeline(loaded)
    batches = chosen(work, batch)
    confirm(work, yes=yes, batches=batches)
    with progress_bars() as on_progress:
        replay_one = pipeline.Pipeline(loaded, on_progress=on_progress).replay_within(
            batches=batches
        )
        reports = {key: of_now(replay_one(key)) for key in batches}
    print_report(reports, as_json=as_json, show=show_replay)
    work_left = open_work(list(reports.values()))
    if not as_json:
        out.print(f"Left to ask: {escape(open_words(work_left))}.", soft_wrap=True)
    exit_if_most_failed(work_left)


@app.command()
def control(
    data: DataOption = None,
    settings: SettingsOption = None,
    max_total_usd: Annotated[
        float, typer.Option("--budget", min=0, help="Hard ceiling in US dollars.", metavar="USD")
    ] = 1.0,
    states: Annotated[int, typer.Option(min=1, help="Size of the sample.", metavar="N")] = 50,
    as_json: JsonOption = False,
) -> None:
    """Ask the agents' own models again, and report how often they take another action than the recorded one.

    The higher the share, the less a teacher's disagreement means. The dataset card shows it.
    """
    from replay_pipeline.stages.budget.spending import control_run

    with progress_bars() as on_progress:
        work = open_pipeline(settings, data, on_progress=on_progress)
        chosen(work, None)
        report = control_run(work, max_total_usd=max_total_usd, n_states=states).report
    print_report(report, as_json=as_json, show=partial(draw_facts, "Control"))


@app.command()
def verdict(
    model: Annotated[
        str | None,
        typer.Argument(help="A teacher's name, or the endpoint's id of a model.", metavar="MODEL"),
    ] = None,
    data: DataOption = None,
    settings: SettingsOption = None,
    teachers: TeachersOption = None,
    max_total_usd: Annotated[
        float, typer.Option("--budget", min=0, help="Hard ceiling in US dollars.", metavar="USD")
    ] = 2.0,
    than: Annotated[
        str | None,
        typer.Option(
            help="The model that wrote the sessions; by default the one that wrote the most.",
            metavar="AGENT",
        ),
    ] = None,
    cohort: Annotated[
        str, typer.Option(help="Name under which the decisions are kept.", metavar="NAME")
    ] = "default",
    size: Annotated[
        int, typer.Option(min=30, help="Decisions of a new cohort.", metavar="N")
    ] = 150,
    instructions: Annotated[
        typer.FileText | None,
        typer.Option(
            help="Text that MODEL gets in place of the project's CLAUDE.md.", metavar="FILE"
        ),
    ] = None,
    only_estimate: Annotated[
        bool, typer.Option("--estimate", help="Only show what is known for free, and the cost.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Judge whether MODEL could have done the work of the model that wrote your sessions, and for how much.

    It asks MODEL at decisions of your sessions that are drawn once, and a panel of teachers where MODEL does something else,
    and stops when the answer is known. Money that is left asks the agent's own model again. The exit code is 0 if it could have done the work, 3 if not, and 4 if that can't be told
    yet. Without MODEL, it shows what the answers and the results of your sessions tell already. That is free.
    """
    from replay_pipeline.stages.budget import verdict as verdicts
    from replay_pipeline.stages.views.page import compare

    with progress_bars() as on_progress:
        work = open_pipeline(settings, data, teachers=teachers, on_progress=on_progress)
        chosen(work, None)
        if model is None:
            found = compare(work)
        elif only_estimate:
            words: list[str] = []
            tell = words.append if as_json else _say_known
            cost = verdicts.verdict_estimate(
                work, model, than=than, cohort=cohort, n_decisions=size, tell=tell
            )
            found = {**cost, "words": words, "ceiling_usd": max_total_usd}
        else:
            found = verdicts.verdict_run(
                work,
                model,
                max_total_usd=max_total_usd,
                than=than,
                cohort=cohort,
                n_decisions=size,
                instructions=instructions.read() if instructions else None,
                tell=(lambda _: None) if as_json else _say_known,
            ).report
    show = show_compare if model is None else show_price if only_estimate else show_verdict
    print_report(found, as_json=as_json, show=show)
    if code := _VERDICT_CODES.get(str(found.get("answer")), 0):
        raise typer.Exit(code)


def _say_known(words: str) -> None:
    say(f"{words[:1].upper()}{words[1:]}.")


_VERDICT_CODES = {"could": 0, "could not": 3, "can't tell": 4}


@teachers_app.command("list")
def teachers_list(
    data: DataOption = None,
    settings: SettingsOption = None,
    teachers: TeachersOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the teachers of these settings, with model, key, price, and terms."""
    from replay_pipeline.stages.budget.spending import checked_teachers

    checks = checked_teachers(open_pipeline(settings, data, teachers=teachers))
    print_report({"teachers": checks}, as_json=as_json, show=show_teachers)


@teachers_app.command("serve")
def teachers_serve(
    answers: Annotated[
        Path | None,
        typer.Option(
            help="Recorded answers (JSON lines). By default the sample's.", metavar="FILE"
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="PORT")] = 8400,
) -> None:
    """Serve recorded answers on this machine, in OpenRouter's protocol.

    The answers only fit the sessions that they were recorded for. For your own sessions, use
    `--teachers rehearsal`.
    """
    from replay_pipeline.testing import Script, serve_teachers
    from replay_pipeline.testing.sample import ANSWERS_FILE

    serve_teachers(
        Script(answers=answers or ANSWERS_FILE),
        port=port,
        on_ready=lambda url: out.print(f"Teachers at {url} (Ctrl-C stops them)"),
    )
