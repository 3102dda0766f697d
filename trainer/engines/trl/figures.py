"""The figures of a run's steps, which are read from the device only for the log."""

from collections import defaultdict
from collections.abc import Mapping, MutableMapping

import torch
from torch import Tensor

CHANNELS = ("policy", "sdpo", "replay")


class Figures:
    """The store that keeps figures on the device until the log needs them.

    Reading them within a step would make the host wait for the device each time. It stores sums and
    counts over all ranks and not means. So a log line is exact for any number of micro-batches and
    steps.
    """

    def __init__(self, *, has_policy: bool) -> None:
        """Start empty; `has_policy`: whether the policy objective has a weight."""
        self._noted: list[tuple[str, str, Tensor, float]] = []
        self._sums: dict[tuple[str, str], Tensor] = {}
        self._n_steps: dict[tuple[str, str], float] = defaultdict(float)
        self._has_policy = has_policy
        self.taid_t: list[float] = []
        """Weight of the teacher in TAID's target, by micro-batch."""
        self.n_live_steps = dict.fromkeys(CHANNELS, 0)
        """Micro-batches in which a channel contributed something, up to the last log."""

    def note(self, mode: str, channel: str, sums: Tensor, *, n_micro: int = 1) -> None:
        """Record the figures of a micro-batch.

        Args:
            mode: `train` or `eval`.
            channel: `policy` (TRL's loss, and whether an advantage was not 0), `sdpo` (divergence
                and tokens), `replay` (weighted losses, weights, hits, margins, and
                pairs), or `drift` (divergence, and 1).
            sums: sums over all ranks. The last is 0 if the channel had no data.
            n_micro: number of micro-batches in the optimizer step.
        """
        self._noted.append((mode, channel, sums, 1 / n_micro))

    def forget(self) -> None:
        """Forget what was noted since the last log: a step was left halfway."""
        self._noted = []

    def read(self) -> None:
        """Add the figures recorded since the last call to the sums."""
        noted, self._noted = self._noted, []
        for mode, channel, sums, share in noted:
            read, key = sums.double().cpu(), (mode, channel)
            self._sums[key] = self._sums.get(key, torch.zeros_like(read)) + read
            self._n_steps[key] += share
            is_weighed = channel != "policy" or self._has_policy
            if mode == "train" and channel in self.n_live_steps:
                self.n_live_steps[channel] += int(float(read[-1]) > 0 and is_weighed)

    def log_into(self, metrics: Mapping[str, MutableMapping[str, list[float]]]) -> None:
        """Move the figures of all steps since the last log into TRL's own lists."""
        self.read()
        if self.taid_t:
            metrics["train"]["sdpo/taid_t"].extend(self.taid_t)
        for (mode, channel), sums in self._sums.items():
            n_steps = self._n_steps[mode, channel]
            for name, value in _figures_of(channel, sums.tolist(), n_steps).items():
                metrics[mode][f"{channel}/{name}"].append(value)
        self._sums, self.taid_t = {}, []
        self._n_steps.clear()


def _figures_of(channel: str, sums: list[float], n_steps: float) -> dict[str, float]:
    if channel == "policy":
        return {"loss": sums[0] / n_steps}  # TRL's own mean over a step's tokens or sequences
    if channel == "drift":
        return {"kl": sums[0] / max(sums[1], 1.0)}
    if channel == "sdpo":
        return {"loss": sums[0] / max(sums[1], 1.0), "n_tokens": sums[1] / n_steps}
    loss, weight, n_hits, margin, n_pairs = sums
    if not n_pairs:
        return {}
    return {
        "loss": loss / weight,
        "accuracy": n_hits / n_pairs,
        "margin": margin / n_pairs,
        "n_pairs": n_pairs / n_steps,
    }
