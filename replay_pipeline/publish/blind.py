"""The prompt-blind control: how often the chosen side can be guessed without the prompt.

A pair teaches something about a state only if the prompt decides which side is better. So a small
classifier sees only the two sides, and predicts for sessions that it was not fitted on. Chance is
right half the time. Anything above that can be learned without reading a prompt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from replay_pipeline.storage.arrays import Numpy

if TYPE_CHECKING:
    import numpy as np

    Features = tuple[np.ndarray, np.ndarray]  # indexes of weights, and the value of each feature
else:
    np = Numpy()

WARN_ABOVE = 0.65
"""Above this accuracy, the pairs are mostly about how the sides look."""
_MIN_PAIRS, _MAX_PAIRS = 20, 1_000
_MAX_FOLDS = 5
_MAX_CHARS = 2_000
_GRAM_CHARS = (1, 2, 3, 4)
_HASH_BITS = 18
_MULTIPLIER = 0x9E3779B97F4A7C15
_N_STEPS, _RATE, _RIDGE = 80, 4.0, 1e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class BlindControl:
    """Accuracies at guessing the chosen side, from 0 to 1, cross-validated by session."""

    n_pairs: int
    """Number of measured pairs."""
    n_sessions: int
    ngrams: float
    """Accuracy from the character n-grams of both sides."""
    length: float
    """Accuracy from the lengths of both sides."""
    tools: float
    """Accuracy from the names of the tools that both sides call."""

    def to_json(self) -> dict[str, Any]:
        """Return the control as plain numbers."""
        return asdict(self)


def blind_control(
    chosen: Sequence[str], rejected: Sequence[str], sessions: Sequence[str]
) -> BlindControl | None:
    """Measure how well the chosen side can be guessed without the prompt.

    It uses logistic regression on the difference of the two sides' features, fitted by gradient
    descent. No session is in both the fitted and the predicted part. From more than 1,000 pairs,
    1,000 are drawn by hash, so that equal pairs give equal figures.

    Returns:
        The accuracies, or None for fewer than 20 pairs or a single session, which tell nothing.
    """
    rows = sorted(zip(chosen, rejected, sessions, strict=True), key=_hash_of)[:_MAX_PAIRS]
    folds = _folds([session for _, _, session in rows])
    if len(rows) < _MIN_PAIRS or len(set(folds)) < 2:
        return None

    def accuracy(features: Callable[[str], Features]) -> float:
        differences = [_difference(features(one), features(other)) for one, other, _ in rows]
        return round(_accuracy(differences, folds), 4)

    return BlindControl(
        n_pairs=len(rows),
        n_sessions=len({session for _, _, session in rows}),
        ngrams=accuracy(_ngrams),
        length=accuracy(_length),
        tools=accuracy(_tools),
    )


def in_words(control: Mapping[str, Any] | None) -> str:
    """Return one plain sentence on a control's result, in the form of `to_json`."""
    if not control:
        return "Too few pairs or sessions to tell whether the chosen side shows without the prompt."
    measured = (
        f"Without the prompt, the chosen side is told in {100 * control['ngrams']:.1f} % of the "
        f"pairs by its wording, in {100 * control['length']:.1f} % by its length and in "
        f"{100 * control['tools']:.1f} % by its tools (a coin: 50 %)"
    )
    if max(control["ngrams"], control["length"], control["tools"]) > WARN_ABOVE:
        return f"{measured}: a model can learn these preferences without reading the prompt."
    return f"{measured}: mostly it takes the prompt to tell."


def _hash_of(row: tuple[str, str, str]) -> bytes:
    return hashlib.blake2b(repr(row).encode("utf-8", "replace"), digest_size=8).digest()


def _folds(sessions: Sequence[str]) -> np.ndarray:
    """Return the fold of each pair: whole sessions, the largest first, each to the smallest fold."""
    sizes: dict[str, int] = {}
    for session in sessions:
        sizes[session] = sizes.get(session, 0) + 1
    n_in = [0] * min(_MAX_FOLDS, len(sizes))
    fold_of: dict[str, int] = {}
    for session in sorted(sizes, key=lambda one: (-sizes[one], one)):
        fold_of[session] = n_in.index(min(n_in))
        n_in[fold_of[session]] += sizes[session]
    return np.array([fold_of[session] for session in sessions])


def _ngrams(message: str) -> Features:
    codes = np.frombuffer(_shortened(message).encode("utf-32-le", "replace"), np.uint32)
    hashes = np.zeros(0, np.uint64)
    for n in _GRAM_CHARS:
        rolling = np.full(max(len(codes) - n + 1, 0), n, np.uint64)
        for shift in range(n):
            rolling = rolling * _MULTIPLIER + codes[shift : shift + len(rolling)]
        hashes = np.concatenate(
            [hashes, rolling * np.uint64(_MULTIPLIER) >> np.uint64(64 - _HASH_BITS)]
        )
    places, counts = np.unique(hashes.astype(np.int64), return_counts=True)
    return places, np.log1p(counts) / max(np.sqrt(np.square(np.log1p(counts)).sum()), 1e-9)


def _shortened(message: str) -> str:
    half = _MAX_CHARS // 2
    return message if len(message) <= _MAX_CHARS else message[:half] + message[-half:]


def _length(message: str) -> Features:
    return np.zeros(1, np.int64), np.log1p([float(len(message))])


def _tools(message: str) -> Features:
    calls = msgspec.json.decode(message).get("tool_calls") or [{}]
    names = [str((call.get("function") or {}).get("name")).encode() for call in calls]
    digests = [hashlib.blake2b(name, digest_size=2).digest() for name in names]
    return np.array([int.from_bytes(d, "big") for d in digests]), np.ones(len(digests))


def _difference(one: Features, other: Features) -> Features:
    places, inverse = np.unique(np.concatenate([one[0], other[0]]), return_inverse=True)
    return places, np.bincount(inverse, np.concatenate([one[1], -other[1]]), len(places))


def _accuracy(differences: Sequence[Features], folds: np.ndarray) -> float:
    """Share of the held-out pairs whose chosen side scores higher; a tie is half a hit."""
    rows = np.repeat(np.arange(len(differences)), [len(places) for places, _ in differences])
    values = np.concatenate([values for _, values in differences])
    _, places = np.unique(np.concatenate([one for one, _ in differences]), return_inverse=True)
    scores = np.zeros(len(differences))
    for fold in np.unique(folds):
        is_fitted = (folds != fold)[rows]
        weights = _fitted(places, values * is_fitted, rows, n_fitted=int((folds != fold).sum()))
        asked = np.bincount(rows, weights[places] * values, len(differences))
        scores[folds == fold] = asked[folds == fold]
    return float(np.mean(np.where(np.abs(scores) < 1e-12, 0.5, scores > 0)))


def _fitted(
    places: np.ndarray, values: np.ndarray, rows: np.ndarray, *, n_fitted: int
) -> np.ndarray:
    """Return weights of a logistic regression that puts the chosen side first, with a small ridge."""
    weights = ahead = np.zeros(places.max() + 1)
    for step in range(_N_STEPS):
        scores = np.bincount(rows, ahead[places] * values)
        slopes = 1 / (1 + np.exp(np.clip(scores, -30, 30))) / n_fitted
        gradient = np.bincount(places, values * slopes[rows], len(weights)) - _RIDGE * ahead
        before, weights = weights, ahead + _RATE * gradient
        ahead = weights + step / (step + 3) * (weights - before)  # Nesterov's acceleration
    return weights
