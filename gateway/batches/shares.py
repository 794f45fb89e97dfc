"""Shares of tenants in what one process runs of jobs: places for chunks, and permits for their lines. Pure.

Rule: no tenant keeps another one out. A tenant has at most a quarter of the places. While all are taken, a
tenant that has none takes one more, and the tenant that has the most gives one back; tenants with one each
take turns. Validations and chunks of stopped jobs have places of their own, because they end by themselves
and other chunks might not.

Permits are many while the gateway is idle, and one next to interactive calls, because every line on the event
loop delays the steps of an interactive call by its own. They bound the bytes of results in memory too. The
next one goes to the tenant that has the fewest; of those that have equally many, to the one that got its last
one longest ago.
"""

import time
from asyncio import Future, get_running_loop
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

# Chunks of which a process runs lines: more would only wait for permits, and each is in memory.
CHUNKS_MAX = 16
CHUNKS_PER_TENANT = CHUNKS_MAX // 4
# With those that tenants without a place have taken until others give theirs back.
CHUNKS_LIMIT = 2 * CHUNKS_MAX
# Of validations and chunks of stopped jobs: one of each tenant.
BRIEF_MAX = 4
# A tenant's only chunk gives way to another tenant after so long.
TURN_S = 10.0
# For so long after an interactive call lines run one at a time.
BUSY_S = 1.0
# Longest pause between two of them; it is as long as the line before it was.
PAUSE_MAX_S = 0.1
# Results of lines that run, until they are in a journal. A line whose result alone is larger runs alone.
RESULT_BYTES_MAX = 64 * 1024 * 1024
# For so long lines of other tenants overtake a line whose result does not fit. Then they wait for it.
OVERTAKEN_S = 1.0
# Tenants whose last turn is remembered.
TENANTS_MAX = 10_000


class Turns:
    """Last turn of each tenant, on any scale that rises."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def note(self, tenant: str, turn: float) -> None:
        """Note a tenant's turn; forget the oldest of too many tenants."""
        self._last.pop(tenant, None)
        self._last[tenant] = turn
        if len(self._last) > TENANTS_MAX:
            del self._last[next(iter(self._last))]

    def last(self, tenant: str) -> float:
        """Return a tenant's last turn, 0 if it had none."""
        return self._last.get(tenant, 0.0)


@dataclass(eq=False, slots=True)
class ChunkPlace:
    """A place that is taken. since_s: on a clock that never goes back. is_brief: its work ends by itself.

    gives_way: another tenant needs it; set by `ChunkPlaces`.
    """

    tenant: str
    since_s: float
    is_brief: bool
    gives_way: bool = False


@dataclass(slots=True)
class ChunkPlaces:
    """Places that are taken."""

    taken: set[ChunkPlace] = field(default_factory=set)
    _turns: Turns = field(default_factory=Turns)

    def take(self, tenant: str, now_s: float, *, is_brief: bool) -> ChunkPlace:
        """Take a place."""
        place = ChunkPlace(tenant, now_s, is_brief)
        self.taken.add(place)
        self._turns.note(tenant, now_s)
        return place

    def give_back(self, place: ChunkPlace) -> None:
        """Free a place."""
        self.taken.discard(place)

    def may_take(self, tenant: str, *, is_brief: bool) -> bool:
        """Return whether a place is free for a tenant."""
        of_tenant = self._of_tenant(is_brief=is_brief)
        if is_brief:
            return not of_tenant[tenant] and of_tenant.total() < BRIEF_MAX
        most = CHUNKS_MAX if of_tenant[tenant] else CHUNKS_LIMIT
        return of_tenant[tenant] < CHUNKS_PER_TENANT and of_tenant.total() < most

    def need(self, tenant: str) -> tuple[int, float]:
        """Return what sorts the tenant first with the fewest places, which took its last one longest ago."""
        return self._of_tenant(is_brief=False)[tenant], self._turns.last(tenant)

    def ask_back(self, now_s: float) -> list[ChunkPlace]:
        """Let the places give way that are too many, and return them."""
        chunks = [place for place in self.taken if not place.is_brief]
        have = self._of_tenant(is_brief=False)
        found: list[ChunkPlace] = []
        for _ in range(len(chunks) - CHUNKS_MAX):
            place = max(
                (place for place in chunks if have[place.tenant] > 1 or now_s - place.since_s >= TURN_S),
                key=lambda place: (have[place.tenant], now_s - place.since_s),
                default=None,
            )
            if place is None:
                break
            chunks.remove(place)
            have[place.tenant] -= 1
            place.gives_way = True
            found.append(place)
        return found

    def _of_tenant(self, *, is_brief: bool) -> Counter[str]:
        return Counter(place.tenant for place in self.taken if place.is_brief is is_brief)


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
    """Permits of one process. calls: returns the number of interactive calls so far."""

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
        self._given = 0
        self._turns = Turns()

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
        for waiting in self._waiting.values():
            for permit in waiting:
                if permit.job == job and not permit.waiter.done():
                    permit.waiter.set_result(False)

    def resize(self, permit: Permit, result_bytes: int) -> None:
        """Replace the estimate of a result by its size."""
        self._bytes += result_bytes - permit.bytes
        permit.bytes = result_bytes
        self._wake()

    def _end(self, permit: Permit) -> None:
        self._bytes -= permit.bytes
        self._running[permit.tenant] -= 1
        if not self._running[permit.tenant]:
            del self._running[permit.tenant]
        if self._waiting and self._room() < self._most:
            pause_s = min(PAUSE_MAX_S, self._clock() - self._started_s)
            get_running_loop().call_later(pause_s, self._wake)
        else:
            self._wake()

    def _wake(self) -> None:
        while (permit := self._next()) is not None:
            self._waiting[permit.tenant].popleft()
            self._given += 1
            self._turns.note(permit.tenant, self._given)
            self._running[permit.tenant] += 1
            self._bytes += permit.bytes
            self._started_s = self._clock()
            permit.waiter.set_result(True)

    def _next(self) -> Permit | None:
        """Return the line that may begin next: the first of the tenant whose turn it is."""
        self._drop_done()
        running = self._running.total()
        if not self._waiting or running >= self._room():
            return None
        now_s = self._clock()
        for tenant in sorted(self._waiting, key=lambda name: (self._running[name], self._turns.last(name))):
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

    def _room(self) -> int:
        """Return how many lines may run now."""
        calls, now_s = self._calls(), self._clock()
        if calls != self._seen:
            self._seen, self._busy_until_s = calls, now_s + BUSY_S
        return 1 if now_s < self._busy_until_s else self._most
