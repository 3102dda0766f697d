"""The process in which an executor of data-juicer runs: `python -m … FOLDER`.

It runs `recipe.yaml` of the folder, and writes the statistics of each row there. data-juicer takes
over streams, logs, and the start method, so it runs in its own process.
"""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from replay_pipeline.normalize import data_juicer
from replay_pipeline.normalize.executors import ROW, STATS


def main(folder: Path) -> None:
    """Run the recipe of a folder."""
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
