"""How much a pair should count in training."""

from dataclasses import dataclass

from replay_pipeline.types import FAILURES, AgreementLevel, Outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class PairWeights:
    """Factors of a pair's weight; the product starts from the share of families that agree."""

    exact: float = 1.0
    effect: float = 1.0
    target: float = 0.5
    tool: float = 0.25
    evidence: float = 2.0
    """The recorded action failed, was rejected or taken back."""
    success: float = 0.5
    """The recorded action went well: evidence for the rejected side."""
    shared_vendor: float = 0.5
    """An agreeing teacher comes from the student's vendor."""
    control_mismatch: float = 0.5
    """The student's own model, asked again, left its recorded action too."""
    rewind: float = 1.0
    """A pair from a branch that was given up."""
    rejection: float = 1.5
    """A pair from an action that the user rejected."""

    def of_consensus(
        self,
        *,
        share: float,
        level: AgreementLevel,
        outcome: Outcome | None,
        shares_vendor: bool,
        is_control_mismatch: bool | None,
    ) -> float:
        """Weight of a pair on which `share` (0 to 1) of the valid families agree."""
        weight = share * getattr(self, level)
        if outcome in FAILURES:
            weight *= self.evidence
        elif outcome == "ok":
            weight *= self.success
        if shares_vendor:
            weight *= self.shared_vendor
        if is_control_mismatch:
            weight *= self.control_mismatch
        return round(weight, 6)
