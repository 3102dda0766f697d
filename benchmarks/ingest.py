"""Ingestion against bare `orjson.loads` over the same bytes, and how right it is.

    python benchmarks/ingest.py SESSIONS... [--processes N]

Ingestion is complete: tree, dedup, labels, fidelity, tool schemas, redaction off and on, parquet.
It runs batch by batch in a process of its own, as the pipeline does; CPU seconds are counted and
the imports are not.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import orjson

from replay_pipeline.ingesters import TraceBatch, Traces, discover, ingest, write_traces
from replay_pipeline.ingesters.tool_schemas import merge_tools
from replay_pipeline.sample import SESSIONS_DIR

BATCH_BYTES = 32_000_000


def batches_of(paths: list[Path], share: tuple[int, int] = (0, 1)) -> list[TraceBatch]:
    number, total = share
    return discover(paths, max_batch_bytes=BATCH_BYTES)[number::total]


def parse_only(paths: list[Path]) -> dict[str, Any]:
    n_bytes = 0
    start = time.process_time()
    for batch in batches_of(paths):
        for source in batch.slices:
            with source.path.open("rb") as file:
                for line in file:
                    n_bytes += len(line)
                    try:
                        orjson.loads(line)
                    except orjson.JSONDecodeError:
                        continue
    return {"bytes": n_bytes, "cpu_s": time.process_time() - start}


def ingest_all(paths: list[Path], *, redact: bool, share: tuple[int, int]) -> dict[str, Any]:
    known: set[str] = set()
    totals: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        # The first batch brings in the scanner, pandas and the allocator's pages.
        ingest([s for b in batches_of(paths)[:1] for s in b.slices[:1]], redact=redact)
        start = time.process_time()
        for i, batch in enumerate(batches_of(paths, share)):
            result = ingest(batch.slices, redact=redact, known_state_ids=known)
            known.update(result.states["state_id"].to_pylist())
            out = Path(folder) / str(i)
            write_traces(result, out)
            totals["parquet_bytes"] += sum(
                (out / f"{name}.parquet").stat().st_size for name in ("turns", "states")
            )
            totals["bytes"] += result.report.bytes
            totals["states"] += result.report.n_states
        cpu_s = time.process_time() - start
    rss_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {**totals, "cpu_s": cpu_s, "peak_rss_mb": round(rss_mb, 1)}


def correctness(paths: list[Path]) -> dict[str, Any]:
    """Fidelity, tool order, accounting, and tool schemas on sessions they were not learnt on."""
    result = ingest(paths, redact=False)
    report = result.report
    traces = Traces(
        sessions=result.sessions, turns=result.turns, states=result.states, tools=result.tools
    )
    start = time.process_time()
    n_broken = sum(not in_order(state["messages"]) for state in traces.materialize())
    per_state_ms = (time.process_time() - start) / max(1, len(traces)) * 1e3
    errors = [abs(f - 1) for f in result.states["fidelity"].to_pylist() if f is not None]
    return {
        "sessions": report.n_sessions,
        "states": report.n_states,
        "rows": report.rows,
        "rows_unaccounted_for": report.rows - report.rows_used - sum(report.skipped.values()),
        "skipped": report.skipped,
        "usage": report.usage,
        "invalid_tool_orders": n_broken,
        "states_within_10_percent": round(sum(e < 0.1 for e in errors) / len(errors), 4),
        "median_error": round(sorted(errors)[len(errors) // 2], 4),
        "materialize_ms_per_state": round(per_state_ms, 4),
        "held_out_calls_accepted": round(held_out(paths), 4),
    }


def in_order(messages: list[dict[str, Any]]) -> bool:
    waiting: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            if not waiting or waiting.pop(0) != message["tool_call_id"]:
                return False
        elif waiting:
            return False
        else:
            waiting = [call["id"] for call in message.get("tool_calls", ())]
    return not waiting


def held_out(paths: list[Path]) -> float:
    """Share of calls in one half of the sessions that schemas of the other half accept."""
    from jsonschema import Draft202012Validator

    slices = [s for batch in batches_of(paths) for s in batch.slices]
    n_calls = n_accepted = 0
    for learn, judge in ((slices[::2], slices[1::2]), (slices[1::2], slices[::2])):
        tools: dict[str, list[Any]] = {}
        for row in ingest(learn, redact=False).tools.to_pylist():
            tools.setdefault(row["name"], []).append(json.loads(row["tool_json"]))
        validators = {
            name: Draft202012Validator(merge_tools(same)["function"]["parameters"])
            for name, same in tools.items()
        }
        for text in ingest(judge, redact=False).states["action_tool_calls_json"].to_pylist():
            for call in json.loads(text or "[]"):
                function = call["function"]
                n_calls += 1
                validator = validators.get(function["name"])
                if validator is not None:
                    n_accepted += validator.is_valid(json.loads(function["arguments"]))
    return n_accepted / max(1, n_calls)


def in_child(mode: str, paths: list[Path], share: str = "0/1") -> subprocess.Popen[bytes]:
    command = [sys.executable, __file__, *map(str, paths), "--mode", mode, "--share", share]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


def finished(child: subprocess.Popen[bytes]) -> dict[str, Any]:
    out, _ = child.communicate()
    if child.returncode:
        raise SystemExit(f"worker failed with {child.returncode}")
    return json.loads(out)


def compare(paths: list[Path], n_processes: int) -> dict[str, Any]:
    base = finished(in_child("parse", paths))
    n_mb = base["bytes"] / 1e6
    report: dict[str, Any] = {
        "mb": round(n_mb, 1),
        "orjson_mb_per_s": round(n_mb / base["cpu_s"], 1),
    }
    for mode in ("plain", "redacted"):
        run = finished(in_child(mode, paths))
        report[mode] = {
            "mb_per_s": round(n_mb / run["cpu_s"], 1),
            "ratio_to_orjson": round(base["cpu_s"] / run["cpu_s"], 3),
            "peak_rss_mb": run["peak_rss_mb"],
            "parquet_share_of_raw": round(run["parquet_bytes"] / base["bytes"], 4),
        }
    walls = []
    for n in (1, n_processes):
        start = time.perf_counter()
        children = [in_child("plain", paths, f"{i}/{n}") for i in range(n)]
        for child in children:
            finished(child)
        walls.append(time.perf_counter() - start)
    report["scaling"] = {"processes": n_processes, "speedup": round(walls[0] / walls[1], 2)}
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="*", type=Path, default=[SESSIONS_DIR])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--mode", choices=["parse", "plain", "redacted"], help=argparse.SUPPRESS)
    parser.add_argument("--share", default="0/1", help=argparse.SUPPRESS)
    options = parser.parse_args()
    number, total = map(int, options.share.split("/"))
    if options.mode == "parse":
        report = parse_only(options.paths)
    elif options.mode:
        redact = options.mode == "redacted"
        report = ingest_all(options.paths, redact=redact, share=(number, total))
    else:
        report = compare(options.paths, options.processes)
        report["correctness"] = correctness(options.paths)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
