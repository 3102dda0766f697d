"""Write Claude Code sessions by hand: a builder that knows the rows of both format eras.

The builder keeps the bookkeeping (ids, parents, timestamps, usage) and leaves the story to the
caller. It needs only the standard library and is deterministic: the same calls give the same
bytes.

Eras:
    progress    versions up to about 2.1.9x: `progress` rows, stop_reason null, the same usage on
                every row of a message, thinking text, subagents inside `agent_progress` rows
    attachment  later versions: `attachment` rows, promptId, entrypoint, empty thinking with a
                signature, stop_reason on the last row, subagents in files of their own
"""

import base64
import hashlib
import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Literal, Self

Era = Literal["progress", "attachment"]
Row = dict[str, Any]

_NAMESPACE = uuid.UUID("6f1d4a52-7c0b-5d7e-9a43-2b8f61c0de17")
_BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_DEFAULT_VERSION: dict[Era, str] = {"progress": "2.1.38", "attachment": "2.1.247"}
CHARS_PER_TOKEN = 3.6


def state_id(message_id: str) -> str:
    """Return the id of the decision state whose action is the API message `message_id`.

    >>> state_id("msg_1")
    'cc1_pj3fnaxs4v236uop'
    """
    digest = hashlib.blake2b(message_id.encode(), digest_size=10).digest()
    return "cc1_" + base64.b32encode(digest).decode().lower().rstrip("=")


def project_folder(cwd: str) -> str:
    """Return the folder name under `projects/` for a working directory.

    >>> project_folder("/home/mira/code/tide_line")
    '-home-mira-code-tide-line'
    """
    return re.sub(r"[^A-Za-z0-9]", "-", cwd)


@dataclass(frozen=True)
class ToolCall:
    """A tool and its input, as the student writes it."""

    name: str
    input: Mapping[str, Any]


@dataclass
class Message:
    """An API message as written so far."""

    id: str
    request_id: str
    model: str
    first_uuid: str
    context_tokens: int
    usage: dict[str, Any]
    output_tokens: int = 0
    tool_use_ids: list[str] = field(default_factory=list)

    @property
    def state_id(self) -> str:
        """The id of the state in which this message is the student's action."""
        return state_id(self.id)


class SessionBuilder:
    """A Claude Code session, written row by row.

    Every method appends rows below the current head and moves the head, so a plain sequence of
    calls is a plain conversation. What else happens in a session stands in `recipes/sample`.

    Args:
        name: Seed of every id; sessions with different names share no id.
        era: Which shapes the rows take.
        version: The Claude Code version in the rows; a typical one of the era by default.
        cwd: The working directory; also names the project folder.
        git_branch: The branch in the rows.
        model: The student model.
        start: Time of the first row, ISO 8601 with a trailing Z.
        base_tokens: Tokens of what a log does not show: system prompt, tools, memory files.
        session_id: A given id instead of one derived from `name`.
    """

    def __init__(
        self,
        name: str,
        *,
        era: Era = "attachment",
        version: str | None = None,
        cwd: str = "/home/dev/project",
        git_branch: str = "main",
        model: str = "claude-sonnet-4-5-20250929",
        start: str = "2026-02-03T09:00:00.000Z",
        base_tokens: int = 17_500,
        session_id: str | None = None,
    ) -> None:
        self.name = name
        self.era: Era = era
        self.version = version or _DEFAULT_VERSION[era]
        self.cwd = cwd
        self.git_branch = git_branch
        self.model = model
        self.base_tokens = base_tokens
        self.session_id = session_id or str(uuid.uuid5(_NAMESPACE, name))
        self.rows: list[Row] = []
        self.messages: list[Message] = []
        self.subagents: list[SubagentBuilder] = []
        self.head: str | None = None
        self._now = datetime.fromisoformat(start)
        self._n_ids = 0
        self._n_chars = 0
        self._n_cached = 0
        self._chars_at: dict[str, int] = {}
        self._call_row: dict[str, str] = {}
        self._prompt_id: str | None = None
        self._last_message_id: str | None = None

    # What people and the harness say

    def user(
        self, content: str | Sequence[Mapping[str, Any]], *, source: str = "typed", **extra: Any
    ) -> str:
        """Append what the user typed."""
        self.wait(12 + self._jitter(50))
        if self.era == "attachment":
            self._prompt_id = self._uuid()
            extra = {
                "promptId": self._prompt_id,
                "permissionMode": "default",
                "origin": {"kind": "human"},
                "promptSource": source,
                **extra,
            }
        else:
            extra = {
                "thinkingMetadata": {"level": "high", "disabled": False, "triggers": []},
                "todos": [],
                **extra,
            }
        return self._user_row(content, **extra)

    # What the model does

    def assistant(
        self,
        text: str | None = None,
        calls: Sequence[ToolCall] = (),
        *,
        thinking: str | None = None,
        model: str | None = None,
    ) -> Message:
        """Append an API message: one row per content block.

        Args:
            text: What the model says before its calls.
            calls: Tool calls, each in a row of its own.
            thinking: Written out in the progress era, an empty signed block in the later one.
            model: Another model than the session's.
        """
        self.wait(2 + self._jitter(6))
        message = self._begin(model or self.model)
        blocks: list[Row] = []
        if thinking is not None:
            shown = thinking if self.era == "progress" else ""
            signature = base64.b64encode(self._digest("signature", 48)).decode()
            blocks.append({"type": "thinking", "thinking": shown, "signature": signature})
        if text:
            blocks.append({"type": "text", "text": text})
        blocks += [self._tool_use(message, call) for call in calls]
        self._append_blocks(message, blocks, n_thinking_chars=len(thinking or ""))
        return message

    def extend(self, message: Message, calls: Sequence[ToolCall]) -> Message:
        """Append more calls of a message whose first results have already arrived.

        This is what streaming tool execution leaves behind: the rows of one message are not
        contiguous, and the parent of each new row is the previous row of the same message.
        """
        if message.tool_use_ids:
            self.head = self._call_row[message.tool_use_ids[-1]]
        self._append_blocks(message, [self._tool_use(message, call) for call in calls])
        return message

    def result(
        self,
        tool_use_id: str,
        content: str | Sequence[Mapping[str, Any]],
        *,
        is_error: bool = False,
        side_car: Any = None,
        **extra: Any,
    ) -> str:
        """Append the result of a call; its parent is the row of that call.

        Args:
            tool_use_id: One of `Message.tool_use_ids`.
            content: What the model sees.
            is_error: Whether the harness marked it as an error.
            side_car: `toolUseResult`, what the harness keeps for itself.
            extra: More fields of the row.
        """
        self.wait(0.2 + self._jitter(2))
        block: Row = {"tool_use_id": tool_use_id, "type": "tool_result", "content": content}
        if is_error:
            block["is_error"] = True
        self.head = self._call_row[tool_use_id]
        if side_car is None:
            side_car = f"Error: {content}" if is_error else {"content": content}
        if self._prompt_id:
            extra = {"promptId": self._prompt_id, **extra}
        return self._user_row(
            [block], toolUseResult=side_car, sourceToolAssistantUUID=self.head, **extra
        )

    # What happens to the log

    def progress(self, kind: str, tool_use_id: str, **data: Any) -> str:
        """Append a `progress` row (progress era)."""
        return self._append(
            {
                "type": "progress",
                "data": {"type": kind, **data},
                "toolUseID": f"{kind}_{self._n_ids}",
                "parentToolUseID": tool_use_id,
            }
        )

    def attachment(self, kind: str, **data: Any) -> str:
        """Append an `attachment` row (attachment era)."""
        text = data.get("prompt") or data.get("content") or ""
        self._n_chars += len(text) if isinstance(text, str) else 0
        return self._append({"type": "attachment", "attachment": {"type": kind, **data}})

    def bookkeeping(self, kind: str, **fields: Any) -> None:
        """Append a row without uuid: last-prompt, ai-title, permission-mode, ..."""
        row: Row = {"type": kind, **fields, "sessionId": self.session_id}
        if kind == "queue-operation":
            row["timestamp"] = self._stamp()
        self.rows.append(row)

    def subagent(
        self, tool_use_id: str, prompt: str, *, agent_type: str, description: str
    ) -> "SubagentBuilder":
        """Start the subagent that the call `tool_use_id` asked for; finish it with `result`."""
        return SubagentBuilder(
            self, tool_use_id, prompt, agent_type=agent_type, description=description
        )

    def wait(self, seconds: float) -> None:
        """Let time pass before the next row."""
        self._now += timedelta(milliseconds=round(seconds * 1000))

    def copied(self, name: str, *, is_fork: bool, start: str | None = None) -> Self:
        """Return a new session that begins with the rows of this one, and so far ends there.

        Args:
            name: of the new session, the seed of what comes in it.
            is_fork: whether the rows say what they were forked from; older clients only copied
                them when a session was resumed. The id of the session in them is the new one.
            start: when it goes on; by default a day after this one ended.
        """
        other = type(self)(
            name,
            era=self.era,
            version=self.version,
            cwd=self.cwd,
            git_branch=self.git_branch,
            model=self.model,
            base_tokens=self.base_tokens,
        )
        other._now = datetime.fromisoformat(start) if start else self._now + timedelta(days=1)
        for row in self.rows:
            again = {**row, "sessionId": other.session_id} if "sessionId" in row else row
            if is_fork and "uuid" in row:
                origin = {"sessionId": self.session_id, "messageUuid": row["uuid"]}
                again = {**again, "forkedFrom": origin}
            other.rows.append(again)
        other.head, other._n_chars = self.head, self._n_chars
        other._chars_at, other._call_row = dict(self._chars_at), dict(self._call_row)
        return other

    # Output

    def lines(self) -> list[str]:
        """Return the rows as JSON lines without line ends."""
        return [_dumps(row) for row in self.rows]

    def write(self, projects_dir: Path | str) -> Path:
        """Write the session and its subagents below `projects_dir` and return its path."""
        folder = Path(projects_dir) / project_folder(self.cwd)
        path = folder / f"{self.session_id}.jsonl"
        _write_lines(path, self.lines())
        for agent in self.subagents:
            agent_path = folder / self.session_id / "subagents" / f"agent-{agent.agent_id}.jsonl"
            _write_lines(agent_path, agent.lines())
            _write_lines(agent_path.with_suffix(".meta.json"), [_dumps(agent.description_row())])
        return path

    # Rows

    def _user_row(
        self,
        content: str | Sequence[Mapping[str, Any]],
        *,
        row_uuid: str | None = None,
        **extra: Any,
    ) -> str:
        self._n_chars += _n_visible_chars(content)
        blocks = content if isinstance(content, str) else [dict(block) for block in content]
        row = {"type": "user", "message": {"role": "user", "content": blocks}, **extra}
        return self._append(row, row_uuid=row_uuid)

    def _begin(self, model: str) -> Message:
        n_tokens = self._context_tokens()
        n_input = 3 + round(self._jitter(6))
        n_read = self._n_cached or min(14_200, self.base_tokens)
        usage: dict[str, Any] = {
            "input_tokens": n_input,
            "cache_creation_input_tokens": max(0, n_tokens - n_read - n_input),
            "cache_read_input_tokens": n_read,
            "cache_creation": {
                "ephemeral_5m_input_tokens": max(0, n_tokens - n_read - n_input),
                "ephemeral_1h_input_tokens": 0,
            },
            "service_tier": "standard",
        }
        self._n_cached = n_tokens - n_input
        message = Message(
            id="msg_01" + self._token("message", 22),
            request_id="req_011" + self._token("request", 21),
            model=model,
            first_uuid="",
            context_tokens=n_tokens,
            usage=usage,
        )
        self._last_message_id = message.id
        self.messages.append(message)
        return message

    def _tool_use(self, message: Message, call: ToolCall) -> Row:
        tool_use_id = "toolu_01" + self._token("call", 22)
        message.tool_use_ids.append(tool_use_id)
        block: Row = {
            "type": "tool_use",
            "id": tool_use_id,
            "name": call.name,
            "input": dict(call.input),
        }
        if self.era == "attachment":
            block["caller"] = {"type": "direct"}
        return block

    def _append_blocks(
        self, message: Message, blocks: Sequence[Row], *, n_thinking_chars: int = 0
    ) -> None:
        n_chars = sum(_n_visible_chars([block]) for block in blocks)
        self._n_chars += n_chars
        message.output_tokens += 8 + round((n_chars + n_thinking_chars) / CHARS_PER_TOKEN)
        for idx, block in enumerate(blocks):
            is_last = idx == len(blocks) - 1
            body: Row = {
                "model": message.model,
                "id": message.id,
                "type": "message",
                "role": "assistant",
                "content": [block],
                "stop_reason": None,
                "stop_sequence": None,
                "usage": {**message.usage, "output_tokens": message.output_tokens},
            }
            if self.era == "attachment":
                stop_reason = "tool_use" if message.tool_use_ids else "end_turn"
                body["stop_reason"] = stop_reason if is_last else None
                body["usage"]["output_tokens"] = message.output_tokens if is_last else 2 + idx
            row_uuid = self._append(
                {"type": "assistant", "message": body, "requestId": message.request_id}
            )
            message.first_uuid = message.first_uuid or row_uuid
            if block["type"] == "tool_use":
                self._call_row[block["id"]] = row_uuid
            self.wait(0.4 + self._jitter(1))

    def _append(self, row: Row, *, row_uuid: str | None = None) -> str:
        row_uuid = row_uuid or self._uuid()
        envelope: Row = {
            "parentUuid": self.head,
            "isSidechain": False,
            "userType": "external",
            "cwd": self.cwd,
            "sessionId": self.session_id,
            "version": self.version,
            "gitBranch": self.git_branch,
        }
        if self.era == "attachment":
            envelope["entrypoint"] = "cli"
        self._emit({**envelope, **row, "uuid": row_uuid, "timestamp": self._stamp()})
        self.head = row_uuid
        self._chars_at[row_uuid] = self._n_chars
        self.wait(0.05)
        return row_uuid

    def _emit(self, row: Row) -> None:
        self.rows.append(row)

    # Ids, time and sizes

    def _context_tokens(self) -> int:
        return self.base_tokens + round(self._n_chars / CHARS_PER_TOKEN)

    def _stamp(self) -> str:
        return self._now.strftime("%Y-%m-%dT%H:%M:%S.") + f"{self._now.microsecond // 1000:03d}Z"

    def _digest(self, label: str, size: int) -> bytes:
        seed = f"{self.session_id}/{self.name}/{self._n_ids}/{label}"
        return hashlib.blake2b(seed.encode(), digest_size=size).digest()

    def _uuid(self) -> str:
        self._n_ids += 1
        return str(uuid.uuid5(_NAMESPACE, f"{self.session_id}/{self.name}/{self._n_ids}"))

    def _token(self, label: str, n_chars: int) -> str:
        self._n_ids += 1
        number = int.from_bytes(self._digest(label, 24), "big")
        digits = []
        for _ in range(n_chars):
            number, digit = divmod(number, len(_BASE58))
            digits.append(_BASE58[digit])
        return "".join(digits)

    def _jitter(self, scale: float) -> float:
        self._n_ids += 1
        return int.from_bytes(self._digest("jitter", 4), "big") / 2**32 * scale


class SubagentBuilder(SessionBuilder):
    """The session of a subagent, in the shape of its parent's era.

    In the attachment era it is a file of its own next to the parent, in the progress era its rows
    exist only inside the parent's `agent_progress` rows.
    """

    def __init__(
        self,
        parent: SessionBuilder,
        tool_use_id: str,
        prompt: str,
        *,
        agent_type: str,
        description: str,
    ) -> None:
        super().__init__(
            f"{parent.name}/{tool_use_id}",
            era=parent.era,
            version=parent.version,
            cwd=parent.cwd,
            git_branch=parent.git_branch,
            model=parent.model,
            base_tokens=6_400,
            session_id=parent.session_id,
        )
        self.agent_id = hashlib.blake2b(tool_use_id.encode(), digest_size=4).hexdigest()[:7]
        if self.era == "attachment":
            self.agent_id = "a" + hashlib.blake2b(tool_use_id.encode(), digest_size=8).hexdigest()
        self._parent = parent
        self._tool_use_id = tool_use_id
        self._prompt = prompt
        self._agent_type = agent_type
        self._description = description
        self._now = parent._now
        parent.subagents += [self] if self.era == "attachment" else []
        self._user_row(prompt)

    def description_row(self) -> Row:
        """Return the content of the `.meta.json` next to the subagent's file."""
        return {
            "agentType": self._agent_type,
            "description": self._description,
            "toolUseId": self._tool_use_id,
            "spawnDepth": 1,
        }

    def finish(self, report: str) -> str:
        """Append the subagent's report as the result of the call that started it."""
        self._parent._now = self._now
        n_tokens = self.messages[-1].context_tokens if self.messages else 0
        side_car = {
            "status": "completed",
            "prompt": self._prompt,
            "agentId": self.agent_id,
            "content": [{"type": "text", "text": report}],
            "totalToolUseCount": sum(len(message.tool_use_ids) for message in self.messages),
            "totalTokens": n_tokens,
        }
        content = [{"type": "text", "text": report}]
        return self._parent.result(self._tool_use_id, content, side_car=side_car)

    def _emit(self, row: Row) -> None:
        row = {**row, "isSidechain": True, "agentId": self.agent_id}
        if self.era == "attachment":
            self.rows.append(row)
            return
        self._parent._now = self._now
        if row["type"] not in ("user", "assistant"):
            return
        keys = ("type", "message", "uuid", "timestamp", "requestId", "toolUseResult")
        self._parent.progress(
            "agent_progress",
            self._tool_use_id,
            message={key: row[key] for key in keys if key in row},
            normalizedMessages=[],
            prompt=self._prompt,
            agentId=self.agent_id,
        )


def _n_visible_chars(content: str | Sequence[Mapping[str, Any]]) -> int:
    if isinstance(content, str):
        return len(content)
    n_chars = 0
    for block in content:
        match block["type"]:
            case "text":
                n_chars += len(block["text"])
            case "tool_use":
                n_chars += len(block["name"]) + len(_dumps(block["input"]))
            case "tool_result":
                n_chars += _n_visible_chars(block["content"])
    return n_chars


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _write_lines(path: Path, lines: Sequence[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")
