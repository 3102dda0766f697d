"""Which engine can do what of the three channels, and a check before anything is started.

`check(settings)` refuses what an engine cannot do, with what to change. `table()` is the table of
`docs/frameworks.md`; `python -m trainer.integrations.capabilities docs/frameworks.md` writes it
there.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainer.errors import TrainerConfigError
from trainer.integrations.settings import EngineSettings

__all__ = ["ENGINES", "Engine", "check", "table"]

EVERY_OBJECTIVE = frozenset(
    {"grpo", "bnpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo", "luspo", "vespo"}
)


@dataclass(frozen=True, kw_only=True)
class Engine:
    """What one engine can do. The first entry of a tuple is what `auto` or nothing means."""

    name: str
    title: str
    tested_with: str
    objectives: frozenset[str]
    """Policy objectives by our names; channel 1 is always the engine's own code."""
    rollouts: tuple[str, ...]
    estimators: tuple[str, ...]
    """Forms of channel 2: anything but `sampled` compares distributions."""
    wrappers: tuple[str, ...]
    has_adaptive_taid: bool
    divergence: str
    """`any` mixture weight, or only `reverse` KL."""
    teachers: tuple[str, ...]
    is_temperature_free: bool
    """Whether channel 2 takes another temperature than 1."""
    replay: str
    """Form of channel 3: `pairwise`, or `credit` per token."""
    outer: tuple[str, ...]
    ranks: str
    """How the model is spread."""


TRL = Engine(
    name="trl",
    title="TRL",
    tested_with="trl 1.16.0",
    objectives=EVERY_OBJECTIVE,
    rollouts=("student", "contrast", "generate"),
    estimators=("full", "topk", "teacher_topk", "sampled"),
    wrappers=("none", "taid", "entropy_opd"),
    has_adaptive_taid=True,
    divergence="any",
    teachers=("ema", "base", "live"),
    is_temperature_free=True,
    replay="pairwise",
    outer=("none", "object_store", "torchft"),
    ranks="DDP, FSDP",
)

ENGINES: dict[str, Engine] = {
    "trl": TRL,
    "monarch": replace(
        TRL,
        name="monarch",
        title="Monarch",
        tested_with="torchmonarch 0.7.0, trl 1.16.0",
        ranks="actors around TRL",
    ),
    "verl": Engine(
        name="verl",
        title="VeRL",
        tested_with="verl 0.9.1",
        objectives=frozenset({"grpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo"}),
        rollouts=("generate",),
        estimators=("teacher_topk",),
        wrappers=("none", "taid", "entropy_opd"),
        has_adaptive_taid=False,
        divergence="any",
        teachers=("live",),
        is_temperature_free=False,
        replay="pairwise",
        outer=("none",),
        ranks="FSDP2, FSDP on Ray",
    ),
    "prime_rl": Engine(
        name="prime_rl",
        title="PRIME-RL",
        tested_with="0.8.0 (recorded contract)",
        objectives=frozenset({"grpo"}),
        rollouts=("generate",),
        estimators=("sampled",),
        wrappers=("none",),
        has_adaptive_taid=False,
        divergence="reverse",
        teachers=("live",),
        is_temperature_free=False,
        replay="credit",
        outer=("none",),
        ranks="FSDP2, trainer and inference apart",
    ),
}
"""Engines by the name that settings and `engines.<name>` use."""


def check(settings: EngineSettings) -> Engine:
    """The engine of these settings, if it can do all that they ask for.

    Raises:
        TrainerConfigError: it cannot; the message lists everything, with what to change.
    """
    if settings.engine not in ENGINES:
        raise TrainerConfigError(
            f"engine {settings.engine!r} is not one of {', '.join(sorted(ENGINES))}"
        )
    engine = ENGINES[settings.engine]
    _ = settings.sdpo, settings.replay  # each checks its own values
    problems = [*_run_problems(engine, settings), *_channel_problems(engine, settings)]
    if problems:
        raise TrainerConfigError(
            f"{engine.title} cannot run these settings:\n  - " + "\n  - ".join(problems)
        )
    return engine


def _run_problems(engine: Engine, settings: EngineSettings) -> Iterator[str]:
    objective = settings.shared.objective
    if objective is not None and objective not in engine.objectives:
        yield f"trl.objective={objective}: choose {_any_of(sorted(engine.objectives))}"
    if settings.rollouts not in engine.rollouts:
        yield (
            f"rollouts={settings.rollouts}: {engine.title} samples from the policy itself; set "
            f"rollouts={engine.rollouts[0]}"
        )
    if settings.outer not in engine.outer:
        yield f"outer={settings.outer}: the outer loop runs under TRL and Monarch; set outer=none"


def _channel_problems(engine: Engine, settings: EngineSettings) -> Iterator[str]:
    shared = settings.shared
    if shared.alpha_sdpo == 0:
        return
    if shared.sdpo_estimator not in engine.estimators:
        yield (
            f"trl.sdpo_estimator={shared.sdpo_estimator}: {_why_not_logits(engine)}; set "
            f"trl.sdpo_estimator={engine.estimators[0]}"
        )
    if shared.sdpo_wrapper not in engine.wrappers:
        yield (
            f"trl.sdpo_wrapper={shared.sdpo_wrapper}: it needs distributions, and "
            f"{_why_not_logits(engine)}; set trl.sdpo_wrapper={engine.wrappers[0]}"
        )
    elif shared.sdpo_wrapper == "taid" and not engine.has_adaptive_taid and shared.taid_alpha != 0:
        yield (
            f"trl.taid_alpha={shared.taid_alpha}: {engine.title} moves TAID's target by the step "
            "alone; set trl.taid_alpha=0"
        )
    if engine.divergence == "reverse" and shared.jsd_beta != 1.0:
        yield (
            f"trl.jsd_beta={shared.jsd_beta}: from sampled tokens only KL(student || teacher) can "
            "be estimated; set trl.jsd_beta=1.0"
        )
    if shared.teacher not in ("auto", *engine.teachers):
        yield (
            f"trl.teacher={shared.teacher}: the inference server that scores hinted contexts "
            f"holds the current policy; set trl.teacher={engine.teachers[0]}"
        )
    if not engine.is_temperature_free and shared.temperature != 1.0:
        yield (
            f"trl.temperature={shared.temperature} with channel 2: the inference server scores at "
            "temperature 1; set trl.temperature=1.0"
        )
    if engine.estimators[0] == "sampled" and shared.sdpo_token_clip is not None:
        yield "trl.sdpo_token_clip: there is no vocabulary entry to cap; take it out"


def _why_not_logits(engine: Engine) -> str:
    if engine.estimators == ("sampled",):
        return "the loss sees the sampled tokens' log-probs, never logits"
    return "the teacher's scores come from an inference server as its top-k"


def _any_of(names: Sequence[str]) -> str:
    return " or ".join((", ".join(names[:-1]), names[-1])) if len(names) > 1 else names[0]


ROWS: tuple[tuple[str, Callable[[Engine], str]], ...] = (
    ("tested with", lambda e: e.tested_with),
    ("spread over", lambda e: e.ranks),
    ("rollouts", lambda e: ", ".join(e.rollouts)),
    (
        "channel 1: objectives",
        lambda e: "all" if e.objectives == EVERY_OBJECTIVE else ", ".join(sorted(e.objectives)),
    ),
    (
        "channel 2: fidelity",
        lambda e: "token-level" if e.estimators == ("sampled",) else "distributional",
    ),
    ("channel 2: `sdpo_estimator`", lambda e: ", ".join(e.estimators)),
    (
        "channel 2: divergence",
        lambda e: "generalized JSD" if e.divergence == "any" else "reverse KL",
    ),
    (
        "channel 2: TAID",
        lambda e: (
            "no" if "taid" not in e.wrappers else "adaptive" if e.has_adaptive_taid else "linear"
        ),
    ),
    ("channel 2: entropy gate", lambda e: "yes" if "entropy_opd" in e.wrappers else "no"),
    ("channel 2: `teacher`", lambda e: ", ".join(e.teachers)),
    ("channel 3: form", lambda e: e.replay),
    ("channel 3: `dpo_variant`", lambda _: "dpo, dpo_norm, simpo"),
    ("`outer`", lambda e: ", ".join(e.outer)),
)


def table() -> str:
    """The engines side by side, as Markdown."""
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


BEGIN, END = "<!-- capabilities: begin -->", "<!-- capabilities: end -->"


def with_table(page: str) -> str:
    """The page with today's table between its two markers.

    Raises:
        TrainerConfigError: it has no markers.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise TrainerConfigError(f"the page lacks {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the table into a page."""
    parser = argparse.ArgumentParser(prog="python -m trainer.integrations.capabilities")
    parser.add_argument("page", type=Path)
    page = parser.parse_args(arguments).page
    page.write_text(with_table(page.read_text("utf-8")), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
