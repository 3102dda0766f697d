"""The head of policy + self-distillation: seconds and memory of one forward and backward pass.

    python benchmarks/losses.py            # V = 151,936, H = 896; about five minutes
    python benchmarks/losses.py --small    # seconds
    python benchmarks/losses.py --device cuda
    python benchmarks/losses.py --json benchmarks/results/losses.json

Four ways to the same loss, each in a fresh process, on one thread or on one GPU:

- `fused`: `trainer.model.head.fused_policy_distillation`, for losses of single tokens
- `recompute`: the same with `mode="recompute"`, for any loss; what the trainer uses
- `trl`: TRL's two chunked kernels, log-probabilities + entropy and generalized JSD
- `naive`: full logits of both models and plain autograd
- `liger`: `LigerFusedLinearJSDLoss`, which has both parts (where `liger-kernel` is installed)
- `cce`: `cut_cross_entropy` and TRL's divergence (CUDA, where it is installed)

The policy has advantages of 1 everywhere, so that it is the plain likelihood, the one policy that
all of them know. A peer that is not there, or does not run on the device, is listed with the reason.
The student's head is trainable and the teacher has a head of its own (as with an EMA teacher).
"""

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.measuring import (  # noqa: E402 - after the path above
    MEMORY,
    SECONDS,
    arguments_of,
    best_of,
    machine_of,
    measure_fresh,
    peak_mib,
)

FULL = {"vocab": 151_936, "hidden": 896}
SMALL = {"vocab": 4_096, "hidden": 64}
CASES = [
    {
        "n_tokens": 512,
        "dtype": "float32",
        "variants": ["fused", "recompute", "trl", "naive", "liger"],
    },
    {"n_tokens": 4096, "dtype": "bfloat16", "variants": ["fused", "trl"]},
]
SMALL_CASES = [
    {
        "n_tokens": 64,
        "dtype": "float32",
        "variants": ["fused", "recompute", "trl", "naive", "liger", "cce"],
    },
    {"n_tokens": 128, "dtype": "bfloat16", "variants": ["fused"]},
]
SHAPES = {"0.5B": FULL, "8B-LoRA": FULL | {"hidden": 4096, "is_frozen": True}}
CUDA_CASES = [
    {
        "n_tokens": 16_384,
        "dtype": "bfloat16",
        "variants": ["fused", "recompute", "trl", "liger", "cce"],
    },
]
CUDA_REPEATS = 5
PEERS = {"liger", "cce"}
"""What need not be installed."""


def make_inputs(sizes: dict[str, Any]) -> dict[str, Any]:
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)
    n_tokens, vocab, hidden = sizes["n_tokens"], sizes["vocab"], sizes["hidden"]
    dtype = getattr(torch, sizes["dtype"])
    inputs = {
        "hidden": torch.randn(n_tokens, hidden).to(dtype),
        "weight": torch.empty(vocab, hidden, dtype=dtype).normal_(std=0.02),
        "teacher_hidden": torch.randn(n_tokens, hidden).to(dtype),
        "teacher_weight": torch.empty(vocab, hidden, dtype=dtype).normal_(std=0.02),
        "targets": torch.randint(vocab, (n_tokens,)),
    }
    inputs = {name: tensor.to(sizes["device"]) for name, tensor in inputs.items()}
    inputs["hidden"].requires_grad_()
    inputs["weight"].requires_grad_(not sizes.get("is_frozen"))
    return inputs


def policy_loss(logps: Any, n_tokens: int) -> Any:
    return -logps.sum() / n_tokens


def run_fused(x: dict[str, Any], *, mode: Any = "fused") -> Any:
    from trainer.model.head import fused_policy_distillation

    n_tokens = len(x["targets"])
    return fused_policy_distillation(
        x["hidden"],
        x["weight"],
        target_ids_N=x["targets"],
        policy_loss=lambda logps, _: policy_loss(logps, n_tokens),
        teacher_hidden_N_H=x["teacher_hidden"],
        teacher_weight_V_H=x["teacher_weight"],
        mode=mode,
    ).loss


def run_trl(x: dict[str, Any]) -> Any:
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    logps, *_ = ChunkedLogProbFunction.apply(
        x["hidden"], x["weight"], None, x["targets"], 1.0, 32_768, None, 1.0, ("entropy",)
    )
    return policy_loss(logps, len(x["targets"])) + trl_divergence(x)


def trl_divergence(x: dict[str, Any]) -> Any:
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    divergence, _ = ChunkedDivergenceFunction.apply(
        x["hidden"], x["weight"], None, x["teacher_hidden"], x["teacher_weight"], None, 0.5, 1.0
    )
    return divergence.mean()


def run_liger(x: dict[str, Any]) -> Any:
    from liger_kernel.chunked_loss.jsd_loss import LigerFusedLinearJSDLoss

    loss = LigerFusedLinearJSDLoss(
        weight_hard_loss=1.0, weight_soft_loss=1.0, compiled=x["hidden"].is_cuda
    )
    return loss(x["hidden"], x["weight"], x["teacher_hidden"], x["teacher_weight"], x["targets"])


def run_cce(x: dict[str, Any]) -> Any:
    from cut_cross_entropy import linear_cross_entropy

    return linear_cross_entropy(x["hidden"], x["weight"], x["targets"]) + trl_divergence(x)


def run_naive(x: dict[str, Any]) -> Any:
    from benchmarks.plain_head import plain_policy_distillation

    n_tokens = len(x["targets"])
    return plain_policy_distillation(
        x["hidden"],
        x["weight"],
        target_ids_N=x["targets"],
        policy_loss=lambda logps, _: policy_loss(logps, n_tokens),
        teacher_hidden_N_H=x["teacher_hidden"],
        teacher_weight_V_H=x["teacher_weight"],
    ).loss


RUNS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "fused": run_fused,
    "recompute": partial(run_fused, mode="recompute"),
    "trl": run_trl,
    "naive": run_naive,
    "liger": run_liger,
    "cce": run_cce,
}


def measure(variant: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """One variant in this process; the caller started it fresh."""
    run, device = RUNS[variant], sizes["device"]
    small = sizes | {"n_tokens": 8, "vocab": 64, "hidden": 16}
    try:
        run(make_inputs(small)).backward()  # imports and first-call set-up
    except ModuleNotFoundError as error:
        if variant not in PEERS:
            raise
        return {"variant": variant, "absent": str(error)}
    x = make_inputs(sizes)
    before_mib = peak_mib(device)

    def step() -> float:
        x["hidden"].grad = x["weight"].grad = None
        loss = run(x)
        loss.backward()
        return float(loss.detach())

    n_calls = 1
    if device == "cuda":
        step()  # picks the matrix kernels
        n_calls = CUDA_REPEATS
    loss, seconds = best_of(n_calls, step, device=device)
    return {
        "variant": variant,
        "seconds": round(seconds, 4),
        "peak_mib": round(peak_mib(device)),
        "extra_mib": round(peak_mib(device) - before_mib),
        "loss": loss,
        "hidden_grad_norm": float(x["hidden"].grad.float().norm()),
        "weight_grad_norm": None if sizes.get("is_frozen") else float(x["weight"].grad.norm()),
    }


def run_case(case: dict[str, Any], model: dict[str, int], device: str) -> dict[str, Any]:
    sizes = {"n_tokens": case["n_tokens"], "dtype": case["dtype"], "device": device, **model}
    print(f"\nN={sizes['n_tokens']} V={sizes['vocab']} H={sizes['hidden']} {sizes['dtype']}")
    rows = []
    for variant in case["variants"]:
        rows.append(row := measure_fresh(__file__, variant, sizes))
        if "absent" in row:
            print(f"  {variant:9} {row['absent']}")
            continue
        print(
            f"  {variant:9} {row['seconds']:9.4f} {SECONDS[device]}   {MEMORY[device]} "
            f"{row['peak_mib']:6} MiB   of it the step {row['extra_mib']:6} MiB"
            f"   loss {row['loss']:.6f}",
            flush=True,
        )
    fused, *others = [row for row in rows if "absent" not in row]
    ratios = {row["variant"]: round(row["seconds"] / fused["seconds"], 2) for row in others}
    for variant, ratio in ratios.items():
        print(f"  fused takes {ratio:.2f} times fewer {SECONDS[device]} than {variant}")
    return {"sizes": sizes, "rows": rows, "ratio_over_fused": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="tiny sizes, seconds")
    parser.add_argument("--shape", choices=[*SHAPES], default="0.5B", help="the head, on CUDA")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    args = arguments_of(parser, measure)
    model, cases = (SMALL, SMALL_CASES) if args.small else (FULL, CASES)
    if args.device == "cuda" and not args.small:
        model, cases = SHAPES[args.shape], CUDA_CASES
    results = [run_case(case, model, args.device) for case in cases]
    if args.json:
        report = {"benchmark": "losses", "machine": machine_of(args.device), "cases": results}
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
