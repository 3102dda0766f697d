"""A session that is recorded while its calls are really made, in a real repository on disk.

What the session holds is what programs answered: `git`, `grep`, and the files themselves. Before each
call the whole tree is copied, so that a test can hold a rebuilt tree to it.
"""

import subprocess
from datetime import datetime
from pathlib import Path
from typing import Any

from replay_pipeline.storage.processes import child_environment
from tests.support.sessions import SessionBuilder, ToolCall


class Worked:
    """One session in one working tree."""

    def __init__(self, root: Path, name: str = "worked", *, start: str | None = None) -> None:
        self.root = root
        start = start or "2026-02-03T09:00:00.000Z"
        self.session = SessionBuilder(name, cwd=str(root), start=start, era="progress")
        self.session.user("Mend it.")
        self.before: dict[str, dict[str, str]] = {}
        """Every file of the tree before each call, by the id of its state."""

    @property
    def moment(self) -> datetime:
        return self.session._now

    def begin(self, files: dict[str, str]) -> None:
        """Make the repository, with a first commit."""
        self.root.mkdir(parents=True, exist_ok=True)
        self.git("init", "-q", "-b", "main")
        self.put(files)
        self.commit("Begin")

    def put(self, files: dict[str, str]) -> None:
        """Write files as somebody else would: the log does not tell."""
        for name, text in files.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")

    def git(self, *arguments: str, cwd: Path | None = None) -> str:
        now = self.moment.isoformat()
        return subprocess.run(
            ["git", *arguments],
            cwd=cwd or self.root,
            env=child_environment(
                GIT_AUTHOR_NAME="Mira", GIT_AUTHOR_EMAIL="mira@example.org", GIT_AUTHOR_DATE=now,
                GIT_COMMITTER_NAME="Mira", GIT_COMMITTER_EMAIL="mira@example.org",
                GIT_COMMITTER_DATE=now, GIT_CONFIG_GLOBAL="/dev/null", GIT_CONFIG_NOSYSTEM="1",
            ),
            check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip

    def commit(self, subject: str) -> None:
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", subject)

    def tree(self) -> dict[str, str]:
        return {
            str(path.relative_to(self.root)): path.read_text("utf-8")
            for path in sorted(self.root.rglob("*"))
            if path.is_file() and ".git" not in path.relative_to(self.root).parts
        }

    def call(self, name: str, **arguments: Any) -> tuple[str, str]:
        """Record a call; gives the id of its state and of the call."""
        message = self.session.assistant(calls=[ToolCall(name, arguments)])
        self.before[message.state_id] = self.tree()
        return message.state_id, message.tool_use_ids[0]

    def read(self, name: str, *, offset: int | None = None, limit: int | None = None) -> str:
        path = self.root / name
        window = {k: v for k, v in {"offset": offset, "limit": limit}.items() if v is not None}
        state, call = self.call("Read", file_path=str(path), **window)
        lines = path.read_text("utf-8").split("\n")
        first = offset or 1
        shown = lines[first - 1 : first - 1 + (limit or 2000)]
        file = {
            "filePath": str(path), "content": "\n".join(shown), "numLines": len(shown),
            "startLine": first, "totalLines": len(lines),
        }  # fmt: skip
        text = "\n".join(f"{number:>6}→{line}" for number, line in enumerate(shown, first))
        self.session.result(call, text, side_car={"type": "text", "file": file})
        return state

    def edit(self, name: str, old: str, new: str) -> str:
        path = self.root / name
        before = path.read_text("utf-8")
        assert before.count(old) == 1
        state, call = self.call("Edit", file_path=str(path), old_string=old, new_string=new)
        path.write_text(before.replace(old, new), "utf-8")
        side_car = {
            "filePath": str(path), "oldString": old, "newString": new, "originalFile": before,
            "structuredPatch": [], "userModified": False, "replaceAll": False,
        }  # fmt: skip
        self.session.result(call, f"The file {path} has been updated.", side_car=side_car)
        return state

    def write(self, name: str, text: str) -> str:
        path = self.root / name
        before = path.read_text("utf-8") if path.exists() else None
        state, call = self.call("Write", file_path=str(path), content=text)
        self.put({name: text})
        side_car = {
            "type": "create" if before is None else "update", "filePath": str(path),
            "content": text, "structuredPatch": [], "originalFile": before,
        }  # fmt: skip
        self.session.result(call, f"File created successfully at: {path}", side_car=side_car)
        return state

    def bash(self, command: str) -> str:
        state, call = self.call("Bash", command=command)
        done = subprocess.run(
            command, shell=True, cwd=self.root, capture_output=True, text=True,
            env=child_environment(GIT_CONFIG_GLOBAL="/dev/null"),
        )  # fmt: skip
        side_car = {"stdout": done.stdout, "stderr": done.stderr, "interrupted": False}
        text = (done.stdout + done.stderr).rstrip("\n")
        self.session.result(call, text, is_error=bool(done.returncode), side_car=side_car)
        return state

    def failed(self, name: str, text: str, **arguments: Any) -> str:
        """Record a call that the client refused with a text."""
        state, call = self.call(name, **arguments)
        self.session.result(call, f"<tool_use_error>{text}</tool_use_error>", is_error=True)
        return state

    def grep(self, pattern: str, **arguments: Any) -> str:
        """Record a search whose answer is that of GNU grep."""
        state, call = self.call("Grep", pattern=pattern, path=str(self.root), **arguments)
        command = ["grep", "-rlE", "--exclude-dir=.git", pattern, "."]
        found = subprocess.run(command, cwd=self.root, capture_output=True, text=True).stdout
        names = sorted(line.removeprefix("./") for line in found.splitlines())
        text = f"Found {len(names)} files\n" + "\n".join(names) if names else "No files found"
        self.session.result(call, text)
        return state
