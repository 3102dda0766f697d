"""Pairs whose worse side is what the model to be trained does itself."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Unpack

from replay_pipeline.pairs.extract import ExtractOptions, extract_pairs
from replay_pipeline.types import DPOPair, TeacherAction, TraceState

WITH_CONSENSUS = frozenset({"pair", "agreement"})
"""Outcomes of states at which the teachers agree and nothing speaks against what they say."""


@dataclass(frozen=True, kw_only=True)
class OnPolicyReport:
    """What samples of a model come to at states with a consensus."""

    pairs: list[DPOPair]
    positives: list[dict[str, Any]]
    n_states: int
    n_samples: int
    """Answers, failed ones included: the sum of all that follows but the first two."""
    errors: dict[str, int]
    """Failed answers by their code."""
    outcomes: dict[str, int]
    """Usable samples by what they came to: `pair`, `agreement`, `invalid_action`, …"""
    n_repeated: int
    """Pairs and positives of those that another sample, or the record, has made already."""

    def to_json(self) -> dict[str, Any]:
        """Return the figures as JSON; `agreement_rate` is a share of usable samples."""
        n_usable = sum(self.outcomes.values())
        return {
            "n_states": self.n_states,
            "n_samples": self.n_samples,
            "n_pairs": len(self.pairs),
            "n_positives": len(self.positives),
            "n_repeated": self.n_repeated,
            "errors": self.errors,
            "outcomes": self.outcomes,
            "agreement_rate": self.outcomes.get("agreement", 0) / n_usable if n_usable else None,
        }


@dataclass
class _Found:
    pairs: list[DPOPair] = field(default_factory=list)
    positives: list[dict[str, Any]] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    n_repeated: int = 0


def on_policy_pairs(
    states: Sequence[TraceState],
    teacher_actions: Sequence[TeacherAction],
    sampled: Iterable[TeacherAction],
    agreement_threshold: int = 2,
    *,
    known_pairs: Collection[str] = (),
    known_positives: Collection[str] = (),
    **options: Unpack[ExtractOptions],
) -> OnPolicyReport:
    """Judge samples of the model to be trained against the teachers' consensus.

    A sample that differs is the rejected side of a pair, one that agrees makes a positive. Each
    pair and each positive is made once, however often it is sampled.

    Args:
        states: those that were sampled.
        teacher_actions: answers of the teachers, in any order.
        sampled: answers of the model; several at a state are told apart by `teacher`.
        agreement_threshold: as for `extract_pairs`.
        known_pairs: `pair_id` of pairs that are there already.
        known_positives: `state_id` of positives that are there already.
        options: as for `extract_pairs`.

    Raises:
        ConfigError: as for `extract_pairs`.
    """
    errors: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    by_sampler: dict[str, list[TeacherAction]] = {}
    n_samples = 0
    for sample in sampled:
        n_samples += 1
        if sample.action is None or sample.error_code is not None:
            errors[sample.error_code or "no_action"] += 1
        else:
            by_sampler.setdefault(sample.teacher, []).append(sample)
    found = _Found(seen={*known_pairs, *known_positives})
    options["include_natural"] = False
    for _, drawn in sorted(by_sampler.items()):
        actions = {one.state_id: one.action for one in drawn if one.action is not None}
        options["samples"] = actions
        report = extract_pairs(
            [state for state in states if state["state_id"] in actions],
            teacher_actions,
            agreement_threshold,
            **options,
        )
        outcomes.update(report.outcome_counts)
        for pair in report.pairs:
            _keep(found, found.pairs, pair, pair["pair_id"])
        for positive in report.positives:
            _keep(found, found.positives, positive, positive["state_id"])
    return OnPolicyReport(
        pairs=found.pairs,
        positives=found.positives,
        n_states=len(states),
        n_samples=n_samples,
        errors=dict(errors),
        outcomes=dict(outcomes),
        n_repeated=found.n_repeated,
    )


def _keep(found: _Found, rows: list[Any], row: Any, identity: str) -> None:
    if identity in found.seen:
        found.n_repeated += 1
    else:
        found.seen.add(identity)
        rows.append(row)
