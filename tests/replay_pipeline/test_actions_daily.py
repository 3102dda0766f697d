"""Commands of an agent's day, labelled by the shell's grammar and the programs' manuals alone."""

from pathlib import Path

import pytest
import yaml

from replay_pipeline.actions import agreement_level, agrees_at, canonical_action

SETS = yaml.safe_load(
    (Path(__file__).parents[1] / "data" / "actions_daily.yaml").read_text("utf-8")
)


def is_same(a, b):
    one, other = (
        canonical_action(
            {"tool_calls": [{"function": {"name": "Bash", "arguments": {"command": command}}}]},
            cwd="/home/ada/shop",
        )
        for command in (a, b)
    )
    assert one.is_valid
    assert other.is_valid
    found = agreement_level(one, other)
    assert found == agreement_level(other, one)
    return agrees_at("effect", found)


@pytest.mark.parametrize(("a", "b"), SETS["differ"])
def test_what_does_something_else_is_never_merged(a, b):
    assert not is_same(a, b)


def test_of_what_does_the_same_nearly_all_is_found():
    missed = [pair for pair in SETS["same"] if not is_same(*pair)]
    assert len(SETS["same"]) + len(SETS["differ"]) >= 150
    assert len(missed) <= 0.05 * len(SETS["same"]), missed
