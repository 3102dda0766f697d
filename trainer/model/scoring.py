"""Compute log-probabilities of responses with a Hugging Face causal LM, without the logits of a batch.

The states that predict a response are selected first, and then projected one chunk at a time. The
results equal `trainer.losses.compose.pair_logps`, with smaller tensors. `choose_pair_forward` runs
both sides of pairs as prefix trees if that is exact, else padded.

Dimensions in names: `B` sequences, `T` tokens, `H` hidden, `V` vocabulary, `N` response tokens.
"""

import contextlib
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from trainer.errors import TrainerConfigError
from trainer.losses.compose import Batch, PairLogps
from trainer.losses.compose import pair_logps as plain_pair_logps
from trainer.model.causal_lm import causal_lm_of, head_logps, logit_rule
from trainer.model.packing import enable_tree_attention, packed_pair_logps

logger = logging.getLogger(__name__)

Autocast = Callable[[], AbstractContextManager[object]]
"""A function that makes the autocast context of the policy."""


def project(model: Any, hidden: Tensor) -> Tensor:
    """Project hidden states to logits, with the model's own scaling and soft cap."""
    scale, softcap = logit_rule(model)
    logits = model.get_output_embeddings()(hidden) * scale
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def response_states(model: nn.Module, ids_BT: Tensor, mask_BT: Tensor | None) -> Tensor:
    """Compute the last hidden state of every token, [B, T, H]. Without a mask, it attends to everything."""
    if mask_BT is None:
        mask_BT = torch.ones_like(ids_BT)
    body = causal_lm_of(model).base_model
    return body(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False).last_hidden_state


def chunked_response_logps(
    model: nn.Module,
    ids_BT: Tensor,
    attention_mask_BT: Tensor | None,
    response_mask_BT: Tensor,
    *,
    temperature: float = 1.0,
) -> Tensor:
    """Compute the log-probability of every response token, [N], row after row."""
    hidden_BTH = response_states(model, ids_BT, attention_mask_BT)
    rows_N, predictors_N = _asked(response_mask_BT, hidden_BTH.device)
    hidden_NH, ids_N = hidden_BTH[rows_N, predictors_N], ids_BT[rows_N, predictors_N + 1]
    return head_logps(model, hidden_NH, ids_N, temperature=temperature)[0]


def chunked_pair_logps(model: nn.Module, batch: Batch) -> PairLogps:
    """Return the summed log-probs and token counts of chosen and rejected sides, each [B], with one pass per side."""
    if isinstance(model, FSDPModule):  # only its own forward call gathers the head
        return plain_pair_logps(model, batch)
    sides = []
    for side in ("chosen", "rejected"):
        ids_BT, mask_BT = batch[f"dpo_{side}_input_ids"], batch[f"dpo_{side}_response_mask"]
        logps_N = chunked_response_logps(
            model, ids_BT, batch.get(f"dpo_{side}_attention_mask"), mask_BT
        )
        sides.append(summed_by_row(logps_N, mask_BT))
    return sides[0], sides[1]


def summed_by_row(logps_N: Tensor, response_mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's sum of response log-probabilities [B], and its number of response tokens [B]."""
    rows_N, _ = _asked(response_mask_BT, logps_N.device)
    sums_B = logps_N.new_zeros(len(response_mask_BT)).index_add(0, rows_N, logps_N)
    n_asked_B = (response_mask_BT[:, 1:] != 0).sum(-1)
    return sums_B, n_asked_B.to(logps_N.device, logps_N.dtype, non_blocking=True)


def _asked(response_mask_BT: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Find rows and predictors of the tokens that are asked for, counted where the mask lies."""
    places = (response_mask_BT[:, 1:] != 0).nonzero(as_tuple=True)
    rows_N, predictors_N = (one.to(device, non_blocking=True) for one in places)
    return rows_N, predictors_N


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
