"""What happened after each decision: outcome, error kind, hint, recovery, and natural alternatives."""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from replay_pipeline.ingesters.base import Result, Turn, path_to
from replay_pipeline.ingesters.json_lines import UNREADABLE
from replay_pipeline.types import Outcome

KNOWN_AGENTS: dict[str, Any] = tomllib.loads(
    Path(__file__).with_name("known_agents.toml").read_text("utf-8")
)
"""How each agent words its errors, and the text that it adds around them."""
MAX_HINT_CHARS = 4_000
_MAX_RECOVERY_TURNS = 60

# The rules below read the head of a text in lower case: ignoring case in each expression would
# take ten times as long.
_HEAD_CHARS = 600
_FEEDBACK = re.compile(r"the user said:\s*(.+)", re.DOTALL | re.IGNORECASE)
_CLEANED = re.compile(r"</?tool_use_error>")
_HOOK = re.compile(r"hook (?:error|blocked|denied|returned|stopped)|blocked by .{0,40}hook")
_REFUSALS: dict[Outcome, re.Pattern[str]] = {
    outcome: re.compile(pattern) for outcome, pattern in KNOWN_AGENTS["refusals"].items()
}
_ERROR_KINDS = {kind: re.compile(pattern) for kind, pattern in KNOWN_AGENTS["error_kinds"].items()}

_SEVERITY: tuple[Outcome, ...] = (
    "user_rejected",
    "denied_by_policy",
    "hook_blocked",
    "interrupted",
    "tool_error",
    "cancelled_sibling",
    "no_result",
)


class Label(msgspec.Struct, eq=False):
    """What is known about a decision only afterward."""

    outcome: Outcome
    error_kind: str | None = None
    hint: str | None = None
    recovered_by: Turn | None = None
    siblings: list[Turn] = []
    """Other decisions with exactly the same prefix, in the order of the file."""


def judge_result(result: Result) -> tuple[Outcome, str | None]:
    """Return the outcome of one call, and its error kind if the call itself failed."""
    verdict = result.verdict
    if verdict is None:
        verdict = result.verdict = _judged(result)
    return verdict


def _judged(result: Result) -> tuple[Outcome, str | None]:
    if result.denial == "user-rejected":
        return "user_rejected", None
    if result.denial is not None:
        return "denied_by_policy", None
    if not result.is_error:
        is_interrupt = result.text.startswith("[Request interrupted by user")
        return ("interrupted" if is_interrupt else "ok"), None
    text = _head(result.text)
    for outcome, pattern in _REFUSALS.items():
        if pattern.search(text):
            return outcome, None
    if not text.startswith("exit code") and _HOOK.search(text):
        return "hook_blocked", None
    return "tool_error", _kind_of(text)


def _head(text: str) -> str:
    return _CLEANED.sub("", text[:_HEAD_CHARS]).strip().lower()


def error_kind(text: str) -> str:
    """Return the kind of a tool error by its text; `other` when no rule knows it."""
    return _kind_of(_head(text))


def _kind_of(text: str) -> str:
    for kind, pattern in _ERROR_KINDS.items():
        if pattern.search(text):
            return kind
    return "other"


def feedback_in(result: Result) -> str | None:
    """Return the words with which the user rejected the call."""
    if result.feedback:
        return result.feedback.strip() or None
    match = _FEEDBACK.search(result.text)
    return match.group(1).strip() or None if match else None


def shortened(text: str) -> str:
    """Return the beginning and the end of a long text."""
    if len(text) <= MAX_HINT_CHARS:
        return text
    half = (MAX_HINT_CHARS - 5) // 2
    return f"{text[:half]}\n...\n{text[-half:]}"


def label_turns(turns: list[Turn]) -> dict[Turn, Label]:
    """Return a label for each state among the turns of one conversation."""
    children: dict[Turn, list[Turn]] = {}
    for turn in turns:
        if turn.parent is not None:
            children.setdefault(turn.parent, []).append(turn)
    labels = {t: _label(t, children) for t in turns if t.is_state}
    _find_recoveries(turns, labels)
    if _has_forks(turns, children):
        _find_siblings(turns, labels)
    return labels


def _has_forks(turns: list[Turn], children: Mapping[Turn, list[Turn]]) -> bool:
    """Return whether two turns stand at one place; most sessions are a single line."""
    roots = [turn.segment for turn in turns if turn.parent is None]
    return len(set(roots)) < len(roots) or any(len(below) > 1 for below in children.values())


def _label(turn: Turn, children: Mapping[Turn, list[Turn]]) -> Label:
    if "retracted" in turn.flags:
        return Label("retracted")
    below = children.get(turn, ())
    was_interrupted = "interrupted" in turn.flags or any(c.kind == "interrupt" for c in below)
    if not turn.calls:
        return Label("interrupted" if was_interrupted else "final_text")
    worst: Outcome = "ok"
    kind: str | None = None
    hint: str | None = None
    for call in turn.calls:
        result = turn.results.get(call.id)
        outcome, its_kind = judge_result(result) if result is not None else ("no_result", None)
        if outcome != "ok" and (worst == "ok" or _SEVERITY.index(outcome) < _SEVERITY.index(worst)):
            worst, kind = outcome, its_kind
            hint = _hint(outcome, result) if result is not None else None
    # Stopped between calls that were all answered and the next message, these calls are done:
    # only a call that waited for its answer, or that the log names, was interrupted.
    if (worst == "no_result" and was_interrupted) or (
        worst == "ok" and ("interrupted" in turn.flags or any(map(_stops_calls, below)))
    ):
        worst = "interrupted"
    if worst in {"user_rejected", "interrupted"} and hint is None:
        hint = _next_words(turn, children)
    return Label(worst, kind, shortened(hint) if hint else None)


def _stops_calls(turn: Turn) -> bool:
    return turn.kind == "interrupt" and "for tool use" in turn.texts[0]


def _hint(outcome: Outcome, result: Result) -> str | None:
    if outcome == "user_rejected":
        return feedback_in(result)
    if outcome in {"tool_error", "hook_blocked", "denied_by_policy"}:
        return _CLEANED.sub("", result.text).strip() or None
    return None


def _next_words(turn: Turn, children: Mapping[Turn, list[Turn]]) -> str | None:
    """Return what the user typed right after stopping the agent."""
    below = children.get(turn, [])
    while below:
        for child in below:
            if child.kind == "user":
                return "\n".join(child.texts).strip() or None
        below = next((children.get(c, []) for c in below if c.kind == "interrupt"), [])
    return None


def target_of(arguments: str) -> str:
    """Return the target of a call: its file, or the head of its shell command, or an empty text."""
    try:
        value = msgspec.json.decode(arguments)
    except UNREADABLE:
        return ""
    if not isinstance(value, dict):
        return ""
    for key in ("file_path", "notebook_path", "path", "filePath", "url", "pattern", "query"):
        target = value.get(key)
        if isinstance(target, str):
            return target
    command = value.get("command")
    if isinstance(command, list):
        command = " ".join(map(str, command))
    return _command_head(command) if isinstance(command, str) else ""


def _command_head(command: str) -> str:
    """Return program and subcommand of the last command after `cd x &&`."""
    last = re.split(r"&&|;", re.sub(r"^\s*cd\s+\S+\s*(?:&&|;)\s*", "", command))[0]
    words = [w for w in last.split() if "=" not in w.split("/")[0]]
    head = words[:1]
    if len(words) > 1 and not words[1].startswith("-"):
        head.append(words[1])
    return " ".join(head)


def _find_recoveries(turns: list[Turn], labels: dict[Turn, Label]) -> None:
    """Link each failed decision to the next one below it that does the same and succeeds."""
    failed: dict[tuple[str, str], list[Turn]] = {}
    names: set[str] = set()
    for turn in turns:
        label = labels.get(turn)
        if label is None or not turn.calls:
            continue
        for call in turn.calls:
            result = turn.results.get(call.id)
            if result is None:
                continue
            outcome, _ = judge_result(result)
            if outcome in {"cancelled_sibling", "interrupted"}:
                continue
            if outcome == "ok" and call.name not in names:
                continue
            key = call.name, target_of(call.arguments)
            if outcome != "ok":
                names.add(call.name)
                failed.setdefault(key, []).append(turn)
            elif waiting := failed.get(key):
                failed[key] = [t for t in waiting if not _recovers(turn, t, labels)]


def _recovers(turn: Turn, failed: Turn, labels: dict[Turn, Label]) -> bool:
    """Return whether `turn` lies below `failed` in its segment; then the link is made."""
    if failed is turn or failed.segment != turn.segment:
        return False
    for distance, above in enumerate(path_to(turn.parent)):
        if above is failed:
            if labels[failed].recovered_by is None:
                labels[failed].recovered_by = turn
            return True
        if distance > _MAX_RECOVERY_TURNS or above.offset < failed.offset:
            return False
    return False


def _find_siblings(turns: list[Turn], labels: dict[Turn, Label]) -> None:
    """Group the states that were decided at one and the same prefix.

    Two user turns with the same words at the same place are one prefix: a prompt that was sent
    again. The branch that went on longest in the file is the one that was kept; a decision that
    was left for it is `rewound`.
    """
    same: dict[Turn, Turn] = {}
    first: dict[tuple[object, ...], Turn] = {}
    last_offset: dict[Turn, int] = {}
    for turn in turns:
        parent = same[turn.parent] if turn.parent is not None else None
        if turn.kind == "assistant":
            same[turn] = turn
        else:
            key = (parent, turn.kind, *turn.texts, *turn.cleared, turn.segment)
            same[turn] = first.setdefault(key, turn)
    for turn in reversed(turns):
        last = max(turn.offset, last_offset.get(turn, 0))
        last_offset[turn] = last
        if turn.parent is not None:
            last_offset[turn.parent] = max(last, last_offset.get(turn.parent, 0))
    groups: dict[Turn, list[Turn]] = {}
    for turn in turns:
        # What a broken stream or a refusal took back was nobody's choice against it.
        if turn.is_state and turn.parent is not None and labels[turn].outcome != "retracted":
            groups.setdefault(same[turn.parent], []).append(turn)
    for group in groups.values():
        if len(group) < 2:
            continue
        kept = max(group, key=lambda turn: last_offset[turn])
        for turn in group:
            labels[turn].siblings = [other for other in group if other is not turn]
            if turn is not kept:
                labels[turn].outcome = "rewound"
