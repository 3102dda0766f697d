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
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import pyarrow as pa
import pyarrow.parquet as pq

from replay_pipeline.publish.batch_facts import encode
from replay_pipeline.stages.budget.sharing import fitting
from replay_pipeline.stages.budget.spending import completed_batches
from replay_pipeline.stages.project import file_digest
from replay_pipeline.stages.receipts import Receipt
from replay_pipeline.stages.views.summary import night_of
from replay_pipeline.storage.processes import python
from replay_pipeline.testing.sample import SESSIONS_DIR
from tests.roots import pipeline_at
from tests.support.sessions import SessionBuilder, ToolCall
from tests.support.settings_files import write_settings

N_A_DAY = 30
FIRST_DAY = date(2025, 1, 1)
N_LOGS_LEFT = 300
"""Logs of old batches that are still there: agents delete theirs after some weeks."""
MARKS = {"night": (60.0, 500.0), "status": (1.0, None), "tick": (0.5, None), "look": (None, None)}
"""Seconds of the CPU and MiB that a measure may take."""


def settings_of(root: Path, *, sources: Path) -> None:
    write_settings(
        root,
        ingest={"sources": [sources], "max_batch_sessions": 1, "settle_s": 0},
        replay={"sample_teachers": True, "ask_at": "steps"},
    )


class Old:
    """Batches of other nights, made of those of a template that went through every stage."""

    def __init__(self, root: Path, template: Path) -> None:
        settings_of(template, sources=SESSIONS_DIR)
        work = self.template = pipeline_at(template)
        for batch in work.ingest_new():
            for stage in (work.replay, work.pairs, work.normalize):
                stage(batch)
        work.publish()
        self.logs = root.with_name(f"{root.name}-logs")
        self.logs.mkdir(parents=True)
        settings_of(root, sources=self.logs)
        self.root = root
        self.manifests = work.manifests()
        self.receipts = [r for r in work.receipts.all() if r.batch != "all"]
        self.files = sorted(path for path in template.rglob("*") if path.is_file())
        for path in self.files:
            if path.name in ("README.md", "_card.json", "sample-ledger.sqlite"):
                _placed(root / path.relative_to(template), path.read_bytes())

    def add(self, number: int, *, has_log: bool) -> None:
        """One more batch: its states and the keys of its pairs are its own, the rest is shared."""
        manifest = self.manifests[number % len(self.manifests)]
        day = FIRST_DAY + timedelta(days=number // N_A_DAY)
        key = f"{day}-{number % N_A_DAY + 1:04d}-{_hash(str(number), 3)}"
        self._manifest(manifest, key, has_log=has_log)
        for path in self.files:
            name = path.relative_to(self.template.root.path).as_posix()
            top = name.partition("/")[0]
            if manifest.key not in name or top in ("batches", "receipts"):
                continue
            target = self.root / name.replace(manifest.key, key)
            if top == "states":
                target.parent.mkdir(parents=True, exist_ok=True)
                pq.write_table(
                    _renamed(pq.ParquetFile(path).read(), key), target, compression="zstd"
                )
            elif top == "dedup":
                _other_keys(path, target, key)
            elif name.startswith("dataset/manifests/"):
                _placed(target, self._published(path, manifest.key, key))
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.hardlink_to(path)
        for receipt in self.receipts:
            if receipt.batch == manifest.key:
                self._receipt(receipt, key)

    def _manifest(self, manifest: Any, key: str, *, has_log: bool) -> None:
        slices, cursors = [], []
        for source, cursor in zip(manifest.slices, manifest.cursors, strict=True):
            path = self.logs / "projects" / key[:10] / key / source.path.name
            changes: dict[str, Any] = {"tail_sha": _hash(f"{key}{path.name}", 8)}
            if has_log:
                path.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source.path, path)
                stat = path.stat()
                changes = {"size_bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}
            slices.append(replace(source, path=path))
            cursors.append(replace(cursor, path=path, **changes))
        made = replace(manifest, key=key, slices=tuple(slices), cursors=tuple(cursors))
        _placed(self.root / "batches" / f"{key}.json", made.to_json().encode())

    def _published(self, path: Path, old: str, key: str) -> bytes:
        manifest = json.loads(path.read_text().replace(old, key))
        sessions = manifest["sessions"].items()
        manifest["sessions"] = {side: [_hash(s + key, 16) for s in shas] for side, shas in sessions}
        return encode({**manifest, "pins": {}})

    def _receipt(self, receipt: Receipt, key: str) -> None:
        states = file_digest(self.root / "states" / f"trace_batch={key}" / "part-0.parquet")
        own = {"states": states}
        made = replace(
            receipt,
            batch=key,
            digest="",
            inputs=receipt.inputs | {k: v for k, v in own.items() if k in receipt.inputs},
            outputs=receipt.outputs | {k: v for k, v in own.items() if k in receipt.outputs},
            files={},
        )
        text = json.dumps(asdict(made), indent=1, sort_keys=True).encode()
        _placed(self.root / "receipts" / receipt.stage / f"{key}.json", text)

    def finish(self) -> None:
        """Say that all of it is published, and what of."""
        work = pipeline_at(self.root)
        last = self.template.receipts.read("publish", "all")
        assert last is not None
        facts = work._card_facts()
        inputs = {batch: work._published_from(batch, facts) for batch in work.batches()}
        work.receipts.write(replace(last, inputs=inputs, files={}))


def _placed(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def _hash(text: str, n_bytes: int) -> str:
    return hashlib.blake2b(text.encode(), digest_size=n_bytes).hexdigest()


def _renamed(table: pa.Table, key: str) -> pa.Table:
    """The same rows under ids of another batch, as long as they were."""
    ids = [one[:4] + _hash(one + key, 20)[: len(one) - 4] for one in table["state_id"].to_pylist()]
    return table.set_column(table.column_names.index("state_id"), "state_id", pa.array(ids))


def _other_keys(source: Path, target: Path, key: str) -> None:
    table = pq.read_table(source)
    keys = [
        hashlib.blake2b(k + key.encode(), digest_size=len(k)).digest()
        for k in table["key"].to_pylist()
    ]
    target.parent.mkdir(parents=True, exist_ok=True)
    made = table.set_column(1, "key", pa.array(keys, pa.binary()))
    pq.write_table(made, target, compression="zstd")


def make(root: Path, n_batches: int) -> None:
    """Make a root with so many batches."""
    old = Old(root, root.with_name(f"{root.name}-template"))
    for number in range(n_batches):
        old.add(number, has_log=number >= n_batches - N_LOGS_LEFT)
    old.finish()


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
    from replay_pipeline.assets.resources import PipelineResource

    os.environ["REPLAY_DATA"] = str(root)

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


def look(root: Path) -> None:
    _command("look", "look", "--data", str(root))


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
    """What the jobs of a night do: each step opens the root anew, as Dagster's assets do."""
    with measured("night") as figures:
        began = datetime.now(UTC)
        new = [batch.key for batch in pipeline_at(root).find_batches()]
        work = pipeline_at(root)
        todo = sorted(set(work.batches()) - completed_batches(work))
        assert fitting(work, todo, max_total_usd=1.0) == todo == new
        for stage in ("ingest", "replay", "pairs", "normalize"):
            work = pipeline_at(root)
            for batch in new:
                getattr(work, stage)(batch)
        del work  # a step's pipeline goes with the step
        report = pipeline_at(root).publish().report
        summary = night_of(pipeline_at(root), since=began, failures=[])
    assert sorted(report["batches"]) == new
    assert summary["batches_replayed"] == len(new)
    print(json.dumps([{**figures, "n_new": len(new), "n_pairs": summary["pairs"]}]))


MEASURES: dict[str, Callable[[Path], None]] = {
    "status": status, "tick": tick, "look": look, "verify": verify, "night": night,
}  # fmt: skip


def measure(name: str, root: Path) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, __file__, "--measure", name, "--root", str(root)],
        check=True, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=10_000)
    parser.add_argument("--new", type=int, default=30)
    parser.add_argument("--root", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", choices=MEASURES)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        # Absolute: Dagster's processes have folders of their own.
        root = (options.root or Path(folder) / "root").resolve()
        # Named, its settings are used without being trusted, also below the current folder.
        os.environ["REPLAY_SETTINGS"] = str(root / "settings.toml")
        if options.measure:
            MEASURES[options.measure](root)
            return
        if not root.exists():
            make(root, options.batches)
        figures: list[dict[str, Any]] = []

        def take(name: str) -> None:
            for each in measure(name, root):
                seconds, mib = MARKS.get(each["name"], (None, None))
                each["is_within"] = (seconds is None or each["cpu_s"] <= seconds) and (
                    mib is None or each["peak_mib"] <= mib
                )
                print(json.dumps(each), flush=True)
                figures.append(each)

        for name in ("status", "status", "tick", "look", "look"):
            take(name)
        # The sample's teachers know only the sample's states.
        write_settings(
            root,
            ingest={
                "sources": [root.with_name(f"{root.name}-logs")],
                "max_batch_sessions": 1,
                "settle_s": 0,
            },
            replay={"rehearsal_teachers": True},
        )
        for _ in range(2):
            new_sessions(root.with_name(f"{root.name}-logs"), options.new)
            take("night")
        take("verify")
    if options.json:
        options.json.write_text(
            json.dumps({"batches": options.batches, "measures": figures}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
