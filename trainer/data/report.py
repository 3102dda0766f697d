"""Write a run's plot and model card."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

PANELS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("objective", ("loss/objective",)),
    ("channels", ("policy/loss", "sdpo/loss", "replay/loss")),
    ("reward and accuracy", ("train/reward", "replay/accuracy")),
    ("gradient norm", ("train/grad_norm",)),
)


def plot_metrics(metrics: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Plot losses, reward, and gradient norm over the steps, as one PNG."""
    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.subplots(2, 2).flat
    for axis, (title, keys) in zip(axes, PANELS, strict=True):
        for key in keys:
            points = [(row["step"], row[key]) for row in metrics if row.get(key) is not None]
            if points:
                axis.plot(*zip(*points, strict=True), marker=".", label=key)
                axis.legend(fontsize=8)
        axis.set_title(title)
        axis.set_xlabel("step")
        axis.grid(visible=True, alpha=0.3)
    FigureCanvasAgg(figure).print_png(str(path))


def model_card(
    *,
    base: str,
    dataset: str,
    settings: Mapping[str, Any],
    report: Mapping[str, Any],
    evaluation: Mapping[str, Any],
) -> str:
    """Write the README.md of a trained model."""
    before, after = evaluation["before"], evaluation["after"]
    rows = [
        ("held-out preference accuracy", "preference", "accuracy"),
        ("the same with a blank prompt", "blank_prompt", "accuracy"),
        ("the same with another pair's prompt", "shuffled_prompt", "accuracy"),
        ("held-out margin (nats per token)", "preference", "margin"),
        ("format-only control accuracy", "format_only", "accuracy"),
        ("greedy actions that are the consensus", "consensus", "same"),
        ("greedy actions that are well-formed calls", "consensus", "valid"),
    ]
    gain = f"| **true minus blank prompt** | {before['prompt_gain']:+.3f} | {after['prompt_gain']:+.3f} |"
    table = "\n".join(
        f"| {label} | {before[group][key]:.3f} | {after[group][key]:.3f} |"
        for label, group, key in rows
    )
    general = (
        f"| loss on general text | {before['general_loss']:.3f} | {after['general_loss']:.3f} |"
    )
    found = "".join(
        f"\n**{sentence[0].upper()}{sentence[1:]}.**\n" for sentence in report["findings"]
    )
    channels = ", ".join(report["channels_live"]) or "none"
    return f"""---
library_name: transformers
tags: [trl, composer-replication]
---
# Three-channel model

Trained from {base} on the preference dataset `{dataset}`: {report["steps"]} steps in
{report["seconds"]:.0f} s. Live channels: {channels}. Objective on a fixed batch:
{report["loss_first"]:.4f} before, {report["loss_last"]:.4f} after.

| on held-out sessions | before | after |
|---|---|---|
{gain}
{table}
{general}
{found}
The first line is the figure to judge the model by: what it can tell with a blank prompt it learned
from how the two actions look, not from reading what was asked. The format-only control scores the same pairs with all content replaced by filler; a gain there
comes from form, not from judgement. {before["preference"]["n_pairs"]} held-out pairs.

## Settings

```json
{json.dumps(settings, indent=2, sort_keys=True, default=str)}
```
"""
