"""How many calls run at once: bounded in total and per teacher, and adapting to the endpoint."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Slots:
    """Room for calls in flight, which shrinks when an endpoint asks for less and grows back.

    Additive increase, multiplicative decrease: one more slot per round of successes, a third
    less at most once per cooldown, and nothing is sent while the endpoint asked for a pause.

    Args:
        size: calls in flight at most.
        n_first: so many of them until `open` is called.
        decrease: what is left of the room when the endpoint asks for less.
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
        """Let all calls go that there is room for; has no effect the second time."""
        if not self._is_open:
            self._is_open = True
            self.limit = float(self.size)
            self._wake()

    def narrow(self, n_first: int) -> None:
        """Let fewer calls go until `open` is called, but always one."""
        if not self._is_open:
            self.limit = float(max(1, min(self.size, n_first)))

    def succeeded(self) -> None:
        """A call went through: room for a little more."""
        if self._is_open and self.limit < self.size:
            self.limit = min(self.size, self.limit + 1 / self.limit)

    def slow_down(self, pause_s: float | None) -> None:
        """The endpoint asks for fewer calls at once, and for a pause."""
        now = time.perf_counter()
        if pause_s:
            self._paused_until = max(self._paused_until, now + pause_s)
        if now - self._last_cut >= self._cooldown_s:
            self._last_cut = now
            self.limit = max(1.0, self.limit * self._decrease)
            self.n_cuts += 1

    def resume(self) -> None:
        """Forget a pause, so that whoever waits can see that the run has been stopped."""
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
