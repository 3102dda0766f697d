"""Public benchmark scores of models, the only evidence before any teacher was asked."""

import math
import re
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from replay_pipeline.judge.precision import Z

_DATED = re.compile(r"-\d{8}$|-\d{4}-\d{2}-\d{2}$|:.*$")


@cache
def public_scores() -> Mapping[str, Any]:
    """Return the table that comes with the package: its source, date, and the percents of `models`."""
    return tomllib.loads(Path(__file__).with_name("public_scores.toml").read_text("utf-8"))


def score_of(model: str) -> float | None:
    """Return the share of tasks that a model solves; None if the table doesn't have the model."""
    name, models = _DATED.sub("", model.rpartition("/")[2].lower()), public_scores()["models"]
    spelled = (name, name.replace(".", "-"))
    return next((models[each] / 100 for each in spelled if each in models), None)


def compared(one: float, other: float) -> int:
    """Return 1 or -1 if the first score is significantly higher or lower (5 %), else 0."""
    variance = (one * (1 - one) + other * (1 - other)) / public_scores()["n_tasks"]
    if abs(one - other) <= Z * math.sqrt(variance):
        return 0
    return 1 if one > other else -1


def words_of_scores(agent: str, teachers: Mapping[str, str]) -> list[str]:
    """Describe which teachers are weaker or stronger than the agent by public scores."""
    table, own = public_scores(), score_of(agent)
    if own is None:
        return [
            f"how strong {agent}, which wrote these sessions, is beside your teachers is not known"
        ]
    groups: dict[int, list[str]] = {-1: [], 0: [], 1: []}
    unknown = []
    for name, model in teachers.items():
        score = score_of(model)
        if score is None:
            unknown.append(name)
        else:
            groups[compared(score, own)].append(f"{name} ({score:.0%})")
    parts = [
        f"{', '.join(groups[sign])} {'is' if len(groups[sign]) == 1 else 'are'} {words}"
        for sign, words in ((-1, "weaker"), (0, "about as strong"), (1, "stronger"))
        if groups[sign]
    ]
    parts += [f"no score of {', '.join(unknown)} is known"] if unknown else []
    return [
        f"beside {agent} ({own:.0%}), which wrote these sessions, {'; '.join(parts)} "
        f"({table['source']}, {table['date']})"
    ]
