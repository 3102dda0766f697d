"""Dagster may stop the paid step at any moment; no paid answer is lost."""

import signal
from pathlib import Path

import dagster as dg
import pytest

from replay_pipeline.assets.instance import prepare_home
from replay_pipeline.replay import ledger_status
from replay_pipeline.testing.sample import ANSWERS_FILE
from tests.integration.processes import materialize, wait_until
from tests.roots import PROJECT, pipeline_at, served_root
from tests.support.teachers import TeacherServer

pytestmark = pytest.mark.slow


def test_a_step_that_is_stopped_keeps_every_answer_that_was_charged(tmp_path: Path):
    root = tmp_path / "data"
    with TeacherServer(ANSWERS_FILE, latency={"median_s": 0.1, "p95_s": 0.3}) as server:
        (batch,) = served_root(root, server, sessions=PROJECT).ingest_new()
        with dg.DagsterInstance.from_config(str(prepare_home(root))) as instance:
            instance.add_dynamic_partitions("trace_batch", [batch])
        process = materialize(root, "teacher_actions", batch=batch)
        wait_until(lambda: server.bill().n_charged >= 20, process)
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        bill = server.bill()
        status = ledger_status(root / "ledger.sqlite")
        assert status.calls.get("answered") == bill.n_charged
        assert status.unknown_usd == 0
        assert round(status.spent_usd * 1e9) == bill.total_nano

        again = pipeline_at(root).replay(batch)
        final = server.bill()
        assert again.report["is_complete"]
        assert bill.n_charged < final.n_charged / 2
        assert final.n_duplicates == 0
        assert round(ledger_status(root / "ledger.sqlite").spent_usd * 1e9) == final.total_nano
