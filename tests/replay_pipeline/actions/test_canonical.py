"""The canonical form itself: what is kept, what is dropped, what both sides look like."""

import json

import pytest

from replay_pipeline.actions import canonical_action

CWD = "/home/ada/shop"


def openai(name, arguments, **more):
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"function": function}], **more}


def test_student_and_teacher_look_the_same():
    student = {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "xyz"},
            {"type": "text", "text": "Let me look at the cart."},
            {
                "type": "tool_use",
                "id": "toolu_01",
                "name": "Read",
                "input": {"file_path": f"{CWD}/src/cart.py", "limit": 2000},
            },
        ],
    }
    teacher = openai(
        "Read",
        '{"offset": null, "file_path": "src/cart.py"}',
        reasoning_content="The user wants ...",
        refusal=None,
    )
    one, other = (canonical_action(message, cwd=CWD) for message in (student, teacher))
    assert one == other
    assert hash(one) == hash(other)
    assert one.render() == 'Read {"file_path":"src/cart.py"}'
    assert one.to_message() == {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "call_0",
                "type": "function",
                "function": {"name": "Read", "arguments": '{"file_path":"src/cart.py"}'},
            }
        ],
    }


def test_a_needless_cd_and_labels_do_not_show_in_what_a_model_reads():
    action = canonical_action(
        openai("Bash", {"command": f"cd {CWD} && pytest -q", "description": "Run tests"}), cwd=CWD
    )
    assert action.render() == 'Bash {"command":"pytest -q"}'
    elsewhere = canonical_action(openai("Bash", {"command": "cd web && npm test"}), cwd=CWD)
    assert elsewhere.render() == 'Bash {"command":"cd web && npm test"}'


def test_paths_inside_the_working_directory_are_relative_others_absolute():
    def shown(path):
        return canonical_action(openai("Read", {"file_path": path}), cwd=CWD).calls[0].values()

    assert shown(f"{CWD}/src/a.py") == {"file_path": "src/a.py"}
    assert shown("/home/ada/shop2/a.py") == {"file_path": "/home/ada/shop2/a.py"}
    assert shown("../other/a.py") == {"file_path": "/home/ada/other/a.py"}
    assert shown("~/a.py") == {"file_path": "/home/ada/a.py"}
    assert shown(CWD) == {"file_path": "."}
    assert shown("C:\\work\\a.py") == {"file_path": "C:\\work\\a.py"}


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (openai("Read", "{not json"), "malformed_arguments"),
        (openai("Read", "[1]"), "malformed_arguments"),
        (openai("Read", '{"file_path": NaN}'), "malformed_arguments"),
        (openai("Read", 7), "malformed_arguments"),
        (openai("Read", {}), "schema_invalid: Read: file_path is missing"),
        (openai("Bash", {"command": ["ls"]}), "schema_invalid: Bash: command has the wrong type"),
        (openai("MultiEdit", {"file_path": "a", "edits": ["x"]}), "schema_invalid: MultiEdit: one"),
        (openai("MultiEdit", {"file_path": "a", "edits": [{"old_string": ""}]}), "schema_invalid"),
        (openai("", {}), "unnamed_tool"),
        (openai(None, {}), "unnamed_tool"),
        ({"role": "assistant", "tool_calls": ["ls"]}, "unnamed_tool"),
        ({"role": "assistant", "content": ""}, "empty"),
        ({"role": "assistant", "content": None, "refusal": "I can't."}, "empty"),
        ({"role": "assistant", "content": "<think>only thoughts</think>"}, "empty"),
        (None, "empty"),
    ],
)
def test_what_cannot_run_is_invalid_with_a_reason(message, reason):
    action = canonical_action(message)
    assert not action.is_valid
    assert action.invalid_reason.startswith(reason)
    json.dumps(action.to_message())


def test_offered_tools_and_their_schemas_decide():
    tools = [
        {
            "type": "function",
            "function": {
                "name": name,
                "parameters": {
                    "type": "object",
                    "properties": {key: {"type": "string"} for key in ("command", "description")},
                    "required": ["command", "description"],
                    "additionalProperties": False,
                },
            },
        }
        for name in ("Bash", "mcp__shell__run")
    ]

    def reason(name, **arguments):
        return canonical_action(openai(name, arguments), tools=tools).invalid_reason

    assert reason("Bash", command="ls") is None  # a label cannot be demanded
    assert reason("Bash", command="ls", description=None) is None
    assert "'additionalProperties'" in reason("Bash", command="ls", cwd="/")
    assert "'required'" in reason("mcp__shell__run", command="ls")
    assert "command fail 'type'" in reason("mcp__shell__run", command=1, description="x")
    assert reason("Glob", pattern="*") == "unknown_tool: Glob"


def test_a_broken_tool_schema_judges_nothing():
    tools = [{"type": "function", "function": {"name": "T", "parameters": {"type": "nonsense"}}}]
    assert canonical_action(openai("T", {"x": 1}), tools=tools).is_valid


def test_words_beside_a_call_are_no_part_of_the_action():
    quiet, chatty = (openai("Bash", {"command": "ls"}, content=text) for text in (None, "Look!"))
    assert canonical_action(quiet) == canonical_action(chatty)


def test_lone_surrogates_survive_as_text():
    action = canonical_action({"role": "assistant", "content": "a\ud800b"})
    assert action.render().encode() == b"a?b"
    call = canonical_action(openai("Write", '{"file_path": "a", "content": "\\ud800"}'))
    assert call.is_valid
    assert call.render().encode() == b'Write {"content":"\\ud800","file_path":"a"}'
