"""Run all that needs a GPU, step by step within its seconds, and write one JSON: see `gpu.sh`."""

import argparse
import json
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


def steps(*, is_dry: bool, folder: Path) -> list[tuple[str, int, list[str]]]:
    """Name, most seconds and command of each step; `{json}` is a file that it writes."""
    # What earlier runs have left is not theirs to remove, which can take minutes.
    kept = ("-o", "tmp_path_retention_count=1000")
    pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *kept, TESTS]
    training = ["-m", "trainer", "--set", f"dataset={folder / 'dataset'}"]
    training += ["--set", f"output={folder / 'run'}", "--set", "trl.max_steps=3"]
    model = os.environ.get("GPU_MODEL", str(ROOT / "build/real-model/smollm2-135m-instruct"))
    real = ["-m", "trainer", "--config", "trainer/gpu.yaml", "--set", f"model={model}"]
    real += ["--set", f"dataset={folder / 'dataset'}", "--set", f"output={folder / 'real'}"]
    real += ["--set", "trl.max_steps=20", "--set", "evaluation.max_prompts=4"]
    if is_dry:
        few = ["--set", "tiny.pretraining_steps=2", "--set", "evaluation.max_prompts=1"]
        chosen = "mask_by_blocks"
        shapes, imitated = [("small", ["--small"])], ("small", ["--small"])
    else:
        few, chosen = [], "cuda"
        shapes = [(shape, ["--device", "cuda", "--shape", shape]) for shape in ("0.5B", "8B-LoRA")]
        imitated = ("1.7B", ["--device", "cuda", "--shape", "1.7B"])
    # What tells most comes first: how fast the shipped objective is, whether steps equal the CPU's and
    # bfloat16 is near float32, and whether whole runs pass.
    shape, options = imitated
    command = ["benchmarks/whole_step.py", "--imitation", *options, "--json", "{json}"]
    listed = [(f"imitation {shape}", 180, command)]
    listed.append(("tests", 120, [*pytest, "-k", chosen]))
    listed.append(("training", 90, [*training, *few]))
    if not is_dry and Path(model).is_dir():
        listed.append(("training of a real model", 180, real))
    listed.append(("recompilations", 90, [__file__, "--recompilations"] + ["--dry"] * is_dry))
    for shape, options in shapes:
        for name in ("pairs", "whole_step"):
            command = [f"benchmarks/{name}.py", *options, "--json", "{json}"]
            listed.append((f"{name} {shape}", 90, command))
    # A busy machine's CPU takes its time, and nothing is lost by that.
    return [(name, most_s * (5 if is_dry else 1), words) for name, most_s, words in listed]


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry", action="store_true", help="all steps on the CPU, in small shapes")
    parser.add_argument("--json", type=Path, help="the file to write")
    parser.add_argument("--limit-s", type=float, default=720.0, help="seconds of all steps")
    parser.add_argument("--recompilations", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
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
            rows.append(row := run_step(name, max(min(most_s, left_s), 1), command, file))
            print(f"  {name:20} {row['seconds']:6.1f} s  {row['status'] or 'ok'}", flush=True)
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
