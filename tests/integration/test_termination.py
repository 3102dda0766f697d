"""Dagster may stop the paid step at any moment; no paid answer is lost."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import dagster as dg
import pytest

from replay_pipeline.instance import prepare_home
from replay_pipeline.pipeline import Pipeline
from replay_pipeline.replay import ledger_status
from replay_pipeline.sample import ANSWERS_FILE, SESSIONS_DIR
from replay_pipeline.settings import Settings, child_environment
from replay_pipeline.testing import TeacherServer

pytestmark = pytest.mark.slow


def settings_text(server: TeacherServer) -> str:
    lines = ["[ingest]", f"sources = [{json.dumps(str(SESSIONS_DIR))}]"]
    for teacher in server.teachers():
        lines += [
            "[[replay.teachers]]",
            f"name = '{teacher.name}'",
            f"model = '{teacher.model}'",
            f"base_url = '{teacher.base_url}'",
            "api_key_env = ''",
            "dialect = 'openrouter'",
        ]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "terminate"])
def test_a_step_that_is_stopped_keeps_every_answer_that_was_charged(tmp_path: Path, sent):
    root = tmp_path / "data"
    root.mkdir()
    with TeacherServer(ANSWERS_FILE, latency={"median_s": 0.6, "p95_s": 1.5}) as server:
        (root / "settings.toml").write_text(settings_text(server))
        (batch,) = Pipeline(Settings.load(data_dir=root)).ingest_new()
        home = prepare_home(root)
        with dg.DagsterInstance.from_config(str(home)) as instance:
            instance.add_dynamic_partitions("trace_batch", [batch])
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "dagster"),
                *("asset", "materialize", "--select", "teacher_actions"),
                *("--partition", batch, "-m", "replay_pipeline.definitions"),
            ],
            env=child_environment(DAGSTER_HOME=str(home), REPLAY_DATA=str(root)),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 120
        while server.bill().n_charged < 20:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(sent)
        process.wait(60)
        bill = server.bill()
        status = ledger_status(root / "ledger.sqlite")
        assert bill.n_charged < 87 * 3
        assert status.calls.get("answered") == bill.n_charged
        assert status.unknown_usd == 0
        assert round(status.spent_usd * 1e9) == bill.total_nano

        again = Pipeline(Settings.load(data_dir=root)).replay(batch)
        final = server.bill()
        assert again.report["is_complete"]
        assert final.n_duplicates == 0
        assert round(ledger_status(root / "ledger.sqlite").spent_usd * 1e9) == final.total_nano
