"""Permits for lines that run: many while the gateway is idle, few next to interactive calls."""

import time
from asyncio import Future, get_running_loop
from collections import deque
from collections.abc import Callable

# For so long after an interactive call only a part of the permits is given.
BUSY_S = 1.0
BUSY_DIVISOR = 8


class LinePermits:
    """Async context manager of one line. calls: returns the number of interactive calls so far.

    Every line on the event loop delays the steps of an interactive call by its own.
    """

    def __init__(
        self, most: int, calls: Callable[[], int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._most = most
        self._calls = calls
        self._clock = clock
        self._seen = calls()
        self._busy_until_s = 0.0
        self._running = 0
        self._waiters: deque[Future[None]] = deque()

    async def __aenter__(self) -> None:
        """Take a permit. Lines get theirs in the order in which they ask."""
        if self._running < self._room() and not self._waiters:
            self._running += 1
            return
        waiter: Future[None] = get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        except BaseException:
            if waiter.done() and not waiter.cancelled():
                await self.__aexit__()
            raise

    async def __aexit__(self, *_: object) -> None:
        """Return the permit."""
        self._running -= 1
        while self._waiters and self._running < self._room():
            waiter = self._waiters.popleft()
            if not waiter.done():
                self._running += 1
                waiter.set_result(None)

    def _room(self) -> int:
        """Return how many lines may run now: at least one, so that the last one wakes the others."""
        calls, now_s = self._calls(), self._clock()
        if calls != self._seen:
            self._seen, self._busy_until_s = calls, now_s + BUSY_S
        return max(1, self._most // BUSY_DIVISOR) if now_s < self._busy_until_s else self._most
