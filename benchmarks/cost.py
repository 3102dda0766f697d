"""What 50 steps of real sessions cost, by the order and the gates they are replayed with.

    python benchmarks/cost.py [SESSIONS] [--json FILE]

SESSIONS is a folder of Claude Code sessions; only the token counts that the provider recorded are
read from it. Without it, sessions of the same size are made up. Prices are those of the loopback
server's catalog.

The votes are simulated, and this is what is assumed of them: at each state a model takes the most
natural action with the probability P, and otherwise one of three others; teachers and student
choose independently. Two teachers then agree with the probability q printed in the table. The
gates are the real ones, run on these votes.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import msgspec

from replay_pipeline.replay import DEFAULT_GATES, measure_gates, parse_gates, replay_states
from replay_pipeline.replay.gates import ASK
from replay_pipeline.settings import DEFAULT_TEACHERS, FRONTIER_TEACHERS
from replay_pipeline.testing import TeacherServer
from replay_pipeline.testing.catalog import served
from replay_pipeline.types import TeacherAction, TeacherSpec, TraceState

Sessions = list[list[int]]
"""Prompt tokens of each step, by session."""

ANSWER_TOKENS = 600
SHARED_PREFIX_TOKENS = 15_000
"""What a step after a compaction still shares with the one before: system prompt and tools."""
MIN_STEPS = 20


class _Usage(msgspec.Struct):
    input_tokens: int = 0
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


class _Message(msgspec.Struct):
    id: str | None = None
    usage: _Usage | None = None


class _Row(msgspec.Struct):
    type: str | None = None
    message: Any = None


def read_sessions(folder: Path) -> Sessions:
    sessions = []
    for path in sorted(folder.rglob("*.jsonl")):
        steps: dict[str, int] = {}
        for line in path.read_bytes().splitlines():
            try:
                row = msgspec.json.decode(line, type=_Row)
                if row.type != "assistant":
                    continue
                message = msgspec.convert(row.message, _Message)
            except (msgspec.DecodeError, msgspec.ValidationError):
                continue
            usage = message.usage
            if usage and message.id:
                steps[message.id] = (
                    usage.input_tokens
                    + usage.cache_read_input_tokens
                    + usage.cache_creation_input_tokens
                )
        contexts = [tokens for tokens in steps.values() if tokens]
        if len(contexts) >= MIN_STEPS:
            sessions.append(contexts)
    return sessions


def made_up_sessions(n: int = 40, seed: int = 0) -> Sessions:
    """Sessions whose context grows by about 1,500 tokens a step and is compacted at 160,000."""
    chance = random.Random(seed)
    sessions = []
    for _ in range(n):
        tokens, steps = chance.randrange(18_000, 40_000), []
        for _ in range(chance.randrange(40, 160)):
            steps.append(tokens)
            tokens += round(chance.expovariate(1 / 1500)) + 100
            if tokens > 160_000:
                tokens = 30_000
        sessions.append(steps)
    return sessions


def call_usd(teacher: TeacherSpec, tokens: int, cached: int, *, marks_all: bool = False) -> float:
    model = served(teacher.model)
    writes = model.cache_write is not None and (cached or marks_all)
    written = tokens - cached if writes else 0
    return model.cost_nano(tokens, cached, written, ANSWER_TOKENS) / 1e9


def lane_usd(
    teacher: TeacherSpec, contexts: Sequence[int], asked: Iterable[int]
) -> tuple[float, int, int]:
    """Dollars, prompt tokens and cached tokens of asking one teacher at some steps, in order."""
    total, n_tokens, n_cached = 0.0, 0, 0
    last: int | None = None
    for step in asked:
        tokens, cached = contexts[step], 0
        if last is not None:
            grew = all(contexts[k + 1] >= contexts[k] for k in range(last, step))
            cached = contexts[last] if grew else min(SHARED_PREFIX_TOKENS, tokens)
        total += call_usd(teacher, tokens, cached, marks_all=True)
        n_tokens += tokens
        n_cached += cached
        last = step
    return total, n_tokens, n_cached


def make_votes(
    sessions: Sessions, teachers: Sequence[TeacherSpec], p: float, seed: int
) -> tuple[list[TraceState], dict[tuple[str, str], TeacherAction]]:
    chance = random.Random(seed)

    def act(state: str) -> dict[str, Any]:
        action = 0 if chance.random() < p else chance.randrange(1, 4)
        return {"role": "assistant", "content": f"action {action} at {state}"}

    states: list[TraceState] = []
    answers = {}
    for i, contexts in enumerate(sessions):
        for step in range(len(contexts)):
            state_id = f"{i}-{step}"
            student = act(state_id)
            states.append(
                {
                    "state_id": state_id,
                    "session_id": str(i),
                    "turn_idx": step,
                    "messages": [{"role": "user", "content": state_id}],
                    "student_action": student,
                }
            )
            for teacher in teachers:
                answers[state_id, teacher.name] = TeacherAction(
                    state_id=state_id, teacher=teacher.name, family=teacher.vendor,
                    action=act(state_id),
                )  # fmt: skip
    return states, answers


def asked_steps(
    states: Sequence[TraceState],
    teachers: Sequence[TeacherSpec],
    answers: dict[tuple[str, str], TeacherAction],
    gates: Sequence[str],
) -> dict[tuple[int, str], list[int]]:
    """Which steps of which session each teacher is asked at, when money is not short."""
    rules = parse_gates(gates)
    asked: dict[tuple[int, str], list[int]] = {}
    for state in states:
        poll = rules.poll(state)
        session = int(state.get("session_id", "0"))
        for place, teacher in enumerate(teachers):
            verdict = rules.judge(poll, teachers[place:], 0.0) if rules.is_sequential else ASK
            if verdict.reason:
                continue
            asked.setdefault((session, teacher.name), []).append(state.get("turn_idx", 0))
            poll.add(answers[state["state_id"], teacher.name])
    return asked


def gated_usd(
    sessions: Sessions,
    teachers: Sequence[TeacherSpec],
    asked: dict[tuple[int, str], list[int]],
) -> float:
    by_name = {teacher.name: teacher for teacher in teachers}
    return sum(
        lane_usd(by_name[name], sessions[session], steps)[0]
        for (session, name), steps in asked.items()
    )


def table(name: str, sessions: Sessions, teachers: Sequence[TeacherSpec]) -> list[dict[str, Any]]:
    n_steps = sum(map(len, sessions))
    teachers = sorted(teachers, key=lambda teacher: served(teacher.model).prompt)
    per_50 = 50 / n_steps
    rows: list[dict[str, Any]] = []

    def note(policy: str, usd: float, kept: float | None = None, mark: float | None = None) -> None:
        rows.append({"teachers": name, "policy": policy, "usd_per_50_steps": round(usd * per_50, 4),
                     "pairs_kept": kept, "mark_usd": mark})  # fmt: skip
        share = "" if kept is None else f"{kept:7.1%} of pairs"
        verdict = ""
        if mark is not None:
            is_met = usd * per_50 <= mark and (kept or 0) >= 0.9
            verdict = f"  mark ${mark:.2f} at 90 %: {'ok' if is_met else 'missed'}"
        print(f"  {policy:44s} ${usd * per_50:8.3f} {share}{verdict}")

    print(f"{name}: {', '.join(teacher.model for teacher in teachers)}")
    every = [(teacher, contexts) for teacher in teachers for contexts in sessions]
    note("naive: every teacher, no caching", sum(call_usd(t, x, 0) for t, c in every for x in c))
    note("cache marked, all at once: only writes",
         sum(call_usd(t, x, 0, marks_all=True) for t, c in every for x in c))  # fmt: skip
    note("batch API: half price, no order", sum(call_usd(t, x, 0) for t, c in every for x in c) / 2)
    note("lanes in order, cached prefixes", sum(lane_usd(t, c, range(len(c)))[0] for t, c in every))
    for p in (0.85, 0.75, 0.6):
        q = p**2 + (1 - p) ** 2 / 3
        states, answers = make_votes(sessions, teachers, p, seed=1)
        *_, together = measure_gates(states, teachers, answers.values(), DEFAULT_GATES)
        kept = 1 - (together.n_pairs_lost or 0) / max(1, together.n_pairs or 0)
        usd = gated_usd(sessions, teachers, asked_steps(states, teachers, answers, DEFAULT_GATES))
        mark = 2.5 if p == 0.75 else None
        note(f"lanes + default gates, q = {q:.2f}", usd, kept, mark)
    return rows


async def cached_share(contexts: Sequence[int]) -> float:
    """Share of prompt tokens read from the cache of the loopback server, in a real replay."""
    states: list[TraceState] = []
    messages: list[dict[str, Any]] = []
    size = 0
    for step, tokens in enumerate(contexts):
        if tokens < size:
            messages, size = [], 0
        text = f"{step} " + "word " * max(1, (tokens - size) * 4 // 5)
        messages = [*messages, {"role": "user" if step % 2 else "assistant", "content": text}]
        size = max(size, tokens)
        states.append(
            {
                "state_id": f"s{step}",
                "session_id": "session",
                "messages": messages,
                "student_action": {"role": "assistant", "content": "ls"},
            }
        )
    with (
        TeacherServer(script={"content": "yes"}) as server,
        tempfile.TemporaryDirectory() as folder,
    ):
        await replay_states(
            states, server.teachers(), max_total_usd=1000.0, ledger=Path(folder) / "l"
        )
        bill = server.bill()
    prompt = sum(model.n_prompt_tokens for model in bill.models.values())
    return sum(model.n_cached_tokens for model in bill.models.values()) / prompt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("sessions", type=Path, nargs="?", help="folder of Claude Code sessions")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    sessions = read_sessions(arguments.sessions) if arguments.sessions else made_up_sessions()
    if not sessions:
        sys.exit(f"{arguments.sessions}: no session with {MIN_STEPS} steps or more")
    n_steps = sum(map(len, sessions))
    mean = sum(map(sum, sessions)) / n_steps
    print(f"{len(sessions)} sessions, {n_steps} steps, mean context {mean:,.0f} tokens\n")
    rows = table("frontier teachers", sessions, FRONTIER_TEACHERS)
    rows += table("default teachers", sessions, DEFAULT_TEACHERS)
    middle = sorted(sessions, key=len)[len(sessions) // 2][:50]
    share = asyncio.run(cached_share(middle))
    verdict = "ok" if share >= 0.9 else "missed"
    print(
        f"\nprompt tokens from cache, {len(middle)} steps over HTTP: {share:.1%} (mark 90 %: {verdict})"
    )
    if arguments.json:
        figures = {"rows": rows, "cached_share": share}
        arguments.json.write_text(json.dumps(figures, indent=1), "utf-8")


if __name__ == "__main__":
    main()
