"""Batches under the documented unit while the daemon, web server, code server, and runs are killed.

    nice -n 10 python benchmarks/nights.py [--batches 40] [--minutes 20] [--rest 20] [--every 20]
        [--keep DIR] [--json FILE]

Each batch is one session and one queued run. `ui` is started as the unit of `docs/deploy.md` starts
it: again whenever it ends with an exit code or by a signal. For `--minutes`, a process of a random
kind is killed (SIGKILL) about every `--every` seconds; then the rest may finish by itself for
`--rest` minutes. A batch is green if its normalized pairs are there without anybody's hand. Played
teachers answer over HTTP and keep a bill of their own. With `--keep`, the next call goes on.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parents[1]))

import dagster as dg

from replay_pipeline.assets.instance import open_instance, ui_command
from replay_pipeline.testing import TeacherServer
from tests.roots import pipeline_at
from tests.support.dagster_web import free_port, launch_batch, process_tree, sign_in
from tests.support.sessions import SessionBuilder, ToolCall
from tests.support.settings_files import write_settings

KINDS = {
    "daemon": b"dagster._daemon",
    "web server": b"replay_pipeline.assets.serve\0",
    "code server": b"code-server",
    "run": b"spawn_main",
}
"""A word in the command of each kind of process."""
LOOK = {"role": "assistant", "content": "I look first."}


class Unit:
    """`ui` as systemd keeps it with `Restart=on-failure`."""

    def __init__(self, root: Path) -> None:
        self._root, self.n_starts = root, 0
        self._port = free_port()
        self.start()

    def start(self) -> None:
        """Start it, after the view was brought up to date, as the command does."""
        self.n_starts += 1
        self.log = self._root.with_name(f"ui-{self.n_starts}.log")
        work = pipeline_at(self._root)
        with open_instance(work) as instance:
            instance.add_dynamic_partitions("trace_batch", work.batches())
        command, environment = ui_command(work.settings, port=self._port)
        with self.log.open("wb") as file:
            self.process = subprocess.Popen(
                command, env=environment, stdout=file, stderr=file, start_new_session=True
            )

    def keep(self) -> None:
        """Start it again if it has ended, once all that it had started has ended as well."""
        if self.process.poll() is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.start()

    def below(self, kind: str) -> list[int]:
        """The processes of a kind."""
        found = []
        for pid in process_tree(self.process.pid):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes()
                found += [pid] if KINDS[kind] in words and b"supervise" not in words else []
        return found


def prepared(folder: Path, n: int) -> Path:
    """The data root of a folder, with a session for each of `n` batches."""
    root, logs = folder / "data", folder / "logs"
    if logs.exists():
        return root
    for each in range(n):
        builder = SessionBuilder(f"night-{each}")
        builder.user(f"The parser of module {each} fails on empty input: find out why.")
        for step in range(8):
            call = ToolCall("Read", {"file_path": f"{builder.cwd}/src/m{each}_{step}.py"})
            message = builder.assistant(f"Step {step} in module {each}.", [call])
            builder.result(message.tool_use_ids[0], f"def part_{step}(): # {each}\n  pass\n")
        builder.assistant("That was all.")
        builder.write(logs)
    return root


def lived(root: Path, server: TeacherServer, options: argparse.Namespace) -> Counter[str]:
    """Kill and wait; count what was killed, started, and charged."""
    chance, counts = random.Random(options.seed), Counter[str]()
    write_settings(
        root,
        ingest={"sources": [root.with_name("logs")], "max_batch_sessions": 1, "settle_s": 0},
        replay={"teachers": server.teachers(), "gates": [], "ask_at": "steps"},
    )
    work = pipeline_at(root)
    work.find_batches()
    batches = work.batches()
    unit = Unit(root)
    began = last = time.monotonic()
    end = began + 60 * options.minutes
    with dg.DagsterInstance.from_config(str(root / ".dagster")) as instance:
        known = {run.tags.get("dagster/partition") for run in instance.get_runs()}
        waiting = [batch for batch in batches if batch not in known]
        done: set[str] = set()
        while time.monotonic() < end + 60 * options.rest and len(done) < len(batches):
            time.sleep(1)
            unit.keep()
            with contextlib.suppress(OSError):
                url = sign_in(unit.log)
                while waiting:
                    launch_batch(url, waiting[0])
                    del waiting[0]
            is_time = time.monotonic() - last > chance.uniform(0.5, 1.5) * options.every
            if is_time and time.monotonic() < end and not waiting:
                last = time.monotonic()
                kind = chance.choice([*KINDS])
                if pids := unit.below(kind):
                    os.kill(chance.choice(pids), signal.SIGKILL)
                    counts[f"killed {kind}"] += 1
            done = set(instance.get_materialized_partitions(dg.AssetKey("normalized_pairs")))
    if len(done) < len(batches):  # as when the machine goes down: the next call goes on
        for pid in process_tree(unit.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    unit.process.send_signal(signal.SIGTERM)
    unit.process.wait(400)
    counts["starts of ui"] = unit.n_starts
    counts["seconds"] = round(time.monotonic() - began)
    counts["calls charged"] = server.bill().n_charged
    return counts


def main() -> None:
    """Kill, wait, and print what became of the batches."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--rest", type=float, default=20.0)
    parser.add_argument("--every", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    temporary = TemporaryDirectory(ignore_cleanup_errors=True)
    with temporary as name, TeacherServer(script=LOOK, latency=1.0) as server:
        folder = options.keep or Path(name)
        root = prepared(folder, options.batches)
        book = folder / "counts.json"
        counts = Counter(json.loads(book.read_text()) if book.exists() else {})
        counts += lived(root, server, options)
        book.write_text(json.dumps(counts))
        with dg.DagsterInstance.from_config(str(root / ".dagster")) as instance:
            done = instance.get_materialized_partitions(dg.AssetKey("normalized_pairs"))
            runs = Counter(run.status.value for run in instance.get_runs())
        work = pipeline_at(root)
        answers = work.root.read_all("teacher_actions").num_rows
        report = {
            "batches": len(work.batches()), "green": len(done), **counts, "runs": dict(runs),
            "calls charged and lost with a killed run": counts["calls charged"] - answers,
        }  # fmt: skip
    sys.stdout.write(json.dumps(report, indent=1) + "\n")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
