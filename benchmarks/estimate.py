"""Hold what `estimate` says to the bills and pairs that come of it, in worlds that it doesn't know.

A server on loopback is the provider: it counts tokens in its own way, keeps prompts in a cache that
misses now and then, and adds up its own bill. Each world draws how often models agree (.3 to .7),
how often the cache hits (80 to 100 %, by model), tokens per byte, and the length of answers. The
estimate is asked before the first answer, and again after 200 answers. Then the rest is bought.

    python benchmarks/estimate.py --worlds 20
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from replay_pipeline.judge.extract import extract_pairs
from replay_pipeline.replay import Estimate, estimate, replay_states
from replay_pipeline.types import ReplayReport, TeacherSpec, TraceState
from tests.support.odd_server import OddServer

GATES = ("cheap_first:0.1",)
PRICES = {"qwen/a": 0.2e-6, "z-ai/b": 0.5e-6, "deepseek/c": 1.2e-6}
N_SESSIONS, N_STEPS = 40, 18
N_FIRST = 200
MARKS = {"inside": 0.9, "before": 3.0, "after": 1.5}


class World:
    """Who agrees with whom, and how a provider counts."""

    def __init__(self, seed: int) -> None:
        self.chance = chance = random.Random(seed)
        self.agreement = chance.uniform(0.3, 0.7)
        natural = self.agreement**0.5
        self.natural = {model: min(0.97, natural * chance.uniform(0.92, 1.08)) for model in PRICES}
        self.agent = min(0.97, natural * chance.uniform(0.9, 1.1))
        self.hits = {model: chance.uniform(0.8, 1.0) for model in PRICES}
        self.per_byte = {model: chance.uniform(0.23, 0.31) for model in PRICES}
        self.n_written = {model: chance.uniform(40, 120) for model in PRICES}
        self.states: list[TraceState] = []
        self.answers: dict[tuple[str, str], int] = {}
        self.bill_usd = 0.0
        self._seen: dict[tuple[str, str], set[tuple[int, ...]]] = {}
        self._lock = threading.Lock()
        for session in range(N_SESSIONS):
            self._session(session)

    def _session(self, session: int) -> None:
        chance, messages = self.chance, [{"role": "user", "content": "Fix it. " * 300}]
        easy = chance.uniform(-0.08, 0.08)  # sessions differ
        for step in range(N_STEPS):
            name = f"{session}-{step}"
            acts = {model: self._act(p + easy) for model, p in self.natural.items()}
            agent = self._act(self.agent + easy)
            self.answers |= {(name, model): act for model, act in acts.items()}
            asked = [*messages, {"role": "user", "content": f"step {name} of {session}"}]
            self.states.append(
                {
                    "state_id": name, "session_id": f"s{session}", "project": f"p{session % 4}",
                    "messages": asked, "student_action": action(name, agent),
                    "student_model": "claude-sonnet-4-5", "outcome": "ok",
                }
            )  # fmt: skip
            size = round(chance.expovariate(1 / 2_000)) + 200
            messages = [*asked, {"role": "assistant", "content": "It says: " + "x y " * size}]

    def _act(self, natural: float) -> int:
        """Draw an action: 0 is the natural one, 1 tempts everybody, others are one's own."""
        if self.chance.random() < natural:
            return 0
        return 1 if self.chance.random() < 0.2 else self.chance.randrange(2, 10**9)

    async def reply(self, _: int, body: bytes) -> tuple[int, dict[str, str], bytes]:
        """Answer as the provider, and write the bill."""
        asked = json.loads(body)
        model, messages = asked["model"], asked["messages"]
        name, session = messages[-1]["content"].split()[1::2]
        n_prompt = round(len(body) * self.per_byte[model])
        lengths = tuple(len(each["content"]) for each in messages)
        with self._lock:
            seen = self._seen.setdefault((model, session), set())
            known = max((sum(each) for each in seen if each == lengths[: len(each)]), default=0)
            is_hit = self.chance.random() < self.hits[model]
            n_cached = round(known * self.per_byte[model]) if is_hit else 0
            n_cached = min(n_cached, n_prompt) if n_cached >= 1024 else 0
            n_completion = max(10, round(self.chance.gauss(1, 0.3) * self.n_written[model]))
            seen.add(lengths)
            price = PRICES[model]
            fresh = n_prompt - n_cached
            self.bill_usd += fresh * price + n_cached * price / 10 + n_completion * price * 4
        message = action(name, self.answers[name, model])
        usage = {
            "prompt_tokens": n_prompt, "completion_tokens": n_completion,
            "total_tokens": n_prompt + n_completion,
            "prompt_tokens_details": {"cached_tokens": n_cached},
        }  # fmt: skip
        choice = {"index": 0, "finish_reason": "tool_calls", "message": message}
        return 200, {}, json.dumps({"model": model, "choices": [choice], "usage": usage}).encode()


def action(name: str, number: int) -> dict[str, Any]:
    arguments = json.dumps({"command": f"make step-{name} way-{number}"})
    call = {"id": "c", "type": "function", "function": {"name": "Bash", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def teachers(server: OddServer) -> list[TeacherSpec]:
    return [
        server.teacher(
            name=model.partition("/")[2],
            model=model,
            price={"prompt": usd, "completion": usd * 4, "input_cache_read": usd / 10},
        )
        for model, usd in PRICES.items()
    ]


def made(states: list[TraceState], report: ReplayReport) -> tuple[set[str], set[str]]:
    """Pairs, and states at which all who were asked took the agent's action."""
    found = extract_pairs(states, report.actions)
    return (
        {pair["state_id"] for pair in found.pairs},
        {row["state_id"] for row in found.positives},
    )


def play(seed: int, folder: Path) -> dict[str, dict[str, Any]]:
    """One world: what was said, and what came of it, before the first answer and after some."""
    world, ledger = World(seed), folder / f"{seed}.sqlite"
    with OddServer(world.reply) as server:
        asked = teachers(server)

        def say() -> Estimate:
            return estimate(world.states, asked, ledger=ledger, gates=GATES)

        def buy(usd: float) -> ReplayReport:
            return asyncio.run(
                replay_states(
                    world.states, asked, max_total_usd=usd, ledger=ledger, gates=GATES,
                    is_durable=False, max_concurrency=16,
                )
            )  # fmt: skip

        before = say()
        usd, part = 0.0, None
        while part is None or len(part.actions) < N_FIRST:
            usd += before.low_usd / 20
            part = buy(usd)
        first_usd, pairs, positives = world.bill_usd, *made(world.states, part)
        after = say()
        report = buy(1e3)
    all_pairs, all_positives = made(world.states, report)
    return {
        "before": held(before, world.bill_usd, len(all_pairs), len(all_positives)),
        "after": held(
            after,
            world.bill_usd - first_usd,
            len(all_pairs - pairs),
            len(all_positives - positives),
        ),
    } | {"world": {"agreement": world.agreement, "n_first": len(part.actions)}}


def held(said: Estimate, usd: float, n_pairs: int, n_positives: int) -> dict[str, Any]:
    ends = {
        "bill": (said.low_usd, said.high_usd, usd),
        "pairs": (*said.pairs, n_pairs),
        "positives": (*said.positives, n_positives),
    }
    return {
        name: {
            "low": low, "high": high, "found": found, "is_inside": low <= found <= high,
            "width": high / low if low else float("inf"),
        }
        for name, (low, high, found) in ends.items()
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--worlds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(arguments.seed, arguments.seed + arguments.worlds):
            found.append(play(seed, Path(folder)))
            print(json.dumps(found[-1]), file=sys.stderr)
    rows = []
    for when in ("before", "after"):
        for what in ("bill", "pairs", "positives"):
            each = [world[when][what] for world in found]
            widths = sorted(one["width"] for one in each)
            rows.append(
                {
                    "when": when, "what": what, "n": len(each),
                    "inside": sum(one["is_inside"] for one in each) / len(each),
                    "width": round(widths[len(widths) // 2], 3), "widest": round(widths[-1], 3),
                }
            )  # fmt: skip
            row = rows[-1]
            print(f"{when:7s} {what:10s} {row['inside']:4.0%} inside, high over low "
                  f"{row['width']:.2f} (median), {row['widest']:.2f} (most)")  # fmt: skip
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1), "utf-8")


if __name__ == "__main__":
    main()
