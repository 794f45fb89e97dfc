"""Permits for lines that run: many while the gateway is idle, one at a time next to interactive calls.

They bound the bytes of results in memory too, and go first to the tenant that has the fewest; of those that
have equally many, to the one that got its last permit longest ago.
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
# For so long lines of other tenants overtake a line whose result does not fit. Then they wait for it.
OVERTAKEN_S = 1.0
# Tenants whose last permit is remembered.
TENANTS_MAX = 10_000


@dataclass(slots=True)
class Permit:
    """Permit of one line. bytes: of its result, as estimated, and as they are once it is there.

    waiter: done when the line may begin, or, with False, need not. unfit_s: time at which it first did not
    fit, None before.
    """

    tenant: str
    job: str
    bytes: int
    waiter: Future[bool]
    unfit_s: float | None = None


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
        # Number of each tenant's last permit.
        self._last: dict[str, int] = {}
        self._given = 0

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
            self._note_turn(permit.tenant)
            self._running[permit.tenant] += 1
            self._bytes += permit.bytes
            self._started_s = self._clock()
            permit.waiter.set_result(True)

    def _note_turn(self, tenant: str) -> None:
        self._given += 1
        self._last.pop(tenant, None)
        self._last[tenant] = self._given
        while len(self._last) > TENANTS_MAX:
            self._last.pop(next(iter(self._last)))

    def _next(self) -> Permit | None:
        """Return the line that may begin next: the first of the tenant whose turn it is."""
        self._drop_done()
        running = self._running.total()
        if not self._waiting or running >= self._room():
            return None
        now_s = self._clock()
        for tenant in sorted(self._waiting, key=self._turn):
            permit = self._waiting[tenant][0]
            if not running or self._bytes + permit.bytes <= RESULT_BYTES_MAX:
                return permit
            if permit.unfit_s is None:
                permit.unfit_s = now_s
            if now_s - permit.unfit_s >= OVERTAKEN_S:
                # Else it might never begin.
                return None
        return None

    def _drop_done(self) -> None:
        """Drop lines in front that were cancelled, or whose job was stopped."""
        for tenant, waiting in list(self._waiting.items()):
            while waiting and waiting[0].waiter.done():
                waiting.popleft()
            if not waiting:
                del self._waiting[tenant]

    def _turn(self, tenant: str) -> tuple[int, int]:
        """Return what sorts the tenant first that runs the fewest lines, and had its turn longest ago."""
        return self._running[tenant], self._last.get(tenant, 0)

    def _room(self) -> int:
        """Return how many lines may run now."""
        calls, now_s = self._calls(), self._clock()
        if calls != self._seen:
            self._seen, self._busy_until_s = calls, now_s + BUSY_S
        return 1 if now_s < self._busy_until_s else self._most
