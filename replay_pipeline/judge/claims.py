"""Estimate how likely each pair is to be right, from all votes of an extraction."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from replay_pipeline.judge.answers import Case, ExtractOptions, level_of
from replay_pipeline.judge.ballots import AGENT, Ballot, BallotBox
from replay_pipeline.judge.precision import PrecisionEvidence, calibrated
from replay_pipeline.judge.reliability import Beliefs, Reliability, fit, posterior
from replay_pipeline.storage.pair_rows import pair_id_of
from replay_pipeline.types import DPOPair

_MIN_CONTROL = 20
"""From so many answers of the agent's own model on, its agreement with itself is used."""
_NATURAL = {"rejection": 0.8, "rewind": 0.65}
"""What is taken for the chance that a pair of the record is right, before any such pair was checked;
ten pairs that were checked count for as much."""
_NATURAL_STRENGTH = 10.0
_KNOWN_RIGHT = 0.99
"""What is published of a pair that a person accepted or execution proved: both may err."""


@dataclass(frozen=True, slots=True)
class _MarkedSide:
    """What a person said of a pair, and where its chosen side stands on the ballot of its state."""

    group: int
    is_right: bool
    chance: float
    """With which it was drawn."""


class Claims:
    """The collector of evidence. It learns who is right while states are judged, and then rates each pair.

    Args:
        families: the families of teachers.
        options: what is known of actions and pairs.
        known: estimates from an earlier look at the same states, by which pairs are kept.
    """

    def __init__(
        self,
        families: Iterable[str],
        options: ExtractOptions,
        known: Reliability | None = None,
    ) -> None:
        self._verdicts = options.get("verdicts") or {}
        self._checked = options.get("checked") or {}
        self._chances = options.get("chances") or {}
        self._min_p_better = options.get("min_p_better") or 0.0
        self._known = known
        self._box = BallotBox(
            families,
            level=level_of(options),
            same_text=options.get("same_text"),
            verdicts=self._verdicts,
        )
        self._ballots: dict[str, Ballot] = {}
        self._marks: dict[str, _MarkedSide] = {}
        """By state: of several marks at one the last."""

    def file(self, case: Case) -> None:
        """Record which raters took the same action at a state."""
        if not case.voting:
            return
        ballot = self._box.ballot(
            case.state, case.agent, case.voting, is_recorded=case.source == "recorded"
        )
        if ballot is None:
            return
        self._ballots[ballot.state_id] = ballot
        for vote in case.voting if self._checked else ():
            pair_id = pair_id_of(ballot.state_id, vote.action.render(), case.agent.render())
            marked = self._checked.get(pair_id)
            if marked is not None and (group := self._box.group_of(ballot, [vote.family])):
                chance = self._chances.get(pair_id, 1.0)
                self._marks[ballot.state_id] = _MarkedSide(group, marked, chance)

    def best_group(self, case: Case) -> tuple[set[str], float] | None:
        """Return the families whose action is most likely better than the agent's, and how likely.

        What a person accepted is certain. None without estimates or votes.
        """
        ballot = self._ballots.get(case.state["state_id"])
        if self._known is None or ballot is None:
            return None
        better = _beliefs(self._known, ballot).better
        best = max(range(len(better)), key=lambda group: (better[group], -group))
        p_better = better[best]
        mark = self._marks.get(ballot.state_id)
        if mark is not None and mark.is_right:
            best, p_better = mark.group, 1.0
        raters = zip(self._box.raters, ballot.pattern, strict=True)
        return {rater for rater, number in raters if number == best}, p_better

    def is_right(self, pair: DPOPair) -> bool | None:
        """Return whether a pair is known to be right, from a person or from execution."""
        if (marked := self._checked.get(pair.get("pair_id", ""))) is not None:
            return marked
        state_id = pair["state_id"]
        agent = self._verdicts.get((state_id, AGENT))
        told = [self._verdicts.get((state_id, name)) for name in pair.get("teachers_agreeing", ())]
        if agent is True or False in told:
            return False
        return True if agent is False and True in told else None

    def fitted(self, n_control: int = 0, n_mismatch: int = 0) -> Reliability:
        """Return the estimates from all ballots, calibrated by checked pairs.

        Args:
            n_control: number of states at which the agent's own model was asked again.
            n_mismatch: number of those at which it took another action.
        """
        ballots = dict(self._ballots)
        for state_id, mark in self._marks.items():
            ballot = ballots[state_id]
            fact = (-1 - mark.group, mark.is_right)
            ballots[state_id] = replace(ballot, known=(*ballot.known, fact))
        agreement = 1 - n_mismatch / n_control if n_control >= _MIN_CONTROL else None
        model = fit(list(ballots.values()), self._box.raters, self_agreement=agreement)
        checks = [
            (
                _beliefs(model, self._ballots[state_id]).better[mark.group],
                mark.is_right,
                mark.chance,
            )
            for state_id, mark in self._marks.items()
        ]
        return replace(model, calibration=calibrated(checks))

    def settle(
        self,
        pairs: Iterable[DPOPair],
        families: Mapping[str, Sequence[str]],
        n_control: int = 0,
        n_mismatch: int = 0,
    ) -> tuple[Reliability, PrecisionEvidence]:
        """Set `p_chosen_right`, `p_better`, and `weight` of every pair.

        These also use what is known about the pair itself. The evidence for how many pairs are right
        compares claims from votes and record alone with what is known.

        Args:
            pairs: the pairs.
            families: who is for the chosen side, by `pair_id`. Pairs of the record have nobody.
            n_control: as for `fitted`.
            n_mismatch: as for `fitted`.
        """
        model = self._known or self.fitted(n_control, n_mismatch)
        natural = self._natural_shares(pairs)
        claims: dict[str, float] = {}
        for pair in pairs:
            ballot = self._ballots.get(pair["state_id"])
            agreeing = families.get(pair["pair_id"], ())
            group = self._box.group_of(ballot, agreeing) if ballot is not None else None
            if ballot is not None and group is not None:
                beliefs = _beliefs(model, ballot)
                right, better = beliefs.right[group], beliefs.better[group]
            else:
                right = better = natural.get(pair.get("source", ""), 0.5)
            claims[pair.get("pair_id", "")] = better
            is_right = self.is_right(pair)
            if is_right is not None:
                pair["is_checked_right"] = is_right
            if is_right:
                right, better = max(right, _KNOWN_RIGHT), max(better, _KNOWN_RIGHT)
            pair["p_chosen_right"] = round(right, 4)
            pair["p_better"] = pair["weight"] = round(better, 4)
        return model, self._poll(claims, pairs)

    def _poll(self, claims: Mapping[str, float], pairs: Iterable[DPOPair]) -> PrecisionEvidence:
        """Return the evidence for how many pairs are right."""
        known = {
            pair.get("pair_id", ""): is_right
            for pair in pairs
            if (is_right := self.is_right(pair)) is not None
        }
        # What execution tells is of no sample of all pairs: those proven are counted apart, and those
        # refuted are gone.
        told = {key: is_right for key, is_right in known.items() if key not in self._checked}
        left = {key: p for key, p in claims.items() if told.get(key) is not False}
        marked = {key: known[key] for key in known.keys() - told.keys()}
        # What its mark alone has kept is no sample of what claims have kept.
        return PrecisionEvidence.of(
            left,
            marked,
            self._chances,
            proven=[key for key, is_right in told.items() if is_right],
            accepted=[
                key
                for key, is_right in marked.items()
                if is_right and left[key] < self._min_p_better
            ],
        )

    def _natural_shares(self, pairs: Iterable[DPOPair]) -> dict[str, float]:
        """Share of right pairs among those that need no teacher, by source."""
        shares: dict[str, float] = {}
        for source, before in _NATURAL.items():
            found = [
                is_right
                for pair in pairs
                if pair.get("source") == source and (is_right := self.is_right(pair)) is not None
            ]
            shares[source] = (sum(found) + before * _NATURAL_STRENGTH) / (
                len(found) + _NATURAL_STRENGTH
            )
        return shares


def _beliefs(model: Reliability, ballot: Ballot) -> Beliefs:
    return posterior(model, model.kind(ballot.kind), ballot.pattern, has_failed=ballot.has_failed)
