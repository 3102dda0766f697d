"""OpenCode, newest of npm: driven on loopback against a scripted model, and its database beside what it sent.

    python -m tests.client.opencode tests/data/opencode.json.gz

writes the recording for `make test`: the database as SQL, with other names for folders of this machine.
"""

import gzip
import json
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.client.clients import FOLDER, Place, packed
from tests.client.recordings import renamed
from tests.loopback import LoopbackServer

VERSION = "1.18.34"
RECORDED_TABLES = ("project", "session", "message", "part", "session_context_epoch")
_CONTEXT = 20_000
Call = tuple[str, dict[str, Any]]


class ChatModel(LoopbackServer):
    """The Chat Completions API of one model: says what a script tells it, and keeps what it was asked."""

    def __init__(
        self, script: list[tuple[list[Call], str, int]], helper: list[tuple[list[Call], str, int]]
    ):
        self.script, self.helper = list(script), list(helper)
        self.requests: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        super().__init__()
        self.url += "/v1"

    def say(self, body: dict[str, Any]) -> tuple[int, list[Call], str, int]:
        """Return the number of a request, calls, text and tokens of its answer."""
        with self._lock:
            said = json.dumps(body["messages"])
            if body.get("tools"):
                lines = self.helper if "SUBTASK" in said and "MAINTASK" not in said else self.script
                calls, text, n_tokens = lines.pop(0) if lines else ([], "That is all.", 100)
                self.requests.append({"messages": body["messages"], "tools": body["tools"]})
                return len(self.requests), calls, text, n_tokens
            if "title" in said[:400]:
                return 0, [], "A title", 100
            return 0, [], "The user wanted f to return 2.", 100

    def serve(self, request: Any, body: bytes) -> None:
        """Answer a request of the client."""
        number, calls, text, n_tokens = self.say(json.loads(body))
        delta: dict[str, Any] = {"role": "assistant"} | ({"content": text} if text else {})
        if calls:
            delta["tool_calls"] = [
                {
                    "index": place, "id": f"call_{number:03d}_{place}", "type": "function",
                    "function": {"name": name, "arguments": json.dumps(arguments)},
                }
                for place, (name, arguments) in enumerate(calls)
            ]  # fmt: skip
        usage = {"prompt_tokens": n_tokens, "completion_tokens": 5, "total_tokens": n_tokens + 5}
        base = {"id": f"c{number}", "object": "chat.completion.chunk", "created": 1, "model": "m1"}
        reason = "tool_calls" if calls else "stop"
        chunks = (
            {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
            {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}], "usage": usage},
        )
        lines = [*(json.dumps(base | chunk) for chunk in chunks), "[DONE]"]
        data = "".join(f"data: {line}\n\n" for line in lines).encode()
        self.answer(request, 200, data, [("content-type", "text/event-stream")])


class OpenCodeDesk(Place):
    """A home and a project in which OpenCode works."""

    @property
    def data(self) -> Path:
        """The folder that holds the database."""
        return self.home / ".local" / "share" / "opencode"

    def run(self, url: str, *arguments: str) -> None:
        """Have one request answered."""
        limit = {"context": _CONTEXT, "output": 1_000}
        settings = {
            "autoupdate": False, "share": "disabled", "model": "lab/m1", "small_model": "lab/m1",
            "permission": {"edit": "allow", "bash": "allow"},
            "provider": {
                "lab": {
                    "npm": "@ai-sdk/openai-compatible", "name": "Lab",
                    "options": {"baseURL": url, "apiKey": "dummy"},
                    "models": {"m1": {"name": "m1", "limit": limit}},
                }
            },
        }  # fmt: skip
        folder = self.home / ".config" / "opencode"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "opencode.json").write_text(json.dumps(settings))
        place = subprocess.run(["npm", "config", "get", "registry"], capture_output=True, text=True)
        env = {
            "PATH": os.environ["PATH"], "HOME": str(self.home),
            "npm_config_registry": place.stdout.strip(), "OPENCODE_DISABLE_AUTOUPDATE": "1",
        }  # fmt: skip
        program = packed(
            f"opencode-linux-x64@{VERSION}", FOLDER / f"opencode-{VERSION}", "bin/opencode"
        )
        done = subprocess.run(
            [*program, "run", *arguments], cwd=self.project, env=env, text=True, timeout=180,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.said += done.stdout


def conversation(desk: OpenCodeDesk) -> ChatModel:
    """Calls side by side, errors, a helper, a context that gets too long and is summarized, and a second run."""
    a = str(desk.project / "a.py")
    task = {"description": "Look", "prompt": "SUBTASK: read a.py", "subagent_type": "general"}
    model = ChatModel(
        [
            (
                [("read", {"filePath": a}), ("bash", {"command": "ls", "description": "List"})],
                "I look.",
                100,
            ),
            ([("read", {"filePath": str(desk.project / "missing.py")})], "", 200),
            (
                [("edit", {"filePath": a, "oldString": "return 1", "newString": "return 2"})],
                "",
                300,
            ),
            ([("task", task)], "", 400),
            ([("bash", {"command": "echo no; exit 3", "description": "Fail"})], "", 500),
            ([], "Done.", 600),
            ([("bash", {"command": "python3 a.py", "description": "Run"})], "", 19_900),
            ([("grep", {"pattern": "return"})], "", 700),
            ([], "Done again.", 800),
            ([], "Thanks.", 900),
        ],
        [([("read", {"filePath": a})], "", 100), ([], "f returns 1.", 200)],
    )
    desk.run(model.url, "MAINTASK: make f return 2")
    desk.run(model.url, "--continue", "And run it")
    desk.run(model.url, "--continue", "Thank you")
    return model


class OpenCodeRecording:
    """A database as SQL and what was sent, with other names for the folders of this machine."""

    def __init__(self, desk: OpenCodeDesk, requests: list[dict[str, Any]]) -> None:
        self._names = {str(desk.project): "/home/kim/tide", str(desk.home): "/home/kim"}
        with closing(sqlite3.connect(desk.data / "opencode.db")) as rows:
            self.sql = [*self._dumped(rows)]
        self.sent = [renamed({"messages": each["messages"]}, self._names) for each in requests]

    def _dumped(self, rows: sqlite3.Connection) -> Iterator[list[Any]]:
        for table in RECORDED_TABLES:
            (made,) = rows.execute(
                "SELECT sql FROM sqlite_master WHERE name = ?", (table,)
            ).fetchone()
            found = [list(map(self._cell, row)) for row in rows.execute(f"SELECT * FROM {table}")]
            yield [table, made, found]

    def _cell(self, value: Any) -> Any:
        if isinstance(value, str) and value.startswith("{"):
            return json.dumps(renamed(json.loads(value), self._names), ensure_ascii=False)
        return renamed(value, self._names)


def main() -> None:
    """Have the conversation, and write its recording."""
    with TemporaryDirectory() as place:
        desk = OpenCodeDesk(Path(place))
        model = conversation(desk)
        model.close()
        made = OpenCodeRecording(desk, model.requests)
        data = json.dumps({"tables": made.sql, "sent": made.sent}, ensure_ascii=False).encode()
        Path(sys.argv[1]).write_bytes(gzip.compress(data, mtime=0))


if __name__ == "__main__":
    main()
