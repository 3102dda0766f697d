from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from dagster import (
    AssetKey,
    AssetMaterialization,
    DagsterInstance,
    DagsterRunStatus,
    build_schedule_context,
    build_sensor_context,
    instance_for_test,
)
from dagster._core.test_utils import create_run_for_test
from hypothesis import given
from hypothesis import strategies as st

from replay_pipeline.assets import verdicts
from replay_pipeline.assets.automation import missing_ranges, night_goes_on
from replay_pipeline.assets.code_location import define
from replay_pipeline.assets.resources import PipelineResource
from replay_pipeline.stages import chain
from replay_pipeline.stages.chain import STAGES
from tests.roots import project_root
from tests.support.settings_files import write_settings

KEYS = [f"k{i:02d}" for i in range(12)]


def test_a_range_is_never_longer_than_allowed():
    assert missing_ranges(KEYS[:5], set(), max_batches=2) == [
        ("k00", "k01"),
        ("k02", "k03"),
        ("k04", "k04"),
    ]


@given(st.sets(st.sampled_from(KEYS)), st.integers(1, 5))
def test_ranges_cover_the_missing_batches_once(done, most):
    covered = [
        key
        for first, last in missing_ranges(KEYS, done, max_batches=most)
        for key in KEYS[KEYS.index(first) : KEYS.index(last) + 1]
    ]
    assert covered == [key for key in KEYS if key not in done]


@pytest.mark.slow
def test_dagster_knows_the_code_and_the_settings_of_every_stage(tmp_path, monkeypatch):
    monkeypatch.setenv("REPLAY_DATA", str(tmp_path))

    def versions(**changes: Any) -> dict[str, str | None]:
        write_settings(tmp_path, **changes)
        # Loading asks the newest instance of this process, which another test may have left closed.
        with DagsterInstance.ephemeral():
            graph = define(PipelineResource()).resolve_asset_graph()
        wanted = STAGES
        return {stage.name: graph.get(AssetKey(stage.asset)).code_version for stage in wanted}

    def other(**changes: Any) -> set[str]:
        return {stage for stage, version in versions(**changes).items() if version != plain[stage]}

    plain = versions()
    assert all(plain.values())
    assert other() == set()
    assert other(pairs={"include_natural": False}) == {"pairs"}
    assert other(pairs={"level": "tool"}) == {"replay", "pairs"}  # by it a gate rules pairs out
    assert other(pairs={"level": "tool"}, replay={"gates": []}) == {"replay", "pairs"}
    assert other(normalize={"recipe": "strict"}) == {"normalize"}
    assert other(replay={"max_total_usd": 3.0}) == set()
    assert other(publish={"test_fraction": 0.3}) == {"publish"}
    raised = [replace(s, version=9) if s.name == "pairs" else s for s in STAGES]
    monkeypatch.setattr(chain, "STAGES", raised)
    assert other() == {"pairs"}


def test_the_night_begins_when_the_settings_say(tmp_path, monkeypatch):
    monkeypatch.setenv("REPLAY_DATA", str(tmp_path))
    write_settings(
        tmp_path,
        night={"time_zone": "Asia/Kolkata", "replays_at": "23:05"},
    )
    found = {
        schedule.name: (schedule.cron_schedule, schedule.execution_timezone)
        for schedule in define(PipelineResource()).schedules or ()
    }
    assert found == {
        "nightly_replay": ("5 23 * * *", "Asia/Kolkata"),
        "monthly_verdicts": ("0 6 1 * *", None),
    }


@pytest.mark.slow
def test_each_model_of_the_settings_gets_its_verdict_as_a_partition(tmp_path, monkeypatch):
    root = tmp_path / "data"
    project_root(root, ask_at="consequences", judged_models=["deepseek"]).ingest_new()
    monkeypatch.setenv("REPLAY_DATA", str(root))
    pipeline = PipelineResource()
    told: list[tuple[str, str]] = []
    monkeypatch.setattr(verdicts, "notify", lambda _, event, text, __: told.append((event, text)))
    with instance_for_test() as instance:
        context = build_schedule_context(
            instance=instance, scheduled_execution_time=datetime(2026, 3, 1, 6, tzinfo=UTC)
        )
        [request] = verdicts.monthly_verdicts(context, pipeline=pipeline)
        assert instance.get_dynamic_partitions("judged_model") == [request.partition_key]
        done = (
            define(pipeline)
            .resolve_job_def("judge_models")
            .execute_in_process(instance=instance, partition_key=request.partition_key)
        )
        [made] = done.asset_materializations_for_node("verdicts")
    facts = {name: value.value for name, value in made.metadata.items()}
    assert facts["answer"] in ("could", "could not", "can't tell")
    assert facts["n"] >= 30
    assert told == [("verdict", facts["words"])]


@pytest.mark.slow
def test_publishing_and_the_summary_follow_the_end_of_all_replays_of_the_night():
    def asked(instance: DagsterInstance) -> list[str]:
        requests = night_goes_on(build_sensor_context(instance=instance))
        return [str(each.run_key) for each in requests] if isinstance(requests, list) else []

    def run(instance: DagsterInstance, job: str, status: DagsterRunStatus, **tags: str) -> str:
        named = {f"dagster/{name}": value for name, value in tags.items()}
        return create_run_for_test(instance, job_name=job, status=status, tags=named).run_id

    with instance_for_test() as instance:
        assert asked(instance) == []
        by_night = {"schedule_name": "nightly_replay"}
        failed = run(instance, "replay_batches", DagsterRunStatus.FAILURE, **by_night)
        assert asked(instance) == [f"summarize_night:{failed}"], "nothing was ever made"
        pairs = AssetMaterialization("normalized_pairs", partition="k00")
        instance.report_runless_asset_event(pairs)
        assert asked(instance) == [f"publish:{failed}"]
        second = run(instance, "replay_batches", DagsterRunStatus.STARTED, **by_night)
        assert asked(instance) == []  # one of two is not over
        instance.delete_run(second)
        last = run(instance, "replay_batches", DagsterRunStatus.SUCCESS, **by_night)
        assert asked(instance) == [f"publish:{last}"]
        run(instance, "publish", DagsterRunStatus.SUCCESS, run_key=f"publish:{last}")
        assert asked(instance) == [f"summarize_night:{last}"]
        run(
            instance, "summarize_night", DagsterRunStatus.SUCCESS, run_key=f"summarize_night:{last}"
        )
        assert asked(instance) == []
        # Runs by hand are nobody's night.
        run(instance, "replay_batches", DagsterRunStatus.SUCCESS)
        assert asked(instance) == []
