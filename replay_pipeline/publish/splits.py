"""Assign each conversation to a split by its hash. The assignment never changes.

Conversations that share a message go to one split.
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

from replay_pipeline.publish import layout

Split = Literal["train", "test"]
SPLITS: tuple[Split, ...] = ("train", "test")


def name_sha(name: str) -> str:
    """Return the hash that stands for a session or a conversation in the manifests."""
    return hashlib.sha256(name.encode()).hexdigest()[:32]


def position(sha: str) -> float:
    """Return the position of a hash, from 0 to 1. Positions below the test fraction belong to the test split."""
    return int(sha[:13], 16) / 16**13


def joined_splits(*sides: Mapping[str, Split]) -> dict[str, Split]:
    """Return the splits of joined conversations. One that was ever in train stays in train."""
    known: dict[str, Split] = {}
    for each in sides:
        for sha, side in each.items():
            known[sha] = "train" if known.get(sha) == "train" else side
    return known


@dataclass(frozen=True, slots=True)
class ConversationSplit:
    """The split of whole conversations, so that train and test never share one."""

    test_fraction: float
    sides: Mapping[str, Split]
    """Known splits of conversations by hash, from earlier publications or this one."""

    def of(self, conversation: str) -> Split:
        """Return the split of a conversation."""
        sha = name_sha(conversation)
        return self.sides.get(sha) or ("test" if position(sha) < self.test_fraction else "train")

    @classmethod
    def over(
        cls,
        conversations: Iterable[str],
        *,
        test_fraction: float,
        sides: Mapping[str, Split],
        ties: Iterable[Iterable[str]] = (),
    ) -> "ConversationSplit":
        """Return a split that keeps every known assignment.

        Conversations that belong together go to one split: to train if one of them is in train,
        else to test if one is in test, else by the hash of the first. If everything would fall into
        one split, the new group nearest to the other split moves there.

        Args:
            conversations: the conversations.
            test_fraction: share of new conversations for the test split. With 0, all go to train.
            sides: splits of earlier published conversations and ties, by hash.
            ties: further groups that belong together: a long message, and the conversations with
                it.
        """
        together = _Together()
        for conversation in conversations:
            together.tie([conversation])
        for names in ties:
            together.tie(names)
        by_hash = cls(test_fraction, {})
        placed, new = dict(sides), list[list[str]]()
        for unit in together.units():
            shas = list(map(name_sha, unit))
            known = {sides[sha] for sha in shas if sha in sides}
            side: Split = "train" if "train" in known else "test" if known else by_hash.of(unit[0])
            for sha in shas:
                placed.setdefault(sha, side)
            if not known:
                new.append(shas)
        filled = {*placed.values()}
        if test_fraction and new and len(filled) == 1 and len(new) + len(sides) > 1:
            new.sort(key=lambda shas: position(shas[0]))
            lacks: Split = "train" if filled == {"test"} else "test"
            placed |= dict.fromkeys(new[0] if lacks == "test" else new[-1], lacks)
        return cls(test_fraction, placed)


class _Together:
    """Names that belong together, directly or by others."""

    def __init__(self) -> None:
        self._above: dict[str, str] = {}
        self._order: dict[str, int] = {}

    def tie(self, names: Iterable[str]) -> None:
        """Tie these names to each other."""
        first, *others = [self._top(name) for name in names]
        for other in others:
            if other != first:
                first, other = sorted([first, other], key=self._order.__getitem__)
                self._above[other] = first

    def units(self) -> Iterable[list[str]]:
        """Return what belongs together, in the order in which it was first named."""
        units: dict[str, list[str]] = {}
        for name in self._order:
            units.setdefault(self._top(name), []).append(name)
        return units.values()

    def _top(self, name: str) -> str:
        self._order.setdefault(name, len(self._order))
        while (above := self._above.get(name, name)) != name:
            name = above
        return name


def sides_in(manifest: Mapping[str, Iterable[str]]) -> dict[str, Split]:
    """Return the split of each hash, from hashes by split."""
    return joined_splits(*(dict.fromkeys(manifest.get(side, ()), side) for side in SPLITS))


MAX_SHARING = 3
"""The most conversations that share a message. A message in more of them comes from a program."""


def conversations_of(tables: Iterable[pa.Table]) -> list[str]:
    """Return the conversations in these tables once, in order."""
    return list(dict.fromkeys(each for table in tables for each in layout.conversations_in(table)))


def long_messages(
    keys: Iterable[str],
    belong: Collection[str],
    messages: Callable[[str], Mapping[str, Collection[str]]] | None,
) -> dict[str, set[str]]:
    """Return the long messages of these conversations."""
    said: dict[str, set[str]] = {}
    if messages is None:
        return said
    for key in sorted(keys):
        for name, hashes in messages(key).items():
            if name in belong:
                said.setdefault(name, set()).update(hashes)
    return said


def shared(
    said: Mapping[str, Iterable[str]], n_published: Mapping[str, int]
) -> Iterator[list[str]]:
    """Yield each shared message with its conversations, without common messages."""
    having: dict[str, list[str]] = {}
    for name, hashes in said.items():
        for each in sorted(hashes):
            having.setdefault(each, []).append(name)
    for each, names in having.items():
        n_elsewhere = n_published.get(name_sha(each), 0)
        if 1 < len(names) + n_elsewhere <= MAX_SHARING:
            yield [*names, each]
