"""Run Hugging Face causal LMs on packed preference pairs.

`packed_logps` runs a model once over a `PackedTree`, and returns each completion's log-probability,
equal to running one pair at a time. The tree is passed to the attention layers as a keyword
argument, through the model's own attention interface. Calls without a tree don't change.
"""

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import signature
from itertools import pairwise
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trainer.errors import ShapeError, TrainerConfigError
from trainer.losses.compose import PairLogps
from trainer.model.causal_lm import (
    causal_lm_of,
    head_logps,
    length_dependent_positions,
)
from trainer.model.tree_attention import TreeAttention, attention_for
from trainer.model.tree_layout import (
    PackedTree,
    TokenPair,
    TokenSequence,
    pack_pairs,
    pack_pairs_within,
)

_PREFIX = "prefix_tree_"
_BASES = {"sdpa", "eager", "flex_attention"}
_FLASH = "flash"
"""In the names of attention whose kernels are looked up by that name."""
_FOLLOWS = "follows_trees"
"""Attribute of attention functions that know about trees."""
_ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
_FORKABLE_LAYERS = {"linear_attention", "conv", "mamba"}
"""Layers whose states transformers continues with several tokens at once."""


def packed_logps(model: nn.Module, tree: PackedTree) -> tuple[Tensor, Tensor]:
    """Return the summed log-probabilities of the chosen and of the rejected completions, both `[B]`.

    Divide by `tree.chosen_lengths` and `tree.rejected_lengths` for per-token averages. In both
    passes, logits exist for only one chunk of tokens at a time. Under DDP or FSDP, call this inside
    the wrapper's forward, or gradients aren't synchronized.
    """
    (chosen, _), (rejected, _) = tree_pair_logps(model, tree)
    return chosen, rejected


def tree_pair_logps(
    model: nn.Module, tree: PackedTree, hidden_N_H: Tensor | None = None
) -> PairLogps:
    """Return the summed log-probs and token counts of both sides of a tree's pairs, on the model's device.

    The hidden states of the packed tokens are computed if they aren't given.
    """
    tree = tree.to(causal_lm_of(model).device)
    if hidden_N_H is None:
        hidden_N_H = packed_hidden(model, tree)
    logps_E, _ = head_logps(model, hidden_N_H[tree.predictors_E], tree.target_ids_E)
    chosen, rejected = tree.sum_logps(logps_E)
    return (chosen, tree.chosen_lengths), (rejected, tree.rejected_lengths)


def states_of_sequences(tree: PackedTree, hidden_N_H: Tensor, n_columns: int) -> Tensor:
    """Pick the states that predict the completions of a tree's further sequences, `[R, C, H]`.

    Columns after the end of a completion have meaningless states.
    """
    index_R_C = pad_sequence(list(tree.predictors_R), batch_first=True)
    return hidden_N_H[F.pad(index_R_C, (0, n_columns - index_R_C.shape[1]))]


def packed_pair_logps(
    model: nn.Module, batch: Mapping[str, Tensor], *, max_tokens: int | None = None
) -> PairLogps:
    """Return the summed log-probs and token counts of chosen and rejected sides, each `[B]`, computed in trees.

    This replaces one padded forward pass per side. `batch` has
    `dpo_{chosen,rejected}_{input_ids,attention_mask,response_mask}` (without an attention mask no
    token is padding). Responses must be at the end of their sequence. The graphs of all trees stay
    in memory until the backward pass. If that is too much, run the trees of `trees_of` one by one.

    Args:
        model: as for `packed_logps`.
        batch: the padded pairs, on the model's device.
        max_tokens: packed tokens per pass. More pairs take more passes.

    Raises:
        ShapeError: a prompt or response is empty, or the sides have different prompts.
        TrainerConfigError: the model's attention cannot follow a tree exactly.
    """
    # Trees keep the order of the pairs, so that their results only follow each other.
    parts = [tree_pair_logps(model, tree) for tree in trees_of(batch, max_tokens=max_tokens)]
    chosen, rejected = zip(*parts, strict=True)
    return _joined(chosen), _joined(rejected)


def _joined(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    sums, lengths = zip(*parts, strict=True)
    return torch.cat(sums), torch.cat(lengths)


def trees_of(
    batch: Mapping[str, Tensor],
    *,
    max_tokens: int | None = None,
    sequences: Sequence[TokenSequence] = (),
) -> list[PackedTree]:
    """Pack the pairs of a padded batch, in order. Arguments and errors are those of `packed_pair_logps`.

    `sequences` go into the first tree. With them, the batch may be empty.
    """
    pairs = _token_pairs(batch) if batch else []
    if max_tokens is None:
        return [pack_pairs(pairs, sequences=sequences)]
    return pack_pairs_within(pairs, max_tokens=max_tokens, sequences=sequences)


def _token_pairs(batch: Mapping[str, Tensor]) -> list[TokenPair]:
    chosen = _prompts_and_responses(batch, "chosen")
    rejected = _prompts_and_responses(batch, "rejected")
    for row, ((prompt, _), (other_prompt, _)) in enumerate(zip(chosen, rejected, strict=True)):
        if prompt != other_prompt:
            raise ShapeError(f"pair {row}: chosen and rejected have different prompts")
    return [
        (prompt, response, other)
        for (prompt, response), (_, other) in zip(chosen, rejected, strict=True)
    ]


def _prompts_and_responses(
    batch: Mapping[str, Tensor], side: str
) -> list[tuple[list[int], list[int]]]:
    input_ids = batch[f"dpo_{side}_input_ids"]
    attention_mask = batch.get(f"dpo_{side}_attention_mask", torch.ones_like(input_ids))
    columns = (input_ids, attention_mask, batch[f"dpo_{side}_response_mask"])
    rows = zip(*(column.tolist() for column in columns), strict=True)
    split = []
    for row, (ids, is_real, is_response) in enumerate(rows):
        tokens = [token for token, keep in zip(ids, is_real, strict=True) if keep]
        asked = [bool(one) for one, keep in zip(is_response, is_real, strict=True) if keep]
        n_prompt = asked.index(True) if True in asked else len(asked)
        if not all(asked[n_prompt:]):
            raise ShapeError(
                f"pair {row}, {side}: the response mask has a gap; only a response that ends its "
                "sequence can be packed"
            )
        split.append((tokens[:n_prompt], tokens[n_prompt:]))
    return split


def packed_hidden(model: nn.Module, tree: PackedTree) -> Tensor:
    """Compute the last hidden state of every packed token, `[N, H]`."""
    causal_lm = causal_lm_of(model)
    if _mixers(causal_lm):
        return _forked_hidden(causal_lm, tree)
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
    # A layer that swallows keyword arguments would attend causally over the packed row, across
    # pairs, without any error: count who came by.
    n_layers = causal_lm.config.get_text_config().num_hidden_layers
    if attention.n_calls < n_layers:
        _refuse(
            causal_lm,
            f"sent {attention.n_calls} of its {n_layers} layers through the tree; the others mix "
            "tokens in another way or drop keyword arguments",
        )
    return outputs.last_hidden_state[0]


def _mixers(causal_lm: PreTrainedModel) -> set[str]:
    """Name the kinds of a model's layers that mix tokens otherwise than by attention."""
    layer_types = getattr(causal_lm.config.get_text_config(), "layer_types", None)
    return set(layer_types or ()) - _ATTENTION_LAYERS


def _forked_hidden(causal_lm: PreTrainedModel, tree: PackedTree) -> Tensor:
    """Compute the results of `packed_hidden` with layers that carry a state along the tokens.

    Each run of tokens between two forks is a call of its own. It continues the states that its
    parent ended with, as in generation, but with their graph.
    """
    _check_forkable(causal_lm, is_training=causal_lm.training)
    name = _cache_name(causal_lm)
    forks = {chain.prefix[-1][1] for chain in tree.chains if chain.prefix}
    before: dict[int, tuple[DynamicCache, int]] = {0: (DynamicCache(config=causal_lm.config), 0)}
    hidden: list[Tensor] = []
    for chain in tree.chains:
        after = chain.prefix[-1][1] if chain.prefix else 0
        within = sorted(place for place in forks if chain.start < place < chain.stop)
        for start, stop in pairwise([chain.start, *within, chain.stop]):
            cache, n_led = before[after]
            places_T = [*range(after - n_led, after), *range(start, stop)]
            # Layers write over the state that a single token continues, and backward passes read
            # it: such a token is read twice, and again by those that continue it.
            is_single = len(places_T) == 1
            forked, given_T = _fork(cache), places_T * (1 + is_single)
            positions_T = tree.position_ids_N[given_T]
            if is_single:
                positions_T = positions_T + positions_T.new_tensor([0, 1])
            outputs = causal_lm.base_model(
                input_ids=tree.input_ids_N[None, given_T],
                position_ids=positions_T[None],
                use_cache=True,
                **{name: forked},
            )
            hidden.append(outputs.last_hidden_state[0, n_led : len(places_T)])
            before[stop] = (cache, 1) if is_single else (forked, 0)
            after = stop
    return torch.cat(hidden)


def _cache_name(causal_lm: PreTrainedModel) -> str:
    """Return by which name a model takes a cache, which transformers 5.24 changes, or nothing if it takes none."""
    taken = signature(causal_lm.base_model.forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in taken), "")


def _fork(cache: DynamicCache) -> DynamicCache:
    """Copy a cache whose states others continue, too. Writing to the copy leaves all graphs whole."""
    forked = copy.copy(cache)
    layers: list[Any] = [copy.copy(layer) for layer in cache.layers]
    forked.layers = layers
    for layer in layers:
        for name, states in vars(layer).items():
            if isinstance(states, dict):
                # Written in place, where no backward pass reads them.
                is_conv = name == "conv_states"
                own = {i: s.clone() if is_conv and s is not None else s for i, s in states.items()}
                setattr(layer, name, own)
        if hasattr(layer, "recurrent_states"):
            layer.update_recurrent_state = partial(_put, layer)
    return forked


def _put(layer: Any, states: Tensor, state_idx: int = 0, **_: Any) -> Tensor:
    """Replace a recurrent state, which the backward pass reads, where transformers writes over it."""
    layer.is_recurrent_states_initialized[state_idx] = True
    layer.recurrent_states[state_idx] = states
    return states


def enable_tree_attention(model: nn.Module) -> None:
    """Enable `model` to run trees. Calls without a tree don't change.

    The change is permanent, because activation checkpointing runs attention again in the backward
    pass.
    """
    causal_lm = causal_lm_of(model)
    # A registered name, not a patched module: checkpointing, PEFT and `save_pretrained` go on as
    # they are, and calls without a tree fall through to the attention that was chosen.
    base = str(causal_lm.config._attn_implementation)
    if base.startswith(_PREFIX):
        return
    if _mixers(causal_lm):
        _check_forkable(causal_lm, is_training=True)
        return
    _check_exchangeable(causal_lm, base)
    if _FLASH in base:
        # The name must stay, so what it stands for learns about trees, once for the process.
        if not getattr(ALL_ATTENTION_FUNCTIONS[base], _FOLLOWS, False):
            AttentionInterface.register(base, _tree_or(ALL_ATTENTION_FUNCTIONS[base]))
        return
    name = _PREFIX + base
    AttentionInterface.register(name, _tree_or(base))
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[base])
    causal_lm.set_attn_implementation(name)


def _check_forkable(causal_lm: PreTrainedModel, *, is_training: bool) -> None:
    """Refuse a model whose layers' states can't be carried along the runs of a tree.

    Raises:
        TrainerConfigError: the message names the reason.
    """
    mixers = _mixers(causal_lm)
    unknown = mixers - _FORKABLE_LAYERS
    # Mamba without attention is off by 4e-5 behind a state, and the hybrid models by less than 1e-5.
    is_pure = mixers == set(causal_lm.config.get_text_config().layer_types or ())
    if unknown or is_pure or not _cache_name(causal_lm):
        kinds = ", ".join(sorted(unknown or mixers))
        _refuse(
            causal_lm, f"has layers of type {kinds}, whose states can't be carried along a tree"
        )
    if isinstance(causal_lm, FSDPModule):
        _refuse(causal_lm, "is sharded, so that all ranks must make as many calls")
    if is_training and any(
        getattr(m, "gradient_checkpointing", False) for m in causal_lm.modules()
    ):
        _refuse(causal_lm, "keeps no state of its layers under activation checkpointing")
    if reason := length_dependent_positions(causal_lm):
        _refuse(causal_lm, reason)


def _check_exchangeable(causal_lm: PreTrainedModel, base: str) -> None:
    """Refuse by configuration what would only be found out in a step.

    Raises:
        TrainerConfigError: the model's attention does not support packed trees.
    """
    if base not in _BASES and not (_FLASH in base and base in ALL_ATTENTION_FUNCTIONS):
        raise TrainerConfigError(
            f"attention {base!r} cannot be shared with packed trees: load the model with "
            'attn_implementation="sdpa"'
        )
    config = causal_lm.config.get_text_config()
    if not getattr(causal_lm, "_supports_attention_backend", False):
        _refuse(causal_lm, "does not take its attention from transformers' AttentionInterface")
    if reason := length_dependent_positions(causal_lm):
        _refuse(causal_lm, reason)
    if getattr(config, "attention_dropout", 0.0):
        _refuse(causal_lm, "uses attention dropout (set attention_dropout to 0)")
    if getattr(config, "attn_logit_softcapping", None) is not None:
        _refuse(causal_lm, "uses a soft cap on attention scores")


def _refuse(module: nn.Module, reason: str) -> NoReturn:
    raise TrainerConfigError(
        f"{type(module).__name__} {reason}, so that packed pairs would not be exact. Train this "
        "model one pair at a time."
    )


def _tree_or(base: str | Callable[..., Any]) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Make an attention function: the tree's where a tree is given, else `base` or that of its name."""

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
            plain = _base_attention(base, module) if isinstance(base, str) else base
            return plain(module, query, key, value, attention_mask, **kwargs)
        _check_exact(module, kwargs)
        scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
        kind = query.device.type
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            # Autocast knows torch's own attention, not ours.
            dtype = torch.get_autocast_dtype(kind)
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        output_1_A_N_D = prefix_tree(
            query,
            key,
            value,
            scale=scale,
            window=kwargs.get("sliding_window"),
            sinks_A=kwargs.get("s_aux"),
        )
        return output_1_A_N_D.transpose(1, 2).contiguous(), None

    setattr(attend, _FOLLOWS, True)
    return attend


def _base_attention(base: str, module: nn.Module) -> Callable[..., Any]:
    if base == "eager":
        return sys.modules[type(module).__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS[base]


def _check_exact(module: nn.Module, kwargs: dict[str, Any]) -> None:
    """Refuse what the tree backends would silently leave out."""
    if kwargs.get("dropout"):
        _refuse(module, "uses attention dropout")
    if kwargs.get("softcap") is not None:
        _refuse(module, "uses a soft cap on attention scores")
