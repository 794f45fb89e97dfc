"""Permits for lines that run: many while the gateway is idle, one at a time next to interactive calls.

They bound the bytes of results in memory too, and go first to the tenant that has the fewest.
"""

import time
from asyncio import Future, get_running_loop
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

# For so long after an interactive call lines run one at a time.
BUSY_S = 1.0
# Longest pause between two of them; it is as long as the line before it was.
PAUSE_MAX_S = 0.1
# Results of lines that run, until they are in a journal. A line whose result alone is larger runs alone.
RESULT_BYTES_MAX = 64 * 1024 * 1024


@dataclass(slots=True)
class Permit:
    """Permit of one line. bytes: of its result, as estimated, and as they are once it is there.

    waiter: done when the line may begin, or, with False, need not.
    """

    tenant: str
    job: str
    bytes: int
    waiter: Future[bool]


class LinePermits:
    """Permits of one process. calls: returns the number of interactive calls so far.

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
        self._running: Counter[str] = Counter()
        self._bytes = 0
        self._started_s = 0.0
        self._waiting: dict[str, deque[Permit]] = {}

    @asynccontextmanager
    async def one(self, tenant: str, job: str, result_bytes: int) -> AsyncIterator[Permit | None]:
        """Hold a permit, or None once the job is stopped.

        Lines of a tenant get theirs in the order in which they ask.
        """
        permit = Permit(tenant, job, result_bytes, get_running_loop().create_future())
        self._waiting.setdefault(tenant, deque()).append(permit)
        self._wake()
        try:
            yield permit if await permit.waiter else None
        finally:
            if permit.waiter.done() and not permit.waiter.cancelled() and permit.waiter.result():
                self._end(permit)

    def stop(self, job: str) -> None:
        """Let the lines of a job wait no longer."""
        for permit in [permit for waiting in self._waiting.values() for permit in waiting]:
            if permit.job == job and not permit.waiter.done():
                permit.waiter.set_result(False)

    def resize(self, permit: Permit, result_bytes: int) -> None:
        """Replace the estimate of a result by its size."""
        self._bytes += result_bytes - permit.bytes
        permit.bytes = result_bytes
        self._wake()

    def _end(self, permit: Permit) -> None:
        self._running[permit.tenant] -= 1
        self._bytes -= permit.bytes
        if self._running[permit.tenant] == 0:
            del self._running[permit.tenant]
        if self._waiting and self._room() < self._most:
            pause_s = min(PAUSE_MAX_S, self._clock() - self._started_s)
            get_running_loop().call_later(pause_s, self._wake)
        else:
            self._wake()

    def _wake(self) -> None:
        while (permit := self._next()) is not None:
            self._waiting[permit.tenant].popleft()
            self._running[permit.tenant] += 1
            self._bytes += permit.bytes
            self._started_s = self._clock()
            permit.waiter.set_result(True)

    def _next(self) -> Permit | None:
        """Return the line that may begin next: the first of the tenant that runs the fewest."""
        for tenant, waiting in list(self._waiting.items()):
            while waiting and waiting[0].waiter.done():
                # Cancelled, or of a job that was stopped.
                waiting.popleft()
            if not waiting:
                del self._waiting[tenant]
        running = self._running.total()
        if not self._waiting or running >= self._room():
            return None
        permit = self._waiting[min(self._waiting, key=lambda tenant: self._running[tenant])][0]
        has_room = self._bytes + permit.bytes <= RESULT_BYTES_MAX
        # A line that does not fit is not overtaken, or it might never begin.
        return permit if has_room or not running else None

    def _room(self) -> int:
        """Return how many lines may run now."""
        calls, now_s = self._calls(), self._clock()
        if calls != self._seen:
            self._seen, self._busy_until_s = calls, now_s + BUSY_S
        return 1 if now_s < self._busy_until_s else self._most
