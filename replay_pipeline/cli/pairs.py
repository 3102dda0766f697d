"""The commands that extract pairs, show them, and follow one state through every stage."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from replay_pipeline.cli.app import (
    BatchOption,
    DataOption,
    JsonOption,
    SettingsOption,
    app,
    pairs_app,
)
from replay_pipeline.cli.console import (
    Report,
    escape,
    out,
    print_report,
    show_pairs,
    show_ranked,
)
from replay_pipeline.cli.shared import chosen, given, open_pipeline, ranked_row


@pairs_app.callback()
def pairs(
    context: typer.Context,
    data: DataOption = None,
    settings: SettingsOption = None,
    batch: BatchOption = None,
    threshold: Annotated[
        int | None,
        typer.Option(help="Votes of distinct model families that make a consensus.", metavar="N"),
    ] = None,
    marks: Annotated[
        Path | None, typer.Option(help="Marks exported from the page of `look`.", metavar="FILE")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Report the states where the teachers agree on an action that the agent did not take."""
    if context.invoked_subcommand is not None:
        return
    changes = given("pairs", agreement_threshold=threshold, marks=marks)
    work = open_pipeline(settings, data, changes=changes)
    reports = {key: work.pairs(key).report for key in chosen(work, batch)}
    print_report(reports, as_json=as_json, show=show_pairs)


@pairs_app.command("show")
def pairs_show(
    data: DataOption = None,
    settings: SettingsOption = None,
    top: Annotated[
        int, typer.Option(min=1, help="How many of the list to show.", metavar="N")
    ] = 20,
    as_json: JsonOption = False,
) -> None:
    """List the pairs in the order of review: the least certain first."""
    from replay_pipeline.stages.views.summary import ranked_pairs

    shown = [ranked_row(pair) for pair in ranked_pairs(open_pipeline(settings, data))[:top]]
    print_report({"pairs": shown}, as_json=as_json, show=show_ranked)


_SHOWN_CHARS, _ONE_LINE = 400, 100
_SHOWN_ITEMS = 2, 3
"""Items of a list that are shown, at its beginning and at its end."""


@app.command()
def trace(
    state: Annotated[str, typer.Argument(help="Id of the state, or its first characters.")],
    data: DataOption = None,
    settings: SettingsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Follow one state: log rows, prompts, answers, votes, pair, published rows, and tokens.

    `--json` prints everything. Otherwise you see only the beginning of long texts.
    """
    from replay_pipeline.stages.views.tracing import trace_state

    print_report(
        trace_state(open_pipeline(settings, data), state), as_json=as_json, show=_show_life
    )


def _show_life(life: Report) -> None:
    for name, shown in life.items():
        if not isinstance(shown, dict):
            out.print(f"{name}: {escape(str(shown))}", soft_wrap=True)
            continue
        out.rule(f"[bold]{name}[/]", align="left")
        for line in _lines(shown, ""):
            out.print(escape(line), highlight=False, soft_wrap=True)


def _lines(value: Any, indent: str) -> Iterator[str]:
    """Write what a stage has as indented lines, each value on its own; of long lists the ends."""
    pairs = list(value.items() if isinstance(value, dict) else enumerate(value, 1))
    n_left_out = len(pairs) - sum(_SHOWN_ITEMS) if isinstance(value, list) else 0
    for place, (name, each) in enumerate(pairs):
        if n_left_out > 0 and _SHOWN_ITEMS[0] <= place < _SHOWN_ITEMS[0] + n_left_out:
            if place == _SHOWN_ITEMS[0]:
                yield f"{indent}… {n_left_out:,} more"
            continue
        text = json.dumps(each, ensure_ascii=False, default=str)
        if isinstance(each, dict | list) and len(text) > _ONE_LINE and name != "token_ids":
            yield f"{indent}{name}:"
            yield from _lines(each, f"{indent}  ")
            continue
        text = each if isinstance(each, str) else text
        cut = f" … ({len(text):,} characters)" if len(text) > _SHOWN_CHARS else ""
        yield f"{indent}{name}: {text[:_SHOWN_CHARS]}{cut}"
