"""A program that sends what a client sends, for tests without one: `python stand_in.py [how] WORDS …`."""

import json
import os
import re
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from urllib.request import Request, urlopen

_READ = {
    "name": "Read",
    "description": "Reads a file from the disk.",
    "input_schema": {
        "type": "object",
        "properties": {"file_path": {"type": "string", "description": "The absolute path"}},
        "required": ["file_path"],
    },
}
_TASK = {"name": "Task", "description": "Starts a helper.", "input_schema": {"type": "object"}}
_LIST = {"name": "TodoWrite", "description": "Keeps a list.", "input_schema": {"type": "object"}}


def system(model: str) -> str:
    here = Path.cwd()
    git = here / ".git"
    lines = [
        "You are a coding client.",
        f"Working directory: {here}",
        f"Is directory a git repo: {'Yes' if git.exists() else 'No'}",
        "Platform: linux",
        f"Today's date: {datetime.now(UTC):%Y-%m-%d}",
        f"You are powered by the model named Opus 4.5. The exact model ID is {model}.",
        f"Run {os.getpid()} of the client.",
        f"Notes are kept in {os.environ['HOME']}/.client/{re.sub('[^A-Za-z0-9]', '-', str(here))}.",
        "Prefer Grep to grep.",
    ]
    if git.exists():
        branch = (git / "HEAD").read_text().strip().rpartition("/")[2]
        lines += ["", "gitStatus: as it was at the start.", f"Current branch: {branch}", "(clean)"]
    return "\n".join(lines)


def send(messages: list[dict[str, object]], tools: list[dict[str, object]], model: str) -> list:
    body = {
        "model": model,
        "max_tokens": 32_000,
        "metadata": {"user_id": f"user-{os.getpid()}"},
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=9.9.9"},
            {"type": "text", "text": system(model)},
        ],
        "tools": tools,
        "messages": messages,
    }
    request = Request(
        f"{os.environ['ANTHROPIC_BASE_URL']}/v1/messages?beta=true",
        json.dumps(body).encode(),
        {"content-type": "application/json", "user-agent": "client-cli/9.8.7 (external)"},
    )
    with urlopen(request, timeout=5) as reply:
        return json.loads(reply.read())["content"]


def main() -> None:
    how, words = (sys.argv[1], sys.argv[2]) if sys.argv[1] in HOW else ("", sys.argv[1])
    if how in ("hangs", "leaves a child"):
        if how == "leaves a child":
            subprocess.Popen(
                [sys.executable, "-c", "import time; time.sleep(60)", os.environ["MARK"]]
            )
        time.sleep(60)
    if how == "asks":
        input("May I? ")
        input("Really? ")
    if how == "says nothing":
        sys.stdout.write("no key, no answer\n")
        return
    model = "claude-opus-4-5-20251101"
    (Path.home() / "written-by-the-client").write_text(words)
    planning = [PLANNING] if "plan" in sys.argv else []
    messages = asked(f"Notes of {os.getpid()}", *planning, words)
    todos: list[dict[str, str]] = []
    while calls := [
        block
        for block in send(messages, [_READ, _TASK, _LIST], model)
        if block["type"] == "tool_use"
    ]:
        results = [f"  Done: {call['name']}\n" for call in calls]
        for call in calls:
            if call["name"] == "Task":
                send(asked(call["input"]["prompt"]), [_READ], model)
            todos = call["input"].get("todos") or todos
        if len(calls) >= 10:
            items = [
                f"{n}. [{each['status']}] {each['content']}" for n, each in enumerate(todos, 1)
            ]
            told = "\n\nIt has:\n[" + "\n".join(items) + "]" if todos else ""
            reminder = f"<system-reminder>\nUse TodoWrite.{told}\n</system-reminder>"
            results[-1] = f"{results[-1].strip()}\n\n{reminder}"
        answers = [
            {"type": "tool_result", "tool_use_id": call["id"], "content": result}
            for call, result in zip(calls, results, strict=True)
        ]
        messages += [
            {"role": "assistant", "content": calls},
            {"role": "user", "content": answers},
        ]
    time.sleep(60)


def asked(*texts: str) -> list[dict[str, object]]:
    return [
        {"role": "user", "content": [{"type": "text", "text": text} for text in texts]},
        {"role": "system", "content": "Skills: none."},
    ]


PLANNING = (
    "<system-reminder>\nPlan mode is active.\nWrite to "
    f"{Path.home()}/.client/plans/calm-sea.md alone.\nAsk.\n</system-reminder>\n"
)
HOW = ("hangs", "asks", "says nothing", "leaves a child")

if __name__ == "__main__":
    main()
