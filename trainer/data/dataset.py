"""The published dataset, from a folder or the Hub. The only room that imports `datasets`."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset, disable_progress_bars, load_dataset

from trainer.errors import DatasetError
from trainer.types import PairRow, PromptRow

logger = logging.getLogger(__name__)

REQUIRED_COLUMNS: dict[str, tuple[str, ...]] = {
    "pairs": ("prompt", "chosen", "rejected"),
    "prompts": ("prompt", "consensus"),
}
"""Columns that a channel cannot do without, by configuration of the dataset."""


@dataclass(frozen=True, kw_only=True)
class PreferenceData:
    """Rows of a published dataset, split by session."""

    pairs: list[PairRow]
    prompts: list[PromptRow]
    test_pairs: list[PairRow]
    test_prompts: list[PromptRow]


def load_preference_data(source: str | Path, *, revision: str | None = None) -> PreferenceData:
    """Read `pairs` and `prompts` of a dataset folder or Hub id, train and test.

    A missing test split, or a dataset without `prompts`, gives empty lists.

    Raises:
        DatasetError: nothing there, no `pairs`, or a column is missing.
    """
    disable_progress_bars()
    pairs = _rows(source, "pairs", "train", revision)
    if not pairs:
        raise DatasetError(f"{source}: the train split of 'pairs' is empty: nothing to learn from")
    return PreferenceData(
        pairs=pairs,
        prompts=_rows(source, "prompts", "train", revision, is_optional=True),
        test_pairs=_rows(source, "pairs", "test", revision, is_optional=True),
        test_prompts=_rows(source, "prompts", "test", revision, is_optional=True),
    )


def _rows(
    source: str | Path,
    name: str,
    split: str,
    revision: str | None,
    *,
    is_optional: bool = False,
) -> list[Any]:
    if isinstance(source, Path) or source.startswith((".", "/", "~")):
        source = Path(source).expanduser()
        if not source.is_dir():
            raise DatasetError(f"{source}: no such dataset folder")
    try:
        table = load_dataset(str(source), name, split=split, revision=revision)
    except (ValueError, FileNotFoundError, ConnectionError) as error:
        if is_optional:
            logger.info("%s has no %s/%s: %s", source, name, split, error)
            return []
        raise DatasetError(f"{source}: cannot read {name}/{split}: {error}") from error
    missing = [column for column in REQUIRED_COLUMNS[name] if column not in table.column_names]
    if missing:
        raise DatasetError(f"{source}: {name}/{split} has no column {', '.join(missing)}")
    return table.to_list()


def as_dataset(rows: list[dict[str, Any]]) -> Dataset:
    """Rows of plain numbers and strings as a table, for trainers that want one."""
    return Dataset.from_list(rows)
