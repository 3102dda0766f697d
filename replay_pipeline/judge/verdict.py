"""Could one model have done another one's work? By how both differ from a panel of others.

Nobody scored the work. Where two models take the same action, neither is ahead. Elsewhere a panel scores both: how many of
it took the same action, how many agree on another one, and what the answer differs in from these. How likely such an
answer is right was learned where it is known, from real models' answers that were scored (`verdict.toml`, made by
`benchmarks/verdict.py --learn`). Commands and edits of coding agents were never scored, so there the votes alone count.
Where an action was tried, that tells more: two with the same effect are alike, one that its tool refuses or that breaks
the project's check is wrong, and one that makes the check pass is right.
A panel that is right in a share q of the decisions agrees with a right action q times as often, and with itself in q² of the
pairs: so the mean difference of two models' scores, over the root of that agreement, estimates the difference of their
shares of right answers. Its interval has two parts: chance, by a boundary that holds however often one looks (Howard et al.
2020, "Time-uniform Chernoff bounds via nonnegative supermartingales"; with a known effect it is Wald's sequential test),
and what such scores are wrong by, however many there are (`SYSTEMATIC`). Decisions of one run count by how alike they are.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import combinations
from statistics import NormalDist, fmean, pvariance
from typing import Literal, NamedTuple

import msgspec

from replay_pipeline.actions import Action, agreement_level, agrees_at
from replay_pipeline.actions.difference import difference
from replay_pipeline.actions.tools import SPECS
from replay_pipeline.judge.belief import SUREST
from replay_pipeline.types import Message, Tool, Trial

MARGIN = 0.10
"""A model could have done the work if its share of right answers is lower by less than this."""
FEWEST = 30
"""Fewer decisions settle nothing."""
USUAL = 150
"""The number of decisions at which the interval is tightest."""
SYSTEMATIC = 0.02
"""Standard deviation of what scores by a panel that always agrees are wrong by, between models that differ by at most
.15: .017 to .020 on the answers of `benchmarks/verdict.py`."""
_LEAST_AGREEING = 0.1
"""The least agreement of a panel that is believed: below, nothing is told."""
_ALPHA = 0.05
"""How often the truth may lie below an interval, and how often above."""
_Z = NormalDist().inv_cdf(1 - _ALPHA)

Answer = Literal["could", "could not", "can't tell"]


class Scored(NamedTuple):
    """A decision: how much likelier the candidate was right than the agent, and how much of the panel agrees."""

    gain: float | None
    """None where they differ and too few of the panel answered to say."""
    agreeing: float | None = None
    """Share of the pairs of the panel that took the same action; None where fewer than two were asked."""
    is_valid: bool = True
    """Whether the candidate's answer can be carried out."""
    only_speaks: bool | None = None
    """Whether the candidate only spoke where the agent acted; None where the agent spoke."""
    is_tried: bool = False
    """Whether execution decided about one of them, or both."""
    differs: bool = True
    """Whether the two did different things."""
    run: str | None = None
    """Decisions of one run were drawn together, so they tell less than as many drawn apart. None is a run of its own."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What some decisions tell about a candidate beside the agent."""

    answer: Answer
    n: int
    difference: float
    """The candidate's share of right answers less the agent's."""
    low: float
    high: float
    """90 % interval of `difference`, at any number of decisions at which one looks."""
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
        if is_same(answer, each):
            n_same += 1
        elif group := next((group for group in groups if is_same(group[0], each)), None):
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


def is_same(one: Action, other: Action) -> bool:
    """Return whether two actions do the same. Two that end the turn do: nobody can score their words."""
    if one.is_valid and other.is_valid and not one.calls and not other.calls:
        return True
    return agrees_at("effect", agreement_level(one, other))


def p_right(held: Mapping[str, float], coefficients: Mapping[str, float] | None = None) -> float:
    """Return how likely an answer is right of which `features` hold, by default by the shipped coefficients."""
    model = _learned() if coefficients is None else coefficients
    return 1 / (1 + math.exp(-math.fsum(model.get(name, 0.0) * x for name, x in held.items())))


def judged(
    candidate: Action,
    agent: Action,
    panel: Sequence[Action] | None = None,
    tools: Sequence[Tool] = (),
    messages: Sequence[Message] = (),
    *,
    coefficients: Mapping[str, float] | None = None,
    tried: Mapping[str, Trial] | None = None,
    run: str | None = None,
) -> Scored:
    """Score the answers of two models at one state by the answers of others.

    Args:
        candidate: the candidate's action; an invalid one is an answer, too.
        agent: the agent's.
        panel: valid actions of other models. None if too few answered.
        tools: the tools of the state.
        messages: its prompt.
        coefficients: by which `p_right` goes.
        tried: results of executing actions at the state, by their rendered text.
        run: the run of decisions that this one was drawn with.
    """
    speaks = candidate.is_valid and not candidate.calls if agent.calls else None
    if is_same(candidate, agent):
        return Scored(0.0, only_speaks=speaks, differs=False, run=run)
    found = [_trial(each, tried) for each in (candidate, agent)]
    effects = {trial.effect if trial is not None else None for trial in found}
    if len(effects) == 1 and None not in effects:
        return Scored(0.0, only_speaks=speaks, is_tried=True, run=run)
    if panel is None:
        return Scored(None, None, candidate.is_valid, speaks, run=run)
    was_scored = not any(
        call.name in SPECS for each in (candidate, agent, *panel) for call in each.calls
    )
    scores = []
    for each, trial in zip((candidate, agent), found, strict=True):
        if (told := _told(trial)) is not None:
            scores.append(told)
        elif not each.is_valid:
            scores.append(1 - SUREST)
        elif was_scored:
            scores.append(p_right(features(each, panel, tools, messages), coefficients))
        else:
            scores.append(fmean(is_same(each, other) for other in panel) if panel else 0.5)
    pairs = [is_same(one, other) for one, other in combinations(panel, 2)]
    is_tried = any(_told(trial) is not None for trial in found)
    gain, agreeing = scores[0] - scores[1], fmean(pairs) if pairs else None
    return Scored(gain, agreeing, candidate.is_valid, speaks, is_tried, run=run)


def _trial(action: Action, tried: Mapping[str, Trial] | None) -> Trial | None:
    return (tried or {}).get(action.render()) if action.is_valid else None


def _told(trial: Trial | None) -> float | None:
    """Return how likely an action is right by what happened when it was tried, or None if that doesn't tell."""
    if trial is None or (trial.works and trial.check not in ("fixed", "broken")):
        return None
    return SUREST if trial.check == "fixed" else 1 - SUREST


def verdict(decisions: Iterable[Scored], *, usual: int = USUAL) -> Verdict:
    """Compare two models over decisions.

    Args:
        decisions: what was judged, in the order of asking.
        usual: the number of decisions at which the interval is to be tightest.
    """
    found = list(decisions)
    n, n_apart = len(found), sum(each.differs for each in found)
    known = [each.gain for each in found if each.differs and each.gain is not None]
    if n < 2 or (n_apart and not known):
        return Verdict("can't tell", n, 0.0, -1.0, 1.0, max(0, FEWEST - n) or None)
    agreeing = [each.agreeing for each in found if each.agreeing is not None]
    # A panel that was asked nowhere has seen no difference to stretch.
    stretch = 1 / math.sqrt(max(_LEAST_AGREEING, fmean(agreeing))) if agreeing else 1.0
    # Where the panel didn't answer, the gain is what it is on average where they differ, which is known that less well.
    usually, sd = (fmean(known), stretch * n_apart / len(known)) if known else (0.0, 1.0)
    gains = [usually if each.gain is None else each.gain for each in found]
    mean = max(-1.0, min(1.0, stretch * fmean(gains)))
    sd *= math.sqrt(_variance(gains, [each.run for each in found]))

    def half(n: int) -> float:
        # One part of a decision of which nobody has seen an error: no sample is without chance.
        return math.hypot(max(sd, 1 / n) * _time_uniform(n, usual), _Z * SYSTEMATIC * stretch)

    low, high = max(-1.0, mean - half(n)), min(1.0, mean + half(n))
    answer: Answer = "can't tell"
    if n >= FEWEST:
        answer = "could" if low > -MARGIN else "could not" if high < -MARGIN else answer
    more = None
    if answer == "can't tell":
        sizes = (int(n * 1.25**step) for step in range(1, 16))
        told = (size for size in sizes if size >= FEWEST and abs(mean + MARGIN) > half(size))
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


def _variance(gains: Sequence[float], run_of: Sequence[str | None]) -> float:
    """Return the variance of a decision's gain, times what decisions of one run are alike (a design effect)."""
    mean, alone = fmean(gains), pvariance(gains)
    runs: dict[object, float] = defaultdict(float)
    for number, (gain, run) in enumerate(zip(gains, run_of, strict=True)):
        runs[number if run is None else run] += gain - mean
    if len(runs) < 2:
        return alone
    together = math.fsum(total**2 for total in runs.values()) / len(gains)
    return max(alone, together * len(runs) / (len(runs) - 1))


def _time_uniform(n: int, usual: int = USUAL) -> float:
    """Return the half width after `n` values of variance one, by the line that is lowest at `usual`."""
    return math.sqrt(-math.log(_ALPHA) / 2) * (math.sqrt(usual) / n + 1 / math.sqrt(usual))
