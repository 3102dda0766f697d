"""The results of a training in words and figures, for the terminal and the page."""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from replay_pipeline.stages.pages.sides import over_lines
from replay_pipeline.stages.pages.tree import cut

Report = Mapping[str, Any]
_FIRST = ("preference_accuracy", "consensus_rate", "valid_calls")
_ROWS = {
    "preference_accuracy": ("right on held-out pairs", "%"),
    "blank_prompt_accuracy": ("the same with a blank prompt", "%"),
    "consensus_rate": ("takes the teachers' action by itself", "%"),
    "valid_calls": ("writes well-formed calls", "%"),
    "general_loss": ("loss on general text", ""),
}


def sentences_of(report: Report) -> list[dict[str, str]]:
    """Describe a training in sentences, each of the kind `fact` or `finding`."""
    facts = [
        f"It learned from {report['pairs']:,} pairs in {report['steps']:,} steps: the mean loss of a tenth of "
        f"them went from {report['loss_first']:.3f} to {report['loss_last']:.3f}."
    ]
    if "preference_accuracy_after" in report:
        facts.append(
            f"It prefers the better side in {_percent(report['preference_accuracy_after'])} of "
            f"{report['held_out_pairs']:,} held-out pairs "
            f"({_percent(report['preference_accuracy_before'])} before); without the prompt in "
            f"{_percent(report['blank_prompt_accuracy_after'])}: "
            f"{100 * report['prompt_gain_after']:+.1f} points by reading the prompt."
        )
    if "consensus_rate_after" in report:
        calls = ""
        if "valid_calls_after" in report:
            calls = (
                f", and writes well-formed calls at {_percent(report['valid_calls_after'])} "
                f"({_percent(report['valid_calls_before'])} before)"
            )
        facts.append(
            f"By itself it takes the teachers' action at "
            f"{_percent(report['consensus_rate_after'])} of {report['held_out_states']:,} held-out states "
            f"({_percent(report['consensus_rate_before'])} before){calls}."
        )
    facts += [
        f"Channel {name} taught nothing: {reason}."
        for name, reason in (report.get("channels_off") or {}).items()
        if not reason.endswith("is 0")
    ]
    found = [{"kind": "fact", "text": text} for text in facts]
    findings = report.get("findings") or ()
    return found + [
        {"kind": "finding", "text": text[:1].upper() + text[1:].rstrip(".") + "."}
        for text in findings
    ]


def before_after(report: Report, evaluation: Report | None = None) -> list[dict[str, Any]]:
    """Return one row per figure that was measured before and after, with its interval if it has one."""
    rows = []
    intervals = report.get("intervals_after") or {}
    for name, (words, unit) in _ROWS.items():
        before, after = report.get(f"{name}_before"), report.get(f"{name}_after")
        if before is None or after is None:
            continue
        told = _percent if unit else "{:.3f}".format
        low_high = intervals.get(name)
        rows.append(
            {
                "name": words,
                "is_first": name in _FIRST,
                "before": told(before),
                "after": told(after),
                "interval": f"{told(low_high[0])} to {told(low_high[1])}" if low_high else None,
            }
        )
        if name == "consensus_rate":
            rows += _by_level(evaluation or {})
    return rows


def training_shown(
    report: Report,
    evaluation: Report | None = None,
    inspected: Sequence[Report] | None = None,
) -> dict[str, Any]:
    """Return a training as the page shows it.

    `evaluation` was measured before and after, by state; `inspected` are some pairs as the trainer saw
    them.
    """
    return {
        "seen": [
            {
                "title": f"As the model reads it: {row['state_id'] or 'a pair'}, weight {row['weight']:.2f}"
                + (
                    f", times {row['balance']:.2f} in the preference loss"
                    if row.get("balance", 1.0) != 1
                    else ""
                ),
                "sides": row["parts"],
            }
            for row in inspected or ()
        ],
        "words": sentences_of(report),
        "before_after": before_after(report, evaluation),
        "curves": report.get("curves") or {},
        "examples": examples(evaluation or {}),
    }


_EXAMPLES = 6
_WHEN = ("before", "after")


def _by_level(evaluation: Report) -> list[dict[str, Any]]:
    """Return a row for each way of being alike that greedy actions were counted by."""
    rows = []
    found = [evaluation.get(when, {}).get("consensus") or {} for when in _WHEN]
    for level, words in _LEVELS.items():
        if level and any(level in each for each in found):
            before, after = (_percent(each.get(level, 0.0)) for each in found)
            name = f"of these, {words}" if level in _SAME else f"besides, {words}"
            row = {"name": name, "is_first": False, "before": before, "after": after}
            rows.append({**row, "interval": None})
    return rows


_SAME = ("exact", "effect")
"""Levels that count as the teachers' action."""
_LEVELS = {
    "exact": "the teachers' action",
    "effect": "an equal action",
    "target": "an action on the same target",
    "tool": "the same tool",
    None: "another action",
}
"""How alike an action is to the teachers', from the most alike on, in words."""


def examples(evaluation: Report) -> list[dict[str, Any]]:
    """Return some held-out states with the model's own text before and after training.

    First come states at which the model got nearer to the teachers' action or farther from it,
    alternately. Then come states at which anything else changed.
    """
    acts = [evaluation.get(when, {}).get("consensus", {}).get("acts") or () for when in _WHEN]
    ranks = {level: n for n, level in enumerate(_LEVELS)}
    nearer: list[dict[str, Any]] = []
    farther: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    for was, now in zip(*acts, strict=False):
        before, after = (ranks.get(each["level"], len(ranks)) for each in (was, now))
        if before != after:
            (nearer if after < before else farther).append(_example(was, now))
        elif was["text"] != now["text"]:
            others.append(_example(was, now))
    in_turns = [each for two in zip_longest(nearer, farther) for each in two if each is not None]
    return [*in_turns, *others][:_EXAMPLES]


def _example(was: Report, now: Report) -> dict[str, Any]:
    before, after = (_LEVELS.get(each["level"], each["level"]) for each in (was, now))
    changed = f"{before} before, {after} after" if before != after else f"{before} both times"
    return {
        "state_id": was["state_id"],
        "title": changed[0].upper() + changed[1:],
        "sides": [
            ["what the user said last", cut(was["asked"]) or "(nothing)"],
            ["the teachers", cut(over_lines(was["consensus"]))],
            ["the model before", cut(was["text"]) or "(nothing)"],
            ["the model after", cut(now["text"]) or "(nothing)"],
        ],
    }


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
