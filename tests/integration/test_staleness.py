"""What Dagster itself calls stale is what the pipeline would do again."""

import shutil
from collections.abc import Callable
from pathlib import Path

import dagster as dg
import pytest
from dagster._core.definitions.data_version import CachingStaleStatusResolver
from dagster._core.loader import LoadingContextForTest

from replay_pipeline.assets.code_location import define
from replay_pipeline.assets.partitions import trace_batch
from replay_pipeline.assets.records import sync
from replay_pipeline.orchestration.resources import PipelineResource
from tests.integration.processes import instance_of
from tests.roots import PROJECT, pipeline_at, run_batches
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
