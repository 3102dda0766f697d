"""Launches that live through random schedules of what goes wrong, on the clouds' own protocols.

    python -m tests.trainer.diloco.cloud_schedules --count 500

Lists lag, jobs are not found or vanish, answers get lost, one to three replicas die at once, the
launcher is killed, and settings are misspelled. Then `stop` must leave nothing, and the bill that the
cloud itself keeps must stay below the ceiling.
"""

import argparse
import contextlib
import json
import random
import sqlite3
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import huggingface_hub.constants
import huggingface_hub.utils._http as hub_http

from tests.trainer.diloco.virtual_jobs import Clock, Killed, VirtualHub, virtual_cloud
from trainer.diloco import ReplicaHandle
from trainer.diloco.executors.ledger import JobLedger
from trainer.diloco.launch import Launch, Limits, launch
from trainer.errors import LeaseHeldError, ReplicaFailedError

PLATFORMS = ("hf_jobs", "modal")
WORK_S = 3000


class Rig:
    """What stays of a launch when its process is killed: a folder, a store and a cloud."""

    def __init__(self, hub, folder, *, n=4, lives=None, **limits):
        self.hub, self.folder, self.n = hub, folder, n
        self.env = {"LIVES": json.dumps(lives or {})}
        self.limits = Limits(**{"max_usd": 100.0, **limits})
        self.uri = f"file://{folder}/store"

    def executor(self):
        executor = self.hub.executor()
        executor.now, executor.sleep = self.hub.clock.now, self.hub.clock.sleep
        return executor

    def launch(self, executor=None, work_dir="outer", **options):
        return launch(
            ["--config", "run.yaml"], replicas=self.n, uri=self.uri, limits=self.limits,
            executor=executor or self.executor(), env=self.env, poll_s=120.0,
            work_dir=self.folder / work_dir, **options,
        )  # fmt: skip

    def rows(self, work_dir="outer"):
        return JobLedger(self.folder / work_dir / "ledger.sqlite").rows()

    def known(self, work_dir="outer"):
        path = self.folder / work_dir / "ledger.sqlite"
        with contextlib.closing(sqlite3.connect(path)) as ledger:
            strays = ledger.execute("select value from ledger where key like 'stray %'").fetchall()
        told = [row.handle for row in self.rows(work_dir)] + [value for (value,) in strays]
        return {ReplicaHandle.from_json(text).job_id for text in told} - {""}


@dataclass(frozen=True)
class Lived:
    """What became of one schedule."""

    seed: int
    is_payable: bool
    has_ended: bool
    n_jobs: int
    n_deaths: int
    violations: tuple[str, ...]


def run_schedule(seed, folder, platform):
    """Let a random launch live through its schedule, and stop what is left."""
    dice = random.Random(f"{platform} {seed}")
    n, is_typo = dice.randint(1, 4), dice.random() < 0.1
    n_dead = dice.randint(0, min(n, 3))
    at = dice.uniform(100, 2500)
    lives = {str(rank): [[at, 1], [WORK_S, 0]] for rank in dice.sample(range(n), n_dead)}
    if is_typo:
        lives = {str(rank): [[30, 2]] for rank in range(-1, n)}
    vanishes = [(dice.uniform(200, 2500), dice.randrange(n))] if dice.random() < 0.2 else []
    deaths = sorted(dice.uniform(0, 8000) for _ in range(dice.randint(0, 3)))
    hub = VirtualHub(Clock(deaths)) if platform == "hf_jobs" else virtual_cloud(Clock(deaths))
    hub.lag_s, hub.lost, hub.blind = (
        dice.choice([0, 3, 30, 120]),
        dice.randint(0, 2),
        dice.randint(0, 3),
    )
    hub.vanishes = [(hub.clock.time + when, rank) for when, rank in vanishes]
    hub.failing = ["lost"] * hub.lost
    if platform == "hf_jobs":
        hub.refusals = [dice.choice([0, 0, 0, 503]) for _ in range(6)]
        hub.gaps = [
            (begins, begins + dice.uniform(1, 300))
            for begins in (
                hub.clock.time + dice.uniform(0, 8000) for _ in range(dice.randint(0, 3))
            )
        ]
    share = dice.choice([0.4, 1.5])
    results, violations = [], []
    try:
        with offline_no_more():
            rig = Rig(hub, folder, n=n, lives=lives)
            prices = rig.executor()
            need = prices.bound_usd(WORK_S + 300) * (n + n_dead + len(vanishes))
            max_usd = round(share * (need + prices.bound_usd(1200)), 4)
            rig.limits = Limits(max_usd=max_usd)
            results = lived(rig, hub, dice)
            hub.clock.deaths = []
            left = Launch(folder / "outer", rig.uri, rig.executor(), rig.limits).stop()
            if left or hub.running:
                violations.append(f"{len(hub.running)} run after stop, {len(left)} are told")
            if hub.bill_usd > rig.limits.max_usd:
                violations.append(f"{hub.bill_usd} billed under {rig.limits.max_usd}")
            if rig.known() | hub.vanished != set(hub.jobs):
                violations.append(f"{len(hub.jobs)} jobs, known {len(rig.known())}")
            if is_typo and len(hub.jobs) > 1:
                violations.append(f"{len(hub.jobs)} starts of a misspelled setting")
    finally:
        if platform == "hf_jobs":
            hub.close()
    is_payable = share > 1 and not is_typo
    n_jobs = len(hub.jobs)
    return Lived(seed, is_payable, bool(results), n_jobs, len(deaths) + n_dead, tuple(violations))


def lived(rig, hub, dice):
    """Start the launch again whenever its process is killed; give its results, if it ends well."""
    for _ in range(12):
        executor = rig.executor()
        start = executor._start

        def started(*arguments, start=start):
            if dice.random() < 0.05:
                raise Killed
            job_id = start(*arguments)
            if dice.random() < 0.05:
                raise Killed
            return job_id

        executor._start = started
        try:
            return rig.launch(executor)
        except Killed:
            hub.clock.time += dice.choice([1, 60, 600])
        except (ReplicaFailedError, LeaseHeldError) as error:
            sys.stderr.write(f"{error}\n")
            return []
    return []


@contextlib.contextmanager
def offline_no_more():
    """Let the Hub's client speak to loopback, without its own short sleeps."""
    with (
        mock.patch.object(huggingface_hub.constants, "HF_HUB_OFFLINE", False),
        mock.patch.object(hub_http.time, "sleep"),
    ):
        yield


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="seed of the first")
    parser.add_argument("--platform", choices=PLATFORMS, nargs="*", default=PLATFORMS)
    options = parser.parse_args()
    is_broken = False
    for platform in options.platform:
        counts = Counter()
        for seed in range(options.first, options.first + options.count):
            with tempfile.TemporaryDirectory() as folder:
                one = run_schedule(seed, Path(folder), platform)
            counts += Counter(
                jobs=one.n_jobs, payable=one.is_payable, ended=one.is_payable and one.has_ended
            )
            if one.violations:
                is_broken = True
                sys.stdout.write(f"{platform} {seed}: {'; '.join(one.violations)}\n")
        sys.stdout.write(
            f"{platform}: {options.count} schedules, {counts['jobs']} jobs, {counts['ended']} of "
            f"{counts['payable']} payable runs ended with a model\n"
        )
        is_broken |= counts["ended"] < 0.95 * counts["payable"]
    return int(is_broken)


if __name__ == "__main__":
    sys.exit(main())
