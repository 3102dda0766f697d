"""Write pairs, positives, and outcomes as tables."""

from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa

from replay_pipeline.storage.pair_rows import json_or_none, row_of_pair
from replay_pipeline.storage.tables import table_of
from replay_pipeline.types import DPOPair


def pairs_table(pairs: Iterable[DPOPair], name: str = "dpo_pairs") -> pa.Table:
    """Return pairs as the table `dpo_pairs`, or one like it. `pairs_of` reads them back."""
    return table_of([row_of_pair(pair) for pair in pairs], name)


def positives_table(positives: Iterable[Mapping[str, Any]], name: str = "positives") -> pa.Table:
    """Return the states at which teachers and student agree as the table `positives`, or one like it."""
    return table_of([row_of_pair(positive) for positive in positives], name)


def outcomes_table(outcomes: Iterable[Mapping[str, Any]]) -> pa.Table:
    """Return one row per state as the table `outcomes`."""
    rows = [{**each, "trials_json": json_or_none(each.get("trials"))} for each in outcomes]
    return table_of(rows, "outcomes")
