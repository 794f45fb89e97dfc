"""Keeper of one process: it puts a part per minute into the store, and folds parts while it is chosen to.

The end of a minute takes the counts and begins new ones. Their part is put again until the store has
answered, for an hour at most. The store knows parts by their names, so that none is counted twice. A store
that is away delays nothing but this. When the process stops, it puts the minute that has begun.

One process of all that share the store merges parts and folds hours that are over. Two that do so at a time
do no harm: a fold is refused if another one came between its reading and its writing.
"""

import asyncio
import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from zlib import crc32

from gateway.history.counter import CallCounter, Entries, table_of
from gateway.history.folding import PART_TENANTS_MAX, folded, merged, places_of
from gateway.history.spans import SpanRecorder
from gateway.history.store import HOUR_S, MINUTE_S, NAMES_MAX, Fold, HistoryStore, Part
from gateway.history.table import Table, limited, packed
from gateway.store.errors import StoreUnavailable

# Parts of an hour that wait for a store that is away.
WAITING_MAX = 60
# Time after a minute, or an hour, in which the parts of all processes arrive.
MERGED_AFTER_S = 120
FOLDED_AFTER_S = 180
# Hours that one round folds, after a long outage.
HOURS_PER_ROUND = 4
# Processes put their parts within this time.
PUT_WITHIN_S = 1.5
LAST_PUT_S = 2.0
# Entries that are read in the middle of a minute.
CURRENT_ENTRIES_MAX = 1000

logger = logging.getLogger("gateway")


class HistoryKeeper:
    """Keeper of one process.

    process: a name that no other process ever has. price: of a token, by model, in nano-units. recorder: of
    replicas; None in all workers of a gateway but one. clock: seconds since 1970.
    """

    def __init__(
        self,
        store: HistoryStore,
        process: str,
        price: Callable[[str], int],
        recorder: SpanRecorder | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.store = store
        self.counter = CallCounter()
        self._process = process
        self._price = price
        self.recorder = recorder
        self._clock = clock
        self._spread_s = PUT_WITHIN_S if store.kept == "redis" else 0.0
        self.lock = asyncio.Lock()
        self._begun_s = clock()
        self._number = 0
        self._waiting: deque[Part] = deque(maxlen=WAITING_MAX)
        self._logged = ""
        # Rows whose names this process has put in this hour.
        self._named: set[int] = set()
        self._names_hour = 0
        # Of the rows of this process, by number, for those that the store has lost.
        self.names: dict[int, str] = {}

    async def run(self) -> None:
        """Put and fold once a minute, until cancelled. A minute that fails is logged, and does not end it."""
        try:
            while True:
                await asyncio.sleep(MINUTE_S - self._clock() % MINUTE_S)
                try:
                    await self._run_minute()
                except Exception:
                    logger.exception("a minute of the history has failed; the next one is kept again")
        finally:
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_PUT_S):
                    await self.end_minute()
                    await self.put_waiting()
            await self.store.aclose()

    async def _run_minute(self) -> None:
        # The processes of a gateway share its cores.
        delay_s = crc32(self._process.encode()) % 1000 / 1000 * self._spread_s
        # A reader of the minute that runs sees its calls here or in the store.
        async with self.lock:
            await self.end_minute()
            await asyncio.sleep(delay_s)
            await self.put_waiting()
        await self.fold()

    async def end_minute(self) -> None:
        """Make a part of what was counted since the last one."""
        entries, begun_s = self.counter.take(), self._begun_s
        self._begun_s = self._clock()
        self._number += 1
        part, names = await asyncio.to_thread(self._part, entries, int(begun_s // MINUTE_S), self._number)
        if len(self.names) > NAMES_MAX:
            self.names.clear()
        self.names |= names
        self._waiting.append(part)

    async def put_waiting(self) -> None:
        """Put the parts that wait, and the replicas, as far as the store answers."""
        try:
            while self._waiting:
                part = self._waiting[0]
                is_done = True
                try:
                    await self.store.put(part)
                except (StoreUnavailable, asyncio.CancelledError):
                    is_done = False
                    raise
                finally:
                    # A part that cannot be put at all must not hold up those behind it.
                    if is_done and self._waiting and self._waiting[0] is part:
                        self._waiting.popleft()
            await self.put_replicas()
        except StoreUnavailable as error:
            self._log(str(error))
        else:
            self._logged = ""

    async def put_replicas(self) -> None:
        """Put the states of the replicas, if this process records them. Raises: StoreUnavailable."""
        if self.recorder is not None:
            for day, content in self.recorder.contents():
                await self.store.put_spans(day, self._process, content)
                self.recorder.forget_past(day)

    async def fold(self) -> None:
        """Merge parts, and fold the hours that are over, if this process is chosen."""
        # Others report that the store is away, and a fold waits until it is back.
        with suppress(StoreUnavailable):
            if not await self.store.is_chosen(self._process):
                return
            now_s = self._clock()
            hours: defaultdict[int, list[int]] = defaultdict(list)
            for minute in await self.store.open_minutes():
                hours[minute * MINUTE_S // HOUR_S * HOUR_S].append(minute)
            over = [hour_s for hour_s in sorted(hours) if hour_s + HOUR_S + FOLDED_AFTER_S <= now_s]
            for hour_s in over[:HOURS_PER_ROUND]:
                await self._fold_hour(hour_s, hours[hour_s])
            for hour_s in hours.keys() - set(over):
                for minute in hours[hour_s]:
                    if (minute + 1) * MINUTE_S + MERGED_AFTER_S <= now_s:
                        await self._merge(minute)

    def current(self) -> tuple[int, Table] | None:
        """Return the minute that runs, with its table, where it is small enough to be read at once."""
        if len(self.counter.entries) > CURRENT_ENTRIES_MAX:
            return None
        table, names = table_of(self.counter.entries, self._price)
        self.names |= names
        return int(self._begun_s // MINUTE_S), table

    def _part(self, entries: Entries, minute: int, number: int) -> tuple[Part, Mapping[int, str]]:
        """Return the part of a minute, and the names of its rows."""
        table, all_names = table_of(entries, self._price)
        table = limited(table, PART_TENANTS_MAX)
        names = {row: all_names[row] for row in table.ids.tolist() if row in all_names}
        if minute * MINUTE_S // HOUR_S != self._names_hour:
            # The store may have lost them.
            self._names_hour = minute * MINUTE_S // HOUR_S
            self._named = set()
        new = {number: name for number, name in names.items() if number not in self._named}
        self._named |= new.keys()
        return Part(minute, f"{self._process}:{number}", packed(table), new), names

    async def _fold_hour(self, hour_s: int, minutes: list[int]) -> None:
        version = await self.store.version()
        parts = {minute: await self.store.parts(minute) for minute in minutes}
        places = places_of(hour_s)
        known = dict(zip(places, await self.store.chunks(places), strict=True))
        contents = {minute: list(found.values()) for minute, found in parts.items()}
        chunks = await asyncio.to_thread(folded, hour_s, contents, known)
        await self.store.fold(
            Fold(version, {minute: list(found) for minute, found in parts.items()}, chunks=chunks)
        )

    async def _merge(self, minute: int) -> None:
        version = await self.store.version()
        parts = await self.store.parts(minute)
        if len(parts) < 2:
            return
        self._number += 1
        content = await asyncio.to_thread(merged, list(parts.values()))
        part = Part(minute, f"{self._process}:{self._number}", content)
        await self.store.fold(Fold(version, {minute: list(parts)}, [part]))

    def _log(self, problem: str) -> None:
        if problem != self._logged:
            self._logged = problem
            logger.warning("the history is written later, within an hour: %s", problem)
