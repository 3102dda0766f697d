"""The outer loop's waiting, traffic and speed, and what it survives.

    python benchmarks/outer_loop.py                 goodput, traffic and speed of codecs
    python benchmarks/outer_loop.py --only speed    one part: goodput, traffic or speed
    python benchmarks/outer_loop.py --schedules N   N fault schedules of the protocol

Nothing is trained here: `outer_pretrained.py` fine-tunes.
"""

import argparse
import logging
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.trainer.diloco.simulation import run_schedule
from trainer.diloco import MemoryStore, OuterReplica, OuterSettings, OuterStep
from trainer.diloco.codecs import CODECS, decode_payload, encode_payload
from trainer.diloco.exchange import RoundReport
from trainer.diloco.replica import ROUNDS

N = 136_448
"""Parameters of a replica."""
AVERAGE = OuterStep(1.0, 0.0)


def delta(rank: int, round_id: int) -> np.ndarray:
    """Return what a replica's inner steps change."""
    dice = np.random.default_rng(1000 * rank + round_id)
    return 1e-4 * dice.standard_normal(N).astype(np.float32)


def rounds_of(codec: str, n_replicas: int) -> list[RoundReport]:
    """Make as many rounds as there are replicas, so that each reduces once; return all reports."""
    store = MemoryStore()
    settings = OuterSettings(
        codec=codec, outer=AVERAGE, n_rounds=n_replicas, quorum=n_replicas, snapshot_every=10**6
    )
    reports: list[RoundReport] = []

    def one(rank: int) -> None:
        replica = OuterReplica(
            store, np.zeros(N), rank=rank, world_size=n_replicas, settings=settings
        )
        replica.join()
        while not replica.is_finished:
            reports.append(replica.exchange(replica.theta - delta(rank, replica.round_id)))

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(n_replicas)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(reports) < n_replicas**2:
        raise SystemExit("a replica failed")
    return reports


def bench_traffic() -> None:
    print(f"Traffic of one round: bytes per replica and round, {N:,} parameters, no snapshots")
    for codec in ("fp32", "ternary"):
        for n in (2, 4, 8):
            reports = rounds_of(codec, n)
            up = sum(r.up_bytes for r in reports) / len(reports)
            down = sum(r.down_bytes for r in reports) / len(reports)
            print(f"  {codec:8s} {n} replicas: up {up:9,.0f}  down {down:9,.0f}")


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


def goodput(rounds: str, slowness: float, *, round_s: float, seconds: float) -> float:
    """Return the share of all replicas' rounds that count, one of four being slower.

    Inner steps are slept through: what is measured is waiting.
    """
    store, n_counted, until = MemoryStore(), Counter(), time.perf_counter() + seconds
    settings = OuterSettings(rounds=rounds, codec="ternary", outer=AVERAGE, quorum=4)

    def one(rank: int) -> None:
        replica = OuterReplica(store, np.zeros(N), rank=rank, world_size=4, settings=settings)
        replica.join()
        pace = round_s * (slowness if rank == 0 else 1.0)
        while time.perf_counter() + pace < until:
            time.sleep(pace)
            local = replica.theta - delta(rank, replica.round_id)
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
        shares = {rounds: goodput(rounds, slowness, round_s=1.0, seconds=60.0) for rounds in ROUNDS}
        told = ", ".join(f"{rounds} {share:.2f}" for rounds, share in shares.items())
        print(f"  slower {slowness:g} times: {told}", flush=True)


def bench_schedules(n: int) -> None:
    logging.disable(logging.CRITICAL)
    began = time.perf_counter()
    faults: Counter[str] = Counter()
    broken = 0
    for seed in range(n):
        report = run_schedule(seed)
        faults += report.faults
        broken += bool(report.violations)
    print(f"{n} fault schedules in {time.perf_counter() - began:.1f} s: {broken} broken")
    print("  " + ", ".join(f"{name} {count}" for name, count in faults.most_common()))


PARTS = {"goodput": bench_goodput, "traffic": bench_traffic, "speed": bench_speed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--schedules", type=int)
    options = parser.parse_args()
    if options.schedules:
        bench_schedules(options.schedules)
    else:
        for name, part in PARTS.items():
            if options.only in (None, name):
                part()


if __name__ == "__main__":
    main()
