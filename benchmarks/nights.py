"""A night under the documented unit while the daemon, web server, code server, and runs are killed.

    python benchmarks/nights.py [--batches 40] [--minutes 20] [--rest 20] [--every 20]
        [--dialect openrouter] [--keep DIR] [--json FILE]

Each batch is one session. `replay-pipeline ui` is started as the unit of `docs/deploy.md` starts it:
again whenever it ends with an exit code or by a signal. Sensor and schedules are switched on as in the
browser, and the night begins by itself. For `--minutes` from its first run on, a process of a random
kind is killed (SIGKILL) about every `--every` seconds; then the rest may finish by itself for `--rest`
minutes. A batch is green if its normalized pairs are there without anybody's hand. Played teachers
answer over HTTP and keep a bill of their own: as a router that keeps its answers, or with `--dialect
openai` as a server that charges each request. With `--keep`, the next call goes on.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parents[1]))

import dagster as dg

from replay_pipeline.stages.budget.spending import completed_batches
from tests.roots import pipeline_at
from tests.support.dagster_web import graphql, process_tree, sign_in
from tests.support.ports import free_port
from tests.support.sessions import SessionBuilder, ToolCall
from tests.support.settings_files import write_settings
from tests.support.teachers import TeacherServer

KINDS = {
    "daemon": b"dagster._daemon",
    "web server": b"replay_pipeline.assets.serve\0",
    "code server": b"code-server",
    "run": b"spawn_main",
}
"""A word in the command of each kind of process."""
LOOK = {"role": "assistant", "content": "I look first."}
AUTOMATION = {
    "Sensor": ("new_sessions", "night_goes_on"),
    "Schedule": ("nightly_replay",),
}
"""What the page says to switch on."""
_SWITCH = """
mutation On($of: {kind}Selector!) {{
  start{kind}({arg}Selector: $of) {{ __typename ... on PythonError {{ message }} }}
}}
"""


def switch_on(url: str) -> None:
    """Switch sensors and schedule on, as a click under *Automation* does.

    Raises:
        OSError: nobody answers, or the code is not served yet.
    """
    for kind, names in AUTOMATION.items():
        for name in names:
            of = {
                "repositoryLocationName": "replay_pipeline",
                "repositoryName": "__repository__",
                f"{kind.lower()}Name": name,
            }
            query = _SWITCH.format(kind=kind, arg=kind.lower())
            (answer,) = graphql(url, query, of=of).values()
            if answer["__typename"] not in ("Sensor", "ScheduleStateResult"):
                raise OSError(f"{url}: {name} was not switched on: {answer}")


class Unit:
    """`replay-pipeline ui` as systemd keeps it with `Restart=on-failure`."""

    def __init__(self, root: Path) -> None:
        self._root, self.n_starts = root, 0
        self._port = free_port()
        self.start()

    def start(self) -> None:
        """Start the unit's command."""
        self.n_starts += 1
        self.log = self._root.with_name(f"ui-{self.n_starts}.log")
        words = ["ui", "--data", str(self._root), "--port", str(self._port)]
        with self.log.open("wb") as file:
            self.process = subprocess.Popen(
                [str(Path(sys.executable).with_name("replay-pipeline")), *words],
                stdout=file, stderr=file, start_new_session=True,
            )  # fmt: skip

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
        for step in range(3):
            call = ToolCall("Read", {"file_path": f"{builder.cwd}/src/m{each}_{step}.py"})
            message = builder.assistant(f"Step {step} in module {each}.", [call])
            builder.result(message.tool_use_ids[0], f"def part_{step}(): # {each}\n  pass\n")
        builder.assistant("That was all.")
        builder.write(logs)
    return root


def lived(root: Path, server: TeacherServer, options: argparse.Namespace) -> Counter[str]:
    """Kill and wait; count what was killed and started."""
    chance, counts = random.Random(options.seed), Counter[str]()
    begins = datetime.now(UTC) + timedelta(minutes=options.begins_in)
    teachers = [
        each.model_copy(update={"timeout_s": 30.0, "dialect": options.dialect})
        for each in server.teachers()
    ]
    write_settings(
        root,
        ingest={"sources": [root.with_name("logs")], "max_batch_sessions": 1, "settle_s": 0},
        replay={
            "teachers": teachers,
            "gates": [],
            "ask_at": "steps",
            "max_nightly_usd": options.ceiling,
        },
        night={"replays_at": f"{begins:%H:%M}"},
    )
    pipeline_at(root).find_batches()  # what comes later is for the sensor, and the next night
    unit = Unit(root)
    began = last = time.monotonic()
    end, is_on, is_over = 0.0, False, False
    with contextlib.ExitStack() as stack:
        while not end or time.monotonic() < end + (0 if is_over else 60 * options.rest):
            time.sleep(1)
            unit.keep()
            if not is_on:
                with contextlib.suppress(OSError):
                    switch_on(sign_in(unit.log))
                    is_on = True
                    instance = stack.enter_context(
                        dg.DagsterInstance.from_config(str(root / ".dagster"))
                    )
                continue
            if not end and unit.below("run"):
                end = time.monotonic() + 60 * options.minutes
            is_time = time.monotonic() - last > chance.uniform(0.5, 1.5) * options.every
            if end and is_time:
                last = time.monotonic()
                is_over = is_morning(instance)
                kind = chance.choice([*KINDS])
                if time.monotonic() < end and (pids := unit.below(kind)):
                    os.kill(chance.choice(pids), signal.SIGKILL)
                    counts[f"killed {kind}"] += 1
    if not is_over:  # as when the machine goes down: the next call goes on
        for pid in process_tree(unit.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    unit.process.send_signal(signal.SIGTERM)
    unit.process.wait(400)
    counts["starts of ui"] = unit.n_starts
    counts["seconds"] = round(time.monotonic() - began)
    return counts


def is_morning(instance: dg.DagsterInstance) -> bool:
    """Whether the night has been summed up."""
    return instance.get_latest_materialization_event(dg.AssetKey("night_summary")) is not None


def settled(root: Path) -> dict[str, float]:
    """What the ledger says: dollars spent and unknown, and questions with more than one answer."""
    with contextlib.closing(sqlite3.connect(root / "ledger.sqlite")) as ledger:
        ((answered,),) = ledger.execute("select count(*) from calls where state = 'answered'")
        ((spent, unknown),) = ledger.execute(
            "select total(cost), total(case when state = 'unknown' then reserved end) from calls"
        )
        twice = ledger.execute(
            "select request_sha from calls where state = 'answered' group by 1 having count(*) > 1"
        ).fetchall()
    return {
        "answers in the ledger": answered, "of them to a question that had one": len(twice),
        "spent by the ledger, USD": spent / 1e9, "unknown by the ledger, USD": unknown / 1e9,
    }  # fmt: skip


def main() -> None:
    """Kill, wait, and print what became of the batches."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--rest", type=float, default=20.0)
    parser.add_argument("--every", type=float, default=20.0)
    parser.add_argument("--begins-in", type=float, default=3.0, help="minutes until the night")
    parser.add_argument("--latency", type=float, default=1.0, help="seconds a call")
    parser.add_argument("--ceiling", type=float, default=8.0, help="dollars of the night")
    parser.add_argument("--dialect", default="openrouter", choices=["openrouter", "openai"])
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    temporary = TemporaryDirectory(ignore_cleanup_errors=True)
    with temporary as name, TeacherServer(script=LOOK, latency=options.latency) as server:
        folder = options.keep or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        root = prepared(folder, options.batches)
        book = folder / "counts.json"
        counts = Counter(json.loads(book.read_text()) if book.exists() else {})
        counts += lived(root, server, options)
        bill = server.bill()
        counts += Counter({"calls charged": bill.n_charged, "of them a second time": bill.n_duplicates,
                           "nano-dollars charged": bill.total_nano})  # fmt: skip
        book.write_text(json.dumps(counts))
        with dg.DagsterInstance.from_config(str(root / ".dagster")) as instance:
            done = instance.get_materialized_partitions(dg.AssetKey("normalized_pairs"))
            runs = Counter(f"{run.job_name} {run.status.value}" for run in instance.get_runs())
        work = pipeline_at(root)
        report = {
            "batches": len(work.batches()), "green": len(done),
            "without an open question": len(completed_batches(work)),
            **counts, "runs": dict(runs), **settled(root),
        }  # fmt: skip
    sys.stdout.write(json.dumps(report, indent=1) + "\n")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
