"""Write the table of `docs/frameworks.md`: which engine can do what of the three channels.

`python -m tools.engines docs/frameworks.md`.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from trainer.engines.capabilities import ENGINES, TRL, TrainingEngine
from trainer.losses.channels import VARIANTS

TESTED_WITH = {
    "trl": "trl 1.16.0",
    "monarch": "torchmonarch 0.7.0, trl 1.16.0",
    "verl": "verl 0.9.1",
    "prime_rl": "commit 559b44772, to the loss",
}
SPREAD_OVER = {
    "trl": "DDP, FSDP",
    "monarch": "actors around TRL",
    "verl": "FSDP2, FSDP on Ray",
    "prime_rl": "FSDP2, trainer and inference apart",
}
ROWS: tuple[tuple[str, Callable[[TrainingEngine], str]], ...] = (
    ("tested with", lambda e: TESTED_WITH[e.name]),
    ("spread over", lambda e: SPREAD_OVER[e.name]),
    ("rollouts", lambda e: ", ".join(e.rollouts)),
    (
        "channel 1: objectives",
        lambda e: (
            "all" if set(e.objectives) == set(TRL.objectives) else ", ".join(sorted(e.objectives))
        ),
    ),
    ("channel 2: fidelity", lambda e: "token-level" if e.is_sampled else "distributional"),
    ("channel 2: `sdpo_estimator`", lambda e: ", ".join(e.estimators)),
    ("channel 2: divergence", lambda e: "reverse KL" if e.is_sampled else "generalized JSD"),
    (
        "channel 2: TAID",
        lambda e: "no" if "taid" not in e.wrappers else "adaptive" if e.sees_logits else "linear",
    ),
    ("channel 2: entropy gate", lambda e: "yes" if "entropy_opd" in e.wrappers else "no"),
    ("channel 2: `teacher`", lambda e: ", ".join(e.teachers)),
    ("channel 3: form", lambda e: "credit" if e.is_sampled else "pairwise"),
    ("channel 3: `dpo_variant`", lambda _: ", ".join(VARIANTS)),
    ("`outer`", lambda e: ", ".join(e.outer)),
)

BEGIN, END = "<!-- capabilities: begin -->", "<!-- capabilities: end -->"


def table() -> str:
    """Put the engines side by side, as Markdown."""
    engines = list(ENGINES.values())
    lines = [
        "| | " + " | ".join(engine.title for engine in engines) + " |",
        "|---" * (len(engines) + 1) + "|",
    ]
    lines += [
        f"| {label} | " + " | ".join(value(engine) for engine in engines) + " |"
        for label, value in ROWS
    ]
    return "\n".join(lines)


def with_table(page: str) -> str:
    """Put today's table between the two markers of a page.

    Raises:
        ValueError: it has no markers.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page lacks {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the table into a page."""
    parser = argparse.ArgumentParser(prog="python -m tools.engines")
    parser.add_argument("page", type=Path)
    page = parser.parse_args(arguments).page
    page.write_text(with_table(page.read_text("utf-8")), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
