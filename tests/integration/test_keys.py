"""No key is in anything that is left behind: files, tables, databases, logs, errors, output."""

import contextlib
import gzip
import json
import sqlite3
import subprocess
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from replay_pipeline.assets.instance import prepare_home
from replay_pipeline.settings import Settings, config_dir
from replay_pipeline.storage.processes import child_environment
from replay_pipeline.storage.trust import host_of, trust_host
from replay_pipeline.testing.sample import ANSWERS_FILE
from replay_pipeline.types import TeacherSpec
from tests.loopback import LoopbackServer, webhook
from tests.roots import PROJECT
from tests.support.forked import forked, forked_python
from tests.support.settings_files import write_settings
from tests.support.teachers import TeacherServer

pytestmark = pytest.mark.slow

KEYS = {
    "TEACHER_KEY": "planted-teacher-8f3b1c9d77e2",
    "ECHO_KEY": "planted-echo-5a9e0d4c21b6",
    "HF_TOKEN": "hf_plantedHubToken0123456789abcdef",
    "OPENROUTER_API_KEY": "sk-or-v1-planted-0123456789abcdef",
    "REPLAY_SALT": "planted-salt-44c1",
}


class Echo(LoopbackServer):
    """An endpoint that repeats in its errors what it was sent, key included."""

    def serve(self, request: Any, body: bytes) -> None:
        sent = request.headers.get("authorization", "")
        message = f"the key {sent.removeprefix('Bearer ')} ({sent!r}) is not known here"
        status = 401 if body else 404
        error = json.dumps({"error": {"code": status, "message": message}}).encode()
        request.send_response_only(status, message)
        request.send_header("content-length", str(len(error)))
        request.send_header("x-sent", sent)
        request.end_headers()
        request.wfile.write(error)


def everything(folder: Path) -> Iterator[tuple[str, bytes]]:
    """The bytes of every file, and what is packed inside: tables, databases, compressed cells."""
    for path in sorted(folder.rglob("*")):
        if not path.is_file():
            continue
        data = path.read_bytes()
        yield str(path), data
        if path.suffix == ".parquet":
            table = pq.read_table(path, partitioning=None)
            yield f"{path} rows", json.dumps(table.to_pylist(), default=str).encode()
            yield f"{path} schema", str(table.schema.metadata).encode()
        elif data.startswith(b"SQLite format 3"):
            yield from cells(path)
        elif data.startswith(b"\x1f\x8b"):
            yield f"{path} unpacked", gzip.decompress(data)


def cells(path: Path) -> Iterator[tuple[str, bytes]]:
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        tables = database.execute("select name from sqlite_master where type = 'table'").fetchall()
        for (name,) in tables:
            for row in database.execute(f'select * from "{name}"'):
                for cell in row:
                    data = cell if isinstance(cell, bytes) else str(cell).encode()
                    with contextlib.suppress(zlib.error):
                        data = zlib.decompress(data)
                    yield f"{path} {name}", data


def planted_in(places) -> list[tuple[str, str]]:
    return [
        (where, name)
        for where, data in places
        for name, key in KEYS.items()
        if key.encode() in data or key.encode().hex().encode() in data
    ]


def name_teachers(root: Path, teachers: Sequence[TeacherSpec]) -> None:
    ingest = {"sources": [PROJECT], "settle_s": 0}
    write_settings(root, ingest=ingest, replay={"teachers": teachers})


@pytest.fixture
def world(tmp_path) -> Iterator[tuple[Path, dict[str, str]]]:
    """A data root with two honest teachers, and one that repeats the key in its errors."""
    root = tmp_path / "data"
    with TeacherServer(ANSWERS_FILE, key=KEYS["TEACHER_KEY"]) as server, Echo() as echo:
        url = f"{echo.url}/v1"
        honest = [
            spec.model_copy(update={"api_key_env": "TEACHER_KEY"}) for spec in server.teachers()[:2]
        ]
        echoing = TeacherSpec(
            name="echo", model="z-ai/glm-4.6", base_url=url, api_key_env="ECHO_KEY",
            dialect="openrouter", price={"prompt": 1e-6, "completion": 1e-6},
        )  # fmt: skip
        name_teachers(root, [*honest, echoing])
        for place, key in ((server.base_url, "TEACHER_KEY"), (url, "ECHO_KEY")):
            trust_host(host_of(place), key=key, folder=config_dir())
        yield (
            root,
            child_environment(
                **KEYS, REPLAY_DATA=str(root), DAGSTER_HOME=str(root / ".dagster"), COLUMNS="200"
            ),
        )


def run(command: list[str], environment: dict[str, str], expected: int | None = 0) -> bytes:
    done = subprocess.run(
        forked([sys.executable, *command], children=forked_python()),
        env=environment,
        capture_output=True,
        timeout=400,
    )
    assert expected is None or done.returncode == expected, done.stdout + done.stderr
    return done.stdout + done.stderr


CLI = ["-c", "from replay_pipeline.cli import main; main()"]
DAGSTER = ["-m", "dagster", "asset", "materialize", "-m", "replay_pipeline.assets.definitions", "--select"]  # fmt: skip


def with_dagster(root: Path, environment: dict[str, str]) -> str:
    """Prepare Dagster's home of a data root; returns its first batch."""
    prepare_home(root)
    run([*CLI, "ui", "--no-serve"], environment)
    return next((root / "states").iterdir()).name.removeprefix("trace_batch=")


def test_a_whole_run_leaves_no_key_in_anything_that_it_leaves(world):
    root, environment = world
    shown = {
        "ingest": run([*CLI, "-v", "ingest"], environment),
        "teachers": run([*CLI, "teachers", "list"], environment),
        "replay": run([*CLI, "-v", "replay", "--yes"], environment, expected=None),
    }
    batch = with_dagster(root, environment)
    assets = "trace_states,teacher_actions,dpo_pairs,normalized_pairs"
    shown["dagster"] = run([*DAGSTER, assets, "--partition", batch], environment)
    shown["publish"] = run([*DAGSTER, "published_dataset"], environment)
    shown["look"] = run([*CLI, "look"], environment)
    shown["status"] = run([*CLI, "status", "--json"], environment)
    shown["doctor"] = run([*CLI, "doctor", "--json"], environment, expected=None)
    left = list(everything(root))
    kinds = {Path(where.split()[0]).suffix for where, _ in left}
    assert {".parquet", ".sqlite", ".db", ".html", ".md", ".json", ".yaml"} <= kinds
    answers = b"".join(data for where, data in left if "teacher_actions" in where)
    assert b"is not known here" in answers  # the endpoint did repeat what it was sent
    assert b"deepseek" in answers
    assert b"state_id" in b"".join(data for where, data in left if where.endswith("rows"))
    assert planted_in(left) == []
    assert planted_in(shown.items()) == []


def test_a_run_that_fails_leaves_no_key_in_its_error(world):
    root, environment = world
    name_teachers(root, Settings.load(data_dir=root).replay.teachers[-1:])
    run([*CLI, "ingest"], environment)
    batch = with_dagster(root, environment)
    step = [*DAGSTER, "teacher_actions", "--partition", batch]
    shown = {
        "cli": run([*CLI, "-v", "replay", "--yes"], environment, expected=1),
        "dagster": run(step, environment, expected=1),
    }
    assert b"no teacher could be asked" in shown["cli"]
    left = list(everything(root))
    assert any(b"no teacher could be asked" in data for _, data in left)
    assert planted_in(left) == []
    assert planted_in(shown.items()) == []


TELL = """
import dagster as dg
from replay_pipeline.assets.automation import notify_failures
from replay_pipeline.assets.resources import PipelineResource
with dg.DagsterInstance.get() as instance:
    (run,) = instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.FAILURE]))
    logs = instance.all_logs(run.run_id, of_type=dg.DagsterEventType.RUN_FAILURE)
    context = dg.build_run_status_sensor_context(
        "notify_failures",
        dagster_event=logs[-1].get_dagster_event(),
        dagster_instance=instance,
        dagster_run=run,
    )
    notify_failures(context.for_run_failure(), pipeline=PipelineResource())
"""


def test_a_webhook_is_told_of_a_failure_without_the_keys_that_are_in_its_error(world):
    root, environment = world
    (root / "dataset").mkdir()
    config = root.parent / "leaking.yaml"
    config.write_text(f"trl: {{{json.dumps('x' * 100 + ' '.join(KEYS.values()))}: 1}}\n")
    with webhook() as (url, heard):
        with (root / "settings.toml").open("a") as file:
            file.write(f"[train]\nconfig = '{config}'\n[notify]\nis_nightly = true\n")
        environment |= {"REPLAY_WEBHOOK": url}
        prepare_home(root)
        failed = run([*DAGSTER, "trained_model"], environment, expected=1)
        assert all(key.encode() in failed for key in KEYS.values()), "as the trainer says it"
        told = run(["-c", TELL], environment)
        told += run([*DAGSTER, "night_summary"], environment)
    failure, night = (json.dumps(each).encode() for each in heard)
    assert b"run_failed" in failure
    assert b"unknown setting trl." in failure
    assert b"<KEY>" in failure
    assert b"1 runs failed" in night
    assert planted_in([("failure", failure), ("night", night), ("told", told)]) == []
    assert not any(key[:12].encode() in failure + night for key in KEYS.values()), "nor a part"
    assert url.encode() not in failure + night + told
