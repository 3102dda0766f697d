"""Put the two numbers on every pair: what real models showed, corrected by what is known here."""

import math
from collections.abc import Iterable, Mapping

from replay_pipeline.judge.answers import AGENT, ExtractOptions
from replay_pipeline.judge.belief import SUREST, Belief, PairKind, bounded, kind_of
from replay_pipeline.judge.precision import Calibration, PrecisionEvidence, calibrated
from replay_pipeline.types import MIN_P_BETTER, DPOPair

_NATURAL = {"rejection": 0.8, "rewind": 0.65}
"""What is taken for the chance that a pair of the record is right, before any such pair was checked;
ten pairs that were checked count for as much."""
_NATURAL_STRENGTH = 10.0
_KNOWN_RIGHT = 0.99
"""What is published of a pair that a person accepted or execution proved: both may err."""


class Claims:
    """What is known of pairs from persons and from execution.

    Args:
        options: what is known of actions and pairs.
    """

    def __init__(self, options: ExtractOptions) -> None:
        self._verdicts = options.get("verdicts") or {}
        self._checked = options.get("checked") or {}
        self._chances = options.get("chances") or {}
        minimum = options.get("min_p_better")
        self.min_p_better = MIN_P_BETTER if minimum is None else minimum

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

    def settle(self, pairs: Iterable[DPOPair], beliefs: Mapping[str, Belief]) -> Calibration:
        """Set `p_chosen_right`, `p_rejected_wrong`, `p_better`, and `weight` of every pair.

        Args:
            pairs: the pairs.
            beliefs: what votes, difference and session say, by `pair_id`. Without one, a pair is of
                the record alone.
        """
        calibration = calibrated(
            [
                (belief.better, self._checked[pair_id], self._chances.get(pair_id, 1.0))
                for pair_id, belief in beliefs.items()
                if pair_id in self._checked
            ]
        )
        natural = self._natural_shares(pairs)
        for pair in pairs:
            found = beliefs.get(pair["pair_id"])
            if found is None:
                chosen = wrong = math.sqrt(natural.get(pair.get("source", ""), 0.5))
            else:
                # What checks correct is what nobody could know: whether the rejected side is wrong.
                chosen = bounded(max(found.chosen_right, better := calibration.of(found.better)))
                wrong = bounded(better / chosen) if calibration.n_checked else found.rejected_wrong
            if self._verdicts.get((pair["state_id"], AGENT)) is False:
                wrong = max(wrong, SUREST)
            is_right = self.is_right(pair)
            if is_right is not None:
                pair["is_checked_right"] = is_right
            # What the project's own check says of both sides is as good as a person's word.
            if is_right or "check" in pair.get("evidence", ()):
                chosen = wrong = math.sqrt(_KNOWN_RIGHT)
            pair["p_chosen_right"], pair["p_rejected_wrong"] = round(chosen, 4), round(wrong, 4)
            pair["p_better"] = pair["weight"] = round(chosen * wrong, 4)
        return calibration

    def kind(self, pair: DPOPair) -> PairKind:
        """Return whether a pair is sure enough to be one, or a lesson, or neither."""
        if pair.get("source") in _NATURAL or pair.get("is_checked_right") is not None:
            return "pair"
        return kind_of(pair["p_chosen_right"], pair["p_better"], self.min_p_better)

    def poll(
        self, pairs: Iterable[DPOPair], beliefs: Mapping[str, Belief], calibration: Calibration
    ) -> PrecisionEvidence:
        """Return the evidence for how many of the kept pairs are right, those found wrong included."""
        claims = {
            pair["pair_id"]: calibration.of(beliefs[pair["pair_id"]].better)
            if pair["pair_id"] in beliefs
            else pair["p_better"]
            for pair in pairs
        }
        known = {
            pair["pair_id"]: is_right
            for pair in pairs
            if (is_right := self.is_right(pair)) is not None
        }
        # What execution tells is of no sample of all pairs: those proven are counted apart, and those
        # refuted are gone.
        told = {key: is_right for key, is_right in known.items() if key not in self._checked}
        marked = {key: known[key] for key in known.keys() - told.keys()}
        # What its mark alone has kept is no sample of what claims have kept; what a mark has
        # refused and claims would not have kept is none either.
        apart = {key for key in marked if claims[key] < self.min_p_better and key in beliefs}
        left = {
            key: p
            for key, p in claims.items()
            if told.get(key) is not False and (key not in apart or marked[key])
        }
        return PrecisionEvidence.of(
            left,
            marked,
            self._chances,
            proven=[key for key, is_right in told.items() if is_right],
            accepted=[key for key in apart if marked[key]],
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
