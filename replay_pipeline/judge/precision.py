"""Estimate how many pairs are right: the claims, corrected by checked pairs.

The method is prediction-powered inference: the mean of all claims plus their mean error at pairs
that were drawn and checked. It is valid for any claims, and good claims make the interval narrow.
See Angelopoulos et al. (2023), "Prediction-powered inference", arXiv:2301.09633. Claims are
weighted as in Angelopoulos, Duchi, and Zrnic (2023), "PPI++", arXiv:2311.01453. Pairs that were
drawn with unequal probabilities are weighted by the inverse (Hajek's estimator).
"""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Z = 1.959964
"""95 % of a normal distribution lies within this many standard deviations."""


def wilson_interval(share: float, n: float) -> tuple[float, float]:
    """Return the 95 % score interval of a share of `n` (Wilson 1927), or [0, 1] if `n` is 0.

    Args:
        share: the share, from 0 to 1.
        n: number of observations. Weights may make it a fraction.
    """
    if not n:
        return 0.0, 1.0
    z2 = Z**2 / n
    middle = (share + z2 / 2) / (1 + z2)
    half = Z * math.sqrt(share * (1 - share) / n + z2 / (4 * n)) / (1 + z2)
    return max(0.0, middle - half), min(1.0, middle + half)


_LEAST_CHANCE = 0.3
"""Of the chance of the most doubtful pair, so much has the surest one to be drawn."""
_MISLED = 0.15
"""How much claims may be off that nobody has checked, besides chance: of forty real agents, none of whose maker's
answers had taught the claims, the worst was .14 (`benchmarks/real_models.py`). Of coding tools nobody has measured it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """Share of pairs whose chosen side is right and whose rejected side is wrong."""

    share: float
    low: float
    high: float
    """Upper end of the 95 % interval. If no pair was checked, it is as far as claims may be off."""
    claimed: float
    """Mean of the claims."""
    n_pairs: int
    n_checked: int
    """Number of pairs that a person has checked."""
    n_proven: int = 0
    """Number of pairs whose chosen side worked when it was tried, and whose rejected side was refused."""

    def words(self) -> str:
        """Return the figure in words."""
        if not self.n_pairs:
            return "no pairs"
        proven = f"; {self.n_proven} proven by execution" if self.n_proven else ""
        if self.n_checked < FEWEST_CHECKED:
            who = (
                f"{self.n_checked} checked, too few"
                if self.n_checked
                else "nobody has checked a pair"
            )
            return (
                f"{100 * self.claimed:.0f} of 100 as claimed ({100 * self.low:.0f} to "
                f"{100 * self.high:.0f} without a check){proven}; {who}"
            )
        return (
            f"{100 * self.share:.0f} of 100 ({100 * self.low:.0f} to {100 * self.high:.0f}), "
            f"{self.n_checked} pairs checked{proven}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionEvidence:
    """The evidence for the share of right pairs: sums of claims, and checks. Polls of batches can be added.

    Pairs that execution has proven, and pairs that only a person's mark keeps, are counted
    separately, because they aren't a sample of the others.
    """

    n_pairs: int = 0
    claimed: float = 0.0
    """Sum of the claims."""
    open: float = 0.0
    """Sum of `p (1 - p)`."""
    checks: tuple[tuple[float, bool, float], ...] = ()
    """For each checked pair its claim, whether it is right, and its chance of being drawn."""
    n_proven: int = 0
    n_accepted: int = 0
    """Number of pairs that exist only because a person found them right."""

    @classmethod
    def of(
        cls,
        claims: Mapping[str, float],
        checked: Mapping[str, bool],
        chances: Mapping[str, float] | None = None,
        *,
        proven: Iterable[str] = (),
        accepted: Iterable[str] = (),
    ) -> "PrecisionEvidence":
        """Make a poll of claims and checks by pair.

        Args:
            claims: `p_better` by pair, including pairs that were found wrong.
            checked: whether a pair was found right. Pairs outside `claims` are ignored.
            chances: probability with which each pair was drawn to be checked. Equal by default.
            proven: pairs that execution has shown to be right. A person's verdict has priority.
            accepted: pairs that exist only because a person found them right.
        """
        apart = claims.keys() & set(proven) - checked.keys()
        sure = claims.keys() & set(accepted)
        rest = {key: p for key, p in claims.items() if key not in apart | sure}
        return cls(
            n_pairs=len(rest),
            claimed=math.fsum(rest.values()),
            open=math.fsum(p * (1 - p) for p in rest.values()),
            checks=tuple(
                (p, checked[key], (chances or {}).get(key, 1.0))
                for key, p in rest.items()
                if key in checked
            ),
            n_proven=len(apart),
            n_accepted=len(sure),
        )

    @classmethod
    def pooled(cls, reports: Iterable[Mapping[str, Any]]) -> "PrecisionEvidence":
        """Add up polls in the form of `to_json`."""
        found = list(reports)
        return cls(
            n_pairs=sum(each["n_pairs"] for each in found),
            claimed=math.fsum(each["claimed"] for each in found),
            open=math.fsum(each["open"] for each in found),
            checks=tuple((p, bool(y), w) for each in found for p, y, w in each["checks"]),
            n_proven=sum(each.get("n_proven", 0) for each in found),
            n_accepted=sum(each.get("n_accepted", 0) for each in found),
        )

    def to_json(self) -> dict[str, Any]:
        """Return it as plain numbers."""
        return {
            "n_pairs": self.n_pairs,
            "claimed": round(self.claimed, 6),
            "open": round(self.open, 6),
            "checks": [[round(p, 6), y, round(chance, 6)] for p, y, chance in self.checks],
            "n_proven": self.n_proven,
            "n_accepted": self.n_accepted,
        }

    def precision(self) -> Precision:
        """Return the share of right pairs, and an interval for it.

        Pairs that were found wrong are removed, so this is the share among the others.
        """
        mean = self.claimed / self.n_pairs if self.n_pairs else 0.0
        n_wrong = sum(not is_right for _, is_right, _ in self.checks)
        if len(self.checks) < FEWEST_CHECKED:
            half = Z * math.sqrt(self.open) / max(1, self.n_pairs)
            share = mean
            low = max(0.0, mean - half - _MISLED)
            high = min(1.0, mean + half + _MISLED) if self.n_pairs else 0.0
            grown = 1.0
        else:
            weights = [1.0 / chance for _, _, chance in self.checks]
            truths = [float(is_right) for _, is_right, _ in self.checks]
            said = [p for p, _, _ in self.checks]
            trust = _trust(truths, said, weights)
            errors = [y - trust * p for y, p in zip(truths, said, strict=True)]
            share = min(1.0, max(0.0, trust * mean + _mean(errors, weights)))
            low, high = _interval(share, errors, weights, self.n_pairs)
            # Those found wrong are gone, so that as many right ones are a greater share of the rest.
            grown = self.n_pairs / max(1, self.n_pairs - n_wrong)
        n_left = self.n_pairs - n_wrong
        n_known = self.n_proven + self.n_accepted
        n = n_left + n_known

        def of_all(part: float) -> float:
            return (min(1.0, part) * n_left + n_known) / n if n else 0.0

        return Precision(
            share=of_all(share * grown),
            low=of_all(low * grown),
            high=of_all(high * grown),
            claimed=of_all(mean),
            n_pairs=n,
            n_checked=len(self.checks) + self.n_accepted,
            n_proven=self.n_proven,
        )


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    return math.fsum(w * v for w, v in zip(weights, values, strict=True)) / math.fsum(weights)


def _trust(truths: Sequence[float], said: Sequence[float], weights: Sequence[float]) -> float:
    """Return how much of the claims to use: the slope of what is true on what is claimed, 0 to 1.

    It is drawn towards 1 as if twenty more pairs had been found as claimed: few checked pairs tell
    little of a slope.
    """
    total = math.fsum(weights)
    scaled = [w * len(weights) / total for w in weights]
    y, p = _mean(truths, weights), _mean(said, weights)
    both = math.fsum(w * (a - y) * (b - p) for w, a, b in zip(scaled, truths, said, strict=True))
    own = math.fsum(w * (b - p) ** 2 for w, b in zip(scaled, said, strict=True))
    extra = 20 * 0.01
    return min(1.0, max(0.0, (both + extra) / (own + extra)))


def _interval(
    share: float, errors: Sequence[float], weights: Sequence[float], n_pairs: int
) -> tuple[float, float]:
    """Return Wilson's score interval for as many checked pairs as the weights leave (Wilson 1927).

    Claims that err more than a poll's answers would widen it; those that err less do not narrow it, so
    that it holds where all checked pairs were right. Pairs that were checked are no longer open.
    """
    total, n = math.fsum(weights), len(weights)
    error = _mean(errors, weights)
    spread = math.fsum((w * (e - error)) ** 2 for w, e in zip(weights, errors, strict=True))
    variance = spread / total**2 * n / max(1, n - 1)
    n_effective = total**2 / math.fsum(w * w for w in weights)
    if variance > 0 and 0 < share < 1:
        n_effective = min(n_effective, share * (1 - share) / variance)
    if n >= n_pairs:
        return share, share
    n_effective = max(2.0, n_effective) / (1 - n / n_pairs)
    low, top = wilson_interval(share, n_effective)
    high = 1.0 if share > 1 - 1 / (2 * n) else top
    return min(low, share), max(high, share)


def draw(claims: Mapping[str, float], n: int) -> dict[str, float]:
    """Draw the `n` pairs that tell most about the precision, and return each with its probability.

    The chance grows with the standard deviation of the claim, `sqrt(p (1 - p))` (Neyman's
    allocation). Every pair has some chance, since claims may be wrong. A hash of the pair decides,
    so that the draw is repeatable.
    """
    if n >= len(claims):
        return dict.fromkeys(sorted(claims), 1.0)
    chances = _chances({pair_id: _size(p) for pair_id, p in claims.items()}, n)
    # Sampford-like order sampling: ranks u / chance, of which the smallest n are taken
    # (Rosen 1997, "On sampling with probability proportional to size").
    order = sorted(claims, key=lambda pair_id: (_rank(pair_id, chances[pair_id]), pair_id))
    return {pair_id: chances[pair_id] for pair_id in order[:n]}


def draw_next(claims: Mapping[str, float], n: int, before: Mapping[str, float]) -> dict[str, float]:
    """Return `n` more pairs to check and all checked ones, with chances that are valid for all of them.

    A pair's chance is that of being drawn in any round so far. A round that didn't draw the pair is
    assumed to have had the same chance for it, scaled by how many pairs it drew of how many.

    Args:
        claims: `p_better` of the pairs that nobody has checked.
        n: number of pairs to draw.
        before: the chances of the checked pairs.
    """
    drawn = draw(claims, n)
    if not before or not drawn:
        return {**before, **drawn}
    ratio = len(before) / len(drawn) * len(claims) / (len(claims) + len(before))
    return {
        **{key: _either(chance, chance / ratio) for key, chance in before.items()},
        **{key: _either(chance, chance * ratio) for key, chance in drawn.items()},
    }


def _either(one: float, other: float) -> float:
    return 1 - (1 - one) * (1 - min(1.0, other))


def _size(p: float) -> float:
    return _LEAST_CHANCE * 0.5 + (1 - _LEAST_CHANCE) * math.sqrt(max(0.0, p * (1 - p)))


def _chances(sizes: Mapping[str, float], n: int) -> dict[str, float]:
    """Return chances in proportion to sizes that add up to `n`, none above 1."""
    sure: set[str] = set()
    while True:
        rest = math.fsum(size for key, size in sizes.items() if key not in sure)
        scale = (n - len(sure)) / rest if rest else 0.0
        more = {key for key, size in sizes.items() if key not in sure and size * scale >= 1}
        if not more:
            return {key: 1.0 if key in sure else sizes[key] * scale for key in sizes}
        sure |= more


def _rank(pair_id: str, chance: float) -> float:
    digest = hashlib.blake2b(f"check\0{pair_id}".encode(), digest_size=8).digest()
    u = (int.from_bytes(digest, "big") + 0.5) / 2**64
    return u * (1 - chance) / (chance * (1 - u)) if chance < 1 else 0.0


FEWEST_CHECKED = 5
"""The fewest checked pairs that correct the claims."""
_SHIFT_SD, _SLOPE_SD = 1.5, 0.5
"""Prior standard deviations of the two numbers around 0 and 1."""
_SUREST = 1e-4
_N_STEPS = 25


@dataclass(frozen=True, slots=True)
class Calibration:
    """A correction of claims by checked pairs."""

    shift: float = 0.0
    slope: float = 1.0
    n_checked: int = 0
    """Number of checked pairs behind it."""

    def of(self, p: float) -> float:
        """Return the calibrated probability for a claim of `p`."""
        if not self.n_checked:
            return p
        return _expit(self.shift + self.slope * _logit(p))


def calibrated(checks: Sequence[tuple[float, bool, float]]) -> Calibration:
    """Return the most likely calibration, or none if too few pairs were checked.

    The log-odds of a claim are shifted and scaled to predict the checks best: Platt (1999),
    "Probabilistic outputs for support vector machines". Priors keep the claims unchanged if few
    pairs were checked. A pair that was more likely to be drawn counts less.

    Args:
        checks: for each checked pair its claim, whether it is right, and its chance of being drawn.
    """
    if len(checks) < FEWEST_CHECKED:
        return Calibration()
    weights = [1 / chance for _, _, chance in checks]
    # As many as would tell as much if all had been drawn with one chance (Kish 1965).
    kish = sum(weights) / sum(weight**2 for weight in weights)
    logits = [_logit(claim) for claim, _, _ in checks]
    shift, slope = 0.0, 1.0
    for _ in range(_N_STEPS):  # Newton's method
        up_shift, up_slope = -shift / _SHIFT_SD**2, (1 - slope) / _SLOPE_SD**2
        shift_shift, shift_slope, slope_slope = _SHIFT_SD**-2, 0.0, _SLOPE_SD**-2
        for x, (_, is_right, _), weight in zip(logits, checks, weights, strict=True):
            said = _expit(shift + slope * x)
            missed, curve = kish * weight * (is_right - said), kish * weight * said * (1 - said)
            up_shift += missed
            up_slope += missed * x
            shift_shift += curve
            shift_slope += curve * x
            slope_slope += curve * x * x
        area = shift_shift * slope_slope - shift_slope**2
        steps = (
            (slope_slope * up_shift - shift_slope * up_slope) / area,
            (shift_shift * up_slope - shift_slope * up_shift) / area,
        )
        shift += min(1.0, max(-1.0, steps[0]))
        slope += min(1.0, max(-1.0, steps[1]))
        if max(map(abs, steps)) < 1e-9:
            break
    # A surer claim is never worth less.
    return Calibration(shift, max(0.0, slope), len(checks))


def _logit(p: float) -> float:
    kept = min(1 - _SUREST, max(_SUREST, p))
    return math.log(kept / (1 - kept))


def _expit(x: float) -> float:
    return 1 / (1 + math.exp(-x))
