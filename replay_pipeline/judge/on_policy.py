"""Pairs whose worse side comes from the trainee, the model to be trained.

A model has favorite names. If each of its samples that differs from the teachers became the worse
side of a pair, these names would be on that side alone, and anyone could tell without a prompt which
side is better. So a name has to be on both sides about equally often (`balanced`).
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Unpack

import numpy as np

from replay_pipeline.judge.answers import ExtractOptions
from replay_pipeline.judge.extract import extract_pairs
from replay_pipeline.types import DPOPair, Message, TeacherAction, TraceState

MIN_CALLS = 0.2
"""Below this share of complete calls, samples tell little about a model."""

WITH_CONSENSUS = frozenset({"pair", "lesson", "agreement"})
"""Outcomes of states at which the teachers agree and nothing contradicts them."""


@dataclass(frozen=True, kw_only=True)
class OnPolicyReport:
    """The results of sampling a model at states with a consensus."""

    pairs: list[DPOPair]
    positives: list[dict[str, Any]]
    n_states: int
    n_samples: int
    """All answers, including failed ones."""
    errors: dict[str, int]
    """Failed answers by their code."""
    outcomes: dict[str, int]
    """Usable samples by outcome: `pair`, `agreement`, `invalid_action`, `other_form` (a text where
    the consensus is a call), `infeasible_sample` (it needs a file or a text
    that the prompt never showed), `tells_side` (with this pair, words would tell which side is
    better), …"""
    forms: dict[str, dict[str, int]]
    """How often each tool, or `text`, is on the chosen and on the rejected side of pairs."""
    n_calls: int
    """Usable samples that are calls."""
    n_repeated: int
    """Pairs and positives that another sample, or the record, already made."""

    @property
    def advice(self) -> str | None:
        """Return what to do first if this model's samples make no useful pairs."""
        if self.n_samples == 0 or self.n_calls >= MIN_CALLS * self.n_samples:
            return None
        return (
            f"{self.n_calls} of {self.n_samples} samples are whole calls: this model does not answer "
            "with calls yet. Train on `chosen` first (trl.objective: sft), then sample it again"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the figures as JSON. `agreement_rate` is a share of the usable samples."""
        n_usable = sum(self.outcomes.values())
        return {
            "n_states": self.n_states,
            "n_samples": self.n_samples,
            "n_pairs": len(self.pairs),
            "n_positives": len(self.positives),
            "n_repeated": self.n_repeated,
            "errors": self.errors,
            "outcomes": self.outcomes,
            "forms": self.forms,
            "advice": self.advice,
            "agreement_rate": self.outcomes.get("agreement", 0) / n_usable if n_usable else None,
        }


@dataclass
class _Found:
    pairs: list[DPOPair] = field(default_factory=list)
    positives: list[dict[str, Any]] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    n_repeated: int = 0


@dataclass
class _Drawn:
    usable: list[TeacherAction] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, sampled: Iterable[TeacherAction]) -> "_Drawn":
        """Sort samples into answers and failures."""
        drawn = cls()
        for sample in sampled:
            if sample.action is None or sample.error_code is not None:
                drawn.errors[sample.error_code or "no_action"] += 1
            else:
                drawn.usable.append(sample)
        return drawn

    def by_sampler(self) -> Iterator[dict[str, Message]]:
        """Yield the actions by state, one draw after the other."""
        draws: dict[str, dict[str, Message]] = {}
        for one in self.usable:
            if one.action is not None:
                draws.setdefault(one.teacher, {})[one.state_id] = one.action
        yield from (draws[name] for name in sorted(draws))


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
    """Compare samples of the trainee with the teachers' consensus.

    A sample that differs becomes the rejected side of a pair, and one that agrees makes a positive.
    Repeated samples count once. Three kinds of samples make no pair, because anybody could tell
    without the prompt which side is better: one of another form, such as a text while the consensus
    is a call; one that can't work at its state, by the rules for chosen sides; and one whose words
    are too often on one side (`balanced`).

    Args:
        states: the sampled states.
        teacher_actions: answers of the teachers, in any order.
        sampled: answers of the model. Several at one state differ in `teacher`.
        agreement_threshold: as for `extract_pairs`.
        known_pairs: `pair_id` of existing pairs.
        known_positives: `state_id` of existing positives.
        options: as for `extract_pairs`.

    Raises:
        ConfigError: as for `extract_pairs`.
    """
    drawn = _Drawn.of(sampled)
    outcomes: Counter[str] = Counter()
    found = _Found(seen={*known_pairs, *known_positives})
    options["include_natural"] = False
    for actions in drawn.by_sampler():
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
    pairs = balanced(found.pairs)
    outcomes["tells_side"] = len(found.pairs) - len(pairs)
    outcomes["pair"] -= outcomes["tells_side"]
    return OnPolicyReport(
        forms={
            "chosen": _count_forms(pair["chosen_action"] for pair in pairs),
            "rejected": _count_forms(pair["rejected_action"] for pair in pairs),
        },
        n_calls=sum(bool((one.action or {}).get("tool_calls")) for one in drawn.usable),
        pairs=pairs,
        positives=found.positives,
        n_states=len(states),
        n_samples=len(drawn.usable) + drawn.errors.total(),
        errors=dict(drawn.errors),
        outcomes={name: n for name, n in outcomes.items() if n},
        n_repeated=found.n_repeated,
    )


def _count_forms(actions: Iterable[Message]) -> dict[str, int]:
    counts = Counter(form for action in actions for form in _forms_of(action))
    return dict(sorted(counts.items()))


def _forms_of(action: Message) -> list[str]:
    calls = action.get("tool_calls") or []
    return [call["function"]["name"] for call in calls] or ["text"]


def _keep(found: _Found, rows: list[Any], row: Any, identity: str) -> None:
    if identity in found.seen:
        found.n_repeated += 1
    else:
        found.seen.add(identity)
        rows.append(row)


MIN_PAIRS = 20
"""Fewer pairs don't show whether their sides can be told apart."""
_LONGER = " longer"
"""Stands among the words of the longer side. No word has a blank."""
_WORD = re.compile(r"[^\W_]+")


def balanced(pairs: Sequence[DPOPair]) -> list[DPOPair]:
    """Return the pairs whose words are on both sides about as often as a coin would put them there.

    If a coin decided for each session which sides are the better ones, the square of how much more
    often a word is on one side would, divided by its variance, be 1 on average. So pairs leave until
    the mean over all words is at most 1: first the one without which it sinks most. A word counts
    once a side. That a side is the longer one counts as a word.

    Args:
        pairs: the pairs. Fewer than 20 are returned as they are.
    """
    if len(pairs) < MIN_PAIRS:
        return list(pairs)
    words = _WordsOfSides(pairs)
    while (telling := words.most_telling()) is not None:
        words.leave_out(telling)
    return [pair for pair, is_kept in zip(pairs, words.kept, strict=True) if is_kept]


class _WordsOfSides:
    """The words of pairs: an entry for each word that only one side of a pair has."""

    def __init__(self, pairs: Sequence[DPOPair]) -> None:
        words, cells = dict[str, int](), dict[tuple[str, int], int]()
        entries: list[tuple[int, int, int, int]] = []
        for place, pair in enumerate(pairs):
            for word, sign in _telling_words(pair["chosen"], pair["rejected"]).items():
                number = words.setdefault(word, len(words))
                key = (str(pair.get("session_id")), number)
                entries.append((place, number, cells.setdefault(key, len(cells)), sign))
        columns = np.array(entries, np.int64).reshape(-1, 4).T
        self._pair, self._word, self._cell, self._sign = columns
        self._word_of_cell = np.array([word for _, word in cells], np.int64)
        self.kept = np.ones(len(pairs), bool)

    def leave_out(self, place: int) -> None:
        self.kept[place] = False
        self._sign = np.where(self._pair == place, 0, self._sign)

    def most_telling(self) -> int | None:
        """Return the pair without which the words tell least, or `None` if they tell no more than chance."""
        in_session = np.bincount(self._cell, self._sign, len(self._word_of_cell))
        total = np.bincount(self._word, self._sign, len(self._word_of_cell))
        variance = np.bincount(self._word_of_cell, np.square(in_session), len(total))
        excess = _excess(total, variance)
        if excess.sum() <= 0:
            return None
        own = in_session[self._cell]
        without = _excess(
            total[self._word] - self._sign,
            variance[self._word] - np.square(own) + np.square(own - self._sign),
        )
        gains = np.bincount(self._pair, excess[self._word] - without, len(self.kept))
        return int(np.argmax(np.where(self.kept, gains.round(9), -np.inf)))


def _excess(total: np.ndarray, variance: np.ndarray) -> np.ndarray:
    """Return how much more a word tells than by chance: 0 for one that tells nothing anywhere."""
    return np.where(variance > 0, np.square(total) / np.maximum(variance, 1) - 1, 0.0)


def _telling_words(chosen: str, rejected: str) -> dict[str, int]:
    """Return the words of one side alone: 1 for the chosen side, -1 for the rejected one."""
    better, worse = set(_WORD.findall(chosen)), set(_WORD.findall(rejected))
    found = {word: 1 if word in better else -1 for word in sorted(better ^ worse)}
    if len(chosen) != len(rejected):
        found[_LONGER] = 1 if len(chosen) > len(rejected) else -1
    return found
