"""The policy's forward pass with channel 2 in it: one backbone pass, one head, one teacher pass.

Dimensions in names: `B` sequences, `P` prompt tokens (left-padded), `C` completion tokens
(right-padded), `H` hidden, `V` vocabulary, `N` hinted response tokens.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainer.integrations.causal_lm import completion_outputs, model_head_outputs
from trainer.integrations.kv_reuse import (
    hinted_batch,
    student_hidden,
    teacher_hidden_with_prefix_reuse,
)
from trainer.integrations.scoring import project
from trainer.losses.channels import SDPOOptions, distillation_per_token
from trainer.losses.divergence import log_probs

TeacherWeights = Callable[[nn.Module], AbstractContextManager[nn.Module]]


@dataclass(frozen=True, kw_only=True)
class HintedInputs:
    """The student's batch, and the same completions behind hinted prompts."""

    prompt_ids: Tensor
    prompt_mask: Tensor
    teacher_prompt_ids: Tensor
    teacher_prompt_mask: Tensor
    completion_ids: Tensor
    completion_mask: Tensor
    mask: Tensor
    """True at the response tokens of rows with a hint, [B, C]."""


@dataclass(frozen=True, kw_only=True)
class PolicyOutput:
    """What the policy loss and channel 2 need."""

    logps_BC: Tensor
    entropy_BC: Tensor
    sdpo_sum: Tensor
    """Divergence summed over the hinted tokens; 0 with a graph when there is none."""


def policy_and_distillation(
    model: nn.Module,
    teacher_weights: TeacherWeights,
    inputs: HintedInputs,
    options: SDPOOptions,
    *,
    is_fused: bool,
    reuses_prefix: bool,
    pad_token_id: int,
) -> PolicyOutput:
    """Compute log-probs and entropies of completions, and channel 2 at the hinted tokens.

    `is_fused` never makes the logits of the batch. `reuses_prefix` lets a live teacher go on from
    the student's key-value cache; it needs a teacher with the student's weights.
    """
    states = _states_reusing_prefix if reuses_prefix else _states
    student_BCH, teacher_NH, teacher = states(model, teacher_weights, inputs, pad_token_id)
    ids_BC, mask_BC = inputs.completion_ids, inputs.mask
    if is_fused:
        outputs = completion_outputs(
            model,
            student_BCH,
            ids_BC,
            hinted_B_C=mask_BC,
            teacher=teacher,
            teacher_hidden_N_H=teacher_NH,
            beta=options.jsd_beta,
            temperature=options.temperature,
        )
        return PolicyOutput(
            logps_BC=outputs.logps_B_C,
            entropy_BC=outputs.entropy_B_C,
            sdpo_sum=outputs.divergence_N.sum() + 0.0 * outputs.logps_B_C.sum(),
        )
    student_BCV = project(model, student_BCH)
    with torch.no_grad():
        teacher_NV = project(teacher, teacher_NH)
    per_token_N = distillation_per_token(student_BCV[mask_BC], teacher_NV, ids_BC[mask_BC], options)
    logp_BCV = log_probs(student_BCV, options.temperature)
    return PolicyOutput(
        logps_BC=logp_BCV.gather(-1, ids_BC.unsqueeze(-1)).squeeze(-1),
        entropy_BC=-(logp_BCV.exp() * logp_BCV).sum(-1),
        sdpo_sum=per_token_N.sum(),
    )


def policy_alone(
    model: nn.Module, ids_BT: Tensor, mask_BT: Tensor, n_last: int, *, temperature: float
) -> tuple[Tensor, Tensor]:
    """Compute log-probs and entropies of the last `n_last` tokens, [B, n_last], with a fused head."""
    hidden_BCH = hidden_states(model, ids_BT, mask_BT, n_last)
    ids_BC = ids_BT[:, -n_last:]
    outputs = model_head_outputs(
        model, hidden_BCH.flatten(0, 1), ids_BC.flatten(), temperature=temperature
    )
    return outputs.logps_N.view(ids_BC.shape), outputs.entropy_N.view(ids_BC.shape)


def _states(
    model: nn.Module, teacher_weights: TeacherWeights, inputs: HintedInputs, _pad_token_id: int
) -> tuple[Tensor, Tensor, nn.Module]:
    n = inputs.completion_ids.size(1)

    def hidden(network: nn.Module, prompt_ids: Tensor, prompt_mask: Tensor) -> Tensor:
        return hidden_states(
            network,
            torch.cat([prompt_ids, inputs.completion_ids], dim=1),
            torch.cat([prompt_mask, inputs.completion_mask], dim=1),
            n,
        )

    student_BCH = hidden(model, inputs.prompt_ids, inputs.prompt_mask)
    with torch.no_grad(), teacher_weights(model) as teacher:
        teacher_BCH = hidden(teacher, inputs.teacher_prompt_ids, inputs.teacher_prompt_mask)
    return student_BCH, teacher_BCH[inputs.mask], teacher


def _states_reusing_prefix(
    model: nn.Module, teacher_weights: TeacherWeights, inputs: HintedInputs, pad_token_id: int
) -> tuple[Tensor, Tensor, nn.Module]:
    hinted_prompts = [
        ids[mask.bool()].tolist()
        for ids, mask in zip(inputs.teacher_prompt_ids, inputs.teacher_prompt_mask, strict=True)
    ]
    batch = hinted_batch(
        inputs.prompt_ids,
        hinted_prompts,
        inputs.completion_ids,
        prompt_mask_B_P=inputs.prompt_mask.bool(),
        pad_token_id=pad_token_id,
    )
    states = student_hidden(
        model,
        inputs.prompt_ids,
        inputs.completion_ids,
        prompt_mask_B_P=inputs.prompt_mask.bool(),
        pad_token_id=pad_token_id,
        n_tokens=batch.n_tokens,
    )
    with teacher_weights(model) as teacher:
        teacher_BCH = teacher_hidden_with_prefix_reuse(teacher, batch, states.cache)
    return states.hidden_B_C_H, teacher_BCH[inputs.mask], teacher


def hidden_states(model: Any, input_ids: Tensor, attention_mask: Tensor, n_last: int) -> Tensor:
    """Compute the last hidden states that predict the last `n_last` tokens, [B, n_last, H]."""
    causal = model.get_base_model() if hasattr(model, "peft_config") else model
    output = causal.base_model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
    return output.last_hidden_state[:, -n_last - 1 : -1]
