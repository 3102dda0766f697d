"""Which split a session belongs to: decided by its hash, and the same for ever."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "test"]
SPLITS: tuple[Split, ...] = ("train", "test")


def session_sha(session_id: str) -> str:
    """Give the hash under which a session is known in the dataset's manifests."""
    return hashlib.sha256(session_id.encode()).hexdigest()[:32]


def position(sha: str) -> float:
    """Tell where a session hash lies, from 0 to 1: below the test fraction is the test split."""
    return int(sha[:13], 16) / 16**13


@dataclass(frozen=True, slots=True)
class SessionSplit:
    """Splits whole sessions, so that train and test never share one."""

    test_fraction: float
    pins: Mapping[str, Split]
    """Sessions (by hash) that were put on a side so that no side stays empty."""

    def of(self, session_id: str) -> Split:
        """Give the split of a session."""
        sha = session_sha(session_id)
        by_hash: Split = "test" if position(sha) < self.test_fraction else "train"
        return self.pins.get(sha, by_hash)

    @classmethod
    def over(
        cls,
        session_ids: Iterable[str],
        *,
        test_fraction: float,
        pins: Mapping[str, Split],
        published: Iterable[Split] = (),
    ) -> "SessionSplit":
        """Give a split under which neither side is empty, given at least two sessions.

        When every session falls on one side, the session whose hash lies nearest to the other side
        is pinned there. Pins are kept with the dataset, so a session never changes its side later.

        Args:
            session_ids: the sessions at hand.
            test_fraction: share of sessions for the test split; at 0 everything is train.
            pins: the pins that earlier publications made.
            published: the splits that other published sessions have filled.
        """
        split = cls(test_fraction, dict(pins))
        sessions = set(session_ids)
        filled = {split.of(session) for session in sessions} | set(published)
        if test_fraction == 0 or len(sessions) < 2 or len(filled) == len(SPLITS):
            return split
        shas = sorted(map(session_sha, sessions), key=position)
        pinned: dict[str, Split] = (
            {shas[0]: "test"} if "test" not in filled else {shas[-1]: "train"}
        )
        return cls(test_fraction, {**pins, **pinned})
