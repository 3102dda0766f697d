"""What Dagster itself calls stale is what the pipeline would do again."""

import shutil
from collections.abc import Callable
from pathlib import Path

import dagster as dg
import pytest
from dagster._core.definitions.data_version import CachingStaleStatusResolver
from dagster._core.loader import LoadingContextForTest

from replay_pipeline.assets.code_location import define
from replay_pipeline.assets.in_process import run_jobs
from replay_pipeline.assets.partitions import trace_batch
from replay_pipeline.assets.records import sync
from replay_pipeline.orchestration.resources import PipelineResource
from replay_pipeline.settings import Settings
from tests.integration.processes import instance_of
from tests.roots import PROJECT, Pipeline, pipeline_at, run_batches
from tests.support.settings_files import write_settings

pytestmark = pytest.mark.slow

BY_BATCH = ("trace_states", "teacher_actions", "dpo_pairs", "normalized_pairs")
RANGE = "dagster/asset_partition_range_"


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> Path:
    """A data root of three batches that has come as far as its dataset."""
    root = tmp_path_factory.mktemp("stale") / "data"
    set_up(root)
    work = pipeline_at(root)
    run_batches(work)
    work.publish()
    return root


@pytest.fixture
def root(done, tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("REPLAY_DATA", str(tmp_path / "data"))
    shutil.copytree(done, tmp_path / "data")
    set_up(tmp_path / "data")
    return tmp_path / "data"


def set_up(root: Path, **pairs: object) -> None:
    write_settings(
        root,
        ingest={
            "sources": [PROJECT],
            "max_batch_sessions": 2,
            "settle_s": 0,
        },
        replay={"sample_teachers": True},
        pairs=pairs,
    )


def other_settings(root: Path, changes: dict[str, dict[str, object]]) -> None:
    """The settings of the root with some of them changed, by section."""
    sections: dict[str, dict[str, object]] = {
        "ingest": {"sources": [PROJECT], "max_batch_sessions": 2, "settle_s": 0},
        "replay": {"sample_teachers": True},
    }
    for name, section in changes.items():
        sections[name] = sections.get(name, {}) | section
    write_settings(root, **sections)


def stale(instance: dg.DagsterInstance, batches: list[str]) -> dict[str, list[str]]:
    """The batches of each asset that Dagster finds stale, as its pages ask it."""
    graph = define(PipelineResource()).resolve_asset_graph()
    resolver = CachingStaleStatusResolver(instance, graph, LoadingContextForTest(instance))
    status: Callable[..., str] = lambda *key: resolver.get_status(*key).value  # noqa: E731
    found = {
        asset: [batch for batch in batches if status(dg.AssetKey(asset), batch) != "FRESH"]
        for asset in BY_BATCH
    }
    found["published_dataset"] = (
        [] if status(dg.AssetKey("published_dataset")) == "FRESH" else ["all"]
    )
    return {asset: which for asset, which in found.items() if which}


def materialize(instance: dg.DagsterInstance, asset: str, *batches: str) -> None:
    defs = define(PipelineResource())
    tags = {f"{RANGE}start": batches[0], f"{RANGE}end": batches[-1]} if batches else {}
    job = defs.resolve_implicit_global_asset_job_def().get_subset(
        asset_selection={dg.AssetKey(asset)}
    )
    assert job.execute_in_process(instance=instance, tags=tags).success


def test_other_settings_make_their_asset_stale_and_redoing_it_is_enough(root):
    batches = pipeline_at(root).batches()
    with instance_of(root) as instance:
        instance.add_dynamic_partitions(trace_batch.name or "", batches)
        for asset in BY_BATCH:
            materialize(instance, asset, *batches)
        materialize(instance, "published_dataset")
        assert stale(instance, batches) == {}

        set_up(root, level="exact")
        assert stale(instance, batches) == {"dpo_pairs": batches}
        first, *rest = batches
        materialize(instance, "dpo_pairs", first)
        assert stale(instance, batches) == {"dpo_pairs": rest, "normalized_pairs": [first]}
        materialize(instance, "dpo_pairs", *rest)
        assert stale(instance, batches) == {"normalized_pairs": batches}
        materialize(instance, "normalized_pairs", *batches)
        assert stale(instance, batches) == {"published_dataset": ["all"]}
        materialize(instance, "published_dataset")
        assert stale(instance, batches) == {}


def test_a_stage_that_writes_the_same_bytes_makes_nothing_after_it_stale(root):
    batches = pipeline_at(root).batches()
    with instance_of(root) as instance:
        instance.add_dynamic_partitions(trace_batch.name or "", batches)
        for asset in BY_BATCH:
            materialize(instance, asset, *batches)
        for asset in ("trace_states", "dpo_pairs"):
            materialize(instance, asset, batches[1])
        assert stale(instance, batches) == {"published_dataset": ["all"]}  # made by none of ours


def test_what_was_done_by_hand_is_as_stale_as_what_dagster_did(root):
    work = pipeline_at(root)
    batches = work.batches()
    work.publish()  # its place is another
    sync(work)
    with instance_of(root) as instance:
        assert stale(instance, batches) == {}
        set_up(root, level="exact")
        assert stale(instance, batches) == {"dpo_pairs": batches}
        again = pipeline_at(root)
        again.pairs(batches[0])
        sync(again)
        assert stale(instance, batches) == {
            "dpo_pairs": batches[1:],
            "normalized_pairs": batches[:1],
        }


ASSETS = {
    "ingest": "trace_states",
    "replay": "teacher_actions",
    "pairs": "dpo_pairs",
    "normalize": "normalized_pairs",
    "publish": "published_dataset",
}
OTHER_SETTINGS = {
    "ingest.is_redacted": ({"ingest": {"is_redacted": False}}, "True → False", ["ingest"]),
    "ingest.is_project_hashed": (
        {"ingest": {"is_project_hashed": False}}, "True → False", ["ingest"],
    ),
    "ingest.window": (
        {"ingest": {"window": "clear_tool_results:2"}},
        "full → clear_tool_results:2",
        ["replay", "pairs", "normalize", "publish"],
    ),
    "replay.gates": (
        {"replay": {"gates": ["cheap_first"]}}, "[] → ['cheap_first']", ["replay"],
    ),
    "pairs.agreement_threshold": ({"pairs": {"agreement_threshold": 3}}, "2 → 3", ["pairs"]),
    "pairs.min_p_better": ({"pairs": {"min_p_better": 0.5}}, "none → 0.5", ["pairs"]),
    "pairs.level": ({"pairs": {"level": "exact"}}, "effect → exact", ["pairs"]),
    "pairs.include_natural": (
        {"pairs": {"include_natural": False}}, "True → False", ["pairs"],
    ),
    "pairs.count_own_family": (
        {"pairs": {"count_own_family": True}}, "False → True", ["pairs"],
    ),
    "normalize.recipe": ({"normalize": {"recipe": "strict"}}, "tool_calls (", ["normalize"]),
    "publish.split_by": (
        {"publish": {"split_by": "project"}}, "conversation → project", ["publish"],
    ),
    "publish.test_fraction": ({"publish": {"test_fraction": 0.4}}, "0.25 → 0.4", ["publish"]),
    "publish.lengths": ({"publish": {"lengths": [4096]}}, "[8192] → [4096]", ["publish"]),
    "publish.teacher_logprobs": (
        {"publish": {"teacher_logprobs": True}}, "none → True", ["publish"],
    ),
}  # fmt: skip
"""By setting: the change, what the reason says of it, and the stages that are stale at once."""

SAME_BYTES = [
    {"publish": {"folder": "here/../there", "is_private": False}},
    {"replay": {"max_concurrency": 3, "max_total_usd": 7.0, "accepted_terms": []}},
    {"ingest": {"n_processes": 1, "settle_s": 3, "max_batch_bytes": 1_000_000}},
    {"normalize": {"ray_address": "elsewhere:1234"}, "train": {"stop_timeout_s": 5}},
    {"night": {"replays_at": "03:00"}, "notify": {"timeout_s": 3}},
]


def told_by_dagster(root: Path) -> dict[str, str]:
    """Why each asset has another code version, as its page says it."""
    specs = define(PipelineResource()).resolve_asset_graph().asset_nodes
    return {
        node.key.to_user_string(): node.metadata["stale because"]
        for node in specs
        if "stale because" in node.metadata
    }


@pytest.fixture(scope="module")
def shown(done, tmp_path_factory) -> Path:
    """The same root with records of all of it in Dagster."""
    root = shutil.copytree(done, tmp_path_factory.mktemp("shown") / "data")
    sync(pipeline_at(root))
    return root


@pytest.fixture
def shown_root(shown, tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("REPLAY_DATA", str(tmp_path / "data"))
    return shutil.copytree(shown, tmp_path / "data")


def do_all(root: Path) -> Pipeline:
    work = pipeline_at(root)
    run_batches(work)
    work.publish()
    sync(work)
    return pipeline_at(root)


@pytest.mark.parametrize("name", OTHER_SETTINGS)
def test_command_and_dagster_name_the_same_batches_for_the_same_reason(shown_root, name):
    root = shown_root
    changes, values, stages = OTHER_SETTINGS[name]
    batches = pipeline_at(root).batches()
    with instance_of(root) as instance:
        assert (stale(instance, batches), told_by_dagster(root)) == ({}, {})
        assert pipeline_at(root).stale()["batches"] == {}

        other_settings(root, changes)
        found = pipeline_at(root).stale()["batches"]
        by_asset: dict[str, list[str]] = {}
        for batch, row in found.items():
            for stage, reasons in row.items():
                by_asset.setdefault(ASSETS[stage], []).append(batch)
                (reason,) = reasons
                assert reason.startswith(f"{name}: ")
                assert values in reason
                told = told_by_dagster(root)[ASSETS[stage]]
                assert told.startswith(reason)
        assert by_asset == stale(instance, batches)
        assert set(by_asset) == {ASSETS[stage] for stage in stages} == set(told_by_dagster(root))

        assert do_all(root).stale()["batches"] == {}
        assert (stale(instance, batches), told_by_dagster(root)) == ({}, {})


@pytest.mark.parametrize("changes", SAME_BYTES, ids=lambda changes: ", ".join(changes))
def test_settings_that_change_no_byte_make_nothing_stale(shown_root, changes):
    root = shown_root
    batches = pipeline_at(root).batches()
    if "publish" in changes:
        changes["publish"]["folder"] = str(root / ".." / root.name / "dataset")
    other_settings(root, changes)
    with instance_of(root) as instance:
        assert pipeline_at(root).stale()["batches"] == {}
        assert (stale(instance, batches), told_by_dagster(root)) == ({}, {})


def test_what_is_made_in_this_process_bears_the_versions_of_its_own_settings(
    done, tmp_path, monkeypatch
):
    """By a relative path, under settings that the environment does not name, as a demo is."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("REPLAY_DATA", raising=False)
    root = shutil.copytree(done, tmp_path / "demo")
    work = Pipeline(Settings.load(Path("demo/settings.toml"), data_dir=Path("demo")))
    monkeypatch.setattr("replay_pipeline.assets.in_process.JOBS", ("replay_batches", "publish"))
    run_jobs(work)
    monkeypatch.setenv("REPLAY_DATA", str(root))
    monkeypatch.setenv("REPLAY_SETTINGS", str(root / "settings.toml"))
    with instance_of(root) as instance:
        assert stale(instance, work.batches()) == {}
