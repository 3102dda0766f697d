"""The outer loop's waiting, traffic and speed, and what it survives.

    python benchmarks/outer_loop.py                 goodput, traffic and speed of codecs
    python benchmarks/outer_loop.py --only speed    one part: goodput, traffic or speed
    python benchmarks/outer_loop.py --schedules N   N fault schedules of the protocol
    python benchmarks/outer_loop.py --chaos N       four processes, N random kills, 30 rounds
    python benchmarks/outer_loop.py --restarts N    N times: kill all four, restart, compare
    python benchmarks/outer_loop.py --launches N    N times: kill a replica, all, or the launcher

The model is a byte-level transformer of 136,000 parameters, and the text is Python's own library,
so that every machine has the data. `outer_pretrained.py` fine-tunes.
"""

import argparse
import contextlib
import hashlib
import json
import os
import random
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.trainer.outer.simulation import run_schedule
from tests.trainer.published import write_dataset
from trainer.outer import (
    MemoryStore,
    OuterReplica,
    OuterSettings,
    OuterStep,
    open_store,
)
from trainer.outer.codecs import CODECS, decode_payload, encode_payload
from trainer.outer.exchange import RoundReport
from trainer.outer.executors.base import ReplicaHandle
from trainer.outer.executors.ledger import JobLedger
from trainer.outer.parameters import ParameterVector, state_of_tensors, tensors_of_state
from trainer.outer.replica import ROUNDS

CONTEXT = 64
AVERAGE = OuterStep(1.0, 0.0)


class TinyLM(nn.Module):
    """A byte-level transformer."""

    def __init__(self, width: int = 64, depth: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.position = nn.Parameter(torch.randn(CONTEXT, width) * 0.02)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        self.register_buffer(
            "mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False
        )
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens_B_T: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        length = tokens_B_T.shape[1]
        hidden = self.embed(tokens_B_T) + self.position[:length]
        for layer in self.layers:
            hidden = layer(hidden, src_mask=self.mask[:length, :length], is_causal=True)
        return self.head(self.norm(hidden))


def corpus() -> tuple[torch.Tensor, torch.Tensor]:
    """Return training and held-out bytes."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(library.glob("*.py")) + sorted((library / "asyncio").glob("*.py"))
    data = b"\n".join(path.read_bytes() for path in files)
    tokens = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    cut = int(len(tokens) * 0.95)
    return tokens[:cut], tokens[cut:]


def batch(data: torch.Tensor, generator: torch.Generator, size: int) -> torch.Tensor:
    """Return random windows."""
    starts = torch.randint(0, len(data) - CONTEXT - 1, (size, 1), generator=generator)
    return data[starts + torch.arange(CONTEXT + 1)].long()


def loss_of(model: nn.Module, windows: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of the next byte."""
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: nn.Module, data: torch.Tensor, n: int = 12) -> float:
    """Return the held-out loss."""
    generator = torch.Generator().manual_seed(1234)
    return sum(loss_of(model, batch(data, generator, 64)).item() for _ in range(n)) / n


def build(regime: "Regime | None" = None) -> TinyLM:
    """Return a model with the initial weights of a regime's seed."""
    torch.manual_seed(regime.seed if regime else 0)
    return TinyLM(regime.width, regime.depth) if regime else TinyLM()


@dataclass(frozen=True)
class Regime:
    """How a run trains."""

    n_replicas: int = 4
    n_rounds: int = 20
    inner_steps: int = 15
    batch_size: int = 8
    lr: float = 2e-3
    codec: str = "fp32"
    outer: OuterStep = OuterStep(0.8, 0.5)  # noqa: RUF009
    width: int = 64
    depth: int = 2
    seed: int = 0
    warm_up: int = 20

    @property
    def n_steps(self) -> int:
        """Inner steps of the whole run."""
        return self.n_rounds * self.inner_steps

    def lr_at(self, step: int) -> float:
        """Return the learning rate of an inner step: cosine with a short warm-up."""
        warm = min(1.0, (step + 1) / self.warm_up)
        return self.lr * warm * (0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * step / self.n_steps)))


def inner_round(model, optimizer, data, regime: Regime, rank: int, round_id: int) -> float:  # noqa: ANN001
    """Make one replica's inner steps; data depend on rank and round alone."""
    seed = 1_000_003 * (rank + 1) + 10_007 * regime.seed + round_id
    generator = torch.Generator().manual_seed(seed)
    loss = torch.zeros(())
    first = round_id * regime.inner_steps
    for step in range(first, first + regime.inner_steps):
        for group, base in zip(optimizer.param_groups, optimizer.base_lrs, strict=True):
            group["lr"] = base * regime.lr_at(step) / regime.lr
        loss = loss_of(model, batch(data, generator, regime.batch_size))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def inner_optimizer(model: nn.Module, regime: Regime) -> torch.optim.Optimizer:
    """Return the inner optimizer, with the rates it was made with."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=regime.lr, betas=(0.9, 0.99), weight_decay=0.1
    )
    optimizer.base_lrs = [group["lr"] for group in optimizer.param_groups]  # type: ignore[attr-defined]
    return optimizer


def train_replicas(regime: Regime) -> list[RoundReport]:
    """Train replicas as threads over a store, and return the reports of all."""
    store = MemoryStore()
    train, _ = corpus()
    settings = OuterSettings(
        codec=regime.codec, outer=regime.outer, n_rounds=regime.n_rounds,
        quorum=regime.n_replicas, snapshot_every=10**6,
    )  # fmt: skip
    reports: list[RoundReport] = []

    def one(rank: int, model: nn.Module) -> None:
        view = ParameterVector(model)
        optimizer = inner_optimizer(model, regime)
        replica = OuterReplica(
            store, view.read(), rank=rank, world_size=regime.n_replicas, settings=settings
        )
        replica.join()
        while not replica.is_finished:
            view.write(replica.theta)
            inner_round(model, optimizer, train, regime, rank, replica.round_id)
            reports.append(replica.exchange(view.read()))

    models = [build(regime) for _ in range(regime.n_replicas)]
    threads = [threading.Thread(target=one, args=pair) for pair in enumerate(models)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(reports) < regime.n_replicas * regime.n_rounds:
        raise SystemExit("a replica failed")
    return reports


def mean_up(reports: list[RoundReport], n_replicas: int) -> float:
    """Return bytes sent per replica and round, without the first snapshot."""
    rounds = len(reports) / n_replicas
    return sum(r.up_bytes for r in reports) / rounds / n_replicas


def bench_traffic() -> None:
    print(
        "Traffic of one round: bytes per replica and round, fp32 of 136k parameters, no snapshots"
    )
    for codec in ("fp32", "ternary"):
        ups = {}
        for n in (2, 4, 8):
            regime = Regime(n_replicas=n, n_rounds=n, inner_steps=1, codec=codec)
            reports = train_replicas(regime)
            ups[n] = mean_up(reports, n)
            down = sum(r.down_bytes for r in reports) / len(reports)
            print(f"  {codec:8s} {n} replicas: up {ups[n]:9,.0f}  down {down:9,.0f}")
        print(f"  {codec:8s} up of 8 against 2 replicas: {ups[8] / ups[2] - 1:+.1%}")


def bench_speed(n: int = 25_000_000) -> None:
    print(f"Codec speed on one core, {4 * n / 1e6:.0f} MB of float32")
    vector = (np.random.default_rng(0).standard_normal(n) * 1e-4).astype(np.float32)
    for name, codec in CODECS.items():
        times = {"encode": 9e9, "decode": 9e9}
        for _ in range(3):
            began = time.process_time()
            payload = encode_payload(codec, vector)
            middle = time.process_time()
            decode_payload(codec, payload, n)
            times["encode"] = min(times["encode"], middle - began)
            times["decode"] = min(times["decode"], time.process_time() - middle)
        speeds = ", ".join(f"{verb} {4e-9 * n / s:.2f} GB/s" for verb, s in times.items())
        print(f"  {name:8s} {speeds}, {4 * n / len(payload):6.1f} x fewer bytes (normal values)")


@dataclass(frozen=True)
class ProcessRun:
    """Replicas as processes over a folder."""

    folder: Path
    regime: Regime
    quorum: int
    keeps_state: bool = True

    def replica(self, rank: int, attempt: int) -> None:
        """Be one replica: train to the end, log each round, leave the result."""
        store = open_store(f"file://{self.folder}/run")
        train, held_out = corpus()
        model = build(self.regime)
        view = ParameterVector(model)
        optimizer = inner_optimizer(model, self.regime)
        settings = OuterSettings(
            codec=self.regime.codec, outer=self.regime.outer, n_rounds=self.regime.n_rounds,
            quorum=self.quorum, first_grace_s=5.0, timeout_s=120.0, snapshot_every=3,
        )  # fmt: skip
        replica = OuterReplica(
            store, view.read(), rank=rank, world_size=self.regime.n_replicas, settings=settings,
            state=store if self.keeps_state else None,
        )  # fmt: skip
        replica.join()
        if replica.inner_state:
            optimizer.load_state_dict(state_of_tensors(replica.inner_state))
        with (self.folder / f"log-{rank}.jsonl").open("a", buffering=1) as log:
            while not replica.is_finished:
                view.write(replica.theta)
                inner_round(model, optimizer, train, self.regime, rank, replica.round_id)
                state = tensors_of_state(optimizer.state_dict())
                report = replica.exchange(view.read(), inner_state=state)
                row = {"round": replica.round_id, "base": report.base, "attempt": attempt}
                log.write(json.dumps({**row, "n": report.n_contributions}) + "\n")
        view.write(replica.theta)
        result = {"base": replica.base, "loss": evaluate(model, held_out, 4)}
        (self.folder / f"result-{rank}.json").write_text(json.dumps(result))

    def start(self, rank: int, attempt: int = 0) -> int:
        """Start a replica as a child process; return its id."""
        sys.stdout.flush()
        child = os.fork()
        if child:
            return child
        code = 1
        try:
            self.replica(rank, attempt)
            code = 0
        finally:
            os._exit(code)

    def n_committed(self) -> int:
        """Return how many rounds are decided."""
        return len(list((self.folder / "run" / "rounds").glob("*/manifest.json")))

    def results(self) -> list[dict]:
        """Return what each replica left."""
        paths = sorted(self.folder.glob("result-*.json"))
        return [json.loads(path.read_text()) for path in paths]

    def diverged(self) -> int:
        """Return in how many rounds two replicas had different states."""
        bases: dict[int, set[str]] = {}
        for path in self.folder.glob("log-*.jsonl"):
            for line in path.read_text().splitlines():
                if line.endswith("}"):
                    row = json.loads(line)
                    bases.setdefault(row["round"], set()).add(row["base"])
        return sum(len(found) > 1 for found in bases.values())


def reap(children: dict[int, int]) -> dict[int, int]:
    """Return the exit codes of the replicas that have ended, by rank."""
    ended = {}
    for rank, pid in list(children.items()):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            ended[rank] = os.waitstatus_to_exitcode(status)
            del children[rank]
    return ended


def run_with_kills(run: ProcessRun, n_kills: int, seed: int = 0) -> dict:
    """Run all rounds while killing random replicas, each started anew at once."""
    dice = random.Random(seed)
    began = time.perf_counter()
    children = {rank: run.start(rank) for rank in range(run.regime.n_replicas)}
    attempts: Counter[int] = Counter()
    kills, kill_at = 0, None
    while children:
        time.sleep(0.01)
        for rank, code in reap(children).items():
            if code != 0:  # one that had just ended when the signal came was not killed
                kills += 1
                attempts[rank] += 1
                children[rank] = run.start(rank, attempts[rank])
        due = kills < n_kills and run.n_committed() >= kills * run.regime.n_rounds / n_kills
        if due and kill_at is None:
            kill_at = time.perf_counter() + dice.random() * 0.03
        if kill_at is not None and time.perf_counter() >= kill_at and children:
            os.kill(children[dice.choice(sorted(children))], 9)
            kill_at = None
    results = run.results()
    return {
        "kills": kills,
        "restarts": sum(attempts.values()),
        "rounds": run.n_committed(),
        "diverged": run.diverged(),
        "finished": len(results),
        "hashes": len({row["base"] for row in results}),
        "loss": results[0]["loss"],
        "seconds": time.perf_counter() - began,
    }


def run_with_blackout(run: ProcessRun, after_s: float | None) -> str:
    """Run all rounds; after some time kill every replica, and start all again.

    Returns:
        The hash of the final state.
    """
    ranks = range(run.regime.n_replicas)
    children = {rank: run.start(rank) for rank in ranks}
    began = time.perf_counter()
    attempt = 0
    while children:
        time.sleep(0.005)
        reap(children)
        if after_s is not None and attempt == 0 and time.perf_counter() - began > after_s:
            attempt = 1
            for pid in children.values():
                os.kill(pid, 9)
                os.waitpid(pid, 0)
            children = {rank: run.start(rank, attempt) for rank in ranks}
    bases = {row["base"] for row in run.results()}
    return bases.pop() if len(bases) == 1 else hashlib.sha256(repr(bases).encode()).hexdigest()


def bench_chaos(n_kills: int) -> None:
    regime = Regime(n_rounds=30, inner_steps=8, batch_size=8, codec="int4")
    print(f"Four processes, 30 rounds, {n_kills} random kills (SIGKILL), int4")
    for kills in (0, n_kills):
        with tempfile.TemporaryDirectory() as folder:
            report = run_with_kills(ProcessRun(Path(folder), regime, quorum=2), kills)
        print("  " + ", ".join(f"{k} {v:.4g}" for k, v in report.items()))


def bench_restarts(n_trials: int, regime: Regime | None = None, seed: int = 0) -> int:
    """Print and return how many blackouts ended in the state of the uninterrupted run."""
    regime = regime or Regime(n_rounds=6, inner_steps=4, batch_size=4, codec="ternary")
    dice = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        wanted = run_with_blackout(ProcessRun(Path(folder), regime, regime.n_replicas), None)
        calm_s = time.perf_counter() - began
    equal = 0
    for _ in range(n_trials):
        with tempfile.TemporaryDirectory() as folder:
            run = ProcessRun(Path(folder), regime, regime.n_replicas)
            equal += run_with_blackout(run, dice.uniform(0.05, 0.9) * calm_s) == wanted
    print(f"All four killed at a random moment and restarted: {equal} of {n_trials} final states")
    print(f"  equal that of the uninterrupted run ({wanted}, {calm_s:.1f} s)")
    return equal


@dataclass(frozen=True)
class LaunchedRun:
    """Two TRL trainers on shards of a small dataset, by `replay-train launch`."""

    dataset: Path
    folder: Path

    def start(self) -> subprocess.Popen[bytes]:
        """Start the launcher, or go on with what an earlier one has left."""
        settings = [
            f"dataset={self.dataset}", f"output={self.folder}/model-{{rank}}",
            "outer_options.sync_every=2", "outer_options.quorum=2", "trl.max_steps=8",
            "trl.alpha_sdpo=0.5", "trl.beta_replay=0.3", "trl.teacher=ema",
            "trl.sdpo_wrapper=taid", "trl.lr_scheduler_type=cosine", "trl.learning_rate=5e-3",
            "tiny.hidden_size=32", "tiny.vocab_size=512", "evaluation.max_prompts=0",
        ]  # fmt: skip
        command = [sys.executable, "-m", "trainer", "launch", "--work-dir", str(self.folder)]
        command += [part for setting in settings for part in ("--set", setting)]
        with (self.folder / "launcher.log").open("ab") as log:
            return subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True,
                cwd=Path(__file__).parents[1], env={**os.environ, "HF_HUB_OFFLINE": "1"},
            )  # fmt: skip

    def kill_replicas(self, ranks: list[int]) -> None:
        """Kill replicas that run."""
        rows = JobLedger(self.folder / "ledger.sqlite").rows()
        last = {row.rank: ReplicaHandle.from_json(row.handle) for row in rows}
        for handle in last.values():
            if handle.rank in ranks and handle.job_id:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(int(handle.job_id.partition(":")[0]), 9)

    def result(self) -> str:
        """Return the hash of both replicas' weights, and of the steps they have logged."""
        digest = hashlib.sha256()
        for rank in range(2):
            model = self.folder / f"model-{rank}"
            digest.update((model / "checkpoint" / "model.safetensors").read_bytes())
            rows = map(json.loads, (model / "metrics.jsonl").read_text().splitlines())
            steps = [(r["step"], r["train/loss"]) for r in rows if "train/loss" in r]
            digest.update(repr(steps).encode())
        return digest.hexdigest()[:16]


def bench_launches(n_trials: int, seed: int = 0) -> int:
    """Print and return how many launches that were killed ended as the undisturbed one."""
    dice = random.Random(seed)
    equal = 0
    with tempfile.TemporaryDirectory() as folder:
        dataset = write_dataset(Path(folder) / "dataset")

        def run(name: str, victim: str, share: float, calm_s: float) -> str:
            here = LaunchedRun(dataset, Path(folder) / name)
            here.folder.mkdir()
            launcher = here.start()
            if victim:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    launcher.wait(share * calm_s)
                if victim != "replica":
                    launcher.kill()
                    launcher.wait()
                if victim != "launcher":
                    here.kill_replicas([0, 1] if victim == "all" else [dice.randrange(2)])
                if victim != "replica":
                    launcher = here.start()
            code = launcher.wait()
            if code:
                print((here.folder / "launcher.log").read_text()[-2000:])
            return here.result() if code == 0 else f"exit code {code}"

        began = time.perf_counter()
        wanted = run("calm", "", 0.0, 0.0)
        calm_s = time.perf_counter() - began
        print(f"Undisturbed: {wanted}, {calm_s:.0f} s", flush=True)
        for trial in range(n_trials):
            victim, share = dice.choice(("replica", "all", "launcher")), dice.uniform(0.2, 0.95)
            found = run(str(trial), victim, share, calm_s)
            equal += found == wanted
            print(f"  {victim:8s} killed at {share:.0%}: {found}", flush=True)
    print(f"{equal} of {n_trials} ended in the bits of the undisturbed run")
    return equal


def bench_schedules(n: int) -> None:
    began = time.perf_counter()
    faults: Counter[str] = Counter()
    broken = 0
    for seed in range(n):
        report = run_schedule(seed)
        faults += report.faults
        broken += bool(report.violations)
    print(f"{n} fault schedules in {time.perf_counter() - began:.1f} s: {broken} broken")
    print("  " + ", ".join(f"{name} {count}" for name, count in faults.most_common()))


def goodput(rounds: str, slowness: float, *, round_s: float, seconds: float) -> float:
    """Return the share of all replicas' rounds that count, one of four being slower.

    Inner steps are slept through: what is measured is waiting.
    """
    store, n_counted, until = MemoryStore(), Counter(), time.perf_counter() + seconds
    settings = OuterSettings(rounds=rounds, codec="ternary", outer=AVERAGE, quorum=4)
    start = ParameterVector(build()).read()

    def one(rank: int) -> None:
        replica = OuterReplica(store, start, rank=rank, world_size=4, settings=settings)
        replica.join()
        pace = round_s * (slowness if rank == 0 else 1.0)
        while time.perf_counter() + pace < until:
            time.sleep(pace)
            local = replica.theta + np.float32(1e-4) * np.sin(start + rank)
            n_counted[rank] += replica.exchange(local).was_included

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, until - time.perf_counter()))
    return sum(n_counted.values()) / (seconds / round_s * (3 + 1 / slowness))


def bench_goodput() -> None:
    print("Four replicas, one slower; rounds that count, of all that could be made in 60 s")
    for slowness in (1.0, 2.0, 3.0, 5.0):
        shares = [goodput(rounds, slowness, round_s=1.0, seconds=60.0) for rounds in ROUNDS]
        print(
            f"  slower {slowness:g} times: synchronous {shares[0]:.2f}, asynchronous"
            f" {shares[1]:.2f}",
            flush=True,
        )


PARTS = {
    "goodput": bench_goodput,
    "traffic": bench_traffic,
    "speed": bench_speed,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--schedules", type=int)
    parser.add_argument("--chaos", type=int, metavar="KILLS")
    parser.add_argument("--restarts", type=int, metavar="TRIALS")
    parser.add_argument("--launches", type=int, metavar="TRIALS")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.schedules:
        bench_schedules(options.schedules)
    elif options.chaos:
        bench_chaos(options.chaos)
    elif options.restarts:
        bench_restarts(options.restarts)
    elif options.launches:
        bench_launches(options.launches)
    else:
        for name, part in PARTS.items():
            if options.only in (None, name):
                part()


if __name__ == "__main__":
    main()
