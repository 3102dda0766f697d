"""Actions of an agent's day, labelled by the shell's grammar and the programs' manuals alone."""

from pathlib import Path

import pytest
import yaml

from replay_pipeline.actions import agreement_level, agrees_at
from tests.replay_pipeline.actions.test_labelled import action_of

DATA = Path(__file__).parents[2] / "data"
SETS = {
    name: yaml.safe_load((DATA / f"actions_{name}.yaml").read_text("utf-8"))
    for name in ("daily", "wide", "modern")
}


def valid(side):
    action = action_of(side)
    assert action.is_valid
    return action


def is_same(a, b):
    found = agreement_level(valid(a), valid(b))
    assert found == agreement_level(valid(b), valid(a))
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
