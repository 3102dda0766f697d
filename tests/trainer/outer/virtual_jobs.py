"""The Jobs part of the Hub on a clock that only the test moves, with a bill of its own.

What a job does is in its environment: `LIVES`, seconds and exit code by rank and attempt. The
network is away at the times of `gaps`; `lost` counts answers to POSTs that will not arrive, `blind`
questions for a job that are answered by 404. Jobs are listed `lag_s` after their start.
"""

import itertools
import json
import math
from dataclasses import dataclass

from tests.trainer.outer.cloud_servers import JobsHub

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
        self.vanished = set()
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

    def vanish(self, job):
        """End a job and forget it."""
        job.end("vanished")
        self.vanished.add(job.id)

    @property
    def running(self):
        return [job for job in self.jobs.values() if self.clock.time < job.ends]

    def serve(self, request, body):
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
        lives = json.loads(spec["environment"].get("LIVES", "{}"))
        told = lives.get(str(rank), [[30, 0] if rank < 0 else [3000, 0]])
        runs_s, exits = told[min(attempt, len(told) - 1)]
        return VirtualJob(
            self.clock, f"job{next(self.numbers):05d}", spec["labels"], spec["command"], runs_s,
            exits, spec["timeoutSeconds"],
        )  # fmt: skip
