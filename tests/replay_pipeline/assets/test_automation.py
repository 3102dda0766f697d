from dagster import AssetKey, DagsterInstance
from hypothesis import given
from hypothesis import strategies as st

from replay_pipeline.assets.automation import missing_ranges
from replay_pipeline.assets.code_location import define
from replay_pipeline.assets.records import _ASSETS
from replay_pipeline.definitions import defs
from replay_pipeline.orchestration.resources import PipelineResource
from replay_pipeline.stages.versions import code_version
from tests.support.settings_files import write_settings

KEYS = [f"k{i:02d}" for i in range(12)]


def test_neighbours_become_one_range():
    assert missing_ranges(KEYS[:6], {"k02"}, max_batches=10) == [("k00", "k01"), ("k03", "k05")]


def test_a_range_is_never_longer_than_allowed():
    assert missing_ranges(KEYS[:5], set(), max_batches=2) == [
        ("k00", "k01"),
        ("k02", "k03"),
        ("k04", "k04"),
    ]


def test_nothing_missing_gives_no_range():
    assert missing_ranges(KEYS, set(KEYS), max_batches=2) == []
    assert missing_ranges([], set(), max_batches=2) == []


@given(st.sets(st.sampled_from(KEYS)), st.integers(1, 5))
def test_ranges_cover_the_missing_batches_once(done, most):
    covered = [
        key
        for first, last in missing_ranges(KEYS, done, max_batches=most)
        for key in KEYS[KEYS.index(first) : KEYS.index(last) + 1]
    ]
    assert covered == [key for key in KEYS if key not in done]


def test_dagster_knows_the_version_of_every_stage_that_has_one():
    # Loading asks the newest instance of this process, which another test may have left closed.
    with DagsterInstance.ephemeral():
        graph = defs.resolve_asset_graph()
    for stage, (name, _) in _ASSETS.items():
        assert graph.get(AssetKey(name)).code_version == code_version(stage), stage
    assert code_version("pairs")


def test_the_night_begins_when_the_settings_say(tmp_path, monkeypatch):
    monkeypatch.setenv("REPLAY_DATA", str(tmp_path))
    write_settings(tmp_path, night={"time_zone": "Asia/Kolkata", "replays_at": "23:05"})
    found = {
        schedule.name: (schedule.cron_schedule, schedule.execution_timezone)
        for schedule in define(PipelineResource()).schedules or ()
    }
    assert found == {
        "nightly_replay": ("5 23 * * *", "Asia/Kolkata"),
        "nightly_publish": ("0 5 * * *", "Asia/Kolkata"),
        "nightly_summary": ("0 6 * * *", "Asia/Kolkata"),
    }
