"""Does channel 3 teach a preference? The same run with each channel on and off, several seeds.

    python recipes/trl/ab.py --dataset demo/dataset --output demo/ab

Scores held-out sessions before and after training. The control scores the same pairs with all
content replaced by filler: what rises there is taste for a form, not judgement.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from trainer.__main__ import read_config
from trainer.engines.settings_file import read_settings
from trainer.engines.trl.run import run

CONFIG = Path(__file__).with_name("three_channels.yaml")
WEIGHTS = {
    "channel 3 alone": (0.0, 0.0, 1.0),
    "channel 2 alone": (0.0, 0.1, 0.0),
    "all three": (1.0, 0.1, 1.0),
    "channels 1 and 2": (1.0, 0.1, 0.0),
}
NAMES = ("trl.policy_weight", "trl.alpha_sdpo", "trl.beta_replay")
ARMS = {
    arm: [f"{name}={weight}" for name, weight in zip(NAMES, weights, strict=True)]
    for arm, weights in WEIGHTS.items()
}
"""The first two settle the question. Channel 1 is paid for agreeing with the same consensus, so it
can learn the preference too: the last two show what channel 3 adds to it."""
MIN_GAIN = 15.0


def gains(evaluation: dict[str, Any]) -> dict[str, float]:
    """Percentage points gained with the true prompt and with a blank one."""
    return {
        group: 100 * (evaluation["after"][group]["accuracy"] - before["accuracy"])
        for group, before in evaluation["before"].items()
        if group in ("preference", "blank_prompt")
    }


def train(arm: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    output = options.output / f"{arm.replace(' ', '-')}-{seed}"
    overrides = [f"dataset={options.dataset}", f"output={output}", f"trl.seed={seed}"]
    overrides += ["evaluation.max_prompts=0", *ARMS[arm], *options.overrides]
    run(read_settings(read_config(options.config, overrides)))
    evaluation = json.loads((output / "evaluation.json").read_text("utf-8"))
    scores = {m: 100 * evaluation[m]["preference"]["accuracy"] for m in ("before", "after")}
    return {"arm": arm, "seed": seed, **scores, **gains(evaluation)}


def means(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    keys = ("before", "after", "preference", "blank_prompt")
    return {
        arm: {key: statistics.fmean(row[key] for row in rows if row["arm"] == arm) for key in keys}
        for arm in dict.fromkeys(row["arm"] for row in rows)
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| arm | seed | before | after | gain | gain with a blank prompt |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['arm']} | {row['seed']} | {row['before']:.1f} | {row['after']:.1f} "
        f"| {row['preference']:+.1f} | {row['blank_prompt']:+.1f} |"
        for row in rows
    ]
    lines += [
        f"| **{arm}** | mean | {mean['before']:.1f} | {mean['after']:.1f} "
        f"| **{mean['preference']:+.1f}** | **{mean['blank_prompt']:+.1f}** |"
        for arm, mean in means(rows).items()
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Channel 3 on and off, several seeds.")
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), help="by default all")
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    options = parser.parse_args()
    arms = options.arms or list(ARMS)
    rows = [train(arm, seed, options) for arm in arms for seed in range(options.seeds)]
    text = table(rows)
    print(text)
    (options.output / "table.md").write_text(text + "\n", "utf-8")
    (options.output / "rows.json").write_text(json.dumps(rows, indent=2) + "\n", "utf-8")
    mean = means(rows)
    is_good = all(
        (mean[arm]["preference"] >= MIN_GAIN) == (arm != "channel 2 alone")
        and mean[arm]["blank_prompt"] < MIN_GAIN
        for arm in ("channel 3 alone", "channel 2 alone", "all three")
        if arm in mean
    )
    print("PASS" if is_good else "FAIL")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
