"""torchft's own lighthouse and managers under random kills: four processes that die and rejoin.

    python benchmarks/outer_torchft.py                        30 rounds, 22 kills (SIGKILL)
    python benchmarks/outer_torchft.py --rounds 6 --kills 4 --steps 20     a short form

Each replica is a process with a `torchft.Manager` of its own around `make_diloco_outer_loop`. One
is killed at a random moment, and started anew at once; it heals from a living one. Two may be away
at a time: torchft keeps no state but in its living replicas, so if all who hold it die, the run
begins again at zero. After the last round the run goes on without kills until all four are at
the same round. Prints one line of JSON; exits with 1 unless all rounds are done, every round has
one hash, and all four end equal.
"""

import argparse
import hashlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torchft
from torchft.local_sgd import DiLoCo

from benchmarks.outer_loop import TinyLM, batch, corpus, loss_of, reap
from trainer.outer import OuterStep, make_diloco_outer_loop, make_torchft_manager

N_REPLICAS = 4
QUIET_ROUNDS = 10
"""Rounds between the decision to stop and the stop: time for everybody to read it."""

# Imported here, so that a replica that is forked off starts in no time.
assert torchft.Manager
assert DiLoCo


class Run:
    """Replicas and their lighthouse, with all they leave in one folder."""

    def __init__(self, folder: Path, inner_steps: int) -> None:
        self.folder = folder
        self.inner_steps = inner_steps
        binary = Path(sys.executable).with_name("torchft_lighthouse")
        with (folder / "lighthouse.log").open("wb") as log:
            self.lighthouse = subprocess.Popen(
                [binary, "--bind", "127.0.0.1:0", "--min_replicas", "2", "--join_timeout_ms",
                 "1000", "--quorum_tick_ms", "20", "--heartbeat_timeout_ms", "1000"],
                stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        while not (port := self._port()):
            if self.lighthouse.poll() is not None:
                raise SystemExit((folder / "lighthouse.log").read_text())
            time.sleep(0.02)
        self.url = f"http://127.0.0.1:{port}"

    def _port(self) -> str:
        """Return the port that the lighthouse says it has taken; empty if it has not yet."""
        text = (self.folder / "lighthouse.log").read_text()
        found = re.search(r"listening on: \S+:(\d+)\s", text)
        return found[1] if found else ""

    def start(self, rank: int) -> int:
        """Start a replica as a child process; return its id."""
        child = os.fork()
        if child:
            return child
        code = 1
        try:
            with (self.folder / f"replica-{rank}.log").open("ab", buffering=0) as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            self.replica(rank)
            code = 0
        finally:
            os._exit(code)

    def replica(self, rank: int) -> None:
        """Be one replica until the round at which all stop."""
        torch.set_num_threads(1)
        torch.manual_seed(0)
        train, _ = corpus()
        model = TinyLM(16, 1, 2)
        inner = torch.optim.AdamW(model.parameters(), lr=4e-3)

        def load_state(state: dict) -> None:
            model.load_state_dict(state["model"])
            inner.load_state_dict(state["inner"])

        manager = make_torchft_manager(
            lighthouse=self.url,
            rank=rank,
            state_dict=lambda: {"model": model.state_dict(), "inner": inner.state_dict()},
            load_state_dict=load_state,
            min_replicas=2,
            round_s=100.0,
        )
        loop = make_diloco_outer_loop(
            model, inner, manager=manager, sync_every=self.inner_steps, outer=OuterStep(0.8, 0.5)
        )
        dice = torch.Generator().manual_seed(rank)
        step = 0
        with loop, self.log_of(rank).open("a", buffering=1) as log:
            while manager.current_step() < self.last_round():
                loss = loss_of(model, batch(train, dice, 4))
                inner.zero_grad()
                loss.backward()
                inner.step()
                if manager.current_step() > step:
                    step = manager.current_step()
                    values = loop._fragments[0].original_parameters.values()
                    digest = hashlib.sha256(b"".join(v.numpy().tobytes() for v in values))
                    row = {"round": step, "hash": digest.hexdigest(), "loss": loss.item()}
                    log.write(json.dumps({**row, "n": manager.num_participants()}) + "\n")
        manager.shutdown(wait=False)

    def log_of(self, rank: int) -> Path:
        """Return where a replica writes its rounds."""
        return self.folder / f"rounds-{rank}.jsonl"

    def last_round(self) -> float:
        """Return the round at which all stop, once that is decided."""
        try:
            return int((self.folder / "last-round").read_text())
        except (FileNotFoundError, ValueError):
            return float("inf")

    def rows(self, rank: int) -> list[dict]:
        """Return the rounds that a replica has seen."""
        path = self.log_of(rank)
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def newest(self) -> list[int]:
        """Return each replica's newest round."""
        return [(self.rows(rank) or [{"round": 0}])[-1]["round"] for rank in range(N_REPLICAS)]


class Reaper:
    """Kills random replicas at random moments, and starts each anew at once."""

    def __init__(self, run: Run, n_rounds: int, n_kills: int, seed: int) -> None:
        self.run = run
        self.causes: Counter[str] = Counter()
        self.children = {rank: run.start(rank) for rank in range(N_REPLICAS)}
        self._dice = random.Random(seed)
        self._rounds_per_kill = n_rounds / max(1, n_kills)
        self._left = n_kills
        self._at: float | None = None
        self._away: dict[int, int] = {}
        self.last_kill_at = 0

    @property
    def is_done(self) -> bool:
        """Whether all kills are made, and all victims are back."""
        return not self._left and not self._still_away()

    def restart_dead(self) -> None:
        """Start anew what was killed, or what fell by itself."""
        for rank, code in reap(self.children).items():
            if code != 0:
                self.causes["killed" if code == -9 else "crashed"] += 1
                self.children[rank] = self.run.start(rank)

    def strike(self) -> None:
        """Kill one, if it is time."""
        newest = max(self.run.newest())
        is_due = newest >= self.causes["killed"] * self._rounds_per_kill
        if self._at is None and self._left and is_due and len(self._still_away()) < 2:
            self._at = time.perf_counter() + self._dice.random() * 0.5
        if self._at is not None and time.perf_counter() >= self._at:
            victim = self._dice.choice(sorted(self.children.keys() - self._still_away().keys()))
            self._away[victim] = len(self.run.rows(victim))
            os.kill(self.children[victim], 9)
            self._left -= 1
            self._at = None
            self.last_kill_at = newest

    def end(self) -> None:
        """Kill all that still run."""
        for pid in self.children.values():
            os.kill(pid, 9)
            os.waitpid(pid, 0)

    def _still_away(self) -> dict[int, int]:
        """Return the victims that have taken part in no round since, with their rows before."""
        self._away = {
            rank: before
            for rank, before in self._away.items()
            if len(self.run.rows(rank)) <= before
        }
        return self._away


def run_with_kills(run: Run, n_rounds: int, n_kills: int, *, seed: int, timeout_s: float) -> dict:
    """Make the rounds under kills, then let all come to the same round, and stop them."""
    began = time.perf_counter()
    reaper = Reaper(run, n_rounds, n_kills, seed)
    try:
        while reaper.children:
            if time.perf_counter() - began > timeout_s:
                raise SystemExit(f"no end after {timeout_s:.0f} s: {run.newest()}")
            time.sleep(0.02)
            reaper.restart_dead()
            reaper.strike()
            newest = run.newest()
            is_over = reaper.is_done and min(newest) >= n_rounds and len(set(newest)) == 1
            if is_over and run.last_round() == float("inf"):
                (run.folder / "last-round").write_text(str(newest[0] + QUIET_ROUNDS))
    finally:
        reaper.end()
    return report(run, n_rounds, reaper, time.perf_counter() - began)


def report(run: Run, n_rounds: int, reaper: Reaper, seconds: float) -> dict:
    """Return what came of a run."""
    hashes: dict[int, set[str]] = {}
    rows = {rank: run.rows(rank) for rank in range(N_REPLICAS)}
    for row in (row for found in rows.values() for row in found):
        hashes.setdefault(row["round"], set()).add(row["hash"])
    sizes = [row["n"] for found in rows.values() for row in found if row["round"] <= n_rounds]
    return {
        "kills": reaper.causes["killed"],
        "crashes": reaper.causes["crashed"],
        "last_kill_in_round": reaper.last_kill_at + 1,
        "rounds": sum(round_id in hashes for round_id in range(1, n_rounds + 1)),
        "diverged": sum(len(found) > 1 for found in hashes.values()),
        "final_rounds": sorted({found[-1]["round"] for found in rows.values()}),
        "final_hashes": len({found[-1]["hash"] for found in rows.values()}),
        "mean_participants": round(sum(sizes) / len(sizes), 2),
        "restarted_from_zero": sum(
            later["round"] <= earlier["round"]
            for found in rows.values()
            for earlier, later in pairwise(found)
        ),
        "loss": [round(rows[0][index]["loss"], 3) for index in (0, -1)],
        "seconds": round(seconds, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--kills", type=int, default=22)
    parser.add_argument("--steps", type=int, default=40, help="inner steps of a round")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=600.0, help="in seconds")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder), options.steps)
        try:
            found = run_with_kills(
                run, options.rounds, options.kills, seed=options.seed, timeout_s=options.timeout
            )
        finally:
            run.lighthouse.kill()
            run.lighthouse.wait()
    print(json.dumps(found))
    is_sound = found["rounds"] == options.rounds and found["kills"] >= options.kills
    return int(not is_sound or found["diverged"] > 0 or found["final_hashes"] != 1)


if __name__ == "__main__":
    sys.exit(main())
