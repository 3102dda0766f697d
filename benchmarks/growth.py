"""Years of nights: what a night, a look and a tick of the sensor cost beside ten thousand batches.

    python benchmarks/growth.py [--batches 10000] [--new 30] [--root DIR] [--json FILE]

The old batches are simulated: the bundled sample, a session per batch, goes through every stage for
real, and what that leaves is written again and again under other ids, with receipts, manifests and
index entries that fit. Their first publication is real, and so is the night: its sessions are new, it
is run by Dagster's own jobs in a process of its own, and played teachers answer over HTTP.

Seconds are those of the CPU, of the process and the ones it has started; memory is the peak of the
largest one. A root that was made before (`--root`) is used as it is; nights go on on a copy of it.
"""

import argparse
import hashlib
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import pyarrow as pa
import pyarrow.parquet as pq

from replay_pipeline.ingesters import list_manifests, write_manifest
from replay_pipeline.processes import python
from replay_pipeline.stages.pipeline import Pipeline
from replay_pipeline.stages.project import digest_of
from replay_pipeline.stages.receipts import Receipt
from replay_pipeline.storage.schemas import TABLES
from replay_pipeline.testing.sample import SESSIONS_DIR
from tests.roots import pipeline_at
from tests.support.sessions import SessionBuilder, ToolCall
from tests.support.settings_files import write_settings

N_A_DAY = 30
FIRST_DAY = date(2025, 1, 1)
N_LOGS_LEFT = 300
"""Logs of old batches that are still there: agents delete theirs after some weeks."""
MARKS = {"night": (60.0, 500.0), "status": (1.0, None), "tick": (0.5, None), "review": (2.0, None)}
"""Seconds of the CPU and MiB that a measure may take."""


def settings_of(root: Path, *, sources: Path) -> None:
    write_settings(
        root,
        ingest={"sources": [sources], "max_batch_sessions": 1, "settle_s": 0},
        replay={"sample_teachers": True},
    )


class Old:
    """Batches of other nights, made of those of a template."""

    def __init__(self, root: Path, template: Path) -> None:
        settings_of(template, sources=SESSIONS_DIR)
        work = pipeline_at(template)
        for batch in work.ingest_new():
            for stage in (work.replay, work.pairs, work.normalize):
                stage(batch)
        self.logs = root.with_name(f"{root.name}-logs")
        self.logs.mkdir(parents=True)
        settings_of(root, sources=self.logs)
        self.work = pipeline_at(root)
        self.template = work
        self.manifests = list_manifests(template)
        self.tables = {
            (name, batch): work.root.read(name, batch)
            for batch in work.batches()
            for name in TABLES
            if work.root.has(name, batch)
        }
        self.receipts = work.receipts.all()

    def add(self, number: int, *, has_log: bool) -> None:
        manifest = self.manifests[number % len(self.manifests)]
        day = FIRST_DAY + timedelta(days=number // N_A_DAY)
        key = f"{day}-{number % N_A_DAY + 1:04d}-{_hash(str(number), 3)}"
        self._manifest(manifest, key, has_log=has_log)
        root = self.work.root
        outputs: dict[str, str] = {}
        for (name, batch), table in self.tables.items():
            if batch == manifest.key:
                outputs[name] = digest_of(root.write(name, key, _renamed(table, key)))
        for receipt in self.receipts:
            if receipt.batch == manifest.key:
                self._receipt(receipt, key, outputs)

    def _manifest(self, manifest: Any, key: str, *, has_log: bool) -> None:
        slices, cursors = [], []
        for source, cursor in zip(manifest.slices, manifest.cursors, strict=True):
            path = self.logs / "projects" / key[:10] / key / source.path.name
            tail = _hash(f"{key}{path.name}", 8)
            if has_log:
                path.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source.path, path)
                tail, stat = cursor.tail_sha, path.stat()
                cursor = replace(cursor, size_bytes=stat.st_size, mtime_ns=stat.st_mtime_ns)
            slices.append(replace(source, path=path))
            cursors.append(replace(cursor, path=path, tail_sha=tail))
        made = replace(manifest, key=key, slices=tuple(slices), cursors=tuple(cursors))
        write_manifest(made, self.work.root.path)

    def _receipt(self, receipt: Receipt, key: str, outputs: dict[str, str]) -> None:
        root = self.work.root.path
        files = {}
        for name in receipt.files:
            made = name.replace(receipt.batch, key)
            if not name.startswith(("batches/", "sources/")):
                (root / made).parent.mkdir(parents=True, exist_ok=True)
                source = self.template.root.path / name
                if name.startswith("dedup/"):
                    _other_keys(source, root / made, key)
                else:
                    shutil.copy(source, root / made)
            if (root / made).exists():
                files[made] = digest_of(root / made)
        self.work.receipts.amend(
            replace(
                receipt,
                batch=key,
                inputs={name: outputs[name] for name in receipt.inputs},
                outputs={name: outputs[name] for name in receipt.outputs},
                files=files,
            )
        )


def _hash(text: str, n_bytes: int) -> str:
    return hashlib.blake2b(text.encode(), digest_size=n_bytes).hexdigest()


def _renamed(table: pa.Table, key: str) -> pa.Table:
    """The same rows under ids of another batch, as long as they were."""
    for name in ("state_id", "session_id", "parent_session_id"):
        if name in table.column_names:
            ids = [
                value and value[:4] + _hash(value + key, 20)[: len(value) - 4]
                for value in table[name].to_pylist()
            ]
            place = table.column_names.index(name)
            table = table.set_column(place, name, pa.array(ids, table.schema.field(name).type))
    return table


def _other_keys(source: Path, target: Path, key: str) -> None:
    table = pq.read_table(source)
    keys = [
        hashlib.blake2b(k + key.encode(), digest_size=len(k)).digest()
        for k in table["key"].to_pylist()
    ]
    pq.write_table(
        table.set_column(1, "key", pa.array(keys, pa.binary())), target, compression="zstd"
    )


def make(root: Path, n_batches: int) -> None:
    """Make a root with so many batches, and publish them."""
    with tempfile.TemporaryDirectory() as folder:
        old = Old(root, Path(folder) / "template")
        for number in range(n_batches):
            old.add(number, has_log=number >= n_batches - N_LOGS_LEFT)
            if number % 1000 == 999:
                print(f"{number + 1} batches", file=sys.stderr)
    with measured("first publication") as figures:
        Pipeline(old.work.settings).publish()
    print(figures, file=sys.stderr)


# One thing each, in a process of its own


@contextmanager
def measured(name: str) -> Iterator[dict[str, Any]]:
    figures: dict[str, Any] = {"name": name}
    before, began = _cpu_s(), time.perf_counter()
    yield figures
    figures["cpu_s"] = round(_cpu_s() - before, 2)
    figures["wall_s"] = round(time.perf_counter() - began, 2)
    who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    figures["peak_mib"] = round(max(resource.getrusage(one).ru_maxrss for one in who) / 1024)


def _cpu_s() -> float:
    who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(u.ru_utime + u.ru_stime for u in map(resource.getrusage, who))


def new_sessions(folder: Path, n: int) -> None:
    """Sessions of today, unlike each other and all before."""
    for number in range(n):
        builder = SessionBuilder(f"growth-{number}-{time.time_ns()}")
        builder.user(f"The parser of module {number} fails on empty input: find out why.")
        for step in range(8):
            call = ToolCall("Read", {"file_path": f"{builder.cwd}/src/m{number}_{step}.py"})
            message = builder.assistant(f"Step {step} in module {number}.", [call])
            builder.result(message.tool_use_ids[0], f"def part_{step}(): # {number}\n  pass\n")
        builder.assistant("That was all.")
        builder.write(folder)


def tick(root: Path) -> None:
    """Twice in one process, as in Dagster's code server; the second is what every minute costs."""
    import dagster as dg

    from replay_pipeline.assets.automation import new_sessions as sensor
    from replay_pipeline.orchestration.resources import PipelineResource

    def evaluate() -> Any:
        context = dg.build_sensor_context(instance=instance)
        return sensor(context, pipeline=PipelineResource(settings_file=""))

    with dg.instance_for_test() as instance:
        instance.add_dynamic_partitions("trace_batch", pipeline_at(root).batches())
        with measured("first tick") as first:
            evaluate()
        with measured("tick") as second:
            evaluate()
    print(json.dumps([first, second]))


def status(root: Path) -> None:
    _command("status", "status", "--data", str(root), "--json")


def review(root: Path) -> None:
    _command("review", "review", "--data", str(root))


def verify(root: Path) -> None:
    _command("verify", "verify", "--data", str(root), "--json")


def _command(name: str, *arguments: str) -> None:
    with measured(name) as figures:
        done = subprocess.run(
            python("replay_pipeline.cli", *arguments), stdout=subprocess.PIPE, check=True
        )
    figures["n_bytes"] = len(done.stdout)
    print(json.dumps([figures]))


def night(root: Path) -> None:
    """The jobs of a night, as Dagster's daemon runs them: find, replay, publish, sum up."""

    from replay_pipeline.orchestration.instance import open_instance

    work = pipeline_at(root)
    with open_instance(work) as instance:
        old = work.batches()
        instance.add_dynamic_partitions("trace_batch", old)
    print(json.dumps([{"old": len(old)}]))


MEASURES: dict[str, Callable[[Path], None]] = {
    "status": status, "tick": tick, "review": review, "verify": verify, "night": night,
}  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=10_000)
    parser.add_argument("--root", type=Path)
    options = parser.parse_args()
    make(options.root, options.batches)
