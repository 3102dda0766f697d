"""The dataset card, generated from the manifests of the batches that the dataset holds."""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import pyarrow as pa
import pyarrow.compute
import yaml

from replay_pipeline.publish import layout
from replay_pipeline.publish.splits import SPLITS

pc: Any = pyarrow.compute  # makes its functions at import, unknown to type checkers
_LICENSE_NAME = "mixed-model-outputs"
_SIZES = [(1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (10**6, "100K<n<1M")]
_COUNTED = ("agreement_level", "outcome", "source", "student_model")


class TeacherFacts(TypedDict, total=False):
    """What the card says about a teacher."""

    name: str
    model: str
    vendor: str
    first_answer: str
    last_answer: str
    is_distillable: bool | None
    n_calls: int
    cost_usd: float


class CardFacts(TypedDict, total=False):
    """What only the caller knows; everything is optional."""

    title: str
    license: str
    """An identifier of the Hub; without it `other`, and the terms are described."""
    teachers: Sequence[TeacherFacts]
    accepted_terms: Sequence[str]
    """Models used although their vendor forbids training on answers."""
    budget_usd: float
    spent_usd: float
    recipe: str
    n_pairs_in: int
    dropped: Mapping[str, int]
    """Rows that normalization dropped, by operator."""
    control_run: Mapping[str, Any]
    """Results of the control without preferences, by name."""
    notes: str


def manifest_of(
    batch: str,
    *,
    files: Mapping[str, Mapping[str, Mapping[str, int]]],
    pairs: pa.Table,
    sessions: Mapping[str, int],
    test_fraction: float,
    pins: Mapping[str, str],
) -> dict[str, Any]:
    """The facts of one batch: its files with their rows, and sums that add up over batches."""
    lengths = {
        side: pc.sum(pc.binary_length(pc.list_flatten(pairs[side]))).as_py() or 0
        for side in ("chosen", "rejected")
    }
    teachers = pc.list_flatten(pairs["teachers_agreeing"]).to_pylist()
    return {
        "trace_batch": batch,
        "test_fraction": test_fraction,
        "pins": dict(sorted(pins.items())),
        "files": files,
        "sessions": dict(sessions),
        "counts": {name: _counts(pairs[name].to_pylist()) for name in _COUNTED},
        "teachers_agreeing": _counts(teachers),
        "cost_usd": round(pc.sum(pairs["cost_usd"]).as_py() or 0.0, 6),
        "n_distillable": pc.sum(pairs["is_distillable"]).as_py() or 0,
        "n_sharing_vendor": pc.sum(pairs["shares_vendor"]).as_py() or 0,
        "n_bytes": lengths,
        "sample": pairs.slice(0, 1).to_pylist()[0] if len(pairs) else None,
    }


def _counts(values: Sequence[Any]) -> dict[str, int]:
    return dict(sorted(Counter("unknown" if v is None else str(v) for v in values).items()))


def encode(facts: Any) -> bytes:
    """Facts as the bytes of a JSON file; equal facts give equal bytes."""
    return (json.dumps(facts, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


def digest_of(manifests: Mapping[str, Mapping[str, Any]]) -> str:
    """A name for the whole content of the dataset."""
    return hashlib.sha256(encode(manifests)).hexdigest()[:12]


def rows_by_split(manifests: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Rows of each config and split, over all batches."""
    rows: dict[str, dict[str, int]] = {}
    for config in layout.CONFIGS:
        counts = {
            split: sum(
                sum(manifest["files"].get(config, {}).get(split, {}).values())
                for manifest in manifests.values()
            )
            for split in SPLITS
        }
        rows[config] = counts
    return rows


def render(manifests: Mapping[str, Mapping[str, Any]], facts: Mapping[str, Any]) -> bytes:
    """The whole card: metadata for the Hub, then what a reader wants to know."""
    rows = {
        config: {split: count for split, count in counts.items() if count}
        for config, counts in rows_by_split(manifests).items()
        if any(counts.values())
    }
    described = _metadata(rows, facts, content=digest_of(manifests))
    metadata = yaml.safe_dump(described, sort_keys=False, allow_unicode=True)
    return f"---\n{metadata}---\n\n{_body(manifests, rows, facts)}".encode()


def _metadata(
    rows: Mapping[str, Mapping[str, int]], facts: Mapping[str, Any], *, content: str
) -> dict[str, Any]:
    n_rows = sum(rows.get("pairs", {}).values())
    license_ = facts.get("license", "other")
    named = {"license_name": _LICENSE_NAME} if license_ == "other" else {}
    return {
        "pretty_name": facts.get("title", "Agent preference pairs"),
        "license": license_,
        **named,
        "task_categories": ["text-generation"],
        "tags": ["preference", "dpo", "trl", "tool-use", "agent", "synthetic", "replay-pipeline"],
        "size_categories": [next((name for size, name in _SIZES if n_rows < size), "1M<n<10M")],
        "configs": [
            {
                "config_name": config,
                # `datasets` names its cache of a local folder by these configs alone, not by the
                # files: without this line it would go on serving the rows of an older publication.
                "description": f"content {content}",
                **({"default": True} if config == "pairs" else {}),
                "data_files": [
                    {"split": split, "path": f"{layout.DATA}/{config}/{split}/**/*.parquet"}
                    for split in splits
                ],
            }
            for config, splits in rows.items()
        ],
        "dataset_info": [
            {"config_name": config, "features": layout.features_of(layout.CONFIGS[config])}
            for config in rows
        ],
    }


def _body(
    manifests: Mapping[str, Mapping[str, Any]],
    rows: Mapping[str, Mapping[str, int]],
    facts: Mapping[str, Any],
) -> str:
    title = facts.get("title", "Agent preference pairs")
    table = "\n".join(
        f"| `{config}` | {splits.get('train', 0)} | {splits.get('test', 0)} |"
        for config, splits in rows.items()
    )
    return f"""# {title}

{len(manifests)} trace batches of preference pairs between agent actions.

| config | train | test |
|---|---|---|
{table}
"""
