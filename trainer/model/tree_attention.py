"""Attention over a `PackedTree`, in which each token sees only its ancestors.

Two backends give the same numbers:

- CUDA: one FlexAttention call with the block mask `k <= q < subtree_end[k]`.
- CPU, where FlexAttention has no backward pass: flash attention chain by chain. A chain attends to
  itself and to each run of its ancestors in separate calls on views of the keys, and the parts are
  joined by their log-normalizers. Nothing is copied per branch, and the memory for the backward
  pass doesn't grow with the number of branches.

Shapes: `A` query heads, `G` key and value heads, `N` packed tokens, `D` head dimension, `L` tokens
of one chain, `K` tokens it can see.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import cache, cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from trainer.model.tree_layout import Chain, PackedTree


class TreeAttention(ABC):
    """Attention of all layers over one tree."""

    def __init__(self, tree: PackedTree) -> None:
        self.tree = tree
        self.n_calls = 0
        """Layers that attended through this tree so far."""

    def __call__(
        self, query_1_A_N_D: Tensor, key_1_G_N_D: Tensor, value_1_G_N_D: Tensor, *, scale: float
    ) -> Tensor:
        """Return the attention output, `[1, A, N, D]`."""
        self.n_calls += 1
        return self._attend(query_1_A_N_D, key_1_G_N_D, value_1_G_N_D, scale)

    @abstractmethod
    def _attend(
        self, query_1_A_N_D: Tensor, key_1_G_N_D: Tensor, value_1_G_N_D: Tensor, scale: float
    ) -> Tensor: ...


def attention_for(tree: PackedTree) -> TreeAttention:
    """Return the backend for the device of `tree`."""
    is_on_cpu = tree.input_ids_N.device.type == "cpu"
    return FlashTreeAttention(tree) if is_on_cpu else FlexAttention(tree)


# --- CPU -----------------------------------------------------------------------------------------


class FlashTreeAttention(TreeAttention):
    """Flash attention on the CPU, chain by chain, without copies of the keys."""

    def _attend(
        self, query_1_A_N_D: Tensor, key_1_G_N_D: Tensor, value_1_G_N_D: Tensor, scale: float
    ) -> Tensor:
        return _FlashTree.apply(query_1_A_N_D, key_1_G_N_D, value_1_G_N_D, self.tree.chains, scale)


class _FlashTree(torch.autograd.Function):
    """Each chain in parts; with the joint output and normalizer each part has its own gradient.

    Source: Dao 2023, arXiv:2307.08691, section 3.1 (joining blocks by their log-normalizers, and
    the backward pass from the joint ones), applied to runs of ancestors instead of blocks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query_1_A_N_D: Tensor,
        key_1_G_N_D: Tensor,
        value_1_G_N_D: Tensor,
        chains: tuple[Chain, ...],
        scale: float,
    ) -> Tensor:
        # The kernel knows no grouped heads: keys and values are repeated here, and kept unrepeated
        # for the backward pass.
        n_shared = query_1_A_N_D.shape[1] // key_1_G_N_D.shape[1]
        key_1_A_N_D = key_1_G_N_D.repeat_interleave(n_shared, 1)
        value_1_A_N_D = value_1_G_N_D.repeat_interleave(n_shared, 1)
        output_1_A_N_D = torch.empty_like(query_1_A_N_D, memory_format=torch.contiguous_format)
        norms = []
        for chain in chains:
            rows = slice(chain.start, chain.stop)
            output, norm = _join(
                _flash(query_1_A_N_D, key_1_A_N_D, value_1_A_N_D, rows, columns, scale)
                for columns in _columns(chain)
            )
            output_1_A_N_D[:, :, rows] = output
            norms.append(norm)  # chains are in packed order, so these line up with the tokens
        norm_1_A_N = torch.cat(norms, 2)
        ctx.save_for_backward(query_1_A_N_D, key_1_G_N_D, value_1_G_N_D, output_1_A_N_D, norm_1_A_N)
        ctx.chains, ctx.scale = chains, scale
        return output_1_A_N_D

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        query, key, value, output, norm = ctx.saved_tensors
        n_shared = query.shape[1] // key.shape[1]
        key_1_A_N_D, value_1_A_N_D = (x.repeat_interleave(n_shared, 1) for x in (key, value))
        sums = [torch.zeros_like(x) for x in (query, key_1_A_N_D, value_1_A_N_D)]
        for chain in ctx.chains:
            rows = slice(chain.start, chain.stop)
            for columns in _columns(chain):
                # Given the output and normalizer of all parts, not of its own, the kernel's softmax
                # is that of the whole row: each part's gradient is right, and they only add up.
                parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    grads[0][:, :, rows],
                    query[:, :, rows],
                    key_1_A_N_D[:, :, columns],
                    value_1_A_N_D[:, :, columns],
                    output[:, :, rows],
                    norm[:, :, rows],
                    0.0,
                    columns == rows,
                    scale=ctx.scale,
                )
                for total, part, where in zip(sums, parts, (rows, columns, columns), strict=True):
                    total[:, :, where] += part
        # The heads that shared a key or value share its gradient.
        by_head = [total.unflatten(1, (-1, n_shared)).sum(2) for total in sums[1:]]
        return sums[0], *by_head, None, None


def _columns(chain: Chain) -> list[slice]:
    return [slice(start, stop) for start, stop in (*chain.prefix, (chain.start, chain.stop))]


def _flash(
    query: Tensor, key: Tensor, value: Tensor, rows: slice, columns: slice, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend from `rows` over `columns`, causally where the two are the same."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query[:, :, rows],
        key[:, :, columns],
        value[:, :, columns],
        0.0,
        columns == rows,
        scale=scale,
    )


def _join(parts: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    outputs, norms = zip(*parts, strict=True)
    if len(outputs) == 1:
        return outputs[0], norms[0]
    # Softmax over a union: each part's output weighs as much as its share of the exponentials.
    norm_1_A_L = torch.logsumexp(torch.stack(norms), 0)
    joint_1_A_L_D = torch.zeros_like(outputs[0])
    for output_1_A_L_D, part_norm_1_A_L in zip(outputs, norms, strict=True):
        weight_1_A_L = (part_norm_1_A_L - norm_1_A_L).exp().to(output_1_A_L_D.dtype)
        joint_1_A_L_D += weight_1_A_L[..., None] * output_1_A_L_D
    return joint_1_A_L_D, norm_1_A_L


# --- CUDA ----------------------------------------------------------------------------------------


class FlexAttention(TreeAttention):
    """One FlexAttention call with a block mask, compiled on CUDA."""

    def _attend(
        self, query_1_A_N_D: Tensor, key_1_G_N_D: Tensor, value_1_G_N_D: Tensor, scale: float
    ) -> Tensor:
        attend = _compiled_flex() if query_1_A_N_D.device.type == "cuda" else flex_attention
        return attend(
            query_1_A_N_D,
            key_1_G_N_D,
            value_1_G_N_D,
            block_mask=self.block_mask,
            scale=scale,
            enable_gqa=True,
        )

    @cached_property
    def block_mask(self) -> BlockMask:
        """Return the tree's block mask, which is computed once and shared by all layers."""
        return tree_block_mask(self.tree.subtree_end_N)


def tree_block_mask(subtree_end_N: Tensor, *, block: int = 128) -> BlockMask:
    """Compute from the ends of subtrees which blocks of tokens see each other.

    Token `k` is visible from `q` if `k <= q < end[k]`. So some queries of a block see a block of
    earlier keys if the largest end of the keys is after the first query. All queries see it if the
    smallest end is after the last query. `create_block_mask` first makes the mask of all tokens,
    which takes a gibibyte for 32,768 tokens. This needs only one number per pair of blocks.

    Args:
        subtree_end_N: field of a `PackedTree`, on the device of the mask.
        block: number of tokens per block.
    """
    n_tokens, device = len(subtree_end_N), subtree_end_N.device
    n_blocks = -(-n_tokens // block)
    filler = n_blocks * block - n_tokens
    # Only the last block is filled up, and no block is later than that: any filler will do.
    ends_M_B = F.pad(subtree_end_N, (0, filler)).view(-1, block)
    largest_M, smallest_M = ends_M_B.amax(-1), ends_M_B.amin(-1)
    starts_M = torch.arange(n_blocks, device=device) * block
    is_earlier_MM = starts_M[None] < starts_M[:, None]
    is_full_MM = is_earlier_MM & (smallest_M[None] >= starts_M[:, None] + block)
    is_seen_MM = is_earlier_MM & (largest_M[None] > starts_M[:, None]) & ~is_full_MM
    is_seen_MM |= torch.eye(n_blocks, dtype=torch.bool, device=device)  # cut by the diagonal

    def is_visible(_batch: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (q < subtree_end_N[k])

    return BlockMask.from_kv_blocks(
        *_ordered(is_seen_MM),
        *_ordered(is_full_MM),
        BLOCK_SIZE=block,
        mask_mod=is_visible,
        seq_lengths=(n_tokens, n_tokens),
    )


def _ordered(marks_MM: Tensor) -> tuple[Tensor, Tensor]:
    """Count the marks of each row, and list their columns first, as `[1, 1, M]` and `[1, 1, M, M]`."""
    columns_MM = marks_MM.int().argsort(dim=-1, descending=True, stable=True)
    return marks_MM.sum(-1, dtype=torch.int32)[None, None], columns_MM.int()[None, None]


@cache
def _compiled_flex() -> Any:
    # Dynamic shapes: every tree has another length, and a compilation takes longer than a step.
    return torch.compile(flex_attention, dynamic=True)
