"""The preference pairs of one trace: seconds of one optimizer step, packed and by TRL.

    python benchmarks/pairs.py            # 16 states; about two minutes
    python benchmarks/pairs.py --small    # seconds
    python benchmarks/pairs.py --device cuda --shape 0.5B    # a trace of 16k tokens, bfloat16
    python benchmarks/pairs.py --device cuda --shape 8B-LoRA
    python benchmarks/pairs.py --family gpt_oss    # shaped like it, on prompts of 4,000 tokens
    python benchmarks/pairs.py --json benchmarks/results/pairs.json

The trace grows by the student's own action and a tool result at each state; the pair of a state is
(everything before it, a teacher's action, the student's action). Each variant takes one AdamW step
of sigmoid DPO on all pairs against another, frozen model, reference pass included, in a fresh
process, on one thread or on one GPU (there the best of the steps after the first):

- `packed`: `trainer.model.tree_layout.pack_pairs` and `trainer.model.packing.packed_logps`
- `trl`: `trl.DPOTrainer`, one pair a micro-batch, as many accumulation steps as pairs
- `trl_2`: the same with two pairs a micro-batch (on CUDA)
- `one_by_one`: one pair at a time without padding, the best case of not packing
"""

import argparse
import json
import random
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.measuring import (  # noqa: E402 - after the path above
    MEMORY,
    SECONDS,
    arguments_of,
    machine_of,
    measure_fresh,
    peak_mib,
    spent_s,
)
from benchmarks.trl_pairs import BETA, run_trl  # noqa: E402

FULL = {
    "device": "cpu",
    "dtype": "float32",
    "n_states": 16,
    "n_prompt": 512,
    "n_action": 48,
    "n_result": 208,
    "vocab": 8192,
    "hidden": 256,
    "n_layers": 4,
}
SMALL = FULL | {"n_states": 4, "n_prompt": 64, "n_result": 32, "vocab": 512, "hidden": 64}
SHAPES = {  # Qwen2.5-0.5B, Qwen3-1.7B and Qwen3-8B, as their configurations say, and traces of 16k tokens
    "0.5B": FULL
    | {"n_prompt": 4096, "n_action": 64, "n_result": 640, "vocab": 151_936}
    | {"hidden": 896, "n_layers": 24, "intermediate": 4864},
    "1.7B": FULL
    | {"n_prompt": 4096, "n_action": 64, "n_result": 640, "vocab": 151_936}
    | {"hidden": 2048, "n_layers": 28, "intermediate": 6144, "n_heads": 16, "n_kv_heads": 8}
    | {"checkpointing": True},
    "8B-LoRA": FULL
    | {"n_states": 6, "n_prompt": 10_240, "n_action": 64, "n_result": 896, "vocab": 151_936}
    | {"hidden": 4096, "n_layers": 36, "intermediate": 12_288, "n_heads": 32, "n_kv_heads": 8}
    | {"is_tied": False, "lora_rank": 16, "checkpointing": True},
}
WINDOWED = {"head_dim": 64, "sliding_window": 128}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_oss": ("gpt_oss", WINDOWED | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma4": (
        "gemma4_text",
        WINDOWED
        | {"global_head_dim": 64, "hidden_size_per_layer_input": 32, "num_kv_shared_layers": 0}
        | {"layer_types": ["sliding_attention"] * 3 + ["full_attention"], "sliding_window": 512},
    ),
    "qwen3_5": (
        "qwen3_5_text",
        {"head_dim": 64, "layer_types": ["linear_attention"] * 3 + ["full_attention"]}
        | {f"linear_num_{one}_heads": 4 for one in ("key", "value")}
        | {f"linear_{one}_head_dim": 64 for one in ("key", "value")},
    ),
}
"""What transformers calls a family, and what its small model has of its own."""
OF_FAMILIES = FULL | {"n_states": 6, "n_prompt": 4000}
VARIANTS = {
    "cpu": ("packed", "trl", "one_by_one"),
    "cuda": ("packed", "trl", "trl_2", "one_by_one"),
}
CUDA_STEPS = 3
EOS = 1


def make_pairs(sizes: dict[str, Any]) -> list[tuple[list[int], list[int], list[int]]]:
    rng = random.Random(1)

    def tokens(n_tokens: int) -> list[int]:
        return [rng.randrange(8, sizes["vocab"]) for _ in range(n_tokens)]

    def action() -> list[int]:
        return [*tokens(sizes["n_action"] - 1), EOS]

    context, pairs = tokens(sizes["n_prompt"]), []
    for _ in range(sizes["n_states"]):
        taken = action()
        pairs.append((list(context), action(), taken))
        context += taken + tokens(sizes["n_result"])
    return pairs


def make_model(sizes: dict[str, Any], *, seed: int = 0) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    torch.set_num_threads(1)
    kind, own = FAMILIES.get(sizes.get("family", ""), ("qwen2", {}))
    config = AutoConfig.for_model(
        kind,
        vocab_size=sizes["vocab"],
        hidden_size=sizes["hidden"],
        intermediate_size=sizes.get("intermediate", 4 * sizes["hidden"]),
        num_hidden_layers=sizes["n_layers"],
        num_attention_heads=sizes.get("n_heads", max(2, sizes["hidden"] // 64)),
        num_key_value_heads=sizes.get("n_kv_heads", 2),
        max_position_embeddings=65_536,
        tie_word_embeddings=sizes.get("is_tied", True),
        **own,
    )
    with torch.device(sizes["device"]):
        model = AutoModelForCausalLM.from_config(config).to(getattr(torch, sizes["dtype"]))
    if sizes.get("lora_rank"):
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=sizes["lora_rank"], target_modules="all-linear"))
    if sizes.get("checkpointing"):
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    return model.train()


def reference_of(model: Any, sizes: dict[str, Any]) -> Callable[[], AbstractContextManager[Any]]:
    """Another model of the same shape; of a model with an adapter, the model without it."""
    if not sizes.get("lora_rank"):
        other = make_model(sizes, seed=1).eval()
        return lambda: nullcontext(other)

    @contextmanager
    def without_adapter() -> Any:
        with model.disable_adapter():
            yield model

    return without_adapter


def dpo_sum(chosen: Any, rejected: Any, ref_chosen: Any, ref_rejected: Any) -> Any:
    import torch.nn.functional as F

    return -F.logsigmoid(BETA * ((chosen - ref_chosen) - (rejected - ref_rejected))).sum()


def step_packed(model: Any, reference: Any, pairs: list[Any]) -> float:
    import torch

    from trainer.model.packing import packed_logps
    from trainer.model.tree_layout import pack_pairs

    tree = pack_pairs(pairs)
    with torch.no_grad(), reference() as frozen:
        reference_logps = packed_logps(frozen, tree)
    loss = dpo_sum(*packed_logps(model, tree), *reference_logps) / len(pairs)
    loss.backward()
    return float(loss.detach())


def step_one_by_one(model: Any, reference: Any, pairs: list[Any]) -> float:
    import torch

    def logps(network: Any, prompt: list[int], completion: list[int]) -> Any:
        ids = torch.tensor([prompt + completion], device=network.device)
        kept = len(completion) + 1
        logits = network(input_ids=ids, logits_to_keep=kept, use_cache=False).logits[0, :-1]
        target_ids = ids[0, len(prompt) :, None]
        return logits.log_softmax(-1).gather(-1, target_ids).sum()

    total = 0.0
    for prompt, chosen, rejected in pairs:
        with torch.no_grad(), reference() as frozen:
            reference_logps = [logps(frozen, prompt, side) for side in (chosen, rejected)]
        policy_logps = [logps(model, prompt, side) for side in (chosen, rejected)]
        loss = dpo_sum(*policy_logps, *reference_logps) / len(pairs)
        loss.backward()
        total += float(loss.detach())
    return total


def run_by_hand(variant: str, sizes: dict[str, Any]) -> dict[str, float]:
    """Steps of ours; the figures of the first, the seconds of the fastest."""
    import torch

    model = make_model(sizes)
    reference, pairs = reference_of(model, sizes), make_pairs(sizes)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-6)
    step = {"packed": step_packed, "one_by_one": step_one_by_one}[variant]
    taken_s, losses, grad_norms = [], [], []
    for _ in range(n_steps(sizes)):
        before_s = spent_s(sizes["device"])
        losses.append(step(model, reference, pairs))
        grad_norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        taken_s.append(spent_s(sizes["device"]) - before_s)
    return {"seconds": min(taken_s), "loss": losses[0], "grad_norm": grad_norms[0]}


def n_steps(sizes: dict[str, Any]) -> int:
    return 1 if sizes["device"] == "cpu" else CUDA_STEPS


def measure(variant: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """One variant in this process; the caller started it fresh."""
    if not variant.startswith("trl") and sizes["device"] == "cpu":
        warm_up = SMALL | {"n_states": 2, "n_layers": 1}
        run_by_hand(variant, warm_up)  # imports and first-call set-up
    if variant.startswith("trl"):
        options = {"end": EOS, "n_steps": n_steps(sizes), "learning_rate": 1e-6}
        options["batch_size"] = int(variant.removeprefix("trl").removeprefix("_") or 1)
        step = run_trl(make_pairs(sizes), make_model, sizes, **options)
    else:
        step = run_by_hand(variant, sizes)
    return {"variant": variant, **step, "peak_mib": round(peak_mib(sizes["device"]))}


def count_tokens(sizes: dict[str, Any]) -> dict[str, Any]:
    from trainer.model.tree_layout import pack_pairs

    tree = pack_pairs(make_pairs(sizes))
    return {"packed": tree.n_tokens, "one_by_one": tree.n_unpacked_tokens}


def run_benchmark(sizes: dict[str, Any]) -> dict[str, Any]:
    n_tokens = count_tokens(sizes)
    seconds, memory = SECONDS[sizes["device"]], MEMORY[sizes["device"]]
    print(
        f"{sizes['n_states']} states: {n_tokens['one_by_one']} tokens one pair at a time, "
        f"{n_tokens['packed']} packed ({n_tokens['one_by_one'] / n_tokens['packed']:.1f} times fewer)"
    )
    rows = []
    for variant in VARIANTS[sizes["device"]]:
        rows.append(row := measure_fresh(__file__, variant, sizes))
        print(
            f"  {variant:10} {row['seconds']:9.3f} {seconds}   {memory} {row['peak_mib']:6} MiB"
            f"   loss {row['loss']:.6f}   gradient norm {row['grad_norm']:.5f}",
            flush=True,
        )
    packed = rows[0]
    ratios = {
        row["variant"]: round(row["seconds"] / packed["seconds"], 2)
        for row in rows
        if row is not packed
    }
    for variant, ratio in ratios.items():
        print(f"  packed takes {ratio:.2f} times fewer {seconds} than {variant}")
    return {
        "sizes": sizes,
        "n_tokens": n_tokens,
        "rows": rows,
        "ratio_over_packed": ratios,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="tiny sizes, seconds")
    parser.add_argument("--states", type=int, help="states of the trace (default 16; 4 if small)")
    parser.add_argument("--shape", choices=[*SHAPES], default="0.5B", help="the model, on CUDA")
    parser.add_argument("--family", choices=list(FAMILIES), help="a small model of it, on the CPU")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    args = arguments_of(parser, measure)
    sizes = SMALL if args.small else FULL
    if args.family:
        sizes = OF_FAMILIES | {"family": args.family}
    if args.device == "cuda":
        sizes = SHAPES[args.shape] | {"dtype": "bfloat16"}
    if args.small and args.shape == "8B-LoRA":
        sizes = SMALL | {"lora_rank": 4, "checkpointing": True}
    sizes = sizes | {"device": args.device}
    if args.states:
        sizes = sizes | {"n_states": args.states}
    result = run_benchmark(sizes)
    if args.json:
        report = {"benchmark": "pairs", "machine": machine_of(args.device), **result}
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
