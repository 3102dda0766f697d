"""Asset: the published dataset."""

import dagster as dg

from replay_pipeline.assets.metadata import bars
from replay_pipeline.assets.partitions import GROUP, OWNERS
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
    by_split = receipt.report["rows_by_split"]["pairs"]
    folder = work.settings.dataset_dir().absolute()
    return dg.MaterializeResult(
        metadata={
            "dagster/row_count": sum(by_split.values()),
            "dagster/uri": str(folder),
            "rows": bars("Pairs, by split", by_split),
            "load": dg.MetadataValue.md(
                f"```python\nfrom datasets import load_dataset\n\npairs = load_dataset({str(folder)!r})\n```"
            ),
            "seconds": receipt.seconds,
            "reused": receipt.is_reused,
        }
    )
