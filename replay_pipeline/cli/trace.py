"""The command that follows one state through every stage."""

import json
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from replay_pipeline.cli.app import app
from replay_pipeline.cli.console import Report, escape, out, print_report
from replay_pipeline.cli.options import DataOption, JsonOption, SettingsOption
from replay_pipeline.cli.shared import open_pipeline

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
    from replay_pipeline.stages.tracing import trace_state

    print_report(trace_state(open_pipeline(settings, data), state), as_json=as_json, show=_show)


def _show(life: Report) -> None:
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
