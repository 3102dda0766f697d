"""The steps of a recipe. Each judges a chunk of rows."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from replay_pipeline.errors import ConfigError, NormalizeError
from replay_pipeline.normalize import data_juicer, stock
from replay_pipeline.normalize.verdict import Measure, Memory, RowVerdict
from replay_pipeline.normalize.views import SIDES, PairBatch, read_side, text_message
from replay_pipeline.storage.schemas import PROMPT


class Chunk:
    """The rows that go through the steps together."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table
        self.alive = np.ones(len(table), bool)
        self.pairs = PairBatch.from_table(table)

    def columns(self) -> dict[str, list[Any]]:
        """Return the rows that aren't dropped, as lists of values."""
        return self.table.filter(pa.array(self.alive)).to_pydict()

    def replace(self, name: str, values: Sequence[Any]) -> None:
        """Replace the values of a column in the rows that aren't dropped."""
        column = self.table.column(name).to_pylist()
        for row, value in zip(np.flatnonzero(self.alive), values, strict=True):
            column[row] = value
        place = self.table.schema.get_field_index(name)
        kind = self.table.schema.field(place)
        self.table = self.table.set_column(place, kind, pa.array(column, kind.type))
        self.pairs = PairBatch.from_table(self.table)


class Step(Protocol):
    """One operator of a recipe."""

    name: str
    """Name of the operator."""
    is_whole: bool
    """Whether it must see all rows at once."""
    is_mark_only: bool

    def judge(self, chunk: Chunk) -> RowVerdict:
        """Return which rows fail."""
        ...


class PairStep:
    """One of our filters."""

    is_whole = False

    def __init__(self, operator: Any) -> None:
        self._operator = operator
        self.name: str = operator._name
        self.is_mark_only: bool = operator.mark_only

    def judge(self, chunk: Chunk) -> RowVerdict:
        """Judge by the operator's measures."""
        return self._operator.judge(chunk.pairs, chunk.alive)


class OrderStep:
    """One of our operators that judge a row by earlier rows."""

    is_whole = False
    is_mark_only = False

    def __init__(self, operator: Any, memory: Memory) -> None:
        self._operator = operator
        self.name: str = operator._name
        self.memory = memory

    def judge(self, chunk: Chunk) -> RowVerdict:
        """Judge rows by the rows of this run and of earlier batches."""
        return self._operator.judge(chunk.pairs, chunk.alive, self.memory)


class StockFilterStep:
    """A filter of data-juicer, run by data-juicer's code."""

    is_whole = False
    is_mark_only = False

    def __init__(self, operator: Any, arguments: Mapping[str, Any]) -> None:
        self._operator = operator
        self._limit = _limit_of(arguments)
        self.name: str = operator._name

    def judge(self, chunk: Chunk) -> RowVerdict:
        """Judge by the operator's own statistics, which start empty."""
        rows = np.flatnonzero(chunk.alive)
        verdict = RowVerdict.of(len(chunk.alive))
        if not len(rows):
            return verdict
        kept, stats = stock.filter_rows(self._operator, chunk.columns())
        field = self._operator.text_key
        for row, is_kept, stat in zip(rows, kept, stats, strict=True):
            if not is_kept:
                value = ", ".join(f"{name}={stat[name]}" for name in sorted(stat))
                verdict.fail([row], field, value, self._limit)
        measures = _measures(stats, field, rows, len(chunk.alive))
        return RowVerdict(
            fails=verdict.fails,
            fields=verdict.fields,
            values=verdict.values,
            limits=verdict.limits,
            measures=measures,
        )


def _measures(
    stats: Sequence[Mapping[str, Any]], field: str, rows: np.ndarray, n_rows: int
) -> list[Measure]:
    """Return the numeric statistics of a stock filter, 0 for rows that were dropped before."""
    measures = []
    for name in sorted(stats[0]):
        values = [stat.get(name) for stat in stats]
        if all(isinstance(value, int | float) for value in values):
            every = np.zeros(n_rows)
            every[rows] = values
            measures.append(Measure(field=field, metric=name, values=every))
    return measures


class StockMapperStep:
    """A mapper of data-juicer. It edits columns and drops no row."""

    is_whole = False
    is_mark_only = False

    def __init__(self, operator: Any) -> None:
        self._operator = operator
        self.name: str = operator._name

    def judge(self, chunk: Chunk) -> RowVerdict:
        """Edit rows, and let all of them pass.

        Raises:
            NormalizeError: the operator changed the number of rows, the prompt, or the text of an
                action with tool calls. Such an action is published from its message, not from its
                text.
        """
        before = chunk.columns()
        n_rows = int(chunk.alive.sum())
        if n_rows:
            after = stock.map_rows(self._operator, chunk.columns())
            self._check(before, after, n_rows)
            for name in before:
                if after[name] != before[name]:
                    chunk.replace(name, after[name])
        return RowVerdict.of(len(chunk.alive))

    def _check(self, before: dict[str, list], after: dict[str, list], n_rows: int) -> None:
        if any(len(after.get(name, ())) != n_rows for name in before):
            raise NormalizeError(
                f"{self.name}: turned {n_rows} rows into another number; a recipe for pairs can "
                "only use mappers that keep every row"
            )
        if any(after[name] != before[name] for name in PROMPT.names):
            raise NormalizeError(
                f"{self.name}: edits the prompt, which belongs to the state and not to the pair; a "
                "recipe for pairs can only edit their sides"
            )
        for side in SIDES:
            message = f"{side}_action_json"
            for row, state_id in enumerate(before["state_id"]):
                if after[side][row] == before[side][row] or not after[message][row]:
                    continue
                if read_side(after[message][row]).calls:
                    raise NormalizeError(
                        f"{self.name}: changed `{side}` of {state_id}, but its tool calls are "
                        f"published from `{message}`; set text_key: {message}"
                    )
                after[message][row] = text_message(after[side][row])


class StockDatasetStep:
    """A deduplicator or selector of data-juicer, which chooses among all rows at once."""

    is_whole = True
    is_mark_only = False

    def __init__(self, operator: Any, arguments: Mapping[str, Any]) -> None:
        self._operator = operator
        self._limit = _limit_of(arguments)
        self.name: str = operator._name

    def judge(self, chunk: Chunk) -> RowVerdict:
        """Fail the rows that the operator left out."""
        verdict = RowVerdict.of(len(chunk.alive))
        rows = np.flatnonzero(chunk.alive)
        if len(rows):
            kept = set(stock.select_rows(self._operator, chunk.columns()))
            left_out = [row for number, row in enumerate(rows) if number not in kept]
            verdict.fail(left_out, self._operator.text_key, "not selected", self._limit)
        return verdict


def _limit_of(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in arguments.items() if name != "text_key")


def judges_by_order(operator: Any) -> bool:
    """Return whether one of our operators judges a row by earlier rows."""
    return hasattr(operator, "new_memory")


def start(operator: Any, arguments: Mapping[str, Any], earlier: Memory | None = None) -> Step:
    """Return the step that runs an operator, with the memory of earlier batches.

    Raises:
        ConfigError: the operator turns rows into other rows, which isn't possible for pairs.
    """
    if judges_by_order(operator):
        return OrderStep(operator, operator.new_memory(earlier))
    if hasattr(operator, "measure"):
        return PairStep(operator)
    match data_juicer.kind_of(operator):
        case "filter":
            return StockFilterStep(operator, arguments)
        case "mapper":
            return StockMapperStep(operator)
        case "dataset":
            return StockDatasetStep(operator, arguments)
    raise ConfigError(
        f"{operator._name}: groups or aggregates rows, so not every pair could be accounted for; use filters, mappers, deduplicators, and selectors"
    )
