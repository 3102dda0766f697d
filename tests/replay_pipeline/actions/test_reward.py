"""The consensus as a verifiable reward, as trainers call it."""

import json

import pytest

from replay_pipeline.actions import LEVEL_CREDIT, canonical_action, consensus_reward, parse_rendered
from tests.support.messages import bash, call, says, together

CONSENSUS = bash("pytest -q -x")


@pytest.mark.parametrize(
    ("completion", "level"),
    [
        (bash("pytest -x -q"), "effect"),
        ([bash("pytest -q -x")], "exact"),
        ('Bash {"command": "pytest -q -x"}', "exact"),
        (
            '<tool_call>\n{"name": "Bash", "arguments": {"command": "pytest -q"}}\n</tool_call>',
            "target",
        ),
        (bash("make"), "tool"),
        ("I would run pytest -q -x.", None),
        (bash(""), "tool"),
        ([], None),
        ("<tool_call>not json</tool_call>", None),
        ('Bash {"command": "unclosed', None),
    ],
)
def test_reward_falls_with_the_level_of_agreement(completion, level):
    expected = LEVEL_CREDIT[level] if level else 0.0
    for row in (
        {"chosen_action": CONSENSUS},
        {"chosen_action_json": json.dumps(CONSENSUS)},
        {"chosen": [CONSENSUS]},
        {"chosen": canonical_action(CONSENSUS).render()},
    ):
        assert consensus_reward(completion, row) == expected


def test_paths_are_read_against_the_working_directory_of_the_prompt():
    def read(path):
        return call("Read", file_path=path)

    prompt = [
        {"role": "system", "content": "You are an agent.\n\nWorking directory: /home/ada/shop\n"},
        {"role": "user", "content": "Working directory: /tmp"},
    ]
    row = {"prompt": prompt, "chosen": [read("src/a.py")]}
    assert consensus_reward([read("/home/ada/shop/src/a.py")], row) == 1.0
    assert consensus_reward([read("/tmp/src/a.py")], row) == LEVEL_CREDIT["tool"]


def test_row_without_a_consensus_is_an_error():
    with pytest.raises(KeyError):
        consensus_reward("x", {})


def test_rendered_actions_are_read_back():
    for message in (CONSENSUS, together(CONSENSUS, bash("ls")), says("Done.\nAll pass.")):
        action = canonical_action(message)
        assert parse_rendered(action.render()) == action
