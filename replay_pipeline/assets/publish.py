"""Asset: the published dataset."""

from typing import Any

import dagster as dg

from replay_pipeline.assets.metadata import bars
from replay_pipeline.assets.partitions import GROUP, OWNERS
from replay_pipeline.assets.reporting import effort
from replay_pipeline.pipeline import Pipeline, Receipt
from replay_pipeline.resources import PipelineResource


@dg.asset(
    deps=[dg.AssetDep("normalized_pairs", partition_mapping=dg.AllPartitionMapping())],
    group_name=GROUP,
    owners=OWNERS,
    kinds={"huggingface", "parquet"},
    tags={"stage": "publish"},
)
def published_dataset(pipeline: PipelineResource) -> dg.MaterializeResult:
    """All normalized pairs as one dataset that `datasets.load_dataset` opens."""
    work = pipeline.open()
    receipt = work.publish()
    return dg.MaterializeResult(metadata={**dataset_facts(work, receipt), **effort(receipt)})


def dataset_facts(pipeline: Pipeline, receipt: Receipt) -> dict[str, Any]:
    """Rows by split, where the dataset is, and how to load it."""
    by_split = receipt.report["rows_by_split"].get("pairs", {})
    folder = str(pipeline.settings.dataset_dir().absolute())
    code = f"from datasets import load_dataset\n\npairs = load_dataset({folder!r})"
    return {
        "dagster/row_count": sum(by_split.values()),
        "dagster/uri": folder,
        "rows": bars("Pairs, by split", by_split),
        "load": dg.MetadataValue.md(f"```python\n{code}\n```"),
    }
