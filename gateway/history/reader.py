"""Reader of the kept history, for charts and lists.

A reply adds up the chunks of its range and the parts that are not folded yet. If a fold comes between, it
reads again. Work on arrays runs on a thread, chunk by chunk, so that 90 days need the memory of one.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Protocol, TypeVar

from gateway.history.folding import readable
from gateway.history.ranges import Range
from gateway.history.store import CHUNK_S, MINUTE_S, STEP_S, Chunk, HistoryStore
from gateway.history.table import Detail, Table

# Chunks that are read together.
CHUNKS_TOGETHER = 17
# A range of which so many minutes are not folded is incomplete: nothing has folded for hours.
PARTS_MINUTES_MAX = 300
ATTEMPTS = 3


class Sums(Protocol):
    """Object that adds up tables."""

    def add(self, start_s: int, step_s: int, table: Table) -> None:
        """Add a table whose intervals have this length."""


SomeSums = TypeVar("SomeSums", bound=Sums)


class HistoryReader:
    """Reader of one process.

    current: returns the minute that runs, None where it cannot be known whole. lock: held while that minute
    moves into the store.
    """

    def __init__(
        self,
        store: HistoryStore,
        current: Callable[[], tuple[int, Table] | None],
        lock: asyncio.Lock | None = None,
    ) -> None:
        self.store = store
        self._current = current
        self._lock = lock

    async def sum_up(
        self,
        range_: Range,
        shards: Sequence[int],
        create: Callable[[], SomeSums],
        detail: Detail = "all",
    ) -> SomeSums:
        """Add up everything in a range. create: returns sums of nothing. Raises: StoreUnavailable."""
        sums = create()
        for _ in range(ATTEMPTS):
            version = await self.store.version()
            sums = create()
            # The minute that runs is in one of both. A fold of the parts that were read changes the version.
            async with self._lock or nullcontext():
                await self._add_parts(range_, sums, detail)
            places = list(_places(range_, shards))
            for start in range(0, len(places), CHUNKS_TOGETHER):
                some = places[start : start + CHUNKS_TOGETHER]
                contents = await self.store.chunks(some)
                await asyncio.to_thread(_add_chunks, sums, range_, some, contents, detail)
            if await self.store.version() == version:
                break
        return sums

    async def _add_parts(self, range_: Range, sums: Sums, detail: Detail) -> None:
        # A part of a minute is in the hour that the minute is in.
        minutes = [
            minute
            for minute in await self.store.open_minutes()
            if range_.from_s <= minute * MINUTE_S < range_.until_s
        ]
        for minute in minutes[-PARTS_MINUTES_MAX:]:
            parts = await self.store.parts(minute)
            await asyncio.to_thread(_add_parts, sums, minute * MINUTE_S, list(parts.values()), detail)
        if (current := self._current()) is not None:
            sums.add(current[0] * MINUTE_S, MINUTE_S, current[1])


def _places(range_: Range, shards: Sequence[int]) -> Iterator[Chunk]:
    length_s = CHUNK_S[range_.resolution]
    for start_s in range(range_.from_s // length_s * length_s, range_.until_s, length_s):
        for shard in shards:
            yield Chunk(range_.resolution, start_s, shard)


def _add_parts(sums: Sums, start_s: int, contents: Sequence[bytes], detail: Detail) -> None:
    for table in readable(contents, detail):
        sums.add(start_s, MINUTE_S, table)


def _add_chunks(
    sums: Sums, range_: Range, places: Sequence[Chunk], contents: Sequence[bytes | None], detail: Detail
) -> None:
    for place, content in zip(places, contents, strict=True):
        if content is None:
            continue
        end_s = place.start_s + CHUNK_S[place.resolution]
        is_whole = range_.from_s <= place.start_s and end_s <= range_.until_s
        # The sum of a chunk has what is outside of the range too.
        needed: Detail = "all" if detail == "sum" and not is_whole else detail
        for table in readable([content], needed):
            sums.add(place.start_s, STEP_S[place.resolution], table)
