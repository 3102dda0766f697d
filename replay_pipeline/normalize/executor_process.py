"""The process in which an executor of data-juicer runs: `python -m … FOLDER`.

It reads `job.json` and the rows in the folder, and writes the statistics there. data-juicer takes
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

_ROW, _STATS = "__row__", "__dj__stats__"


def main(folder: Path) -> None:
    """Run the job of a folder."""
    job = json.loads((folder / "job.json").read_text("utf-8"))
    is_ray = job["executor"] == "ray"
    data_juicer.load(with_ray=is_ray)
    recipe = {
        "process": job["process"],
        "executor_type": job["executor"],
        "ray_address": job["ray_address"],
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
    if is_ray:
        _connect(job["ray_address"])
    config = importlib.import_module("data_juicer.config")
    settings = config.init_configs(["--config", str(folder / "recipe.yaml")])
    module = f"data_juicer.core.executor.{job['executor']}_executor"
    kind = {"ray": "RayExecutor", "default": "DefaultExecutor"}[job["executor"]]
    rows = getattr(importlib.import_module(module), kind)(settings).run(skip_export=True)
    (folder / "stats").mkdir()
    for number, table in enumerate(_tables(rows, is_ray=is_ray)):
        stats = [_as_mapping(value) for value in table[_STATS].to_pylist()]
        columns = {_ROW: table[_ROW].combine_chunks()}
        columns |= {name: [row[name] for row in stats] for name in (stats[0] if stats else ())}
        pq.write_table(pa.table(columns), folder / "stats" / f"{number:06}.parquet")


def _connect(ray_address: str) -> None:
    """Connect to Ray before data-juicer does, which would start a dashboard with a local one."""
    alone = {"include_dashboard": False} if ray_address == "local" else {}
    try:
        importlib.import_module("ray").init(ray_address, **alone)
    except (OSError, RuntimeError, ValueError) as error:
        sys.exit(f"Ray at {ray_address} cannot be used: {error}")


def _as_mapping(stats: Any) -> dict[str, Any]:
    """Return statistics of a row: a struct under Ray, JSON text in a table of `datasets`."""
    return json.loads(stats) if isinstance(stats, str) else stats


def _tables(rows: Any, *, is_ray: bool) -> list[pa.Table]:
    if is_ray:
        ray = importlib.import_module("ray")
        return ray.get(rows.data.select_columns([_ROW, _STATS]).to_arrow_refs())
    return [rows.select_columns([_ROW, _STATS]).with_format("arrow")[:]]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
