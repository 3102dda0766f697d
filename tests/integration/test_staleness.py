"""What Dagster itself calls stale is what the pipeline would do again."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.definitions.data_version import CachingStaleStatusResolver
from dagster._core.loader import LoadingContextForTest

from replay_pipeline.assets.code_location import define
from replay_pipeline.assets.records import sync
from replay_pipeline.assets.reporting import trace_batch
from replay_pipeline.assets.resources import PipelineResource
from replay_pipeline.settings import Settings
from replay_pipeline.stages import chain
from replay_pipeline.stages.budget.spending import stale_work
from replay_pipeline.stages.pages.pairs import FORMAT
from replay_pipeline.stages.staleness import declared
from replay_pipeline.types import SAMPLE_TEACHERS, TeacherSpec
from tests.integration.processes import instance_of
from tests.roots import PROJECT, Pipeline, pipeline_at, run_batches
from tests.support.settings_files import write_settings

pytestmark = pytest.mark.slow

BY_BATCH = ("trace_states", "teacher_actions", "dpo_pairs", "normalized_pairs")
WHOLE = ("published_dataset",)
RANGE = "dagster/asset_partition_range_"


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> Path:
    """A data root of two batches that has come as far as its dataset."""
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


def set_up(root: Path, **changes: dict[str, object]) -> None:
    """The settings of the root, with some of them changed, by section."""
    sections: dict[str, dict[str, object]] = {
        "ingest": {"sources": [PROJECT], "max_batch_sessions": 3, "settle_s": 0},
        "replay": {"sample_teachers": True},
    }
    write_settings(
        root, **{n: sections.get(n, {}) | changes.get(n, {}) for n in {**sections, **changes}}
    )


def stale(
    instance: dg.DagsterInstance, batches: list[str], *, whole: tuple[str, ...] = WHOLE
) -> dict[str, list[str]]:
    """The batches of each asset that Dagster finds stale, as its pages ask it."""
    graph = define(PipelineResource()).resolve_asset_graph()
    resolver = CachingStaleStatusResolver(instance, graph, LoadingContextForTest(instance))
    status: Callable[..., str] = lambda *key: resolver.get_status(*key).value  # noqa: E731
    found = {
        asset: [batch for batch in batches if status(dg.AssetKey(asset), batch) != "FRESH"]
        for asset in BY_BATCH
    }
    found |= {asset: ["all"] for asset in whole if status(dg.AssetKey(asset)) != "FRESH"}
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

        set_up(root, pairs={"include_natural": False})
        assert stale(instance, batches) == {"dpo_pairs": batches}
        first, *rest = batches
        materialize(instance, "dpo_pairs", first)
        published = {"published_dataset": ["all"]}  # it has positives, which the pairs come with
        here = {"dpo_pairs": rest, "normalized_pairs": [first]} | published
        assert stale(instance, batches) == here
        materialize(instance, "dpo_pairs", *rest)
        # In the others nothing came out otherwise.
        assert stale(instance, batches) == {"normalized_pairs": [first]} | published
        materialize(instance, "normalized_pairs", first)
        assert stale(instance, batches) == {"published_dataset": ["all"]}
        materialize(instance, "published_dataset")
        assert stale(instance, batches) == {}


RULE = ["replay", "pairs"]
"""What a rule of agreement decides: by default a gate asks no further where it rules a pair out."""
OTHER_SETTINGS: dict[str, tuple[Any, list[str]]] = {
    "ingest.is_redacted": (False, ["ingest"]),
    "ingest.window": ("clear_tool_results:2", ["replay", "pairs", "normalize", "publish"]),
    "replay.gates": ([], ["replay"]),
    "replay.ask_at": ("steps", ["replay"]),
    "replay.accepted_terms": (["vendor/model"], ["publish"]),
    "pairs.agreement_threshold": (3, RULE),
    "pairs.min_p_better": (0.5, ["pairs"]),
    "pairs.level": ("exact", RULE),
    "pairs.count_own_family": (True, RULE),
    "normalize.recipe": ("strict", ["normalize"]),
    "publish.lengths": ([4096], ["publish"]),
    "train.model": ("some/model", ["train"]),
    "workspaces.execute": ("files", ["pairs"]),
    "workspaces.repositories": (["code"], ["replay"]),  # looks are answered from them
}
"""Another value of a setting, and the stages whose output it decides, beyond those before them."""
SAME_BYTES = {
    "ingest": {"settle_s": 3, "max_batch_sessions": 2, "keeps_bytes": False, "harness": "neutral"},
    # The last two count where teachers are asked on.
    "replay": {"max_concurrency": 3, "max_total_usd": 7.0, "max_daily_usd": 3.0, "max_looks": 1, "looks_share": 1.0},
    "normalize": {"executor": "default", "allow_operators": ["text_pair_similarity_filter"]},
    "train": {"stop_timeout_s": 5, "environment": ["HF_TOKEN"]},
    "publish": {"is_private": False, "repo_id": "me/mine"},
    "workspaces": {"timeout_s": 3, "max_processes": 9},
    "night": {"replays_at": "03:00"},
    "notify": {"is_nightly": True, "webhook_url": "http://127.0.0.1:9/"},
}  # fmt: skip
ASSETS = {stage.name: stage.asset for stage in chain.STAGES}


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


def test_a_setting_decides_the_stages_that_it_is_about():
    def declared_by(changes: dict[str, Any]) -> dict[str, Any]:
        settings = Settings.load(changes=changes, env={})
        return {stage.name: declared(stage, settings).settings for stage in chain.STAGES}

    before = declared_by({})
    for name, (value, stages) in OTHER_SETTINGS.items():
        section, _, field = name.partition(".")
        after = declared_by({section: {field: value}})
        assert [stage for stage in before if before[stage] != after[stage]] == stages, name


def test_command_and_dagster_name_the_same_batches_for_the_same_reason(shown_root):
    value, stages = OTHER_SETTINGS["pairs.level"]
    change = partial(set_up, shown_root, pairs={"level": value})
    see_both(shown_root, change, "pairs.level: ", "effect → exact", stages)


def see_both(
    root: Path, change: Callable[[], object], reason: str, values: str, stages: list[str]
) -> None:
    """Change something, and see what both say of it; do what they say, and see that it is enough."""
    batches = pipeline_at(root).batches()
    with instance_of(root) as instance:
        found_by_dagster = partial(stale, instance, batches)
        assert found_by_dagster() == {}
        assert stale_work(pipeline_at(root))["batches"] == {}

        change()
        found = stale_work(pipeline_at(root))["batches"]
        by_asset: dict[str, list[str]] = {}
        for batch, row in found.items():
            for stage, (why, *more) in row.items():
                by_asset.setdefault(ASSETS[stage], []).append(batch)
                assert not more
                assert why.startswith(reason)
                assert values in why
        assert by_asset == found_by_dagster()
        assert set(by_asset) == {ASSETS[stage] for stage in stages}

        assert stale_work(do_all(root))["batches"] == {}
        assert found_by_dagster() == {}


def test_where_and_how_fast_a_teacher_is_asked_decides_nothing():
    change = {
        "answers_as": "*", "api_key_env": "ANOTHER_KEY", "base_url": "http://127.0.0.1:9/v1",
        "max_concurrency": 3, "price": {"prompt": 1e-6, "completion": 1e-6}, "timeout_s": 9.0,
    }  # fmt: skip
    decisive = {"name", "model", "params", "family", "dialect", "is_distillable"}
    assert change.keys() | decisive == TeacherSpec.model_fields.keys()
    one, other = (
        Settings(replay={"teachers": (spec,)})
        for spec in (SAMPLE_TEACHERS[0], SAMPLE_TEACHERS[0].model_copy(update=change))
    )
    for stage in chain.STAGES:
        assert declared(stage, one) == declared(stage, other)


def test_files_that_settings_name_count_by_what_they_say(shown_root, tmp_path):
    [batch, *_] = pipeline_at(shown_root).batches()
    [pair_id, *_] = pipeline_at(shown_root).root.read("dpo_pairs", batch)["pair_id"].to_pylist()
    marks = tmp_path / "marks.json"
    marks.write_text(json.dumps({"format": FORMAT, "marks": {pair_id: "reject"}}))
    change = partial(set_up, shown_root, pairs={"marks": str(marks)})
    see_both(shown_root, change, "pairs.marks: none → ", "", ["pairs"])
    moved = marks.rename(tmp_path / "moved.json")
    set_up(shown_root, pairs={"marks": str(moved)})
    assert stale_work(pipeline_at(shown_root))["batches"] == {}


def test_settings_that_change_no_byte_make_nothing_stale(root):
    set_up(root, **SAME_BYTES)
    assert stale_work(pipeline_at(root))["batches"] == {}
