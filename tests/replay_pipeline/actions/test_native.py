"""The native form of actions: what a client takes, and nothing of how it was spelled."""

import json

import pytest

from replay_pipeline.actions import canonical_action
from replay_pipeline.actions.native import NativeForm
from replay_pipeline.actions.tools import ToolList
from tests.support.messages import call

CWD = "/home/ada/shop"


def tool(name, required=(), **properties):
    return {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {key: dict(value) for key, value in properties.items()},
                "required": list(required),
            },
        },
    }


TEXT, ABSOLUTE = {"type": "string"}, {"type": "string", "description": "Absolute path of the file."}
TOOLS = [
    tool(
        "Edit",
        ["file_path", "old_string", "new_string"],
        file_path=ABSOLUTE,
        old_string=TEXT,
        new_string=TEXT,
        replace_all={"type": "boolean"},
    ),
    tool("Read", ["file_path"], file_path=ABSOLUTE, offset={"type": "number"}),
    tool("Grep", ["pattern"], pattern=TEXT, path=TEXT),
    tool("LS", ["path"], path=ABSOLUTE),
    tool("Task", ["description", "prompt"], description=TEXT, prompt=TEXT, subagent_type=TEXT),
    tool("Bash", ["command"], command=TEXT, description=TEXT, timeout={"type": "number"}),
    tool("mcp__db__query", ["sql"], sql=TEXT, limit={"type": "integer"}),
]


def native(message, history=(), tools=TOOLS, cwd=CWD):
    """The arguments of the native form as text, held to be the same action."""
    action = canonical_action(message, cwd=cwd)
    form = NativeForm(list(history), tools, cwd).message(action)
    assert canonical_action(form, cwd=cwd) == action
    return form["tool_calls"][0]["function"]["arguments"]


@pytest.mark.parametrize(
    ("told", "path"),
    [
        ("Path relative to the working directory.", "cart.py"),
        ("Must be absolute, not relative.", f"{CWD}/cart.py"),
        ("Absolute or relative path.", f"{CWD}/cart.py"),
        ("", f"{CWD}/cart.py"),
    ],
)
def test_a_path_is_written_as_the_schema_says_in_full_if_the_prompt_shows_the_folder(told, path):
    offered = [tool("Read", ["file_path"], file_path={"type": "string", "description": told})]
    form = NativeForm([{"role": "user", "content": f"You are in {CWD}."}], offered, CWD)
    action = canonical_action(call("Read", file_path="cart.py"), cwd=CWD)
    [made] = form.message(action)["tool_calls"]
    assert json.loads(made["function"]["arguments"]) == {"file_path": path}


def test_a_path_below_a_folder_that_the_prompt_does_not_show_is_relative():
    offered = [tool("Read", ["file_path"], file_path=TEXT)]
    asked = [{"role": "user", "content": "Open the cart."}]
    for spelled in ("cart.py", f"{CWD}/cart.py"):
        assert native(call("Read", file_path=spelled), asked, offered) == '{"file_path":"cart.py"}'


def test_a_path_is_absolute_where_the_tool_wants_it():
    for spelled in ("src/a.py", "./src/a.py", f"{CWD}/src/a.py", "src/b/../a.py"):
        assert native(call("Read", file_path=spelled)) == '{"file_path":"/home/ada/shop/src/a.py"}'


def test_keys_stand_in_the_order_of_the_schema():
    text = native(call("Edit", new_string="b", old_string="a", file_path="a.py"))
    assert list(json.loads(text)) == ["file_path", "old_string", "new_string"]
    assert native(call("mcp__db__query", limit=3, sql="x")) == '{"sql":"x","limit":3}'


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        (call("LS"), '{"path":"/home/ada/shop"}'),
        (
            call(
                "Task", prompt="Find each caller of the parser, and count.", description="Callers"
            ),
            '{"description":"Find each caller of the","prompt":"Find each caller of the parser, and count."}',
        ),
    ],
)
def test_required_arguments_are_there_and_made_alike_for_both_sides(message, arguments):
    assert native(message) == arguments
    given = json.loads(arguments)
    assert (
        ToolList(TOOLS).complaint(message["tool_calls"][0]["function"]["name"], json.dumps(given))
        is None
    )


def test_what_the_session_always_writes_is_written():
    history = [
        call("Edit", replace_all=False, file_path=f"{CWD}/b.py", old_string="c", new_string="d")
    ]
    edit = call("Edit", file_path="a.py", old_string="a", new_string="b")
    assert json.loads(native(edit, history))["replace_all"] is False
    assert "replace_all" not in json.loads(native(edit))


@pytest.mark.parametrize(("habit", "path"), [("src", "lib"), (f"{CWD}/src", f"{CWD}/lib")])
def test_where_the_tool_says_nothing_the_session_decides(habit, path):
    history = [call("Grep", pattern="x", path=habit)]
    for spelled in ("lib", f"{CWD}/lib"):
        assert native(call("Grep", pattern="y", path=spelled), history) == (
            f'{{"pattern":"y","path":"{path}"}}'
        )


def test_words_beside_a_call_and_optional_labels_are_left_out():
    message = call("Bash", command="pytest", description="Run the tests") | {"content": "So?"}
    action = canonical_action(message, cwd=CWD)
    form = NativeForm([], TOOLS, CWD).message(action)
    assert form["content"] == ""
    assert native(message) == '{"command":"pytest"}'


def test_without_a_folder_paths_stay():
    assert native(call("Read", file_path="a.py"), cwd=None) == '{"file_path":"a.py"}'


def test_what_cannot_run_and_what_is_text_stay_as_they_are():
    text = canonical_action("I am done.")
    assert NativeForm([], TOOLS, CWD).message(text) == text.to_message()
    broken = canonical_action(call("Read"), cwd=CWD)
    assert not broken.is_valid
    assert NativeForm([], TOOLS, CWD).message(broken) == broken.to_message()
