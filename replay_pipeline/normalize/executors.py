"""Judge rows by data-juicer's own executors in a separate process, such as Ray for large corpora.

The executor computes the verdicts of a recipe's row filters, on all machines of a Ray cluster. The
rest runs here afterwards: deduplicators and caps, which depend on the order of rows, data-juicer's
operators on a column, and all steps after an edit of a text. So the kept rows are the same as
without an executor, and every dropped row has its reason.
"""

import importlib.util
import json
import logging
import re
import secrets
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from replay_pipeline.errors import ConfigError, MissingDependencyError, NormalizeError
from replay_pipeline.normalize.steps import Chunk
from replay_pipeline.normalize.verdict import Measure, RowVerdict
from replay_pipeline.normalize.views import READ_COLUMNS
from replay_pipeline.processes import python, start_environment

logger = logging.getLogger(__name__)

Executor = Literal["in_process", "default", "ray"]

_PROGRAM = Path(__file__).with_name("executor_process.py")
_ROW, _WHY = "__row__", "why."
_ROWS_PER_FILE = 10_000
_N_LAST_LINES = 8
_RAY_ADDRESS = re.compile(r"(?:ray://)?(\[.+\]|[^:/\[\]]+):(\d+)")
_CONNECT_S = 10.0


class ExecutedStep:
    """A filter whose verdicts come from an executor."""

    is_whole = True

    def __init__(self, name: str, number: int, *, is_mark_only: bool) -> None:
        self.name, self.is_mark_only = name, is_mark_only
        self._reason = f"{_WHY}{number}"
        self._verdict = RowVerdict.of(0)

    def take(
        self, found: Mapping[str, np.ndarray], is_complete: np.ndarray, *, with_measures: bool
    ) -> None:
        """Store the results for the complete rows."""
        rows = np.flatnonzero(is_complete)
        measures = _measures(found, is_complete) if with_measures else ()
        self._verdict = RowVerdict.of(len(is_complete), measures)
        for row, reason in zip(rows, found[self._reason], strict=True):
            if reason:
                self._verdict.fail([row], *json.loads(reason))

    def judge(self, chunk: Chunk) -> RowVerdict:
        """Return the results for the rows of a chunk, or an empty result without rows."""
        return self._verdict if len(self._verdict.fails) else RowVerdict.of(len(chunk.alive))


def _measures(found: Mapping[str, np.ndarray], is_complete: np.ndarray) -> list[Measure]:
    measures = []
    for key, values in found.items():
        if values.dtype.kind in "if":
            side, _, metric = key.partition(".")
            every = np.zeros(len(is_complete), values.dtype)
            every[is_complete] = values
            measures.append(Measure(field=side, metric=metric, values=every))
    return measures


def check_executor(executor: Executor) -> None:
    """Check that the executor is known and installed.

    Raises:
        ConfigError: the executor is unknown.
        MissingDependencyError: Ray is needed but isn't installed.
    """
    if executor not in ("in_process", "default", "ray"):
        raise ConfigError(f"executor {executor!r} is not one of in_process, default, ray")
    if executor == "ray" and importlib.util.find_spec("ray") is None:
        raise MissingDependencyError(
            "Ray is not installed: pip install 'replay-pipeline[normalize,ray]'"
        )


def execute(
    table: pa.Table,
    filters: Mapping[int, tuple[str, Mapping[str, Any]]],
    *,
    executor: Executor,
    ray_address: str,
) -> dict[str, np.ndarray]:
    """Run filters over the rows of a table by data-juicer's executor, and return statistics and verdicts.

    Args:
        table: columns of `DPO_PAIRS`, complete rows.
        filters: name and arguments of each filter, by its index in the recipe.
        executor: `default` or `ray`.
        ray_address: `local`, `auto`, or the address of a Ray cluster that sees this machine's
            temporary folder.

    Raises:
        NormalizeError: no cluster listens at `ray_address`, or the executor failed. The message
            ends with its last output.
    """
    if executor == "ray":
        _refuse_unreachable(ray_address)
    process = [
        {name: {**_unmerged(arguments), "mark_only": True, "explain": str(number)}}
        for number, (name, arguments) in filters.items()
    ]
    with tempfile.TemporaryDirectory(prefix="normalize-") as name:
        folder = Path(name)
        _write_rows(table, folder / "rows")
        job = {"process": process, "executor": executor, "ray_address": ray_address}
        (folder / "job.json").write_text(json.dumps(job), "utf-8")
        log = folder / "log.txt"
        with log.open("wb") as out:
            command = python(f"{__package__}.{_PROGRAM.stem}", str(folder))
            environment = (
                _ray_environment(ray_address) if executor == "ray" else start_environment()
            )
            code = subprocess.run(
                command, stdout=out, stderr=out, env=environment, check=False
            ).returncode
        if code != 0:
            words = log.read_text("utf-8", "replace").strip().splitlines()[-_N_LAST_LINES:]
            name = f"ray at {ray_address}" if executor == "ray" else executor
            raise NormalizeError(f"data-juicer's executor {name} failed: {' | '.join(words)}")
        return _read_stats(folder / "stats", len(table))


def _unmerged(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of which no mapping is left, since data-juicer merges those of two uses."""
    return {
        name: json.dumps(value) if isinstance(value, dict) else value
        for name, value in arguments.items()
    }


def _refuse_unreachable(ray_address: str) -> None:
    """Refuse an address at which nobody listens; Ray would go on asking there for minutes.

    Raises:
        NormalizeError: nobody listens at the address.
    """
    if (named := _RAY_ADDRESS.fullmatch(ray_address)) is None:
        return  # `local`, `auto` and what only Ray understands
    try:
        socket.create_connection((named[1].strip("[]"), int(named[2])), _CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise NormalizeError(
            f"no Ray cluster is at {ray_address} ({error}): start one there (`ray start --head`), "
            "or set normalize.ray_address to where one runs, or normalize.executor to in_process"
        ) from error


def _ray_environment(ray_address: str) -> dict[str, str]:
    if ray_address == "local":
        # A token that Ray makes itself stays in the home folder, and is asked for by later clusters.
        return start_environment(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    # Ray asks a cluster that is silent 20 times, for 40 s each, unless it is told otherwise.
    tokens = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    return start_environment(also=tokens, RAY_NUM_REDIS_GET_RETRIES="2")


def _write_rows(table: pa.Table, folder: Path) -> None:
    folder.mkdir()
    names = [name for name in READ_COLUMNS if name in table.column_names]
    table = table.select(names).append_column(_ROW, pa.array(range(len(table)), pa.int64()))
    for start in range(0, len(table), _ROWS_PER_FILE):
        pq.write_table(table.slice(start, _ROWS_PER_FILE), folder / f"{start:012}.parquet")


def _read_stats(folder: Path, n_rows: int) -> dict[str, np.ndarray]:
    parts = [pq.read_table(path) for path in sorted(folder.glob("*.parquet"))]
    rows = pa.concat_tables(parts).sort_by(_ROW) if parts else pa.table({_ROW: []})
    if rows[_ROW].to_pylist() != list(range(n_rows)):
        raise NormalizeError(f"the executor returned {len(rows)} of {n_rows} rows")
    return {
        name: rows[name].to_numpy(zero_copy_only=False)
        for name in rows.column_names
        if name != _ROW
    }
