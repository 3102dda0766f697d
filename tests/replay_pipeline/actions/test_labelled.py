"""The labelled pairs: precision and recall of "the same", and every single label."""

import json
from collections import Counter
from pathlib import Path

import pytest
import yaml

from replay_pipeline.actions import agreement_level, agrees_at, canonical_action

CWD = "/home/ada/shop"
FILES = sorted((Path(__file__).parents[2] / "data" / "actions").glob("*.yaml"))


def calls_of(side):
    """OpenAI tool calls from the short form of the data files."""
    found = []
    for one in side if isinstance(side, list) else [side]:
        [(name, arguments)] = [("Bash", {"command": one})] if isinstance(one, str) else one.items()
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        found.append({"function": {"name": name, "arguments": text}})
    return found


def action_of(side):
    text, calls = None, side
    if isinstance(side, dict) and "text" in side:
        text, calls = side["text"], side.get("calls", [])
    message = {"role": "assistant", "content": text, "tool_calls": calls_of(calls)}
    return canonical_action(message, cwd=CWD)


def labelled():
    for path in FILES:
        for number, entry in enumerate(yaml.safe_load(path.read_text("utf-8"))):
            if isinstance(entry, list):
                entry = dict(zip(("level", "a", "b"), entry, strict=True))
            level = None if entry["level"] == "none" else entry["level"]
            yield pytest.param(level, entry["a"], entry["b"], id=f"{path.stem}-{number}")


PAIRS = list(labelled())


@pytest.mark.parametrize(("level", "a", "b"), PAIRS)
def test_labelled_pair_has_its_level_both_ways(level, a, b):
    one, other = action_of(a), action_of(b)
    assert agreement_level(one, other) == level
    assert agreement_level(other, one) == level


def test_precision_and_recall_of_the_same_effect():
    verdicts = Counter()
    for level, a, b in (case.values for case in PAIRS):
        is_same = agrees_at("effect", level)
        says_same = agrees_at("effect", agreement_level(action_of(a), action_of(b)))
        verdicts[is_same, says_same] += 1
    said, true = verdicts[True, True] + verdicts[False, True], verdicts[True, True]
    assert true / said >= 0.98
    assert true / (true + verdicts[True, False]) >= 0.90


def test_table_is_large_and_balanced_over_levels():
    levels = Counter(case.values[0] for case in PAIRS)
    assert len(PAIRS) >= 300
    assert min(levels.values()) >= 40
    assert len(levels) == 5
