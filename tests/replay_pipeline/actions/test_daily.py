"""Actions of an agent's day, labelled by the shell's grammar and the programs' manuals alone."""

import json
from pathlib import Path

import pytest
import yaml

from replay_pipeline.actions import agreement_level, agrees_at, canonical_action

DATA = Path(__file__).parents[2] / "data"
SETS = {
    name: yaml.safe_load((DATA / f"actions_{name}.yaml").read_text("utf-8"))
    for name in ("daily", "wide", "modern")
}


def action_of(side):
    calls = [
        {"Bash": {"command": one}} if isinstance(one, str) else one
        for one in (side if isinstance(side, list) else [side])
    ]
    functions = [{"name": n, "arguments": json.dumps(a)} for one in calls for n, a in one.items()]
    action = canonical_action(
        {"tool_calls": [{"function": f} for f in functions]}, cwd="/home/ada/shop"
    )
    assert action.is_valid
    return action


def is_same(a, b):
    found = agreement_level(action_of(a), action_of(b))
    assert found == agreement_level(action_of(b), action_of(a))
    return agrees_at("effect", found)


@pytest.mark.parametrize(("a", "b"), [pair for each in SETS.values() for pair in each["differ"]])
def test_what_does_something_else_is_never_merged(a, b):
    assert not is_same(a, b)


@pytest.mark.parametrize("name", SETS)
def test_of_what_does_the_same_nearly_all_is_found(name):
    pairs = SETS[name]
    missed = [pair for pair in pairs["same"] if not is_same(*pair)]
    assert len(pairs["same"]) + len(pairs["differ"]) >= 150
    assert len(missed) <= 0.05 * len(pairs["same"]), missed


EDIT = {"Edit": {"file_path": "a.py", "old_string": "x", "new_string": "y"}}
OTHER_EDIT = {"Edit": {"file_path": "a.py", "old_string": "x", "new_string": "z"}}
LOOK, OTHER_LOOK = {"Grep": {"pattern": "cart"}}, {"Grep": {"pattern": "carts"}}
FOREIGN = {"mcp__board__close": {"id": 3}}


@pytest.mark.parametrize(
    ("one", "other", "level"),
    [
        ([EDIT, LOOK], [EDIT], "effect"),
        ([EDIT, LOOK], [OTHER_LOOK, EDIT], "effect"),
        ([EDIT, {"TodoWrite": {"todos": []}}], [EDIT], "effect"),
        ([EDIT, LOOK], [OTHER_EDIT, OTHER_LOOK], "target"),
        ([EDIT, LOOK], [LOOK, EDIT], "target"),
        ([EDIT, LOOK], [LOOK], None),
        ([LOOK, OTHER_LOOK], [LOOK], None),
        ([EDIT, FOREIGN], [EDIT], None),
    ],
)
def test_another_look_beside_a_consequence_decides_nothing(one, other, level):
    assert agreement_level(action_of(one), action_of(other)) == level
