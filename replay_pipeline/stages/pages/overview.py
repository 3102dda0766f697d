"""Totals over all sessions by day, project, model, tool, and outcome, added up one session at a time."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import msgspec

from replay_pipeline.redaction.printable import printable
from replay_pipeline.stages.pages.costs import (
    TOKENS,
    Row,
    prices_date,
    tokens_of,
    usd_of,
)
from replay_pipeline.stages.receipts import grouped

FINE = frozenset({"ok", "final_text"})
INTERRUPTED = frozenset({"user_rejected", "interrupted"})
"""Outcomes in which the user rejected the action or stopped the agent. Other outcomes except `FINE` are errors."""
_TITLE_CHARS = 90
_MOST_DEAR = 3
_COMMAND = re.compile(r"<((?:local-)?command-[a-z]+|system-reminder)>.*?</\1>\s*", re.DOTALL)
"""What a client puts into a user's message."""
_CALLED = re.compile(
    r"<command-name>(.*?)</command-name>(?:.*?<command-args>(.*?)</command-args>)?", re.DOTALL
)
_SENTINELS = ("[Request interrupted", "Caveat:", "Tool loaded.")
_HOUSEKEEPING = re.compile(
    "/(clear|compact|config|context|cost|doctor|effort|exit|fast|help|hooks|ide|login|logout|mcp"
    "|memory|model|permissions|plugin|quit|resume|status|usage)"
)
"""Commands that ask the client for something, and the agent for nothing."""
_FEW_CHARS = 3
"""A request of so few characters answers something, and is no title where there is a longer one."""
_TOOL_NAME = re.compile(r"[\w.:/@-]{1,128}")
_WORKTREES = (
    (re.compile(r".*/\.(?:cursor/|claude-)worktrees/([^/]+)/.*"), r"\1"),
    (re.compile(r".*/\.codex/worktrees/[^/]+/([^/]+).*"), r"\1"),
    (re.compile(r"(?:/\.claude/|/\.git/|/?\.)worktrees/.+"), ""),
)
"""Where clients and people keep worktrees of a repository, and what to call the repository then."""

Facts = dict[str, Any]


@dataclass
class _Bill:
    """What the sessions of one conversation cost."""

    sessions: list[Facts] = field(default_factory=list)
    subagents_usd: float = 0.0
    counted: list[tuple[Facts, Mapping[str, float], float]] = field(default_factory=list)
    """Of each session that its client counted: this count by model, and what all of its rows cost."""
    unlogged_usd: float = 0.0
    payer: tuple[Facts, Mapping[str, float]] | None = None
    without_price: set[str] = field(default_factory=set)


RESULTS = {True: "tests passed", False: "tests failed"}
"""What `is_resolved` of a session says, in words."""


class SessionTotals:
    """Adds up sessions. `figures` returns the totals so far."""

    def __init__(self) -> None:
        self.sessions: list[Facts] = []
        self.outcomes: Counter[str] = Counter()
        self._days: dict[tuple[str, str, str], Counter[str]] = {}
        self._models: dict[str, Counter[str]] = {}
        self._usd: dict[tuple[str, str, str], float] = {}
        self._without_price: set[str] = set()
        self._bills: dict[str, _Bill] = {}
        self._tools: dict[str, list[int]] = {}
        self._projects: dict[str, str] = {}
        self._n_turns = 0

    def add(self, session: Row, turns: Sequence[Row], states: Sequence[Row]) -> Facts:
        """Add a session, and return the facts for its line in the list.

        `turns` come without logged requests.
        """
        facts = _facts_of_session(session, turns, states)
        facts["project"] = self._project_of(turns)
        self.sessions.append(facts)
        self._n_turns += len(turns)
        self.outcomes.update(state["outcome"] for state in states)
        for name, (n, n_failed) in facts["tools"].items():
            counts = self._tools.setdefault(name, [0, 0])
            counts[0] += n
            counts[1] += n_failed
        own = paid(turns, states)
        by_model = grouped((turn for turn in own if turn["model"] is not None), itemgetter("model"))
        for model, rows in by_model.items():
            model = printable(model)
            self._models.setdefault(model, Counter()).update(
                tokens_of(rows) + Counter(turns=len(rows))
            )
            for day, of_day in grouped(rows, _day_of).items():
                key = (day, model, facts["project"])
                self._days.setdefault(key, Counter()).update(tokens_of(of_day))
                usd = usd_of(of_day)[0]
                self._usd[key] = self._usd.get(key, 0.0) + usd
                facts["spent"].append([day, model, usd])
        bill = self._bills.setdefault(session["conversation"], _Bill())
        bill.sessions.append(facts)
        bill.without_price.update(map(printable, usd_of(own)[1]))
        if facts["parent"] is not None:
            bill.subagents_usd += facts["cost_usd"]
        elif counted := msgspec.json.decode(session["client_usd_json"] or "{}"):
            bill.counted.append((facts, counted, usd_of(turns)[0]))
        return facts

    def _project_of(self, turns: Sequence[Row]) -> str:
        """Name the repository in which a session began, by as many of its folders as tell it from others."""
        folder = next((turn["cwd"] for turn in turns if turn["cwd"]), None)
        if folder is None:
            return "unnamed"
        folder = folder.replace("\\", "/").rstrip("/")
        for pattern, repository in _WORKTREES:
            folder = pattern.sub(repository, folder)
        if "/" not in folder:
            return printable(folder)
        if folder not in self._projects:
            parts = folder.split("/")
            names = ("/".join(parts[-n:]) for n in range(1, len(parts)))
            taken = set(self._projects.values())
            name = next((name for name in names if name not in taken), folder)
            self._projects[folder] = printable(name)
        return self._projects[folder]

    def settle(self) -> None:
        """Add to each conversation what its client counted beyond its rows, and tell its sessions its total.

        A client counts its subagents too, and a fork what its parent had spent before. So the
        largest gap of a conversation is what its calls without a row have cost.
        """
        for bill in self._bills.values():
            for facts, counted, logged_usd in bill.counted:
                gap = sum(counted.values()) - logged_usd - bill.subagents_usd
                if gap > bill.unlogged_usd:
                    bill.unlogged_usd, bill.payer = gap, (facts, counted)
            if bill.payer is not None:
                self._add_unlogged(*bill.payer, bill.unlogged_usd)
            if not bill.counted:
                self._without_price |= bill.without_price
            total = sum(each["cost_usd"] for each in bill.sessions)
            first = next((s for s in bill.sessions if s["parent"] is None), bill.sessions[0])
            for each in bill.sessions:
                each["total_usd"], each["has_bill"] = total, each is first
                each["is_priced"] = each["is_priced"] or bool(bill.counted)
        self._bills.clear()

    def _add_unlogged(self, facts: Facts, counted: Mapping[str, float], usd: float) -> None:
        facts["cost_usd"] += usd
        # By model as the client's whole count is: which calls had no row is not known.
        for model, share in counted.items():
            model = model or next(iter(facts["models"]), "unknown")
            key = ((facts["last"] or "")[:10], printable(model), facts["project"])
            self._models.setdefault(key[1], Counter())
            self._days.setdefault(key, Counter())
            usd_of_model = usd * share / sum(counted.values())
            self._usd[key] = self._usd.get(key, 0.0) + usd_of_model
            facts["spent"].append([*key[:2], usd_of_model])

    def figures(self) -> dict[str, Any]:
        """Return all totals, for the terminal and for the page."""
        self.settle()
        usd = dict.fromkeys(self._models, 0.0)
        for (_, model, _), each in self._usd.items():
            usd[model] += each
        models = [
            {
                "model": model,
                "turns": counts["turns"],
                "tokens": sum(counts[name] for name in TOKENS),
                "cost_usd": None if model in self._without_price else usd[model],
            }
            for model, counts in sorted(
                self._models.items(), key=lambda item: (-usd[item[0]], item[0])
            )
        ]
        tokens = {name: sum(c[name] for c in self._models.values()) for name in TOKENS}
        dates = sorted(d for each in self.sessions for d in (each["first"], each["last"]) if d)
        n_states = sum(self.outcomes.values())
        interrupted = sum(self.outcomes[name] for name in INTERRUPTED)
        errors = n_states - interrupted - sum(self.outcomes[name] for name in FINE)
        return {
            "total": {
                "sessions": len(self.sessions),
                "subagents": sum(each["parent"] is not None for each in self.sessions),
                "turns": self._n_turns,
                "states": n_states,
                "errors": errors,
                "interruptions": interrupted,
                "first": dates[0][:10] if dates else None,
                "last": dates[-1][:10] if dates else None,
            },
            "dearest": _dearest(self.sessions),
            "projects": _by_project(self.sessions),
            "models": models,
            "tokens": tokens,
            "cost_usd": sum(usd.values()),
            "prices_of": prices_date(),
            "models_without_price": sorted(self._without_price),
            "outcomes": dict(self.outcomes.most_common()),
            "tools": dict(sorted(self._tools.items(), key=lambda item: (-item[1][0], item[0]))),
            "days": [
                [
                    day,
                    model,
                    project,
                    *(counts[name] for name in TOKENS),
                    None if model in self._without_price else self._usd[day, model, project],
                ]
                for (day, model, project), counts in sorted(self._days.items())
            ],
        }


def paid(turns: Iterable[Row], states: Iterable[Row]) -> list[Row]:
    """Return the turns that a session paid for. Turns that a fork copied are left out."""
    decided = {state["turn_idx"] for state in states}
    # One without a parent is no decision, since nothing came before it; it was paid for all the same.
    return [t for t in turns if t["turn_idx"] in decided or t["parent_turn_idx"] is None]


def _day_of(turn: Row) -> str:
    return turn["timestamp"].date().isoformat() if turn["timestamp"] else ""


def _dearest(sessions: Iterable[Facts]) -> list[tuple[str, float]]:
    """Return the title and the total of the conversations that cost most."""
    found = sorted(sessions, key=lambda each: -each["total_usd"])
    return [(each["title"], each["total_usd"]) for each in found if each["has_bill"]][:_MOST_DEAR]


def results_by_model(sessions: Iterable[Facts]) -> list[dict[str, Any]]:
    """Return what conversations with a known result cost by the model that wrote them, the cheapest success first.

    Returns:
        By model: `n` conversations with a result, `n_resolved`, their cost with subagents as `usd`, and
        `usd_per_resolved`, None without a success.
    """
    wrote: dict[str, set[str]] = {}
    resolved: dict[str, bool] = {}
    usd: Counter[str] = Counter()
    for facts in sessions:
        name = facts["conversation"]
        usd[name] += facts["cost_usd"]
        if facts["parent"] is None:
            wrote.setdefault(name, set()).update(facts["models"])
        if facts["result"] is not None:
            resolved[name] = facts["result"] == RESULTS[True]
    found: dict[str, dict[str, Any]] = {}
    for name, is_resolved in resolved.items():
        models = wrote.get(name, set())
        model = min(models) if len(models) == 1 else "several models"
        row = found.setdefault(model, {"model": model, "n": 0, "n_resolved": 0, "usd": 0.0})
        row["n"] += 1
        row["n_resolved"] += is_resolved
        row["usd"] += usd[name]
    for row in found.values():
        row["usd_per_resolved"] = row["usd"] / row["n_resolved"] if row["n_resolved"] else None
    return sorted(found.values(), key=lambda row: (row["usd_per_resolved"] or math.inf, -row["n"]))


def _by_project(sessions: Iterable[Facts]) -> list[dict[str, Any]]:
    rows = [
        {
            "name": name,
            "sessions": len(group),
            "states": sum(each["n_states"] for each in group),
            "cost_usd": sum(each["cost_usd"] for each in group),
        }
        for name, group in grouped(sessions, itemgetter("project")).items()
    ]
    return sorted(rows, key=lambda row: (-row["cost_usd"], row["name"]))


def _facts_of_session(session: Row, turns: Sequence[Row], states: Sequence[Row]) -> Facts:
    parents = (turn["parent_turn_idx"] for turn in turns)
    children = Counter(parent for parent in parents if parent is not None)
    first, last = session["first_timestamp"], session["last_timestamp"]
    n_interrupted = sum(state["outcome"] in INTERRUPTED for state in states)
    n_failed = sum(state["outcome"] not in FINE for state in states)
    own = paid(turns, states)
    usd, unknown = usd_of(own)
    return {
        "id": session["session_id"],
        "title": printable(session.get("title") or first_request(turns) or "(no request)"),
        "parent": session["parent_session_id"],
        "conversation": session["conversation"],
        "agent": session["agent"],
        "models": [printable(m) for m in session["models"] or () if not m.startswith("<")],
        "first": _instant(first),
        "last": _instant(last),
        "seconds": round((last - first).total_seconds()) if first and last else None,
        "n_states": len(states),
        "n_branches": sum(n - 1 for n in children.values()),
        "n_compactions": sum(turn["kind"] in ("summary", "microcompact") for turn in turns),
        "n_errors": n_failed - n_interrupted,
        "n_interrupted": n_interrupted,
        "tools": _tools(states),
        "outcomes": dict(Counter(state["outcome"] for state in states)),
        "tokens": tokens_of(own).total(),
        "cost_usd": usd,
        "spent": [],
        "is_priced": not unknown,
        "result": RESULTS.get(session["is_resolved"]),
    }


def first_request(turns: Iterable[Row]) -> str | None:
    """Return on one line what was asked for first: a command with its arguments, or a user's words."""
    spare = None
    for words in _requests(turns):
        if len(words) > _FEW_CHARS and not _HOUSEKEEPING.fullmatch(words):
            return f"{words[:_TITLE_CHARS]}…" if len(words) > _TITLE_CHARS else words
        spare = spare or words
    return spare


def _requests(turns: Iterable[Row]) -> Iterator[str]:
    for turn in turns:
        if turn["kind"] not in ("user", "command", "queued"):
            continue
        for message in msgspec.json.decode(turn["messages_json"]):
            text = message.get("content") if message.get("role") == "user" else None
            if not isinstance(text, str):
                continue
            called = _CALLED.search(text)
            asked = " ".join(called.groups("")) if called else _COMMAND.sub("", text)
            words = " ".join(asked.split())
            if words and not words.startswith(_SENTINELS):
                yield words


def _tools(states: Iterable[Row]) -> dict[str, list[int]]:
    """Count by tool the decisions that call it, and those of them that did not go well."""
    counts: dict[str, list[int]] = {}
    for state in states:
        failed = state["outcome"] not in FINE
        for name in set(tools_of(state)):
            each = counts.setdefault(printable(name), [0, 0])
            each[0] += 1
            each[1] += failed
    return counts


def tools_of(state: Row) -> list[str]:
    """Name the tools that a recorded action calls."""
    calls = msgspec.json.decode(state["action_tool_calls_json"] or "[]")
    names = [call.get("function", {}).get("name", "unnamed") for call in calls]
    return [name if _TOOL_NAME.fullmatch(name) else "(not a tool's name)" for name in names]


def _instant(value: Any) -> str | None:
    return value.isoformat(timespec="seconds") if value else None
