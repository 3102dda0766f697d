"""CPU and memory of normalizing pairs: ours, and data-juicer's executor.

    python benchmarks/normalize.py --pairs 100000

Both apply the thresholds of the recipe `default` to both sides and remove duplicates, and must
keep the same rows. data-juicer's stock filters keep one statistic per row and metric, so the
executor gets two passes, one per side, and one more column for its deduplicator. All read the same
file and write the kept rows; ours writes the dropped ones with their reasons as well.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

WORDS = ["the", "parser", "reads", "every", "token", "before", "it", "decides", "what", "to", "do"]
TOOLS = ("Read", "Bash", "Edit", "Grep", "Write")


def text(rng: random.Random) -> str:
    """An action as agents write them: prose, code, or a call with its arguments."""
    kind = rng.random()
    lines = rng.randrange(2, 110)
    if kind < 0.02:
        return rng.choice(["ok", "done", "x", ""])
    if kind < 0.04:
        return "-" * rng.randrange(20, 400) + " | ".join(str(n) for n in range(lines))
    prose = [" ".join(rng.choices(WORDS, k=rng.randrange(6, 18))) + "." for _ in range(lines)]
    if kind < 0.35:
        return "\n".join(prose)
    code = [
        f"{'  ' * rng.randrange(2)}{rng.choice(WORDS)}_{rng.choice(WORDS)} = {rng.choice(WORDS)}"
        f"({rng.choice(WORDS)}, {rng.choice(WORDS)}, limit={rng.randrange(99)})"
        for _ in range(lines)
    ]
    body = "\n".join(code) + ("  # ünïcode ✓" if rng.random() < 0.1 else "")
    if kind < 0.6:
        return body
    arguments = {"file_path": f"src/{rng.choice(WORDS)}.py", "new_string": body}
    return json.dumps({"name": rng.choice(TOOLS), "arguments": arguments})


def rows(n_pairs: int) -> Iterator[dict[str, str]]:
    """Pairs of which some are duplicates of earlier ones."""
    rng = random.Random(0)
    earlier: list[dict[str, str]] = []
    for number in range(n_pairs):
        if earlier and rng.random() < 0.03:
            yield {**rng.choice(earlier), "state_id": f"s{number}"}
            continue
        name = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=24))
        prompt = [
            {"role": "user", "content": f"Please look at {name}. " + " ".join(WORDS)},
            {
                "role": "tool",
                "tool_call_id": f"call_{number}",
                "content": "\n".join([text(rng)] * 2),
            },
        ]
        pair = {
            "state_id": f"s{number}",
            "session_id": f"session{number // 50}",
            "state_messages_json": json.dumps(prompt),
            "chosen": text(rng),
            "rejected": text(rng),
            "key": name,
        }
        if len(earlier) < 1000:
            earlier.append(pair)
        yield pair


def write_input(n_pairs: int, path: Path) -> None:
    """The pair table, and one column more: what the stock deduplicator is to compare."""
    from replay_pipeline.storage.schemas import DPO_PAIRS, PROMPT

    schema = pa.schema([*DPO_PAIRS, *PROMPT, pa.field("both", pa.string())])
    source = rows(n_pairs)
    n_bytes = 0
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        while chunk := list(islice(source, 1000)):
            for row in chunk:
                row["both"] = "\n".join((row["key"], row["chosen"], row["rejected"]))
                n_bytes += len(row["chosen"]) + len(row["rejected"])
            columns = [pa.array([row.get(f.name) for row in chunk], f.type) for f in schema]
            writer.write_table(pa.table(columns, schema=schema))
    print(f"{n_pairs} pairs, {n_bytes / 1e6:.0f} MB of chosen and rejected")


def run_ours(folder: Path) -> list[str]:
    from replay_pipeline.normalize import DJNormalizer
    from replay_pipeline.storage.schemas import DPO_PAIRS, PROMPT

    names = [*DPO_PAIRS.names, *PROMPT.names]
    table = pq.read_table(folder / "pairs.parquet", columns=names)
    result = DJNormalizer("default").run(table)
    pq.write_table(result.kept, folder / "kept.parquet", compression="zstd")
    pq.write_table(result.dropped, folder / "dropped.parquet", compression="zstd")
    return result.kept["state_id"].to_pylist()


def run_executor(folder: Path) -> list[str]:
    from replay_pipeline.normalize import data_juicer

    data_juicer.load()  # loads data-juicer without its installer
    from data_juicer.config import init_configs
    from data_juicer.core.executor import DefaultExecutor

    source = folder / "pairs.parquet"
    for side in ("chosen", "rejected"):
        process: list[dict] = [
            {"text_length_filter": {"text_key": side, "min_len": 8, "max_len": 32000}},
            {"words_num_filter": {"text_key": side, "min_num": 2, "max_num": 4096}},
            {"special_characters_filter": {"text_key": side, "min_ratio": 0.0, "max_ratio": 0.5}},
        ]
        if side == "rejected":
            process.append(
                {
                    "document_deduplicator": {
                        "text_key": "both",
                        "lowercase": True,
                        "ignore_non_character": True,
                    }
                }
            )
        recipe = folder / f"{side}.yaml"
        target = folder / f"executor_{side}" / "out.parquet"
        settings = {
            "text_keys": ["chosen", "rejected"],
            "np": 1,
            "use_cache": False,
            "process": process,
        }
        recipe.write_text(json.dumps(settings))
        arguments = ["--config", recipe, "--dataset_path", source, "--export_path", target]
        arguments += ["--work_dir", folder / f"work_{side}"]
        DefaultExecutor(init_configs([str(argument) for argument in arguments])).run()
        source = target
    return pq.read_table(source, columns=["state_id"])["state_id"].to_pylist()


WAYS = {"ours": run_ours, "executor": run_executor}


def measure(way: str, folder: Path) -> dict[str, float]:
    """CPU seconds (with children) and peak memory of one way, in a process of its own."""
    command = [sys.executable, __file__, "--way", way, "--folder", str(folder)]
    with (folder / f"{way}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{way} failed:\n{(folder / f'{way}.log').read_text()[-800:]}")
    return {"cpu_s": usage.ru_utime + usage.ru_stime, "rss_mib": usage.ru_maxrss / 1024}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=10_000)
    parser.add_argument("--ways", default="ours,executor")
    parser.add_argument("--way", choices=WAYS)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    if options.way:
        states = WAYS[options.way](options.folder)
        (options.folder / f"{options.way}.json").write_text(json.dumps(states))
        return
    with tempfile.TemporaryDirectory(prefix="normalize-") as name:
        folder = Path(name)
        write_input(options.pairs, folder / "pairs.parquet")
        ways = options.ways.split(",")
        figures = {way: measure(way, folder) for way in ways}
        states = {way: json.loads((folder / f"{way}.json").read_text()) for way in ways}
    ours = figures["ours"]["cpu_s"]
    print("way       CPU s   peak MiB   CPU / ours   rows kept")
    for way in ways:
        cpu, rss = figures[way]["cpu_s"], figures[way]["rss_mib"]
        print(f"{way:8} {cpu:7.1f} {rss:9.0f} {cpu / ours:12.2f} {len(states[way]):11}")
    if any(kept != states["ours"] for kept in states.values()):
        raise SystemExit("the ways do not keep the same rows")


if __name__ == "__main__":
    main()
