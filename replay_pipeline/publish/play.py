"""Count the rows that a rehearsal made up, and keep them away from the Hub."""

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from replay_pipeline.errors import PublishError
from replay_pipeline.types import REHEARSAL


def n_rehearsed(rows: pa.Table) -> int:
    """Count the rows of a config in which a made-up answer has a vote.

    The rows themselves say so, not the settings, because teachers may have been renamed, and
    rehearsed batches may be mixed with others.
    """
    sources = rows["source"].to_pylist() if "source" in rows.column_names else [None] * len(rows)
    return sum(
        source == REHEARSAL or any(name.startswith(REHEARSAL) for name in teachers or ())
        for source, teachers in zip(sources, rows["teachers_agreeing"].to_pylist(), strict=True)
    )


def refuse_rehearsal(manifests: Mapping[str, Mapping[str, Any]], repo_id: str | None) -> None:
    """Refuse to push a dataset with even one made-up row.

    Raises:
        PublishError: a batch has a made-up row. Nothing was published.
    """
    play = {key: n for key, each in manifests.items() if (n := each.get("n_rehearsed"))}
    if repo_id is not None and play:
        raise PublishError(
            f"{sum(play.values())} rows were made up in a rehearsal (batch {', '.join(sorted(play))}): "
            f"made-up rows are never pushed to {repo_id}; nothing was published. Replay these batches "
            "with real teachers first"
        )
