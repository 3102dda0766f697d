"""Run all that needs a GPU, step by step within its seconds, and write one JSON: see `gpu.sh`."""

import argparse
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.measuring import PYTHON  # noqa: E402 - after the path above

TESTS = "tests/trainer/model/test_tree.py"
LAST_LINES = 15
TINY = {"trl.max_steps": 3}
TINY_DRY = TINY | {"tiny.pretraining_steps": 2, "evaluation.max_prompts": 1}
ROLLOUTS = {
    "rollouts": "generate",
    "trl.objective": "dapo",
    "trl.max_steps": 2,
    "trl.max_prompt_tokens": 1024,
    "preflight.max_cut_prompts": 1.0,
    "evaluation.max_prompts": 1,
}
VLLM = {
    "trl.use_vllm": True,
    "trl.vllm_mode": "colocate",
    "trl.vllm_gpu_memory_utilization": 0.3,
}
FEW_TOKENS = {"trl.max_completion_length": 8, "evaluation.max_new_tokens": 8}
SHARDED = {
    "trl.fsdp": True,
    "trl.fsdp_config": "{version: 2, transformer_layer_cls_to_wrap: [Qwen2DecoderLayer]}",
}


def steps(*, is_dry: bool, folder: Path) -> list[tuple[str, int, list[str]]]:
    """Name, most seconds and command of each step; `{json}` is a file that it writes."""
    # What earlier runs have left is not theirs to remove, which can take minutes.
    kept = ("-o", "tmp_path_retention_count=1000")
    pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *kept, TESTS]
    tiny = given(TINY_DRY if is_dry else TINY, dataset=folder / "dataset", output=folder / "run")
    own = Path(os.environ.get("GPU_MODEL", ROOT / "build/real-model/smollm2-135m-instruct"))
    has_own = own.is_dir() and not is_dry
    gpu = ["--config", "trainer/gpu.yaml", *given(dataset=folder / "dataset")]
    gpu += given(model=own if has_own else folder / "run" / "checkpoint")
    real = ["-m", "trainer", *gpu, *given(output=folder / "real")]
    real += given({"trl.max_steps": 20, "evaluation.max_prompts": 4})
    server = importlib.util.find_spec("vllm") is not None and not is_dry
    sampled = ROLLOUTS | (VLLM if server else {}) | (FEW_TOKENS if is_dry else {})
    rollouts = ["-m", "trainer", *gpu, *given(output=folder / "sampled"), *given(sampled)]
    dry, sizes = (["--dry"], ["--small"]) if is_dry else ([], ["--device", "cuda", "--shape"])
    # What tells most comes first: how fast the shipped objective is, whether steps equal the CPU's and
    # bfloat16 is near float32, and whether whole runs pass.
    shape = [] if is_dry else ["1.7B"]
    command = ["benchmarks/whole_step.py", "--imitation", *sizes, *shape, "--json", "{json}"]
    listed = [(" ".join(["imitation", *shape]), 150, command)]
    listed.append(("tests", 90, [*pytest, "-k", "mask_by_blocks" if is_dry else "cuda"]))
    listed.append(("training", 60, ["-m", "trainer", *tiny]))
    if has_own:
        listed.append(("training of a real model", 110, real))
    listed.append(("sharded training (FSDP2)", 60, [__file__, "--sharded", str(folder), *dry]))
    by = "vLLM" if server else "transformers: no vLLM here"
    listed.append((f"a step on rollouts ({by})", 80, rollouts))
    listed.append(("recompilations", 40, [__file__, "--recompilations", *dry]))
    for shape in [[]] if is_dry else [["0.5B"], ["8B-LoRA"]]:
        for name in ("pairs", "whole_step"):
            command = [f"benchmarks/{name}.py", *sizes, *shape, "--json", "{json}"]
            listed.append((" ".join([name, *shape]), 65, command))
    # A busy machine's CPU takes its time, and nothing is lost by that.
    return [(name, most_s * (5 if is_dry else 1), words) for name, most_s, words in listed]


def given(settings: dict[str, Any] | None = None, **more: Any) -> list[str]:
    """Settings as words of a command."""
    both = {**(settings or {}), **more}
    return [word for key, value in both.items() for word in ("--set", f"{key}={value}")]


def run_step(name: str, limit_s: float, command: list[str], file: Path) -> dict[str, Any]:
    """Run one step; its figures, or how it failed."""
    began_s = time.perf_counter()
    given = [PYTHON, *(str(file) if word == "{json}" else word for word in command)]
    try:
        done = subprocess.run(
            given,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=limit_s,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": _path()},
        )
        status, output = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired as late:
        pieces = (late.stdout, late.stderr)
        output = "".join(part.decode(errors="replace") for part in pieces if part)
        status = f"took more than {limit_s:.0f} s"
    row = {
        "step": name,
        "status": status,
        "seconds": round(time.perf_counter() - began_s, 1),
        "last_lines": output.splitlines()[-LAST_LINES:],
    }
    if file.exists():
        row["figures"] = json.loads(file.read_text())
    return row


def _path() -> str:
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def count_recompilations(device: str) -> None:
    """Run packed passes over trees of many lengths, and count the graphs that were compiled."""
    import torch
    from torch._dynamo.utils import counters

    from benchmarks.pairs import SMALL, make_model, make_pairs
    from trainer.model.packing import packed_logps
    from trainer.model.tree_layout import pack_pairs

    dtype = "bfloat16" if device == "cuda" else "float32"
    sizes = SMALL | {"device": device, "dtype": dtype, "n_prompt": 700}
    model, lengths = make_model(sizes), []
    for n_states in (2, 3, 5, 8, 12):
        tree = pack_pairs(make_pairs(sizes | {"n_states": n_states}))
        chosen, rejected = packed_logps(model, tree)
        (chosen - rejected).sum().backward()
        lengths.append(tree.n_tokens)
    assert all(bool(torch.isfinite(one.grad).all()) for one in model.parameters())
    graphs = counters["stats"]["unique_graphs"]
    print(json.dumps({"tree_lengths": lengths, "graphs_compiled": graphs}))


def train_sharded(folder: Path, *, is_dry: bool) -> None:
    """Train as `training` did, by one rank whose weights FSDP2 shards, and compare the losses."""
    from torch.distributed.tensor import DTensor

    from tests.trainer.engines.trl.ddp_worker import shard_on_cpu
    from trainer.__main__ import main as train
    from trainer.engines.trl import run

    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = "0"
    if is_dry:
        shard_on_cpu()
    are_sharded, save = [], run.save_checkpoint

    def looked_at(made: Any, trainer: Any, output: Path) -> None:
        are_sharded.extend(isinstance(one, DTensor) for one in trainer.model.parameters())
        save(made, trainer, output)

    run.save_checkpoint = looked_at
    settings = (TINY_DRY if is_dry else TINY) | SHARDED
    assert train(given(settings, dataset=folder / "dataset", output=folder / "sharded")) == 0
    assert are_sharded
    assert all(are_sharded)
    logs = [
        (folder / name / "metrics.jsonl").read_text().splitlines() for name in ("sharded", "run")
    ]
    ours, whole = ([json.loads(line).get("train/loss") for line in log][:-1] for log in logs)
    print(json.dumps({"losses": ours, "losses_unsharded": whole}))
    assert all(math.isclose(a, b, rel_tol=0.02) for a, b in zip(ours, whole, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry", action="store_true", help="all steps on the CPU, in small shapes")
    parser.add_argument("--json", type=Path, help="the file to write")
    parser.add_argument("--limit-s", type=float, default=720.0, help="seconds of all steps")
    parser.add_argument("--recompilations", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--sharded", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.sharded:
        train_sharded(args.sharded, is_dry=args.dry)
        return 0
    if args.recompilations:
        count_recompilations("cpu" if args.dry else "cuda")
        return 0
    try:
        import torch
    except ImportError:
        parser.error(
            f"{sys.executable} has no torch; say which Python has it: PYTHON=.venv/bin/python"
        )
    if not args.dry and not torch.cuda.is_available():
        parser.error("there is no CUDA device; --dry runs the steps on the CPU")
    from benchmarks.measuring import machine_of
    from tests.trainer.published import write_dataset

    results = ROOT / "benchmarks" / "results"
    target = args.json or results / ("gpu_dry.json" if args.dry else "gpu.json")
    rows, began_s = [], time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_dataset(folder / "dataset")
        for name, most_s, command in steps(is_dry=args.dry, folder=folder):
            left_s = args.limit_s - (time.perf_counter() - began_s)
            file = folder / f"{name}.json"
            if left_s < 10:
                print(f"  {name:45} left out: the time of all steps is over", flush=True)
                continue
            rows.append(row := run_step(name, min(most_s, left_s), command, file))
            print(f"  {name:45} {row['seconds']:6.1f} s  {row['status'] or 'ok'}", flush=True)
            if row["status"]:
                print("    " + "\n    ".join(row["last_lines"]), flush=True)
            # After every step, so that what was measured outlives a machine that is taken away.
            report = {"machine": machine_of("cpu" if args.dry else "cuda"), "steps": rows}
            target.write_text(json.dumps(report, indent=2) + "\n")
    failed = [row["step"] for row in rows if row["status"]]
    print(f"{len(rows) - len(failed)} of {len(rows)} steps passed; figures in {target}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
