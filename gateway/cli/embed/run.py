"""One run: chunks are read ahead, embedded at once, and stored as parts in their order.

Memory is bounded: chunks in flight and the chunks that wait for a part are counted, and reading waits.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from gateway.cli.embed.chunks import Chunk, read_chunks
from gateway.cli.embed.embedding import Embedded, Embedder, facts_behind
from gateway.cli.embed.manifest import PartFacts
from gateway.cli.embed.parts import Parts
from gateway.cli.embed.plan import EmbedFailed, EmbedStopped, Plan
from gateway.cli.embed.text_rows import RowReader

# A part is stored after the first of these. Its time grows with the run, so that a killed run loses a
# hundredth of its work at most, and a long one has few parts.
PART_BYTES = 32 * 1024 * 1024
PART_FIRST_S, PART_SHARE, PART_MAX_S = 1.0, 0.01, 30.0
# Chunks that are read ahead for each call that may be in flight, and bytes above which none is.
AHEAD = 3
AHEAD_BYTES = 64 * 1024 * 1024

Report = Callable[[PartFacts], None]


class Interrupted(EmbedStopped):
    """A signal ended the run. number: of the signal."""

    def __init__(self, number: int) -> None:
        super().__init__("stopped by a signal")
        self.number = number


class Run:
    """Run of a plan. report: takes the state behind each chunk, stored or not."""

    def __init__(self, plan: Plan, parts: Parts, embedder: Embedder, report: Report) -> None:
        self._plan = plan
        self._parts = parts
        self._embedder = embedder
        self._report = report
        self._in_flight = asyncio.Semaphore(plan.pace.concurrency)
        self._tasks: deque[asyncio.Task[Embedded]] = deque()
        self._sizes: deque[int] = deque()
        self._facts = parts.facts
        self._unstored: list[Embedded] = []
        self._stored_s = self._started_s = time.monotonic()
        self.stop: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def run(self, reader: RowReader) -> PartFacts:
        """Embed the rows that no part has; return the state behind the last.

        What is complete is stored before an error is raised. Raises: EmbedFailed, EmbedStopped, OSError.
        """
        chunks = read_chunks(reader, self._plan, self._facts.end)
        try:
            await self._read_all(chunks)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._store()
        return self._facts

    async def _read_all(self, chunks: Iterator[Chunk]) -> None:
        failure: EmbedFailed | None = None
        is_open = True
        while is_open or self._tasks:
            if is_open and self._has_room():
                try:
                    chunk = await asyncio.to_thread(next, chunks, None)
                except EmbedFailed as error:
                    # Rows before it are complete first.
                    chunk, failure = None, error
                if chunk is None:
                    is_open = False
                else:
                    self._tasks.append(asyncio.create_task(self._embed(chunk)))
                    self._sizes.append(chunk.size)
                await self._take_completed()
            else:
                await self._wait_for_first()
        if failure is not None:
            raise failure

    def _has_room(self) -> bool:
        """Return whether another chunk may be read. One may always be, so that no row is too large."""
        is_below = len(self._tasks) < AHEAD * self._plan.pace.concurrency
        return not self._tasks or (is_below and sum(self._sizes) < AHEAD_BYTES)

    async def _embed(self, chunk: Chunk) -> Embedded:
        async with self._in_flight:
            return await self._embedder.embed(chunk)

    async def _wait_for_first(self) -> None:
        """Wait for the first chunk in flight, or for a signal. Raises: as `run`."""
        waited: set[asyncio.Future[Any]] = {self._tasks[0], self.stop}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        await self._take_completed()

    async def _take_completed(self) -> None:
        """Take chunks that are complete, in order, and store a part if it is time. Raises: as `run`."""
        while self._tasks and self._tasks[0].done():
            embedded = self._tasks[0].result()
            self._tasks.popleft()
            self._sizes.popleft()
            facts = facts_behind(self._facts, embedded)
            seconds = self._parts.facts.seconds + time.monotonic() - self._stored_s
            self._facts = msgspec.structs.replace(facts, seconds=seconds)
            self._unstored.append(embedded)
            self._report(self._facts)
            if self._is_due():
                await self._store()
        if self.stop.done():
            raise Interrupted(self.stop.result())

    def _is_due(self) -> bool:
        now_s = time.monotonic()
        span_s = min(PART_MAX_S, max(PART_FIRST_S, PART_SHARE * (now_s - self._started_s)))
        return now_s - self._stored_s >= span_s or sum(item.size for item in self._unstored) >= PART_BYTES

    async def _store(self) -> None:
        """Store a part of the chunks that are complete. Raises: OSError."""
        if not self._unstored:
            return
        batches: list[Any] = [item.batch for item in self._unstored]
        await asyncio.to_thread(self._parts.add, batches, self._facts)
        self._unstored = []
        self._stored_s = time.monotonic()
