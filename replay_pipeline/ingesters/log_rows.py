"""Rows of the tables `turns`, `states`, and `sessions` for one conversation, by column."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import chain
from typing import Any
from zlib import crc32

import msgspec

from replay_pipeline.ingesters.base import LACKS, NO_RESULT, ReadCounts, SessionLog, Turn
from replay_pipeline.ingesters.fidelity import predict_context
from replay_pipeline.ingesters.json_lines import UNREADABLE
from replay_pipeline.ingesters.labels import Label
from replay_pipeline.redaction.redactor import FoundValues, Redactor
from replay_pipeline.types import Message

_PIECE_CHARS = 1_500_000
_TOLD_CHARS = 1_000
"""Of a text and of a call, by which a decision is told from another with its id."""
_ANSWERED_AS_THEY_CAME = frozenset({"claude_code"})
"""Agents that send results of parallel calls in the order in which they came, and not in that of the calls."""
_BASE_32 = "abcdefghijklmnopqrstuvwxyz234567"
_encode = msgspec.json.encode
_decode = msgspec.json.decode

Rows = dict[str, list[Any]]
"""Values by column, all of the same length."""


def state_ids_of(turns: Sequence[Turn]) -> list[str]:
    """Return ids of decisions. Copies, forks, redaction, and new versions of this program don't change them."""
    return state_ids_for([turn.message_id or turn.uuid for turn in turns])


def state_ids_for(messages: Sequence[str]) -> list[str]:
    """Return ids of decisions, each given by its message's id or, if it has none, its row's `uuid`."""
    return ["cc1_" + _base_32(message) for message in messages]


def _base_32(message: str) -> str:
    # The library's own encoding takes five times as long.
    number = int.from_bytes(hashlib.blake2b(message.encode(), digest_size=10).digest(), "big")
    return "".join([_BASE_32[number >> shift & 31] for shift in range(75, -5, -5)])


def state_id_of(turn: Turn) -> str:
    """Return the id of one decision, as `state_ids_of` gives it."""
    return state_ids_of([turn])[0]


def content_of(turn: Turn) -> str:
    """Return short hashes of a decision's first text, its first call, and its time.

    They tell it from others with the same id, and stay the same while it is still written.
    """
    if turn.content is None:
        first = turn.texts[0] if turn.texts else ""
        call = turn.calls[0].arguments if turn.calls else ""
        turn.content = f"{_told(first)}:{_told(call)}:{_told(turn.timestamp)}"
    return turn.content


def _told(text: str | None) -> str:
    return str(crc32(text[:_TOLD_CHARS].encode("utf-8", "surrogatepass"))) if text else ""


def is_same_content(one: str, other: str) -> bool:
    """Return whether two decisions with the same id are copies: nothing that both have differs."""
    pairs = zip(one.split(":"), other.split(":"), strict=True)
    return all(mine == its or not mine or not its for mine, its in pairs)


def sha_of(value: str | bytes) -> str:
    """Return a short hash that names a path or a piece of a file."""
    data = value.encode("utf-8", "surrogateescape") if isinstance(value, str) else value
    return hashlib.blake2b(data, digest_size=8).hexdigest()


class Cleaner:
    """Redacts one conversation with a redactor, and the people and secrets that occur in it.

    Without a redactor, nothing is changed.
    """

    def __init__(
        self, redactor: Redactor | None, users: frozenset[str], known: FoundValues | None = None
    ) -> None:
        self._redactor = redactor
        self._users, self._known = users, known

    def prepare(self, texts: Iterable[str]) -> None:
        """Redact many texts at once, which is faster than one by one. Later calls return the results."""
        if self._redactor is not None:
            self._redactor.prepare(texts, users=self._users, known=self._known)

    def text(self, text: str) -> str:
        """Return one text, redacted."""
        if self._redactor is None:
            return text
        return self._redactor.text(text, users=self._users, known=self._known)

    def texts(self, texts: Sequence[str | None]) -> list[str | None]:
        """Redact many texts. An empty text becomes `None`."""
        if self._redactor is None:
            return [text or None for text in texts]
        redact, users, known = self._redactor.text, self._users, self._known
        return [redact(text, users=users, known=known) if text else None for text in texts]

    def arguments(self, text: str, strings: Iterable[str] | None = None) -> str:
        """Return the arguments as recorded, with every string redacted; `strings` are these, if known."""
        if self._redactor is None:
            return text
        strings = strings_in(text) if strings is None else strings
        clean = {string: put for string in strings if (put := self.text(string)) != string}
        if not clean:
            return text
        try:
            return _encode(_replaced(_decode(text), clean)).decode()
        except UNREADABLE:
            return clean[text]


def redactable_texts(turns: Sequence[Turn], *, keeps: bool = False) -> Iterator[str]:
    """Yield every text in the turns that will be redacted. If `keeps`, calls store the strings of their arguments."""
    yield from {text for turn in turns for text in (turn.cwd, turn.branch) if text}
    for turn in turns:
        if turn.wire_json is not None:
            yield from strings_in(turn.wire_json)
            continue
        yield "\n\n".join(turn.texts)
        yield "\n\n".join(turn.thinking)
        for call in turn.calls:
            yield call.name
            strings = call.strings if call.strings is not None else list(strings_in(call.arguments))
            if keeps:
                call.strings = strings
            yield from strings
        for result in turn.results.values():
            yield result.text


_ACCOUNTS = re.compile(r"(?:#?\d+\W{1,4})?([A-Za-z][\w-]{2,38})")


def accounts_in(turns: Sequence[Turn]) -> Iterator[str]:
    """Yield the accounts that a call returned for a query with `login`, each as an author line.

    Nothing else marks these words as names: they stand alone or after a number.
    """
    for turn in turns:
        for call in turn.calls:
            if ".login" in call.arguments and (result := turn.results.get(call.id)):
                lines = [_ACCOUNTS.fullmatch(line) for line in result.text.split("\n") if line]
                yield from (f"author:\t{match[1]}\n" for match in lines if match and all(lines))


def hints_of(turns: Sequence[Turn], labels: Mapping[Turn, Label]) -> Iterator[str]:
    """Yield every hint of the turns."""
    for turn in turns:
        if turn in labels and (hint := labels[turn].hint):
            yield hint


def pieces_of(turns: list[Turn]) -> Iterator[list[Turn]]:
    """Yield the turns in order, in parts with some megabytes of results."""
    start = n_chars = 0
    for position, turn in enumerate(turns, 1):
        n_chars += sum(result.n_bytes or len(result.text) for result in turn.results.values())
        n_chars += len(turn.wire_json or "")
        if n_chars > _PIECE_CHARS:
            yield turns[start:position]
            start, n_chars = position, 0
    yield turns[start:]


def strings_in(arguments: str) -> Iterator[str]:
    """Yield every string in arguments, or the text that they are."""
    try:
        values = [_decode(arguments)]
    except UNREADABLE:
        values = [arguments]
    while values:
        value = values.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, list):
            values += value
        elif isinstance(value, dict):
            yield from value
            values += value.values()


def _replaced(value: Any, clean: Mapping[str, str]) -> Any:
    """Return JSON with other strings in place of those in `clean`, names among them."""
    if isinstance(value, str):
        return clean.get(value, value)
    if isinstance(value, list):
        return [_replaced(item, clean) for item in value]
    if isinstance(value, dict):
        return {clean.get(key, key): _replaced(item, clean) for key, item in value.items()}
    return value


class LogRows:
    """Rows of one conversation, for those of its turns that are stored.

    `fresh` has the decisions that become rows of `states`, with their ids. Their actions are stored
    only there.
    """

    def __init__(
        self,
        log: SessionLog,
        session_id: str,
        turns: list[Turn],
        fresh: Sequence[tuple[str, Turn]],
        cleaner: Cleaner,
    ) -> None:
        self._log = log
        self._session_id = session_id
        self.kept = turns
        self._state_ids = {turn: state_id for state_id, turn in fresh}
        self._cleaner = cleaner
        self._depths = _depths(log.turns)
        self._lacks: dict[Turn | None, list[str]] = {None: []}
        for turn in chain(log.turns, log.sent):
            own = [flag.removeprefix(LACKS) for flag in turn.flags if flag.startswith(LACKS)]
            above = self._lacks[turn.parent]
            self._lacks[turn] = sorted({*above, *own}) if own else above
        self._predicted = predict_context(log.turns, agent=log.agent)
        self._cwd = next((turn.cwd for turn in log.turns if turn.cwd), None)
        branches = (turn.branch for turn in log.turns)
        self._branch = next((each for each in branches if each is not None), None)
        self._moments = [_milliseconds(turn.timestamp) for turn in log.turns]

    def turns(self, kept: Sequence[Turn]) -> Rows:
        """Return rows of `turns` for some of the stored turns, in the order of the file."""
        clean = self._cleaner
        usages = [turn.usage for turn in kept]
        return {
            "session_id": [self._session_id] * len(kept),
            "conversation": [None] * len(kept),  # known when all files are read
            "turn_idx": [turn.index for turn in kept],
            "parent_turn_idx": [turn.parent.index if turn.parent else None for turn in kept],
            "segment": [turn.segment for turn in kept],
            "kind": [turn.kind for turn in kept],
            "timestamp": [self._moments[turn.index] if turn.index >= 0 else None for turn in kept],
            "model": [turn.model for turn in kept],
            "cwd": clean.texts([turn.cwd for turn in kept]),
            "messages_json": [self._messages_json(turn) for turn in kept],
            "thinking": clean.texts(["\n\n".join(turn.thinking) for turn in kept]),
            "n_input_tokens": [usage.n_input if usage else None for usage in usages],
            "n_cache_creation_tokens": [u.n_cache_creation if u else None for u in usages],
            "n_cache_creation_1h_tokens": [u.n_cache_creation_1h if u else None for u in usages],
            "n_cache_read_tokens": [usage.n_cache_read if usage else None for usage in usages],
            "n_output_tokens": [usage.n_output if usage else None for usage in usages],
            "n_web_searches": [usage.n_web_searches if usage else None for usage in usages],
            "speed": [usage.speed if usage else None for usage in usages],
            "inference_region": [usage.region if usage else None for usage in usages],
            "flags": [_flags_of(turn) for turn in kept],
        }

    def states(self, kept: Sequence[Turn], labels_of: Mapping[Turn, Label]) -> Rows:
        """Return rows of `states`: the fresh decisions among these turns."""
        clean, depth, predicted = self._cleaner, self._depths, self._predicted
        states = [turn for turn in kept if turn in self._state_ids]
        labels = [labels_of[turn] for turn in states]
        n_context = [turn.usage.n_context if turn.usage else 0 for turn in states]
        return {
            "state_id": [self._state_ids[turn] for turn in states],
            "content_sha": [content_of(turn) for turn in states],
            "session_id": [self._session_id] * len(states),
            "conversation": [None] * len(states),
            "turn_idx": [turn.index for turn in states],
            "depth": [depth[turn] for turn in states],
            "segment": [turn.segment for turn in states],
            "student_model": [turn.model for turn in states],
            "cwd": clean.texts([turn.cwd for turn in states]),
            "action_text": [clean.text("\n\n".join(turn.texts)) for turn in states],
            "action_tool_calls_json": [
                _encode(self._tool_calls(turn)) if turn.calls else None for turn in states
            ],
            "outcome": [label.outcome for label in labels],
            "error_kind": [label.error_kind for label in labels],
            "hint": clean.texts([label.hint for label in labels]),
            "recovered_by": [
                state_id_of(label.recovered_by) if label.recovered_by else None for label in labels
            ],
            "siblings": [state_ids_of(i.siblings) if i.siblings else [] for i in labels],
            "n_context_tokens": [n or None for n in n_context],
            "n_predicted_tokens": [predicted.get(turn) for turn in states],
            "fidelity": [
                (1.0 if turn.sent is not None else predicted[turn] / n)
                if turn in predicted
                else None
                for turn, n in zip(states, n_context, strict=True)
            ],
            "sent_turn_idx": [turn.sent.index if turn.sent else None for turn in states],
            "shape_turn_idx": [turn.shape.index if turn.shape else None for turn in states],
            "is_resolved": [self._log.is_resolved] * len(states),
            "lacks": [self._lacks[turn.sent or turn.parent] for turn in states],
            "params_json": [
                clean.arguments(turn.params_json) if turn.params_json else None for turn in states
            ],
        }

    def session(self, *, n_states: int, hash_project: bool) -> dict[str, Any]:
        """Return the row of `sessions`, without its source and its counts."""
        log = self._log
        cwd = self._cwd
        moments = [moment for moment in self._moments if moment is not None]
        project = cwd
        if cwd is not None:
            project = sha_of(cwd) if hash_project else self._cleaner.text(cwd)
        return {
            "session_id": self._session_id,
            "agent": log.agent,
            "agent_id": log.agent_id,
            "parent_session_id": log.parent_session_id,
            "project": project,
            "git_branch": self._cleaner.text(self._branch) if self._branch else self._branch,
            "versions": sorted({turn.version for turn in log.turns if turn.version}),
            "models": sorted({turn.model for turn in log.turns if turn.model}),
            "title": self._cleaner.text(log.title) if log.title else None,
            "client_usd_json": json.dumps(log.client_usd) if log.client_usd else None,
            "first_timestamp": min(moments, default=None),
            "last_timestamp": max(moments, default=None),
            "entrypoint": log.entrypoint,
            "is_resolved": log.is_resolved,
            "ended": log.ended,
            "n_turns": sum(turn.index >= 0 for turn in self.kept),
            "n_states": n_states,
        }

    def _tool_calls(self, turn: Turn) -> list[dict[str, Any]]:
        clean = self._cleaner
        return [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": clean.text(call.name),
                    "arguments": clean.arguments(call.arguments, call.strings),
                },
            }
            for call in turn.calls
        ]

    def _messages_json(self, turn: Turn) -> str | bytes:
        if turn.wire_json is not None:
            return f"[{self._cleaner.arguments(turn.wire_json)}]"
        return _encode(self._messages(turn))

    def _messages(self, turn: Turn) -> list[Message]:
        """Return what the turn adds to a prefix, apart from an action that `states` holds."""
        if turn.kind == "microcompact":
            return []
        clean = self._cleaner
        if turn.kind != "assistant":
            role = "system" if turn.kind in ("developer", "system") else "user"
            return [{"role": role, "content": clean.text("\n\n".join(turn.texts))}]
        messages: list[Message] = []
        if turn not in self._state_ids:
            action: Message = {"role": "assistant", "content": clean.text("\n\n".join(turn.texts))}
            if turn.calls:
                action["tool_calls"] = self._tool_calls(turn)
            messages.append(action)
        call_ids = dict.fromkeys(call.id for call in turn.calls)
        if self._log.agent in _ANSWERED_AS_THEY_CAME:
            call_ids = dict.fromkeys([*turn.results, *call_ids])
        for call_id in call_ids:
            result = turn.results.get(call_id)
            content = clean.text(result.text) if result is not None else NO_RESULT
            messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
        return messages


def counts_of(counts: ReadCounts) -> dict[str, Any]:
    """Return the columns of `sessions` that count the rows of its file by outcome."""
    return {
        "n_rows": counts.rows,
        "n_rows_used": counts.rows_used,
        "skipped_json": json.dumps(dict(sorted(counts.skipped.items()))),
    }


def _flags_of(turn: Turn) -> list[str]:
    if not turn.flags and not turn.cleared:
        return []
    return [*sorted(turn.flags), *(f"clear:{call_id}" for call_id in turn.cleared)]


def _depths(turns: Sequence[Turn]) -> dict[Turn, int]:
    depth: dict[Turn, int] = {}
    for turn in turns:
        depth[turn] = depth[turn.parent] + 1 if turn.parent is not None else 0
    return depth


def _milliseconds(timestamp: str | None) -> int | None:
    if not timestamp:
        return None
    try:
        moment = datetime.fromisoformat(timestamp)
        moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        return round(moment.timestamp() * 1000)
    except (ValueError, OverflowError):
        return None
