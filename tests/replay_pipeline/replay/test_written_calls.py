"""Calls that a model wrote into its text are calls, and no markup is ever an answer in words."""

import json
import random
import re

import pytest

from replay_pipeline.replay.dialects.written_calls import (
    UnclearCallError,
    arguments_of,
    offered_name,
    read_written_calls,
)

SCHEMAS = {
    "Read": {
        "type": "object",
        "properties": {"file_path": {"type": "string"}, "limit": {"type": "integer"}},
    },
    "Edit": {
        "type": "object",
        "properties": {
            "file_path": {"type": "string"},
            "old_string": {"type": "string"},
            "new_string": {"type": "string"},
            "replace_all": {"type": "boolean"},
        },
    },
    "mcp__db__query": {
        "type": "object",
        "properties": {"sql": {"type": "string"}, "args": {"type": "array"}, "deep": {}},
    },
}
VALUES = {
    "file_path": ["src/a.py", "/home/ada/my notes.md", "ü/日本.txt", "true", "42"],
    "limit": [1, 2000],
    "old_string": ["x = 1", 'say("hi")\n\tif a < b && c > d:\n', "a\\n", "{}", "null"],
    "new_string": ["", "x = 2\n", "<b>bold</b> & 'quoted'", "[1, 2]"],
    "replace_all": [True, False],
    "sql": ["select * from t where a = 'b'"],
    "args": [[1, "two", None], []],
    "deep": [{"a": {"b": [True]}}],
}


def drawn_calls(rng: random.Random) -> list[tuple[str, dict]]:
    calls = []
    for name in rng.choices(sorted(SCHEMAS), k=rng.choice([1, 1, 1, 2, 3])):
        keys = [key for key in SCHEMAS[name]["properties"] if rng.random() < 0.8]
        calls.append((name, {key: rng.choice(VALUES[key]) for key in keys}))
    return calls


def dumps(value) -> str:
    return json.dumps(value, ensure_ascii=False)


def plain(value) -> str:
    """How templates with an element for each argument write a value."""
    return value if isinstance(value, str) else dumps(value)


def hermes(calls):
    return "\n".join(
        f"<tool_call>\n{dumps({'name': n, 'arguments': a})}\n</tool_call>" for n, a in calls
    )


def qwen_coder(calls):
    def one(name, arguments):
        body = "".join(
            f"<parameter={key}>\n{plain(value)}\n</parameter>\n" for key, value in arguments.items()
        )
        return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"

    return "\n".join(one(*call) for call in calls)


def glm(calls):
    def one(name, arguments):
        body = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{plain(value)}</arg_value>\n"
            for key, value in arguments.items()
        )
        return f"<tool_call>{name}\n{body}</tool_call>"

    return "\n".join(one(*call) for call in calls)


def deepseek_v3(calls):
    body = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{n}\n```json\n{dumps(a)}\n```<｜tool▁call▁end｜>"
        for n, a in calls
    )
    return f"<｜tool▁calls▁begin｜>{body}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"


def deepseek_v31(calls):
    body = "".join(
        f"<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{dumps(a)}<｜tool▁call▁end｜>" for n, a in calls
    )
    return f"<｜tool▁calls▁begin｜>{body}<｜tool▁calls▁end｜>"


def invokes(calls, mark: str, outer: str, *, says_type: bool) -> str:
    def one(name, arguments):
        body = "".join(
            f'<{mark}parameter name="{key}"'
            + (f' string="{str(isinstance(value, str)).lower()}"' if says_type else "")
            + f">{plain(value)}</{mark}parameter>\n"
            for key, value in arguments.items()
        )
        return f'<{mark}invoke name="{name}">\n{body}</{mark}invoke>'

    return f"<{outer}>\n" + "\n".join(one(*call) for call in calls) + f"\n</{outer}>"


def dsml(calls):
    return invokes(calls, "｜DSML｜", "｜DSML｜function_calls", says_type=True)


def dsml_v4(calls):
    return invokes(calls, "｜DSML｜", "｜DSML｜tool_calls", says_type=True)


def minimax(calls):
    return invokes(calls, "", "minimax:tool_call", says_type=False)


def kimi(calls):
    body = "".join(
        f"<|tool_call_begin|>functions.{n}:{i}<|tool_call_argument_begin|>{dumps(a)}<|tool_call_end|>"
        for i, (n, a) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{body}<|tool_calls_section_end|>"


def mistral(calls):
    return "[TOOL_CALLS]" + dumps([{"name": n, "arguments": a} for n, a in calls])


def mistral_v11(calls):
    return "".join(f"[TOOL_CALLS]{n}[ARGS]{dumps(a)}" for n, a in calls)


def harmony(calls):
    return "".join(
        f"<|start|>assistant<|channel|>commentary to=functions.{n} <|constrain|>json<|message|>"
        f"{dumps(a)}<|call|>"
        for n, a in calls
    )


def bare(calls):
    listed = [{"name": n, "arguments": a} for n, a in calls]
    return dumps(listed[0] if len(listed) == 1 else listed)


def fenced(calls):
    return f"```json\n{bare(calls)}\n```"


FORMS = {
    form.__name__: form
    for form in (
        hermes,
        qwen_coder,
        glm,
        deepseek_v3,
        deepseek_v31,
        dsml,
        dsml_v4,
        minimax,
        kimi,
        mistral,
        mistral_v11,
        harmony,
        bare,
        fenced,
    )
}
WHOLE_TEXT = {"bare", "fenced"}
MARKUP = re.compile(r"tool_call|TOOL_CALLS|DSML|<function=|<arg_|<parameter|invoke|<\|channel|▁")


@pytest.mark.parametrize("name", FORMS)
def test_a_whole_call_in_the_text_is_read_as_the_call_that_was_meant(name):
    rng = random.Random(name)
    for _ in range(150):
        calls = drawn_calls(rng)
        before = "" if name in WHOLE_TEXT else rng.choice(["", "I look at it first.\n\n"])
        text, found = read_written_calls(before + FORMS[name](calls), SCHEMAS)
        assert [(call.name, call.arguments) for call in found] == calls
        assert text == before.strip()


@pytest.mark.parametrize("name", sorted(FORMS.keys() - WHOLE_TEXT))
def test_a_call_that_breaks_off_is_malformed_and_never_words(name):
    rng = random.Random(name)
    for _ in range(150):
        calls = drawn_calls(rng)
        whole = "Now.\n" + FORMS[name](calls)
        start = whole.index("\n") + 1
        cut = whole[: rng.randrange(start + 12, len(whole))]
        try:
            text, found = read_written_calls(cut, SCHEMAS)
        except UnclearCallError:
            continue
        assert not MARKUP.search(text), cut
        assert [(call.name, call.arguments) for call in found] == calls[: len(found)]


def test_words_about_calls_and_other_json_stay_words():
    for text in (
        "The parser reads a tool_call element, and the function is in src/calls.py.",
        '{"version": "1.2", "name": "shop"}',
        "```json\n[1, 2]\n```",
        "Done: both tests pass.",
    ):
        assert read_written_calls(text, SCHEMAS) == (text, [])


def test_without_offered_tools_nothing_is_read():
    assert read_written_calls(hermes([("Read", {})]), {}) == (hermes([("Read", {})]), [])


def test_a_call_of_a_tool_that_was_not_offered_is_malformed():
    with pytest.raises(UnclearCallError, match="'Write', which is no tool"):
        read_written_calls(hermes([("Write", {"file_path": "a"})]), SCHEMAS)


@pytest.mark.parametrize(
    "written",
    [
        '{"file_path": "a"}',
        {"file_path": "a"},
        json.dumps('{"file_path": "a"}'),
        json.dumps(json.dumps('{"file_path": "a"}'))[0:0] or 'json\n{"file_path": "a"}',
        '```json\n{"file_path": "a"}\n```',
        '{"file_path": "a"}</tool_call>',
        '{"file_path": "a"}\n</function>\n</tool_call>',
        '{"file_path": "a"}<|tool_call_end|>',
        '{"file_path": "a"}<｜tool▁call▁end｜>',
    ],
)
def test_what_models_put_around_arguments_is_taken_off(written):
    assert arguments_of(written) == {"file_path": "a"}


@pytest.mark.parametrize("written", ['{"file_path": "a"', "[1]", 7, '"a"'])
def test_arguments_that_are_no_object_are_malformed(written):
    with pytest.raises(UnclearCallError):
        arguments_of(written)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("functions.Read", "Read"),
        ("functions.Read:3", "Read"),
        ("default_api.Edit", "Edit"),
        (" Read ", "Read"),
        ("read", "read"),
        ("functions.Write", "functions.Write"),
    ],
)
def test_a_namespace_of_the_template_is_no_part_of_a_name(written, meant):
    assert offered_name(written, SCHEMAS) == meant
