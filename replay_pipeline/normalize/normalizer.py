"""`DJNormalizer` keeps the pairs that are fit to publish, and gives a reason for every other pair."""

import json
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute

from replay_pipeline.errors import (
    NormalizeError,
    ReplayPipelineError,
    SchemaError,
)
from replay_pipeline.normalize import data_juicer, executors, steps
from replay_pipeline.normalize.executors import Executor
from replay_pipeline.normalize.recipe import Recipe, load_recipe
from replay_pipeline.normalize.verdict import Measure, Memory, RowVerdict
from replay_pipeline.normalize.views import SIDES
from replay_pipeline.storage.pair_rows import ROWS_AT_ONCE, PromptsOf, row_of_pair, with_prompts
from replay_pipeline.storage.schemas import DPO_PAIRS, DROPPED_PAIRS, NORMALIZED_PAIRS, PROMPT
from replay_pipeline.storage.tables import table_of
from replay_pipeline.types import DPOPair, NormalizedDPOPair

logger = logging.getLogger(__name__)

pc: Any = pyarrow.compute  # makes its functions at import, unknown to type checkers
_BATCH_ROWS = 2048
_RULES = 1
"""Raised when an operator of ours changes its judgement."""
_REQUIRED = ("state_id", "state_messages_json", "chosen", "rejected")
_DROP_COLUMNS = ("drop_operator", "drop_field", "drop_value", "drop_limit")
COMPLETE = "complete"
"""Operator name for rows that are dropped because something is missing."""


class DedupMemory(Protocol):
    """The store from which order-dependent operators read the keys of earlier batches, and to which they write."""

    @property
    def earlier(self) -> Mapping[str, Memory]:
        """Return the entries of earlier batches, by step."""
        ...

    def save(self, keys: Mapping[str, Sequence[bytes]]) -> None:
        """Replace the keys of this batch, by step."""
        ...


@dataclass(kw_only=True)
class NormalizeReport:
    """The rows that a recipe kept, changed, and dropped."""

    recipe: str
    recipe_sha: str
    thresholds: list[dict[str, Any]]
    """The steps with their parameters, in order."""
    n_in: int = 0
    n_kept: int = 0
    n_dropped: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    """Number of rows by the operator that dropped them."""
    dropped_by_field: dict[str, int] = field(default_factory=dict)
    """Number of dropped rows by `operator:field`."""
    findings: dict[str, int] = field(default_factory=dict)
    """Number of rows that an operator marked but did not drop."""
    length_bias: float | None = None
    """Cohen's d of the lengths (chosen minus rejected) of the kept rows. `None` for fewer than two rows."""
    seconds: float = 0.0
    seconds_by_operator: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class NormalizeResult:
    """The kept rows, the dropped rows, and the report. Each row is in one of them."""

    kept: pa.Table
    """Schema `NORMALIZED_PAIRS`, in the order of the input."""
    dropped: pa.Table
    """Schema `DROPPED_PAIRS`, in the order of the input."""
    report: NormalizeReport


class DJNormalizer:
    """The runner of a data-juicer recipe over preference pairs, in this process.

    Our operators (`pair_*`) see both sides of a pair. data-juicer's operators run their own code on
    the column in their `text_key`, each with separate statistics.

    Example:
        >>> normalizer = DJNormalizer("tool_calls")
        >>> call = {"type": "function", "function": {"name": "Read", "arguments": "{}"}}
        >>> pair = {
        ...     "state_id": "s1",
        ...     "state_messages": [{"role": "user", "content": "Read the readme."}],
        ...     "chosen": "Read {}",
        ...     "rejected": "I can't.",
        ...     "n_teachers_agreeing": 2,
        ...     "chosen_action": {"role": "assistant", "content": "", "tool_calls": [call]},
        ... }
        >>> [kept["rejected_messages"] for kept in normalizer.normalize([pair])]
        [[{'role': 'assistant', 'content': "I can't."}]]
    """

    def __init__(
        self,
        recipe: str | Path = "default",
        *,
        executor: Executor = "in_process",
        ray_address: str = "local",
        allow_operators: Collection[str] = (),
    ) -> None:
        """Load a bundled recipe by name (`agent`, `tool_calls`, `strict`, …) or a file.

        Args:
            recipe: name or path.
            executor: `in_process`, or an executor of data-juicer in a process of its own: `ray`
                for large corpora, `default` to compare. All keep the same rows.
            ray_address: where Ray runs; `local` starts it on this machine.
            allow_operators: operators that the recipe may use beyond those that execute nothing.

        Raises:
            UntrustedError: an operator may execute something, and is not allowed to.
            ConfigError: no such recipe, or an operator or parameter in it is unknown or wrong.
            MissingDependencyError: data-juicer, or a package that an operator needs, is missing.
        """
        self.recipe: Recipe = load_recipe(recipe, allow_operators=allow_operators)
        operators = data_juicer.build_operators(
            self.recipe.process, where=f"recipe {self.recipe.path}"
        )
        for operator in operators:
            steps.start(operator, {})  # refuses what cannot run, before any work
        executors.check_executor(executor)
        self._operators = operators
        self._executor: Executor = executor
        self._ray_address = ray_address

    @property
    def fingerprint(self) -> str:
        """Return a digest that changes if the same pairs could be judged differently."""
        return f"{self.recipe.sha}:{data_juicer.version()}:{_RULES}"

    def memories(self) -> dict[str, Memory]:
        """Return an empty memory for each step that judges a row by earlier rows."""
        return {
            label: operator.new_memory()
            for label, operator in zip(self.recipe.labels, self._operators, strict=True)
            if steps.judges_by_order(operator)
        }

    def normalize(self, pairs: Sequence[DPOPair]) -> list[NormalizedDPOPair]:
        """Return the pairs that pass, in chat form, with the statistics of their judgment.

        Raises:
            NormalizeError: an operator failed.
        """
        states = {
            pair["state_id"]: {
                "state_id": pair["state_id"],
                "messages": pair["state_messages"],
                "tools": pair.get("tools"),
            }
            for pair in pairs
        }
        result, kept_rows = self._run(
            table_of([row_of_pair(pair) for pair in pairs], "dpo_pairs"),
            lambda ids: [states[state_id] for state_id in ids],
        )
        normalized: list[NormalizedDPOPair] = []
        for row, number in zip(result.kept.to_pylist(), kept_rows, strict=True):
            extra = {
                "chosen": row["chosen"],
                "rejected": row["rejected"],
                "chosen_messages": json.loads(row["chosen_messages_json"]),
                "rejected_messages": json.loads(row["rejected_messages_json"]),
                "stats": json.loads(row["stats_json"]),
            }
            normalized.append(cast(NormalizedDPOPair, {**pairs[number], **extra}))
        return normalized

    def run(
        self,
        table: pa.Table,
        *,
        prompts: PromptsOf | None = None,
        index: DedupMemory | None = None,
    ) -> NormalizeResult:
        """Judge every row of a `DPO_PAIRS` table, with a few prompts in memory at a time.

        Args:
            table: the pairs. They name their states, or have the columns of `PROMPT`.
            prompts: reader of the states' prompts.
            index: keys of earlier batches for deduplication. It also stores the keys of this batch.

        Raises:
            NormalizeError: an operator failed, or rows were lost.
            SchemaError: a column is missing, or the prompts are.
        """
        return self._run(table, prompts, index)[0]

    def _run(
        self, table: pa.Table, prompts: PromptsOf | None, index: DedupMemory | None = None
    ) -> tuple[NormalizeResult, np.ndarray]:
        _check_columns(table)
        run = Run(self.recipe, self._operators, index)
        if run.is_whole or self._executor != "in_process":
            full = pa.concat_tables(list(with_prompts(table, prompts)) or [_no_rows()])
            if self._executor != "in_process":
                run.execute(full, self._executor, self._ray_address)
            parts = [full] if len(full) else []
        else:
            parts = with_prompts(table, prompts, n_rows=ROWS_AT_ONCE if prompts else _BATCH_ROWS)
        chunks = [run.judge(part) for part in parts]
        result = NormalizeResult(
            kept=_concat([chunk.kept for chunk in chunks], NORMALIZED_PAIRS),
            dropped=_concat([chunk.dropped for chunk in chunks], DROPPED_PAIRS),
            report=run.finish(),
        )
        alive = np.concatenate([chunk.alive for chunk in chunks] or [np.zeros(0, bool)])
        return result, np.flatnonzero(alive)


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One judged chunk."""

    kept: pa.Table
    dropped: pa.Table
    alive: np.ndarray


class Run:
    """One pass of a recipe's steps over successive chunks of rows."""

    def __init__(self, recipe: Recipe, operators: Sequence[Any], index: DedupMemory | None) -> None:
        self._index = index
        self._steps: list[steps.Step] = []
        self._labels = recipe.labels
        earlier = index.earlier if index else {}
        for label, operator, step in zip(recipe.labels, operators, recipe.process, strict=True):
            (arguments,) = step.values()
            self._steps.append(steps.start(operator, arguments, earlier.get(label)))
        self._length_differences: list[np.ndarray] = []
        self.report = NormalizeReport(
            recipe=recipe.name, recipe_sha=recipe.sha, thresholds=[*recipe.process]
        )

    @property
    def is_whole(self) -> bool:
        """Return whether a step must see all rows at once."""
        return any(step.is_whole for step in self._steps)

    def execute(self, table: pa.Table, executor: Executor, ray_address: str) -> None:
        """Let an executor of data-juicer run our filters. `judge` then uses its verdicts."""
        started = time.perf_counter()
        filters = {}
        executed: list[executors.ExecutedStep] = []
        for number, step in enumerate(self._steps):
            if isinstance(step, steps.StockMapperStep):
                break  # what follows judges the texts that it has edited
            if isinstance(step, steps.PairStep):
                ((name, arguments),) = self.report.thresholds[number].items()
                filters[number] = name, arguments
                taken = executors.ExecutedStep(name, number, is_mark_only=step.is_mark_only)
                self._steps[number] = taken
                executed.append(taken)
        is_complete = ~_incomplete(table).fails
        rows = table.filter(pa.array(is_complete))
        if not filters or not len(rows):
            return
        found = executors.execute(rows, filters, executor=executor, ray_address=ray_address)
        for place, taken in enumerate(executed):
            taken.take(found, is_complete, with_measures=place == 0)
        _add(self.report.seconds_by_operator, executor, time.perf_counter() - started)

    def judge(self, table: pa.Table) -> Judged:
        """Run every step over a chunk."""
        started = time.perf_counter()
        _check_columns(table)
        chunk = steps.Chunk(table.select([*DPO_PAIRS.names, *PROMPT.names]))
        reasons = [np.full(len(table), "", object) for _ in range(4)]
        measures: dict[str, Measure] = {}
        self._drop(chunk, COMPLETE, _incomplete(chunk.table), reasons)
        for step in self._steps:
            begun = time.perf_counter()
            verdict = self._judge_step(step, chunk)
            measures |= {measure.key: measure for measure in verdict.measures}
            if step.is_mark_only:
                found = int((verdict.fails & chunk.alive).sum())
                self.report.findings[step.name] = self.report.findings.get(step.name, 0) + found
            else:
                self._drop(chunk, step.name, verdict, reasons)
            _add(self.report.seconds_by_operator, step.name, time.perf_counter() - begun)
        judged = _split(chunk, reasons, measures)
        self._count(judged, len(table))
        self.report.seconds += time.perf_counter() - started
        return judged

    @staticmethod
    def _judge_step(step: steps.Step, chunk: steps.Chunk) -> RowVerdict:
        try:
            return step.judge(chunk)
        except ReplayPipelineError:
            raise
        except Exception as error:  # an operator can fail in any way; none may be swallowed
            first = chunk.table["state_id"][0].as_py() if len(chunk.table) else None
            raise NormalizeError(
                f"{step.name}: {type(error).__name__}: {error} (in the {len(chunk.table)} rows "
                f"from state {first!r})"
            ) from error

    def _drop(
        self, chunk: steps.Chunk, name: str, verdict: RowVerdict, reasons: list[np.ndarray]
    ) -> None:
        rows = np.flatnonzero(verdict.fails & chunk.alive)
        chunk.alive[rows] = False
        sources = (verdict.fields, verdict.values, verdict.limits)
        reasons[0][rows] = name
        for reason, source in zip(reasons[1:], sources, strict=True):
            reason[rows] = source[rows]
        if len(rows):
            _add(self.report.dropped, name, len(rows))
        for field_name in verdict.fields[rows]:
            _add(self.report.dropped_by_field, f"{name}:{field_name}", 1)

    def _count(self, judged: Judged, n_in: int) -> None:
        report = self.report
        report.n_in += n_in
        report.n_kept += len(judged.kept)
        report.n_dropped += len(judged.dropped)
        if report.n_in != report.n_kept + report.n_dropped:
            raise NormalizeError(
                f"recipe {report.recipe}: {report.n_in} rows in, but {report.n_kept} kept and "
                f"{report.n_dropped} dropped"
            )
        lengths = [pc.utf8_length(judged.kept[side]).to_numpy() for side in SIDES]
        self._length_differences.append(lengths[0] - lengths[1])

    def finish(self) -> NormalizeReport:
        """Write the keys of this batch to the index, and complete the report."""
        self.report.length_bias = _cohens_d(self._length_differences)
        if self._index is not None:
            self._index.save(
                {
                    label: step.memory.added
                    for label, step in zip(self._labels, self._steps, strict=True)
                    if isinstance(step, steps.OrderStep)
                }
            )
        logger.info(
            "normalized with %s: %d of %d pairs kept",
            self.report.recipe,
            self.report.n_kept,
            self.report.n_in,
        )
        return self.report


def _cohens_d(differences: Sequence[np.ndarray]) -> float | None:
    """Return mean over standard deviation; `None` below two values, 0 without any spread."""
    values = np.concatenate([np.zeros(0), *differences])
    if len(values) < 2:
        return None
    deviation = float(values.std(ddof=1))
    return float(values.mean()) / deviation if deviation else 0.0


def _add(counts: dict[str, Any], name: str, amount: float) -> None:
    counts[name] = counts.get(name, 0) + amount


def _check_columns(table: pa.Table) -> None:
    if missing := set(DPO_PAIRS.names) - set(table.column_names):
        raise SchemaError(f"dpo_pairs: columns {sorted(missing)} are missing")


def _incomplete(table: pa.Table) -> RowVerdict:
    """Return rows without an id, a prompt or a side."""
    verdict = RowVerdict.of(len(table))
    for name in _REQUIRED:
        missing = table[name].is_null().to_numpy()
        verdict.fail(np.flatnonzero(missing), name, "null", "present")
    return verdict


def _split(
    chunk: steps.Chunk, reasons: list[np.ndarray], measures: Mapping[str, Measure]
) -> Judged:
    table, alive = chunk.table, pa.array(chunk.alive)
    dropped = table
    for name, values in zip(_DROP_COLUMNS, reasons, strict=True):
        dropped = dropped.append_column(name, pa.array(values, pa.string()))
    kept = table.append_column("stats_json", _stats_json(measures, len(table)))
    for side in SIDES:
        kept = kept.append_column(f"{side}_messages_json", _messages(table, side))
    return Judged(
        kept=kept.filter(alive).select(NORMALIZED_PAIRS.names).cast(NORMALIZED_PAIRS),
        dropped=dropped.filter(pc.invert(alive)).select(DROPPED_PAIRS.names).cast(DROPPED_PAIRS),
        alive=chunk.alive,
    )


def _messages(table: pa.Table, side: str) -> pa.ChunkedArray:
    """Return each side as a list of one message; an action without a message is text."""
    messages = table[f"{side}_action_json"]
    if messages.null_count:
        texts = [
            None if text is None else steps.text_message(text) for text in table[side].to_pylist()
        ]
        messages = pc.coalesce(messages, pa.array(texts, pa.string()))
    return pc.binary_join_element_wise("[", messages, "]", "")


def _stats_json(measures: Mapping[str, Measure], n_rows: int) -> pa.Array:
    """Return the statistics of each row as a JSON object, built column by column."""
    parts: list[Any] = ["{"]
    for number, (key, measure) in enumerate(sorted(measures.items())):
        comma = ", " if number else ""
        parts.append(f"{comma}{json.dumps(key)}: ")
        parts.append(pc.cast(pa.array(measure.values), pa.string()))
    if len(parts) == 1:
        return pa.array(["{}"] * n_rows, pa.string())
    return pc.binary_join_element_wise(*parts, "}", "")


def _no_rows() -> pa.Table:
    return pa.schema([*DPO_PAIRS, *PROMPT]).empty_table()


def _concat(tables: list[pa.Table], schema: pa.Schema) -> pa.Table:
    return pa.concat_tables(tables) if tables else schema.empty_table()
