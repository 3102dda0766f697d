"""The Jobs part of the Hub on a clock that only the test moves, with a bill of its own.

What a job does is in its environment: `RUNS_S` and `EXITS`, one value an attempt, by commas. The
network is away at the times of `gaps`; `lost` counts answers to POSTs that will not arrive.
"""

import itertools
import json
import math
import re
from dataclasses import dataclass, field

from tests.trainer.outer.cloud_servers import HARDWARE
from tests.trainer.outer.loopback import LoopbackServer

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
    id: str
    labels: dict
    command: list
    began: float
    runs_s: float
    exits: int
    timeout_s: float
    cancelled_at: float = math.inf
    is_probe: bool = field(init=False)

    def __post_init__(self):
        self.is_probe = self.labels["rank"] == "-1"

    @property
    def ends(self):
        by_itself = self.began + STARTS_S + min(self.runs_s, self.timeout_s)
        return min(by_itself, self.cancelled_at)

    def ran_s(self, now):
        return max(0.0, min(now, self.ends) - self.began - STARTS_S)

    def stage(self, now):
        if now < self.ends:
            return ("SCHEDULING" if now < self.began + STARTS_S else "RUNNING"), None
        if self.ends == self.cancelled_at:
            return "CANCELED", None
        if self.runs_s > self.timeout_s:
            return "ERROR", "Job timeout"
        if self.exits:
            return "ERROR", f"Job failed with exit code: {self.exits}"
        return "COMPLETED", None


class VirtualHub(LoopbackServer):
    def __init__(self, clock, gaps=()):
        self.clock = clock
        self.gaps = [(clock.time + start, clock.time + start + length) for start, length in gaps]
        self.jobs = {}
        self.lost = 0
        self.refusals = []
        self.numbers = itertools.count()
        self.n_requests = 0
        super().__init__()

    @property
    def bill_usd(self):
        """What all jobs have cost: whole minutes, as the Hub's page on prices has it."""
        minutes = (math.ceil(job.ran_s(self.clock.time) / MINUTE_S) for job in self.jobs.values())
        return sum(minutes) * USD_PER_MINUTE

    @property
    def running(self):
        return [job for job in self.jobs.values() if self.clock.time < job.ends]

    def hang_up(self, request):
        request.close_connection = True
        request.wfile.flush()
        request.connection.close()

    def serve(self, request, body):
        self.n_requests += 1
        if any(start <= self.clock.time < end for start, end in self.gaps):
            return self.hang_up(request)
        path = request.path.partition("?")[0]
        if request.command == "POST":
            return self.post(request, path, body)
        if path == "/api/whoami-v2":
            return self.answer_json(request, {"name": "me", "type": "user", "id": "u", "orgs": []})
        if path == "/api/jobs/hardware":
            a10g = {**HARDWARE, "name": "a10g-large", "unitCostUSD": USD_PER_MINUTE}
            return self.answer_json(request, [HARDWARE, a10g])
        if path == "/api/jobs/me":
            return self.answer_json(request, [self.info(job) for job in self.jobs.values()])
        match = re.fullmatch(r"/api/jobs/me/(\w+)(/logs)?", path)
        if match is None or match[1] not in self.jobs:
            return self.answer_json(request, {"error": "not found"}, 404)
        job = self.jobs[match[1]]
        if match[2]:
            says = "No module named trainer" if job.is_probe and job.exits else "done"
            event = json.dumps({"data": says, "timestamp": "2026-01-01T00:00:00.000Z"})
            kind = [("Content-Type", "text/event-stream")]
            return self.answer(request, 200, f"data: {event}\n\n".encode(), kind)
        return self.answer_json(request, self.info(job))

    def post(self, request, path, body):
        if match := re.fullmatch(r"/api/jobs/me/(\w+)/cancel", path):
            job = self.jobs[match[1]]
            job.cancelled_at = min(job.cancelled_at, self.clock.time)
            return self.answer_json(request, {})
        if self.refusals and (status := self.refusals.pop(0)):
            return self.answer_json(request, {"error": "refused"}, status)
        spec = json.loads(body)
        env, attempt = spec["environment"], int(spec["labels"]["attempt"])
        rank = int(spec["labels"]["rank"])
        lives = json.loads(env["LIVES"]) if "LIVES" in env else {}
        told = lives.get(str(rank), [[30, 0] if rank < 0 else [3000, 0]])
        runs_s, exits = told[min(attempt, len(told) - 1)]
        job = VirtualJob(
            f"job{next(self.numbers):05d}", spec["labels"], spec["command"], self.clock.time,
            runs_s, exits, spec["timeoutSeconds"],
        )  # fmt: skip
        self.jobs[job.id] = job
        if self.lost:
            self.lost -= 1
            return self.hang_up(request)
        return self.answer_json(request, self.info(job))

    def info(self, job):
        now = self.clock.time
        stage, message = job.stage(now)
        return {
            "id": job.id,
            "createdAt": "2026-01-01T00:00:00.000Z",
            "owner": {"id": "u", "name": "me", "type": "user"},
            "command": job.command,
            "flavor": "a10g-large",
            "labels": job.labels,
            "status": {"stage": stage, "message": message},
            "durations": {
                "schedulingSecs": STARTS_S,
                "runningSecs": None if stage == "SCHEDULING" else int(job.ran_s(now)),
                "totalSecs": int(min(now, job.ends) - job.began),
            },
        }
