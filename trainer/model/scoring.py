"""Compute log-probabilities of responses with a Hugging Face causal LM, without the logits of a batch.

The states that predict a response are selected first, and then projected one chunk at a time. The
results equal `trainer.losses.compose.pair_logps`, with smaller tensors.

Dimensions in names: `B` sequences, `T` tokens, `H` hidden, `V` vocabulary, `N` response tokens.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from trainer.losses.compose import Batch, PairLogps
from trainer.losses.compose import pair_logps as plain_pair_logps
from trainer.model.causal_lm import causal_lm_of, head_logps, logit_rule


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
