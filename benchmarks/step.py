"""Training steps of the trainer on a published dataset: what each exact short cut takes off them.

    python benchmarks/step.py FOLDER             # a dataset that `publish` wrote
    python benchmarks/step.py FOLDER --json benchmarks/results/step.json
    python benchmarks/step.py --small            # invented sessions, seconds

Everything not named here has its default; a model of random weights; the same steps in all of
them, each in a fresh process on one thread:

- `shared_ema`, `shared_live`: all three channels, as one forward pass where weights allow it
- `separate_ema`, `separate_live`: completions, teacher and pairs each in a pass of their own
- `pairs`: channel 3 alone, by the trainer; `dpo`: its forward and backward passes, by hand
- `memory_N`: channel 3 alone with `max_packed_tokens` N; peak RSS of the steps over what was there
"""

import argparse
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.measuring import arguments_of, machine_of, measure_fresh, peak_mib, spent_s  # noqa: E402
from benchmarks.pairs import make_model  # noqa: E402 - after the path above

MODEL = {"device": "cpu", "dtype": "float32", "hidden": 256, "n_layers": 4, "vocab": 8192}
SMALL_MODEL = MODEL | {"hidden": 64, "n_layers": 2, "vocab": 512}
N_STEPS = 3
ALL = {"alpha_sdpo": 0.1, "beta_replay": 1.0, "dpo_variant": "dpo"}
ALONE = {"policy_weight": 0.0, "alpha_sdpo": 0.0, "beta_replay": 1.0, "pair_forward": "packed"}
SEPARATE = {"share_prefixes": False, "reuse_prefix": False}
VARIANTS: dict[str, dict[str, Any]] = {
    "shared_ema": ALL | {"teacher": "ema"},
    "separate_ema": ALL | {"teacher": "ema"} | SEPARATE,
    "shared_live": ALL | {"teacher": "live"},
    "separate_live": ALL | {"teacher": "live"} | SEPARATE,
    "pairs": ALONE,
    "dpo": ALONE,
}
BUDGETS, SMALL_BUDGETS = (2048, 4096, 8192), (256, 512, 1024)


def make_trainer(sizes: dict[str, Any], settings: dict[str, Any]) -> Any:
    """Build the trainer as `trainer.integrations.trl.run` does, for a model of any size."""
    from trainer.data.dataset import load_preference_data
    from trainer.data.rendering import Renderer
    from trainer.data.rewards import as_trl_reward, consensus_reward
    from trainer.data.rollouts import student_rollouts
    from trainer.data.tiny import corpus, train_tokenizer
    from trainer.data.tokens import requests_of
    from trainer.hints import hint_for_row
    from trainer.integrations.scoring import response_logps
    from trainer.integrations.trl.config import ComposerConfig
    from trainer.integrations.trl.run import without_upstream_warnings
    from trainer.integrations.trl.trainer import ComposerReplicationTrainer

    data = load_preference_data(sizes["folder"])
    sessions = {row["session_id"] for row in data.pairs[: sizes["n_pairs"]]}
    data = replace(
        data,
        pairs=data.pairs[: sizes["n_pairs"]],
        positives=[row for row in data.positives if row["session_id"] in sessions],
        **{name: [] for name in ("prompts", "test_pairs", "test_prompts")},
    )
    tokenizer = train_tokenizer(corpus(data.pairs), vocab_size=sizes["vocab"])
    args = ComposerConfig(
        output_dir=sizes["scratch"],
        report_to=[],
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        learning_rate=0.0,
        activation_checkpointing=False,
        **({"max_steps": N_STEPS} | sizes.get("settings", {}) | settings),
    )
    renderer = Renderer(
        tokenizer=tokenizer,
        max_prompt_tokens=args.max_prompt_tokens,
        max_response_tokens=args.max_response_tokens,
        with_tools=args.render_tools,
    )
    requests = requests_of(data, hint_for_row, with_tools=args.render_tools)
    renderer.store.fill(requests, renderer, Path(sizes["scratch"]) / "tokens")
    model = make_model(sizes)
    recorded = student_rollouts(data, renderer, group_size=args.num_generations, seed=args.seed)
    del recorded.groups[N_STEPS * 4 :]  # each needs a behaviour pass
    recorded.add_behaviour_logps(model, logps_of=response_logps)
    with without_upstream_warnings():
        return ComposerReplicationTrainer(
            model,
            as_trl_reward(consensus_reward),
            args,
            pairs=data.pairs,
            recorded=recorded,
            tokens=renderer.store,
            processing_class=tokenizer,
        )


def run_trainer(trainer: Any) -> dict[str, Any]:
    """Train, and measure the steps and, within them, what makes their batches and trees."""
    from trainer.integrations.trl import trainer as module
    from trainer.integrations.trl.run import without_upstream_warnings

    spent = {"collation_s": 0.0, "packing_s": 0.0}

    def timed(name: str, call: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            before_s = time.thread_time()
            result = call(*args, **options)
            spent[name] += time.thread_time() - before_s
            return result

        return run

    collator = type(trainer.collator)
    collator.__call__ = timed("collation_s", collator.__call__)
    module.trees_of = timed("packing_s", module.trees_of)
    before_mib, before_s = peak_mib("cpu"), spent_s("cpu")
    with without_upstream_warnings():
        trainer.train()
    logged = [row for row in trainer.state.log_history if "loss" in row]
    return {
        "seconds": spent_s("cpu") - before_s,
        **spent,
        "extra_mib": peak_mib("cpu") - before_mib,
        "losses": [row["loss"] for row in logged],
        "replay_losses": [row.get("replay/loss") for row in logged],
        "sdpo_tokens": [row.get("sdpo/n_tokens", 0.0) for row in logged],
    }


def run_dpo(trainer: Any) -> dict[str, Any]:
    """The same pairs' forward and backward passes and optimizer steps, without a trainer."""
    import torch

    from trainer.integrations.packing import tree_pair_logps, trees_of

    optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=0.0)
    losses, spent = [], 0.0
    for step in range(N_STEPS):
        rows = trainer._pair_sampler.step(step)
        batch = trainer.collator([trainer.pairs[i] for i in rows])
        before_s = spent_s("cpu")
        total = 0.0
        trees = trees_of(batch, max_tokens=trainer.args.max_packed_tokens)
        for tree in trees:
            scored = {"dpo_weight": batch["dpo_weight"][list(tree.pair_idx)]}
            charged, _ = trainer._charged(tree_pair_logps(trainer.model, tree), scored)
            (charged / len(rows)).backward()
            total += float(charged.detach()) / len(rows)
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        spent += spent_s("cpu") - before_s
        losses.append(total)
    return {"seconds": spent, "losses": losses}


def measure(variant: str, sizes: dict[str, Any]) -> dict[str, Any]:
    settings = VARIANTS.get(variant)
    if settings is None:
        budget = int(variant.removeprefix("memory_"))
        settings = ALONE | {"max_packed_tokens": budget, "pairs_per_step": sizes["n_pairs"]}
        settings["max_steps"] = 1
    trainer = make_trainer(sizes, settings)
    return {"variant": variant, **(run_dpo if variant == "dpo" else run_trainer)(trainer)}


def off_the_line(points: list[tuple[int, float]]) -> float:
    """How far, as a share, the second of three points lies off the line through the others."""
    (x0, y0), (x1, y1), (x2, y2) = points
    expected = y0 + (y2 - y0) * (x1 - x0) / (x2 - x0)
    return abs(y1 - expected) / expected


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", help="a published dataset")
    parser.add_argument("--small", action="store_true", help="invented sessions, a tiny model")
    args = arguments_of(parser, measure)
    with tempfile.TemporaryDirectory() as scratch:
        sizes = MODEL | {"folder": args.folder, "scratch": scratch, "n_pairs": 48}
        if args.small:
            from tests.trainer.published import write_dataset

            dataset = write_dataset(Path(scratch) / "dataset")
            few = {"max_prompt_tokens": 256, "render_tools": False}
            sizes |= SMALL_MODEL | {"folder": str(dataset), "n_pairs": 16, "settings": few}
        budgets = SMALL_BUDGETS if args.small else BUDGETS
        rows = {}
        for variant in [*VARIANTS, *(f"memory_{budget}" for budget in budgets)]:
            rows[variant] = row = measure_fresh(__file__, variant, sizes)
            print(
                f"  {variant:14} {row['seconds'] / len(row['losses']):8.3f} CPU s a step",
                flush=True,
            )
    pairs, extra = rows["pairs"], [rows[f"memory_{budget}"]["extra_mib"] for budget in budgets]
    report = {
        "benchmark": "step",
        "machine": machine_of("cpu"),
        "separate_over_shared": {
            teacher: rows[f"separate_{teacher}"]["seconds"] / rows[f"shared_{teacher}"]["seconds"]
            for teacher in ("ema", "live")
        },
        "pairs_over_dpo": pairs["seconds"] / rows["dpo"]["seconds"],
        "collation_share": pairs["collation_s"] / pairs["seconds"],
        "extra_mib": dict(zip(budgets, extra, strict=True)),
        "off_the_line": off_the_line(list(zip(budgets, extra, strict=True))),
        "rows": list(rows.values()),
    }
    print(json.dumps({name: value for name, value in report.items() if name != "rows"}, indent=2))
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
