"""Run both sides of pairs through a model: as prefix trees if that is exact, else padded."""

import contextlib
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainer.errors import TrainerConfigError
from trainer.losses.compose import PairLogps
from trainer.model.packing import enable_tree_attention, packed_pair_logps
from trainer.model.scoring import chunked_pair_logps

logger = logging.getLogger(__name__)

Autocast = Callable[[], AbstractContextManager[object]]
"""A function that makes the autocast context of the policy."""


@dataclass(frozen=True, kw_only=True)
class PairForward:
    """The choice for one model. A call returns the log-probs of both sides, without gradient."""

    choice: str
    """`packed`, or `padded` with the reason."""
    max_tokens: int
    """Packed tokens per pass."""
    autocast: Autocast = contextlib.nullcontext
    """Autocast context of the policy. Values that are compared must be computed in the same way."""

    @property
    def batch_size(self) -> int:
        """Return a good number of pairs per call. Trees are divided by tokens, padded batches aren't."""
        return 64 if self.choice == "packed" else 4

    @torch.no_grad()
    def __call__(self, model: nn.Module, batch: Mapping[str, Tensor]) -> PairLogps:
        """Sum log-probs of chosen and rejected sides, with their tokens, each [B]."""
        with self.autocast():
            if self.choice == "packed":
                return packed_pair_logps(model, batch, max_tokens=self.max_tokens)
            return chunked_pair_logps(model, batch)


def choose_pair_forward(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    *,
    setting: str,
    max_tokens: int,
    autocast: Autocast = contextlib.nullcontext,
) -> PairForward:
    """Choose packing if the model's attention supports trees and passes a test.

    Raises:
        TrainerConfigError: `setting` is `packed`, but the model doesn't support it.
    """
    if setting == "padded":
        return PairForward(choice="padded: as set", max_tokens=max_tokens, autocast=autocast)
    choice = "packed"
    try:
        enable_tree_attention(model)
        _check_packed_equals_padded(model, batch, autocast)
    except Exception as error:
        # A kernel that this device cannot compile or launch: torch wraps most of Triton's errors, and
        # lets those of a launch through (shared memory that does not suffice).
        is_of_kernel = type(error).__module__.startswith("triton")
        if not isinstance(error, TrainerConfigError | RuntimeError) and not is_of_kernel:
            raise
        if setting == "packed":
            raise TrainerConfigError(f"pair_forward=packed: {error}") from error
        logger.warning("pairs run one at a time: %s", error)
        choice = f"padded: {error}"
    return PairForward(choice=choice, max_tokens=max_tokens, autocast=autocast)


def _check_packed_equals_padded(
    model: nn.Module, batch: Mapping[str, Tensor], autocast: Autocast
) -> None:
    """Run real pairs both ways on the real model, since no list of architectures is complete.

    On CUDA back as well, since the kernels of both ways are compiled there.

    Raises:
        TrainerConfigError: the log-probabilities per token differ.
        RuntimeError: a kernel cannot be compiled or launched.
    """
    was_training = model.training
    model.eval()
    first = next(model.parameters())
    has_kernels = first.device.type == "cuda"
    with torch.set_grad_enabled(has_kernels), autocast():
        is_wide = first.dtype.itemsize >= 4 and not torch.is_autocast_enabled(first.device.type)
        sides = [
            torch.cat([summed / n_tokens for summed, n_tokens in logps(model, batch)]).float()
            for logps in (packed_pair_logps, chunked_pair_logps)
        ]
    trained = [one for one in model.parameters() if one.requires_grad]
    if has_kernels and trained:
        torch.autograd.grad(sides[0].sum(), trained, allow_unused=True)
    model.train(was_training)
    difference = float((sides[0] - sides[1]).detach().abs().max())
    if not difference <= (1e-3 if is_wide else 0.1):
        raise TrainerConfigError(
            f"packed pairs differ from single ones by {difference:.2g} nats a token on "
            f"{type(model).__name__}"
        )


def longest_of(batch: Mapping[str, Tensor]) -> int:
    """Count the tokens of the longest sequence of a batch of pairs."""
    sides = ("dpo_chosen_attention_mask", "dpo_rejected_attention_mask")
    return max(int(batch[name].sum(-1).max()) for name in sides)
