"""`DJNormalizer` keeps the pairs and lessons that are fit to publish, and gives a reason for every other one."""

import json
import logging
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute

from replay_pipeline.errors import (
    NormalizeError,
    ReplayPipelineError,
    SchemaError,
)
from replay_pipeline.normalize import data_juicer, executors
from replay_pipeline.normalize.executors import Executor
from replay_pipeline.normalize.memory import Memory
from replay_pipeline.normalize.pair import READ_COLUMNS, SIDES, Pair
from replay_pipeline.normalize.recipe import Recipe, load_recipe
from replay_pipeline.storage.pair_rows import PromptsOf, json_or_none, row_of_pair, with_prompts
from replay_pipeline.storage.schemas import (
    DPO_PAIRS,
    DROPPED_PAIRS,
    DROPPED_POSITIVES,
    NORMALIZED_PAIRS,
    POSITIVES,
)
from replay_pipeline.storage.tables import table_of
from replay_pipeline.types import DPOPair, NormalizedDPOPair

logger = logging.getLogger(__name__)

pc: Any = pyarrow.compute  # makes its functions at import, unknown to type checkers
_ROWS_PER_FILE = 256
_REQUIRED = ("state_id", "state_messages_json", "chosen", "rejected")
_DROP_COLUMNS = ("drop_operator", "drop_field", "drop_value", "drop_limit")
COMPLETE = "complete"
"""Operator name for rows that are dropped because something is missing."""


@dataclass(kw_only=True)
class NormalizeReport:
    """The rows that a recipe kept, changed, and dropped."""

    recipe: str
    recipe_sha: str
    n_in: int = 0
    n_kept: int = 0
    n_dropped: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    """Number of rows by the operator that dropped them."""
    n_lessons_in: int = 0
    n_lessons_kept: int = 0
    dropped_lessons: dict[str, int] = field(default_factory=dict)
    """Number of lessons by the operator that dropped them."""
    findings: dict[str, int] = field(default_factory=dict)
    """Number of rows that an operator marked but did not drop."""
    length_bias: float | None = None
    """Cohen's d of the lengths (chosen minus rejected) of the kept rows. `None` for fewer than two rows."""
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class NormalizeResult:
    """The kept rows, the dropped rows, and the report. Each row is kept or dropped."""

    kept: pa.Table
    """Schema `NORMALIZED_PAIRS`, in the order of the input."""
    dropped: pa.Table
    """Schema `DROPPED_PAIRS`, in the order of the input."""
    lessons: pa.Table
    """Kept lessons. Schema `POSITIVES`, in the order of the input."""
    dropped_lessons: pa.Table
    """Schema `DROPPED_POSITIVES`, in the order of the input."""
    report: NormalizeReport
    keys: Mapping[str, Sequence[bytes]]
    """What deduplicators remember of the kept rows, by step. Later batches compare with it."""


@dataclass
class Judged:
    """What became of a row."""

    drop: tuple[str, str, str, str] | None
    """Operator, field, value and limit for which it is dropped."""
    stats: dict[str, float] = field(default_factory=dict)


class DJNormalizer:
    """The runner of a data-juicer recipe over preference pairs, in this process.

    Our operators (`pair_*`) see both sides of a pair, and so do data-juicer's filters, which run
    their own code with separate statistics for each side.

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
            allow_operators: filters that the recipe may use beyond those that execute nothing.

        Raises:
            UntrustedError: an operator may execute something, and is not allowed to.
            ConfigError: no such recipe, or an operator or parameter in it is unknown or wrong.
            MissingDependencyError: data-juicer, or a package that an operator needs, is missing.
        """
        self.recipe: Recipe = load_recipe(recipe, allow_operators=allow_operators)
        operators = data_juicer.build_operators(
            self.recipe.process, where=f"recipe {self.recipe.path}"
        )
        executors.check_executor(executor)
        self._steps = dict(zip(self.recipe.labels, operators, strict=True))
        self._executor: Executor = executor
        self._ray_address = ray_address

    def memories(self, earlier: Mapping[str, Memory] | None = None) -> dict[str, Memory]:
        """Return a new memory for each step that judges a row by earlier rows."""
        known = earlier or {}
        return {
            label: operator.new_memory(known.get(label))
            for label, operator in self._steps.items()
            if hasattr(operator, "new_memory")
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
        table = table_of([row_of_pair(pair) for pair in pairs], "dpo_pairs")
        result, judged = self._run(table, lambda ids: [states[each] for each in ids])
        kept = (pair for pair, one in zip(pairs, judged, strict=True) if one.drop is None)
        normalized: list[NormalizedDPOPair] = []
        for pair, row in zip(kept, result.kept.to_pylist(), strict=True):
            extra = {
                "chosen": row["chosen"],
                "rejected": row["rejected"],
                "chosen_messages": json.loads(row["chosen_messages_json"]),
                "rejected_messages": json.loads(row["rejected_messages_json"]),
                "stats": json.loads(row["stats_json"]),
            }
            normalized.append(cast(NormalizedDPOPair, {**pair, **extra}))
        return normalized

    def run(
        self,
        table: pa.Table,
        *,
        lessons: pa.Table | None = None,
        prompts: PromptsOf | None = None,
        earlier: Mapping[str, Memory] | None = None,
    ) -> NormalizeResult:
        """Judge every row of a `DPO_PAIRS` table, with a few prompts in memory at a time.

        Then every lesson of a `POSITIVES` table is judged, as a pair of its action with itself.

        Raises:
            NormalizeError: an operator failed, or rows were lost.
            SchemaError: a column is missing, or the prompts are.
        """
        return self._run(table, prompts, earlier, lessons)[0]

    def _run(
        self,
        table: pa.Table,
        prompts: PromptsOf | None,
        earlier: Mapping[str, Memory] | None = None,
        lessons: pa.Table | None = None,
    ) -> tuple[NormalizeResult, list[Judged]]:
        started = time.perf_counter()
        if missing := set(DPO_PAIRS.names) - set(table.column_names):
            raise SchemaError(f"dpo_pairs: columns {sorted(missing)} are missing")
        lessons = POSITIVES.empty_table() if lessons is None else lessons
        report = NormalizeReport(
            recipe=self.recipe.name, recipe_sha=self.recipe.sha, n_in=len(table)
        )
        memories = self.memories(earlier)
        judged = self._judge_all(table, prompts, memories, report.findings)
        of_lessons = self._judge_all(_with_itself(lessons), prompts, memories, report.findings)
        kept, dropped = _kept_and_dropped(table, judged)
        report.n_kept, report.n_dropped = len(kept), len(dropped)
        report.dropped = dict(Counter(dropped["drop_operator"].to_pylist()))
        report.length_bias = _cohens_d(kept)
        taught, untaught = _kept_and_dropped(lessons, of_lessons)
        report.n_lessons_in, report.n_lessons_kept = len(lessons), len(taught)
        report.dropped_lessons = dict(Counter(untaught["drop_operator"].to_pylist()))
        result = NormalizeResult(
            kept=_as(NORMALIZED_PAIRS, _in_chat_form(kept, judged)),
            dropped=_as(DROPPED_PAIRS, dropped),
            lessons=_as(POSITIVES, taught),
            dropped_lessons=_as(DROPPED_POSITIVES, untaught),
            report=report,
            keys={label: memory.added for label, memory in memories.items()},
        )
        report.seconds = time.perf_counter() - started
        logger.info(
            "normalized with %s: %d of %d pairs kept", report.recipe, report.n_kept, report.n_in
        )
        return result, judged

    def _judge_all(
        self,
        table: pa.Table,
        prompts: PromptsOf | None,
        memories: Mapping[str, Memory],
        findings: dict[str, int],
    ) -> list[Judged]:
        executed = self._execute(table, prompts) if self._executor != "in_process" else None
        judged: list[Judged] = []
        for part in with_prompts(table, prompts):
            found = None
            if executed is not None:
                found = [executed.get(len(judged) + row, {}) for row in range(len(part))]
            judged += self._judge(_rows(part), memories, findings, found)
        if len(judged) != len(table):
            raise NormalizeError(f"{len(table)} rows in, but {len(judged)} judged")
        return judged

    def _judge(
        self,
        rows: Sequence[Mapping[str, Any]],
        memories: Mapping[str, Memory],
        findings: dict[str, int],
        executed: Sequence[Mapping[str, Any]] | None,
    ) -> list[Judged]:
        """Run every step over rows. What one step drops, the next doesn't see."""
        judged = [Judged(_missing(row)) for row in rows]
        pairs = [Pair(row) for row in rows]
        n_filters = 0
        for label, operator in self._steps.items():
            alive = [n for n, each in enumerate(judged) if each.drop is None]
            name = getattr(operator, "title", operator._name)
            if label in memories:
                keys = _called(name, operator.keys, [pairs[n] for n in alive])
                for n, key in zip(alive, keys, strict=True):
                    if reason := memories[label].refuse(key):
                        judged[n].drop = (name, "pair", *reason)
                continue
            if executed is None:
                found = _called(name, operator.judge, [pairs[n] for n in alive])
                each = [(one.stats, one.reason) for one in found]
            else:
                each = [_taken(executed[n], n_filters) for n in alive]
            n_filters += 1
            for n, (stats, reason) in zip(alive, each, strict=True):
                judged[n].stats |= stats
                if reason and operator.mark_only:
                    findings[name] = findings.get(name, 0) + 1
                elif reason:
                    judged[n].drop = (name, *reason)
        return judged

    def _execute(self, table: pa.Table, prompts: PromptsOf | None) -> dict[int, dict[str, Any]]:
        """Let an executor of data-juicer run the filters, and return its statistics by row."""
        filters = [
            next(iter(step.items()))
            for step, operator in zip(self.recipe.process, self._steps.values(), strict=True)
            if not hasattr(operator, "new_memory")
        ]

        def parts() -> Iterator[pa.Table]:
            start = 0
            for part in with_prompts(table, prompts, n_rows=_ROWS_PER_FILE):
                whole = [n for n, row in enumerate(_rows(part)) if _missing(row) is None]
                numbered = _readable(part).append_column(
                    executors.ROW, pa.array(range(start, start + len(part)), pa.int64())
                )
                yield numbered.take(whole)
                start += len(part)

        if not filters:
            return {}
        return executors.execute(
            parts(), filters, executor=self._executor, ray_address=self._ray_address
        )


def _called(name: str, judge: Any, pairs: Sequence[Pair]) -> Any:
    try:
        return judge(pairs)
    except ReplayPipelineError:
        raise
    except Exception as error:  # an operator can fail in any way; none may be swallowed
        first = pairs[0].get("state_id") if pairs else None
        raise NormalizeError(
            f"{name}: {type(error).__name__}: {error} (in the {len(pairs)} rows from state {first!r})"
        ) from error


def _taken(stats: Mapping[str, Any], number: int) -> tuple[dict[str, float], Any]:
    """Return the statistics of a row from an executor, and the reason of one filter."""
    reason = stats[f"why.{number}"]
    plain = {key: value for key, value in stats.items() if not isinstance(value, str)}
    return plain, json.loads(reason) if reason else None


def _readable(table: pa.Table) -> pa.Table:
    return table.select([name for name in READ_COLUMNS if name in table.column_names])


def _rows(table: pa.Table) -> list[dict[str, Any]]:
    return _readable(table).to_pylist()


def _missing(row: Mapping[str, Any]) -> tuple[str, str, str, str] | None:
    """Return why a row can't be judged: it has no id, prompt or side."""
    absent = next((name for name in _REQUIRED if row.get(name) is None), None)
    return None if absent is None else (COMPLETE, absent, "null", "present")


def _with_itself(lessons: pa.Table) -> pa.Table:
    """Return lessons as pairs of an action with itself, which have no worse side."""
    for side in SIDES:
        lessons = lessons.append_column(side, lessons["action"])
        lessons = lessons.append_column(f"{side}_action_json", lessons["action_json"])
    return lessons


def _kept_and_dropped(table: pa.Table, judged: Sequence[Judged]) -> tuple[pa.Table, pa.Table]:
    is_kept = pa.array([each.drop is None for each in judged], pa.bool_())
    drops = [each.drop for each in judged if each.drop is not None]
    dropped = table.filter(pc.invert(is_kept))
    for place, name in enumerate(_DROP_COLUMNS):
        values = [drop[place] for drop in drops]
        dropped = dropped.append_column(name, pa.array(values, pa.string()))
    return table.filter(is_kept), dropped


def _as(schema: pa.Schema, table: pa.Table) -> pa.Table:
    return table.select(schema.names).cast(schema)


def _in_chat_form(kept: pa.Table, judged: Sequence[Judged]) -> pa.Table:
    """Return kept pairs with the statistics of their judgment, and each side as a list of messages."""
    stats = [json.dumps(each.stats, sort_keys=True) for each in judged if each.drop is None]
    kept = kept.append_column("stats_json", pa.array(stats, pa.string()))
    for side in SIDES:
        kept = kept.append_column(f"{side}_messages_json", _messages(kept, side))
    return kept


def _messages(table: pa.Table, side: str) -> pa.ChunkedArray:
    """Return each side as a list of one message; an action without a message is text."""
    messages = table[f"{side}_action_json"]
    if messages.null_count:
        texts = [
            json_or_none({"role": "assistant", "content": text}) for text in table[side].to_pylist()
        ]
        messages = pc.coalesce(messages, pa.array(texts, pa.string()))
    return pc.binary_join_element_wise("[", messages, "]", "")


def _cohens_d(kept: pa.Table) -> float | None:
    """Return mean over standard deviation of how much longer chosen is; `None` below two values, 0 without any spread."""
    lengths = [pc.utf8_length(kept[side]).to_pylist() for side in SIDES]
    differences = [chosen - rejected for chosen, rejected in zip(*lengths, strict=True)]
    if len(differences) < 2:
        return None
    deviation = stdev(differences)
    return fmean(differences) / deviation if deviation else 0.0
