"""The Jobs part of the Hub on a clock that only the test moves, with a bill of its own.

What a job does is in its environment: `LIVES`, seconds and exit code by rank and attempt. The
network is away at the times of `gaps`; `lost` counts answers to POSTs that will not arrive, `blind`
questions for a job that are answered by 404. Jobs are listed `lag_s` after their start.
"""

import functools
import itertools
import json
import math
import os
import re
from dataclasses import dataclass

from tests.trainer.diloco.cloud_servers import JobsHub, SandboxCloud
from trainer.diloco import HFJobsExecutor, ModalExecutor

MINUTE_S = 60
STARTS_S = 20
"""A job waits for its machine, which is not billed."""
USD_PER_MINUTE = 0.025


class Clock:
    """A time that moves when somebody sleeps; at `deaths` whoever sleeps is killed."""

    def __init__(self, deaths=()):
        self.time = 1_000_000.0
        self.deaths = sorted(self.time + death for death in deaths)

    def now(self):
        return self.time

    def sleep(self, seconds):
        self.time += seconds
        if self.deaths and self.time >= self.deaths[0]:
            self.deaths.pop(0)
            raise Killed


class Killed(BaseException):
    """The process is gone."""


def life_of(lives, rank, attempt):
    """Return how many seconds a start lives, and its exit code."""
    told = json.loads(lives).get(str(rank), [[30, 0] if rank < 0 else [3000, 0]])
    return told[min(attempt, len(told) - 1)]


@dataclass
class VirtualJob:
    clock: Clock
    id: str
    labels: dict
    argv: list
    runs_s: float
    exits: int
    timeout_s: float
    cancelled_at: float = math.inf

    def __post_init__(self):
        self.began = self.clock.time
        self.is_probe = self.labels["rank"] == "-1"

    @property
    def ends(self):
        by_itself = self.began + STARTS_S + min(self.runs_s, self.timeout_s)
        return min(by_itself, self.cancelled_at)

    def ran_s(self, now):
        return max(0.0, min(now, self.ends) - self.began - STARTS_S)

    def end(self, why):
        self.cancelled_at = min(self.cancelled_at, self.clock.time)

    @property
    def ended_by(self):
        """How it ended, as `SandboxCloud` asks."""
        if self.ends == self.cancelled_at:
            return "cancel"
        return "timeout" if self.runs_s > self.timeout_s else ""

    def code(self):
        """Return the exit code, or None while it runs."""
        return None if self.clock.time < self.ends else self.exits

    def log(self):
        return "No module named trainer" if self.is_probe and self.exits else "done"

    def told(self):
        now, ran = self.clock.time, int(self.ran_s(self.clock.time))
        durations = {
            "schedulingSecs": STARTS_S,
            "runningSecs": ran,
            "totalSecs": int(min(now, self.ends) - self.began),
        }
        if now < self.began + STARTS_S and now < self.ends:
            return "SCHEDULING", None, durations | {"runningSecs": None}
        if now < self.ends:
            return "RUNNING", None, durations
        if self.ends == self.cancelled_at:
            return "CANCELED", None, durations
        if self.runs_s > self.timeout_s:
            return "ERROR", "Job timeout", durations
        failed = f"Job failed with exit code: {self.exits}"
        return ("ERROR", failed, durations) if self.exits else ("COMPLETED", None, durations)


class VirtualHub(JobsHub):
    def __init__(self, clock, gaps=()):
        self.clock = clock
        self.gaps = [(clock.time + start, clock.time + start + length) for start, length in gaps]
        self.lost = 0
        self.lag_s = 0
        self.blind = 0
        self.vanished, self.vanishes = set(), []
        self.refusals = []
        self.numbers = itertools.count()
        super().__init__()

    @property
    def bill_usd(self):
        """What all jobs have cost: whole minutes, as the Hub's page on prices has it."""
        minutes = (math.ceil(job.ran_s(self.clock.time) / MINUTE_S) for job in self.jobs.values())
        return sum(minutes) * USD_PER_MINUTE

    def listed(self):
        """Jobs are in the list some time after their start."""
        old = [job for job in self.jobs.values() if self.clock.time >= job.began + self.lag_s]
        return [job for job in old if job.id not in self.vanished]

    def knows(self, name):
        """A job may be gone for good, or not be found for once."""
        self.blind -= (is_blind := self.blind > 0)
        return name in self.jobs and name not in self.vanished and not is_blind

    @property
    def running(self):
        return [job for job in self.jobs.values() if self.clock.time < job.ends]

    def executor(self):
        return HFJobsExecutor("a10g-large", image="me/image", endpoint=self.url, token="hf_x")

    def vanish_in_time(self):
        while self.vanishes and self.clock.time >= self.vanishes[0][0]:
            _, rank = self.vanishes.pop(0)
            for job in self.running:
                if job.labels["rank"] == str(rank):
                    job.end("vanished")
                    self.vanished.add(job.id)

    def serve(self, request, body):
        self.vanish_in_time()
        if any(start <= self.clock.time < end for start, end in self.gaps):
            self.lose(request)
        else:
            super().serve(request, body)

    def lose(self, request):
        request.close_connection = True
        request.wfile.flush()
        request.connection.close()

    def fault(self):
        if self.refusals and (status := self.refusals.pop(0)):
            return str(status)
        self.lost -= (is_lost := self.lost > 0)
        return "lost" if is_lost else ""

    def made(self, spec):
        rank, attempt = (int(spec["labels"][name]) for name in ("rank", "attempt"))
        runs_s, exits = life_of(spec["environment"].get("LIVES", "{}"), rank, attempt)
        return VirtualJob(
            self.clock, f"job{next(self.numbers):05d}", spec["labels"], spec["command"], runs_s,
            exits, spec["timeoutSeconds"],
        )  # fmt: skip


class VirtualCloud(SandboxCloud):
    """Modal's sandboxes on a clock that only the test moves, with a bill of its own."""

    def __init__(self):
        super().__init__(None)
        os.environ |= {
            "MODAL_SERVER_URL": self.url, "MODAL_TOKEN_ID": "ak-x", "MODAL_TOKEN_SECRET": "as-x",
        }  # fmt: skip

    def executor(self):
        return ModalExecutor("me/image", "T4")

    def is_there(self, name):
        return name in self.jobs and name not in self.vanished

    def knows(self, name):
        self.vanish_in_time()
        self.blind -= (is_blind := self.blind > 0)
        return self.is_there(name) and not is_blind

    def made(self, definition, env, name):
        """Return what a request starts."""
        found = re.fullmatch(r"outer-\w+-\d+-(-?\d+)-(\d+)", definition.name)
        rank, attempt = found.groups()
        labels = {"rank": rank, "attempt": attempt}
        runs_s, exits = life_of(env.get("LIVES", "{}"), int(rank), int(attempt))
        return VirtualJob(
            self.clock, name, labels, list(definition.entrypoint_args), runs_s, exits,
            definition.timeout_secs,
        )  # fmt: skip

    @property
    def bill_usd(self):
        seconds = sum(job.ran_s(self.clock.time) for job in self.jobs.values())
        return seconds * self.executor().usd_per_hour / 3600

    running = VirtualHub.running
    vanish_in_time = VirtualHub.vanish_in_time

    def forget(self, clock):
        """Begin anew, as another account would."""
        self.clock = clock
        self.lag_s = self.lost = self.blind = 0
        self.vanished, self.vanishes, self.failing = set(), [], []
        for kept in (self.jobs, self.named, self.tags, self.secrets):
            kept.clear()
        return self


@functools.cache
def _one_cloud():
    return VirtualCloud()


def virtual_cloud(clock):
    """Return an empty cloud; Modal's client stays with the first server that it has seen."""
    return _one_cloud().forget(clock)
