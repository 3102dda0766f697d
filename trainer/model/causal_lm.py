"""The properties of a Hugging Face causal LM that the exact speed-ups need."""

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedModel

from trainer.errors import TrainerConfigError
from trainer.model.head import HeadOutput, head_outputs

__all__ = [
    "CompletionOutput",
    "cache_obstacle",
    "causal_lm_of",
    "completion_outputs",
    "has_plain_head",
    "length_dependent_positions",
    "lm_head_of",
    "logit_rule",
    "model_head_outputs",
]


class CompletionOutput(NamedTuple):
    """Differentiable per-token outputs of a padded batch of completions."""

    logps_B_C: Tensor
    entropy_B_C: Tensor
    divergence_N: Tensor
    """Divergence from the teacher at the hinted tokens, in row order."""


def causal_lm_of(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model inside `model`: itself, or the one that PEFT wraps.

    Raises:
        TrainerConfigError: there is no such model.
    """
    unwrap = getattr(model, "get_base_model", None)
    bare = unwrap() if callable(unwrap) else model
    if not isinstance(bare, PreTrainedModel):
        raise TrainerConfigError(
            f"{type(model).__name__} is not a transformers causal LM; unwrap it first "
            "(accelerator.unwrap_model) and call inside the wrapper's forward"
        )
    return bare


def length_dependent_positions(model: nn.Module) -> str | None:
    """Return how a token's rotary position depends on the length of the call, or None if it doesn't.

    Packed trees and shared caches run tokens in calls of other lengths than their own sequence.
    Dynamic NTK and LongRoPE then silently use other rotation angles. We measured a gradient that
    was more than half wrong.
    """
    config = causal_lm_of(model).config.get_text_config()
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    parameters = parameters or {}
    kinds = {
        str(entry.get("rope_type", entry.get("type", "default")))
        for entry in [parameters, *parameters.values()]
        if isinstance(entry, Mapping)
    }
    if found := sorted(kinds & {"dynamic", "longrope"}):
        return f"scales its rotary positions by the length of a call ({found[0]})"
    return None


def cache_obstacle(model: nn.Module) -> str | None:
    """Return why a teacher can't continue from the student's key-value cache, or None if it can."""
    config = causal_lm_of(model).config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds or (not hasattr(config, "layer_types") and getattr(config, "sliding_window", None)):
        return f"keeps only a part of the past in some layers ({', '.join(sorted(kinds))})"
    return length_dependent_positions(model)


def lm_head_of(model: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Return the weight and bias of a model's language-model head.

    Raises:
        TrainerConfigError: the model has none, or an adapter is on it.
    """
    causal_lm = causal_lm_of(model)
    head = causal_lm.get_output_embeddings()
    if head is None:
        raise TrainerConfigError(
            f"{type(causal_lm).__name__} has no language-model head: load it as a causal LM"
        )
    if hasattr(head, "base_layer"):
        raise TrainerConfigError(
            "an adapter (LoRA) is on the language-model head, and the fused head would ignore it: remove the head from target_modules"
        )
    return head.weight, getattr(head, "bias", None)


def has_plain_head(model: nn.Module) -> bool:
    """Return whether the model has a plain head, which the fused head can replace."""
    try:
        lm_head_of(model)
    except TrainerConfigError:
        return False
    return True


def logit_rule(model: nn.Module) -> tuple[float, float | None]:
    """Return the factor and the soft cap between a model's head and its logits, from its configuration."""
    config = causal_lm_of(model).config.get_text_config()
    softcap = getattr(config, "final_logit_softcapping", None)
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        if (factor := getattr(config, name, None)) is not None:
            return float(factor), softcap
    divisor = getattr(config, "logits_scaling", None)
    if divisor is None:
        return 1.0, softcap
    # Granite and MiniCPM divide by this entry; HyperCLOVA X multiplies.
    return float(divisor if config.model_type == "hyperclovax" else 1 / divisor), softcap


def model_head_outputs(
    model: nn.Module,
    hidden_N_H: Tensor,
    target_ids_N: Tensor,
    *,
    teacher: nn.Module | None = None,
    teacher_hidden_N_H: Tensor | None = None,
    beta: float = 0.5,
    temperature: float = 1.0,
) -> HeadOutput:
    """Call `trainer.model.head.head_outputs` with the model's own head and logit rule.

    `teacher` is the model with the teacher's head. Without it, both use the model's own head.

    Raises:
        ShapeError: two inputs do not line up.
        TrainerConfigError: the model has no plain head, or an option is out of range.
    """
    weight_V_H, bias_V = lm_head_of(model)
    teacher_weight_V_H, teacher_bias_V = (None, None) if teacher is None else lm_head_of(teacher)
    logit_scale, softcap = logit_rule(model)
    return head_outputs(
        hidden_N_H,
        weight_V_H,
        bias_V,
        target_ids_N=target_ids_N,
        teacher_hidden_N_H=teacher_hidden_N_H,
        teacher_weight_V_H=teacher_weight_V_H,
        teacher_bias_V=teacher_bias_V,
        beta=beta,
        temperature=temperature,
        logit_scale=logit_scale,
        softcap=softcap,
    )


def completion_outputs(
    model: nn.Module,
    hidden_B_C_H: Tensor,
    ids_B_C: Tensor,
    *,
    hinted_B_C: Tensor,
    teacher: nn.Module,
    teacher_hidden_N_H: Tensor,
    beta: float = 0.5,
    temperature: float = 1.0,
) -> CompletionOutput:
    """Compute log-probabilities and entropies of completions, and the divergence at hints.

    These are the inputs of a policy loss from per-token log-probabilities. They take one pass per
    chunk, and no logits `[B, C, V]`. The teacher is projected only at hinted tokens.

    Args:
        model: model with the head and the logit rule.
        hidden_B_C_H: the states that predict `ids_B_C`.
        ids_B_C: the completions.
        hinted_B_C: true at the tokens of `teacher_hidden_N_H`, in row order. Pass it on the CPU:
            counting them on the device would force a wait.
        teacher: model with the teacher's head.
        teacher_hidden_N_H: the teacher's states at the hinted tokens.
        beta: as in `fused_policy_distillation`.
        temperature: both models' logits are divided by it.

    Raises:
        ShapeError: two inputs do not line up.
        TrainerConfigError: the model has no plain head, or an option is out of range.
    """
    hidden_M_H, ids_M = hidden_B_C_H.flatten(0, 1), ids_B_C.flatten()
    hinted_N, plain_N = (
        mask.flatten().nonzero().squeeze(1).to(ids_M.device, non_blocking=True)
        for mask in (hinted_B_C, ~hinted_B_C)
    )
    hinted = model_head_outputs(
        model,
        hidden_M_H[hinted_N],
        ids_M[hinted_N],
        teacher=teacher,
        teacher_hidden_N_H=teacher_hidden_N_H,
        beta=beta,
        temperature=temperature,
    )
    plain = model_head_outputs(model, hidden_M_H[plain_N], ids_M[plain_N], temperature=temperature)
    logps_B_C, entropy_B_C = (
        with_hint.new_zeros(len(ids_M))
        .index_copy(0, hinted_N, with_hint)
        .index_copy(0, plain_N, without)
        .view(ids_B_C.shape)
        for with_hint, without in zip(hinted[:2], plain[:2], strict=True)
    )
    return CompletionOutput(logps_B_C, entropy_B_C, hinted.divergence_N)
