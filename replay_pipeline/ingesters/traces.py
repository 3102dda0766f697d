"""Open the tables of an ingestion, and build trace states from them on demand.

A prefix is the path from the root to a state in `turns`. Prefixes are never stored, because they
would be two hundred times larger than the turns.
"""

import logging
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from itertools import accumulate, takewhile, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import msgspec
import pyarrow as pa

from replay_pipeline.actions.windows import CLEARED_RESULT, WindowPolicy, merged_users, parse_window
from replay_pipeline.errors import ConfigError, SchemaError
from replay_pipeline.ingesters.attachments import numbers_in
from replay_pipeline.ingesters.corpus import ingest
from replay_pipeline.ingesters.harness.harness import (
    Filled,
    FoundHarness,
    HarnessStore,
    fill,
    system_prompt,
)
from replay_pipeline.ingesters.sent import messages_of, system_of, tool_of
from replay_pipeline.ingesters.tool_schemas import (
    ToolLearner,
    known_tools,
    merge_tools,
    offered_tools,
    series_of,
)
from replay_pipeline.storage.arrays import array_of
from replay_pipeline.storage.tables import read_table
from replay_pipeline.types import ClientTexts, Message, Tool, TraceState

if TYPE_CHECKING:
    import polars as pl

logger = logging.getLogger(__name__)

_FIRST_WITH_SEAMS = (2, 1, 81)
"""The first version of Claude Code seen to put a line break between two texts of the user."""
_CATALOGUED = "claude_code"
"""The agent whose tools are known by release series."""
_GIVEN = ("override", "recorded")
_decode = msgspec.json.decode

_MAX_OPEN_CHARS = 64_000_000
"""Text of the sessions that stay open: what a few dozen calls in flight at once look at."""
_MAX_OPEN_PARTS = 2
_MAX_RECENT = 16


@dataclass(frozen=True, slots=True)
class _PromptStart:
    system: list[str]
    tools: list[Tool]


@dataclass(slots=True)
class _StoredTurn:
    parent: int | None
    kind: str
    cwd: str | None
    messages_json: str
    flags: list[str]
    n_chars: int
    state: int | None
    """Row of `states` that holds its action."""
    messages: list[Message] | None = None
    shape: _PromptStart | None = None


class Traces:
    """Sessions, turns, states, and tools of one ingestion, as data frames and as trace states.

    The tables belong together, because a prefix contains the actions of other states. `harnesses` has
    the system prompts and tools of clients, for logs that lack them; by default, such states have the
    neutral system prompt. If `is_neutral`, all states have it, with the clients' texts in
    `client_texts`.
    """

    def __init__(
        self,
        *,
        sessions: pa.Table,
        turns: pa.Table,
        states: pa.Table,
        tools: pa.Table,
        harnesses: HarnessStore | None = None,
        is_neutral: bool = False,
    ) -> None:
        self._harnesses = harnesses
        self._is_neutral = is_neutral
        self._framed: dict[tuple[Any, ...], tuple[Filled, list[Tool], dict[str, Any]]] = {}
        self._sessions = sessions
        self._turns = turns
        self._states = states
        self._tools = tools
        self._tools_of: dict[str, list[Tool]] = {}
        self._open: dict[str, dict[int, _StoredTurn]] = {}
        self._n_open_chars = 0

    @cached_property
    def sessions(self) -> "pl.DataFrame":
        """Return one row per conversation."""
        return _frame(self._sessions)

    @cached_property
    def turns(self) -> "pl.DataFrame":
        """Return one row per message group. `parent_turn_idx` names its parent in the tree."""
        return _frame(self._turns)

    @cached_property
    def states(self) -> "pl.DataFrame":
        """Return one row per decision of the student."""
        return _frame(self._states)

    @cached_property
    def tools(self) -> "pl.DataFrame":
        """Return one row per tool and release series."""
        return _frame(self._tools)

    def __len__(self) -> int:
        return self._states.num_rows

    def materialize(
        self, state_ids: Iterable[str] | None = None, window: str | WindowPolicy = "full"
    ) -> Iterator[TraceState]:
        """Yield trace states with their full messages: those of `state_ids` in that order, or all.

        Ids that aren't in the tables are left out. The states of a session share nested values, so
        treat them as read-only.

        Raises:
            ConfigError: there is no such window.
            SchemaError: while going through them: `states` lacks a row that a prefix needs.
        """
        policy = parse_window(window) if isinstance(window, str) else window
        if state_ids is None:
            positions: Iterable[int] = range(self._states.num_rows)
        else:
            index = self._position_of
            positions = [index[i] for i in state_ids if i in index]
        return (self.state(position, policy) for position in positions)

    @cached_property
    def _columns(self) -> dict[str, list[Any]]:
        return {name: self._states.column(name).to_pylist() for name in self._states.column_names}

    @cached_property
    def _position_of(self) -> dict[str, int]:
        return {state_id: i for i, state_id in enumerate(self._columns["state_id"])}

    @cached_property
    def _session_rows(self) -> dict[str, dict[str, Any]]:
        """Return what is asked of sessions, by id."""
        names = (
            "session_id",
            "agent",
            "agent_id",
            "project",
            "versions",
            "first_timestamp",
            "entrypoint",
        )
        rows = self._sessions.select(names).to_pylist()
        return {row["session_id"]: row for row in rows}

    def _version(self, session_id: str) -> str | None:
        versions = self._session_rows[session_id]["versions"]
        return versions[-1] if versions else None

    @cached_property
    def _turn_rows(self) -> dict[str, list[int]]:
        rows: dict[str, list[int]] = {}
        for row, session_id in enumerate(self._turns.column("session_id").to_pylist()):
            rows.setdefault(session_id, []).append(row)
        return rows

    @cached_property
    def _states_of(self) -> dict[str, dict[int, int]]:
        """Return rows of `states` by session and turn."""
        rows: dict[str, dict[int, int]] = {}
        ids, indices = self._columns["session_id"], self._columns["turn_idx"]
        for row, (session_id, turn_idx) in enumerate(zip(ids, indices, strict=True)):
            rows.setdefault(session_id, {})[turn_idx] = row
        return rows

    def _session(self, session_id: str) -> dict[int, _StoredTurn]:
        """Return turns of a session by index; those used last stay open, up to a limit of text."""
        turns = self._open.get(session_id)
        if turns is None:
            rows = self._turns.take(array_of(self._turn_rows.get(session_id, []), pa.int64()))
            names = ("turn_idx", "parent_turn_idx", "kind", "cwd", "messages_json", "flags")
            columns = [rows.column(name).to_pylist() for name in names]
            states = self._states_of.get(session_id, {})
            turns = {
                index: _StoredTurn(
                    parent, kind, cwd, text, flags or [], len(text), states.get(index)
                )
                for index, parent, kind, cwd, text, flags in zip(*columns, strict=True)
            }
            self._n_open_chars += sum(turn.n_chars for turn in turns.values())
            while self._open and self._n_open_chars > _MAX_OPEN_CHARS:
                closed = self._open.pop(next(iter(self._open)))
                self._n_open_chars -= sum(turn.n_chars for turn in closed.values())
        else:
            del self._open[session_id]
        self._open[session_id] = turns
        return turns

    def state(self, position: int, policy: WindowPolicy) -> TraceState:
        """Return the trace state in row `position` of `states`."""
        row = {name: values[position] for name, values in self._columns.items()}
        turns = self._session(row["session_id"])
        siblings = [i for i in row["siblings"] or () if i in self._position_of]
        if row["sent_turn_idx"] is not None:
            prompt: dict[str, Any] = self._as_sent(turns, row, policy)
        else:
            path = _path(turns, row["turn_idx"])
            cwd = path[0].cwd if path else row["cwd"]
            at = row["shape_turn_idx"]
            shape = self._shape(turns[at]) if at is not None else _PromptStart([], [])
            framed = None if shape.system else self._framing(row, cwd)
            messages = merged_users(self._shown(path, row["session_id"]))
            if framed is not None and not any(turn.kind in _PLACES for turn in path):
                messages = _surrounded(messages, framed[0])
            messages = policy.apply(messages)
            prompt = {
                "messages": [{"role": "system", "content": system_prompt(cwd)}, *messages],
                "tools": self._tools_for(row["session_id"]),
                "fidelity": "rebuilt",
            }
            if framed is not None:
                filled, tools, told = framed
                prompt["messages"][0]["content"] = "\n\n".join(filled.system)
                prompt |= {"system": filled.system, "tools": tools, "harness": told}
            if shape.system:
                prompt["messages"][0]["content"] = "\n\n".join(shape.system)
                prompt |= {"system": shape.system, "tools": shape.tools or prompt["tools"]}
            elif shape.tools:  # by their names alone
                names = {tool["function"]["name"] for tool in shape.tools}
                names |= self._called_in.get(row["session_id"], {}).keys()
                prompt["tools"] = [t for t in prompt["tools"] if t["function"]["name"] in names]
        if self._is_neutral and prompt.pop("system", None) is not None:
            prompt |= self._neutral(prompt, turns, row, policy)
        return TraceState(
            **prompt,
            state_id=row["state_id"],
            student_action=self._action(position),
            hint=row["hint"],
            outcome=row["outcome"],
            error_kind=row["error_kind"],
            session_id=row["session_id"],
            conversation=row["conversation"],
            project=self._session_rows[row["session_id"]]["project"],
            turn_idx=row["turn_idx"],
            cwd=row["cwd"],
            student_model=row["student_model"],
            alternatives=[self._action(self._position_of[i]) for i in siblings],
            n_context_tokens=row["n_context_tokens"],
            typed=self._typed(_path(turns, row["turn_idx"]), row["session_id"]),
        )

    def _typed(self, path: list[_StoredTurn], session_id: str) -> list[str]:
        """Return what the person typed on a path; a subagent is told what to do by another agent."""
        if self._session_rows[session_id]["agent_id"] is not None:
            return []
        return [
            text
            for turn in path
            if turn.kind in _TYPED and "meta" not in turn.flags
            for message in self._messages(turn)
            if message["role"] == "user"
            for text in _texts_of(message.get("content"))
        ]

    def _neutral(
        self,
        prompt: dict[str, Any],
        turns: dict[int, _StoredTurn],
        row: dict[str, Any],
        policy: WindowPolicy,
    ) -> dict[str, Any]:
        """Return the neutral form of a prompt with a client's texts, and these texts."""
        path = _path(turns, row["turn_idx"])
        text = system_prompt(path[0].cwd if path else row["cwd"])
        own = prompt["messages"][1:]
        if "harness" in prompt:
            own = policy.apply(merged_users(self._shown(path, row["session_id"])))
        messages = [{"role": "system", "content": text}, *own]
        same = zip(reversed(messages), reversed(prompt["messages"]), strict=False)
        n_same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], same))
        return {
            "messages": messages,
            "tools": self._tools_for(row["session_id"]),
            "client_texts": ClientTexts(
                n_replaced=len(messages) - n_same,
                messages=prompt["messages"][: len(prompt["messages"]) - n_same],
                tools=prompt["tools"],
            ),
        }

    def _framing(
        self, row: dict[str, Any], cwd: str | None
    ) -> tuple[Filled, list[Tool], dict[str, Any]] | None:
        """Return what the client of a session puts around it, where that was recorded."""
        if self._harnesses is None:
            return None
        session_id = row["session_id"]
        session = self._session_rows[session_id]
        version = self._version(session_id)
        found = self._harnesses.find(session["agent"], version, session["entrypoint"])
        if found is None:
            return None
        model = row["student_model"]
        key = (session_id, cwd, model)
        if key not in self._framed:
            if len(self._framed) >= _MAX_RECENT:
                self._framed.clear()
            filled = fill(found.harness, cwd=cwd, model=model, at=session["first_timestamp"])
            tools = self._with_others(filled.tools, session_id)
            self._framed[key] = (
                filled,
                tools,
                _told(found, filled, is_subagent=session["agent_id"] is not None),
            )
        return self._framed[key]

    def _with_others(self, tools: list[Tool], session_id: str) -> list[Tool]:
        """Return a harness's tools, what the user gave in their place, and others that a session called."""
        called, given = self._called_in.get(session_id, {}), self._given
        own = {tool["function"]["name"]: tool for tool in tools}
        others = {
            name: tool
            for tool in self._tools_for(session_id)
            if (name := tool["function"]["name"]) in called
            and name not in own
            and (name.startswith("mcp__") or name in known_tools() or name in given)
        }
        # A name that no client knows was made up by the model. The fixed part comes first, so that a prompt cache holds it once for all sessions.
        return list((own | others | {n: tool for n, tool in given.items() if n in own}).values())

    def _has_seams(self, session_id: str) -> bool:
        is_its = self._session_rows[session_id]["agent"] == _CATALOGUED
        return is_its and numbers_in(self._version(session_id)) >= _FIRST_WITH_SEAMS

    def _as_sent(
        self, turns: dict[int, _StoredTurn], row: dict[str, Any], policy: WindowPolicy
    ) -> dict[str, Any]:
        """Return what a logged request sent: its messages, system prompt, tools and parameters."""
        last = turns[row["sent_turn_idx"]]
        path = [*_path(turns, row["sent_turn_idx"]), last]
        shape = self._shape(turns[row["shape_turn_idx"]])
        messages = [message for turn in path for message in self._messages(turn)]
        system = {"role": "system", "content": "\n\n".join(shape.system)}
        return {
            "messages": [system, *policy.apply(messages)],
            "tools": shape.tools,
            "fidelity": "exact",
            "system": shape.system,
            "params": _decode(row["params_json"]),
        }

    def _shape(self, turn: _StoredTurn) -> _PromptStart:
        if turn.shape is None:
            (sent,) = _decode(turn.messages_json)
            turn.shape = _PromptStart(
                system_of(sent), [tool_of(tool) for tool in sent.get("tools") or ()]
            )
        return turn.shape

    def _action(self, position: int) -> Message:
        action: Message = {
            "role": "assistant",
            "content": self._columns["action_text"][position] or "",
        }
        calls = self._columns["action_tool_calls_json"][position]
        if calls:
            action["tool_calls"] = _decode(calls)
        return action

    def _shown(self, path: list[_StoredTurn], session_id: str) -> list[Message]:
        """Return the messages of the turns on a path, as the model saw them at its end."""
        cleared: set[str] = set()
        shown: list[Message] = []
        turns = _as_shown(path)
        is_rendered = turns is not path
        has_seams = is_rendered or self._has_seams(session_id)
        for turn, after in zip_longest(turns, turns[1:]):
            if turn.flags:
                cleared.update(
                    f.removeprefix("clear:") for f in turn.flags if f.startswith("clear:")
                )
                if "retracted" in turn.flags:
                    continue
            messages = self._messages(turn)
            if has_seams and after is not None and _is_seam(turn, after, is_rendered=is_rendered):
                messages = [{**messages[0], "content": f"{messages[0]['content']}\n"}]
            shown += messages
        if not cleared:
            return shown
        return [
            {**m, "content": CLEARED_RESULT} if m.get("tool_call_id") in cleared else m
            for m in shown
        ]

    def _messages(self, turn: _StoredTurn) -> list[Message]:
        if turn.messages is None:
            turn.messages = _decode(turn.messages_json)
            if turn.kind == "sent":
                turn.messages = [message for wire in turn.messages for message in messages_of(wire)]
            elif turn.state is not None:
                turn.messages.insert(0, self._action(turn.state))
            elif turn.kind == "assistant" and not _begins_with_action(turn.messages):
                raise SchemaError(
                    "states: the row of an earlier decision of this session is missing, so the prefix is incomplete; pass whole tables, and choose states by their ids"
                )
            turn.messages_json = ""  # once is enough to keep it
        return turn.messages

    @cached_property
    def _called_in(self) -> dict[str, dict[str, list[str]]]:
        """Return arguments of the calls of each session, by tool."""
        called: dict[str, dict[str, list[str]]] = {}
        ids, calls = self._columns["session_id"], self._columns["action_tool_calls_json"]
        for session_id, text in zip(ids, calls, strict=True):
            for call in _decode(text) if text else ():
                by_tool = called.setdefault(session_id, {})
                function = call["function"]
                by_tool.setdefault(function["name"], []).append(function["arguments"])
        return called

    @cached_property
    def _definitions(self) -> dict[str, dict[str, Tool]]:
        """Return definitions by tool and series; `""` holds the one for all series together."""
        found: dict[str, dict[str, list[Tool]]] = {}
        for row in self._tools.select(["name", "agent_version", "tool_json"]).to_pylist():
            tool = _decode(row["tool_json"])
            by_series = found.setdefault(row["name"], {})
            for series in {row["agent_version"] or "", ""}:
                by_series.setdefault(series, []).append(tool)
        return {
            name: {series: merge_tools(tools) for series, tools in by_series.items()}
            for name, by_series in found.items()
        }

    def _tools_for(self, session_id: str) -> list[Tool]:
        """Return the tools a session had: its agent's own, and the others that it called."""
        if session_id not in self._tools_of:
            self._tools_of[session_id] = self._find_tools(session_id)
        return self._tools_of[session_id]

    def _find_tools(self, session_id: str) -> list[Tool]:
        series = series_of(self._version(session_id))
        called = self._called_in.get(session_id, {})
        if self._session_rows[session_id]["agent"] != _CATALOGUED:
            return [
                by_series.get(series) or by_series[""]
                for name, by_series in sorted(self._definitions.items())
                if not name.startswith("mcp__") or name in called
            ]
        # Nothing here may depend on other sessions: a hash would move when more of them are read.
        tools = dict(offered_tools(series))
        learner = ToolLearner()
        for name, every in called.items():
            for arguments in every:
                learner.see(name, arguments, None)
        for row in learner.rows():
            if row["name"] not in tools:
                tools[row["name"]] = known_tools().get(row["name"]) or _decode(row["tool_json"])
        tools |= {
            name: tool
            for name, tool in self._given.items()
            if not name.startswith("mcp__") or name in called
        }
        return [tools[name] for name in sorted(tools)]

    @cached_property
    def _given(self) -> dict[str, Tool]:
        """Return definitions that the user or a log gave, and that are taken as they are."""
        rows = self._tools.select(["name", "source", "tool_json"]).to_pylist()
        return {row["name"]: _decode(row["tool_json"]) for row in rows if row["source"] in _GIVEN}


class LazyStates(Sequence[TraceState]):
    """The trace states of several tables. Each is built when it is needed and then dropped.

    Prefixes grow with the square of a session's length. All states of a batch would take gigabytes,
    but its tables take megabytes.

    Args:
        sizes: how many states each table has.
        open_part: opens a table by its number. The most recent tables stay open.
        window: how long prefixes are shortened.

    Raises:
        ConfigError: there is no such window.
    """

    def __init__(
        self, sizes: Sequence[int], open_part: Callable[[int], Traces], *, window: str = "full"
    ) -> None:
        self._ends = list(accumulate(sizes))
        self._open_part = open_part
        self._policy = parse_window(window)
        self._chosen: Sequence[int] = range(sum(sizes))
        self._parts: dict[int, Traces] = {}
        self._recent: dict[int, TraceState] = {}

    def of(self, chosen: Sequence[int]) -> "LazyStates":
        """Return only the states at these positions."""
        other = copy(self)
        other._chosen, other._recent = [self._chosen[number] for number in chosen], {}
        return other

    def __len__(self) -> int:
        return len(self._chosen)

    @overload
    def __getitem__(self, index: int) -> TraceState: ...
    @overload
    def __getitem__(self, index: slice) -> list[TraceState]: ...
    def __getitem__(self, index: int | slice) -> TraceState | list[TraceState]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"state {index} of {len(self)}")
        state = self._recent.pop(position, None)
        if state is None:
            row = self._chosen[position]
            part = bisect_right(self._ends, row)
            start = self._ends[part - 1] if part else 0
            state = self._part(part).state(row - start, self._policy)
        self._recent[position] = state
        if len(self._recent) > _MAX_RECENT:
            del self._recent[next(iter(self._recent))]
        return state

    def _part(self, number: int) -> Traces:
        part = self._parts.pop(number, None)
        if part is None:
            part = self._open_part(number)
        self._parts[number] = part
        if len(self._parts) > _MAX_OPEN_PARTS:
            del self._parts[next(iter(self._parts))]
        return part


def _frame(table: pa.Table) -> "pl.DataFrame":
    # Loaded on first use: what only writes tables does without it.
    try:
        return import_module("polars").from_arrow(table)
    except ModuleNotFoundError as error:
        raise ConfigError(
            "tables as data frames need polars: pip install 'replay-pipeline[polars]'"
        ) from error


def _begins_with_action(messages: list[Message]) -> bool:
    return bool(messages) and messages[0]["role"] == "assistant"


_TYPED = frozenset({"user", "queued", "command"})
"""Kinds of turns with words of the person; `typed_words` takes those of a command's wrapper out."""


def _texts_of(content: Any) -> Iterator[str]:
    parts = content if isinstance(content, list) else [{"text": content}]
    return (part["text"] for part in parts if isinstance(part.get("text"), str))


_PLACES = {"context": 0, "preface": 1, "system": 3}
"""Where turns stand that are not in the order in which they were logged, between two answers."""


def _place(turn: _StoredTurn) -> int:
    return _PLACES.get(turn.kind, 2)


_LISTINGS = (
    ("Skills you can use:", re.compile(r"\bskills\b[^\n]*:\n\n(?=- )")),
    ("Agent types you can start:", re.compile(r"\bagent types\b[^\n]*:\n(?=- )")),
)
"""What a log lists, and what in a client's text begins such a list."""
_LIST = re.compile(r"- .*(?:\n(?!\n|</system-reminder>).*)*")


def _surrounded(messages: list[Message], filled: Filled) -> list[Message]:
    """Put a client's reminders into the user's first message, and its other texts after it.

    Lists that the log has stand in the client's text in place of those of the recording.
    """
    place = next((n for n, each in enumerate(messages) if each["role"] == "user"), None)
    if place is None or not isinstance(words := messages[place].get("content"), str):
        return messages
    texts = [*filled.before, *(each["content"] for each in filled.after)]
    for head, begins in _LISTINGS:
        found = re.search(
            rf"<system-reminder>\n{head}\n+(.*?)\n</system-reminder>\s*", words, re.DOTALL
        )
        for number, text in enumerate(texts):
            if found and (start := begins.search(text)) and (old := _LIST.match(text, start.end())):
                texts[number] = text[: old.start()] + found[1] + text[old.end() :]
                words = (words[: found.start()] + words[found.end() :]).rstrip("\n")
                break
    before, after = texts[: len(filled.before)], texts[len(filled.before) :]
    told = zip(filled.after, after, strict=True)
    return [
        *messages[:place],
        {**messages[place], "content": "\n\n".join([*before, words])},
        *({**each, "content": text} for each, text in told),
        *messages[place + 1 :],
    ]


def _told(found: FoundHarness, filled: Filled, *, is_subagent: bool) -> dict[str, Any]:
    """Return of which harness a prompt is, and what is not quite as it was."""
    notes = [found.note] if found.note else []
    if is_subagent:
        notes.append("of the main conversation, and not of a subagent")
    if filled.unfilled:
        notes.append(f"not in the log: {', '.join(sorted(filled.unfilled))}")
    harness = found.harness
    named = {"agent": harness.agent, "version": harness.version, "sha": harness.sha}
    return named | ({"note": "; ".join(notes)} if notes else {})


def _is_seam(turn: _StoredTurn, after: _StoredTurn, *, is_rendered: bool) -> bool:
    """Return whether the client ends a text with a line break, as it puts another of the user's behind it."""
    kinds = {turn.kind, after.kind}
    if not kinds.isdisjoint(("assistant", "system", "microcompact")):
        return False
    return turn.kind != "context" if is_rendered else kinds != {"attachment"}


def _as_shown(path: list[_StoredTurn]) -> list[_StoredTurn]:
    if not any(turn.kind in _PLACES for turn in path):
        return path
    shown: list[_StoredTurn] = []
    waiting: list[_StoredTurn] = []
    for turn in path:
        if turn.kind == "assistant":
            shown += [*sorted(waiting, key=_place), turn]
            waiting = []
        else:
            waiting.append(turn)
    return [*shown, *sorted(waiting, key=_place)]


def _path(turns: dict[int, _StoredTurn], turn_idx: int) -> list[_StoredTurn]:
    """Return the turns before `turn_idx`, from the root down."""
    path: list[_StoredTurn] = []
    turn = turns.get(turn_idx)
    while turn is not None and turn.parent is not None:
        turn = turns.get(turn.parent)
        if turn is not None:
            path.append(turn)
    path.reverse()
    return path


def open_traces(folder: Path | str) -> Traces:
    """Open the tables that an ingestion wrote into `folder`.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from replay_pipeline.ingesters import ingest, write_traces
        >>> from replay_pipeline.testing.sample import SESSIONS_DIR
        >>> with TemporaryDirectory() as folder:
        ...     write_traces(ingest(SESSIONS_DIR), Path(folder))
        ...     traces = open_traces(folder)
        >>> first = traces.states["state_id"][0]
        >>> [state["state_id"] == first for state in traces.materialize([first])]
        [True]

    Raises:
        StorageError: a table is missing.
        SchemaError: a file is no table of ours.
    """
    folder = Path(folder)
    return Traces(
        sessions=read_table(folder / "sessions.parquet", "sessions"),
        turns=read_table(folder / "turns.parquet", "turns"),
        states=read_table(folder / "states.parquet", "states"),
        tools=read_table(folder / "tools.parquet", "tools"),
    )


class ClaudeCodeIngester:
    """Turns Claude Code sessions into trace states, in memory.

    Example:
        >>> from replay_pipeline.testing.sample import SESSIONS_DIR
        >>> states = list(ClaudeCodeIngester().ingest(SESSIONS_DIR))
        >>> states[0]["messages"][-1]["role"], states[0]["student_action"]["role"]
        ('user', 'assistant')
    """

    def __init__(self, *, redact: bool = True, window: str = "full", salt: str = "") -> None:
        """Raises `ConfigError` when there is no such window."""
        self.redact = redact
        self.window = parse_window(window)
        self.salt = salt

    def ingest(self, path: Path | str) -> Iterator[TraceState]:
        """Yield every decision in `path`, a session file or a folder of them, with its full prefix.

        Raises:
            IngestError: `path` does not exist, cannot be read, or holds no session.
        """
        result = ingest(path, redact=self.redact, salt=self.salt)
        traces = Traces(
            sessions=result.sessions, turns=result.turns, states=result.states, tools=result.tools
        )
        return traces.materialize(window=self.window)
