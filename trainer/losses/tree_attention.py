"""Attention over a `PackedTree`: each token sees its own ancestors and nothing else.

Two backends, the same numbers. On CUDA one FlexAttention call with the block mask
`k <= q < subtree_end[k]`. Anywhere else one plain scaled-dot-product call per chain, whose keys are
the chain's ancestors and itself (FlexAttention has no backward pass on CPU).

Shapes: `A` query heads, `G` key and value heads, `N` packed tokens, `D` head dimension, `L` tokens
of one chain, `K` tokens it can see.
"""

from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from trainer.losses.tree_layout import Chain, PackedTree

__all__ = ["ChainAttention", "FlexAttention", "TreeAttention", "attention_for"]


@dataclass(slots=True, eq=False)
class ChainAttention:
    """One scaled-dot-product call per chain; any device."""

    tree: PackedTree
    n_calls: int = 0
    """Layers that attended through this tree so far."""

    def __call__(
        self, query_1_A_N_D: Tensor, key_1_G_N_D: Tensor, value_1_G_N_D: Tensor, *, scale: float
    ) -> Tensor:
        """Attention output, `[1, A, N, D]`."""
        self.n_calls += 1
        # Split once at every boundary: the gradient of a split is one concatenation, while that
        # of a slice is a zero tensor of full length, one per slice.
        bounds = self._bounds()
        sizes = [stop - start for start, stop in pairwise(bounds)]
        keys = dict(zip(bounds, key_1_G_N_D.split(sizes, 2), strict=False))
        values = dict(zip(bounds, value_1_G_N_D.split(sizes, 2), strict=False))
        lengths = [chain.stop - chain.start for chain in self.tree.chains]
        outputs = []
        for chain, query in zip(self.tree.chains, query_1_A_N_D.split(lengths, 2), strict=True):
            starts = _starts(chain, bounds)
            key = torch.cat([keys[start] for start in starts], 2)
            value = torch.cat([values[start] for start in starts], 2)
            outputs.append(_chain_attention(query, key, value, scale))
        return torch.cat(outputs, 2)

    def _bounds(self) -> list[int]:
        bounds = {0, self.tree.n_tokens}
        for chain in self.tree.chains:
            bounds |= {chain.start, chain.stop}
            bounds |= {bound for pair in chain.prefix for bound in pair}
        return sorted(bounds)


def _starts(chain: Chain, bounds: list[int]) -> list[int]:
    ranges = [*chain.prefix, (chain.start, chain.stop)]
    return [bound for start, stop in ranges for bound in bounds if start <= bound < stop]


def _chain_attention(
    query_1_A_L_D: Tensor, key_1_G_K_D: Tensor, value_1_G_K_D: Tensor, scale: float
) -> Tensor:
    n_queries, n_keys = query_1_A_L_D.shape[2], key_1_G_K_D.shape[2]
    mask_L_K = None
    if n_queries < n_keys:
        ones_L_K = torch.ones(n_queries, n_keys, dtype=torch.bool, device=query_1_A_L_D.device)
        mask_L_K = ones_L_K.tril(n_keys - n_queries)
    return F.scaled_dot_product_attention(
        query_1_A_L_D,
        key_1_G_K_D,
        value_1_G_K_D,
        attn_mask=mask_L_K,
        is_causal=mask_L_K is None,
        scale=scale,
        enable_gqa=True,
    )


@dataclass(slots=True, eq=False)
class FlexAttention:
    """One FlexAttention call with a block mask; compiled on CUDA."""

    tree: PackedTree
    n_calls: int = 0
    _block_mask: BlockMask | None = None

    def __call__(
        self, query_1_A_N_D: Tensor, key_1_G_N_D: Tensor, value_1_G_N_D: Tensor, *, scale: float
    ) -> Tensor:
        """Attention output, `[1, A, N, D]`."""
        self.n_calls += 1
        attend = _compiled_flex() if query_1_A_N_D.device.type == "cuda" else flex_attention
        return attend(
            query_1_A_N_D,
            key_1_G_N_D,
            value_1_G_N_D,
            block_mask=self.block_mask(),
            scale=scale,
            enable_gqa=True,
        )

    def block_mask(self) -> BlockMask:
        """The tree's mask by blocks, made once and shared by all layers."""
        if self._block_mask is None:
            subtree_end_N = self.tree.subtree_end_N

            def is_visible(_batch: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
                return (k <= q) & (q < subtree_end_N[k])

            n_tokens = self.tree.n_tokens
            self._block_mask = create_block_mask(
                is_visible, None, None, n_tokens, n_tokens, device=subtree_end_N.device
            )
        return self._block_mask


@cache
def _compiled_flex():  # noqa: ANN202 - torch.compile returns its argument's own type
    return torch.compile(flex_attention, dynamic=True)


TreeAttention = ChainAttention | FlexAttention


def attention_for(tree: PackedTree) -> TreeAttention:
    """The backend of the device that `tree` lies on."""
    return FlexAttention(tree) if tree.input_ids_N.device.type == "cuda" else ChainAttention(tree)
