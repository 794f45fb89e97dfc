"""Sums over tables that are read one after the other: of some rows by interval, or of all rows at once."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from gateway.history.latencies import BUCKETS
from gateway.history.ranges import Range
from gateway.history.rows import KIND_BITS, KINDS, RowKind
from gateway.history.table import COLUMNS, Table

# Tables whose sums are joined at a time.
JOINED_TOGETHER = 64


class RowSums:
    """Sums of some rows by interval of a range.

    processes: of each interval, 0 if it is not known. latencies: by interval, as far as tables were read with
    all of them. all_latencies: over the range.
    """

    def __init__(self, range_: Range, rows: Iterable[int], kind: RowKind | None = None) -> None:
        """Sum up these rows, and the calls of all rows of one kind."""
        self._range = range_
        self._kind = None if kind is None else KINDS.index(kind)
        steps = range_.steps
        self.processes: NDArray[np.int64] = np.zeros(steps, dtype=np.int64)
        self.counts = {row: np.zeros((len(COLUMNS), steps), dtype=np.int64) for row in rows}
        self.latencies = {row: np.zeros((BUCKETS, steps), dtype=np.int64) for row in self.counts}
        self.all_latencies = {row: np.zeros(BUCKETS, dtype=np.int64) for row in self.counts}
        self.of_kind: dict[int, NDArray[np.int64]] = {}

    def add(self, start_s: int, step_s: int, table: Table) -> None:
        """Add a table whose intervals have this length."""
        inside, places = _places(self._range, start_s, step_s, table.intervals)
        if not len(inside):
            return
        np.add.at(self.processes, places, table.processes[inside].astype(np.int64))
        for row, counts in self.counts.items():
            at = int(np.searchsorted(table.ids, row))
            if at < len(table.ids) and int(table.ids[at]) == row:
                np.add.at(counts.T, places, table.counts[:, at, inside].T.astype(np.int64))
                latencies = table.latencies[at]
                if latencies.shape[1] == table.intervals:
                    latencies = latencies[:, inside]
                    np.add.at(self.latencies[row].T, places, latencies.T.astype(np.int64))
                self.all_latencies[row] += latencies.sum(axis=1).astype(np.int64)
        if self._kind is not None:
            for at in np.flatnonzero((table.ids >> np.uint64(KIND_BITS)) == self._kind).tolist():
                own = self.of_kind.setdefault(int(table.ids[at]), np.zeros(self._range.steps, dtype=np.int64))
                np.add.at(own, places, table.counts[0, at, inside].astype(np.int64))


class AllSums:
    """Sums of all rows of one kind over a range."""

    def __init__(self, range_: Range, kind: RowKind, *, with_latencies: bool) -> None:
        self._range = range_
        self._kind = KINDS.index(kind)
        self._width = len(COLUMNS) + (BUCKETS if with_latencies else 0)
        self._parts: list[tuple[NDArray[np.uint64], NDArray[np.int64]]] = []

    def add(self, start_s: int, step_s: int, table: Table) -> None:
        """Add a table whose intervals have this length."""
        inside, _ = _places(self._range, start_s, step_s, table.intervals)
        rows = np.flatnonzero((table.ids >> np.uint64(KIND_BITS)) == self._kind)
        if not len(inside) or not len(rows):
            return
        sums = [table.counts[:, rows][:, :, inside].sum(axis=2).T]
        if self._width > len(COLUMNS):
            latencies = table.latencies[rows]
            if latencies.shape[2] == table.intervals:
                latencies = latencies[:, :, inside]
            sums.append(latencies.sum(axis=2))
        self._parts.append((table.ids[rows], np.concatenate(sums, axis=1).astype(np.int64)))
        if len(self._parts) >= JOINED_TOGETHER:
            self._parts = [self.result()]

    def result(self) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """Return the rows, and the sums of each: its columns, then its latencies."""
        if not self._parts:
            return np.zeros(0, dtype=np.uint64), np.zeros((0, self._width), dtype=np.int64)
        ids, inverse = np.unique(np.concatenate([ids for ids, _ in self._parts]), return_inverse=True)
        sums = np.zeros((len(ids), self._width), dtype=np.int64)
        np.add.at(sums, inverse, np.concatenate([found for _, found in self._parts]))
        return ids, sums


def _places(
    range_: Range, start_s: int, step_s: int, intervals: int
) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
    """Return which intervals of a table are inside a range, and the places of these in it."""
    starts = start_s + step_s * np.arange(intervals, dtype=np.int64)
    inside = np.flatnonzero((starts >= range_.from_s) & (starts < range_.until_s))
    return inside, (starts[inside] - range_.from_s) // range_.step_s
