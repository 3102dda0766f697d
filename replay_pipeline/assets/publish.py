"""Asset: the published dataset."""

from typing import Any

import dagster as dg

from replay_pipeline.assets.lineage import column_lineage
from replay_pipeline.assets.partitions import GROUP, OWNERS
from replay_pipeline.assets.pictures import bars
from replay_pipeline.assets.reporting import tried_again, whole_result
from replay_pipeline.orchestration.resources import PipelineResource
from replay_pipeline.publish import in_words, layout
from replay_pipeline.stages.pipeline import Pipeline, Receipt

_COLUMNS = dg.TableSchema(
    columns=[dg.TableColumn(field.name, str(field.type)) for field in layout.PAIRS]
)


@dg.asset(
    deps=[dg.AssetDep("normalized_pairs", partition_mapping=dg.AllPartitionMapping())],
    group_name=GROUP,
    owners=OWNERS,
    kinds={"huggingface", "parquet"},
    tags={"stage": "publish"},
    metadata={"dagster/column_schema": _COLUMNS},
)
def published_dataset(pipeline: PipelineResource) -> dg.MaterializeResult:
    """All normalized pairs as one dataset that `datasets.load_dataset` opens."""
    with tried_again():
        work = pipeline.open()
        receipt = work.publish()
    return whole_result(work, receipt, dataset_facts)


def dataset_facts(pipeline: Pipeline, receipt: Receipt) -> dict[str, Any]:
    """Rows by split, where the dataset is, and how to load it."""
    by_config = receipt.report["rows_by_split"]
    folder = str(pipeline.settings.dataset_dir().absolute())
    repo_id = pipeline.settings.publish.repo_id
    code = f"from datasets import load_dataset\n\npairs = load_dataset({repo_id or folder!r})"
    facts = {
        "dagster/row_count": sum(by_config.get("pairs", {}).values()),
        "dagster/uri": folder,
        "batches": len(receipt.inputs) or len(receipt.report["batches"]),
        **{
            f"{config} {split}": n
            for config, splits in sorted(by_config.items())
            for split, n in sorted(splits.items())
        },
        "prompt-blind control": in_words(receipt.report.get("blind")),
        "rows": bars(by_config.get("pairs", {})),
        "load": dg.MetadataValue.md(f"```python\n{code}\n```"),
        "card": dg.MetadataValue.path(f"{folder}/{layout.CARD}"),
        **column_lineage("published_dataset"),
    }
    if repo_id is not None:
        facts["hub"] = dg.MetadataValue.url(f"https://huggingface.co/datasets/{repo_id}")
    return facts
