"""Ingestion against bare `orjson.loads` over the same bytes, and how right it is.

    python benchmarks/ingest.py SESSIONS... [--processes N] [--rounds N] [--json FILE]

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
from itertools import cycle
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import orjson

from replay_pipeline.ingesters import TraceBatch, Traces, discover, ingest, write_traces
from replay_pipeline.ingesters.tool_schemas import merge_tools
from replay_pipeline.testing.sample import SESSIONS_DIR

BATCH_BYTES = 32_000_000
SHARED_BATCH_BYTES = 4_000_000
"""Small enough that every process gets an equal share of the bytes."""


def batches_of(paths: list[Path], max_bytes: int = BATCH_BYTES) -> list[TraceBatch]:
    return discover(paths, max_batch_bytes=max_bytes)


def share_of(paths: list[Path], number: int, total: int) -> list[TraceBatch]:
    """One process's batches: the largest first, each to whoever has least."""
    shares: list[list[TraceBatch]] = [[] for _ in range(total)]
    batches = batches_of(paths, SHARED_BATCH_BYTES)
    for batch in sorted(batches, key=lambda b: -b.n_bytes):
        min(shares, key=lambda share: sum(b.n_bytes for b in share)).append(batch)
    return shares[number]


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


def ingest_all(batches: list[TraceBatch], *, redact: bool) -> dict[str, Any]:
    known: set[str] = set()
    totals: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        # The first file brings in the scanner and the allocator's pages.
        ingest([s for b in batches[:1] for s in b.slices[:1]], redact=redact)
        start, begun = time.process_time(), time.perf_counter()
        for i, batch in enumerate(batches):
            result = ingest(batch.slices, redact=redact, known_state_ids=known)
            known.update(result.states["state_id"].to_pylist())
            out = Path(folder) / str(i)
            write_traces(result, out)
            totals["parquet_bytes"] += sum(
                (out / f"{name}.parquet").stat().st_size for name in ("turns", "states")
            )
            totals["bytes"] += result.report.bytes
            totals["states"] += result.report.n_states
            del result  # or it is there while the next batch is read
        cpu_s, wall_s = time.process_time() - start, time.perf_counter() - begun
    rss_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {**totals, "cpu_s": cpu_s, "wall_s": wall_s, "peak_rss_mb": round(rss_mb, 1)}


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


def long_session(paths: list[Path], path: Path, n_bytes: int) -> None:
    """Write one session of about so many bytes: those in `paths`, one below the other, again and again.

    Every time rows, messages and calls have new names.
    """
    sources = [source.path for batch in batches_of(paths) for source in batch.slices]
    with path.open("wb") as file:
        last = None
        for number, source in enumerate(cycle(sources)):
            rows = [row for line in source.read_bytes().splitlines() if (row := _row(line))]
            for row in rows:
                file.write(orjson.dumps(_renamed(row, f"-{number}", last)) + b"\n")
            last = f"{rows[-1]['uuid']}-{number}" if rows else last
            if file.tell() >= n_bytes:
                return


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return row if row.get("uuid") else None


def _renamed(value: Any, ending: str, last: str | None) -> Any:
    if isinstance(value, list):
        return [_renamed(item, ending, last) for item in value]
    if not isinstance(value, dict):
        return value
    renamed = {key: _renamed(item, ending, last) for key, item in value.items()}
    for key in {"uuid", "parentUuid", "id", "tool_use_id", "agentId"} & value.keys():
        renamed[key] = f"{value[key]}{ending}" if value[key] is not None else last
    for key in {"compactedToolIds", "uuids"} & value.keys():
        renamed[key] = [f"{name}{ending}" for name in value[key]]
    for key in {"anchorUuid", "headUuid", "tailUuid"} & value.keys():
        renamed[key] = f"{value[key]}{ending}"
    return renamed


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


def in_child(mode: str, paths: list[Path], share: str = "0/0") -> subprocess.Popen[bytes]:
    command = [sys.executable, __file__, *map(str, paths), "--mode", mode, "--share", share]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


def finished(child: subprocess.Popen[bytes]) -> dict[str, Any]:
    out, _ = child.communicate()
    if child.returncode:
        raise SystemExit(f"worker failed with {child.returncode}")
    return json.loads(out)


def compare(paths: list[Path], n_processes: int, n_rounds: int) -> dict[str, Any]:
    """The least CPU of each mode over rounds that take turns, so that a busy machine hits all."""
    runs: dict[str, list[dict[str, Any]]] = {"parse": [], "plain": [], "redacted": []}
    for _ in range(n_rounds):
        for mode, found in runs.items():
            found.append(finished(in_child(mode, paths)))
    best = {mode: min(found, key=lambda run: run["cpu_s"]) for mode, found in runs.items()}
    base = best["parse"]
    n_mb = base["bytes"] / 1e6
    report: dict[str, Any] = {
        "mb": round(n_mb, 1),
        "orjson_mb_per_s": round(n_mb / base["cpu_s"], 1),
    }
    for mode in ("plain", "redacted"):
        report[mode] = {
            "mb_per_s": round(n_mb / best[mode]["cpu_s"], 1),
            "ratio_to_orjson": round(base["cpu_s"] / best[mode]["cpu_s"], 3),
            "peak_rss_mb": max(run["peak_rss_mb"] for run in runs[mode]),
            "parquet_share_of_raw": round(best[mode]["parquet_bytes"] / base["bytes"], 4),
        }
        report[mode]["scaling"] = scaling(paths, mode, n_processes, n_rounds)
    return report


def scaling(paths: list[Path], mode: str, n_processes: int, n_rounds: int) -> dict[str, Any]:
    """One process over all batches against several that share them, in turns.

    `cpu_ratio` is what sharing costs: CPU seconds of all together over those of one, and
    `cpu_speedup` those of one over those of the slowest. Wall times leave out starting the
    interpreters, and mean something only where the cores are idle.
    """
    totals: dict[int, list[tuple[float, float, float]]] = {1: [], n_processes: []}
    for _ in range(n_rounds):
        for n, found in totals.items():
            runs = [finished(c) for c in [in_child(mode, paths, f"{i}/{n}") for i in range(n)]]
            cpu_s, wall_s = ([run[name] for run in runs] for name in ("cpu_s", "wall_s"))
            found.append((sum(cpu_s), max(cpu_s), max(wall_s)))
    (cpu_1, _, wall_1), (cpu_n, slowest, wall_n) = (
        map(min, zip(*totals[n], strict=True)) for n in totals
    )
    n_bytes = sum(batch.n_bytes for batch in batches_of(paths))
    return {
        "processes": n_processes,
        "cpu_ratio": round(cpu_n / cpu_1, 3),
        "cpu_speedup": round(cpu_1 / slowest, 2),
        "wall_speedup": round(wall_1 / wall_n, 2),
        "cpu_s_of_slowest_for_5_gb": round(slowest * 5e9 / n_bytes, 1),
        "wall_s_for_5_gb": round(wall_n * 5e9 / n_bytes, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="*", type=Path, default=[SESSIONS_DIR])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--mode", choices=["parse", "plain", "redacted"], help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--share", default="0/0", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--long-mb", type=int, help="one session of that size: memory only")
    options = parser.parse_args()
    if options.long_mb and not options.mode:
        with tempfile.TemporaryDirectory() as folder:
            long = Path(folder) / "long.jsonl"
            n_bytes = options.long_mb * 1_000_000
            long_session(options.paths, long, n_bytes)
            report = {mode: finished(in_child(mode, [long])) for mode in ("plain", "redacted")}
    elif options.mode == "parse":
        report = parse_only(options.paths)
    elif options.mode:
        number, total = map(int, options.share.split("/"))
        batches = share_of(options.paths, number, total) if total else batches_of(options.paths)
        report = ingest_all(batches, redact=options.mode == "redacted")
    else:
        report = compare(options.paths, options.processes, options.rounds)
        report["correctness"] = correctness(options.paths)
    text = json.dumps(report, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
