"""Judge pairs by data-juicer's own executors in a separate process, such as Ray for large corpora.

The executor runs a recipe's filters, on all machines of a Ray cluster. They mark what they would
drop, so every row comes back with its reason. Deduplicators depend on the order of rows, and run in
this process afterwards. So the kept rows are the same as without an executor.
"""

import importlib
import importlib.util
import json
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import pyarrow as pa
import pyarrow.parquet as pq

from replay_pipeline.errors import ConfigError, MissingDependencyError, NormalizeError
from replay_pipeline.normalize import data_juicer
from replay_pipeline.storage.processes import python, start_environment

Executor = Literal["in_process", "default", "ray"]

ROW, STATS = "__row__", "__dj__stats__"
_N_LAST_LINES = 8


def check_executor(executor: Executor) -> None:
    """Check that the executor is known and installed.

    Raises:
        ConfigError: the executor is unknown.
        MissingDependencyError: Ray is needed but isn't installed.
    """
    if executor not in get_args(Executor):
        raise ConfigError(f"executor {executor!r} is not one of {', '.join(get_args(Executor))}")
    if executor == "ray" and importlib.util.find_spec("ray") is None:
        raise MissingDependencyError(
            "Ray is not installed: pip install 'replay-pipeline[normalize,ray]'"
        )


def execute(
    parts: Iterable[pa.Table],
    filters: Sequence[tuple[str, Mapping[str, Any]]],
    *,
    executor: Executor,
    ray_address: str,
) -> dict[int, dict[str, Any]]:
    """Run filters by data-juicer's executor, and return each row's statistics by its number.

    The reason for which a row fails the first filter is under `why.0`, and so on.

    Args:
        parts: rows with their number in `ROW`.
        filters: name and arguments of each filter.
        executor: `default` or `ray`.
        ray_address: `local`, `auto`, or the address of a Ray cluster that sees this machine's
            temporary folder.

    Raises:
        NormalizeError: the executor failed. The message ends with its last output.
    """
    with tempfile.TemporaryDirectory(prefix="normalize-") as name:
        folder = Path(name)
        (folder / "rows").mkdir()
        n_rows = 0
        for part in parts:
            pq.write_table(part, folder / "rows" / f"{n_rows:012}.parquet")
            n_rows += len(part)
        if not n_rows:
            return {}
        recipe = {
            "process": [_marking(*step, number) for number, step in enumerate(filters)],
            "executor_type": executor,
            "ray_address": ray_address,
            "text_keys": ["chosen", "rejected"],
            "dataset_path": str(folder / "rows"),
            "export_path": str(folder / "unused" / "out.parquet"),
            "work_dir": str(folder / "work"),
            "use_cache": False,
            "np": 1,
            "skip_op_error": False,
            "keep_stats_in_res_ds": True,
        }
        (folder / "recipe.yaml").write_text(json.dumps(recipe), "utf-8")
        _run(folder, executor, ray_address)
        files = sorted((folder / "stats").glob("*.parquet"))
        rows = [row for file in files for row in pq.read_table(file).to_pylist()]
        if len(rows) != n_rows:
            raise NormalizeError(f"the executor returned {len(rows)} of {n_rows} rows")
        return {row[ROW]: json.loads(row[STATS]) for row in rows}


def _marking(name: str, arguments: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return a step that drops nothing and stores its reasons.

    No argument stays a mapping, since data-juicer merges those of two uses.
    """
    plain = {k: json.dumps(v) if isinstance(v, dict) else v for k, v in arguments.items()}
    return {name: {**plain, "mark_only": True, "explain": str(number)}}


def _run(folder: Path, executor: Executor, ray_address: str) -> None:
    environment = _ray_environment(ray_address) if executor == "ray" else start_environment()
    log = folder / "log.txt"
    with log.open("wb") as out:
        command = python("replay_pipeline.normalize.executors", str(folder))
        code = subprocess.run(
            command, stdout=out, stderr=out, env=environment, check=False
        ).returncode
    if code != 0:
        words = log.read_text("utf-8", "replace").strip().splitlines()[-_N_LAST_LINES:]
        name = f"ray at {ray_address}" if executor == "ray" else executor
        raise NormalizeError(f"data-juicer's executor {name} failed: {' | '.join(words)}")


def _ray_environment(ray_address: str) -> dict[str, str]:
    if ray_address == "local":
        # A token that Ray makes itself stays in the home folder, and is asked for by later clusters.
        return start_environment(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    # Ray asks a cluster that is silent 20 times, for 40 s each, unless it is told otherwise.
    tokens = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    return start_environment(also=tokens, RAY_NUM_REDIS_GET_RETRIES="2")


def main(folder: Path) -> None:
    """Run `recipe.yaml` of a folder, and write the statistics of each row there.

    data-juicer takes over streams, logs, and the start method, so it runs in its own process.
    """
    recipe = json.loads((folder / "recipe.yaml").read_text("utf-8"))
    is_ray = recipe["executor_type"] == "ray"
    data_juicer.load(with_ray=is_ray)
    if is_ray:
        _connect(recipe["ray_address"])
    config = importlib.import_module("data_juicer.config")
    settings = config.init_configs(["--config", str(folder / "recipe.yaml")])
    module = f"data_juicer.core.executor.{recipe['executor_type']}_executor"
    kind = "RayExecutor" if is_ray else "DefaultExecutor"
    rows = getattr(importlib.import_module(module), kind)(settings).run(skip_export=True)
    (folder / "stats").mkdir()
    for number, table in enumerate(_tables(rows, is_ray=is_ray)):
        # A row's statistics are a struct under Ray, and JSON text in a table of `datasets`.
        stats = [s if isinstance(s, str) else json.dumps(s) for s in table[STATS].to_pylist()]
        found = pa.table({ROW: table[ROW], STATS: pa.array(stats, pa.string())})
        pq.write_table(found, folder / "stats" / f"{number:06}.parquet")


def _connect(ray_address: str) -> None:
    """Connect to Ray before data-juicer does, which would start a dashboard with a local one."""
    alone = {"include_dashboard": False} if ray_address == "local" else {}
    try:
        importlib.import_module("ray").init(ray_address, **alone)
    except (OSError, RuntimeError, ValueError) as error:
        sys.exit(f"Ray at {ray_address} cannot be used: {error}")


def _tables(rows: Any, *, is_ray: bool) -> list[pa.Table]:
    if is_ray:
        ray = importlib.import_module("ray")
        return ray.get(rows.data.select_columns([ROW, STATS]).to_arrow_refs())
    return [rows.select_columns([ROW, STATS]).with_format("arrow")[:]]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
