"""Permits for lines that run: many while the gateway is idle, one at a time next to interactive calls."""

import time
from asyncio import Future, get_running_loop
from collections import deque
from collections.abc import Callable

# For so long after an interactive call lines run one at a time.
BUSY_S = 1.0
# Longest pause between two of them; it is as long as the line before it was.
PAUSE_MAX_S = 0.1


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
        self._started_s = 0.0
        self._waiters: deque[Future[None]] = deque()

    async def __aenter__(self) -> None:
        """Take a permit. Lines get theirs in the order in which they ask."""
        if self._running < self._room() and not self._waiters:
            self._start()
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
        if self._waiters and self._room() < self._most:
            pause_s = min(PAUSE_MAX_S, self._clock() - self._started_s)
            get_running_loop().call_later(pause_s, self._wake)
        else:
            self._wake()

    def _wake(self) -> None:
        while self._waiters and self._running < self._room():
            waiter = self._waiters.popleft()
            if not waiter.done():
                self._start()
                waiter.set_result(None)

    def _start(self) -> None:
        self._running += 1
        self._started_s = self._clock()

    def _room(self) -> int:
        """Return how many lines may run now."""
        calls, now_s = self._calls(), self._clock()
        if calls != self._seen:
            self._seen, self._busy_until_s = calls, now_s + BUSY_S
        return 1 if now_s < self._busy_until_s else self._most
