"""The figures of a page: of all sessions, by project, model, tool and outcome."""

import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from replay_pipeline.ingesters import IngestReport
from replay_pipeline.replay.estimates import ASSUMED_PAIRS

Row = Mapping[str, Any]
TOKENS = {
    "input": "n_input_tokens",
    "cache_write": "n_cache_creation_tokens",
    "cache_write_1h": "n_cache_creation_1h_tokens",
    "cache_read": "n_cache_read_tokens",
    "output": "n_output_tokens",
}
"""Columns of `turns` by what is paid for; `cache_write` is without what is written for an hour."""
_CACHE_WRITE, _CACHE_WRITE_1H, _CACHE_READ = 1.25, 2.0, 0.1
_VERSION = re.compile(r"(-latest|[-@]\d{8}|-\d{4}-\d\d-\d\d|\[\w+\])+$")
"""What comes after the name of a model: a date, or the size of its window."""


@cache
def _prices() -> Mapping[str, Any]:
    return tomllib.loads(Path(__file__).with_name("prices.toml").read_text("utf-8"))


def cost_usd(model: str | None, tokens: Mapping[str, int]) -> float | None:
    """Say what these tokens cost at list price; `None` where the model has none.

    Args:
        model: name of the model as it is in the log.
        tokens: counts by the names of `TOKENS`.
    """
    name = _VERSION.sub("", (model or "").rpartition("/")[2])
    if (price := _prices()["models"].get(name)) is None:
        return None
    fresh, output, *reading = price
    read = reading[0] if reading else _CACHE_READ * fresh
    units = tokens.get("input", 0) + _CACHE_WRITE * tokens.get("cache_write", 0)
    units += _CACHE_WRITE_1H * tokens.get("cache_write_1h", 0)
    usd = units * fresh + tokens.get("cache_read", 0) * read + tokens.get("output", 0) * output
    return usd / 1e6


def tokens_of(turns: Iterable[Row]) -> Counter[str]:
    """Add up the recorded tokens of turns."""
    total: Counter[str] = Counter()
    for turn in turns:
        total.update({name: turn[column] or 0 for name, column in TOKENS.items()})
    total["cache_write"] -= total["cache_write_1h"]
    return total


def by_model(turns: Iterable[Row]) -> dict[str, list[Row]]:
    """Group the turns that a model wrote."""
    groups: dict[str, list[Row]] = {}
    for turn in turns:
        if turn["model"] is not None:
            groups.setdefault(turn["model"], []).append(turn)
    return groups


def priced(turns: Iterable[Row]) -> float:
    """Add up what the turns of priced models cost, in US dollars."""
    groups = by_model(turns).items()
    return sum(cost_usd(model, tokens_of(rows)) or 0.0 for model, rows in groups)


def overview(
    sessions: Sequence[Row], turns: Sequence[Row], states: Sequence[Row], report: IngestReport
) -> dict[str, Any]:
    """Add up everything, for the table and the top of the page.

    Args:
        sessions: facts of each session, as `facts_of_session` gives them.
        turns: rows of `turns`.
        states: rows of `states`.
        report: what the ingestion counted.
    """
    facts = report.to_json()
    models = [
        {
            "model": model,
            "turns": len(rows),
            "tokens": tokens_of(rows).total(),
            "cost_usd": cost_usd(model, tokens_of(rows)),
        }
        for model, rows in sorted(by_model(turns).items())
    ]
    dates = sorted(date for each in sessions for date in (each["first"], each["last"]) if date)
    n_tokens = sum(
        state["n_context_tokens"] or state["n_predicted_tokens"] or 0 for state in states
    )
    return {
        "total": {
            "sessions": len(sessions),
            "subagents": sum(each["parent"] is not None for each in sessions),
            "turns": len(turns),
            "states": len(states),
            "first": dates[0][:10] if dates else None,
            "last": dates[-1][:10] if dates else None,
        },
        "projects": _projects(sessions),
        "models": models,
        "tokens": dict(tokens_of(turns)),
        "cost_usd": sum(each["cost_usd"] or 0.0 for each in models),
        "prices_of": _prices()["date"],
        "models_without_price": [e["model"] for e in models if e["cost_usd"] is None],
        "outcomes": _counts(state["outcome"] for state in states),
        "error_kinds": _counts(state["error_kind"] for state in states),
        "tools": _counts(name for state in states for name in tools_of(state)),
        "fidelity": facts["fidelity"],
        "redactions": facts["redactions"],
        "skipped": facts["skipped"],
        "skipped_files": facts["skipped_files"],
        "replay": {
            "n_states": len(states),
            "n_prompt_tokens": n_tokens,
            "n_pairs": round(ASSUMED_PAIRS * len(states)),
            "words": (
                f"A replay of all {len(states):,} decisions: each teacher reads some "
                f"{n_tokens / 1e6:,.1f} million tokens, so ${n_tokens / 1e6:,.2f} for each dollar "
                "of its price per million, less what its prompt cache serves, for some "
                f"{round(ASSUMED_PAIRS * len(states)):,} pairs. `replay-pipeline estimate` has "
                "today's prices; `--budget` buys a part of it."
            ),
        },
    }


def _projects(sessions: Iterable[Row]) -> list[dict[str, Any]]:
    groups: dict[str, list[Row]] = {}
    for each in sessions:
        groups.setdefault(each["project"], []).append(each)
    rows = [
        {
            "name": name,
            "sessions": len(group),
            "states": sum(each["n_states"] for each in group),
            "cost_usd": sum(each["cost_usd"] for each in group),
        }
        for name, group in groups.items()
    ]
    return sorted(rows, key=lambda row: (-row["sessions"], row["name"]))


def facts_of_session(session: Row, turns: Sequence[Row], states: Sequence[Row]) -> dict[str, Any]:
    """Tell one session in a line: where, when, by what, how long, and what went wrong."""
    folder = next((turn["cwd"] for turn in turns if turn["cwd"]), None)
    name = PurePosixPath(folder).name if folder else "unnamed"
    parents = (turn["parent_turn_idx"] for turn in turns)
    children = Counter(parent for parent in parents if parent is not None)
    return {
        "id": session["session_id"],
        "parent": session["parent_session_id"],
        "agent": session["agent"],
        "project": f"{name} {(session['project'] or '')[:6]}".strip(),
        "models": session["models"] or [],
        "first": _instant(session["first_timestamp"]),
        "last": _instant(session["last_timestamp"]),
        "n_turns": len(turns),
        "n_states": len(states),
        "n_branches": sum(n - 1 for n in children.values()),
        "n_compactions": sum(turn["kind"] in ("summary", "microcompact") for turn in turns),
        "n_failed": sum(state["outcome"] not in ("ok", "final_text") for state in states),
        "n_hints": sum(state["hint"] is not None for state in states),
        "tokens": tokens_of(turns).total(),
        "cost_usd": priced(turns),
    }


def tools_of(state: Row) -> list[str]:
    """Name the tools that a recorded action calls."""
    calls = msgspec.json.decode(state["action_tool_calls_json"] or "[]")
    return [call.get("function", {}).get("name", "unnamed") for call in calls]


def _instant(value: Any) -> str | None:
    return value.isoformat(timespec="seconds") if value else None


def _counts(values: Iterable[str | None]) -> dict[str, int]:
    return dict(Counter(value for value in values if value is not None).most_common())
