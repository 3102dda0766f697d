"""The head of a Hugging Face causal LM, and its properties that the exact speed-ups need.

Dimensions in names: `N` tokens, `H` hidden, `V` vocabulary.
"""

from collections.abc import Mapping

from torch import Tensor, nn
from transformers import PreTrainedModel
from trl.kernels import ChunkedLogProbFunction

from trainer.errors import TrainerConfigError

WIDTH, WIDTH_ON_CUDA = 8192, 32768
"""Vocabulary entries whose logits exist at once, for up to 4,096 tokens."""


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


def head_logps(
    model: nn.Module, hidden_N_H: Tensor, ids_N: Tensor, *, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Compute the log-probability of each token and the entropy at its place, each [N], with gradients.

    The logits of a batch, its largest tensor, never exist in full: TRL's kernel makes them tile by
    tile, and once more in the backward pass. Sums are in 32 bits. Under autocast, the logits are in
    its type, as the model's own are.

    """
    weight_V_H, bias_V = lm_head_of(model)
    scale, softcap = logit_rule(model)
    width = WIDTH_ON_CUDA if hidden_N_H.is_cuda else WIDTH
    logps_N, entropy_N, *_ = ChunkedLogProbFunction.apply(
        hidden_N_H, weight_V_H, bias_V, ids_N, temperature, width, softcap, scale, ("entropy",)
    )
    return logps_N, entropy_N


def head_divergence(
    model: nn.Module,
    hidden_N_H: Tensor,
    teacher: nn.Module,
    teacher_hidden_N_H: Tensor,
    *,
    beta: float,
    temperature: float = 1.0,
) -> Tensor:
    """Compute the generalized JSD from a teacher at each token, [N], without full logits.

    Only the student gets a gradient. The arguments are those of `head_logps` and
    `trainer.losses.divergence.jsd_entries`.
    """
    # It loads all of TRL's trainers, which models without channel 2 do without.
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction  # noqa: PLC0415

    sides = (
        (hidden_N_H, *lm_head_of(model)),
        (
            teacher_hidden_N_H.detach(),
            *(one if one is None else one.detach() for one in lm_head_of(teacher)),
        ),
    )
    divergence_N, _ = ChunkedDivergenceFunction.apply(
        *sides[0], *sides[1], beta, temperature, *logit_rule(model), *logit_rule(teacher)
    )
    return divergence_N
