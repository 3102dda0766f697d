"""Which split a conversation belongs to: decided by its hash, and the same for ever."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "test"]
SPLITS: tuple[Split, ...] = ("train", "test")


def sha_of(name: str) -> str:
    """Return the hash under which a session, a conversation or a project is in the manifests."""
    return hashlib.sha256(name.encode()).hexdigest()[:32]


def position(sha: str) -> float:
    """Return where a hash lies, from 0 to 1: below the test fraction is the test split."""
    return int(sha[:13], 16) / 16**13


def joined(*sides: Mapping[str, Split]) -> dict[str, Split]:
    """Return the sides of all together: what was ever in train is in train."""
    known: dict[str, Split] = {}
    for each in sides:
        for sha, side in each.items():
            known[sha] = "train" if known.get(sha) == "train" else side
    return known


@dataclass(frozen=True, slots=True)
class ConversationSplit:
    """Splits whole conversations, so that train and test never share one."""

    test_fraction: float
    sides: Mapping[str, Split]
    """Conversations and projects, by hash, whose side is known: they were published, or set down."""

    def of(self, conversation: str) -> Split:
        """Return the split of a conversation."""
        sha = sha_of(conversation)
        return self.sides.get(sha) or self._by_hash(sha)

    def _by_hash(self, sha: str) -> Split:
        return "test" if position(sha) < self.test_fraction else "train"

    @classmethod
    def over(
        cls,
        projects: Mapping[str, str | None],
        *,
        test_fraction: float,
        sides: Mapping[str, Split],
    ) -> "ConversationSplit":
        """Return a split that keeps every side that is known.

        Conversations of one project come to one side: that of the project, else train if one of
        them is in train, else test if one is in test, else by the hash of the project. When all
        that is known and all that is new falls on one side, the new one whose hash lies nearest to
        the other side is put there.

        Args:
            projects: the conversations at hand, each with its project, or `None` where every
                conversation is decided by itself.
            test_fraction: share of what is new for the test split; at 0 all of it is train.
            sides: conversations and projects, by hash, that were published before.
        """
        members: dict[str, list[str]] = {}
        for conversation, project in sorted(projects.items()):
            members.setdefault(project or conversation, []).append(conversation)
        by_hash = cls(test_fraction, {})
        placed, new = dict(sides), []
        for unit, conversations in members.items():
            shas = list(map(sha_of, conversations))
            known = {sides[sha] for sha in shas if sha in sides}
            if sha_of(unit) in sides:
                known = {sides[sha_of(unit)]}
            side: Split = "train" if "train" in known else "test" if known else by_hash.of(unit)
            for sha in (sha_of(unit), *shas):
                placed.setdefault(sha, side)
            if not known:
                new.append(unit)
        filled = {*placed.values()}
        if test_fraction and new and len(filled) == 1 and len(members) + len(sides) > 1:
            new.sort(key=lambda unit: position(sha_of(unit)))
            lacks: Split = "train" if filled == {"test"} else "test"
            unit = new[0] if lacks == "test" else new[-1]
            placed |= dict.fromkeys(map(sha_of, [unit, *members[unit]]), lacks)
        return cls(test_fraction, placed)


def sides_in(manifest: Mapping[str, Iterable[str]]) -> dict[str, Split]:
    """Return the side of each hash, from hashes by side."""
    return joined(*(dict.fromkeys(manifest.get(side, ()), side) for side in SPLITS))
