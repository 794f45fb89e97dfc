"""Traffic of the last hour, sampled from the metrics, for the console.

The metrics cover all workers, so one worker samples them. If there are several, it keeps the points in a file
of the workers' folder, which the others read, and which its successor continues.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from gateway.telemetry.snapshot import CallsStatus, during, quantile, since
from gateway.telemetry.totals import Totals

logger = logging.getLogger(__name__)

INTERVAL_S = 10.0
# One hour.
POINTS_MAX = 360
FILE_NAME = "traffic-history.json"


class TrafficPoint(msgspec.Struct, frozen=True):
    """Traffic of one interval, over all workers.

    at_s: its end, in seconds since 1970. seconds: its length. failures: calls by the kind of their error.
    p50_s, p95_s, p99_s: of the interactive calls that ended, None if none did. queued_inputs,
    calls_in_flight: at its end. bulk_calls: those of `calls` that are of class bulk, with lines of batches.
    """

    at_s: float
    seconds: float
    calls: int
    failures: Mapping[str, int]
    tokens: int
    p50_s: float | None
    p95_s: float | None
    p99_s: float | None
    queued_inputs: int
    calls_in_flight: int
    bulk_calls: int = 0


class _Sample(msgspec.Struct, frozen=True):
    """Counters at one moment."""

    at_s: float
    calls: CallsStatus
    tokens: int


class TrafficHistory:
    """Points of the last hour. file: shared with other workers, None in a gateway of one worker.

    clock: seconds since 1970.
    """

    def __init__(self, file: Path | None = None, clock: Callable[[], float] = time.time) -> None:
        self._file = file
        self._clock = clock
        self._points: deque[TrafficPoint] = deque(maxlen=POINTS_MAX)
        self._last: _Sample | None = None

    def points(self, after_s: float = 0.0) -> list[TrafficPoint]:
        """Return the points that ended after a moment, the oldest first."""
        points = self._points if self._file is None else read_points(self._file)
        return [point for point in points if point.at_s > after_s]

    def record(self, totals: Totals) -> None:
        """Add the interval since the last sample; the first sample adds none."""
        sample = _Sample(self._clock(), totals.calls(), int(totals.number("gateway_tokens_total")))
        last, self._last = self._last, sample
        # A clock that was set back begins a new interval.
        if last is None or sample.at_s <= last.at_s:
            return
        self._points.append(_point_between(last, sample, totals))
        if self._file is not None:
            _write_points(self._file, self._points)

    async def record_forever(self, read: Callable[[], Totals]) -> None:
        """Sample every `INTERVAL_S`, until cancelled."""
        if self._file is not None:
            self._points.extend(read_points(self._file))
        while True:
            self.record(read())
            await asyncio.sleep(INTERVAL_S)


def read_points(file: Path) -> list[TrafficPoint]:
    """Return the points in a file, none if it does not exist yet or cannot be read."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=list[TrafficPoint])
    except (OSError, msgspec.MsgspecError):
        return []


def _write_points(file: Path, points: deque[TrafficPoint]) -> None:
    partial = file.with_suffix(".partial")
    try:
        partial.write_bytes(msgspec.json.encode(list(points)))
        partial.replace(file)
    except OSError as error:
        logger.warning("the traffic history could not be written: %s", error)


def _point_between(before: _Sample, after: _Sample, totals: Totals) -> TrafficPoint:
    counts = {
        kind: int(since(before.calls.outcomes.get(kind, 0), count))
        for kind, count in after.calls.outcomes.items()
    }
    durations = during(before.calls.interactive, after.calls.interactive)
    bulk = during(before.calls.bulk, after.calls.bulk)
    return TrafficPoint(
        round(after.at_s, 3),
        round(after.at_s - before.at_s, 3),
        sum(counts.values()),
        {kind: count for kind, count in counts.items() if kind != "ok" and count},
        int(since(before.tokens, after.tokens)),
        quantile(durations, 0.5),
        quantile(durations, 0.95),
        quantile(durations, 0.99),
        int(totals.number("gateway_lane_queued_inputs")),
        int(totals.number("gateway_calls_in_flight")),
        int(bulk.counts[-1]) if bulk.counts else 0,
    )
