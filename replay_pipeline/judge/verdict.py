"""Could one model have done another one's work? By how both differ from a panel of others.

Nobody scored the work, so each answer is scored by a panel: how many of it took the same action, how many
agree on another one, and what the answer differs in from these. How likely such an answer is right was learned where
it is known, from real models' answers that were scored (`verdict.toml`, made by `benchmarks/verdict.py --learn`).
Where an action was tried, that tells more: two with the same effect are alike, one that its tool refuses or that breaks
the project's check is wrong, and one that makes the check pass is right.
The mean difference of two models' scores, stretched for panels that seldom agree, estimates the difference of
their shares of right answers. Its interval has two parts: chance, by an asymptotic confidence sequence that holds
however often one looks (Waudby-Smith et al. 2024, "Time-uniform central limit theory and asymptotic confidence
sequences"), and what such scores are wrong by, however many there are (`SYSTEMATIC`).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import combinations
from statistics import fmean, pvariance
from typing import Literal, NamedTuple

import msgspec

from replay_pipeline.actions import Action, agreement_level, agrees_at
from replay_pipeline.actions.difference import difference
from replay_pipeline.judge.belief import SUREST
from replay_pipeline.judge.precision import Z
from replay_pipeline.types import Message, Tool, Trial

MARGIN = 0.10
"""A model could have done the work if its share of right answers is lower by less than this."""
FEWEST = 30
"""Fewer decisions settle nothing."""
USUAL = 150
"""The number of decisions at which the confidence sequence is tightest."""
SYSTEMATIC = 0.025
"""Standard deviation of what scores by a panel are wrong by, for a panel that agrees as often as `_AGREEING`."""
_AGREEING, _LEAST_AGREEING = 0.75, 0.30
"""How often two of a panel agree where its scores are as far apart as the truth, and the least that is believed."""
_ALPHA = 0.05

Answer = Literal["could", "could not", "can't tell"]


class Scored(NamedTuple):
    """A decision: how likely the candidate and the agent were right, and how much of the panel agrees."""

    candidate: float
    agent: float
    agreeing: float | None
    """Share of the pairs of the panel that took the same action; None for a panel of one."""
    is_valid: bool = True
    """Whether the candidate's answer can be carried out."""
    only_speaks: bool | None = None
    """Whether the candidate only spoke where the agent acted; None where the agent spoke."""
    is_tried: bool = False
    """Whether execution decided about one of them, or both."""

    @property
    def gain(self) -> float:
        """Return how much likelier the candidate was right."""
        return self.candidate - self.agent


@dataclass(frozen=True, slots=True)
class Verdict:
    """What some decisions tell about a candidate beside the agent."""

    answer: Answer
    n: int
    difference: float
    """The candidate's share of right answers less the agent's."""
    low: float
    high: float
    """95 % interval of `difference`, at any number of decisions at which one looks."""
    n_more: int | None
    """Further decisions after which it could be told if nothing changes. None if that is now, or never."""
    unfit: str | None = None
    """Why the candidate can't do such work at all, whatever its answers say."""


@cache
def _learned() -> Mapping[str, float]:
    file = resources.files("replay_pipeline.judge") / "verdict.toml"
    return msgspec.toml.decode(file.read_bytes(), type=dict[str, dict[str, float]])["right"]


def features(
    answer: Action,
    panel: Sequence[Action],
    tools: Sequence[Tool] = (),
    messages: Sequence[Message] = (),
) -> dict[str, float]:
    """Return what a panel tells about an answer, by the names of the coefficients.

    Args:
        answer: a valid answer.
        panel: valid answers of at least one other model.
        tools: the tools of the state.
        messages: its prompt.
    """
    groups: list[list[Action]] = []
    n_same = 0
    for each in panel:
        if _is_same(answer, each):
            n_same += 1
        elif group := next((group for group in groups if _is_same(group[0], each)), None):
            group.append(each)
        else:
            groups.append([each])
    n_against = max(map(len, groups), default=0)
    found = {"always": 1.0, f"{_part(n_same, panel)} same, {_part(n_against, panel)} against": 1.0}
    if n_same:
        return found
    for group in groups:
        names = difference(group[0], answer, tools, messages).names()
        for name in names or ["nothing"]:
            found[name] = found.get(name, 0.0) + len(group) / len(panel)
    return found


def _part(n: int, panel: Sequence[Action]) -> str:
    if n in (0, len(panel)):
        return "all" if n else "none"
    return "most" if 2 * n > len(panel) else "some"


def _is_same(one: Action, other: Action) -> bool:
    return agrees_at("effect", agreement_level(one, other))


def p_right(held: Mapping[str, float], coefficients: Mapping[str, float] | None = None) -> float:
    """Return how likely an answer is right of which `features` hold, by default by the shipped coefficients."""
    model = _learned() if coefficients is None else coefficients
    return 1 / (1 + math.exp(-math.fsum(model.get(name, 0.0) * x for name, x in held.items())))


def judged(
    candidate: Action,
    agent: Action,
    panel: Sequence[Action],
    tools: Sequence[Tool] = (),
    messages: Sequence[Message] = (),
    *,
    coefficients: Mapping[str, float] | None = None,
    tried: Mapping[str, Trial] | None = None,
) -> Scored:
    """Score the answers of two models at one state by the answers of others.

    Args:
        candidate: the candidate's action; an invalid one is an answer, too.
        agent: the agent's.
        panel: valid actions of other models, at least one.
        tools: the tools of the state.
        messages: its prompt.
        coefficients: by which `p_right` goes.
        tried: results of executing actions at the state, by their rendered text.
    """
    scores = [
        p_right(features(each, panel, tools, messages), coefficients)
        if each.is_valid
        else 1 - SUREST
        for each in (candidate, agent)
    ]
    trials = [
        (tried or {}).get(each.render()) if each.is_valid else None for each in (candidate, agent)
    ]
    told = [_told(trial) for trial in trials]
    scores = [score if known is None else known for score, known in zip(scores, told, strict=True)]
    effects = {trial.effect if trial is not None else None for trial in trials}
    has_one_effect = len(effects) == 1 and None not in effects
    if has_one_effect or _is_same(candidate, agent):
        scores[0] = scores[1]
    pairs = [_is_same(one, other) for one, other in combinations(panel, 2)]
    speaks = candidate.is_valid and not candidate.calls if agent.calls else None
    is_tried = has_one_effect or told != [None, None]
    agreeing = fmean(pairs) if pairs else None
    return Scored(scores[0], scores[1], agreeing, candidate.is_valid, speaks, is_tried)


def _told(trial: Trial | None) -> float | None:
    """Return how likely an action is right by what happened when it was tried, or None if that doesn't tell."""
    if trial is None or (trial.works and trial.check not in ("fixed", "broken")):
        return None
    return SUREST if trial.check == "fixed" else 1 - SUREST


def verdict(decisions: Iterable[Scored], *, margin: float = MARGIN) -> Verdict:
    """Compare two models over decisions.

    Args:
        decisions: what was judged, in the order of asking.
        margin: how much lower the candidate's share of right answers may be.
    """
    found = list(decisions)
    gains = [each.gain for each in found]
    n = len(found)
    if n < 2:
        return Verdict("can't tell", n, 0.0, -1.0, 1.0, FEWEST - n)
    agreeing = [each.agreeing for each in found if each.agreeing is not None]
    stretch = _AGREEING / max(_LEAST_AGREEING, fmean(agreeing) if agreeing else 0.0)
    mean = max(-1.0, min(1.0, stretch * fmean(gains)))
    sd = stretch * math.sqrt(pvariance(gains))

    def half(n: int) -> float:
        # One part of a decision of which nobody has seen an error: no sample is without chance.
        return math.hypot(max(sd, 1 / n) * _time_uniform(n), Z * SYSTEMATIC * stretch)

    low, high = max(-1.0, mean - half(n)), min(1.0, mean + half(n))
    answer: Answer = "can't tell"
    if n >= FEWEST:
        answer = "could" if low > -margin else "could not" if high < -margin else answer
    more = None
    if answer == "can't tell":
        sizes = (int(n * 1.25**step) for step in range(1, 16))
        told = (size for size in sizes if size >= FEWEST and abs(mean + margin) > half(size))
        more = next((size - n for size in told), None)
    if n >= FEWEST and (unfit := _unfit(found)):
        return Verdict("could not", n, mean, low, high, None, unfit)
    return Verdict(answer, n, mean, low, high, more)


def _unfit(found: Sequence[Scored]) -> str | None:
    """Return why a candidate can't do such work, if most of its answers are no actions."""
    n_broken = sum(not each.is_valid for each in found)
    if 2 * n_broken > len(found):
        return f"{n_broken} of its {len(found)} answers can't be carried out"
    spoke = [each.only_speaks for each in found if each.only_speaks is not None]
    if 2 * len(spoke) >= FEWEST and 2 * sum(spoke) > len(spoke):
        return f"it only spoke in {sum(spoke)} of {len(spoke)} decisions in which the agent acted"
    return None


def _time_uniform(n: int) -> float:
    """Return the half width of a confidence sequence after `n` values of variance one."""
    least = -2 * math.log(_ALPHA)
    rho = (least + math.log(least) + 1) / USUAL
    grown = n * rho + 1
    return math.sqrt(2 * grown / (n * n * rho) * math.log(math.sqrt(grown) / _ALPHA))
