import json

import pytest

from trainer.data.rewards import (
    agreement,
    as_trl_reward,
    canonical_calls,
    consensus_reward,
    load_reward,
    parse_action,
)
from trainer.errors import TrainerConfigError


def call(name, **arguments):
    return {"function": {"name": name, "arguments": json.dumps(arguments)}}


def action(*calls, content=""):
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


READ = action(call("Read", file_path="a.py", limit=5))


@pytest.mark.parametrize(
    ("other", "level", "reward"),
    [
        (action(call("Read", limit=5, file_path="a.py"), content="Let me look."), "exact", 1.0),
        (action(call("Read", file_path="b.py")), "tool", 0.25),
        (action(call("Edit", file_path="a.py", limit=5)), None, 0.0),
        (action(call("Read", file_path="a.py"), call("Bash", command="ls")), None, 0.0),
        ({"role": "assistant", "content": "Done."}, None, 0.0),
    ],
)
def test_agreement_and_reward_by_level(other, level, reward):
    assert agreement(other, READ) == level
    assert consensus_reward(other, {"consensus": READ}) == reward


def test_a_generated_text_is_parsed_and_a_broken_call_is_no_action():
    text = 'Look.\n<tool_call>\n{"name": "Read", "arguments": {"file_path": "a"}}\n</tool_call>'
    parsed = parse_action(text)
    assert parsed["content"] == "Look."
    assert agreement(parsed, action(call("Read", file_path="a"))) == "exact"
    broken = parse_action("<tool_call>\n{oops\n</tool_call>")
    assert "tool_calls" not in broken
    assert "{oops" in broken["content"]


def test_trl_gets_one_reward_a_completion_recorded_or_generated():
    function = as_trl_reward(consensus_reward)
    rewards = function(
        completions=[[{"role": "assistant", "content": "garbled"}], "Done."],
        consensus=[READ, READ],
        action=[READ, None],
        trainer_state=object(),
    )
    assert rewards == [1.0, 0.0]


def level_of_file(message, row):
    return 0.5 if row["chosen_action"] == READ else -1.0


def test_a_reward_of_ones_own_is_loaded_by_name(monkeypatch):
    import sys
    import types

    monkeypatch.setitem(sys.modules, "my_rewards", types.ModuleType("my_rewards"))
    sys.modules["my_rewards"].half = level_of_file
    function = as_trl_reward(load_reward("my_rewards:half"))
    assert function(completions=["x"], consensus=[READ]) == [0.5]


@pytest.mark.parametrize("path", ["nowhere:f", "json:nothing", "json", "trainer.errors:__all__"])
def test_a_reward_that_cannot_be_loaded_is_named(path):
    with pytest.raises(TrainerConfigError, match=path.split(":")[0]):
        load_reward(path)


READ_CART = ("Read", '{"file_path": "cart.py"}')
ONE = '{"name": "Read", "arguments": {"file_path": "cart.py"}}'


@pytest.mark.parametrize(
    "text",
    [
        f"I look.\n<tool_call>\n{ONE}\n</tool_call>",
        "<tool_call>\n<function=Read>\n<parameter=file_path>\ncart.py\n</parameter>\n</function>\n"
        "</tool_call>",
        '<function=Read>{"file_path": "cart.py"}</function>',
        f"[TOOL_CALLS][{ONE}]",
        f"[TOOL_CALLS] [{ONE}]",
        ONE.replace("arguments", "parameters"),
        "<|python_tag|>" + ONE.replace("arguments", "parameters"),
    ],
)
def test_calls_are_read_in_the_form_of_every_family(text):
    assert canonical_calls(parse_action(text)) == [READ_CART]
