"""What the steps of a run say of themselves, read from the device only when it is logged."""

from collections.abc import Mapping, MutableMapping

from torch import Tensor

__all__ = ["Figures"]


class Figures:
    """Keeps the figures of steps where they are until somebody asks.

    Within a step the host would wait for the device at each of them.
    """

    def __init__(self, *, has_policy: bool) -> None:
        """Start empty; `has_policy`: whether the policy objective has a weight."""
        self._noted: list[tuple[str, str, Tensor]] = []
        self._has_policy = has_policy
        self.taid_t: list[float] = []
        """Weight of the teacher in TAID's target, by micro-batch."""
        self.n_live_steps = {"policy": 0, "sdpo": 0, "replay": 0}
        """Micro-batches in which a channel contributed something, up to the last log."""

    def note(self, mode: str, channel: str, figures: Tensor) -> None:
        """Keep what a micro-batch gave: sums of figures, with the count of what they are sums of."""
        self._noted.append((mode, channel, figures))

    def settle(self, metrics: Mapping[str, MutableMapping[str, list[float]]]) -> None:
        """Read what was noted since the last time, into TRL's own lists."""
        if self.taid_t:
            metrics["train"]["sdpo/taid_t"].extend(self.taid_t)
        noted, self._noted, self.taid_t = self._noted, [], []
        for mode, channel, figures in noted:
            self._settle_one(metrics[mode], mode, channel, figures.tolist())

    def _settle_one(
        self, metrics: MutableMapping[str, list[float]], mode: str, channel: str, read: list[float]
    ) -> None:
        loss, *others = read
        n_counted = others[-1]
        if channel == "drift":
            metrics["drift/kl"].append(loss)
            return
        if mode == "train":
            is_weighed = channel != "policy" or self._has_policy
            self.n_live_steps[channel] += int(n_counted > 0 and is_weighed)
        if channel == "policy":
            metrics["policy/loss"].append(loss)
        elif channel == "sdpo":
            metrics["sdpo/loss"].append(loss / max(n_counted, 1.0))
            metrics["sdpo/n_tokens"].append(n_counted)
        elif n_counted:
            metrics["replay/loss"].append(loss / n_counted)
            metrics["replay/accuracy"].append(others[0] / n_counted)
            metrics["replay/margin"].append(others[1] / n_counted)
            metrics["replay/n_pairs"].append(n_counted)
