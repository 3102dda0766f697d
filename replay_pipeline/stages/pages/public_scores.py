"""Public benchmark scores of models, the only evidence before any teacher was asked."""

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from replay_pipeline.judge.precision import Z

_DATED = re.compile(r"-\d{8}$|-\d{4}-\d{2}-\d{2}$|:.*$")


@dataclass(frozen=True, slots=True)
class PublicScores:
    """A table of public scores: the benchmark, its date, and the share of tasks that each model solves."""

    source: str
    date: str
    n_tasks: int
    models: Mapping[str, float]

    def score(self, model: str) -> float | None:
        """Return the share of tasks that a model solves; None if the table doesn't have the model."""
        name = _DATED.sub("", model.rpartition("/")[2].lower())
        spelled = (name, name.replace(".", "-"))
        return next((self.models[each] for each in spelled if each in self.models), None)

    def compared(self, one: float, other: float) -> int:
        """Return 1 or -1 if the first score is significantly higher or lower (5 %), else 0."""
        variance = (one * (1 - one) + other * (1 - other)) / self.n_tasks
        if abs(one - other) <= Z * math.sqrt(variance):
            return 0
        return 1 if one > other else -1


@cache
def public_scores() -> PublicScores:
    """Return the table that comes with the package."""
    text = (files("replay_pipeline.stages.pages") / "public_scores.toml").read_text("utf-8")
    table = tomllib.loads(text)
    models = {name: percent / 100 for name, percent in table["models"].items()}
    return PublicScores(table["source"], table["date"], table["n_tasks"], models)


def words_of_scores(agent: str, teachers: Mapping[str, str]) -> list[str]:
    """Describe which teachers are weaker or stronger than the agent by public scores.

    Args:
        agent: the model that wrote the sessions.
        teachers: models by teacher.
    """
    table = public_scores()
    own = table.score(agent)
    if own is None:
        return [
            f"how strong {agent}, which wrote these sessions, is beside your teachers is not known"
        ]
    groups: dict[int, list[str]] = {-1: [], 0: [], 1: []}
    unknown = []
    for name, model in teachers.items():
        score = table.score(model)
        if score is None:
            unknown.append(name)
        else:
            groups[table.compared(score, own)].append(f"{name} ({score:.0%})")
    parts = [
        f"{', '.join(groups[sign])} {'is' if len(groups[sign]) == 1 else 'are'} {words}"
        for sign, words in ((-1, "weaker"), (0, "about as strong"), (1, "stronger"))
        if groups[sign]
    ]
    parts += [f"no score of {', '.join(unknown)} is known"] if unknown else []
    return [
        f"beside {agent} ({own:.0%}), which wrote these sessions, {'; '.join(parts)} "
        f"({table.source}, {table.date})"
    ]
