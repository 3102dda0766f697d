"""Tables of pairs that hold their prompts, as callers without a data root give them."""

from typing import Any

import pyarrow as pa

from replay_pipeline.storage.schemas import PROMPT
from replay_pipeline.storage.tables import table_of


def full_table(rows: list[dict[str, Any]], name: str) -> pa.Table:
    table = table_of(rows, name)
    for column in PROMPT.names:
        table = table.append_column(column, pa.array([r.get(column) for r in rows], pa.string()))
    return table
