"""A step of the trainer, and the same step by TRL's trainers.

    python benchmarks/whole_step.py --small                        # seconds
    python benchmarks/whole_step.py --device cuda --shape 0.5B     # prompts of 16k tokens, bfloat16
    python benchmarks/whole_step.py --device cuda --shape 8B-LoRA --json FILE
    python benchmarks/whole_step.py --imitation --device cuda --shape 1.7B

Invented sessions; the rollouts and the pairs are those that the trainer draws for the first steps of
a run, and the learning rate is 0, so that losses can be compared. Each variant has a fresh process,
and its figure is the fastest of its steps but the first:

- `ours`: the trainer, both channels in one step
- `trl_N`: `trl.GRPOTrainer` on the rollouts and then `trl.DPOTrainer` on the pairs, N of them a
  micro-batch, with the reference's log-probabilities taken before, as the trainer does
- `trl_N_liger`: the same with Liger's fused losses

With `--imitation`, the step is that of `trainer/gpu.yaml`, the cross-entropy of the actions that
teachers agree on, and `trl_N` is `trl.SFTTrainer` without padding, on the same rows.
"""

import argparse
import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.measuring import (  # noqa: E402 - after the path above
    SECONDS,
    arguments_of,
    machine_of,
    measure_fresh,
    peak_mib,
)
from benchmarks.pairs import SHAPES, make_model  # noqa: E402
from benchmarks.step import SMALL_MODEL, make_trainer, train  # noqa: E402
from benchmarks.trl_pairs import run_trl  # noqa: E402

N_STEPS = 3
SETTINGS = {"alpha_sdpo": 0.0, "beta_replay": 1.0, "max_steps": N_STEPS + 1}
IMITATION = SETTINGS | {"objective": "sft", "beta_replay": 0.0}
LONG = {"max_prompt_tokens": 16_384, "max_packed_tokens": 32_768, "render_tools": False}
SHORT = {"max_prompt_tokens": 256, "render_tools": False}
LIGER = "_liger"


def drawn(trainer: Any) -> tuple[list[int], list[list[dict[str, Any]]]]:
    """Rows of the steps, one for each rollout, and the groups behind them with `old_logps`."""
    from trainer.data.rollouts import RecordedRollouts
    from trainer.model.scoring import chunked_response_logps

    size = trainer.args.generation_batch_size
    rows = list(trainer._get_train_sampler())[: size * (N_STEPS + 1)]
    groups = [trainer.recorded.groups[row] for row in rows]
    RecordedRollouts(list({id(one): one for one in groups}.values())).add_behaviour_logps(
        trainer.model, logps_of=chunked_response_logps
    )
    return rows, groups


def run_ours(sizes: dict[str, Any]) -> dict[str, Any]:
    if sizes["imitates"]:
        trainer = make_trainer(sizes, IMITATION)
        taken_s = train(trainer, sizes["device"])
        loss = trainer.state.log_history[0]["policy/loss"]
        return {"seconds": min(taken_s[1:]), "policy_loss": loss}
    trainer = make_trainer(sizes, SETTINGS)
    rows, _ = drawn(trainer)
    trainer._get_train_sampler = lambda _dataset=None: rows
    trainer._train_sampler = None
    taken_s = train(trainer, sizes["device"])
    first = trainer.state.log_history[0]
    return {
        "seconds": min(taken_s[1:]),
        "policy_loss": first["policy/loss"],
        "replay_loss": first["replay/loss"],
    }


def run_peer(variant: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """The same rollouts and pairs through TRL's trainers, one after the other."""
    options = {"use_liger_kernel": True} if variant.endswith(LIGER) else {}
    n = int(variant.removesuffix(LIGER).removeprefix("trl_"))
    # Its ids are those of any model with this vocabulary: a small one makes them.
    small = SMALL_MODEL | {name: sizes[name] for name in ("folder", "scratch", "settings", "vocab")}
    if sizes["imitates"]:
        return run_imitation(make_trainer(small, IMITATION), n, sizes, options)
    ours = make_trainer(small, SETTINGS)
    _, groups = drawn(ours)
    n_pairs = ours.composer.pairs_per_step
    renderer = ours.collator.renderer
    end = ours.processing_class.eos_token_id
    pairs = [
        (
            renderer.prompt_ids(row["prompt"], row.get("tools")),
            [*renderer.response_ids(row["chosen"])[:-1], end],
            [*renderer.response_ids(row["rejected"])[:-1], end],
        )
        for row in (ours.pairs[i] for i in ours.pair_channel.sampler.step(0))
    ]
    policy = run_policy(ours, groups, n, sizes, options)
    preference = run_trl(
        pairs,
        make_model,
        sizes,
        end=end,
        batch_size=min(n, n_pairs),
        n_steps=1 if sizes["device"] == "cpu" else N_STEPS,
        precompute_ref_log_probs=True,
        **options,
    )
    return {
        "seconds": policy["seconds"] + preference["seconds"],
        "policy_seconds": policy["seconds"],
        "policy_loss": policy["loss"],
    }


def run_imitation(
    ours: Any, n: int, sizes: dict[str, Any], options: dict[str, Any]
) -> dict[str, Any]:
    """TRL's fine-tuning without padding on the actions of the first step of ours."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from trainer.engines.trl.run import without_upstream_warnings

    batch = ours.collator.pairs([ours.pairs[i] for i in ours.pair_channel.sampler.step(0)])
    names = ("input_ids", "response_mask", "attention_mask")
    columns = [batch[f"dpo_chosen_{name}"].tolist() for name in names]
    rows = [
        {"input_ids": ids[: sum(seen)], "completion_mask": asked[: sum(seen)]}
        for ids, asked, seen in zip(*columns, strict=True)
    ]
    with tempfile.TemporaryDirectory() as folder, without_upstream_warnings():
        config = SFTConfig(
            output_dir=folder,
            per_device_train_batch_size=n,
            gradient_accumulation_steps=len(rows) // n,
            padding_free=True,
            max_length=None,
            completion_only_loss=True,
            learning_rate=0.0,
            max_steps=N_STEPS + 1,
            gradient_checkpointing=sizes.get("checkpointing", False),
            use_cpu=sizes["device"] == "cpu",
            bf16=False,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            **options,
        )
        trainer = SFTTrainer(
            make_model(sizes),
            config,
            train_dataset=Dataset.from_list(rows),
            processing_class=ours.processing_class,
        )
        taken_s = train(trainer, sizes["device"])
    n_tokens = sum(len(row["input_ids"]) for row in rows)
    loss = trainer.state.log_history[0]["loss"]
    return {"seconds": min(taken_s[1:]), "policy_loss": loss, "n_tokens": n_tokens}


def run_policy(
    ours: Any, groups: list[Any], n: int, sizes: dict[str, Any], options: dict[str, Any]
) -> dict[str, float]:
    """TRL's GRPO on the recorded rollouts, with the rewards that the trainer gives them."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from trainer.data.rewards import as_trl_reward, consensus_reward
    from trainer.engines.trl.run import without_upstream_warnings

    args = ours.args
    each, size = args.num_generations, args.generation_batch_size
    shown = groups[::each]  # a row stands once for each rollout of its group
    replayed: list[dict[str, Any]] = []

    def replay(prompts: list[Any], _trainer: Any) -> dict[str, list[Any]]:
        named = [shown[int(prompt[0]["content"])] for prompt in prompts]
        replayed[:] = [group[i % each % len(group)] for i, group in enumerate(named)]
        return {
            "prompt_ids": [one["prompt_ids"] for one in replayed],
            "completion_ids": [one["action_ids"] for one in replayed],
            "logprobs": [one["old_logps"] for one in replayed],
        }

    def reward(completions: list[Any], **_: Any) -> list[float]:
        columns = {name: [one[name] for one in replayed] for name in ("action", "consensus")}
        return as_trl_reward(consensus_reward)(completions, **columns)

    with tempfile.TemporaryDirectory() as folder, without_upstream_warnings():
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=n,
            gradient_accumulation_steps=size // n,
            num_generations=each,
            max_completion_length=args.max_completion_length,
            loss_type=args.loss_type,
            beta=args.beta,
            scale_rewards=args.scale_rewards,
            learning_rate=0.0,
            max_steps=N_STEPS + 1,
            shuffle_dataset=False,
            gradient_checkpointing=sizes.get("checkpointing", False),
            use_cpu=sizes["device"] == "cpu",
            bf16=False,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            **options,
        )
        rows = [[{"role": "user", "content": str(place)}] for place in range(len(shown))]
        trainer = GRPOTrainer(
            make_model(sizes),
            reward,
            config,
            train_dataset=Dataset.from_dict({"prompt": rows}),
            processing_class=ours.processing_class,
            rollout_func=replay,
        )
        taken_s = train(trainer, sizes["device"])
    return {"seconds": min(taken_s[1:]), "loss": trainer.state.log_history[0]["loss"]}


def measure(variant: str, sizes: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        sizes |= {"scratch": scratch}
        row = run_ours(sizes) if variant == "ours" else run_peer(variant, sizes)
    return {"variant": variant, **row, "peak_mib": round(peak_mib(sizes["device"]))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="short sessions, a tiny model")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--shape", choices=list(SHAPES), default="0.5B")
    parser.add_argument("--imitation", action="store_true", help="the step of trainer/gpu.yaml")
    args = arguments_of(parser, measure)
    from tests.trainer.published import write_dataset

    if args.small:
        sizes, long, peers = SMALL_MODEL | {"settings": SHORT}, {}, ["trl_2"]
    else:
        dtype = {"cpu": "float32", "cuda": "bfloat16"}[args.device]
        sizes = SHAPES[args.shape] | {"device": args.device, "dtype": dtype, "settings": LONG}
        long, peers = {"n_states": 8, "n_words": 700}, ["trl_1", "trl_2"]
        if args.device == "cuda" and importlib.util.find_spec("liger_kernel"):
            peers.append(f"trl_1{LIGER}")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        sizes |= {"folder": str(write_dataset(Path(folder), n_sessions=15, **long))}
        sizes |= {"imitates": args.imitation}
        for variant in ["ours", *peers]:
            rows.append(row := measure_fresh(__file__, variant, sizes))
            print(f"  {variant:12} {row['seconds']:9.3f} {SECONDS[sizes['device']]}", flush=True)
    best = min(row["seconds"] for row in rows[1:])
    for row in rows:
        if args.imitation:
            row["tokens_a_second"] = round(rows[1]["n_tokens"] / row["seconds"])
    report = {
        "benchmark": "imitation" if args.imitation else "whole_step",
        "machine": machine_of(sizes["device"]),
        "best_of_trl_over_ours": best / rows[0]["seconds"],
        "rows": rows,
    }
    print(f"  TRL takes {report['best_of_trl_over_ours']:.2f} times as long")
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
