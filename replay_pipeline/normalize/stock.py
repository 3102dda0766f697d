"""Run one of data-juicer's stock operators on columns of rows."""

import importlib
from typing import Any


def filter_rows(operator: Any, columns: dict[str, list[Any]]) -> tuple[list[bool], list[dict]]:
    """Let a stock filter judge rows. Its statistics start empty, so that earlier uses have no effect."""
    fields = importlib.import_module("data_juicer.utils.constant").Fields
    n_rows = len(next(iter(columns.values())))
    samples = {**columns, fields.stats: [{} for _ in range(n_rows)]}
    if operator.is_batched_op():
        samples = operator.compute_stats_batched(samples)
        return list(map(bool, operator.process_batched(samples))), samples[fields.stats]
    rows = [
        operator.compute_stats_single(dict(zip(samples, values, strict=True)))
        for values in zip(*samples.values(), strict=True)
    ]
    return [bool(operator.process_single(row)) for row in rows], [row[fields.stats] for row in rows]


def map_rows(operator: Any, columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Let a stock mapper edit rows. The caller drops columns that it adds."""
    if operator.is_batched_op():
        return dict(operator.process_batched(dict(columns)))
    rows = [
        operator.process_single(dict(zip(columns, values, strict=True)))
        for values in zip(*columns.values(), strict=True)
    ]
    return {name: [row[name] for row in rows] for name in columns}


def select_rows(operator: Any, columns: dict[str, list[Any]]) -> list[int]:
    """Let a stock deduplicator or selector choose among all rows, and return the indexes that stay."""
    dataset = importlib.import_module("data_juicer.core.data").NestedDataset
    n_rows = len(next(iter(columns.values())))
    rows = dataset.from_dict({**columns, "__row__": list(range(n_rows))})
    datasets = importlib.import_module("datasets")
    is_shown = datasets.utils.logging.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        kept = operator.run(rows)
    finally:
        if is_shown:
            datasets.enable_progress_bars()
    return [int(row) for row in kept["__row__"]]
