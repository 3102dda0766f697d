"""Pack the preference pairs of a trace into one prefix tree, with each shared token only once.

The states of a session are prefixes of each other, and the session continues with the rejected
action of each state. So a trace of T states is one trunk with T short branches. Without the tree,
the whole prefix would run 2 T times.

Tokens are in pre-order, with the longest continuation of a node first. So a root-to-leaf path is
mostly one contiguous *chain*. And the whole attention mask is one condition: token `k` is visible
from token `q` exactly if `k <= q < subtree_end_N[k]`.

The tree is built on runs of tokens (a radix tree), so that prefixes are compared as lists and not
token by token in the interpreter. The result is exact: a token sees the same tokens, at the same
positions, as in its own sequence.

Shapes: `N` packed tokens, `E` predicted tokens (each once, however many sequences share it), `S`
completion tokens of all sequences, `B` pairs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trainer.errors import ShapeError, TrainerConfigError

TokenPair = tuple[Sequence[int], Sequence[int], Sequence[int]]
"""Token ids of the prompt, the chosen completion, and the rejected completion."""

TokenSequence = tuple[Sequence[int], Sequence[int]]
"""Token ids of prompt and completion."""


@dataclass(frozen=True, slots=True)
class Chain:
    """A contiguous run of packed tokens that continue each other, and its ancestors."""

    start: int
    stop: int
    prefix: tuple[tuple[int, int], ...]
    """Packed ranges of the ancestors, root first. Empty for a chain that starts a tree."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedTree:
    """Preference pairs, packed. Made by `pack_pairs`."""

    input_ids_N: Tensor
    position_ids_N: Tensor
    """Position of each token in its own sequence."""
    subtree_end_N: Tensor
    """For each token, the packed index after its last descendant."""
    chains: tuple[Chain, ...]
    predictors_E: Tensor
    """Packed index of the token whose state predicts `target_ids_E`."""
    target_ids_E: Tensor
    edges_S: Tensor
    """For each completion token, its row in `target_ids_E`."""
    sequences_S: Tensor
    """For each completion token, its sequence. For pair b, chosen is b and rejected is B + b."""
    lengths_2B: Tensor
    """Number of completion tokens of each sequence."""
    pair_idx: tuple[int, ...]
    """Indexes of these pairs among the given ones, in order."""
    n_unpacked_tokens: int
    """Number of tokens without packing."""
    n_positions: int
    """Number of tokens of the longest sequence."""
    predictors_R: tuple[Tensor, ...] = ()
    """For each further sequence, the packed indexes of the tokens whose states predict its completion."""

    @property
    def n_pairs(self) -> int:
        """Number of pairs, `B`."""
        return len(self.pair_idx)

    @property
    def n_tokens(self) -> int:
        """Number of packed tokens, `N`."""
        return len(self.input_ids_N)

    @property
    def chosen_lengths(self) -> Tensor:
        """Return the number of completion tokens of each chosen side."""
        return self.lengths_2B[: self.n_pairs]

    @property
    def rejected_lengths(self) -> Tensor:
        """Return the number of completion tokens of each rejected side."""
        return self.lengths_2B[self.n_pairs :]

    def to(self, device: torch.device | str) -> "PackedTree":
        """Return a copy of the tree with its tensors on `device`."""
        names = [name for name in self.__slots__ if isinstance(getattr(self, name), Tensor)]
        # What is copied from the CPU is staged at once: nobody need wait until it has arrived.
        move = partial(Tensor.to, device=device, non_blocking=True)
        moved: dict[str, Any] = {name: move(getattr(self, name)) for name in names}
        return replace(self, **moved, predictors_R=tuple(move(one) for one in self.predictors_R))

    def sum_logps(self, logps_E: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities of the chosen and rejected completions, as sums over their tokens."""
        sums_2B = logps_E.new_zeros(2 * self.n_pairs)
        sums_2B = sums_2B.index_add(0, self.sequences_S, logps_E[self.edges_S])
        return sums_2B[: self.n_pairs], sums_2B[self.n_pairs :]

    def visible(self) -> Tensor:
        """Return the dense attention mask: `[q, k]` is true if token q sees token k."""
        index_N = torch.arange(self.n_tokens, device=self.input_ids_N.device)
        is_before_N_N = index_N[None, :] <= index_N[:, None]
        return is_before_N_N & (index_N[:, None] < self.subtree_end_N[None, :])


def pack_pairs(
    pairs: Sequence[TokenPair], *, sequences: Sequence[TokenSequence] = ()
) -> PackedTree:
    """Pack all prompts and completions of `pairs` into one tree.

    `sequences` are included, for example rollouts at states of the same trace. If sequences don't
    share their first token, the tree becomes a forest, which is still exact.
    """
    tree = _tree_of(sequences)
    for pair in _checked(pairs, sequences):
        tree.add_pair(pair)
    return _lay_out(tree, pairs, range(len(pairs)), sequences)


def _tree_of(sequences: Sequence[TokenSequence]) -> "_RadixTree":
    tree = _RadixTree()
    for prompt, completion in sequences:
        tree.add([*prompt, *completion])
    return tree


def pack_pairs_within(
    pairs: Sequence[TokenPair], *, max_tokens: int, sequences: Sequence[TokenSequence] = ()
) -> list[PackedTree]:
    """Pack pairs into trees of at most `max_tokens` packed tokens, each pair once.

    Pairs are taken in order, and a new tree starts if the next pair would exceed the budget. A
    shared prefix then runs once per tree. A pair that alone exceeds the budget gets its own tree:
    check `n_tokens` if that must not happen. All `sequences` go into the first tree, regardless of
    the budget.

    Raises:
        ShapeError: there is nothing to pack, or a prompt or a pair's completion is empty.
        TrainerConfigError: `max_tokens` is not positive.
    """
    if max_tokens < 1:
        raise TrainerConfigError(f"max_tokens={max_tokens}: must be at least 1")
    groups: list[list[int]] = [[]]
    tree = _tree_of(sequences)
    for idx, pair in enumerate(_checked(pairs, sequences)):
        if tree.n_tokens and tree.n_tokens + tree.n_new_tokens(pair) > max_tokens:
            groups.append([])
            tree = _RadixTree()
        tree.add_pair(pair)
        groups[-1].append(idx)
    first, *others = [[pairs[idx] for idx in group] for group in groups]
    trees = [pack_pairs(first, sequences=sequences), *map(pack_pairs, others)]
    return [replace(tree, pair_idx=tuple(group)) for tree, group in zip(trees, groups, strict=True)]


def _checked(
    pairs: Sequence[TokenPair], sequences: Sequence[TokenSequence]
) -> Iterator[tuple[list[int], list[int], list[int]]]:
    if not pairs and not sequences:
        raise ShapeError("no preference pair to pack")
    if not all(len(prompt) for prompt, _ in sequences):
        raise ShapeError("a sequence has no prompt, so its first token can't be predicted")
    for idx, (prompt, chosen, rejected) in enumerate(pairs):
        lengths = {"prompt": len(prompt), "chosen": len(chosen), "rejected": len(rejected)}
        empty = [side for side, length in lengths.items() if length == 0]
        if empty:
            raise ShapeError(
                f"pair {idx}: {' and '.join(empty)} without a token; the first token of a "
                "completion is predicted from the prompt, so every side needs one"
            )
        yield list(prompt), list(chosen), list(rejected)


# --- the radix tree ------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Run:
    """A node: tokens without a fork between them, and what follows by first token."""

    tokens: list[int]
    children: dict[int, "_Run"] = field(default_factory=dict)
    depth: int = 0
    height: int = 0
    start: int = 0
    end: int = 0

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)

    def split(self, n_kept: int) -> None:
        lower = _Run(self.tokens[n_kept:], self.children)
        self.tokens, self.children = self.tokens[:n_kept], {lower.tokens[0]: lower}

    def by_height(self) -> list["_Run"]:
        return sorted(self.children.values(), key=lambda child: -child.height)


class _RadixTree:
    def __init__(self) -> None:
        self.root = _Run([])
        self.n_tokens = 0

    def add_pair(self, pair: tuple[list[int], list[int], list[int]]) -> None:
        prompt, chosen, rejected = pair
        for completion in (chosen, rejected):
            self.add(prompt + completion)

    def n_new_tokens(self, pair: tuple[list[int], list[int], list[int]]) -> int:
        """Count the tokens that `add_pair` would add."""
        prompt, chosen, rejected = pair
        n_new = sum(
            len(prompt + side) - self._n_known(prompt + side) for side in (chosen, rejected)
        )
        # What the two sides share is new only once.
        n_shared = len(prompt) + common_prefix(chosen, rejected)
        return n_new - max(0, n_shared - self._n_known(prompt + chosen))

    def _n_known(self, ids: list[int]) -> int:
        *_, (_, n_matched, depth) = self._descend(ids)
        return depth + n_matched

    def _descend(self, ids: list[int]) -> Iterator[tuple[_Run, int, int]]:
        """Follow `ids`: runs, how many of a run's tokens match, and the depth it starts at."""
        run, n_matched, depth = self.root, 0, 0
        yield run, n_matched, depth
        while n_matched == len(run.tokens) and depth + n_matched < len(ids):
            depth += n_matched
            child = run.children.get(ids[depth])
            if child is None:
                return
            run = child
            n_matched = common_prefix(run.tokens, ids[depth : depth + len(run.tokens)])
            yield run, n_matched, depth

    def add(self, ids: list[int]) -> None:
        *_, (run, n_matched, depth) = self._descend(ids)
        depth += n_matched
        if depth == len(ids):
            return
        if n_matched < len(run.tokens):
            run.split(n_matched)
        run.children[ids[depth]] = _Run(ids[depth:])
        self.n_tokens += len(ids) - depth

    def runs(self) -> list[_Run]:
        """List every run, a parent before its children, siblings in no order that matters."""
        runs, stack = [], list(self.root.children.values())
        while stack:
            runs.append(run := stack.pop())
            stack.extend(run.children.values())
        return runs


def common_prefix(left: list[int], right: list[int]) -> int:
    """Return the length of the common prefix, found by bisection, because list comparisons are faster than loops."""
    low, high = 0, min(len(left), len(right))
    if left[:high] == right[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


# --- the layout ----------------------------------------------------------------------------------


def _lay_out(
    tree: _RadixTree,
    pairs: Sequence[TokenPair],
    pair_idx: Sequence[int],
    sequences: Sequence[TokenSequence],
) -> PackedTree:
    for run in reversed(tree.runs()):
        child_heights = (child.height for child in run.children.values())
        run.height = len(run.tokens) + max(child_heights, default=0)
    runs, chains = _pre_order(tree.root)
    for run in reversed(runs):
        run.end = max([run.stop, *(child.end for child in run.children.values())])
    lengths = torch.tensor([len(run.tokens) for run in runs])
    positions_S, sequences_S, lengths_2B = _completions(tree, pairs)
    targets_E, edges_S = torch.unique(positions_S, return_inverse=True)
    parents_N = _parents(runs)
    input_ids_N = torch.tensor([token for run in runs for token in run.tokens])
    position_ids_N = torch.cat(
        [torch.arange(run.depth, run.depth + len(run.tokens)) for run in runs]
    )
    return PackedTree(
        input_ids_N=input_ids_N,
        position_ids_N=position_ids_N,
        subtree_end_N=torch.tensor([run.end for run in runs]).repeat_interleave(lengths),
        chains=chains,
        predictors_E=parents_N[targets_E],
        target_ids_E=input_ids_N[targets_E],
        edges_S=edges_S,
        sequences_S=sequences_S,
        lengths_2B=lengths_2B,
        pair_idx=tuple(pair_idx),
        n_unpacked_tokens=sum(2 * len(p) + len(c) + len(r) for p, c, r in pairs)
        + sum(len(p) + len(c) for p, c in sequences),
        n_positions=max((run.depth + len(run.tokens) for run in runs), default=0),
        predictors_R=tuple(parents_N[_positions(tree, *one)] for one in sequences),
    )


def _pre_order(root: _Run) -> tuple[list[_Run], tuple[Chain, ...]]:
    """List runs in packed order, with `start` and `depth` set, and the chains they form."""
    runs: list[_Run] = []
    chains: list[Chain] = []
    n_packed = 0
    heads = [(tree, 0, ()) for tree in reversed(root.by_height())]
    while heads:
        run, depth, prefix = heads.pop()
        start = n_packed
        while True:
            run.start, run.depth = n_packed, depth
            runs.append(run)
            n_packed, depth = run.stop, depth + len(run.tokens)
            children = run.by_height()
            # Deeper forks must be emitted first: the stack gives back the last one pushed.
            branch_prefix = (*prefix, (start, n_packed))
            heads += [(child, depth, branch_prefix) for child in reversed(children[1:])]
            if not children:
                break
            run = children[0]
        chains.append(Chain(start, n_packed, prefix))
    return runs, tuple(chains)


def _parents(runs: list[_Run]) -> Tensor:
    """Return the packed index of each token's predecessor; -1 for the first token of a sequence."""
    parents_N = torch.arange(-1, runs[-1].stop - 1)
    for run in runs:
        if run.depth == 0:
            parents_N[run.start] = -1
        for child in run.children.values():
            parents_N[child.start] = run.stop - 1
    return parents_N


def _completions(tree: _RadixTree, pairs: Sequence[TokenPair]) -> tuple[Tensor, Tensor, Tensor]:
    """Find packed index and sequence of every completion token, chosen sides first; and lengths."""
    sides = [(prompt, chosen) for prompt, chosen, _ in pairs]
    sides += [(prompt, rejected) for prompt, _, rejected in pairs]
    lengths_2B = torch.tensor([len(completion) for _, completion in sides], dtype=torch.long)
    sequences_S = torch.arange(len(sides)).repeat_interleave(lengths_2B)
    positions = [_positions(tree, prompt, completion) for prompt, completion in sides]
    return torch.cat([lengths_2B.new_empty(0), *positions]), sequences_S, lengths_2B


def _positions(tree: _RadixTree, prompt: Sequence[int], completion: Sequence[int]) -> Tensor:
    """Find the packed index of every token of a completion."""
    ids = [*prompt, *completion]
    run, depth = tree.root, 0
    pieces = [torch.empty(0, dtype=torch.long)]
    while depth < len(ids):
        run = run.children[ids[depth]]
        stop = min(depth + len(run.tokens), len(ids))
        first = max(depth, len(prompt))
        if first < stop:
            pieces.append(torch.arange(run.start + first - depth, run.start + stop - depth))
        depth = stop
    return torch.cat(pieces)
