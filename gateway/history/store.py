"""Interface of the places where history is kept, and the layout that they share. Pure.

Each process puts its minute as one part: bytes under a name that no other part ever has, so that a part that
is put again after a lost reply is the same part. Once the hour has passed, one process folds the parts into
chunks, and marks them as folded in the same step; a part that is put again later finds the mark. Chunks hold
an hour of minutes or a day of hours. Each has several shards: one with total and models, which most charts
need, and 16 with tenants, of which a chart of one tenant reads one.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol, TypeAlias

import msgspec
import numpy as np

from gateway.history.rows import KIND_BITS, TENANT_KIND
from gateway.history.table import Table, rows_of

MINUTE_S = 60
HOUR_S = 3600
DAY_S = 24 * HOUR_S
MINUTES_KEPT_S = DAY_S
KEPT_DAYS = 90
SHARDS = 16
# Shard of all rows that are no tenants.
HEAD = SHARDS
# Names of tenants that are stored for a period of 30 days. Those with a row are at most 1,000 at a time.
NAMES_MAX = 20_000
NAMES_PERIOD_DAYS = 30
# Processes whose replicas are kept on one day.
RECORDERS_MAX = 256
# Time for which the mark of a folded part is kept: longer than any process tries to put one again.
MARKS_KEPT_S = 2 * HOUR_S
# Parts that nothing has folded, because no gateway runs.
PARTS_KEPT_S = 7 * DAY_S

Kept: TypeAlias = Literal["redis", "state_dir", "memory"]
# minute: intervals of a minute in a chunk of an hour. hour: intervals of an hour in a chunk of a day.
Resolution: TypeAlias = Literal["minute", "hour"]
STEP_S: Mapping[Resolution, int] = {"minute": MINUTE_S, "hour": HOUR_S}
CHUNK_S: Mapping[Resolution, int] = {"minute": HOUR_S, "hour": DAY_S}
CHUNK_KEPT_S: Mapping[Resolution, int] = {"minute": MINUTES_KEPT_S, "hour": KEPT_DAYS * DAY_S}


class Part(msgspec.Struct, frozen=True):
    """Table of one minute of one process. minute: since 1970. name: unique among all parts.

    names: of its rows, by number.
    """

    minute: int
    name: str
    content: bytes
    names: Mapping[int, str] = {}


class Chunk(msgspec.Struct, frozen=True):
    """Place of a chunk: its resolution, its start in seconds since 1970, and its shard."""

    resolution: Resolution
    start_s: int
    shard: int

    @property
    def key(self) -> str:
        """Name in a store."""
        return f"{self.resolution}:{self.start_s}:{self.shard}"

    @property
    def expires_s(self) -> int:
        """Return the time from which its last interval is no longer shown, in seconds since 1970."""
        return self.start_s + CHUNK_S[self.resolution] * 2 + CHUNK_KEPT_S[self.resolution]


class Fold(msgspec.Struct, frozen=True):
    """One step: parts are folded, and what they add up to is stored.

    version: of the store when the parts were read; the step is refused if another one came between. parts:
    names of the folded ones by minute. merged: parts that replace them. chunks: with their content.
    """

    version: int
    parts: Mapping[int, Sequence[str]]
    merged: Sequence[Part] = ()
    chunks: Mapping[Chunk, bytes] = {}


class HistoryStore(Protocol):
    """Place where history is kept. All operations raise StoreUnavailable."""

    @property
    def kept(self) -> Kept:
        """Kind of the place."""

    async def put(self, part: Part) -> None:
        """Store a part, unless it is there or was folded."""

    async def open_minutes(self) -> list[int]:
        """Return the minutes that have parts."""

    async def parts(self, minute: int) -> Mapping[str, bytes]:
        """Return the parts of a minute, without folded ones."""

    async def chunks(self, places: Sequence[Chunk]) -> list[bytes | None]:
        """Return chunks, None for each that is not there."""

    async def version(self) -> int:
        """Return the number of the last fold."""

    async def fold(self, fold: Fold) -> bool:
        """Carry out a step; return False, with nothing changed, if another one came between."""

    async def is_chosen(self, process: str) -> bool:
        """Return whether this process folds now. Correctness does not depend on it."""

    async def names(self) -> Mapping[int, str]:
        """Return the names of rows."""

    async def put_spans(self, day: int, recorder: str, content: bytes) -> None:
        """Store the replicas of one process on a day since 1970, in place of those before."""

    async def spans(self, days: Sequence[int]) -> list[bytes]:
        """Return the replicas of all processes on some days."""

    async def aclose(self) -> None:
        """Close the connections."""


def shard_of(number: int) -> int:
    """Return the shard of a row."""
    return number % SHARDS if number >> KIND_BITS == TENANT_KIND else HEAD


def sharded(table: Table) -> Mapping[int, Table]:
    """Return the shards of a table that have rows; the first one is always there."""
    kinds = table.ids >> np.uint64(KIND_BITS)
    shards = np.where(kinds == TENANT_KIND, table.ids % np.uint64(SHARDS), np.uint64(HEAD))
    found = {HEAD, *np.unique(shards).tolist()}
    return {int(shard): rows_of(table, np.flatnonzero(shards == shard)) for shard in found}


def names_periods(now_s: float) -> list[int]:
    """Return the periods whose names may be needed, the current one first."""
    current = int(now_s) // (NAMES_PERIOD_DAYS * DAY_S)
    return [current - back for back in range(KEPT_DAYS // NAMES_PERIOD_DAYS + 1)]
