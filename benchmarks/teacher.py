"""The hinted teacher's forward pass: seconds in full, and on the student's key-value cache.

    python benchmarks/teacher.py            # a prompt of 2,048 tokens; seconds
    python benchmarks/teacher.py --small
    python benchmarks/teacher.py --device cuda --shape 8B-LoRA
    python benchmarks/teacher.py --json benchmarks/results/teacher.json

One sequence, `prompt + hint + completion`, on one thread or one GPU, the best of five passes each. The
student's pass with a cache is shown as well, since keeping the cache is the price of reusing it.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402 - after the path above

from benchmarks.measuring import SECONDS, best_of, machine_of  # noqa: E402
from benchmarks.pairs import SHAPES, make_model  # noqa: E402
from trainer.model.kv_reuse import (  # noqa: E402
    hinted_batch,
    student_hidden,
    teacher_hidden,
    teacher_hidden_with_prefix_reuse,
)

FULL = {"n_prompt": 2048, "n_hint": 64, "n_completion": 128, "hidden": 256, "n_layers": 4}
FULL |= {"n_heads": 4, "vocab": 2000, "device": "cpu", "dtype": "float32"}
SMALL = FULL | {"n_prompt": 256, "n_hint": 16, "n_completion": 16, "hidden": 64, "n_layers": 2}
LONG = {"n_prompt": 15_872, "n_hint": 128, "n_completion": 384, "dtype": "bfloat16"}
N_REPEATS = 5


@torch.no_grad()
def run_benchmark(sizes: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    device = sizes["device"]
    model = make_model(sizes)
    prompt, hint, completion = (
        torch.randint(5, sizes["vocab"], (1, sizes[name]), device=device)
        for name in ("n_prompt", "n_hint", "n_completion")
    )
    batch = hinted_batch(prompt, [[*prompt[0].tolist(), *hint[0].tolist()]], completion)
    student, student_s = best_of(
        N_REPEATS,
        lambda: student_hidden(model, prompt, completion, n_tokens=batch.n_tokens),
        device=device,
    )
    full, full_s = best_of(N_REPEATS, lambda: teacher_hidden(model, batch), device=device)
    reused, reused_s = best_of(
        N_REPEATS,
        lambda: teacher_hidden_with_prefix_reuse(model, batch, student.cache),
        device=device,
    )
    return {
        "sizes": sizes,
        "n_reused": batch.n_reused,
        "n_tokens": batch.n_tokens,
        "seconds": {
            "student": round(student_s, 4),
            "teacher_full": round(full_s, 4),
            "teacher_reused": round(reused_s, 4),
        },
        "is_bitwise_equal": torch.equal(full, reused),
        "ratio": round(full_s / reused_s, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="tiny sizes")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--shape", choices=[*SHAPES], default="0.5B", help="the model, on CUDA")
    args = parser.parse_args()
    sizes = SMALL if args.small else FULL
    if args.device == "cuda":
        sizes = SHAPES[args.shape] | LONG | {"checkpointing": False, "device": "cuda"}
    result = run_benchmark(sizes)
    unit = SECONDS[args.device]
    print(f"{result['n_reused']} of {result['n_tokens']} columns come from the student's cache")
    for name, seconds in result["seconds"].items():
        print(f"  {name:15} {seconds:8.3f} {unit}")
    print(f"  reuse takes {result['ratio']:.1f} times fewer {unit} than the full pass")
    print(f"  equal to the last bit: {result['is_bitwise_equal']}")
    if args.json:
        report = {"benchmark": "teacher", "machine": machine_of(args.device), **result}
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
