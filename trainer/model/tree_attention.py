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
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from trainer.model.tree_layout import Chain, PackedTree


class TreeAttention(ABC):
    """Attention of all layers over one tree."""

    def __init__(self, tree: PackedTree) -> None:
        self.tree = tree
        self.n_calls = 0
        """Layers that attended through this tree so far."""

    def __call__(
        self,
        query_1_A_N_D: Tensor,
        key_1_G_N_D: Tensor,
        value_1_G_N_D: Tensor,
        *,
        scale: float,
        window: int | None = None,
        sinks_A: Tensor | None = None,
    ) -> Tensor:
        """Return the attention output, `[1, A, N, D]`."""
        self.n_calls += 1
        given = (query_1_A_N_D, key_1_G_N_D, value_1_G_N_D)
        if window is not None and window >= self.tree.n_positions:
            window = None
        return self._attend(*given, scale, window, sinks_A)

    @abstractmethod
    def _attend(
        self,
        query_1_A_N_D: Tensor,
        key_1_G_N_D: Tensor,
        value_1_G_N_D: Tensor,
        scale: float,
        window: int | None,
        sinks_A: Tensor | None,
    ) -> Tensor: ...


def attention_for(tree: PackedTree) -> TreeAttention:
    """Return the backend for the device of `tree`."""
    is_on_cpu = tree.input_ids_N.device.type == "cpu"
    return FlashTreeAttention(tree) if is_on_cpu else FlexAttention(tree)


# --- CPU -----------------------------------------------------------------------------------------


_ROWS = 512
"""Most queries that attend at once through a sliding window."""
_HIDDEN = -1e30
"""Score of a token that a window hides: no part of a sum, and no source of NaN."""


class FlashTreeAttention(TreeAttention):
    """Flash attention on the CPU, chain by chain, without copies of the keys."""

    def _attend(
        self,
        query_1_A_N_D: Tensor,
        key_1_G_N_D: Tensor,
        value_1_G_N_D: Tensor,
        scale: float,
        window: int | None,
        sinks_A: Tensor | None,
    ) -> Tensor:
        parts = [part for chain in self.tree.chains for part in _parts(chain, window)]
        if sinks_A is None:
            sinks_A = query_1_A_N_D.new_full((query_1_A_N_D.shape[1],), -torch.inf)
        return _FlashTree.apply(query_1_A_N_D, key_1_G_N_D, value_1_G_N_D, sinks_A, parts, scale)


class _Seen(NamedTuple):
    """Tokens that some queries see, by their packed places."""

    columns: slice
    is_causal: bool
    distance: int
    """Position of the first query less that of the first key."""
    window: int | None
    """The window, where it hides some of the keys from some of the queries."""

    def mask(self, n_queries: int, like: Tensor) -> Tensor | None:
        """Return what is added to the scores, `[L, K]`."""
        if self.window is None:
            return None
        n_keys = self.columns.stop - self.columns.start
        back_L_K = self.distance + torch.arange(n_queries)[:, None] - torch.arange(n_keys)[None]
        hidden_L_K = (back_L_K >= self.window).to(like.device)
        return torch.zeros_like(hidden_L_K, dtype=like.dtype).masked_fill(hidden_L_K, _HIDDEN)


def _parts(chain: Chain, window: int | None) -> list[tuple[slice, list[_Seen]]]:
    """List the queries of a chain in runs, and what each run sees."""
    depth = sum(stop - start for start, stop in chain.prefix)
    n_rows = chain.stop - chain.start
    step = n_rows if window is None else min(window, _ROWS)
    parts = []
    for first in range(0, n_rows, step):
        last = min(first + step, n_rows)
        rows = slice(chain.start + first, chain.start + last)
        oldest = 0 if window is None else depth + first - window + 1
        seen, position = [], 0
        own = ((chain.start, rows.start),) if first else ()
        for start, stop in (*chain.prefix, *own):
            n = stop - start
            hidden = min(max(oldest - position, 0), n)
            if hidden < n:
                distance = depth + first - (position + hidden)
                # The last query is the farthest from the first key.
                is_cut = window is not None and distance + last - first - 1 >= window
                columns = slice(start + hidden, stop)
                seen.append(_Seen(columns, False, distance, window if is_cut else None))
            position += n
        parts.append((rows, [*seen, _Seen(rows, True, 0, None)]))
    return parts


class _FlashTree(torch.autograd.Function):
    """Each run of queries in parts; with the joint output and normalizer each part has its own gradient.

    Source: Dao 2023, arXiv:2307.08691, section 3.1 (joining blocks by their log-normalizers, and
    the backward pass from the joint ones), applied to runs of ancestors instead of blocks. A sink
    is one more key whose value is zero.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query_1_A_N_D: Tensor,
        key_1_G_N_D: Tensor,
        value_1_G_N_D: Tensor,
        sinks_A: Tensor,
        parts: list[tuple[slice, list[_Seen]]],
        scale: float,
    ) -> Tensor:
        # The kernel knows no grouped heads: keys and values are repeated here, and kept unrepeated
        # for the backward pass.
        n_shared = query_1_A_N_D.shape[1] // key_1_G_N_D.shape[1]
        key_1_A_N_D = key_1_G_N_D.repeat_interleave(n_shared, 1)
        value_1_A_N_D = value_1_G_N_D.repeat_interleave(n_shared, 1)
        output_1_A_N_D = torch.empty_like(query_1_A_N_D, memory_format=torch.contiguous_format)
        norms = []
        for rows, seen in parts:
            query = query_1_A_N_D[:, :, rows]
            output, norm = _join(
                torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                    query,
                    key_1_A_N_D[:, :, one.columns],
                    value_1_A_N_D[:, :, one.columns],
                    0.0,
                    one.is_causal,
                    attn_mask=one.mask(query.shape[2], query),
                    scale=scale,
                )
                for one in seen
            )
            with_sink = torch.logaddexp(norm, sinks_A.to(norm.dtype)[None, :, None])
            output_1_A_N_D[:, :, rows] = output * (norm - with_sink).exp()[..., None].to(
                output.dtype
            )
            norms.append(with_sink)  # runs are in packed order, so these line up with the tokens
        norm_1_A_N = torch.cat(norms, 2)
        tensors = (query_1_A_N_D, key_1_G_N_D, value_1_G_N_D, sinks_A)
        ctx.save_for_backward(*tensors, output_1_A_N_D, norm_1_A_N)
        ctx.parts, ctx.scale = parts, scale
        return output_1_A_N_D

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        query, key, value, sinks_A, output, norm = ctx.saved_tensors
        n_shared = query.shape[1] // key.shape[1]
        key_1_A_N_D, value_1_A_N_D = (x.repeat_interleave(n_shared, 1) for x in (key, value))
        sums = [torch.zeros_like(x) for x in (query, key_1_A_N_D, value_1_A_N_D)]
        for rows, seen in ctx.parts:
            for one in seen:
                # Given the output and normalizer of all parts, not of its own, the kernel's softmax
                # is that of the whole row: each part's gradient is right, and they only add up.
                parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    grads[0][:, :, rows],
                    query[:, :, rows],
                    key_1_A_N_D[:, :, one.columns],
                    value_1_A_N_D[:, :, one.columns],
                    output[:, :, rows],
                    norm[:, :, rows],
                    0.0,
                    one.is_causal,
                    attn_mask=one.mask(rows.stop - rows.start, query),
                    scale=ctx.scale,
                )
                places = (rows, one.columns, one.columns)
                for total, part, where in zip(sums, parts, places, strict=True):
                    total[:, :, where] += part
        # The heads that shared a key or value share its gradient.
        by_head = [total.unflatten(1, (-1, n_shared)).sum(2) for total in sums[1:]]
        share_1_A_N = (sinks_A.to(norm.dtype)[None, :, None] - norm).exp()
        of_sinks_A = -(share_1_A_N * (grads[0] * output).sum(-1)).sum((0, 2)).to(sinks_A.dtype)
        return sums[0], *by_head, of_sinks_A, None, None


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

    def __init__(self, tree: PackedTree) -> None:
        super().__init__(tree)
        self._masks: dict[int | None, BlockMask] = {}
        """By window, made once and shared by all layers."""

    def _attend(
        self,
        query_1_A_N_D: Tensor,
        key_1_G_N_D: Tensor,
        value_1_G_N_D: Tensor,
        scale: float,
        window: int | None,
        sinks_A: Tensor | None,
    ) -> Tensor:
        attend = _compiled_flex() if query_1_A_N_D.device.type == "cuda" else flex_attention
        options = {"block_mask": self.block_mask(window), "scale": scale, "enable_gqa": True}
        given = (query_1_A_N_D, key_1_G_N_D, value_1_G_N_D)
        if sinks_A is None:
            return attend(*given, **options)
        output_1_A_N_D, beside = attend(*given, **options, return_aux=AuxRequest(lse=True))
        assert beside.lse is not None
        kept_1_A_N = (beside.lse - sinks_A[None, :, None]).sigmoid()
        return output_1_A_N_D * kept_1_A_N[..., None].to(output_1_A_N_D.dtype)

    def block_mask(self, window: int | None = None) -> BlockMask:
        """Return the tree's block mask for layers with this window."""
        if window not in self._masks:
            positions_N = None if window is None else self.tree.position_ids_N
            self._masks[window] = tree_block_mask(
                self.tree.subtree_end_N, positions_N=positions_N, window=window
            )
        return self._masks[window]


def tree_block_mask(
    subtree_end_N: Tensor,
    *,
    block: int = 128,
    positions_N: Tensor | None = None,
    window: int | None = None,
) -> BlockMask:
    """Compute from the ends of subtrees which blocks of tokens see each other.

    Token `k` is visible from `q` if `k <= q < end[k]`. So some queries of a block see a block of
    earlier keys if the largest end of the keys is after the first query. All queries see it if the
    smallest end is after the last query. `create_block_mask` first makes the mask of all tokens,
    which takes a gibibyte for 32,768 tokens. This needs only one number per pair of blocks.

    Args:
        subtree_end_N: field of a `PackedTree`, on the device of the mask.
        block: number of tokens per block.
        positions_N: position of each token in its own sequence, if there is a window.
        window: how many tokens of its sequence a token sees.
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
    if positions_N is not None and window is not None:
        last = F.pad(positions_N, (0, filler), value=0).view(-1, block).amax(-1)
        first = F.pad(positions_N, (0, filler), value=2**31).view(-1, block).amin(-1)
        is_near_MM = last[:, None] - first[None] < window
        is_seen_MM = (is_seen_MM | is_full_MM) & (first[:, None] - last[None] < window)
        is_full_MM &= is_near_MM
        is_seen_MM &= ~is_full_MM
    is_seen_MM |= torch.eye(n_blocks, dtype=torch.bool, device=device)  # cut by the diagonal

    def is_visible(_batch: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        is_ancestor = (k <= q) & (q < subtree_end_N[k])
        if positions_N is None or window is None:
            return is_ancestor
        return is_ancestor & (positions_N[q] - positions_N[k] < window)

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
