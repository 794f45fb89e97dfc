"""Table of traffic: counts and latencies by row and interval, packed into few bytes. Pure.

A table covers some equal intervals: one minute, the 60 minutes of an hour, or the 24 hours of a day. It is a
set of columns, of which each is an array of rows and intervals. Packed, each column keeps only as many bytes
of its numbers as its largest needs, the lowest bytes of all numbers first, and is compressed: equal high
bytes take next to no space, and neighbours in time resemble each other. A busy tenant takes about 13 bytes a
minute and 16 bytes an hour, its latencies included. Tables add up, in any order.
"""

import struct
import zlib
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from gateway.history.latencies import BUCKETS, coded, decoded
from gateway.history.rows import KIND_BITS, REST_ID, TENANT_KIND

# Cost is in nano-units of the currency. Refused calls are among those that failed.
COLUMNS = ("calls", "failed", "refused", "tokens", "cost")
CALLS, FAILED, REFUSED, TOKENS, COST = range(len(COLUMNS))
# Bounds of what a packed table may claim to contain.
ROWS_MAX = 1 << 16
INTERVALS_MAX = 60
LEVEL = 6
FORM = b"GH1"
# Form, intervals, rows, bytes of a number in each column and in the latencies, length of the first part.
HEADER = struct.Struct("<3sBI6BI")


class UnreadableTable(ValueError):
    """Bytes are no table, or one of another release."""


class Table(msgspec.Struct, frozen=True):
    """Traffic by row and interval.

    ids: numbers of the rows, ascending. processes: of each interval, how many processes counted in it; 0 for
    an interval that is not known. counts: by column, row and interval. latencies: of interactive calls, by
    row, bucket and interval.
    """

    ids: NDArray[np.uint64]
    processes: NDArray[np.uint64]
    counts: NDArray[np.uint64]
    latencies: NDArray[np.uint64]

    @property
    def intervals(self) -> int:
        """Return the number of intervals."""
        return len(self.processes)


def empty_table(intervals: int, ids: Iterable[int] = ()) -> Table:
    """Return a table with these rows in which nothing is counted."""
    rows = np.array(sorted(ids), dtype=np.uint64)
    return Table(
        rows,
        np.zeros(intervals, dtype=np.uint64),
        np.zeros((len(COLUMNS), len(rows), intervals), dtype=np.uint64),
        np.zeros((len(rows), BUCKETS, intervals), dtype=np.uint64),
    )


def added(intervals: int, parts: Sequence[tuple[int, Table]]) -> Table:
    """Return the sum of tables, each of which begins at an interval of the result."""
    ids = np.unique(np.concatenate([np.zeros(0, np.uint64), *(part.ids for _, part in parts)]))
    total = empty_table(intervals, ids.tolist())
    for first, part in parts:
        places, end = np.searchsorted(ids, part.ids), first + part.intervals
        total.processes[first:end] += part.processes
        total.counts[:, places, first:end] += part.counts
        total.latencies[places, :, first:end] += part.latencies
    return total


def in_one_interval(table: Table) -> Table:
    """Return a table whose only interval has the sum of all intervals."""
    return Table(
        table.ids,
        table.processes.max(keepdims=True, initial=0),
        table.counts.sum(axis=2, keepdims=True),
        table.latencies.sum(axis=2, keepdims=True),
    )


def limited(table: Table, tenants_max: int) -> Table:
    """Return a table with rows of the busiest tenants; the others are added up in one row."""
    is_tenant = (table.ids >> np.uint64(KIND_BITS)) == TENANT_KIND
    if int(is_tenant.sum()) <= tenants_max:
        return table
    tenants = np.flatnonzero(is_tenant)
    calls = table.counts[CALLS, tenants].sum(axis=1)
    # Equally busy ones are chosen by their number, so that every gateway chooses the same.
    order = np.lexsort((table.ids[tenants], -calls.astype(np.int64)))
    dropped = tenants[order[tenants_max:]]
    rest = Table(
        np.array([REST_ID], dtype=np.uint64),
        np.zeros_like(table.processes),
        table.counts[:, dropped].sum(axis=1, keepdims=True),
        table.latencies[dropped].sum(axis=0, keepdims=True),
    )
    return added(
        table.intervals, [(0, rows_of(table, np.delete(np.arange(len(table.ids)), dropped))), (0, rest)]
    )


def rows_of(table: Table, places: NDArray[np.intp]) -> Table:
    """Return a table with some of the rows."""
    return Table(table.ids[places], table.processes, table.counts[:, places], table.latencies[places])


def packed(table: Table) -> bytes:
    """Return a table as bytes."""
    columns = [_planes(column) for column in table.counts]
    latencies = _planes(coded(table.latencies))
    processes = np.minimum(table.processes, 0xFFFF).astype("<u2").tobytes()
    first = zlib.compress(b"".join([processes, *(planes for _, planes in columns)]), LEVEL)
    second = zlib.compress(latencies[1], LEVEL)
    widths = [width for width, _ in (*columns, latencies)]
    header = HEADER.pack(FORM, table.intervals, len(table.ids), *widths, len(first))
    return b"".join([header, table.ids.astype("<u8").tobytes(), first, second])


def unpacked(content: bytes, *, with_latencies: bool = True) -> Table:
    """Return the table of some bytes. Without latencies those are 0. Raises: UnreadableTable."""
    try:
        form, intervals, rows, *widths, length = HEADER.unpack_from(content)
    except struct.error as error:
        raise UnreadableTable("it is cut off") from error
    if form != FORM or not 0 < intervals <= INTERVALS_MAX or rows > ROWS_MAX or max(widths) > 8:
        raise UnreadableTable("it has another form")
    ids_end = HEADER.size + 8 * rows
    ids = np.frombuffer(content[HEADER.size : ids_end].ljust(8 * rows, b"\0"), dtype="<u8").astype(np.uint64)
    shape, cells = (rows, intervals), rows * intervals
    size = 2 * intervals + cells * sum(widths[:-1])
    first = memoryview(_inflated(content[ids_end : ids_end + length], size))
    processes = np.frombuffer(first[: 2 * intervals], dtype="<u2").astype(np.uint64)
    counts, start = np.zeros((len(COLUMNS), *shape), dtype=np.uint64), 2 * intervals
    for column, width in enumerate(widths[:-1]):
        counts[column] = _numbers(first[start : start + width * cells], width, shape)
        start += width * cells
    latency_shape = (rows, BUCKETS, intervals)
    if not with_latencies:
        return Table(ids, processes, counts, np.zeros((rows, BUCKETS, intervals), dtype=np.uint64))
    codes = _inflated(content[ids_end + length :], widths[-1] * cells * BUCKETS)
    return Table(ids, processes, counts, decoded(_numbers(memoryview(codes), widths[-1], latency_shape)))


def _planes(numbers: NDArray[np.unsignedinteger]) -> tuple[int, bytes]:
    """Return how many bytes the largest number needs, and these bytes of all numbers, the lowest first."""
    width = (int(numbers.max(initial=0)).bit_length() + 7) // 8
    parts = numbers.astype("<u8").reshape(-1).view(np.uint8).reshape(-1, 8)
    return width, parts[:, :width].T.tobytes()


def _numbers(planes: memoryview, width: int, shape: tuple[int, ...]) -> NDArray[np.uint64]:
    numbers = np.zeros(shape, dtype=np.uint64)
    if numbers.size and width:
        parts = np.frombuffer(planes, dtype=np.uint8).reshape(width, -1)
        for place in range(width):
            numbers |= parts[place].reshape(shape).astype(np.uint64) << np.uint64(8 * place)
    return numbers


def _inflated(content: bytes, size: int) -> bytes:
    """Return exactly `size` bytes. Raises: UnreadableTable."""
    inflater = zlib.decompressobj()
    try:
        found = inflater.decompress(content, size + 1)
    except zlib.error as error:
        raise UnreadableTable("it is damaged") from error
    if len(found) != size:
        raise UnreadableTable("it is damaged")
    return found
