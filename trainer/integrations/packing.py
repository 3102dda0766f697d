"""Hugging Face causal LMs on packed preference pairs.

`packed_logps` runs a model once over a `PackedTree` and gives each completion's log-probability,
equal to running one pair at a time. The tree reaches the model's attention layers as a keyword
argument, through the model's own attention interface; calls without a tree run as before.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trainer.errors import TrainerConfigError
from trainer.losses.head import head_outputs
from trainer.losses.tree_attention import TreeAttention, attention_for
from trainer.losses.tree_layout import PackedTree

__all__ = [
    "causal_lm_of",
    "enable_tree_attention",
    "lm_head_of",
    "logit_rule",
    "packed_hidden",
    "packed_logps",
]

_PREFIX = "prefix_tree_"


def packed_logps(
    model: nn.Module, tree: PackedTree, *, temperature: float = 1.0, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """Summed log-probabilities of every chosen and every rejected completion, both `[B]`.

    Divide by `tree.chosen_lengths` and `tree.rejected_lengths` for per-token averages. The logits
    exist for one chunk of tokens at a time, in the forward and in the backward pass.

    Args:
        model: a causal LM, bare or under PEFT. Under DDP or FSDP call this inside the wrapper's
            forward, or gradients are not synchronized.
        tree: moved to the model's device when it is elsewhere.
        temperature: the logits are divided by it.
        chunk: tokens whose logits exist at once; by default the device's own choice.

    Raises:
        TrainerConfigError: the model's attention cannot follow a tree exactly.
    """
    causal_lm = causal_lm_of(model)
    weight_V_H, bias_V = lm_head_of(causal_lm)
    tree = tree.to(causal_lm.device)
    hidden_N_H = packed_hidden(causal_lm, tree)
    logit_scale, softcap = logit_rule(causal_lm)
    outputs = head_outputs(
        hidden_N_H[tree.predictors_E],
        weight_V_H,
        bias_V,
        target_ids_N=tree.target_ids_E,
        temperature=temperature,
        logit_scale=logit_scale,
        softcap=softcap,
        chunk=chunk,
    )
    return tree.sum_logps(outputs.logps_N)


def packed_hidden(model: nn.Module, tree: PackedTree) -> Tensor:
    """The last hidden state of every packed token, `[N, H]`; `tree` is on the model's device.

    Raises:
        TrainerConfigError: the model's attention cannot follow a tree exactly.
    """
    causal_lm = causal_lm_of(model)
    enable_tree_attention(causal_lm)
    attention = attention_for(tree)
    # A mask with four dimensions is handed to the layers as it is, so that none is built.
    no_mask_1_1_1_1 = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=causal_lm.device)
    outputs = causal_lm.base_model(
        input_ids=tree.input_ids_N[None],
        position_ids=tree.position_ids_N[None],
        attention_mask=no_mask_1_1_1_1,
        use_cache=False,
        prefix_tree=attention,
    )
    n_layers = causal_lm.config.get_text_config().num_hidden_layers
    if attention.n_calls < n_layers:
        raise TrainerConfigError(
            f"{type(causal_lm).__name__}: {attention.n_calls} of {n_layers} layers attended through "
            "the tree; the others mix tokens in another way (recurrent or linear attention, or a "
            "forward that drops keyword arguments), so packed pairs would not be exact. Train "
            "this model one pair at a time."
        )
    return outputs.last_hidden_state[0]


def enable_tree_attention(model: nn.Module) -> None:
    """Let `model` follow a tree where it is given one; all other calls stay as they are.

    The change lasts, because activation checkpointing attends again in the backward pass.

    Raises:
        TrainerConfigError: the model does not take its attention from the attention interface.
    """
    causal_lm = causal_lm_of(model)
    base = str(causal_lm.config._attn_implementation)
    if base.startswith(_PREFIX):
        return
    if not causal_lm._can_set_attn_implementation():
        raise TrainerConfigError(
            f"{type(causal_lm).__name__} does not take its attention from transformers' "
            "AttentionInterface, so it cannot follow a packed tree. Train this model one pair at "
            "a time."
        )
    name = _PREFIX + base
    AttentionInterface.register(name, _tree_or(base))
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[base])
    causal_lm.set_attn_implementation(name)


def lm_head_of(model: PreTrainedModel) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of a model's language-model head.

    Raises:
        TrainerConfigError: the model has none.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise TrainerConfigError(
            f"{type(model).__name__} has no language-model head: load it as a causal LM"
        )
    return head.weight, getattr(head, "bias", None)


def logit_rule(model: PreTrainedModel) -> tuple[float, float | None]:
    """Factor and soft cap between a model's head and its logits, from its configuration."""
    config = model.config.get_text_config()
    softcap = getattr(config, "final_logit_softcapping", None)
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        if (factor := getattr(config, name, None)) is not None:
            return float(factor), softcap
    divisor = getattr(config, "logits_scaling", None)
    if divisor is None:
        return 1.0, softcap
    # Granite and MiniCPM divide by this entry; HyperCLOVA X multiplies.
    return float(divisor if config.model_type == "hyperclovax" else 1 / divisor), softcap


def causal_lm_of(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside `model`: itself, or what PEFT wraps.

    Raises:
        TrainerConfigError: there is none.
    """
    unwrap = getattr(model, "get_base_model", None)
    bare = unwrap() if callable(unwrap) else model
    if not isinstance(bare, PreTrainedModel):
        raise TrainerConfigError(
            f"{type(model).__name__} is no transformers causal LM; unwrap it first "
            "(accelerator.unwrap_model) and call inside the wrapper's forward"
        )
    return bare


def _tree_or(base: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """An attention function: the tree's where a tree is given, else that of `base`."""

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        prefix_tree: TreeAttention | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if prefix_tree is None:
            return _base_attention(base, module)(
                module, query, key, value, attention_mask, **kwargs
            )
        _check_exact(module, prefix_tree.tree, kwargs)
        scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
        output_1_A_N_D = prefix_tree(query, key, value, scale=scale)
        return output_1_A_N_D.transpose(1, 2).contiguous(), None

    return attend


def _base_attention(base: str, module: nn.Module) -> Callable[..., Any]:
    if base == "eager":
        return sys.modules[type(module).__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS[base]


def _check_exact(module: nn.Module, tree: PackedTree, kwargs: dict[str, Any]) -> None:
    """Refuse what the tree backends would silently leave out."""
    window = kwargs.get("sliding_window")
    reasons = {
        "attention dropout (set attention_dropout to 0)": bool(kwargs.get("dropout")),
        "a soft cap on attention scores": kwargs.get("softcap") is not None,
        "attention sinks": kwargs.get("s_aux") is not None,
        f"a sliding window of {window}, shorter than the trace": window is not None
        and int(tree.position_ids_N.max()) >= window,
    }
    found = [reason for reason, is_found in reasons.items() if is_found]
    if found:
        raise TrainerConfigError(
            f"{type(module).__name__} uses {' and '.join(found)}, which packed pairs would not "
            "reproduce exactly. Train this model one pair at a time."
        )
