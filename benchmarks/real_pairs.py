"""The pairs of a published dataset at default settings: CPU seconds of channel 3, and of TRL's DPO.

    python benchmarks/real_pairs.py FOLDER             # a dataset that `publish` wrote
    python benchmarks/real_pairs.py FOLDER --json benchmarks/results/real_pairs.json

Prompts are cut, pairs drawn and passes packed as the trainer does by default. All variants run the
same pairs (64), as the same token ids, forward and backward through one model of random weights, with
sigmoid DPO against another; the learning rate is 0, so that their losses can be compared. Each has
a fresh process and one thread:

- `ours`: the trainer's sampler and trees, the default number of pairs a step
- `ours_at_once`: the same pairs as one step
- `trl_N`: `trl.DPOTrainer` with N pairs a micro-batch; its fastest N is its figure (one thread gains
  nothing from a larger batch, and its padding grows)
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.measuring import arguments_of, machine_of, measure_fresh, spent_s  # noqa: E402 - path above
from benchmarks.pairs import dpo_sum, make_model  # noqa: E402
from benchmarks.trl_pairs import run_trl  # noqa: E402

SIZES = {"device": "cpu", "dtype": "float32", "hidden": 256, "n_layers": 4, "vocab": 8192}
N_PAIRS = 64
VARIANTS = ("ours", "ours_at_once", "trl_1", "trl_4")

Pair = tuple[list[int], list[int], list[int]]


def drawn_pairs(folder: str, n_pairs: int) -> tuple[list[Pair], int, int]:
    """Render the pairs of a run's first steps; with the pairs of a step, and the end of a turn."""
    from trainer.data.collator import ComposerDataCollator
    from trainer.data.dataset import load_preference_data
    from trainer.data.sampler import PairSampler
    from trainer.data.tiny import corpus, train_tokenizer
    from trainer.settings import SharedSettings

    rows, defaults = load_preference_data(folder).pairs, SharedSettings()
    tokenizer = train_tokenizer(corpus(rows[:300]), vocab_size=SIZES["vocab"])
    renderer = ComposerDataCollator(
        tokenizer,
        max_prompt_tokens=defaults.max_prompt_tokens,
        max_response_tokens=defaults.max_response_tokens,
        with_tools=defaults.render_tools,
    ).renderer
    n = defaults.pairs_per_step
    sampler = PairSampler(
        len(rows), batch_size=n, seed=defaults.seed, groups=[row["session_id"] for row in rows]
    )
    end = tokenizer.eos_token_id

    def ended(ids: list[int]) -> list[int]:
        return ids if ids[-1] == end else [*ids, end]  # TRL does so with a side that was cut

    pairs = [
        (
            renderer.prompt_ids(row["prompt"], row.get("tools")),
            ended(renderer.response_ids(row["chosen"])),
            ended(renderer.response_ids(row["rejected"])),
        )
        for step in range(n_pairs // n)
        for row in (rows[i] for i in sampler.step(step))
    ]
    return pairs, n, end


def run_ours(pairs: list[Pair], pairs_per_step: int) -> dict[str, float]:
    import torch

    from trainer.model.packing import packed_logps
    from trainer.model.tree_layout import pack_pairs_within
    from trainer.settings import SharedSettings

    model, reference = make_model(SIZES), make_model(SIZES, seed=1).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    total = n_packed = 0
    before_s = spent_s("cpu")
    for start in range(0, len(pairs), pairs_per_step):
        step = pairs[start : start + pairs_per_step]
        for tree in pack_pairs_within(step, max_tokens=SharedSettings.max_packed_tokens):
            with torch.no_grad():
                before = packed_logps(reference, tree)
            loss = dpo_sum(*packed_logps(model, tree), *before)
            (loss / len(step)).backward()
            total, n_packed = total + float(loss.detach()), n_packed + tree.n_tokens
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    seconds = spent_s("cpu") - before_s
    return {"seconds": seconds, "loss": total / len(pairs), "n_tokens": n_packed}


def measure(variant: str, folder: str, n_pairs: int) -> dict[str, Any]:
    pairs, n, end = drawn_pairs(folder, n_pairs)
    if variant.startswith("ours"):
        run_ours(pairs[:2], 2)  # imports and first-call set-up
        row = run_ours(pairs, n_pairs if variant == "ours_at_once" else n)
    else:
        size = int(variant.removeprefix("trl_"))
        row = run_trl(pairs, make_model, SIZES, end=end, batch_size=size)
        row["n_tokens"] = sum(
            2 * len(prompt) + len(one) + len(other) for prompt, one, other in pairs
        )
    return {"variant": variant, **row}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", help="a published dataset")
    parser.add_argument("--pairs", type=int, default=N_PAIRS, help="how many; a multiple of 16")
    args = arguments_of(parser, lambda variant, sizes: measure(variant, **sizes))
    rows, sizes = [], {"folder": args.folder, "n_pairs": args.pairs}
    for variant in VARIANTS:
        rows.append(row := measure_fresh(__file__, variant, sizes))
        print(
            f"  {variant:8} {row['seconds'] / args.pairs:8.3f} CPU s a pair  "
            f"{row['n_tokens']:9,} tokens  loss {row['loss']:.6f}",
            flush=True,
        )
    ours, at_once, *peers = rows
    best = min(peers, key=lambda row: row["seconds"])
    ratios = {row["variant"]: best["seconds"] / row["seconds"] for row in (ours, at_once)}
    for variant, ratio in ratios.items():
        print(f"  {variant} takes {ratio:.2f} times fewer CPU seconds than {best['variant']}")
    if args.json:
        report = {"benchmark": "real_pairs", "machine": machine_of("cpu"), "n_pairs": args.pairs}
        report |= {"best_of_trl_over": ratios, "rows": rows}
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
