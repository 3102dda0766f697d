"""Limit how many calls run at once, in total and per teacher, and adapt to the endpoint."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Slots:
    """The number of calls in flight. It shrinks when an endpoint asks for less, and grows back.

    Additive increase, multiplicative decrease: a round of successes adds one slot, and a request to
    slow down removes a third, at most once per cooldown. Nothing is sent during a pause.

    Args:
        size: the most calls in flight.
        n_first: the most calls in flight until `open` is called.
        decrease: the fraction of slots that stays when the endpoint asks for less.
        cooldown_s: seconds between two cuts.
    """

    def __init__(
        self,
        size: int,
        *,
        n_first: int | None = None,
        decrease: float = 0.7,
        cooldown_s: float = 1.0,
    ) -> None:
        self.size = size
        self.limit = float(size if n_first is None else min(size, n_first))
        self._is_open = n_first is None
        self.n_in_use = 0
        self.n_cuts = 0
        self._decrease = decrease
        self._cooldown_s = cooldown_s
        self._last_cut = float("-inf")
        self._paused_until = float("-inf")
        self._waiting: deque[asyncio.Future[None]] = deque()

    @asynccontextmanager
    async def taken(self) -> AsyncIterator[None]:
        """Wait for a slot, first come first served, and hold it."""
        await self.acquire()
        try:
            yield
        finally:
            self.release()

    async def acquire(self) -> None:
        """Wait for a slot.

        Raises:
            CancelledError: the caller was canceled while it waited.
        """
        if self._waiting or not self._has_room():
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            self._wake_later()
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled():
                    self.release()
                raise
        else:
            self.n_in_use += 1

    def release(self) -> None:
        """Release a slot."""
        self.n_in_use -= 1
        self._wake()

    def open(self) -> None:
        """Allow as many calls as there are slots. A second call has no effect."""
        if not self._is_open:
            self._is_open = True
            self.limit = float(self.size)
            self._wake()

    def narrow(self, n_first: int) -> None:
        """Allow fewer calls, but at least one, until `open` is called."""
        if not self._is_open:
            self.limit = float(max(1, min(self.size, n_first)))

    def succeeded(self) -> None:
        """Add a fraction of a slot after a successful call."""
        if self._is_open and self.limit < self.size:
            self.limit = min(self.size, self.limit + 1 / self.limit)

    def slow_down(self, pause_s: float | None) -> None:
        """Remove slots and pause, because the endpoint asks for it."""
        now = time.perf_counter()
        if pause_s:
            self._paused_until = max(self._paused_until, now + pause_s)
        if now - self._last_cut >= self._cooldown_s:
            self._last_cut = now
            self.limit = max(1.0, self.limit * self._decrease)
            self.n_cuts += 1

    def resume(self) -> None:
        """End a pause, so that waiting calls see that the run was stopped."""
        self._paused_until = float("-inf")
        self._wake()

    def _has_room(self) -> bool:
        return self.n_in_use < int(self.limit) and time.perf_counter() >= self._paused_until

    def _wake(self) -> None:
        while self._waiting and self._has_room():
            waiter = self._waiting.popleft()
            if not waiter.done():
                self.n_in_use += 1
                waiter.set_result(None)
        self._wake_later()

    def _wake_later(self) -> None:
        """After a pause nobody may be in flight whose end would wake the others."""
        pause = self._paused_until - time.perf_counter()
        if self._waiting and pause > 0:
            asyncio.get_running_loop().call_later(pause + 0.001, self._wake)
