"""The hinted teacher's forward pass: CPU seconds in full, and on the student's key-value cache.

    python benchmarks/teacher.py            # a prompt of 2,048 tokens; seconds
    python benchmarks/teacher.py --small
    python benchmarks/teacher.py --json benchmarks/results/teacher.json

One sequence, `prompt + hint + completion`, on one thread, the best of five passes each. The
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
from transformers import Qwen2Config, Qwen2ForCausalLM  # noqa: E402

from benchmarks.measuring import best_of, machine_of  # noqa: E402
from trainer.integrations.kv_reuse import (  # noqa: E402
    hinted_batch,
    student_hidden,
    teacher_hidden,
    teacher_hidden_with_prefix_reuse,
)

FULL = {"n_prompt": 2048, "n_hint": 64, "n_completion": 128, "hidden": 256, "n_layers": 4}
SMALL = {"n_prompt": 256, "n_hint": 16, "n_completion": 16, "hidden": 64, "n_layers": 2}
VOCAB = 2000
N_REPEATS = 5


def run_benchmark(sizes: dict[str, int]) -> dict[str, Any]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=sizes["hidden"],
        intermediate_size=4 * sizes["hidden"],
        num_hidden_layers=sizes["n_layers"],
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
    )
    model = Qwen2ForCausalLM(config).train()
    prompt, hint, completion = (
        torch.randint(5, VOCAB, (1, sizes[name])) for name in ("n_prompt", "n_hint", "n_completion")
    )
    batch = hinted_batch(prompt, [[*prompt[0].tolist(), *hint[0].tolist()]], completion)
    student, student_s = best_of(
        N_REPEATS,
        lambda: student_hidden(model, prompt, completion, n_tokens=batch.n_tokens),
        device="cpu",
    )
    full, full_s = best_of(N_REPEATS, lambda: teacher_hidden(model, batch), device="cpu")
    reused, reused_s = best_of(
        N_REPEATS,
        lambda: teacher_hidden_with_prefix_reuse(model, batch, student.cache),
        device="cpu",
    )
    return {
        "sizes": sizes,
        "n_reused": batch.n_reused,
        "n_tokens": batch.n_tokens,
        "cpu_s": {
            "student": round(student_s, 4),
            "teacher_full": round(full_s, 4),
            "teacher_reused": round(reused_s, 4),
        },
        "is_bitwise_equal": torch.equal(full, reused),
        "cpu_ratio": round(full_s / reused_s, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="tiny sizes")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    result = run_benchmark(SMALL if args.small else FULL)
    print(f"{result['n_reused']} of {result['n_tokens']} columns come from the student's cache")
    for name, seconds in result["cpu_s"].items():
        print(f"  {name:15} {seconds:8.3f} CPU-s")
    print(f"  reuse takes {result['cpu_ratio']:.1f} times less CPU than the full pass")
    print(f"  equal to the last bit: {result['is_bitwise_equal']}")
    if args.json:
        report = {"benchmark": "teacher", "machine": machine_of("cpu"), **result}
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
