"""History of replicas: the times for which each was in one state, as one process of each gateway saw it.

A process keeps the spans of the current day and writes them once a minute, in place of those before. At
midnight (UTC) every open span ends and begins again, so that each day can be read without those before it. An
open span of a process that has stopped writing ends when it was last written. Where gateways differ, the
worst of their states counts.
"""

import heapq
import time
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from math import inf

import msgspec

from gateway.events import ReplicaChanged
from gateway.history.store import DAY_S

# Spans of one process on one day: the newest are kept.
SPANS_MAX = 500
REASON_CHARACTERS = 200
# Spans that one reply has at most.
SHOWN_MAX = 5000
READ_MAX = 100_000
DAY_BYTES_MAX = 1 << 20
# A process that has not written for this long has stopped.
SILENT_AFTER_S = 180.0
# The worst first.
STATES = ("down", "probation", "joining", "drained", "up")


class Span(msgspec.Struct, array_like=True):
    """Time for which a replica was in one state. until_s: None if it still is."""

    upstream: str
    replica: str
    state: str
    reason: str
    from_s: float
    until_s: float | None = None


class DaySpans(msgspec.Struct, frozen=True):
    """Spans of one process on one day. seen_s: when they were written."""

    seen_s: float
    spans: list[Span]


class ReplicaSpan(msgspec.Struct, frozen=True):
    """Time for which a replica was in one state, in seconds since 1970. until_s: null if it still is."""

    from_s: float
    until_s: float | None
    state: str
    reason: str


class SpanRecorder:
    """Spans of this process on the current day. clock: seconds since 1970."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._day = int(clock() // DAY_S)
        self._open: dict[tuple[str, str], Span] = {}
        self._ended: deque[Span] = deque(maxlen=SPANS_MAX)
        # Days that are over and not yet known to be written.
        self._past: dict[int, bytes] = {}

    def observe(self, event: ReplicaChanged) -> None:
        """Begin a span, and end the one before."""
        now_s = round(self._clock(), 3)
        self._turn(now_s)
        key = event.upstream, event.replica
        before = self._open.get(key)
        if before is not None and (before.state, before.reason) == (event.state, event.reason):
            return
        self._end(key, now_s)
        if event.state != "gone" and len(self._open) < SPANS_MAX:
            reason = event.reason[:REASON_CHARACTERS]
            self._open[key] = Span(event.upstream, event.replica, event.state, reason, now_s)

    def forget(self, upstream: str) -> None:
        """End the spans of a removed or replaced upstream."""
        for key in [key for key in self._open if key[0] == upstream]:
            self._end(key, round(self._clock(), 3))

    def contents(self) -> list[tuple[int, bytes]]:
        """Return the days to write, with their spans."""
        now_s = self._clock()
        self._turn(now_s)
        spans = [*self._ended, *self._open.values()]
        days = list(self._past.items())
        return [*days, (self._day, _packed(spans, now_s))] if spans else days

    def forget_past(self, day: int) -> None:
        """Drop a day that is over and was written."""
        self._past.pop(day, None)

    def _end(self, key: tuple[str, str], now_s: float) -> None:
        if (span := self._open.pop(key, None)) is not None:
            # A clock that was set back makes no negative span.
            self._ended.append(msgspec.structs.replace(span, until_s=max(span.from_s, now_s)))

    def _turn(self, now_s: float) -> None:
        """Begin a new day."""
        day = int(now_s // DAY_S)
        if day <= self._day:
            return
        midnight_s = float(day * DAY_S)
        running = list(self._open.items())
        for key, _ in running:
            self._end(key, midnight_s)
        if self._ended:
            self._past = {self._day: _packed(self._ended, now_s)}
        self._ended.clear()
        self._day = day
        self._open = {key: msgspec.structs.replace(span, from_s=midnight_s) for key, span in running}


def _packed(spans: Iterable[Span], now_s: float) -> bytes:
    return zlib.compress(msgspec.msgpack.encode(DaySpans(now_s, list(spans)[-SPANS_MAX:])))


def spans_of(contents: Iterable[bytes], now_s: float) -> list[Span]:
    """Return all spans of some days; an open one of a process that has stopped ends when it was written."""
    found: list[Span] = []
    for content in contents:
        try:
            text = zlib.decompressobj().decompress(content, DAY_BYTES_MAX)
            day = msgspec.msgpack.decode(text, type=DaySpans)
        except (zlib.error, msgspec.MsgspecError):
            # Another release wrote it in another form.
            continue
        is_silent = now_s - day.seen_s > SILENT_AFTER_S
        for span in day.spans:
            if span.until_s is None and is_silent:
                span.until_s = max(span.from_s, day.seen_s)
            found.append(span)
    found.sort(key=lambda span: span.from_s)
    return found[-READ_MAX:]


def by_replica(
    spans: Sequence[Span], from_s: float, until_s: float, upstream: str | None = None
) -> dict[tuple[str, str], list[ReplicaSpan]]:
    """Return the spans of each replica that touch a time, the oldest first, at most `SHOWN_MAX` of them."""
    grouped: defaultdict[tuple[str, str], list[Span]] = defaultdict(list)
    for span in spans:
        is_inside = span.from_s < until_s and (span.until_s is None or span.until_s > from_s)
        if is_inside and upstream in (None, span.upstream):
            grouped[span.upstream, span.replica].append(span)
    found = {key: _worst(own) for key, own in sorted(grouped.items())}
    most = SHOWN_MAX // max(1, len(found)) or 1
    return {key: own[-most:] for key, own in found.items()}


def _worst(spans: Sequence[Span]) -> list[ReplicaSpan]:
    """Return spans that do not overlap: at each moment the worst of those given. spans: by their start."""
    moments = sorted({moment for span in spans for moment in (span.from_s, span.until_s or inf)})
    found: list[ReplicaSpan] = []
    active: list[tuple[int, int, Span]] = []
    waiting = deque(enumerate(spans))
    for start_s, end_s in pairwise(moments):
        while waiting and waiting[0][1].from_s <= start_s:
            number, span = waiting.popleft()
            rank = STATES.index(span.state) if span.state in STATES else len(STATES)
            heapq.heappush(active, (rank, number, span))
        while active and (active[0][2].until_s or inf) <= start_s:
            heapq.heappop(active)
        if not active:
            continue
        worst = active[0][2]
        last = found[-1] if found else None
        until_s = None if end_s == inf else end_s
        if last is not None and (last.until_s, last.state, last.reason) == (
            start_s,
            worst.state,
            worst.reason,
        ):
            found[-1] = msgspec.structs.replace(last, until_s=until_s)
        else:
            found.append(ReplicaSpan(start_s, until_s, worst.state, worst.reason))
    return found
