import json

import pytest

from replay_pipeline.normalize import DJNormalizer
from replay_pipeline.normalize.views import ParsedAction, ToolCall, read_side
from replay_pipeline.testing.sample import ANSWERS_FILE

CALLS = [
    ("Bash", {"command": "ls"}),
    ("Bash", {"command": "sed -n '1,40p' src/a.py | grep -c '^$'", "description": "Count"}),
    ("Read", {"file_path": "/a/b.py"}),
    ("Read", {"file_path": "/a/b.py", "offset": 290, "limit": 50}),
    ("Glob", {"pattern": "**/*.py"}),
    ("Glob", {"pattern": "**/*"}),
    ("Grep", {"pattern": r"^\s*(def|class)\s+\w+\(", "output_mode": "content", "-n": True}),
    ("Edit", {"file_path": "a.py", "old_string": "x = {}", "new_string": "x = {**y}\n"}),
    ("Write", {"file_path": "t.csv", "content": "1,2,3\n4,5,6\n7,8,9\n"}),
    ("TodoWrite", {"todos": [{"content": "Run it", "status": "pending", "id": "1"}]}),
    ("WebFetch", {"url": "https://example.com/x", "prompt": "What is new?"}),
    ("ExitPlanMode", {}),
    ("Task", {"description": "look", "prompt": "Find where the clock is set. Then stop."}),
]


def sample_calls():
    for line in ANSWERS_FILE.read_text("utf-8").splitlines():
        for call in json.loads(line)["message"].get("tool_calls") or ():
            function = call["function"]
            try:
                yield function["name"], json.loads(function["arguments"])
            except json.JSONDecodeError:  # the sample has a truncated answer
                continue


def serializations(name, arguments):
    text = json.dumps(arguments)
    openai = {"id": "c1", "type": "function", "function": {"name": name, "arguments": text}}
    loose = {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}
    block = {"type": "tool_use", "id": "toolu_1", "name": name, "input": arguments}
    for envelope in (
        {"role": "assistant", "content": None, "tool_calls": [openai]},
        {"role": "assistant", "content": "", "tool_calls": [loose]},
        {"role": "assistant", "content": [block]},
        [block],
        {"name": name, "arguments": arguments},
    ):
        yield json.dumps(envelope)
        yield json.dumps(envelope, separators=(",", ":"))
        yield json.dumps(envelope, indent=2)


@pytest.mark.parametrize(("name", "arguments"), CALLS)
def test_every_serialization_is_read_as_the_same_call(name, arguments):
    for text in serializations(name, arguments):
        for action in (read_side(text), read_side(None, text)):
            assert action == ParsedAction("", (ToolCall(name, arguments),))


@pytest.mark.slow
def test_tool_calls_survive_the_recipe_in_every_serialization(make_row, pair_table):
    normalizer = DJNormalizer("tool_calls")
    rows = [
        make_row(
            f"{number}-{form}",
            chosen=text,
            chosen_action=json.loads(text) if is_message else None,
            rejected="I would rather ask first.",
        )
        for number, (name, arguments) in enumerate([*CALLS, *sample_calls()])
        for form, text in enumerate(serializations(name, arguments))
        for is_message in ([True, False] if form < 9 else [False])
    ]
    report = normalizer.run(pair_table(*rows)).report
    # The same text with and without its message is one pair twice, by design.
    n_twins = report.dropped.pop("pair_exact_deduplicator")
    assert n_twins == len(rows) - len(
        {row["state_id"].split("-")[0] + row["state_messages_json"] for row in rows}
    )
    n_unique = report.n_in - n_twins
    assert n_unique > 200
    assert report.n_kept / n_unique >= 0.98


@pytest.mark.parametrize(
    "text", ["", "{", "[1, 2]", '{"a": 1}', "null", "{}", "[]", '"x"', "[" * 100_000, "{'a'}"]
)
def test_anything_else_is_prose(text):
    assert read_side(None, text).calls == ()


def test_the_action_view_has_values_without_envelope():
    action = read_side(
        json.dumps(
            {
                "role": "assistant",
                "content": "Look.",
                "tool_calls": [
                    {"function": {"name": "Read", "arguments": '{"path": "a \\"b\\"", "n": 3}'}}
                ],
            }
        )
    )
    assert action.view("action") == 'Look.\nRead\na "b"\n3'
    assert action.view("prose") == "Look."
