"""Read the published dataset from a folder or the Hub. Only this module imports `datasets`."""

import json
import logging
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import disable_progress_bars, load_dataset
from datasets.exceptions import DatasetGenerationError
from datasets.table import CastError
from datasets.utils import logging as datasets_logging

from trainer.data.budget import sides_of
from trainer.data.sampler import weight_of
from trainer.data.template import with_object_arguments
from trainer.data.types import Message, PairRow, PositiveRow, PromptRow
from trainer.errors import DatasetError

logger = logging.getLogger(__name__)

REQUIRED_COLUMNS: dict[str, tuple[str, ...]] = {
    "pairs": ("prompt", "chosen", "rejected"),
    "prompts": ("prompt", "consensus"),
    "positives": ("prompt", "completion"),
    "answers": ("prompt", "completion"),
}
"""Columns that a channel needs, by config of the dataset."""


@dataclass(frozen=True, kw_only=True)
class PreferenceData:
    """Rows of a published dataset, split by session."""

    pairs: list[PairRow]
    prompts: list[PromptRow] = field(default_factory=list)
    positives: list[PositiveRow] = field(default_factory=list)
    test_pairs: list[PairRow] = field(default_factory=list)
    test_prompts: list[PromptRow] = field(default_factory=list)
    answers: list[PositiveRow] = field(default_factory=list)
    """What a teacher said and nobody confirmed."""

    @property
    def training_rows(self) -> list[Any]:
        """Return all rows that a channel may train on."""
        return [*self.pairs, *self.prompts, *self.positives, *self.answers]

    def sft_pairs(self, on: str) -> list[PairRow]:
        """Return rows whose `chosen` is the action to imitate. See `SharedSettings.sft_on`.

        Args:
            on: `chosen`, `consensus`, `answers` or `recorded`.
        """
        if on == "chosen":
            return self.pairs
        rows: list[Any] = list(self.pairs)
        if on == "recorded":
            # The prompt keeps what both sides need, as it does in every other run.
            of_chosen = {"p_chosen_right": None}
            rows = [
                {**row, "sides": sides_of(row), "chosen": row["rejected"], **of_chosen}
                for row in rows
            ]
        return rows + [
            {
                **row,
                "chosen": row["completion"],
                "rejected": row["completion"],
                "weight": row.get("p_chosen_right"),
            }
            for row in (*self.positives, *(self.answers if on == "answers" else ()))
        ]


def load_preference_data(source: str | Path, *, revision: str | None = None) -> PreferenceData:
    """Read `pairs`, `prompts` and `positives` of a dataset folder or Hub id.

    A train split of `pairs`, `positives`, or `answers` is required. Other missing parts become empty
    lists.

    Raises:
        DatasetError: the dataset, all that could be learned from, or a column is missing.
    """
    disable_progress_bars()
    positives, answers = (
        _rows(source, name, "train", revision, is_optional=True)
        for name in ("positives", "answers")
    )
    is_enough = bool(positives or answers)
    pairs = _rows(source, "pairs", "train", revision, is_optional=is_enough)
    if not pairs and not is_enough:
        raise DatasetError(
            f"{source}: the train splits of 'pairs', 'positives' and 'answers' are empty: nothing to learn from"
        )
    if pairs and not any(weight_of(row) for row in pairs):
        raise DatasetError(f"{source}: pairs/train, column weight: all of them are 0")
    return PreferenceData(
        pairs=pairs,
        prompts=_rows(source, "prompts", "train", revision, is_optional=True),
        positives=positives,
        answers=answers,
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
    is_folder = isinstance(source, Path) or source.startswith((".", "/", "~"))
    if is_folder or Path(source).is_dir():
        source, is_folder = Path(source).expanduser(), True
        if not source.is_dir():
            raise DatasetError(f"{source}: no such dataset folder")
    where, failed = f"{source}: {name}/{split}", f"{source}: cannot read {name}/{split}"
    cache: str | None = None
    try:
        # The cache knows a folder by its last name and file names: a dataset published again, or
        # another one called the same, would come back as it was the first time.
        with tempfile.TemporaryDirectory() if is_folder else nullcontext() as cache, _quiet():
            table = load_dataset(str(source), name, split=split, revision=revision, cache_dir=cache)
            missing = [one for one in REQUIRED_COLUMNS[name] if one not in table.column_names]
            if missing:
                raise DatasetError(f"{where} has no column {', '.join(missing)}")
            texts = _client_texts(table, source, revision, cache)
            rows = [_with_client_texts(row, texts) for row in table.to_list()]
    except DatasetError:
        raise
    except (DatasetGenerationError, CastError, pa.ArrowException) as error:
        # What is optional and there, but broken, is no reason to go on without it.
        raise DatasetError(f"{failed}: {_reason(error)}") from error
    except OSError as error:
        if error.errno is not None and not isinstance(error, FileNotFoundError | ConnectionError):
            raise DatasetError(f"{failed}: {_reason(error)}") from error
        return _missing(failed, error, is_optional=is_optional)
    except ValueError as error:
        return _missing(failed, error, is_optional=is_optional)
    # A struct has all the names of its column, with a null where a row has none.
    has_fillers = "Json" not in str(table.features.get("prompt"))
    if has_fillers:
        rows = [{name: _without_fillers(value) for name, value in row.items()} for row in rows]
    return checked_rows(rows, where)


def _without_fillers(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _without_fillers(each) for k, each in value.items() if each is not None}
    return [_without_fillers(each) for each in value] if isinstance(value, list) else value


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep `datasets` from logging its own account of what is raised as one sentence."""
    before = datasets_logging.get_verbosity()
    datasets_logging.set_verbosity(datasets_logging.CRITICAL)
    try:
        yield
    finally:
        datasets_logging.set_verbosity(before)


def _client_texts(
    table: Any, source: str | Path, revision: str | None, cache: str | None
) -> dict[str, dict[str, Any]]:
    """Return what clients put around the conversations of some rows, by hash, where it is there."""
    named = table["client_texts"] if "client_texts" in table.column_names else ()
    n_named = sum(name is not None for name in named)
    if not n_named:
        return {}
    try:
        found = load_dataset(
            str(source),
            data_files=_CLIENT_TEXTS,
            split="train",
            revision=revision,
            cache_dir=cache,
        )
        texts: dict[str, dict[str, Any]] = {row["hash"]: row for row in found.to_list()}
    except FileNotFoundError:
        texts = {}
    if n_missing := sum(name is not None and name not in texts for name in named):
        logger.warning(
            "%s: %d of %d prompts use the neutral form, because the texts of their clients are not in the dataset folder",
            source,
            n_missing,
            len(table),
        )
    return texts


_CLIENT_TEXTS = "client_texts/*/*.parquet"


def _missing(failed: str, error: Exception, *, is_optional: bool) -> list[Any]:
    if is_optional:
        logger.info("%s: %s", failed, error)
        return []
    if str(error).startswith('Unknown split "train"'):
        raise DatasetError(
            f"{failed}: it has no train split, so all rows are held out. Publish more sessions, or lower test_fraction"
        ) from error
    raise DatasetError(f"{failed}: {error}") from error


def _reason(error: BaseException) -> str:
    """Return what lies at the bottom of an error, in one line."""
    while (below := error.__cause__ or error.__context__) is not None:
        error = below
    lines = str(error).strip().splitlines()
    return " ".join(line.strip() for line in lines[:4]) or type(error).__name__


def _with_client_texts(
    row: dict[str, Any], texts: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Put the client's own prompt and tools in the place of the neutral ones."""
    if (text := texts.get(row.get("client_texts") or "")) is None:
        return row
    prompt = [*text["messages"], *row["prompt"][text["n_replaced"] :]]
    return row | {"prompt": prompt, "tools": text["tools"]}


def checked_rows(rows: Sequence[Mapping[str, Any]], where: str) -> list[Any]:
    """Return rows as messages without nulls, from any form in which they were published.

    Raises:
        DatasetError: a column has the wrong form. The message names the row and the column.
    """
    checked = []
    for number, row in enumerate(rows):
        try:
            checked.append(_row(dict(row), ""))
        except DatasetError as error:
            raise DatasetError(f"{where}, row {number}{error}") from error
    return checked


def _row(row: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a row as messages without nulls.

    Raises:
        DatasetError: a column holds something else.
    """
    for column in ("prompt", "chosen", "rejected", "completion", "consensus", "tools"):
        if isinstance(row.get(column), str):
            what = "a list of functions" if column == "tools" else "messages in the chat form"
            row[column] = _parsed(row[column], f"{where}, column {column}: expected {what}")
    for column in ("prompt", "chosen", "rejected", "completion"):
        if column in row:
            row[column] = _messages(row[column], f"{where}, column {column}")
    if "consensus" in row:
        row["consensus"] = _messages([row["consensus"]], f"{where}, column consensus")[0]
    tools = row.get("tools")
    is_listed = isinstance(tools, list) and all(
        isinstance(tool, Mapping) and isinstance(tool.get("function"), Mapping) for tool in tools
    )
    if tools is not None and not is_listed:
        raise DatasetError(
            f"{where}, column tools: expected a list of functions, not {tools!r:.80}"
        )
    weight = row.get("weight")
    if weight is not None and not (
        isinstance(weight, int | float) and math.isfinite(weight) and weight >= 0
    ):
        raise DatasetError(f"{where}, column weight: {weight!r} is not a number that is at least 0")
    return row


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise DatasetError(f"{where}, or its JSON, not the text {text!r:.80}") from error


def _messages(value: Any, where: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        found = "nothing" if value is None or value == [] else f"{value!r:.80}"
        raise DatasetError(f"{where}: expected a list of messages, not {found}")
    for message in value:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DatasetError(f"{where}: {message!r:.80} is not a message with a role")
    try:
        return [_message(message) for message in value]
    except (KeyError, TypeError, AttributeError) as error:
        raise DatasetError(f"{where}: a tool call is not in the OpenAI form ({error!r})") from error


def _message(message: Message) -> Message:
    plain = {key: value for key, value in message.items() if value is not None}
    if calls := plain.get("tool_calls"):
        plain["tool_calls"] = [
            {**call, "function": with_object_arguments(call["function"])} for call in calls
        ]
    return plain
