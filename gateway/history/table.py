"""Table of traffic: counts and latencies by row and interval, packed into few bytes. Pure.

A table covers some equal intervals: one minute, the 60 minutes of an hour, or the 24 hours of a day. It is a
set of columns, of which each is an array of rows and intervals. Packed, each column keeps only as many bytes
of its numbers as its largest needs, the lowest bytes of all numbers first, and is compressed: equal high
bytes take next to no space, and neighbours in time resemble each other. A busy tenant takes about 11 bytes a
minute and 15 bytes an hour, its latencies included. Tables add up, in any order.

Latencies are most of a table, and slow to read. Their sum over the intervals is packed apart from them, for
readers that need no more.
"""

import bz2
import struct
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeAlias

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
# Form, intervals, rows; bytes of a number in each column, in the sums of latencies and in the latencies;
# lengths of the first two parts.
HEADER = struct.Struct("<3sBI7B2I")
# Latencies that a reader needs: none, their sum over the intervals, or those of each interval.
Detail: TypeAlias = Literal["none", "sum", "all"]


class UnreadableTable(ValueError):
    """Bytes are no table, or one of another release."""


class Table(msgspec.Struct, frozen=True):
    """Traffic by row and interval.

    ids: numbers of the rows, ascending. processes: of each interval, how many processes counted in it; 0 for
    an interval that is not known. counts: by column, row and interval. latencies: of interactive calls, by
    row, bucket and interval. A table that was read with less has their sum as the only interval, or none.
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
    codes = coded(table.latencies)
    columns = [_planes(column) for column in table.counts]
    sums, latencies = _planes(coded(decoded(codes).sum(axis=2))), _planes(codes)
    processes = np.minimum(table.processes, 0xFFFF).astype("<u2").tobytes()
    first = zlib.compress(b"".join([processes, *(planes for _, planes in columns)]), LEVEL)
    second = zlib.compress(sums[1], LEVEL)
    # Its model of the data fits these counts: a quarter smaller, though slower to read.
    third = bz2.compress(latencies[1])
    widths = [width for width, _ in (*columns, sums, latencies)]
    header = HEADER.pack(FORM, table.intervals, len(table.ids), *widths, len(first), len(second))
    return b"".join([header, table.ids.astype("<u8").tobytes(), first, second, third])


def unpacked(content: bytes, detail: Detail = "all") -> Table:
    """Return the table of some bytes. Raises: UnreadableTable."""
    try:
        form, intervals, rows, *widths, first_length, second_length = HEADER.unpack_from(content)
    except struct.error as error:
        raise UnreadableTable("it is cut off") from error
    if form != FORM or not 0 < intervals <= INTERVALS_MAX or rows > ROWS_MAX or max(widths) > 8:
        raise UnreadableTable("it has another form")
    first_at = HEADER.size + 8 * rows
    second_at = first_at + first_length
    third_at = second_at + second_length
    cells, start = rows * intervals, 2 * intervals
    size = start + cells * sum(widths[: len(COLUMNS)])
    first = memoryview(_inflated(content[first_at:second_at], size, zlib.decompressobj()))
    counts = np.zeros((len(COLUMNS), rows, intervals), dtype=np.uint64)
    for column, width in enumerate(widths[: len(COLUMNS)]):
        counts[column] = _numbers(first[start : start + width * cells], width, (rows, intervals))
        start += width * cells
    if detail == "none":
        latencies = np.zeros((rows, BUCKETS, 0), dtype=np.uint64)
    elif detail == "sum":
        planes = _inflated(content[second_at:third_at], widths[-2] * rows * BUCKETS, zlib.decompressobj())
        latencies = decoded(_numbers(memoryview(planes), widths[-2], (rows, BUCKETS, 1)))
    else:
        planes = _inflated(content[third_at:], widths[-1] * cells * BUCKETS, bz2.BZ2Decompressor())
        latencies = decoded(_numbers(memoryview(planes), widths[-1], (rows, BUCKETS, intervals)))
    ids = np.frombuffer(content[HEADER.size : first_at], dtype="<u8").astype(np.uint64)
    processes = np.frombuffer(first[: 2 * intervals], dtype="<u2").astype(np.uint64)
    return Table(ids, processes, counts, latencies)


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


def _inflated(content: bytes, size: int, inflater: Any) -> bytes:
    """Return exactly `size` bytes. Raises: UnreadableTable."""
    try:
        found: bytes = inflater.decompress(content, size + 1)
    except (zlib.error, OSError) as error:
        raise UnreadableTable("it is damaged") from error
    if len(found) != size or not inflater.eof:
        raise UnreadableTable("it is damaged")
    return found
