"""Packed pairs against one pair at a time: layout, attention, losses and gradients."""

import random
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import create_block_mask

from trainer.errors import ShapeError, TrainerConfigError
from trainer.losses.tree_attention import (
    ChainAttention,
    FlashTreeAttention,
    FlexAttention,
    _compiled_flex,
    attention_for,
    tree_block_mask,
)
from trainer.losses.tree_layout import PackedTree, pack_pairs, pack_pairs_within

# Two letters make sides that share prefixes, duplicate each other, or contain each other.
tokens = st.lists(st.integers(0, 1), min_size=1, max_size=6)
pair_lists = st.lists(st.tuples(tokens, tokens, tokens), min_size=1, max_size=6)


def trace_pairs(n_states, *, vocab=60, seed=0):
    """Pairs of a session that goes on from its own action at each state."""
    rng = random.Random(seed)

    def some(low, high):
        return [rng.randrange(vocab) for _ in range(rng.randint(low, high))]

    context, pairs = some(1, 12), []
    for _ in range(n_states):
        taken = some(1, 6)
        pairs.append((list(context), some(1, 6), taken))
        context += taken + some(0, 5)
    return pairs


def sides(pairs):
    """(prompt, completion) of every sequence, chosen sides first."""
    return [(p, c) for p, c, _ in pairs] + [(p, r) for p, _, r in pairs]


@given(pair_lists)
@settings(max_examples=150, deadline=None)
def test_every_completion_token_sees_its_own_sequence_and_nothing_else(pairs):
    tree = pack_pairs(pairs)
    visible = tree.visible()
    for sequence, (prompt, completion) in enumerate(sides(pairs)):
        edges = tree.edges_S[tree.sequences_S == sequence]
        assert tree.target_ids_E[edges].tolist() == completion
        for step, predictor in enumerate(tree.predictors_E[edges].tolist()):
            seen = visible[predictor].nonzero()[:, 0]
            assert tree.input_ids_N[seen].tolist() == prompt + completion[:step]
            assert tree.position_ids_N[seen].tolist() == list(range(len(prompt) + step))


@given(pair_lists)
@settings(max_examples=150, deadline=None)
def test_every_shared_token_is_packed_once(pairs):
    prefixes = {tuple((p + c)[: n + 1]) for p, c in sides(pairs) for n in range(len(p) + len(c))}
    tree = pack_pairs(pairs)
    assert tree.n_tokens == len(prefixes)
    assert tree.n_unpacked_tokens == sum(len(p) + len(c) for p, c in sides(pairs))
    assert tree.chosen_lengths.tolist() == [len(c) for _, c, _ in pairs]
    assert tree.rejected_lengths.tolist() == [len(r) for _, _, r in pairs]


@given(pair_lists)
@settings(max_examples=100, deadline=None)
def test_chains_name_the_visible_tokens(pairs):
    tree = pack_pairs(pairs)
    visible = tree.visible()
    rows = []
    for chain in tree.chains:
        before = [index for start, stop in chain.prefix for index in range(start, stop)]
        for row in range(chain.start, chain.stop):
            rows.append(row)
            seen = [*before, *range(chain.start, row + 1)]
            assert visible[row].nonzero()[:, 0].tolist() == seen
    assert rows == list(range(tree.n_tokens))


def test_a_trace_is_one_trunk_with_a_branch_per_state():
    pairs = trace_pairs(30, vocab=10_000)
    tree = pack_pairs(pairs)
    last_prompt, _, last_action = pairs[-1]
    assert tree.chains[0].stop == len(last_prompt) + len(last_action)
    assert tree.n_tokens == len(last_prompt) + len(last_action) + sum(len(c) for _, c, _ in pairs)
    assert len(tree.chains) == 31
    assert all(len(chain.prefix) == 1 for chain in tree.chains[1:])


@given(pair_lists, st.integers(1, 30))
@settings(max_examples=100, deadline=None)
def test_a_token_budget_splits_and_loses_no_pair(pairs, max_tokens):
    trees = pack_pairs_within(pairs, max_tokens=max_tokens)
    assert [idx for tree in trees for idx in tree.pair_idx] == list(range(len(pairs)))
    assert all(tree.n_tokens <= max_tokens or tree.n_pairs == 1 for tree in trees)
    for tree, following in pairwise(trees):
        both = [pairs[idx] for idx in (*tree.pair_idx, following.pair_idx[0])]
        assert pack_pairs(both).n_tokens > max_tokens


def test_pairs_without_a_token_are_refused_by_name():
    with pytest.raises(ShapeError, match="no preference pair"):
        pack_pairs([])
    with pytest.raises(ShapeError, match="pair 1: chosen without a token"):
        pack_pairs([([1], [2], [3]), ([1], [], [3])])
    with pytest.raises(ShapeError, match="pair 0: prompt and rejected without a token"):
        pack_pairs([([], [2], [])])
    with pytest.raises(TrainerConfigError, match="max_tokens=0"):
        pack_pairs_within([([1], [2], [3])], max_tokens=0)


# --- attention -----------------------------------------------------------------------------------
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def projections(tree: PackedTree, *, dtype=torch.float64, requires_grad=True):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(1, n_heads, tree.n_tokens, 16, generator=generator)
        .to(dtype)
        .requires_grad_(requires_grad)
        for n_heads in (4, 2, 2)
    ]


def dense_attention(tree, query, key, value, scale):
    key, value = (x.repeat_interleave(2, 1) for x in (key, value))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=tree.visible(), scale=scale)


@pytest.mark.parametrize("backend", [ChainAttention, FlashTreeAttention])
@pytest.mark.parametrize("seed", range(5))
def test_attention_equals_the_dense_mask_with_gradients(backend, seed):
    pairs = trace_pairs(6, vocab=3, seed=seed)
    tree = pack_pairs(pairs + trace_pairs(2, vocab=3, seed=seed + 100))
    inputs = projections(tree)
    weight = torch.linspace(-1, 1, 16, dtype=torch.float64)
    ours = backend(tree)(*inputs, scale=0.3)
    dense = dense_attention(tree, *inputs, 0.3)
    torch.testing.assert_close(ours, dense)
    torch.testing.assert_close(
        torch.autograd.grad((ours * weight).sum(), inputs),
        torch.autograd.grad((dense * weight).sum(), inputs),
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("device", DEVICES)
def test_flex_attention_equals_the_dense_mask(device):
    tree = pack_pairs(trace_pairs(6, vocab=3)).to(device)
    inputs = [
        projection.to(device)
        for projection in projections(tree, dtype=torch.float32, requires_grad=False)
    ]
    ours = FlexAttention(tree)(*inputs, scale=0.3)
    torch.testing.assert_close(ours, dense_attention(tree, *inputs, 0.3))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.parametrize("device", DEVICES)
def test_one_compilation_serves_trees_of_all_lengths(device):
    """A compilation takes longer than a step; and the compiled kernel skips what a mask says."""
    torch._dynamo.reset()
    counters.clear()
    for n_states in (9, 12, 17):
        pairs = [([1] * 600 + prompt, *both) for prompt, *both in trace_pairs(n_states)]
        tree = pack_pairs(pairs).to(device)
        query, key, value = (
            projection.to(device)
            for projection in projections(tree, dtype=torch.float32, requires_grad=False)
        )
        ours = _compiled_flex()(
            query,
            key,
            value,
            block_mask=tree_block_mask(tree.subtree_end_N),
            scale=0.3,
            enable_gqa=True,
        )
        torch.testing.assert_close(ours, dense_attention(tree, query, key, value, 0.3))
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("block", [16, 128])
def test_the_mask_by_blocks_is_that_of_all_tokens(seed, block):
    tree = pack_pairs(trace_pairs(12, vocab=3, seed=seed) + trace_pairs(8, seed=seed + 50))
    ends = tree.subtree_end_N
    ours = tree_block_mask(ends, block=block)
    dense = create_block_mask(
        lambda _b, _h, q, k: (k <= q) & (q < ends[k]),
        None,
        None,
        tree.n_tokens,
        tree.n_tokens,
        device="cpu",
        BLOCK_SIZE=block,
    )
    assert torch.equal(ours.to_dense(), dense.to_dense())
    assert torch.equal(ours.full_kv_num_blocks, dense.full_kv_num_blocks)
    for name in ("kv", "full_kv", "q", "full_q"):
        counts = getattr(dense, f"{name}_num_blocks")
        assert torch.equal(getattr(ours, f"{name}_num_blocks"), counts)
        listed, right = (getattr(mask, f"{name}_indices") for mask in (ours, dense))
        for row, n in enumerate(counts[0, 0].tolist()):
            assert listed[0, 0, row, :n].tolist() == right[0, 0, row, :n].tolist()
    assert ours.seq_lengths == dense.seq_lengths


def test_the_device_chooses_the_backend():
    tree = pack_pairs(trace_pairs(2))
    assert isinstance(attention_for(tree), FlashTreeAttention)
    assert isinstance(attention_for(tree.to("meta")), ChainAttention)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_joining_parts_of_a_long_prefix_keeps_precision(dtype):
    tree = pack_pairs([([7] * 700, [1, 2, 3], [4, 5]), ([7] * 700 + [4, 5, 6], [1], [2])])
    inputs = projections(tree, dtype=dtype, requires_grad=False)
    exact = dense_attention(tree, *(x.double() for x in inputs), 0.3)
    ours = FlashTreeAttention(tree)(*inputs, scale=0.3)
    assert ours.dtype == dtype
    tolerance = (
        {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    )
    torch.testing.assert_close(ours.double(), exact, **tolerance)


def test_to_moves_every_tensor():
    tree = pack_pairs(trace_pairs(3)).to("meta")
    on_meta = [name for name in tree.__slots__ if isinstance(getattr(tree, name), torch.Tensor)]
    assert len(on_meta) == 8
    assert all(getattr(tree, name).device.type == "meta" for name in on_meta)
