"""Fragments: exchange one part of the parameters while the next inner steps run.

The parameters are divided into P parts, and each part has its own outer loop in a folder of the
store. P times per round, the exchange of one fragment starts in the background. Its result is
adopted when the next exchange starts, and the training in between is kept. The times depend only on
steps and never on the speed of the store, so synchronous rounds give equal bits.

Source: Douillard et al. 2025, arXiv:2501.18512 (fragments that take turns, overlapped with inner
steps); Shen et al. 2019, arXiv:1906.12043 (mean + what was trained during the exchange).
"""

import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from trainer.errors import OuterLoopError
from trainer.outer.background import in_background
from trainer.outer.exchange import RoundReport, agree_on_run
from trainer.outer.lease import claim
from trainer.outer.object_store import ObjectStore, SubStore
from trainer.outer.replica import OuterReplica, OuterSettings, Vector, fragment_folder
from trainer.outer.tensor_file import sha256

BEAT, LOCAL, BASE = "fragments.beat", "fragments.local", "fragments.base"
"""Names in the private state, next to the caller's."""


class FragmentedReplica:
    """A replica that exchanges its parameters in parts while it trains on.

    Use it like an `OuterReplica`, but call `exchange` P times per round. `theta` is the state to
    train on from. Only after the last exchange do all replicas have the same one.

    Args:
        kind: Class of each fragment's replica, synchronous or asynchronous.
        n_fragments: Number of parts, P.
        store: Where the run lives.
        theta: The initial parameters.
        rank: This replica's rank, from 0.
        world_size: Number of replicas that the first round waits for.
        settings: The common settings of the run. `n_rounds` counts calls of `exchange`.
        state: Store for private state between processes. None keeps none.
    """

    def __init__(
        self,
        kind: type[OuterReplica],
        n_fragments: int,
        store: ObjectStore,
        theta: Vector,
        *,
        rank: int,
        world_size: int,
        settings: OuterSettings,
        state: ObjectStore | None = None,
    ) -> None:
        self.store = store
        self.settings = settings
        self.inner_state: dict[str, NDArray] = {}
        parts = np.array_split(np.asarray(theta, np.float32), n_fragments)
        ends = np.cumsum([0, *(part.size for part in parts)]).tolist()
        self._slices = [slice(*ends[i : i + 2]) for i in range(n_fragments)]
        self._fragments = [
            kind(
                SubStore(store, fragment_folder(i)),
                part,
                rank=rank,
                world_size=world_size,
                settings=replace(settings, n_rounds=self._n_rounds_of(i, n_fragments)),
                state=None if state is None else SubStore(state, fragment_folder(i)),
            )
            for i, part in enumerate(parts)
        ]
        self.theta = self._state_of_run()
        self.n_trained = 0
        self._sent: tuple[int, Vector] | None = None
        self._exchanges: dict[int, Future[RoundReport]] = {}

    def _n_rounds_of(self, fragment: int, n_fragments: int) -> int | None:
        """Return how often a fragment is exchanged: at its turns, and once more with all at last."""
        n = self.settings.n_rounds
        return None if n is None else len(range(fragment, n - 1, n_fragments)) + 1

    @property
    def is_finished(self) -> bool:
        """Return whether every fragment has completed its rounds."""
        return all(fragment.is_finished for fragment in self._fragments)

    def join(self) -> None:
        """Agree on the run, load its state, and resume where this rank's earlier process stopped.

        Raises:
            TrainerConfigError: The run was started with other settings.
            OuterTimeoutError: A round in flight was not decided in time.
        """
        agree_on_run(
            self.store,
            {"fragments": len(self._fragments), "signature": self.settings.signature},
        )
        # One number for all: of two processes none has only a part of the fragments.
        claimed = self._fragments[0].retried(lambda: claim(self.store, self._fragments[0].rank))
        for fragment in self._fragments:
            fragment.claimed = claimed
        for joining in [in_background(fragment.join) for fragment in self._fragments]:
            joining.result()
        kept = max((f.inner_state for f in self._fragments), key=_beat_of)
        self.theta = self._state_of_run()
        n_made, n_last = _beat_of(kept), self.settings.n_rounds
        self.n_trained = sum(fragment.n_trained for fragment in self._fragments)
        if n_last is not None and not self.is_finished:
            self.n_trained = min(self.n_trained, n_last - 1)
        if n_made == 0:
            return
        self.n_trained = max(self.n_trained, n_made)
        self.inner_state = {
            name: value for name, value in kept.items() if name not in (BEAT, LOCAL, BASE)
        }
        # The bits of then where nothing has happened to a fragment since; else its own progress
        # on top of what the others have made of it.
        is_same = self.theta == kept[BASE]
        self.theta = np.where(is_same, kept[LOCAL], kept[LOCAL] + (self.theta - kept[BASE]))
        if n_made == n_last:
            self._begin(range(len(self._fragments)), self.theta, 1, kept)
            self._take_up(self.theta)
        else:
            at = (n_made - 1) % len(self._fragments)
            self._sent = at, kept[LOCAL][self._slices[at]]
            self.theta[self._slices[at]] = self._sent[1]

    def exchange(
        self, local: Vector, *, weight: int = 1, inner_state: Mapping[str, NDArray] | None = None
    ) -> RoundReport:
        """Adopt the result of the last exchange, and start that of the next fragment.

        The last call exchanges all fragments, and waits for them.

        Args:
            local: The present parameters.
            weight: Weight of this replica in the mean, usually its number of tokens.
            inner_state: Private arrays to store with the contribution.

        Returns:
            The adopted results, and the time that this call waited for them.

        Raises:
            OuterLoopError: The parameters are not finite, or a newer process has this rank.
            OuterTimeoutError: The round was not decided in time.
        """
        if self.is_finished:
            raise OuterLoopError("exchange() after the last round")
        began = time.monotonic()
        local = np.array(local, np.float32)
        reports = self._take_up(local)
        self.n_trained += 1
        base = self._state_of_run()
        kept = {BEAT: np.array([self.n_trained]), LOCAL: local.copy(), BASE: base}
        kept |= inner_state or {}
        if self.n_trained == self.settings.n_rounds:
            self._begin(range(len(self._fragments)), local, weight, kept)
            reports += self._take_up(local)
            base = local
        else:
            self._begin([(self.n_trained - 1) % len(self._fragments)], local, weight, kept)
        self.theta = local
        return RoundReport(
            round_id=self.n_trained - 1,
            n_contributions=min((r.n_contributions for r in reports), default=0),
            was_included=all(r.was_included for r in reports),
            n_missed=sum(r.n_missed for r in reports),
            wait_s=time.monotonic() - began,
            up_bytes=sum(r.up_bytes for r in reports),
            down_bytes=sum(r.down_bytes for r in reports),
            base=sha256(base)[:20],
        )

    def _begin(
        self, which: range | list[int], local: Vector, weight: int, kept: dict[str, NDArray]
    ) -> None:
        """Send fragments, as far as the others have not ended with them."""
        for i in which:
            part = local[self._slices[i]].copy()
            self._sent = i, part
            if not self._fragments[i].is_finished:
                self._exchanges[i] = in_background(
                    lambda i=i, part=part: self._fragments[i].exchange(
                        part, weight=weight, inner_state=kept
                    )
                )

    def _take_up(self, local: Vector) -> list[RoundReport]:
        """Wait for what was begun, and move to what came of it."""
        reports = [exchange.result() for exchange in self._exchanges.values()]
        self._exchanges.clear()
        if self.is_finished:
            local[:] = self._state_of_run()
        elif self._sent is not None:
            at, sent = self._sent
            local[self._slices[at]] = self._fragments[at].theta + (local[self._slices[at]] - sent)
        self._sent = None
        return reports

    def _state_of_run(self) -> Vector:
        return np.concatenate([fragment.theta for fragment in self._fragments])


def _beat_of(kept: Mapping[str, NDArray]) -> int:
    return int(kept[BEAT][0]) if BEAT in kept else 0
