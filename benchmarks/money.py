"""Whether a ceiling holds and money is used, against a server with its own bill: random rounds.

    python benchmarks/money.py [--rounds 40] [--seed 1] [--json FILE]

Each round draws a ceiling (2 to 200 reservations), calls at once (1 to 64), an endpoint that keeps its
answers as OpenRouter does or one that does not, a mixture of faults, and kills with SIGKILL. A process
replays, is killed, and is started again until nothing more is sent. Then the server's bill is held
against the ledger: what was charged above the ceiling, what was charged and is nowhere in the ledger,
what was paid twice, and how much of what fitted was answered. A lost call fits nothing: an endpoint
without a cache can't say whether it charged it, so that its reservation has to be held.
"""

import argparse
import json
import random
import sqlite3
import sys
import tempfile
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from replay_pipeline.replay import estimate, ledger_status
from replay_pipeline.testing import Bill
from replay_pipeline.types import TeacherSpec
from tests.replay_pipeline.replay.conftest import make_states
from tests.support.nursery import Nursery, nursery, until
from tests.support.teachers import TeacherServer

MODEL = "deepseek/deepseek-v4-pro"
PRICE = {"prompt": 0.44e-6, "completion": 1.74e-6, "input_cache_read": 0.044e-6}
"""What the server charges for it, for an endpoint that has no price list."""
N_MOST_CALLS = 400
FREE = ("status", "error_200", "choice_error", "drop_before", "empty_choices")
PAID = ("length", "empty_paid", "hidden_cost", "no_usage", "drop_after", "truncate", "stall")
"""Faults of calls that are charged; of the last three no answer comes back."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """What was drawn, and what came of it."""

    seed: int
    endpoint: str
    n_reservations: int
    concurrency: int
    faults: tuple[str, ...]
    n_kills: int
    n_states: int
    n_sent: int
    n_answered: int
    n_fitting: int
    """Calls that the ceiling could pay for beside what lost calls hold or are booked at."""
    n_lost: int
    """Calls whose outcome was never known."""
    over_nano: int
    """Charged above the ceiling."""
    unbooked_nano: int
    """Charged, and neither spent nor held in the ledger."""
    n_paid_twice: int
    """Charged again although no earlier call for the question was lost."""
    held_usd: float
    held_until: str | None

    @property
    def share(self) -> float:
        """Share of what fitted that was answered."""
        return self.n_answered / max(1, self.n_fitting)


def play(seed: int, children: Nursery, folder: Path) -> Round:
    """Play one round: replay, kill, replay again until nothing is sent, and look at the bill."""
    chance = random.Random(seed)
    keeps = chance.random() < 0.5
    n_reservations = round(2 * 100 ** chance.random())
    concurrency = round(64 ** chance.random())
    faults = _faults(chance, keeps=keeps)
    ledger = folder / f"{seed}.sqlite"
    script, latency = {"content": "yes " * 500}, chance.choice([0.02, 0.1, 0.3])
    with TeacherServer(script=script, latency=latency, seed=seed) as server:
        teacher = _teacher(server, keeps=keeps)
        [state] = make_states(1)
        reserved_usd = estimate([state], [teacher]).bound_usd
        server.set_faults(faults)
        n_states = min(N_MOST_CALLS, 4 * n_reservations + 10)
        job: dict[str, Any] = {
            "how": "async", "n": n_states, "teacher": teacher.model_dump(), "ledger": str(ledger),
            "usd": n_reservations * reserved_usd, "concurrency": concurrency, "settle_s": 6.0,
        }  # fmt: skip
        n_kills = sum(
            _is_killed(server, children, job, chance) for _ in range(chance.randint(0, 3))
        )
        _run_out(server, children, job)
        bill = server.bill()
    return _judged(
        ledger, bill, ceiling_nano=int(job["usd"] * 1e9), reserved_nano=round(reserved_usd * 1e9),
        seed=seed, endpoint="keeps answers" if keeps else "keeps none",
        n_reservations=n_reservations, concurrency=concurrency,
        faults=tuple(fault["kind"] for fault in faults), n_kills=n_kills, n_states=n_states,
    )  # fmt: skip


def _teacher(server: TeacherServer, *, keeps: bool) -> TeacherSpec:
    [teacher] = server.teachers([MODEL])
    fields = {"timeout_s": 3.0, "max_concurrency": 64, "params": {"max_completion_tokens": 1500}}
    if not keeps:
        # The same server: it keeps no answer that it is not asked to keep.
        fields |= {"dialect": "vllm", "price": PRICE}
    return teacher.model_copy(update=fields)


def _faults(chance: random.Random, *, keeps: bool) -> list[dict[str, Any]]:
    kinds = chance.sample(FREE, 2) + chance.sample(PAID, 0 if keeps else 2)
    if keeps:
        # What is charged without an answer is no answer that a router could keep.
        kinds += chance.sample(("length", "empty_paid", "hidden_cost", "no_usage"), 2)
    return [
        {"kind": kind, "status": chance.choice([429, 502, 503]), "retry_after_s": 0.01,
         "probability": chance.choice([0.02, 0.08])}
        for kind in kinds
    ]  # fmt: skip


def _is_killed(
    server: TeacherServer, children: Nursery, job: dict[str, Any], chance: random.Random
) -> bool:
    """Start a process and kill it after some requests, if it has not ended before."""
    child = children.start(**job)
    target = server.bill().n_requests + chance.randint(1, 2 * job["concurrency"] + 3)
    until(lambda: server.bill().n_requests >= target or children.has_ended(child))
    return children.kill(child) == -9


def _run_out(server: TeacherServer, children: Nursery, job: dict[str, Any]) -> None:
    """Run again until a run sends nothing."""
    while True:
        before = server.bill().n_requests
        if children.run(**job) != 0:
            raise RuntimeError(f"a run failed: {job['ledger']}")
        if server.bill().n_requests == before:
            return


def _judged(
    ledger: Path, bill: Bill, *, ceiling_nano: int, reserved_nano: int, **drawn: Any
) -> Round:
    status = ledger_status(ledger)
    spent, unknown = round(status.spent_usd * 1e9), round(status.unknown_usd * 1e9)
    with closing(sqlite3.connect(ledger)) as database:
        [(n_sent, n_answered, n_lost, paid)] = database.execute(
            "select count(*), sum(state = 'answered'), sum(state in ('unknown', 'recovered') or "
            "state = 'failed' and cost > 0), sum(case when state = 'answered' then cost end) "
            "from calls"
        ).fetchall()
    n_answered, each = n_answered or 0, (paid or 0) / max(1, n_answered or 0)
    left = ceiling_nano - spent - unknown
    n_more = 0 if left < reserved_nano else int((left - reserved_nano) / max(1, each)) + 1
    return Round(
        n_sent=n_sent,
        n_answered=n_answered,
        n_fitting=min(drawn["n_states"], n_answered + n_more),
        n_lost=n_lost or 0,
        over_nano=max(0, bill.total_nano - ceiling_nano, spent + unknown - ceiling_nano),
        unbooked_nano=max(0, bill.total_nano - spent - unknown),
        n_paid_twice=bill.n_duplicates
        if drawn["endpoint"] == "keeps answers"
        else max(0, bill.n_duplicates - (n_lost or 0)),
        held_usd=status.unknown_usd,
        held_until=status.held_until,
        **drawn,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="also write the rounds here")
    arguments = parser.parse_args()
    rounds = []
    with nursery() as children, tempfile.TemporaryDirectory() as folder:
        for seed in range(arguments.seed, arguments.seed + arguments.rounds):
            one = play(seed, children, Path(folder))
            rounds.append(one)
            print(
                f"{seed:4d} {one.endpoint:13s} {one.n_reservations:4d} reservations, {one.concurrency:2d} "
                f"at once, {one.n_kills} kills, {one.n_sent:3d} sent, {one.n_lost:2d} lost, "
                f"{one.n_answered:3d} of {one.n_fitting:3d}; over {one.over_nano}, unbooked "
                f"{one.unbooked_nano}, twice {one.n_paid_twice}; {', '.join(one.faults)}",
                flush=True,
            )
    answered, fitting = sum(r.n_answered for r in rounds), sum(r.n_fitting for r in rounds)
    print(
        f"{len(rounds)} rounds, {sum(r.n_kills for r in rounds)} kills: over "
        f"{sum(r.over_nano > 0 for r in rounds)}, unbooked {sum(r.unbooked_nano > 0 for r in rounds)}, "
        f"paid twice {sum(r.n_paid_twice for r in rounds)}; answered {answered} of {fitting} that fit "
        f"({answered / fitting:.1%}), least {min(r.share for r in rounds):.1%}"
    )
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(one) for one in rounds], indent=1) + "\n")


if __name__ == "__main__":
    main()
