"""What 50 steps of real sessions cost, by the order and the gates they are replayed with.

    python benchmarks/cost.py SESSIONS --tokenizer FILE [--every 1] [--json FILE]

SESSIONS is a folder of Claude Code sessions. They are ingested and put into requests as a replay
does, and what is sent is counted by a real tokenizer, a `tokenizer.json`: no token that the recorded
session had and a teacher is not sent. Copies of a step in several files count once. Without SESSIONS,
made-up sessions show the table; their figures mean little. Prices are those of the loopback server's
catalog.

    python benchmarks/cost.py --copier    # what a second confirmation costs and brings where a teacher copies the agent

What is modelled: a prompt cache that forgets after five minutes; Anthropic's writes at 1.25 times the
price, and its looking back over twenty blocks from a mark; calls that take LATENCY_S each, so that
states between two asked ones let a cache go cold. What is assumed are the votes, by three models.
The gates are the real ones, run on these votes.

With `--harness ROOT`, a data root into which `replay-pipeline harness record` has recorded, it is shown what
the clients' own system prompts and tools add to the neutral prompt of the same states, with a prompt cache
and without. That takes a tokenizer: prose of clients has fewer tokens a byte than the work of sessions.
"""

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))

import pyarrow as pa
from tokenizers import Tokenizer

from replay_pipeline.ingesters import Traces, ingest
from replay_pipeline.ingesters.harness.harness import HarnessStore
from replay_pipeline.judge.extract import extract_pairs
from replay_pipeline.replay import parse_gates
from replay_pipeline.replay.buy import buying
from replay_pipeline.replay.dialects.base import Prompt, RequestOptions
from replay_pipeline.replay.dialects.requests import Prefix, RequestBuilder
from replay_pipeline.replay.dialects.sizes import Learned, Size
from replay_pipeline.settings import DEFAULT_TEACHERS, FRONTIER_TEACHERS, ReplaySettings
from replay_pipeline.testing.catalog import served
from replay_pipeline.types import Message, TeacherAction, TeacherSpec, TraceState
from tests.support.gates import bought, measured, numbered
from tests.support.worlds import KindOfState, World, simulate

ANSWER_TOKENS = 300
LATENCY_S = 10.0
"""Of one call, from the request to the whole answer."""
CACHE_TTL_S = 300.0
LOOK_BACK_BLOCKS = 20
MIN_CACHED_TOKENS = 1024
SHIPPED = ReplaySettings().gates
WINDOWS = ("clear_tool_results:5", "clear_tool_results:10", "token_budget:32000")
MARK_USD = 1.50
MARK_PAIRS = 0.9
MARK_FORECAST = 0.25
MARK_BOUND = 1.5
MARK_HARNESS = 0.35

Count = Callable[[str], int]


@dataclass(slots=True)
class Step:
    """One state of a session as it is sent."""

    state_id: str
    n_tokens: int
    n_blocks: int
    goes_on: bool
    """Its prompt begins with the whole of the one before."""
    size: Size


Sessions = list[list[Step]]


def counter(path: Path | None) -> Count:
    """Count the tokens of a text, each text once."""
    known: dict[str, int] = {}
    tokenizer = Tokenizer.from_file(str(path)) if path else None

    def count(text: str) -> int:
        if text not in known:
            known[text] = (
                len(tokenizer.encode(text, add_special_tokens=False).ids)
                if tokenizer
                else round(len(text.encode()) * 0.27)
            )
        return known[text]

    return count


def n_tokens(message: Message, count: Count) -> int:
    """Tokens of a message, with some for its role and its marks."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return (
        4
        + count(message.get("content") or "")
        + sum(8 + count(call["name"]) + count(call["arguments"]) for call in calls)
    )


def read_sessions(traces: Traces, count: Count, every: int, window: str = "full") -> Sessions:
    """Sessions as they would be sent; every so many of them is taken."""
    by_session: dict[str, list[str]] = {}
    sessions: Sessions = []
    builder = RequestBuilder(RequestOptions())
    seen: set[Prefix] = set()
    for session, state in traces.states.select("session_id", "state_id").iter_rows():
        by_session.setdefault(session, []).append(state)
    for number, ids in enumerate(by_session.values()):
        if number % every or len(ids) < 5:
            continue
        steps: list[Step] = []
        before: Prefix | None = None
        sizes: list[int] = []
        for state in traces.materialize(ids, window=window):
            goes_on, before = builder.begins_with(state, before)
            if before in seen:
                continue
            seen.add(before)
            prompt: Prompt = builder.prompt(state)
            # Only what was added is new to the tokenizer.
            kept = sizes if goes_on else []
            sizes = kept + [n_tokens(message, count) for message in prompt.messages[len(kept) :]]
            n_blocks = sum(
                bool(m.get("content")) + len(m.get("tool_calls") or ()) for m in prompt.messages
            )
            total = sum(sizes) + count(prompt.tools_json.decode())
            n_tools = len(prompt.tools_json)
            size = Size(
                len(prompt.messages_json) + n_tools, n_blocks, n_tools, prompt.n_system_bytes
            )
            step = Step(state["state_id"], total, n_blocks, goes_on, size)
            steps.append(step)
        sessions.append(steps)
    return sessions


def made_up_sessions(n: int = 40, seed: int = 0) -> Sessions:
    """Sessions whose context grows by about 700 tokens a step and is compacted at 120,000."""
    chance = random.Random(seed)
    sessions = []
    for session in range(n):
        tokens, blocks, steps = chance.randrange(8_000, 15_000), 3, []
        for step in range(chance.randrange(40, 160)):
            is_compacted = tokens > 120_000
            if is_compacted:
                tokens, blocks = 12_000, 3
            goes_on = step > 0 and not is_compacted
            size = Size(tokens * 4, blocks)
            steps.append(Step(f"{session}-{step}", tokens, blocks, goes_on, size))
            tokens += round(chance.expovariate(1 / 700)) + 100
            blocks += 2 + 2 * (chance.random() < 0.2)
        sessions.append(steps)
    return sessions


def call_usd(teacher: TeacherSpec, tokens: int, cached: int, *, is_marked: bool) -> float:
    """Dollars of one call; where the prompt is marked, what is not read is written."""
    model = served(teacher.model)
    written = tokens - cached if is_marked and model.cache_write is not None else 0
    return model.cost_nano(tokens, cached, written, ANSWER_TOKENS) / 1e9


def lane_usd(
    teacher: TeacherSpec,
    steps: Sequence[Step],
    asked: Sequence[tuple[int, float]],
    *,
    marks_last_asked: bool = True,
) -> float:
    """Dollars of asking one teacher at some steps of a session, at the seconds that are given."""
    model = served(teacher.model)
    total = 0.0
    last: tuple[int, float] | None = None
    for place, second in asked:
        cached = 0
        if last is not None and model.cache_read is not None:
            is_prefix = all(steps[k].goes_on for k in range(last[0] + 1, place + 1))
            n_between = steps[place].n_blocks - steps[last[0]].n_blocks
            is_found = (
                model.cache_write is None or marks_last_asked or n_between <= LOOK_BACK_BLOCKS
            )
            if is_prefix and is_found and second - last[1] <= CACHE_TTL_S:
                cached = steps[last[0]].n_tokens
        cached = cached if cached >= MIN_CACHED_TOKENS else 0
        total += call_usd(teacher, steps[place].n_tokens, cached, is_marked=True)
        last = place, second
    return total


# --- votes

Model = Callable[[random.Random], tuple[float, float]]
"""Draws for a state how likely a teacher and the student are to take its most natural action."""

VOTES: dict[str, Model] = {
    "alike: .75 everywhere": lambda _: (0.75, 0.75),
    "easy and hard: .95 or .5": lambda chance: (p := 0.95 if chance.random() < 0.6 else 0.5, p),
    "weaker student: .8, .55": lambda _: (0.8, 0.55),
}


def make_votes(
    sessions: Sessions, teachers: Sequence[TeacherSpec], model: Model, seed: int
) -> tuple[list[TraceState], dict[tuple[str, str], TeacherAction]]:
    """States and answers: the natural action with the model's probability, or one of three others."""
    chance = random.Random(seed)

    def act(state: str, p: float) -> dict[str, Any]:
        action = 0 if chance.random() < p else chance.randrange(1, 4)
        return {"role": "assistant", "content": f"action {action} at {state}"}

    states: list[TraceState] = []
    answers = {}
    for number, steps in enumerate(sessions):
        for place, step in enumerate(steps):
            of_teacher, of_student = model(chance)
            states.append(
                {
                    "state_id": step.state_id,
                    "session_id": str(number),
                    "turn_idx": place,
                    "messages": [{"role": "user", "content": step.state_id}],
                    "student_action": act(step.state_id, of_student),
                    "outcome": "ok",
                }
            )
            for teacher in teachers:
                answers[step.state_id, teacher.name] = TeacherAction(
                    state_id=step.state_id, teacher=teacher.name, family=teacher.vendor,
                    action=act(step.state_id, of_teacher),
                )  # fmt: skip
    return states, answers


def asked_steps(
    states: Sequence[TraceState],
    teachers: Sequence[TeacherSpec],
    answers: dict[tuple[str, str], TeacherAction],
    gates: Sequence[str],
) -> dict[tuple[int, str], list[tuple[int, float]]]:
    """Which steps of which session each teacher is asked at, and when, if money is not short.

    The teachers have a round each, and go through a session in order in it.
    """
    chosen = bought(
        states, teachers, numbered(states, teachers, answers.values()), parse_gates(gates)
    )
    asked: dict[tuple[int, str], list[tuple[int, float]]] = {}
    for state, teacher in sorted(chosen):
        session = int(states[state].get("session_id", "0"))
        lane = asked.setdefault((session, teachers[teacher].name), [])
        lane.append((states[state].get("turn_idx", 0), len(lane) * LATENCY_S))
    return asked


def asked_usd(
    sessions: Sessions,
    teachers: Iterable[TeacherSpec],
    asked: dict[tuple[int, str], list[tuple[int, float]]],
    **how: bool,
) -> float:
    by_name = {teacher.name: teacher for teacher in teachers}
    return sum(
        lane_usd(by_name[name], sessions[session], steps, **how)
        for (session, name), steps in asked.items()
    )


def table(
    name: str, sessions: Sessions, teachers: Sequence[TeacherSpec]
) -> Iterator[dict[str, Any]]:
    """Print the table of these teachers, cheapest first, and give its rows."""
    teachers = sorted(teachers, key=lambda teacher: served(teacher.model).prompt)
    per_50 = 50 / sum(map(len, sessions))
    every = [(teacher, step) for teacher in teachers for steps in sessions for step in steps]

    def row(
        policy: str, usd: float, kept: float = 1.0, mark: float | None = None
    ) -> dict[str, Any]:
        is_met = None if mark is None else usd * per_50 <= mark and kept >= MARK_PAIRS
        verdict = "" if is_met is None else f"  mark ${mark:.2f}: {'ok' if is_met else 'missed'}"
        print(f"  {policy:52s} ${usd * per_50:7.3f}  {kept:6.1%} of pairs{verdict}")
        return {"teachers": name, "policy": policy, "usd_per_50_steps": round(usd * per_50, 4),
                "pairs_kept": round(kept, 4), "is_met": is_met}  # fmt: skip

    print(f"{name}: {', '.join(teacher.model for teacher in teachers)}")
    naive = sum(call_usd(t, step.n_tokens, 0, is_marked=False) for t, step in every)
    yield row("every state, no cache", naive)
    written = sum(call_usd(t, step.n_tokens, 0, is_marked=True) for t, step in every)
    yield row("cache marked, all at once (writes only)", written)
    for heading, model in VOTES.items():
        states, answers = make_votes(sessions, teachers, model, seed=1)
        if heading == next(iter(VOTES)):
            in_order = asked_steps(states, teachers, answers, ())
            yield row("lanes in order", asked_usd(sessions, teachers, in_order))
        for label, gates in (("as shipped", SHIPPED), ("cheap_first", ("cheap_first",))):
            alone = asked_steps(states, teachers, answers, gates)
            exact = measured(states, teachers, answers.values(), gates)
            is_marked = label == "as shipped" and teachers[-1].vendor == "anthropic"
            yield row(
                f"lanes, {label} ({heading})",
                asked_usd(sessions, teachers, alone),
                1 - exact.n_pairs_lost / max(1, exact.n_pairs),
                MARK_USD if is_marked else None,
            )


def in_lanes_usd(
    lanes: Iterable[tuple[int, Sequence[int]]], sessions: Sessions, teachers: Sequence[TeacherSpec]
) -> Iterator[float]:
    """Dollars of each lane: these steps of a session, one after the other, put to all teachers."""
    for session, places in lanes:
        asked = [(place, number * LATENCY_S) for number, place in enumerate(places)]
        yield sum(lane_usd(teacher, sessions[session], asked) for teacher in teachers)


def in_order_usd(sessions: Sessions, teachers: Sequence[TeacherSpec]) -> float:
    """Dollars of every step of every session, put to all teachers in order."""
    lanes = [(number, range(len(steps))) for number, steps in enumerate(sessions)]
    return sum(in_lanes_usd(lanes, sessions, teachers))


def size_error(sessions: Sessions) -> tuple[float, float]:
    """What the forecast makes of the prompts, over what they are: at first, and once learned."""
    steps = [step for each in sessions for step in each]
    learned = Learned()
    total = first = later = 0
    for step in steps:
        first += Learned().expected_tokens(step.size)
        later += learned.expected_tokens(step.size)
        total += step.n_tokens
        learned = learned.with_answer(step.size, step.n_tokens, ANSWER_TOKENS)
    return first / total, later / total


def lane_bound(sessions: Sessions) -> float:
    """Tokens that money is reserved for, over those that are sent, in lanes."""
    bound = total = 0
    for steps in sessions:
        before: Step | None = None
        for step in steps:
            most = step.size.bound_tokens
            if before is not None and step.goes_on:
                most = min(most, before.n_tokens + step.size.added_bound_tokens(before.size))
            bound, total, before = bound + most, total + step.n_tokens, step
    return bound / total


def forecast_of(sessions: Sessions) -> Sessions:
    """Sessions with the tokens that a forecast expects before a teacher has answered."""
    expected = Learned().expected_tokens
    return [[replace(step, n_tokens=expected(step.size)) for step in each] for each in sessions]


def harness_table(
    read: Any, store: HarnessStore, count: Count, every: int
) -> Iterator[dict[str, Any]]:
    """Print what harnesses add to the cost of the states that get one, and give the rows."""
    tables = {name: getattr(read, name) for name in ("sessions", "turns", "states", "tools")}
    shown = Traces(**tables, harnesses=store)
    having = {state["session_id"] for state in shown.materialize() if "harness" in state}
    kept = [session in having for session in read.states["session_id"].to_pylist()]
    tables["states"] = read.states.filter(pa.array(kept, pa.bool_()))
    both = {
        name: read_sessions(Traces(**tables, harnesses=each), count, every)
        for name, each in (("neutral prompt", None), ("harness", store))
    }
    for teachers, of in ((DEFAULT_TEACHERS, "default"), (FRONTIER_TEACHERS, "frontier")):
        cost: dict[str, dict[str, float]] = {}
        for name, sessions in both.items():
            steps = [step for each in sessions for step in each]
            alone = (call_usd(t, s.n_tokens, 0, is_marked=False) for t in teachers for s in steps)
            cost[name] = {
                "tokens": sum(step.n_tokens for step in steps) / len(steps),
                "cached": in_order_usd(sessions, teachers) * 50 / len(steps),
                "uncached": sum(alone) * 50 / len(steps),
            }
            figures = cost[name]
            print(f"  {of} teachers, {name:16s} {len(steps):,} states of {figures['tokens']:,.0f} tokens: "
                  f"${figures['cached']:.3f} per 50 in lanes, ${figures['uncached']:.3f} without a cache")  # fmt: skip
        for teacher in teachers:
            neutral_usd, harness_usd = (
                in_order_usd(sessions, [teacher]) for sessions in both.values()
            )
            has_cache = served(teacher.model).cache_read is not None
            print(f"    {teacher.model:28s} {harness_usd / neutral_usd - 1:+.1%}"
                  f"{'' if has_cache else '  (its price list has no cache)'}")  # fmt: skip
        neutral, harness = cost["neutral prompt"], cost["harness"]
        added = {how: harness[how] / neutral[how] - 1 for how in ("cached", "uncached")}
        neutral_usd, harness_usd = (
            in_order_usd(forecast_of(sessions), teachers) for sessions in both.values()
        )
        added["forecast"] = harness_usd / neutral_usd - 1
        is_met = added["cached"] <= MARK_HARNESS
        print(f"  {of} teachers: a harness adds {added['cached']:.1%} in lanes, {added['uncached']:.1%} "
              f"without a cache  mark {MARK_HARNESS:.0%}: {'ok' if is_met else 'missed'}")  # fmt: skip
        print(f"    forecast before an answer: {added['forecast']:+.1%}")
        yield {"teachers": of, "usd_per_50_steps": cost, "added": added, "is_met": is_met}


def confirmed(agent: float, copier: int | None, seed: int) -> dict[str, float]:
    """Right positives and dollars of 1,000 made-up states, by three ways of buying.

    The agent is right in a share `agent`, three teachers in .85, .8, and .8; the cheapest may take the
    agent's action at six states in ten, right or wrong.
    """
    kinds = (KindOfState(tool="Bash", agent=agent, teachers=(0.85, 0.8, 0.8)),)
    made = simulate(World(kinds=kinds, shared=0.5, copier=copier), 1_000, seed=seed)
    answers = numbered(made.states, made.teachers, made.rows())
    offer = made.states, made.teachers, answers, parse_gates(SHIPPED)
    ways = {"everybody": dict.fromkeys(answers, 1.0), "as shipped": bought(*offer)}
    with mock.patch.object(buying, "copies_agent", return_value=False):
        ways["one confirms"] = bought(*offer)
    row: dict[str, float] = {}
    for way, chosen in ways.items():
        rows = [replace(answers[key], propensity=share) for key, share in chosen.items()]
        found = extract_pairs(made.states, rows).positives
        n_right = sum(made.is_right(each["state_id"], each["action_message"]) for each in found)
        row |= {f"{way}: positives": len(found), f"{way}: right": n_right / len(found)}
        row[f"{way}: usd"] = sum(each.cost_usd for each in rows)
    return row


def show_copier(n_draws: int = 3) -> None:
    """Print the mean of some draws, by how often the agent is right."""
    for agent in (0.45, 0.6, 0.75, 0.9):
        for copier in (2, None):
            rows = [confirmed(agent, copier, seed) for seed in range(n_draws)]
            means = {name: sum(row[name] for row in rows) / n_draws for name in rows[0]}
            told = ", ".join(f"{name} {value:.3f}" for name, value in means.items())
            print(f"agent {agent}, {'a copier' if copier else 'all think'}: {told}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("sessions", type=Path, nargs="?", help="folder of Claude Code sessions")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json; bytes are used without")
    parser.add_argument("--every", type=int, default=1, help="take every so many sessions")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--harness", type=Path, help="a data root with recorded harnesses")
    parser.add_argument("--copier", action="store_true", help="see above; three minutes")
    arguments = parser.parse_args()
    if arguments.copier:
        show_copier()
        return
    if arguments.harness and not arguments.tokenizer:
        parser.error(
            "--harness needs --tokenizer: prompts of clients and messages differ in tokens a byte"
        )
    sessions, shortened = made_up_sessions(), {}
    if arguments.sessions:
        count, read = counter(arguments.tokenizer), ingest(arguments.sessions)
        if arguments.harness:
            store = HarnessStore(arguments.harness)
            rows = list(harness_table(read, store, count, arguments.every))
            if arguments.json:
                arguments.json.write_text(json.dumps(rows, indent=1), "utf-8")
            return
        traces = Traces(
            sessions=read.sessions, turns=read.turns, states=read.states, tools=read.tools
        )
        sessions, *others = (
            read_sessions(traces, count, arguments.every, window) for window in ("full", *WINDOWS)
        )
        shortened = dict(zip(WINDOWS, others, strict=True))
    if not sessions:
        sys.exit(f"{arguments.sessions}: no session with 5 steps or more")
    n_steps = sum(map(len, sessions))
    mean = sum(step.n_tokens for steps in sessions for step in steps) / n_steps
    print(f"{len(sessions)} sessions, {n_steps:,} distinct steps, {mean:,.0f} tokens sent a step\n")
    rows = list(table("frontier teachers", sessions, FRONTIER_TEACHERS))
    for window, short in shortened.items():
        usd = in_order_usd(short, FRONTIER_TEACHERS) * 50 / n_steps
        print(f"  {f'lanes, window {window}':52s} ${usd:7.3f}")
        rows.append({"policy": window, "usd_per_50_steps": round(usd, 4)})
    rows += table("default teachers", sessions, DEFAULT_TEACHERS)
    first, later = size_error(sessions)
    bound = lane_bound(sessions)
    is_close = abs(first - 1) <= MARK_FORECAST and abs(later - 1) <= MARK_FORECAST
    print(f"\nprompt tokens forecast over sent: {first:.2f} at first, {later:.2f} once learned  "
          f"mark ±{MARK_FORECAST:.0%}: {'ok' if is_close else 'missed'}")  # fmt: skip
    print(f"prompt tokens reserved over sent, in lanes: {bound:.2f}  "
          f"mark {MARK_BOUND:.2f}: {'ok' if bound <= MARK_BOUND else 'missed'}")  # fmt: skip
    if arguments.json:
        figures = {"rows": rows, "forecast": [first, later], "bound": bound}
        arguments.json.write_text(json.dumps(figures, indent=1), "utf-8")


if __name__ == "__main__":
    main()
