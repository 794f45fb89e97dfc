"""Threads for work on texts, which tenants share fairly: chunk by chunk, in turns.

A chunk is short, so that no tenant waits long for a thread, and a caller who leaves wastes one chunk at most.
Everything but the chunks themselves runs on the event loop, which owns all state here.
"""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import msgspec

from gateway.errors import Overloaded
from gateway.lane.fair_queue import QUANTUM_TOKENS, Entry, FairQueue, Priority
from gateway.lane.measures import DrainRate

T = TypeVar("T")

THREADS = 2
# Characters of one chunk: some 20 ms of tokenizing. A longer text is a chunk of its own.
CHUNK_CHARACTERS = 32 * 1024
# All threads but one may run chunks longer than this, so that ordinary chunks never wait for a book.
LONG_CHARACTERS = 2 * CHUNK_CHARACTERS
# A body of the default `limits.body_bytes` has no more.
TENANT_CHARACTERS_MAX = 32 * 1024 * 1024
# Above this each tenant gets an equal part.
CHARACTERS_MAX = 128 * 1024 * 1024
# A turn of the queue is one chunk for a weight of 1.
CHARACTERS_PER_COST = CHUNK_CHARACTERS // QUANTUM_TOKENS


class Claim(msgspec.Struct, frozen=True):
    """The call that chunks belong to. The fields are those of `Entry`."""

    tenant: str
    flow: int = 0
    weight: int = 1
    priority: Priority = "interactive"


class _Chunk(msgspec.Struct, eq=False):
    function: Callable[[], Any]
    characters: int
    result: asyncio.Future[Any]

    @property
    def is_long(self) -> bool:
        return self.characters > LONG_CHARACTERS


class FairThreads:
    """Threads and the queue in front of them. One of each purpose per event loop.

    purpose: participle of what they do, for the error of a full queue.
    """

    def __init__(self, threads: int = THREADS, purpose: str = "counted") -> None:
        self._executor = ThreadPoolExecutor(threads, purpose)
        self._purpose = purpose
        self._threads = threads
        self._queue: FairQueue[_Chunk] = FairQueue()
        self._running: list[_Chunk] = []
        self._held: dict[str, int] = {}
        self._drain_rate: DrainRate | None = None

    @contextmanager
    def hold(self, tenant: str, characters: int) -> Iterator[None]:
        """Count the characters of a call against the bounds until the block ends.

        A tenant that holds nothing is always admitted, because a large call could never pass otherwise.

        Raises: Overloaded.
        """
        held = self._held.get(tenant, 0)
        if held and held + characters > self._room_of(characters):
            raise Overloaded(
                f"too much of your text is waiting to be {self._purpose}",
                retry_after_s=self._rate().retry_after_s(held, asyncio.get_running_loop().time()),
            )
        self._held[tenant] = held + characters
        try:
            yield
        finally:
            self._held[tenant] -= characters
            if not self._held[tenant]:
                del self._held[tenant]

    async def run(self, claim: Claim, characters: int, function: Callable[[], T]) -> T:
        """Run a function in a thread when it is the tenant's turn, and return its result.

        If the caller is cancelled, a function that has not started never runs.
        """
        chunk = _Chunk(function, characters, asyncio.get_running_loop().create_future())
        cost = max(1, characters // CHARACTERS_PER_COST)
        entry = Entry(chunk, claim.tenant, cost, claim.flow, claim.weight, claim.priority)
        self._queue.push(entry)
        self._start_chunks()
        try:
            result: T = await chunk.result
            return result
        finally:
            self._queue.remove(entry)

    def _room_of(self, characters: int) -> int:
        """Return how much a tenant may hold that wants this much more."""
        if sum(self._held.values()) + characters <= CHARACTERS_MAX:
            return TENANT_CHARACTERS_MAX
        return min(TENANT_CHARACTERS_MAX, CHARACTERS_MAX // len(self._held))

    def _start_chunks(self) -> None:
        while len(self._running) < self._threads and (entry := self._next()) is not None:
            self._queue.pop(entry)
            self._running.append(entry.item)
            loop = asyncio.get_running_loop()
            future = loop.run_in_executor(self._executor, entry.item.function)
            future.add_done_callback(partial(self._finish, entry.item))

    def _next(self) -> Entry[_Chunk] | None:
        """Return the next chunk that may start, or None."""
        may_be_long = sum(chunk.is_long for chunk in self._running) < max(1, self._threads - 1)
        skipped: set[str] = set()
        while (entry := self._queue.peek(skipped)) is not None and entry.item.is_long and not may_be_long:
            skipped.add(entry.tenant)
        return entry

    def _finish(self, chunk: _Chunk, future: asyncio.Future[Any]) -> None:
        self._running.remove(chunk)
        self._rate().add(chunk.characters, asyncio.get_running_loop().time())
        error = future.exception()
        if not chunk.result.done():
            if error is not None:
                chunk.result.set_exception(error)
            else:
                chunk.result.set_result(future.result())
        self._start_chunks()

    def _rate(self) -> DrainRate:
        if self._drain_rate is None:
            self._drain_rate = DrainRate(asyncio.get_running_loop().time())
        return self._drain_rate
