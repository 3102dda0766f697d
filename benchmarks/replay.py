"""How fast and how light the replay client is, against a loopback server in its own process.

    python benchmarks/replay.py [--quick] [--json FILE]

Prints a table of figures and marks: wall time over the ideal schedule of the very latencies that
the server drew, CPU time per call of 100 kB with the ledger over that of bare httpx without one (and
of other clients beside it), the share of a ceiling that is used while work remains, memory, and the time to
take over answers that are already paid. Milliseconds differ by machine, so marks are ratios.
"""

import argparse
import asyncio
import contextlib
import heapq
import importlib.util
import json
import random
import resource
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import httpx
import msgspec

from replay_pipeline.replay import replay_states
from replay_pipeline.replay.ask.asking import Asking
from replay_pipeline.replay.buy.lanes import lanes_of
from replay_pipeline.replay.dialects.client import transport
from replay_pipeline.replay.money.calls import encode_row
from replay_pipeline.replay.money.database import connect
from replay_pipeline.types import TeacherAction, TeacherSpec, TraceState
from tests.support.teachers import TeacherServer

MODEL = "deepseek/deepseek-v4-pro"
N_BYTES = 100_000
"""Of a prompt where CPU time is measured, as sessions have them."""
LATENCY_S = 0.2
"""Of a call there, so that as many are in flight as may be: that is what costs a pool its time."""
ANSWER = {"content": "I would read the failing test first. " * 40}


def make_states(n: int, *, n_bytes: int = 4000) -> list[TraceState]:
    filler = "x" * n_bytes
    return [
        {
            "state_id": f"s{i}",
            "session_id": f"session-{i}",
            "messages": [{"role": "user", "content": f"{i} {filler}"}],
            "student_action": {"role": "assistant", "content": "ls"},
        }
        for i in range(n)
    ]


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def ideal_s(latencies: list[float], concurrency: int) -> float:
    """Wall time of a perfect client: the next call starts the moment a slot is free."""
    slots = [0.0] * concurrency
    for latency in latencies:
        heapq.heappush(slots, heapq.heappop(slots) + latency)
    return max(slots)


def one_teacher(server: TeacherServer, concurrency: int) -> list[TeacherSpec]:
    [teacher] = server.teachers([MODEL])
    return [teacher.model_copy(update={"max_concurrency": concurrency})]


async def with_ledger(
    server: TeacherServer,
    states: list[TraceState],
    concurrency: int,
    ledger: Path | None = None,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        report = await replay_states(
            states,
            one_teacher(server, concurrency),
            max_total_usd=1000.0,
            ledger=ledger or Path(folder) / "ledger.sqlite",
            max_concurrency=concurrency,
        )
    assert report.n_sent == len(states), report.skipped
    assert all(action.error_code is None for action in report.actions)


def wall_over_ideal(
    client: "Client", concurrency: int, *, scale: float, rounds: int, n_before: int = 0
) -> float:
    """Wall time over that of a perfect client, by the latencies that the server drew.

    With `n_before` calls made on the same ledger earlier, the endpoint has introduced itself, as all but
    the first run finds it.
    """
    latency = {"median_s": 2.0 * scale, "p95_s": 5.0 * scale}
    with (
        TeacherServer(script=ANSWER, latency=latency, seed=concurrency) as server,
        tempfile.TemporaryDirectory() as folder,
    ):
        if n_before:
            client = partial(with_ledger, ledger=Path(folder) / "ledger.sqlite")
            asyncio.run(client(server, make_states(n_before, n_bytes=100), concurrency))
        states = make_states(rounds * concurrency)
        start = time.perf_counter()
        asyncio.run(client(server, states, concurrency))
        wall = time.perf_counter() - start
        return wall / ideal_s(server.latencies()[n_before:], concurrency)


Client = Callable[[TeacherServer, list[TraceState], int], Awaitable[None]]


async def in_parallel(
    states: list[TraceState], concurrency: int, ask: Callable[[TraceState], Awaitable[Any]]
) -> None:
    remaining = iter(states)

    async def work() -> None:
        for state in remaining:
            await ask(state)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(work())


def body_of(state: TraceState) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": state["messages"],
        "metadata": {"state_id": state["state_id"]},
    }


async def bare_httpx(server: TeacherServer, states: list[TraceState], concurrency: int) -> None:
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    async with httpx.AsyncClient(limits=limits, timeout=None, trust_env=False) as client:

        async def ask(state: TraceState) -> None:
            reply = await client.post(f"{server.base_url}/chat/completions", json=body_of(state))
            reply.raise_for_status().json()

        await in_parallel(states, concurrency, ask)


async def httpx_on_aiohttp(
    server: TeacherServer, states: list[TraceState], concurrency: int
) -> None:
    async with httpx.AsyncClient(transport=transport(concurrency, None), trust_env=False) as client:

        async def ask(state: TraceState) -> None:
            url = f"{server.base_url}/chat/completions"
            reply = await client.post(url, json=body_of(state), timeout=None)
            reply.raise_for_status().json()

        await in_parallel(states, concurrency, ask)


async def openai_sdk(server: TeacherServer, states: list[TraceState], concurrency: int) -> None:
    import openai

    client = openai.AsyncOpenAI(base_url=server.base_url, api_key="none", max_retries=0)
    async with client:

        async def ask(state: TraceState) -> None:
            await client.chat.completions.create(**body_of(state))

        await in_parallel(states, concurrency, ask)


async def litellm_sdk(server: TeacherServer, states: list[TraceState], concurrency: int) -> None:
    import litellm

    async def ask(state: TraceState) -> None:
        body = {**body_of(state), "model": f"openai/{MODEL}"}
        await litellm.acompletion(**body, api_base=server.base_url, api_key="none")

    await in_parallel(states, concurrency, ask)


def cpu_ms_per_call(client: Client, n: int, concurrency: int) -> float:
    best = float("inf")
    for _ in range(3):
        with TeacherServer(script=ANSWER, latency=LATENCY_S) as server:
            states = make_states(n, n_bytes=N_BYTES)
            start = cpu_s()
            asyncio.run(client(server, states, concurrency))
            best = min(best, (cpu_s() - start) / n * 1e3)
    return best


def utilisation(ceiling_usd: float) -> float:
    """Share of a ceiling that is spent on states as long as real ones, with more work than money.

    Sessions grow step by step to some 90,000 tokens a prompt, as recorded ones do.
    """
    chance = random.Random(0)
    states: list[TraceState] = []
    for session in range(60):
        history = [{"role": "user", "content": f"Task {session}. " + "some words " * 2000}]
        for step in range(20):
            states.append(
                {
                    "state_id": f"{session}-{step}",
                    "session_id": f"session-{session}",
                    "messages": list(history),
                    "student_action": {"role": "assistant", "content": "ls"},
                }
            )
            words = "a line of output\n" * chance.randrange(200, 2000)
            history.append({"role": "assistant", "content": f"step {step}"})
            history.append({"role": "user", "content": words})
    with TeacherServer(script=ANSWER) as server, tempfile.TemporaryDirectory() as folder:
        report = asyncio.run(
            replay_states(
                states, server.teachers(), max_total_usd=ceiling_usd,
                ledger=Path(folder) / "ledger.sqlite",
            )
        )  # fmt: skip
        spent_usd = server.bill().total_nano / 1e9
    assert report.stop_reason == "budget"
    assert spent_usd <= ceiling_usd
    return spent_usd / ceiling_usd


def resume_s(n: int) -> float:
    """Seconds to take over `n` answers from the ledger, hashing every request again."""
    states = make_states(n, n_bytes=1000)
    teacher = TeacherSpec(
        name="t", model=MODEL, api_key_env=None, price={"prompt": 0.0, "completion": 0.0}
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.sqlite"
        fill(path, states, teacher)
        start = time.perf_counter()
        report = asyncio.run(replay_states(states, [teacher], max_total_usd=1.0, ledger=path))
        seconds = time.perf_counter() - start
    assert report.n_cached == n
    return seconds


def fill(path: Path, states: list[TraceState], teacher: TeacherSpec) -> None:
    database = connect(path, is_durable=False)
    rows = []
    for place, (_, lane) in enumerate(lanes_of(states, [teacher], Asking().request_options())):
        for task in lane:
            row = TeacherAction(
                state_id=task.state["state_id"], teacher="t", action={"role": "assistant", **ANSWER},
                request_sha=task.question.sha, cost_usd=1e-6,
            )  # fmt: skip
            rows.append((place + 1, task.question.sha, row.state_id, encode_row(row)))
    with database.transaction():
        database.run_many(
            "insert into calls(id, request_sha, state_id, teacher, model, run_id, scopes, owner, "
            "state, reserved, cost, intent_at, row) values(?, ?, ?, 't', 'm', 'r', '', 1, "
            "'answered', 1000, 1000, '2026-01-01T00:00:00+00:00', ?)",
            rows,
        )
    database.close()


def measure(*, quick: bool) -> list[dict[str, Any]]:
    figures: list[dict[str, Any]] = []

    def note(name: str, value: float, mark: float | None = None) -> None:
        verdict = "" if mark is None else ("ok" if value <= mark else "above the mark")
        figures.append({"figure": name, "value": round(value, 4), "mark": mark})
        print(f"{name:58s} {value:9.3f}  {'' if mark is None else f'<= {mark:g}':8s} {verdict}")

    scale, rounds, n = (0.25, 4, 1000) if quick else (1.0, 12, 3000)
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for concurrency in (64, 256, 512):
        ratio = wall_over_ideal(with_ledger, concurrency, scale=scale, rounds=rounds, n_before=1)
        note(f"wall over ideal, p95 {5 * scale:g} s, concurrency {concurrency}", ratio, 1.02)
        ratio = wall_over_ideal(with_ledger, concurrency, scale=scale, rounds=rounds)
        note("  the same at an endpoint that has never answered", ratio)
    ratio = wall_over_ideal(httpx_on_aiohttp, 512, scale=scale, rounds=rounds)
    note("wall over ideal, httpx on aiohttp, no ledger, concurrency 512", ratio)
    for concurrency in (64, 256):
        httpx_ms = cpu_ms_per_call(bare_httpx, n, concurrency)
        note(f"CPU ms per call, bare httpx, no ledger, concurrency {concurrency}", httpx_ms)
        value = cpu_ms_per_call(with_ledger, n, concurrency)
        note(f"CPU ms per call with ledger, concurrency {concurrency}", value)
        note(f"of bare httpx, concurrency {concurrency}", value / httpx_ms, 0.35)
    note("resident memory after that, MiB", peak_now_mib())
    note("share of $5 left over while work remains", 1 - utilisation(5.0), 0.01)
    others: dict[str, Client] = {"httpx on aiohttp": httpx_on_aiohttp}
    for name, client in (("openai", openai_sdk), ("litellm", litellm_sdk)):
        if importlib.util.find_spec(name):
            others[f"{name} SDK"] = client
    for name, client in others.items():
        note(f"CPU ms per call, {name}, no ledger, concurrency 64", cpu_ms_per_call(client, n, 64))
    answers = 10_000 if quick else 100_000
    note(f"seconds to resume {answers:,} paid answers", resume_s(answers), 10.0)
    note("peak memory at start, MiB", peak_kib / 1024)
    return figures


def peak_now_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a quarter of the time")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    figures = measure(quick=arguments.quick)
    if arguments.json:
        arguments.json.write_bytes(msgspec.json.format(json.dumps(figures).encode()))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
