"""Packed pairs against one pair at a time: layout, attention, losses and gradients."""

import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.told import told_by
from trainer.errors import ShapeError
from trainer.model.tree_attention import (
    FlashTreeAttention,
    FlexAttention,
    _compiled_flex,
    tree_block_mask,
)
from trainer.model.tree_layout import (
    Chain,
    PackedTree,
    pack_pairs,
    pack_pairs_within,
)

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


@given(pair_lists, st.integers(1, 30))
@settings(max_examples=100, deadline=None)
def test_a_token_budget_splits_and_loses_no_pair(pairs, max_tokens):
    trees = pack_pairs_within(pairs, max_tokens=max_tokens)
    assert [idx for tree in trees for idx in tree.pair_idx] == list(range(len(pairs)))
    assert all(tree.n_tokens <= max_tokens or tree.n_pairs == 1 for tree in trees)
    for tree, following in pairwise(trees):
        both = [pairs[idx] for idx in (*tree.pair_idx, following.pair_idx[0])]
        assert pack_pairs(both).n_tokens > max_tokens


TWO_PAIRS = [([1, 2], [3, 4], [3, 5]), ([1, 2, 3, 4], [6], [7])]
"""The second goes on from what the first chose."""
ROLLOUTS = [([1, 2], [8, 9]), ([1], [2, 3]), ([1, 2], [])]


def test_a_small_tree_is_laid_out_as_by_hand():
    tree = pack_pairs(TWO_PAIRS, sequences=ROLLOUTS)
    tensors = {
        "input_ids_N": [1, 2, 3, 4, 6, 7, 5, 8, 9],  # the longest way first, then back up
        "position_ids_N": [0, 1, 2, 3, 4, 4, 3, 2, 3],
        "subtree_end_N": [9, 9, 7, 6, 5, 6, 7, 9, 9],
        # Of 3, 4, 6, 7 and 5: the first token of a branch is predicted from where it forked.
        "target_ids_E": [3, 4, 6, 7, 5],
        "predictors_E": [1, 2, 3, 3, 2],
        # Chosen 3 4, chosen 6, rejected 3 5, rejected 7.
        "edges_S": [0, 1, 2, 0, 4, 3],
        "sequences_S": [0, 0, 1, 2, 2, 3],
        "lengths_2B": [2, 1, 2, 1],
    }
    assert {name: getattr(tree, name).tolist() for name in tensors} == tensors
    assert all(getattr(tree, name).dtype == torch.long for name in tensors)
    assert tree.chains == (
        Chain(0, 5, ()),
        Chain(5, 6, ((0, 4),)),
        Chain(6, 7, ((0, 3),)),
        Chain(7, 9, ((0, 2),)),
    )
    assert [one.tolist() for one in tree.predictors_R] == [[1, 7], [0, 1], []]
    assert (tree.n_pairs, tree.pair_idx, tree.n_tokens, tree.n_positions) == (2, (0, 1), 9, 5)
    assert tree.n_unpacked_tokens == (4 + 4) + (5 + 5) + (4 + 3 + 2)
    assert tree.chosen_lengths.tolist() == [2, 1]
    assert tree.rejected_lengths.tolist() == [2, 1]
    chosen, rejected = tree.sum_logps(torch.tensor([-1.0, -2.0, -4.0, -8.0, -16.0]))
    assert (chosen.tolist(), rejected.tolist()) == ([-1 - 2, -4], [-1 - 16, -8])


def test_sequences_alone_can_be_packed():
    tree = pack_pairs([], sequences=ROLLOUTS)
    assert tree.input_ids_N.tolist() == [1, 2, 8, 9, 3]
    assert (tree.n_pairs, tree.n_unpacked_tokens) == (0, 9)
    assert [one.tolist() for one in tree.predictors_R] == [[1, 2], [0, 1], []]
    (within,) = pack_pairs_within([], max_tokens=1, sequences=ROLLOUTS)
    assert torch.equal(within.input_ids_N, tree.input_ids_N)
    chosen, rejected = tree.sum_logps(torch.zeros(0))
    assert (chosen.tolist(), rejected.tolist()) == ([], [])


@pytest.mark.parametrize(
    "pack", [pack_pairs, lambda *a, **o: pack_pairs_within(*a, max_tokens=9, **o)]
)
def test_pairs_without_a_token_are_refused_by_name(pack):
    why = (
        " without a token; the first token of a completion is predicted from the prompt, so every "
        "side needs one"
    )
    assert told_by(ShapeError, pack, []) == "no preference pair to pack"
    assert told_by(ShapeError, pack, [([1], [2], [3]), ([1], [], [3])]) == "pair 1: chosen" + why
    assert told_by(ShapeError, pack, [([], [2], [])]) == "pair 0: prompt and rejected" + why
    assert told_by(ShapeError, pack, [([1], [2], [3])], sequences=[([1], [2]), ([], [2])]) == (
        "a sequence has no prompt, so its first token can't be predicted"
    )


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


def written_out(tree, query, key, value, scale, window, sinks):
    """Every score, each in its place; a sink is one more of them, without a value."""
    key, value = (x.repeat_interleave(2, 1) for x in (key, value))
    at = tree.position_ids_N
    seen = tree.visible() & (at[:, None] - at[None] < (window or tree.n_positions))
    scores = (query @ key.mT * scale).masked_fill(~seen, -torch.inf)
    if sinks is None:
        return scores.softmax(-1) @ value
    beside = sinks[None, :, None, None].expand(*scores.shape[:3], 1)
    return torch.cat([scores, beside], -1).softmax(-1)[..., :-1] @ value


@pytest.mark.parametrize("window", [None, 1, 3, 7, 40])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_windows_and_sinks_are_those_of_every_score_with_gradients(
    monkeypatch, window, has_sinks, seed
):
    monkeypatch.setattr("trainer.model.tree_attention._ROWS", 5)  # several runs in a chain
    tree = pack_pairs(trace_pairs(5, vocab=3, seed=seed) + trace_pairs(3, vocab=3, seed=seed + 50))
    inputs = projections(tree)
    sinks = torch.linspace(-1, 2, 4, dtype=torch.float64).requires_grad_() if has_sinks else None
    weight = torch.linspace(-1, 1, 16, dtype=torch.float64)
    ours = FlashTreeAttention(tree)(*inputs, scale=0.3, window=window, sinks_A=sinks)
    expected = written_out(tree, *inputs, 0.3, window, sinks)
    torch.testing.assert_close(ours, expected)
    leaves = [*inputs, sinks] if has_sinks else inputs
    torch.testing.assert_close(
        torch.autograd.grad((ours * weight).sum(), leaves),
        torch.autograd.grad((expected * weight).sum(), leaves),
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 9, 150])
def test_the_flexible_kernel_knows_windows_and_sinks(window):
    pairs = [([1] * 200 + prompt, *both) for prompt, *both in trace_pairs(6)]
    tree = pack_pairs(pairs)
    inputs = projections(tree, dtype=torch.float32, requires_grad=False)
    sinks = torch.linspace(-1, 2, 4)
    ours = FlexAttention(tree)(*inputs, scale=0.3, window=window, sinks_A=sinks)
    torch.testing.assert_close(
        ours, written_out(tree, *inputs, 0.3, window, sinks), atol=1e-5, rtol=1e-4
    )


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
        torch.testing.assert_close(ours, written_out(tree, query, key, value, 0.3, None, None))
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


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements that any operation gave out."""

    n_elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for one in torch.utils._pytree.tree_leaves(found):
            if isinstance(one, torch.Tensor):
                self.n_elements = max(self.n_elements, one.numel())
        return found


def long_tree(n_tokens):
    """A session of so many packed tokens: a trunk, and a branch of 64 tokens every 1,024."""
    trunk = list(range(n_tokens - 64 * (n_tokens // 1024)))
    ends = range(960, len(trunk) + 1, 960)
    return pack_pairs([(trunk[:end], [-1] * 64, trunk[end : end + 1] or [-2]) for end in ends])


@pytest.mark.parametrize("n_tokens", [8_192, 32_768])
def test_attention_over_a_long_tree_makes_no_mask_of_all_tokens(n_tokens):
    """By shapes, on `meta`: what grows is the projections, and a number for each two blocks."""
    tree = long_tree(n_tokens)
    n, n_heads, n_dims = tree.n_tokens, 4, 8
    assert n == pytest.approx(n_tokens, rel=0.02)
    sides = [
        torch.empty(1, heads, n, n_dims, device="meta", requires_grad=True)
        for heads in (n_heads, 2, 2)
    ]
    with LargestTensor() as seen:
        FlashTreeAttention(tree)(*sides, scale=1.0).sum().backward()
    assert seen.n_elements == n * n_heads * n_dims
    assert all(side.grad is not None for side in sides)
    with LargestTensor() as seen:
        mask = tree_block_mask(tree.subtree_end_N)
    n_blocks = -(-n // 128)
    assert seen.n_elements <= max(n_blocks * (n_blocks + 1), n_blocks * 128)
    # Of 32,768 tokens a mask of all of them has 2**30 numbers, and this one 2**18.
    held = [mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices]
    assert sum(one.numel() for one in held) == 2 * n_blocks * (n_blocks + 1)
