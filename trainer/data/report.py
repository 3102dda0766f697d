"""Write a run's plot and model card."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

PANELS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("loss", ("train/loss",)),
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
    pairs, states = after["preference"]["n_pairs"], after["consensus"]["n"]
    rows = [
        ("**true minus blank prompt**", pairs, lambda scores: f"{scores['prompt_gain']:+.3f}"),
        ("held-out preference accuracy", pairs, _figure("preference", "accuracy")),
        ("the same with a blank prompt", pairs, _figure("blank_prompt", "accuracy")),
        ("held-out margin (nats per token)", pairs, _figure("preference", "margin")),
        ("greedy actions that are the consensus", states, _figure("consensus", "same")),
        (
            "greedy actions that are well-formed calls",
            after["consensus"]["n_calls"],
            _figure("consensus", "valid"),
        ),
        ("loss on general text", 1, lambda scores: f"{scores['general_loss']:.3f}"),
    ]
    table = "\n".join(
        f"| {label} | {told(before)} | {told(after)} |" for label, n, told in rows if n
    )
    found = "".join(
        f"\n**{sentence[0].upper()}{sentence[1:]}.**\n" for sentence in report["findings"]
    )
    as_text = report["preflight"]["rendered_as_text"]
    form = (
        f"\nIts chat template can't show {', '.join(as_text)}: it was trained on them as text.\n"
        if as_text
        else ""
    )
    channels = ", ".join(report["channels_live"]) or "none"
    return f"""---
library_name: transformers
tags: [trl, composer-replication]
---
# Three-channel model

Trained from {base} on the preference dataset `{dataset}`: {report["steps"]} steps in
{report["seconds"]:.0f} s. Live channels: {channels}. Loss in the first tenth of the steps:
{report["loss_first"]:.4f}, in the last: {report["loss_last"]:.4f}.

| on held-out sessions | before | after |
|---|---|---|
{table}
{found}{form}
{_judged(pairs, states)}

## Settings

```json
{json.dumps(settings, indent=2, sort_keys=True, default=str)}
```
"""


def _figure(group: str, name: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda scores: f"{scores[group][name]:.3f}"


def _judged(n_pairs: int, n_states: int) -> str:
    """Return what the table stands on, and how to read it."""
    if not n_pairs:
        return f"It was not scored on held-out pairs. It acted at {n_states} held-out states."
    return f"""The first line is the figure to judge the model by: what it can tell with a blank prompt it learned
from how the two actions look, not from reading what was asked. {n_pairs} held-out pairs, {n_states} held-out states."""
