"""Conversations of our own, as a user of the client could have them; each tries something else."""

import base64
import json
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable
from typing import Any

from tests.client.clients import Desk
from tests.client.scripted_model import Block, ScriptedModel, call, text, thinking
from tests.client.terminal import modes, rewound, summarized, typed

ALL_TOOLS = (
    "--allowedTools",
    "Read,Edit,Write,Bash,Grep,Glob,Task,Agent,Skill,ToolSearch,mcp__shelf",
)
Conversation = Callable[[Desk, list[str]], ScriptedModel]


def talk(
    desk: Desk,
    command: list[str],
    *answers: list[Block],
    helper: list[list[Block]] | None = None,
    say: str = "MAINTASK: make f return 2",
    options: tuple[str, ...] = ALL_TOOLS,
    then: tuple[tuple[str, ...], ...] = (),
) -> ScriptedModel:
    """Have one request answered, and each of `then` by a client that is started again."""
    model = ScriptedModel(answers, helper or ())
    desk.said = desk.run(command, model.url, "-p", say, *options)
    for more in then:
        desk.said += desk.run(command, model.url, "-p", *more, *options)
    return model


def tools(desk: Desk, command: list[str]) -> ScriptedModel:
    """Parallel calls, every file tool, errors, thinking, characters of other scripts, and a second run."""
    a = str(desk.project / "a.py")
    odd = 'é 🙂 "quoted" \\ \t <tag> & \u2028 \x07 nul'
    return talk(
        desk,
        command,
        [thinking("hm"), text("I look."), call("Read", file_path=a), call("Bash", command="ls")],
        [call("Edit", file_path=a, old_string="return 1", new_string="return 2")],
        [call("Bash", command=f"cd {desk.project} && python3 a.py", description="Run it")],
        [call("Read", file_path=str(desk.project / "missing.py"))],
        [call("Bash", command="exit 3"), call("Bash", command="echo after")],
        [call("Write", file_path=str(desk.project / "new.txt"), content=odd)],
        [call("Read", file_path=str(desk.project / "new.txt"))],
        [call("Grep", pattern="return", path=str(desk.project)), call("Glob", pattern="*.py")],
        [call("Edit", file_path=a, old_string="nowhere", new_string="x")],
        [call("NoSuchTool", x=1), call("Read", wrong="argument")],
        [text("Done."), text("Really.")],
        [call("Read", file_path=a)],
        [text("Done again.")],
        then=(("And again", "--continue"),),
    )


def fork(desk: Desk, command: list[str]) -> ScriptedModel:
    """A session that is taken up twice: once as another, once as itself."""
    a = str(desk.project / "a.py")
    model = ScriptedModel(
        [[call("Read", file_path=a)], [text("One.")], [text("Two.")], [call("Read", file_path=a)]]
    )
    desk.said = desk.run(command, model.url, "-p", "MAINTASK: look", *ALL_TOOLS)
    (log,) = (p for p in desk.logs.rglob("*.jsonl") if not p.name.startswith("agent-"))
    resume = ("--resume", log.stem)
    desk.said += desk.run(command, model.url, "-p", "Fork", *resume, "--fork-session", *ALL_TOOLS)
    desk.said += desk.run(command, model.url, "-p", "Go on", *resume, *ALL_TOOLS)
    return model


def compact(desk: Desk, command: list[str]) -> ScriptedModel:
    """A summary takes the place of what came before."""
    a = str(desk.project / "a.py")
    return talk(
        desk,
        command,
        [call("Read", file_path=a)],
        [call("Edit", file_path=a, old_string="return 1", new_string="return 2")],
        [text("Done.")],
        [call("Read", file_path=a)],
        [text("After.")],
        then=(("/compact", "--continue"), ("And now?", "--continue")),
    )


def subagent(desk: Desk, command: list[str]) -> ScriptedModel:
    """A helper with a conversation of its own."""
    a = str(desk.project / "a.py")
    task = {
        "description": "Look",
        "prompt": "SUBTASK: read a.py",
        "subagent_type": "general-purpose",
    }
    return talk(
        desk,
        command,
        [text("I ask a helper."), call("Agent", **task)],
        [call("Agent", **task, run_in_background=False)],
        [text("Done.")],
        helper=[[call("Read", file_path=a)], [text("f returns 1.")]] * 2,
    )


def helpers(desk: Desk, command: list[str]) -> ScriptedModel:
    """Three helpers at once, each with a conversation of its own."""
    a = str(desk.project / "a.py")
    tasks = [
        call(
            "Agent", description=f"Look {n}", prompt=f"SUBTASK {n}", subagent_type="general-purpose"
        )
        for n in range(3)
    ]
    answers = [[call("Read", file_path=a)], *([[text("f returns 1.")]] * 5)]
    return talk(desk, command, tasks, [text("Done.")], [text("Well.")], helper=answers)


def project(desk: Desk, command: list[str]) -> ScriptedModel:
    """Memory files, hooks, and two skills that are loaded side by side."""
    (desk.project / "CLAUDE.md").write_text("Always run the tests.\n")
    (desk.home / ".claude").mkdir()
    (desk.home / ".claude" / "CLAUDE.md").write_text("I like short answers.\n")
    inner = desk.project / "inner"
    inner.mkdir()
    (inner / "CLAUDE.md").write_text("Inner rules.\n")
    (inner / "b.py").write_text("x = 1\n")
    for name in ("tide", "moon"):
        folder = desk.project / ".claude" / "skills" / name
        folder.mkdir(parents=True)
        head = f"---\nname: {name}\ndescription: Use for {name}s.\n---\n"
        (folder / "SKILL.md").write_text(f"{head}\nThe {name} is high.\n")

    def hook(words: str) -> list[dict[str, Any]]:
        return [{"matcher": "*", "hooks": [{"type": "command", "command": words}]}]

    more = '{"hookSpecificOutput":{"hookEventName":"PostToolUse","additionalContext":"Format it."}}'
    desk.settings(
        hooks={
            "SessionStart": hook("echo A session starts."),
            "UserPromptSubmit": hook("echo Be careful."),
            "PostToolUse": hook(f"echo '{more}'"),
            "Stop": hook("true"),
        }
    )
    return talk(
        desk,
        command,
        [call("Skill", skill="tide"), call("Skill", skill="moon")],
        [call("Read", file_path=str(inner / "b.py"))],
        [call("Edit", file_path=str(inner / "b.py"), old_string="x = 1", new_string="x = 2")],
        [text("Done.")],
    )


def refusals(desk: Desk, command: list[str]) -> ScriptedModel:
    """Calls that the user has not allowed, and a mode in which only a plan is made."""
    a = str(desk.project / "a.py")
    edit = call("Edit", file_path=a, old_string="return 1", new_string="return 2")
    return talk(
        desk,
        command,
        [call("Read", file_path=a)],
        [edit],
        [call("Bash", command="rm a.py")],
        [text("I may not.")],
        [call("Read", file_path=a)],
        [text("The plan: none.")],
        options=(),
        then=(("Plan it", "--continue", "--permission-mode", "plan"),),
    )


def media(desk: Desk, command: list[str]) -> ScriptedModel:
    """A picture, a document, a notebook, and an output that is too long to be shown."""
    row = b"\0" + b"\xff\0\0" * 8
    parts = [
        (b"IHDR", b"\0\0\0\x08\0\0\0\x08\x08\x02\0\0\0"),
        (b"IDAT", zlib.compress(row * 8)),
        (b"IEND", b""),
    ]
    picture = b"\x89PNG\r\n\x1a\n" + b"".join(
        len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")
        for kind, data in parts
    )  # fmt: skip
    (desk.project / "p.png").write_bytes(picture)
    (desk.project / "d.pdf").write_bytes(base64.b64decode(_PDF))
    cell = {
        "cell_type": "code",
        "source": ["1 + 1"],
        "metadata": {},
        "outputs": [],
        "execution_count": None,
    }
    notebook = {"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    (desk.project / "n.ipynb").write_text(json.dumps(notebook))
    paths = [str(desk.project / name) for name in ("p.png", "d.pdf", "n.ipynb")]
    return talk(
        desk,
        command,
        *([call("Read", file_path=path)] for path in paths),
        [call("Bash", command="seq 1 20000")],
        [text("Done.")],
    )


_PDF = base64.b64encode(
    b"%PDF-1.1\n1 0 obj<</Type/Catalog/Pages 2 0 R>>endobj\n2 0 obj<</Type/Pages/Kids[3 0 R]/Count 1>>endobj\n"
    b"3 0 obj<</Type/Page/Parent 2 0 R/MediaBox[0 0 99 99]>>endobj\ntrailer<</Root 1 0 R>>\n%%EOF"
)
_SHELF = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    kind = asked["method"]
    if kind == "initialize":
        told = {"protocolVersion": asked["params"]["protocolVersion"], "capabilities": {"tools": {}},
                "serverInfo": {"name": "shelf", "version": "1"}, "instructions": "Ask the shelf first."}
    elif kind == "tools/list":
        told = {"tools": [{"name": "find", "description": "Find a book.", "inputSchema": {
            "type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]}}]}
    elif kind == "tools/call":
        told = {"content": [{"type": "text", "text": "On the second board."}]}
    else:
        told = {}
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": told}), flush=True)
"""


def server(desk: Desk, command: list[str]) -> ScriptedModel:
    """A tool of an MCP server, found by a search for tools where they are deferred."""
    program = desk.home / "shelf.py"
    program.write_text(_SHELF)
    config = desk.home / "mcp.json"
    shelf = {"type": "stdio", "command": sys.executable, "args": [str(program)]}
    config.write_text(json.dumps({"mcpServers": {"shelf": shelf}}))
    return talk(
        desk,
        command,
        [call("ToolSearch", query="select:mcp__shelf__find", max_results=3)],
        [call("mcp__shelf__find", title="Tides")],
        [text("It is on the second board.")],
        options=("--mcp-config", str(config), *ALL_TOOLS),
    )


def background(desk: Desk, command: list[str]) -> ScriptedModel:
    """A command that runs on while the model works."""
    return talk(
        desk,
        command,
        [call("Bash", command="sleep 0.2; echo slept", run_in_background=True)],
        [call("Bash", command="sleep 1.5; echo waited")],
        [text("Done.")],
    )


def queued(desk: Desk, command: list[str]) -> ScriptedModel:
    """Messages that are typed while the model works, over the client's own stream."""
    model = ScriptedModel([
        [call("Bash", command="sleep 1.5; echo one")],
        [call("Bash", command="echo two")],
        [text("Done.")],
        [text("Done too.")],
    ])  # fmt: skip
    _stream(desk, command, model, ["MAINTASK: make f return 2", "Rather 3, please"], at=0)
    return model


def interrupted(desk: Desk, command: list[str]) -> ScriptedModel:
    """A call that the user stops, and what is said then."""
    model = ScriptedModel(
        [[call("Bash", command="sleep 20")], [text("I stopped.")], [text("Yes.")]]
    )
    stop = {"type": "control_request", "request_id": "r1", "request": {"subtype": "interrupt"}}
    _stream(desk, command, model, ["MAINTASK: wait", stop, "Why?"], at=0)
    return model


def _stream(
    desk: Desk, command: list[str], model: ScriptedModel, inputs: list[Any], *, at: int
) -> None:
    """Talk to the client by its stream: what comes second is sent once answer `at` is out."""
    options = ("-p", "--input-format", "stream-json", "--output-format", "stream-json", "--verbose")
    is_out = threading.Event()
    model.before = lambda number: is_out.set() if number == at else None
    process = subprocess.Popen(
        [*command, *options, *ALL_TOOLS], cwd=desk.project, env=desk.env(model.url), text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None

    def send(item: Any) -> None:
        if isinstance(item, str):
            item = {"type": "user", "message": {"role": "user", "content": item}}
        process.stdin.write(json.dumps(item) + "\n")
        process.stdin.flush()

    with process:
        send(inputs[0])
        assert is_out.wait(60)
        for item in inputs[1:]:
            time.sleep(0.5)
            send(item)
        time.sleep(0.5)
        process.stdin.close()
        desk.said = process.stdout.read()


CONVERSATIONS: dict[str, Conversation] = {
    each.__name__: each
    for each in (
        tools, fork, compact, subagent, helpers, project, refusals, media, server, background, queued, interrupted,
        rewound, summarized, modes, typed,
    )
}  # fmt: skip
