"""Training steps of the trainer on a published dataset: what each exact short cut takes off them.

    python benchmarks/step.py FOLDER             # a dataset that `publish` wrote
    python benchmarks/step.py FOLDER --json benchmarks/results/step.json
    python benchmarks/step.py --small            # invented sessions, seconds

Everything not named here has its default; a model of random weights that does not move, so that the
losses of the same steps can be compared; each variant in a fresh process on one thread:

- `shared_ema`, `shared_live`: the first steps of a run in which all three channels have something to
  learn from, as one forward pass where weights allow it
- `separate_ema`, `separate_live`: the same, with completions, teacher and pairs each in their pass
- `pairs`: channel 3 alone, by the trainer, from step to step; and `dpo`, by turns in the same process,
  the forward and backward passes of the same pairs and the optimizer's steps, by hand
- `memory_N`: 24 pairs in one step with `max_packed_tokens` N; peak RSS of it over what was there
"""

import argparse
import ctypes
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.measuring import (  # noqa: E402 - after the path above
    Device,
    arguments_of,
    machine_of,
    measure_fresh,
    peak_mib,
    spent_s,
)
from benchmarks.pairs import make_model  # noqa: E402 - after the path above

MODEL = {"device": "cpu", "dtype": "float32", "hidden": 256, "n_layers": 4, "vocab": 8192}
SMALL_MODEL = MODEL | {"hidden": 64, "n_layers": 2, "vocab": 512}
N_STEPS, N_ROUNDS, N_PAIRS = 3, 4, 24
ALL = {"alpha_sdpo": 0.1, "beta_replay": 1.0}
ALONE = {"policy_weight": 0.0, "alpha_sdpo": 0.0, "beta_replay": 1.0}
VARIANTS: dict[str, dict[str, Any]] = {
    "shared_ema": ALL | {"teacher": "ema"},
    "separate_ema": ALL | {"teacher": "ema"},
    "shared_live": ALL | {"teacher": "live"},
    "separate_live": ALL | {"teacher": "live"},
    "pairs": ALONE | {"pair_forward": "packed"},
}
TEACHERS = ("ema", "live")
BUDGETS, SMALL_BUDGETS = (2048, 4096, 8192), (256, 512, 1024)


def make_trainer(sizes: dict[str, Any], settings: dict[str, Any]) -> Any:
    """Build the trainer as `trainer.engines.trl.run` does, for a model of any size."""
    from transformers import AutoTokenizer

    from trainer.data.dataset import load_preference_data
    from trainer.data.hints import hint_for_row
    from trainer.data.rendering import Renderer
    from trainer.data.rewards import as_trl_reward, consensus_reward
    from trainer.data.rollouts import student_rollouts
    from trainer.data.tiny import corpus, train_tokenizer
    from trainer.data.tokens import requests_of
    from trainer.engines.trl.config import ComposerConfig
    from trainer.engines.trl.run import without_upstream_warnings
    from trainer.engines.trl.trainer import ComposerReplicationTrainer

    data, scratch = load_preference_data(sizes["folder"]), Path(sizes["scratch"])
    if not (scratch / "tokenizer").exists():
        words = corpus(data.pairs[:300])
        train_tokenizer(words, vocab_size=sizes["vocab"]).save_pretrained(scratch / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(scratch / "tokenizer")
    args = ComposerConfig(
        output_dir=str(scratch),
        report_to=[],
        use_cpu=sizes["device"] == "cpu",
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
    renderer.store.fill(requests, renderer, scratch / "tokens")
    recorded = student_rollouts(data, renderer, group_size=args.num_generations, seed=args.seed)
    with without_upstream_warnings():
        return ComposerReplicationTrainer(
            make_model(sizes),
            as_trl_reward(consensus_reward),
            args,
            pairs=data.pairs,
            recorded=recorded,
            tokens=renderer.store,
            processing_class=tokenizer,
        )


def keep_steps_with_hints(trainer: Any) -> None:
    """Let the trainer go through the first steps of its run whose rollouts have a hint, and no others."""
    from trainer.data.rollouts import RecordedRollouts
    from trainer.model.scoring import chunked_response_logps

    sampler, groups = trainer._get_train_sampler(), trainer.recorded.groups
    rows, size = list(sampler), trainer.args.generation_batch_size
    batches = [rows[start : start + size] for start in range(0, len(rows), size)]
    has_hint = [any(trainer.hint(one) for row in batch for one in groups[row]) for batch in batches]
    kept = [step for step, found in enumerate(has_hint) if found][:N_STEPS]
    assert len(kept) == N_STEPS, "too few steps have a hint"
    drawn = [row for step in kept for row in batches[step]]
    behaviour = RecordedRollouts([groups[row] for row in dict.fromkeys(drawn)])
    behaviour.add_behaviour_logps(trainer.model, logps_of=chunked_response_logps)
    pairs_of = trainer.pair_channel.sampler.step
    trainer.pair_channel.sampler.step = lambda step: pairs_of(kept[step])
    trainer._get_train_sampler = lambda _dataset=None: drawn
    trainer._train_sampler = None


def train(trainer: Any, device: Device = "cpu") -> list[float]:
    """Train, and return the seconds from the beginning of each step to that of the next."""
    from transformers import TrainerCallback

    from trainer.engines.trl.run import without_upstream_warnings

    begun_s: list[float] = []

    class Steps(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            begun_s.append(spent_s(device))

    trainer.add_callback(callback := Steps())
    with without_upstream_warnings():
        trainer.train()
    trainer.remove_callback(callback)
    begun_s.append(spent_s(device))
    return [end - begin for begin, end in itertools.pairwise(begun_s)]


def run_trainer(trainer: Any) -> dict[str, Any]:
    """Train, and measure the steps."""
    keep_steps_with_hints(trainer)
    taken_s = train(trainer)
    logged = [row for row in trainer.state.log_history if "loss" in row]
    return {
        "seconds": sum(taken_s),
        "losses": [row["loss"] for row in logged],
        "replay_losses": [row["replay/loss"] for row in logged],
        "sdpo_tokens": [row["sdpo/n_tokens"] for row in logged],
    }


def run_alone(trainer: Any) -> dict[str, Any]:
    """Channel 3 alone, and by turns its passes by hand: of each step the fastest of some rounds."""
    spent = {"collation_s": 0.0, "packing_s": 0.0}

    def timed(name: str, call: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            before_s = time.thread_time()
            result = call(*args, **options)
            spent[name] += time.thread_time() - before_s
            return result

        return run

    from trainer.engines.trl import trainer as module

    collator = type(trainer.collator)
    plain = collator.pairs, module.trees_of
    trainer.args.max_steps = N_STEPS + 1  # the last has no next one
    by_trainer, by_hand, seconds = [], [], 0.0
    for _ in range(N_ROUNDS):
        by_hand.append(dpo_steps(trainer))
        collator.pairs, module.trees_of = (
            timed("collation_s", plain[0]),
            timed("packing_s", plain[1]),
        )
        taken_s = train(trainer)
        collator.pairs, module.trees_of = plain
        seconds += sum(taken_s)
        by_trainer.append(taken_s[:N_STEPS])
    logged = [row for row in trainer.state.log_history if "loss" in row]
    return {
        "seconds": sum(map(min, zip(*by_trainer, strict=True))),
        "dpo_seconds": sum(
            min(one) for one in zip(*([s for s, _ in r] for r in by_hand), strict=True)
        ),
        "losses": [row["loss"] for row in logged][:N_STEPS],
        "dpo_losses": [loss for _, loss in by_hand[0]],
        **{name.replace("_s", "_share"): one / seconds for name, one in spent.items()},
    }


def dpo_steps(trainer: Any) -> list[tuple[float, float]]:
    """Forward and backward passes of each step's pairs and the optimizer's, without a trainer."""
    import torch

    optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=0.0)
    trainer.model.train()
    steps = []
    for step in range(N_STEPS):
        rows = trainer.pair_channel.sampler.step(step)
        batch = trainer.collator.pairs([trainer.pairs[i] for i in rows])
        n_weighed = float(batch["dpo_weight"].sum())
        before_s, total = spent_s("cpu"), 0.0
        for pairs, forward in trainer.pair_channel.passes(trainer.model, batch):
            charged, *_ = trainer.pair_channel.charged(
                forward(), {"dpo_weight": batch["dpo_weight"][pairs]}
            )
            (charged / n_weighed).backward()
            total += float(charged.detach()) / n_weighed
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps.append((spent_s("cpu") - before_s, total))
    return steps


def run_once(trainer: Any) -> dict[str, Any]:
    """One step, and the peak of its memory over what was there."""
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD: what a tensor had goes back when it is freed
    libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before_mib = peak_mib("cpu")
    taken_s = train(trainer)
    return {"seconds": sum(taken_s), "losses": [0.0], "extra_mib": peak_mib("cpu") - before_mib}


def measure(variant: str, sizes: dict[str, Any]) -> dict[str, Any]:
    if variant in VARIANTS:
        settings, run = VARIANTS[variant], run_alone if variant == "pairs" else run_trainer
    else:
        budget = int(variant.removeprefix("memory_"))
        settings, run = VARIANTS["pairs"] | {"max_packed_tokens": budget}, run_once
        settings |= {"pairs_per_step": sizes["n_pairs"], "max_steps": 1}
    trainer = make_trainer(sizes, settings)
    if variant.startswith("separate"):
        trainer._can_share = lambda *_: False
    return {"variant": variant, **run(trainer)}


def off_the_line(points: list[tuple[int, float]]) -> float:
    """How far, as a share, the second of three points lies off the line through the others."""
    (x0, y0), (x1, y1), (x2, y2) = points
    expected = y0 + (y2 - y0) * (x1 - x0) / (x2 - x0)
    return abs(y1 - expected) / expected


def report_of(rows: dict[str, dict[str, Any]], budgets: Sequence[int]) -> dict[str, Any]:
    """What the variants come to, beside each other."""
    extra = [rows[f"memory_{budget}"]["extra_mib"] for budget in budgets]
    return {
        "benchmark": "step",
        "machine": machine_of("cpu"),
        "separate_over_shared": {
            teacher: rows[f"separate_{teacher}"]["seconds"] / rows[f"shared_{teacher}"]["seconds"]
            for teacher in TEACHERS
        },
        "loss_difference": max(
            abs(one - other)
            for teacher in TEACHERS
            for name in ("losses", "replay_losses")
            for one, other in zip(
                rows[f"separate_{teacher}"][name], rows[f"shared_{teacher}"][name], strict=True
            )
        ),
        "pairs_over_dpo": rows["pairs"]["seconds"] / rows["pairs"]["dpo_seconds"],
        "collation_share": rows["pairs"]["collation_share"],
        "extra_mib": dict(zip(budgets, extra, strict=True)),
        "off_the_line": off_the_line(list(zip(budgets, extra, strict=True))),
        "rows": list(rows.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", help="a published dataset")
    parser.add_argument("--small", action="store_true", help="invented sessions, a tiny model")
    args = arguments_of(parser, measure)
    with tempfile.TemporaryDirectory() as scratch:
        sizes = MODEL | {"folder": args.folder, "scratch": scratch, "n_pairs": N_PAIRS}
        if args.small:
            from tests.trainer.published import write_dataset

            dataset = write_dataset(Path(scratch) / "dataset", n_sessions=15)
            few = {"max_prompt_tokens": 256, "render_tools": False}
            sizes |= SMALL_MODEL | {"folder": str(dataset), "n_pairs": 16, "settings": few}
        budgets = SMALL_BUDGETS if args.small else BUDGETS
        rows = {}
        for variant in [*VARIANTS, *(f"memory_{budget}" for budget in budgets)]:
            rows[variant] = row = measure_fresh(__file__, variant, sizes)
            seconds = row["seconds"] / len(row["losses"])
            print(f"  {variant:14} {seconds:8.3f} CPU s a step", flush=True)
    report = report_of(rows, budgets)
    print(json.dumps({name: value for name, value in report.items() if name != "rows"}, indent=2))
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
