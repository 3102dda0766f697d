"""The published dataset, from a folder or the Hub. The only room that imports `datasets`."""

import json
import logging
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset, disable_progress_bars, load_dataset

from trainer.data.template import with_object_arguments
from trainer.errors import DatasetError
from trainer.types import Message, PairRow, PositiveRow, PromptRow

logger = logging.getLogger(__name__)

REQUIRED_COLUMNS: dict[str, tuple[str, ...]] = {
    "pairs": ("prompt", "chosen", "rejected"),
    "prompts": ("prompt", "consensus"),
    "positives": ("prompt", "completion"),
    "teacher_logprobs": ("prompt", "logprobs"),
}
"""Columns that a channel cannot do without, by configuration of the dataset."""


@dataclass(frozen=True, kw_only=True)
class PreferenceData:
    """Rows of a published dataset, split by session."""

    pairs: list[PairRow]
    prompts: list[PromptRow]
    positives: list[PositiveRow]
    test_pairs: list[PairRow]
    test_prompts: list[PromptRow]


def load_preference_data(source: str | Path, *, revision: str | None = None) -> PreferenceData:
    """Read `pairs`, `prompts` and `positives` of a dataset folder or Hub id.

    Only the train split of `pairs` is needed; whatever else is missing is an empty list.

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
        positives=_rows(source, "positives", "train", revision, is_optional=True),
        test_pairs=_rows(source, "pairs", "test", revision, is_optional=True),
        test_prompts=_rows(source, "prompts", "test", revision, is_optional=True),
    )


def load_teacher_logprobs(
    source: str | Path, *, revision: str | None = None
) -> list[dict[str, Any]]:
    """Read the train split of `teacher_logprobs`: the teachers' answers, token by token.

    Raises:
        DatasetError: it has none, which is how datasets are published unless asked for.
    """
    try:
        return _rows(source, "teacher_logprobs", "train", revision)
    except DatasetError as error:
        raise DatasetError(
            f"{error}; teacher=recorded needs a dataset that was published with "
            "publish.teacher_logprobs"
        ) from error


def _rows(
    source: str | Path,
    name: str,
    split: str,
    revision: str | None,
    *,
    is_optional: bool = False,
) -> list[Any]:
    is_folder = isinstance(source, Path) or source.startswith((".", "/", "~"))
    if is_folder or Path(source).is_dir():
        source, is_folder = Path(source).expanduser(), True
        if not source.is_dir():
            raise DatasetError(f"{source}: no such dataset folder")
    try:
        # The cache knows a folder by its last name and file names: a dataset published again, or
        # another one called the same, would come back as it was the first time.
        with tempfile.TemporaryDirectory() if is_folder else nullcontext() as cache:
            table = load_dataset(str(source), name, split=split, revision=revision, cache_dir=cache)
            return _checked_rows(table, f"{source}: {name}/{split}", REQUIRED_COLUMNS[name])
    except DatasetError:
        raise
    except (ValueError, FileNotFoundError, ConnectionError) as error:
        if is_optional:
            logger.info("%s has no %s/%s: %s", source, name, split, error)
            return []
        raise DatasetError(f"{source}: cannot read {name}/{split}: {error}") from error


def _checked_rows(table: Dataset, where: str, columns: Sequence[str]) -> list[Any]:
    missing = [column for column in columns if column not in table.column_names]
    if missing:
        raise DatasetError(f"{where} has no column {', '.join(missing)}")
    return [_row(row) for row in table.to_list()]


def _row(row: dict[str, Any]) -> dict[str, Any]:
    """Give a row as messages without nulls, whichever way its publisher wrote them."""
    for column in ("prompt", "chosen", "rejected", "completion"):
        if isinstance(row.get(column), list):
            row[column] = [_message(message) for message in row[column]]
    if row.get("consensus") is not None:
        row["consensus"] = _message(row["consensus"])
    if isinstance(row.get("tools"), str):
        row["tools"] = json.loads(row["tools"])
    return row


def _message(message: Message) -> Message:
    plain = {key: value for key, value in message.items() if value is not None}
    if calls := plain.get("tool_calls"):
        plain["tool_calls"] = [
            {**call, "function": with_object_arguments(call["function"])} for call in calls
        ]
    return plain
