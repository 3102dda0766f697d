"""`replay-train launch`: start the replicas of one run under a ceiling, and keep them alive.

The launch's ledger records every start before it is made, so that after an interruption all starts
are known. The lease in the store keeps a second launch from training in parallel.
"""

import argparse
import hashlib
import logging
import math
import re
import socket
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from trainer.data.folders import sole_writer
from trainer.diloco.environment import variables_named
from trainer.diloco.executors.base import (
    USERS_ERROR,
    ReplicaHandle,
    ReplicaResult,
    ReplicaState,
    ServerlessExecutor,
    supervise,
)
from trainer.diloco.executors.hf_jobs import HFJobsExecutor
from trainer.diloco.executors.ledger import JobLedger
from trainer.diloco.executors.local import LocalProcessExecutor
from trainer.diloco.executors.modal import DEFAULT_CPU, DEFAULT_MEMORY_MIB, ModalExecutor
from trainer.diloco.object_store import open_store
from trainer.errors import (
    BudgetReachedError,
    LeaseHeldError,
    ObjectStoreError,
    OuterLoopError,
    ReplicaFailedError,
    TrainerConfigError,
    TrainerError,
)

logger = logging.getLogger(__name__)

EXECUTORS = ("local", "hf_jobs", "modal")
LEDGER, PLAN = "ledger.sqlite", "plan"
INTERRUPTED = 130
MIN_LIFE_S = 60.0
"""Shortest run time that is worth a start."""
PROBE_RANK, PROBE_S = -1, 900.0
LOST = "lost"
"""The outcome of a start that the platform doesn't know."""
ASK_S = 60.0
"""Seconds that a status request or a stop waits for the platform."""
LEASES, END = "launch/", ".end"
LEASE = re.compile(rf"{LEASES}\d{{6}}(\.json|\.end)")
STRAY = "stray "
"""What names a job in the ledger that nobody has reserved money for."""
STOP_POLL_S, LOOK_S = 5.0, 60.0


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of a launch. Restarts and the probe count too."""

    max_usd: float | None = 10.0
    """Dollars for all starts together, by the platform's price list. None sets no ceiling."""
    max_hours: float = 24.0
    """Hours from the first start after which the platform ends every replica."""
    max_restarts: int = 10
    """Restarts of all replicas together, while they are watched."""
    quorum: int | None = None
    """Fewest replicas with which the run goes on. By default, half of them, rounded up."""

    def __post_init__(self) -> None:
        for name in ("max_usd", "max_hours"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise TrainerConfigError(f"{name}={value}: expected a number from 0 on")


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """Everything that another process needs to continue a launch. It has names of secrets, but no values."""

    executor: str = "local"
    image: str = ""
    hardware: str | None = None
    cpu: float = DEFAULT_CPU
    memory_mib: int = DEFAULT_MEMORY_MIB
    namespace: str | None = None
    usd_per_hour: float | None = None
    uri: str = ""
    secrets: tuple[str, ...] = ()
    limits: Limits = Limits()


def make_executor(plan: LaunchPlan, work_dir: Path) -> ServerlessExecutor:
    """Return the executor that a plan names: one of `EXECUTORS`.

    Raises:
        TrainerConfigError: Its package is missing, or a cloud executor has no image.
    """
    if plan.executor == "local":
        return LocalProcessExecutor(work_dir / "replicas")
    if not plan.image:
        raise TrainerConfigError("--image is needed: a container image that holds this package")
    price = plan.usd_per_hour
    if plan.executor == "hf_jobs":
        return HFJobsExecutor(
            plan.hardware or "cpu-basic", image=plan.image, namespace=plan.namespace,
            usd_per_hour=price,
        )  # fmt: skip
    return ModalExecutor(
        plan.image, plan.hardware, cpu=plan.cpu, memory_mib=plan.memory_mib, usd_per_hour=price
    )


class Lease(msgspec.Struct):
    """The claim of a launch on its store while its replicas may run: `launch/<number>.json`.

    Each is created once, and the newest one counts. It lapses at the time by which the platform has
    ended every replica.
    """

    holder: str
    where: str
    until: float
    run: int


class Launch:
    """The replicas of one run, with a ledger in `work_dir` and a lease in the store."""

    def __init__(
        self, work_dir: Path, uri: str, executor: ServerlessExecutor, limits: Limits
    ) -> None:
        self.uri, self.executor, self.limits = uri, executor, limits
        self.work_dir = work_dir
        self.ledger = executor.ledger = JobLedger(work_dir / LEDGER)
        self.run_id = self.ledger.recall("run_id") or ""
        self.store = open_store(uri)
        self._number = 0
        self._look_at = 0.0

    @property
    def began(self) -> float:
        """Return the time of the first start, in seconds since the epoch."""
        return float(self.ledger.remember("began", str(self.executor.now())))

    @property
    def until(self) -> float:
        """Return the time by which the platform ends every replica, in seconds since the epoch."""
        return self.began + 3600 * self.limits.max_hours

    def take(self) -> None:
        """Take the store's lease, or find our own again, and set the ceiling.

        Raises:
            LeaseHeldError: Another launch has the store.
            OuterLoopError: The newest lease is damaged.
            TrainerConfigError: The price of the hardware is unknown.
        """
        mine = Lease(
            holder=self.ledger.remember("holder", uuid.uuid4().hex),
            where=f"{self.work_dir.resolve()} on {socket.gethostname()}",
            until=self.until,
            run=int(self.ledger.recall("run") or 0),
        )
        is_taken = False
        while not is_taken:
            keys = [key for key in self.store.keys(LEASES) if LEASE.fullmatch(key)]
            self._number = max((int(key[len(LEASES) :][:6]) for key in keys), default=0)
            key = f"{LEASES}{self._number:06d}"
            if self._number and key + END not in keys:
                held = self._read_lease(f"{key}.json")
                if held.holder == mine.holder:
                    mine.run = held.run
                    if held.until >= mine.until:
                        break
                elif held.until > self.executor.now():
                    raise LeaseHeldError(
                        f"{self.store.place or 'the store'} belongs to a launch from {held.where}: watch it from there, stop it there, or name another store. If that folder is lost, stop its jobs on the platform's page and delete {LEASES} in the store"
                    )
            self._number += 1
            mine.run = mine.run or self._number
            is_taken = self.store.put_if_absent(
                f"{LEASES}{self._number:06d}.json", msgspec.json.encode(mine)
            )
        self.ledger.remember("run", str(mine.run))
        named = f"outer-{hashlib.sha256(self.uri.encode()).hexdigest()[:12]}-{mine.run}"
        self.run_id = self.ledger.remember("run_id", named)
        self.ledger.set_ceiling(self.limits.max_usd if self.executor.usd_per_hour else None)

    def _strays_left(self) -> list[ReplicaHandle]:
        """Stop and count what the platform lists of this run and the ledger doesn't know.

        These are twins of a start without an answer. What the platform doesn't tell the time of is
        believed to have run from the beginning.

        Returns:
            Those that may still run.
        """
        executor, left = self.executor, list[ReplicaHandle]()
        known = {ReplicaHandle.from_json(row.handle).job_id for row in self.ledger.rows()}
        try:
            for found in executor.listed(self.run_id):
                name = f"{STRAY}{found.job_id}"
                if found.job_id in known or self.ledger.recall(name) is not None:
                    continue
                logger.warning(
                    "%s (%s) is not in the ledger: stopping it", found.label, found.job_id
                )
                if executor.cancel([found]):
                    left.append(found)
                    continue
                told = executor.poll([found])[0].billed_s
                cost = executor.bound_usd(executor.now() - self.began if told is None else told)
                self.ledger.charge(name, found.to_json(), cost)
        except OuterLoopError as error:
            logger.warning("twins could not be looked for: %s", error)
        return left

    def _look(self) -> None:
        """Look for twins now and then while replicas are watched."""
        if self.executor.outlives_launcher and self.executor.now() >= self._look_at:
            self._look_at = self.executor.now() + LOOK_S
            self._strays_left()

    def _read_lease(self, key: str) -> Lease:
        try:
            return msgspec.json.decode(self.store.get(key) or b"", type=Lease)
        except msgspec.DecodeError as error:
            raise OuterLoopError(
                f"{self.store.place}{key} is damaged: make sure that no replica runs and delete it"
            ) from error

    def release(self) -> None:
        """Release the store for the next launch."""
        if self._number:
            self.store.put(f"{LEASES}{self._number:06d}{END}", b"")

    def handles(self) -> list[ReplicaHandle]:
        """Return the last start of every rank that has a job. Starts without an answer are looked up."""
        executor, newest = self.executor, dict[int, ReplicaHandle]()
        unsure: list[ReplicaHandle] = []
        for row in self.ledger.rows():
            known = ReplicaHandle.from_json(row.handle)
            handle = known if known.job_id or row.outcome == "refused" else executor.found(known)
            if handle is None and row.is_open:
                # Its request may still be under way; what is not there then has ended before.
                since_s = executor.now() - row.intent_at
                executor.sleep(max(0.0, executor.arrives_s - since_s))
                handle = executor.found(known)
            if handle is None:
                cost = executor.bound_usd(min(executor.now() - row.intent_at, known.timeout_s))
                self.ledger.settle(row.rank, row.attempt, cost, LOST, executor.now())
            elif handle.job_id:
                newest[row.rank] = handle
                unsure += [handle] if row.is_open or row.outcome == LOST else []
        # Of two of one rank the later one stays.
        executor.cancel([handle for handle in unsure if newest[handle.rank] != handle])
        return [newest[rank] for rank in sorted(newest)]

    def start(
        self,
        entrypoint: str,
        command: Sequence[str],
        n: int,
        *,
        env: Mapping[str, str],
        secrets: Mapping[str, str],
    ) -> list[ReplicaHandle]:
        """Return all replicas, and start those that don't run yet.

        Raises:
            TrainerConfigError: The ledger has replicas of another command.
            BudgetReachedError: The ceiling would allow them too short a run time.
            ReplicaFailedError: The probe or a start failed. Started replicas are stopped.
        """
        executor = self.executor
        there = {handle.rank: handle for handle in self.handles()}
        probe = there.pop(PROBE_RANK, None)
        wanted = [executor.command_of(entrypoint, command, rank, n) for rank in range(n)]
        if any(rank >= n or there[rank].command != wanted[rank] for rank in there):
            raise TrainerConfigError(
                "this work dir belongs to a launch with other arguments: pass another --work-dir"
            )
        if there:
            logger.warning("%s: replicas exist already, continuing with them", self.work_dir)
        attempts = {row.rank: row.attempt + 1 for row in self.ledger.rows()}
        ended = executor.poll(list(there.values()))
        alive = [s.rank for s in ended if not s.state.is_final or s.state is ReplicaState.SUCCEEDED]
        missing = [rank for rank in range(n) if rank not in alive]
        if not missing:
            return [there[rank] for rank in range(n)]
        try:
            if entrypoint.startswith("python:"):
                attempt = attempts.get(PROBE_RANK, 0)
                self._probe(command, attempt, n, known=probe, env=env, secrets=secrets)
            life_s = self.life_s(len(missing))
            for rank in missing:
                handle = ReplicaHandle(
                    self.run_id, rank, n, attempts.get(rank, 0), "", wanted[rank], dict(env), life_s
                )
                there[rank] = executor.start(handle, secrets)
        except ReplicaFailedError:
            executor.cancel([handle for rank, handle in there.items() if rank in missing])
            raise
        return [there[rank] for rank in range(n)]

    def life_s(self, n: int) -> float:
        """Return the allowed run time of each of `n` replicas that start now, in seconds.

        Raises:
            BudgetReachedError: It is too short to be worth a start.
        """
        life_s, price = self.until - self.executor.now(), self.executor.usd_per_hour
        spent, held, ceiling = self.ledger.totals_usd()
        if price and ceiling is not None:
            # Of what is affordable, one step may be begun at the end and one is rounded up.
            affordable_s = (ceiling - spent - held) / n / price * 3600
            life_s = min(life_s, affordable_s - 2 * self.executor.billing_step_s)
        if life_s < MIN_LIFE_S:
            raise BudgetReachedError(
                f"{n} more starts at ${price:.2f} an hour do not fit: ${spent:.2f} are spent and "
                f"${held:.2f} held under max_usd={ceiling}, and max_hours={self.limits.max_hours:g} limits all starts: raise them, and run the same command to continue from the store"
            )
        if price:
            logger.warning(
                "%d replicas at $%.2f an hour each: they may run for %.1f h under max_usd=%s and "
                "max_hours=%g", n, price, life_s / 3600, ceiling, self.limits.max_hours,
            )  # fmt: skip
        return float(int(life_s))

    def watch(
        self,
        handles: Sequence[ReplicaHandle],
        *,
        poll_s: float = 1.0,
        secrets: Mapping[str, str] | None = None,
    ) -> list[ReplicaResult]:
        """Restart dead replicas until all have succeeded, and return their logs.

        Raises:
            ReplicaFailedError: Too few replicas are left; they are stopped.
        """
        is_over = False
        try:
            finished = supervise(
                self.executor,
                handles,
                max_restarts=self.limits.max_restarts,
                quorum=self.limits.quorum,
                poll_s=poll_s,
                secrets=secrets,
                # Of those that died at once, each gets an equal part of what they have left.
                renewed=lambda handle, n: replace(handle, timeout_s=self.life_s(n)),
                on_look=self._look,
            )
            self._look_at = 0.0
            self._look()
            results = self.executor.collect(finished, timeout_s=0)
            is_over = True
        except ReplicaFailedError:
            is_over = True
            raise
        finally:
            if is_over or not self.executor.outlives_launcher:
                self.release()
        return results

    def stop(self) -> list[ReplicaHandle]:
        """Stop all replicas and release the store, and return those that may still run."""
        executor = self.executor
        try:
            self.take()
        except ObjectStoreError as error:
            logger.warning("%s", error)
        self.handles()
        left = [ReplicaHandle.from_json(row.handle) for row in self.ledger.rows()]
        left = [handle for handle in left if handle.job_id]
        until = executor.now() + executor.arrives_s
        while (left := executor.cancel(left) + self._strays_left()) and executor.now() < until:
            executor.sleep(STOP_POLL_S)
        if not left:
            self.release()
        return left

    def _probe(
        self,
        command: Sequence[str],
        attempt: int,
        n: int,
        *,
        known: ReplicaHandle | None,
        env: Mapping[str, str],
        secrets: Mapping[str, str],
    ) -> None:
        """Run one replica that checks settings, dataset and store, where starts cost money.

        Raises:
            ReplicaFailedError: the probe failed.
        """
        executor = self.executor
        if not executor.outlives_launcher or self.ledger.recall("probed") is not None:
            return
        # After torchrun's own arguments, as `_launched` writes them.
        own = (
            list(command)[list(command).index("trainer") + 1 :] if "trainer" in command else command
        )
        argv = executor.command_of("python:trainer", [*own, "--check"], 0, n)
        started = known
        if known is None or known.command != argv or not self._is_telling(known):
            life_s = min(PROBE_S, self.life_s(1))
            handle = ReplicaHandle(self.run_id, PROBE_RANK, n, attempt, "", argv, dict(env), life_s)
            started = executor.start(handle, secrets)
        assert started is not None
        try:
            executor.collect([started], timeout_s=2 * PROBE_S)
        except ReplicaFailedError as error:
            raise ReplicaFailedError(
                "the probe failed, so no replica was started: the image must contain this package, "
                f"and the settings must fit the dataset and the store: {error}"
            ) from error
        self.ledger.remember("probed", "yes")

    def _is_telling(self, probe: ReplicaHandle) -> bool:
        """Return whether a probe of an earlier launcher runs, or says all that another one would."""
        [status] = self.executor.poll([probe])
        told = status.state is ReplicaState.SUCCEEDED or status.exit_code == USERS_ERROR
        return told or not status.state.is_final


def launch(
    arguments: Sequence[str],
    *,
    replicas: int,
    uri: str,
    executor: ServerlessExecutor,
    entrypoint: str = "python:trainer",
    limits: Limits | None = None,
    poll_s: float = 1.0,
    env: Mapping[str, str] | None = None,
    secrets: Mapping[str, str] | None = None,
    work_dir: Path = Path("outer"),
    is_detached: bool = False,
) -> list[ReplicaResult]:
    """Train with N replicas that a store joins, restart dead ones, and return their logs.

    If you repeat the call, it continues with the existing replicas.

    Args:
        arguments: Arguments of `replay-train`, in which `{rank}` and `{world_size}` are replaced.
        replicas: Number of replicas.
        uri: The store that joins them. This process must reach it too.
        executor: Where they run.
        entrypoint: The program each replica runs.
        limits: Limits of the launch.
        poll_s: Seconds between looks.
        env: Further variables.
        secrets: Variables such as cloud keys, which go through the platform's secret store.
        work_dir: Folder for the ledger of all starts.
        is_detached: Whether to return as soon as all are started, without a result.

    Raises:
        ReplicaFailedError: Too few replicas are left; they are stopped.
        BudgetReachedError: A start would exceed `limits`.
        LeaseHeldError: Another launch has the store.
        TrainerConfigError: `work_dir` has replicas of another command.
    """
    settings = ["--set", "outer=object_store", "--set", f"outer_options.uri={uri}"]
    command = [*arguments, *settings]
    run = Launch(work_dir, uri, executor, limits or Limits())
    run.take()
    handles = run.start(entrypoint, command, replicas, env=env or {}, secrets=secrets or {})
    return [] if is_detached else run.watch(handles, poll_s=poll_s, secrets=secrets)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="replay-train launch",
        description="Train with replicas that share nothing but an object store. Other options "
        "are those of `replay-train`; {rank} in them is filled in. The same command again "
        "goes on with the replicas that are there.",
    )
    add = parser.add_argument
    add("--work-dir", type=Path, default=Path("outer"), help="ledger and logs")
    add("--status", action="store_true", help="print what was launched from here, and its cost")
    add("--logs", action="store_true", help="print what the replicas have written")
    add("--rank", type=int, help="only of this one (--logs)")
    add("--attach", action="store_true", help="watch what was launched from here")
    add("--stop", action="store_true", help="end what was launched from here")
    add("--replicas", type=int, default=2, help="how many (default: 2)")
    add("--processes", type=int, default=1, help="of each replica, by torchrun (default: 1)")
    add("--executor", choices=EXECUTORS, default="local", help="where they run")
    add("--uri", help="store that joins them (default: a folder, local only)")
    add("--image", default="", help="container image that holds this package (cloud)")
    add("--hardware", help="flavor (hf_jobs) or GPU (modal)")
    add("--cpu", type=float, default=DEFAULT_CPU, help="cores of each replica (modal)")
    add("--memory", type=int, default=DEFAULT_MEMORY_MIB, dest="memory_mib", metavar="MIB",
        help="of each (modal)")  # fmt: skip
    add("--namespace", help="who pays (hf_jobs; default: the token's owner)")
    add("--max-usd", type=float, default=10.0, help="ceiling of all starts together (default: 10)")
    add("--max-hours", type=float, default=24.0, help="from the first start on (default: 24)")
    add("--usd-per-hour", type=float, help="price of one replica (default: the platform's)")
    add("--secret", action="append", default=[], dest="secrets", metavar="NAME",
        help="hand this variable on through the platform's secrets")  # fmt: skip
    add("--env", action="append", default=[], metavar="NAME=VALUE", help="set this variable")
    add("--detach", action="store_true", help="start, and do not watch")
    add("--max-restarts", type=int, default=10, help="of all replicas together")
    add("--quorum", type=int, help="fewest replicas with which the run goes on (default: half)")
    return parser


def launch_command(arguments: Sequence[str]) -> int:
    """Run `launch` from the command line. Options that it doesn't know go to every replica.

    Returns:
        The exit code: 0 if all replicas finished, 2 for a user's error or a failure, 130 if the
            watch was interrupted.
    """
    options, rest = _parser().parse_known_args(arguments)
    work_dir: Path = options.work_dir
    try:
        if options.attach or options.status or options.stop or options.logs:
            results = _of_launched(options)
        else:
            results = _launched(options, rest)
    except TrainerError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write(
            f"not watched any more; replay-train launch --attach --work-dir {work_dir} goes "
            "on, --stop ends what still runs\n"
        )
        return INTERRUPTED
    for result in results:
        last = (result.log.strip().splitlines() or [""])[-1]
        sys.stdout.write(f"replica {result.rank} (attempt {result.attempt}): {last}\n")
    return 0


def _launched(options: argparse.Namespace, rest: list[str]) -> list[ReplicaResult]:
    """Launch what the command line asks for.

    Raises:
        TrainerConfigError: an argument is missing or wrong.
    """
    entrypoint, work_dir = "python:trainer", options.work_dir
    if options.processes > 1:
        entrypoint = "python:torch.distributed.run"
        n = str(options.processes)
        rest = ["--standalone", "--nproc-per-node", n, "-m", "trainer", *rest]
    if options.uri is None and options.executor != "local":
        raise TrainerConfigError("--uri is needed: cloud replicas cannot see a local folder")
    told = vars(options) | {"uri": options.uri or f"file://{(work_dir / 'store').resolve()}"}
    plan = msgspec.convert(told | {"limits": told}, LaunchPlan)
    env, secrets = dict(_pair(text) for text in options.env), variables_named(plan.secrets)
    executor = make_executor(plan, work_dir)
    with sole_writer(work_dir):
        JobLedger(work_dir / LEDGER).put(PLAN, msgspec.json.encode(plan).decode())
        return launch(
            rest,
            replicas=options.replicas,
            uri=plan.uri,
            executor=executor,
            entrypoint=entrypoint,
            limits=plan.limits,
            env=env,
            secrets=secrets,
            work_dir=work_dir,
            is_detached=options.detach,
        )


def _of_launched(options: argparse.Namespace) -> list[ReplicaResult]:
    """Do what the command line asks for with a launch that is there.

    Raises:
        TrainerConfigError: no launch was started from this folder.
        ReplicaFailedError: a replica could not be stopped.
    """
    path = options.work_dir / LEDGER
    text = JobLedger(path).recall(PLAN) if path.exists() else None
    if text is None:
        raise TrainerConfigError(f"{options.work_dir}: no launch was started from this folder")
    plan = msgspec.json.decode(text, type=LaunchPlan)
    executor = make_executor(plan, options.work_dir)
    run = Launch(options.work_dir, plan.uri, executor, plan.limits)
    if options.attach:
        with sole_writer(options.work_dir):
            run.take()
            handles = [handle for handle in run.handles() if handle.rank != PROBE_RANK]
            return run.watch(handles, secrets=variables_named(plan.secrets))
    executor.patience_s = ASK_S
    if options.stop:
        if left := run.stop():
            names = ", ".join(f"{handle.label} ({handle.job_id})" for handle in left)
            raise ReplicaFailedError(f"may still run: {names}; stop them on the platform's page")
        return []
    states = {(h.rank, h.attempt): (h, executor.poll([h])[0].state.value) for h in run.handles()}
    for row in run.ledger.rows():
        handle, state = states.get((row.rank, row.attempt), (None, row.outcome))
        if options.rank not in (None, row.rank) or (options.logs and handle is None):
            continue
        name = "probe" if row.rank == PROBE_RANK else f"replica {row.rank}"
        if options.logs and handle is not None:
            sys.stdout.write(f"{name}: {state}\n{executor.logs(handle)}")
        else:
            money = row.reserved_usd if row.is_open else row.cost_usd
            verb = "may cost" if row.is_open else "cost"
            line = f"{name} (attempt {row.attempt}): {state}, {verb} ${money:.2f}\n"
            sys.stdout.write(line)
    if options.status:
        spent, held, ceiling = run.ledger.totals_usd()
        sys.stdout.write(f"${spent:.2f} spent, ${held:.2f} held, max_usd={ceiling}\n")
    return []


def _pair(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator:
        raise TrainerConfigError(f"--env {text}: expected NAME=VALUE")
    return name, value
