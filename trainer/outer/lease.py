"""Allow one launch per store, by a lease whose number rises with every launch that takes it.

The lease is an object `launch/<number>.json` that is created once. The launch with the highest
number has the store. Before each start, a launch checks for a higher number, and if it finds one,
it starts nothing more. Processes of one rank take numbers in the same way, so that the later of two
stays.
"""

import json
import os
import socket
from typing import Any

from trainer.errors import LeaseHeldError, OuterLoopError
from trainer.outer.object_store import ObjectStore

LEASES = "launch/"
CLAIMS = "claims/"
END = ".end"


class Lease:
    """The claim of a launch while its replicas may run.

    Args:
        store: The run's store.
        holder: Name of the launch. With the same name, it finds its lease again.
    """

    def __init__(self, store: ObjectStore, holder: str) -> None:
        self._store, self._holder = store, holder
        self.number = 0

    def take(
        self, where: str, *, now: float, until: float, run: int = 0, is_forced: bool = False
    ) -> int:
        """Take the lease, or find this launch's own lease again.

        Args:
            where: Description of this launch for others.
            now: The time, in seconds since the epoch.
            until: Time by which the last replica must have ended. Then the lease expires.
            run: Number of the run to continue. 0 begins a new one.
            is_forced: Whether to take it from another launch, together with its run.

        Returns:
            The number of the run, which is that of its first lease.

        Raises:
            LeaseHeldError: Another launch has the lease.
        """
        while True:
            ends, numbers = self._known()
            newest = max(numbers, default=0)
            if newest and newest not in ends:
                held = self._read(newest)
                if held["holder"] == self._holder:
                    self.number = newest
                    return int(held["run"])
                is_lapsed = held["until"] <= now
                if not is_lapsed and not is_forced:
                    raise LeaseHeldError(
                        f"{self._store.place or 'the store'} belongs to a launch from {held['where']}: watch it from there, or stop it there. With --take-over you watch its jobs from here (if it is a local launch, make sure that it has ended)"
                    )
                run = run or (0 if is_lapsed else int(held["run"]))
            run = run or newest + 1
            mine = {"holder": self._holder, "where": where, "until": until, "run": run}
            data = json.dumps({**mine, "host": socket.gethostname(), "pid": os.getpid()}).encode()
            if self._store.put_if_absent(f"{LEASES}{newest + 1:06d}.json", data):
                self.number = newest + 1
                return run

    def check(self) -> None:
        """Check that no other launch has taken over.

        Raises:
            LeaseHeldError: Another launch has taken over.
        """
        newest = max(self._known()[1], default=0)
        if newest > self.number:
            raise LeaseHeldError(
                f"another launch, from {self._read(newest)['where']}, has taken over: this one stops watching"
            )

    def release(self) -> None:
        """Release the store for the next launch."""
        if self.number:
            self._store.put(f"{LEASES}{self.number:06d}{END}", b"")

    def _known(self) -> tuple[set[int], set[int]]:
        keys = self._store.keys(LEASES)
        numbered = [(int(key.rpartition("/")[2].partition(".")[0]), key) for key in keys]
        return {n for n, key in numbered if key.endswith(END)}, {n for n, _ in numbered}

    def _read(self, number: int) -> dict[str, Any]:
        key = f"{LEASES}{number:06d}.json"
        try:
            held = json.loads(self._store.get(key) or b"")
            return {name: held[name] for name in ("holder", "where", "until", "run")}
        except (ValueError, KeyError, TypeError) as error:
            raise OuterLoopError(
                f"{self._store.place}{key} is damaged: make sure that no replica runs and delete it"
            ) from error
