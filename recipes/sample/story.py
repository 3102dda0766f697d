"""A session told step by step: what the student did, and next to it what the teachers answered.

A `Story` carries the files of its invented project, so that the results of Read, Edit, Write
and Grep follow from the calls; what a command prints is written by hand.
"""

import fnmatch
import hashlib
import json
import posixpath
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Any, Literal

from session import SampleSession

from replay_pipeline.actions import canonical_action
from replay_pipeline.actions.keys import purpose_of
from replay_pipeline.redaction.people import user_of
from replay_pipeline.redaction.redactor import Redactor
from tests.support.sessions import Era, Message, SessionBuilder, ToolCall

TEACHERS = {
    "d": "deepseek/deepseek-v4-pro",
    "q": "qwen/qwen3-coder",
    "g": "z-ai/glm-4.6",
}
NOTE = "written for the sample"
PATH_KEYS = ("file_path", "path")


@dataclass(frozen=True)
class Call:
    """A tool call with paths relative to the working directory, and what is said before it."""

    name: str
    args: dict[str, Any]
    text: str | None = None

    def say(self, text: str) -> "Call":
        """Return the call with a sentence before it."""
        return replace(self, text=text)


@dataclass(frozen=True)
class Broken:
    """A teacher's call that cannot be used: malformed arguments or an unknown tool."""

    name: str
    arguments: str
    why: str


@dataclass(frozen=True)
class Cut:
    """A teacher's answer that ran into the length limit."""

    text: str


@dataclass(frozen=True)
class Looked:
    """A teacher's look, and what it does once it has seen the answer."""

    look: Call
    then: "Call | str"


Answer = Call | Sequence[Call] | str | Broken | Cut | Looked
SEEN = {"d": "I have seen enough: shall I go on?", "q": "What I saw leaves it open.", "g": "Noted."}
"""What a teacher says after a look that its part in the story ends with."""


def bash(command: str, description: str | None = None) -> Call:
    """Run a shell command."""
    args = {"command": command}
    return Call("Bash", args | ({"description": description} if description else {}))


def read(path: str, offset: int | None = None, limit: int | None = None) -> Call:
    """Read a file or a range of its lines."""
    args: dict[str, Any] = {"file_path": path}
    args |= {"offset": offset} if offset is not None else {}
    args |= {"limit": limit} if limit is not None else {}
    return Call("Read", args)


def edit(path: str, old: str, new: str) -> Call:
    """Replace a string that occurs once in a file."""
    return Call("Edit", {"file_path": path, "old_string": old, "new_string": new})


def write(path: str, content: str) -> Call:
    """Write a whole file."""
    return Call("Write", {"file_path": path, "content": content})


def grep(pattern: str, path: str | None = None, **more: Any) -> Call:
    """Search file contents; shows lines unless `output_mode` says otherwise."""
    args = {"pattern": pattern} | ({"path": path} if path else {})
    return Call("Grep", {**args, "output_mode": "content", **more})


def todo(*items: str) -> Call:
    """Write a to-do list whose first item is in progress."""
    todos = [
        {
            "content": item,
            "status": "pending" if idx else "in_progress",
            "activeForm": f"Working: {item}",
        }
        for idx, item in enumerate(items)
    ]
    return Call("TodoWrite", {"todos": todos})


def task(tool: str, description: str, prompt: str, agent_type: str = "Explore") -> Call:
    """Start a subagent; the tool is called Task in old versions and Agent in new ones."""
    args = {"description": description, "prompt": prompt, "subagent_type": agent_type}
    return Call(tool, args)


@dataclass
class Story:
    """One session and the teachers' answers to its states.

    Args:
        name: Short name, also the seed of every id.
        shows: What a reader sees in this session, for the table in the README.
        era, version, cwd, start, git_branch, model: As in `SessionBuilder`.
        files: The project before the session, by relative path.
    """

    name: str
    shows: str
    era: Era
    version: str
    cwd: str
    start: str
    files: Mapping[str, str]
    git_branch: str = "main"
    model: str = "claude-sonnet-4-5-20250929"
    log: SampleSession = field(init=False)
    """The session that the story is in now."""
    left: list[SessionBuilder] = field(default_factory=list)
    """Sessions that it began in."""
    answers: list[dict[str, Any]] = field(default_factory=list)
    expected: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.files = dict(self.files)
        self.read_paths: set[str] = set()
        self.session_ids: set[str] = set()
        self._elsewhere = cycle(
            (bash("git log --oneline -5"), bash("git branch"), bash("git stash list"))
        )
        self._redactor = Redactor()
        self._users = frozenset(filter(None, [user_of(self.cwd)]))
        self.log = SampleSession(
            self.name,
            era=self.era,
            version=self.version,
            cwd=self.cwd,
            git_branch=self.git_branch,
            model=self.model,
            start=self.start,
        )

    def go_on_in(self, log: SampleSession) -> None:
        """Go on in another session, such as a fork of this one."""
        self.left.append(self.log)
        self.log = log

    def user(self, text: str) -> str:
        """Let the user say something."""
        return self.log.user(text)

    def act(
        self,
        text: str | None = None,
        *calls: Call,
        d: Answer,
        q: Answer,
        g: Answer,
        pair: str = "",
        same: str = "",
        outcome: str = "",
        divided: bool = False,
        kind: str = "",
        out: str | Sequence[str] | None = None,
        code: int = 0,
        thinking: str | None = None,
        on_call: Callable[[str], None] | None = None,
        answered: bool = True,
        streamed: bool = False,
        log: SessionBuilder | None = None,
    ) -> Message:
        """Let the student act, record the answers of the teachers, append the results.

        Args:
            text: What the student says.
            calls: What the student calls.
            d, q, g: The answers of the three teachers.
            pair: Initials of the teachers meant to agree on something else than the student.
            same: Initials of the teachers meant to agree with the student.
            outcome: What comes of the state where it is neither a pair, nor agreement, nor none.
            divided: Whether the teachers turn out to disagree: `d` keeps its answer, `q` looks
                elsewhere first, and `g` does as the student did, unless that is an edit.
            kind: The recurring mistake of the student.
            out: What the commands print, for the calls whose result does not follow.
            code: Exit code of the commands.
            thinking: The student's thinking.
            on_call: Called between call and result with the tool use id, for progress rows.
            answered: False where a rejection, an interrupt or a subagent follows instead.
            streamed: Whether each result arrives before the next call is written.
            log: Another session than the main one: the subagent's.
        """
        log = log or self.log
        self.session_ids.add(getattr(log, "agent_id", log.session_id))
        first = calls[:1] if streamed else calls
        message = log.assistant(text, [self._tool_call(call) for call in first], thinking=thinking)
        if divided:
            q = next(self._elsewhere)
            is_edit = any(call.name == "Edit" for call in calls)
            g = bash("git diff --stat") if is_edit else list(calls) or text or ""
        asked = {"tool_calls": [{"function": self._function(call)} for call in calls]}
        given = {"d": d, "q": q, "g": g}
        self._record(message, given, pair, same, outcome, kind, is_look=_only_looks(asked))
        outputs = [out] if isinstance(out, str) or out is None else list(out)
        outputs += [None] * (len(calls) - len(outputs))
        for idx, (call, output) in enumerate(zip(calls, outputs, strict=False)):
            if streamed and idx:
                log.extend(message, [self._tool_call(call)])
            tool_use_id = message.tool_use_ids[idx]
            if on_call:
                on_call(tool_use_id)
            if answered:
                self._answer(log, tool_use_id, call, output, code)
        return message

    def path(self, relative: str) -> str:
        """Return the absolute path of a project file."""
        return posixpath.normpath(posixpath.join(self.cwd, relative))

    # Results

    def _answer(
        self, log: SessionBuilder, tool_use_id: str, call: Call, output: str | None, code: int
    ) -> None:
        if call.name == "Bash":
            content, error = output or "", code != 0
            if error:
                content = f"Exit code {code}\n{content}"
            side_car: Any = {"stdout": output or "", "stderr": "", "interrupted": False}
        elif output is not None:
            content, error, side_car = output, False, {"content": output}
        else:
            run = {
                "Read": self._run_read,
                "Edit": self._run_edit,
                "Write": self._run_write,
                "Grep": self._run_grep,
                "TodoWrite": self._run_todo,
            }[call.name]
            content, error, side_car = run(call.args)
        if error:
            side_car = f"Error: {re.sub('</?tool_use_error>', '', content)}"
        log.result(tool_use_id, content, is_error=error, side_car=side_car)

    def _run_read(self, args: Mapping[str, Any]) -> tuple[str, bool, Any]:
        path = args["file_path"]
        if path not in self.files:
            return _tool_error("File does not exist."), True, None
        self.read_paths.add(path)
        lines = self.files[path].splitlines()
        start = args.get("offset", 1)
        shown = lines[start - 1 : start - 1 + args.get("limit", 2000)]
        side_car = {
            "type": "text",
            "file": {
                "filePath": self.path(path),
                "content": "\n".join(shown),
                "numLines": len(shown),
                "startLine": start,
                "totalLines": len(lines),
            },
        }
        return self._numbered(shown, start), False, side_car

    def _run_edit(self, args: Mapping[str, Any]) -> tuple[str, bool, Any]:
        path, old, new = args["file_path"], args["old_string"], args["new_string"]
        if path not in self.files:
            return _tool_error("File does not exist."), True, None
        if path not in self.read_paths:
            unread = "File has not been read yet. Read it first before writing to it."
            return _tool_error(unread), True, None
        before = self.files[path]
        if before.count(old) != 1:
            return _tool_error(f"String to replace not found in file.\nString: {old}"), True, None
        self.files[path] = before.replace(old, new)
        side_car = {
            "filePath": self.path(path),
            "oldString": old,
            "newString": new,
            "originalFile": before,
            "userModified": False,
            "replaceAll": False,
        }
        shown = f"The file {self.path(path)} has been updated successfully."
        if self.era == "progress":
            first = max(0, before[: before.index(old)].count("\n") - 2)
            snippet = self.files[path].splitlines()[first : first + new.count("\n") + 6]
            shown = (
                f"The file {self.path(path)} has been updated. Here's the result of running"
                f" `cat -n` on a snippet of the edited file:\n{self._numbered(snippet, first + 1)}"
            )
        return shown, False, side_car

    def _run_write(self, args: Mapping[str, Any]) -> tuple[str, bool, Any]:
        path = args["file_path"]
        is_new = path not in self.files
        if not is_new and path not in self.read_paths:
            unread = "File has not been read yet. Read it first before writing to it."
            return _tool_error(unread), True, None
        self.files[path] = args["content"]
        self.read_paths.add(path)
        verb = "created successfully at" if is_new else "updated at"
        side_car = {
            "type": "create" if is_new else "update",
            "filePath": self.path(path),
            "content": args["content"],
        }
        return f"File {verb}: {self.path(path)}", False, side_car

    def _run_grep(self, args: Mapping[str, Any]) -> tuple[str, bool, Any]:
        scope, name_glob = args.get("path", ""), args.get("glob", "*")
        flags = re.IGNORECASE if args.get("-i") else 0
        hits = [
            (path, number, line)
            for path, text in sorted(self.files.items())
            if path.startswith(scope) and fnmatch.fnmatch(posixpath.basename(path), name_glob)
            for number, line in enumerate(text.splitlines(), 1)
            if re.search(args["pattern"], line, flags)
        ]
        paths = sorted({path for path, _, _ in hits})
        side_car = {"mode": args.get("output_mode"), "numFiles": len(paths), "filenames": paths}
        if not hits:
            return "No matches found", False, side_car
        if args.get("output_mode") != "content":
            found = "\n".join(self.path(path) for path in paths)
            return f"Found {len(paths)} files\n{found}", False, side_car
        only = scope in self.files
        shown = [
            ("" if only else f"{path}:") + (f"{number}:" if args.get("-n", True) else "") + line
            for path, number, line in hits
        ]
        return "\n".join(shown), False, side_car

    def _run_todo(self, args: Mapping[str, Any]) -> tuple[str, bool, Any]:
        content = (
            "Todos have been modified successfully. Ensure that you continue to use the todo list"
            " to track your progress. Please proceed with the current tasks if applicable"
        )
        return content, False, {"oldTodos": [], "newTodos": args["todos"]}

    def _numbered(self, lines: Sequence[str], start: int) -> str:
        mark = "\u2192" if self.era == "progress" else "\t"
        return "\n".join(f"{number:>6}{mark}{line}" for number, line in enumerate(lines, start))

    # Answers

    def _tool_call(self, call: Call) -> ToolCall:
        return ToolCall(call.name, self._spelled(call, "absolute"))

    def _function(self, call: Call) -> dict[str, Any]:
        return {"name": call.name, "arguments": self._spelled(call, "absolute")}

    def _spelled(self, call: Call, paths: Literal["absolute", "relative"]) -> dict[str, Any]:
        args = dict(call.args)
        for key in PATH_KEYS:
            if key in args and paths == "absolute":
                args[key] = self.path(args[key])
        return args

    def _record(
        self,
        message: Message,
        answers: Mapping[str, Answer],
        pair: str,
        same: str,
        outcome: str,
        kind: str,
        *,
        is_look: bool,
    ) -> None:
        for initial, answer in answers.items():
            steps = [answer.look, answer.then] if isinstance(answer, Looked) else [answer]
            rows = [
                self._row(f"{message.state_id}+{n}" if n else message.state_id, initial, step)
                for n, step in enumerate(steps)
            ]
            if not is_look and len(rows) == 1 and _only_looks(rows[0]["message"]):
                rows.append(self._row(f"{message.state_id}+1", initial, SEEN[initial]))
            self.answers += rows
        meant = "pair" if pair else "agrees_with_student" if same else "no_consensus"
        self.expected[message.state_id] = {
            "session": self.name,
            "outcome": outcome or meant,
            "teachers": [TEACHERS[initial] for initial in pair or same],
            "kind": kind,
        }

    def _row(self, state_id: str, initial: str, answer: Answer) -> dict[str, Any]:
        digest = hashlib.blake2b(f"{state_id}/{initial}".encode(), digest_size=16).hexdigest()
        content, calls, finish_reason, note = self._body(initial, answer)
        content = self._redacted(content)
        tool_calls = [
            {
                "id": f"call_{digest[: 20 - len(str(idx))]}{idx}",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for idx, (name, arguments) in enumerate(calls)
        ]
        return {
            "state_id": state_id,
            "model": TEACHERS[initial],
            "message": {"role": "assistant", "content": content, "tool_calls": tool_calls},
            "finish_reason": finish_reason,
            "latency_s": round(0.9 + int(digest[-4:], 16) / 65536 * 6.5, 2),
            "note": note,
        }

    def _body(
        self, initial: str, answer: Answer
    ) -> tuple[str | None, list[tuple[str, str]], str, str]:
        match answer:
            case str():
                return answer, [], "stop", NOTE
            case Cut():
                return answer.text, [], "length", f"{NOTE}: cut at the length limit"
            case Broken():
                calls = [(answer.name, answer.arguments)]
                return None, calls, "tool_calls", f"{NOTE}: {answer.why}"
            case Call():
                answer = [answer]
        text = next((call.text for call in answer if call.text), None)
        calls = [(call.name, self._arguments(initial, call)) for call in answer]
        return text, calls, "tool_calls", NOTE

    def _redacted(self, value: Any) -> Any:
        """What teachers say, in the words of the question: they are asked about redacted sessions."""
        match value:
            case str():
                return self._redactor.text(value, users=self._users)
            case list():
                return [self._redacted(each) for each in value]
            case dict():
                return {key: self._redacted(each) for key, each in value.items()}
        return value

    def _arguments(self, initial: str, call: Call) -> str:
        """Spell arguments the way one teacher does: each has habits of its own."""
        args = self._redacted(self._spelled(call, "relative" if initial == "q" else "absolute"))
        if initial == "d":
            return json.dumps(args, ensure_ascii=False)
        if initial == "q":
            if call.name == "Bash" and "description" not in args:
                args["description"] = f"Run {_program(args['command'])}"
            return json.dumps(args, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
        if call.name == "Grep":
            args.setdefault("-i", False)
        if call.name == "Read":
            args.setdefault("offset", 1)
        return json.dumps(dict(reversed(args.items())), indent=1, ensure_ascii=False)


def _only_looks(message: Mapping[str, Any]) -> bool:
    """Return whether a message only looks or keeps books, so that its teacher is asked on."""
    return purpose_of(canonical_action(dict(message))) is not None


def _program(command: str) -> str:
    words = [word for word in shlex.split(command.rsplit("&&", 1)[-1]) if "=" not in word]
    return words[0] if words else "a command"


def _tool_error(text: str) -> str:
    return f"<tool_use_error>{text}</tool_use_error>"
