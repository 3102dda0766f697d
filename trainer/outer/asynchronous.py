"""Rounds without waiting: a delta is merged when it arrives, weighted by its tokens and its age.

After its inner steps, a replica uploads its delta, merges it with all other new deltas, creates the
next manifest, and trains on from the newest state. All replicas share one log of manifests, so they
have the same bits after the same manifest. In the middle of its round, a replica also adopts the
state that others committed, and adds its own progress. So even a slow replica trains from a state
that is at most one inner step old. Deltas from older states count less.

Source: Shen et al. 2019, arXiv:1906.12043 (others' progress + what was trained meanwhile);
Xie et al. 2019, arXiv:1903.03934 (weights that fall as a power of the age, from a hinge on);
Liu et al. 2024, arXiv:2401.09135 (asynchronous local SGD: outer momentum does harm there).
"""

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.errors import OuterLoopError, TrainerConfigError
from trainer.outer.codecs import decode_payload, encode_payload
from trainer.outer.exchange import RoundReport
from trainer.outer.protocol import (
    Apply,
    Commit,
    Contribution,
    Manifest,
    Merged,
    merged_key,
)
from trainer.outer.replica import OuterReplica, Vector
from trainer.outer.tensor_file import sha256

logger = logging.getLogger(__name__)

PENDING = "pending/"
AGE_POWER = 0.5
MAX_AGE = 4
"""Deltas that are older than this many rounds of all replicas are dropped."""


class AsyncReplica(OuterReplica):
    """A replica that never waits for another one. The arguments are those of `OuterReplica`.

    With N replicas, a delta of age a (the number of manifests since its base state or the last
    `take_up`) counts tokens · (1 + max(0, a − N + 1) / N)^−½. So it counts in full up to the age
    that replicas of equal speed have. N deltas of age 0 together give the mean of a synchronous
    round.

    Raises:
        TrainerConfigError: The outer optimizer has momentum.
    """

    mode = "asynchronous"

    def _prepare(self) -> None:
        if self.settings.outer.momentum:
            raise TrainerConfigError(
                "asynchronous rounds need an outer optimizer without momentum: choose average"
            )
        self.max_age = MAX_AGE * self.world_size
        # Manifests come once a replica, not once for all: a slow one must still find the log.
        self.snapshot_every *= self.world_size
        self._merged: set[Contribution] = set()
        self._own_loss: tuple[str, Vector] | None = None
        self._has_kept = False
        self._keys: dict[Contribution, str] = {}
        self._reported = (0, 0, 0)

    @property
    def n_trained(self) -> int:
        """Return the number of rounds whose inner steps this replica may skip.

        A replica without its own state starts at the average round of the others.
        """
        return self._n_made if self._has_kept else self.round_id // self.world_size

    def _catch_up(self) -> None:
        self.retried(self._start)
        self._follow(is_thorough=True)
        if self.own is not None:
            self._fold_in(self.own)
        self._n_made = self.n_trained
        self._has_kept = True
        self._is_training, self.is_finished = not self._is_over(), self._is_over()
        self._reported = self._counted()

    def exchange(
        self, local: Vector, *, weight: int = 1, inner_state: Mapping[str, NDArray] | None = None
    ) -> RoundReport:
        """Send θ_initial − θ_local, merge it, and adopt the newest state.

        Args:
            local: The parameters after the inner steps.
            weight: Weight of this replica in the mean, usually its number of tokens.
            inner_state: Private arrays to store with the contribution.

        Raises:
            OuterLoopError: The parameters are not finite, or a newer process has this rank.
        """
        manifest = self._fold_in(self._made(local, weight, inner_state))
        self._is_training, self.is_finished = not self._is_over(), self._is_over()
        before, self._reported = self._reported, self._counted()
        up_bytes, down_bytes, n_applied = (
            now - then for now, then in zip(self._reported, before, strict=True)
        )
        return RoundReport(
            round_id=self._n_made - 1,
            n_contributions=len(manifest.contributions) if manifest else 0,
            was_included=manifest is not None,
            n_missed=n_applied - (manifest is not None),
            wait_s=self.waited_s,
            up_bytes=up_bytes,
            down_bytes=down_bytes,
            base=self.base,
        )

    def _counted(self) -> tuple[int, int, int]:
        """Return what reports count, from the beginning on."""
        return self._up_bytes, self._down_bytes, self._n_applied

    def take_up(self) -> Vector | None:
        """Follow the log in the middle of a round.

        Returns:
            The change of the state, to be added to the local parameters, or None without a change.

        Raises:
            OuterLoopError: A manifest is damaged.
        """
        first, before = self.round_id, self.theta.copy()
        self._follow()
        return None if self.round_id == first else self.theta - before

    def settle(self, manifest: Manifest) -> None:
        """Close this replica's error account if a manifest names its contribution."""
        self.has_reduced = (manifest.by, manifest.incarnation) == (self.rank, self.incarnation)
        self._merged |= set(manifest.contributions)
        if self.own is not None and manifest.names(self.own):
            owed = None
            if self._own_loss is not None and self._own_loss[0] == manifest.merged.sha:
                owed = self._own_loss[1] * np.float32(self.world_size)
            self.feedback.settle(was_included=True, owed=owed)
            self.own = None

    def _is_over(self) -> bool:
        return self.settings.n_rounds is not None and self._n_made >= self.settings.n_rounds

    def _resume_own(self, own: Contribution) -> None:  # noqa: ARG002
        """Leave the contribution of the process before us to `join`."""
        self._has_kept = True

    def _start(self) -> Manifest | None:
        """Take a snapshot, and remember what was merged so shortly before that it may be pending.

        Returns:
            The manifest that names the own contribution, if there is one among those.
        """
        at = self.load_snapshot()
        self._life.round_id, self._life.base = at.round_id, at.base
        named = None
        for past in range(max(0, at.round_id - self.max_age), at.round_id):
            if (manifest := self.read_manifest(past, is_thorough=True)) is not None:
                named = manifest if self.own is not None and manifest.names(self.own) else named
                self.settle(manifest)
        return named

    def _follow(self, *, is_thorough: bool = False) -> Manifest | None:
        """Apply all manifests that are there; return the one that names the own contribution.

        Raises:
            OuterLoopError: no snapshot fits the log of rounds.
        """
        own, found = self.own, None
        while True:
            manifest = self.retried(
                lambda: self.read_manifest(self.round_id, is_thorough=is_thorough)
            )
            if manifest is None:
                return found
            base: str | None = None
            if manifest.base == self.base:
                action = Apply(self.round_id, manifest)
                base = self.retried(lambda action=action: self.perform(action))
            if base is None:
                self._life.n_resyncs += 1
                if self._life.n_resyncs > MAX_AGE:
                    raise OuterLoopError(f"rank {self.rank}: no snapshot fits the log of rounds")
                found = self.retried(self._start) or found
                continue
            self._life.n_resyncs = 0
            self._life.base, self._life.round_id = base, self.round_id + 1
            if own is not None and manifest.names(own):
                found = manifest

    def _fold_in(self, own: Contribution) -> Manifest | None:
        """Propose manifests until one names the own contribution; None if it has grown too old."""
        key = f"{PENDING}{self._own_round:06d}/{own.key(0).rpartition('/')[2]}"
        self.retried(lambda: self.put(key, self.payload))
        while True:
            found = self._follow()
            self.waited_s = self.patience.waited_s
            if found is not None:
                return found
            if self.round_id - self._own_round > self.max_age:
                logger.warning("rank %d: a delta was too old to count", self.rank)
                self.own = None
                return None
            self.retried(lambda: self._propose(own))

    def _propose(self, own: Contribution) -> None:
        """Merge what is pending and try to make it the next manifest."""
        ages = self._pending() | {own: self.round_id - self._own_round}
        total = self.world_size * sum(c.weight for c in ages) / len(ages)
        mean, merged_ones = np.zeros(self.theta.size, np.float32), []
        for contribution in sorted(ages):
            values = self._values_of(contribution, own)
            if values is not None:
                # While one trains, each of the others commits once: that is no delay.
                late = max(0, ages[contribution] - self.world_size + 1)
                decay = (1 + late / self.world_size) ** -AGE_POWER
                mean += values * np.float32(contribution.weight * decay / total)
                merged_ones.append(contribution)
        payload = encode_payload(self.codec, mean)
        merged = Merged(sha256(payload), len(payload))
        if self.codec.is_lossy:
            lost = mean - decode_payload(self.codec, payload, mean.size)
            self._own_loss = merged.sha, lost
        self.put(merged_key(self.round_id, merged.sha), payload)
        manifest = Manifest(
            round_id=self.round_id,
            base=self.base,
            by=self.rank,
            incarnation=self.incarnation,
            contributions=tuple(merged_ones),
            merged=merged,
            expected=tuple(range(self.world_size)),
        )
        self.perform(Commit(self.round_id, manifest))

    def _pending(self) -> dict[Contribution, int]:
        """Return what is in no manifest yet, with its age; delete what has grown too old."""
        ages: dict[int, tuple[Contribution, int]] = {}
        old = []
        for key in self.store.keys(PENDING):
            contribution = Contribution.from_key(key)
            age = self.round_id - int(key.split("/")[-2])
            if age > self.max_age:
                old.append(key)
            elif contribution is not None and age >= 0 and contribution not in self._merged:
                # Of twins of one rank the newest counts.
                known = ages.get(contribution.rank)
                if known is None or contribution > known[0]:
                    ages[contribution.rank] = contribution, age
                self._keys[contribution] = key
        self.store.delete(old)
        ages.pop(self.rank, None)
        return dict(ages.values())

    def _values_of(self, contribution: Contribution, own: Contribution) -> Vector | None:
        data: Any = (
            self.payload if contribution == own else self.get(self._keys.get(contribution, ""))
        )
        try:
            if data is None or sha256(data) != contribution.sha:
                raise OuterLoopError("missing or torn")
            return decode_payload(self.codec, data, self.theta.size)
        except OuterLoopError as error:
            logger.warning("rank %d's delta is left out for now: %s", contribution.rank, error)
            return None
