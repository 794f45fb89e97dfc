"""History for status page and console: recent changes, the last calls, and the traffic of the last hour.

None of it contains inputs, as events contain none, and all of it is bounded. Changes are the view of one
worker, which judges the health of replicas itself. Each worker keeps its own calls and writes them to a file
of the workers' folder once a second, so that any of them can list all. Traffic is sampled from the metrics,
which cover all workers, by one of them; it keeps the points in a file, which the others read and its
successor continues.
"""

import asyncio
import logging
import os
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from gateway.events import (
    AttemptFinished,
    CallFinished,
    Event,
    GatewayDrained,
    Observers,
    ProcessRestarted,
    ReplicaChanged,
    ReplicaSlow,
    SpaceChecked,
    Stage,
    StoreChanged,
    StoreLost,
    UpstreamJudged,
    tenants_and_keys,
)
from gateway.telemetry.snapshot import CallsStatus, StatusChange, during, quantile, since
from gateway.telemetry.totals import Totals, is_monitoring

CHANGES_MAX = 50
# Types of events that are changes.
CHANGES = (
    ReplicaChanged,
    ReplicaSlow,
    StoreChanged,
    StoreLost,
    SpaceChecked,
    UpstreamJudged,
    ProcessRestarted,
)
# Weight of the newest latency in the running mean.
NEWEST_SHARE = 0.1
Item = TypeVar("Item")

logger = logging.getLogger(__name__)


class ReplicaHistory(msgspec.Struct):
    """State of one replica. since_s: of its last change, in seconds since 1970."""

    since_s: float | None = None
    reason: str = ""
    latency_s: float | None = None

    def change(self, at_s: float, reason: str) -> None:
        """Record a change."""
        self.since_s, self.reason = at_s, reason

    def add_latency(self, seconds: float) -> None:
        """Take a latency into the running mean."""
        before_s = seconds if self.latency_s is None else self.latency_s
        self.latency_s = before_s + (seconds - before_s) * NEWEST_SHARE


class ChangeHistory:
    """History of changes that events report. clock: seconds since 1970."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._changes: deque[StatusChange] = deque(maxlen=CHANGES_MAX)
        self._replicas: dict[tuple[str, str], ReplicaHistory] = {}
        # Why the quota store is away, as this worker saw it; nothing while it answers.
        self.store_trouble = ""

    def observe(self, event: Event) -> None:
        """Record one event."""
        match event:
            case AttemptFinished():
                self.observe_attempt(event)
            case ReplicaChanged() | ReplicaSlow():
                self._replica_changed(event)
            case StoreChanged():
                self.store_trouble = event.reason if event.away else ""
                self._add("quota store", "away" if event.away else "back", event.reason)
            case StoreLost():
                still = "still lacks" if event.is_repeated else "lost"
                what = f"{still} {tenants_and_keys(event.tenants, event.keys)}"
                self._add("keys and tenants in Redis", what, event.reason)
            case SpaceChecked(changed=True, outcome=outcome) if outcome != "fits":
                self._add(_name(event), f"vectors: {outcome}", event.reason)
            case UpstreamJudged():
                self._add(f"{event.model} on {event.upstream}", event.standing, event.reason)
            case ProcessRestarted(times=times) if times:
                what = "hung, started again" if event.reason == "hung" else "ended, started again"
                self._changes.append(StatusChange(event.at_s, event.process, what, event.how))

    def observe_drain(self, event: GatewayDrained) -> None:
        """Record that an operator took this gateway out, or put it back."""
        self._add("this gateway", "back" if event.since_s is None else "drained", "an operator")

    def changes(self) -> tuple[StatusChange, ...]:
        """Return the changes, the newest first."""
        return tuple(reversed(self._changes))

    def of(self, upstream: str, replica: str) -> ReplicaHistory:
        """Return the state of a replica; empty if it never changed or was removed."""
        return self._replicas.get((upstream, replica)) or ReplicaHistory()

    def forget(self, upstream: str) -> None:
        """Drop the replicas of a removed or replaced upstream; the changes stay listed."""
        self._replicas = {key: history for key, history in self._replicas.items() if key[0] != upstream}

    def _replica_changed(self, event: ReplicaChanged | ReplicaSlow) -> None:
        if isinstance(event, ReplicaSlow):
            self._add(_name(event), "slow", f"{event.slowness:.0f} times slower than the fastest replica")
            return
        self._add(_name(event), event.state, event.reason)
        if event.state == "gone":
            self._replicas.pop((event.upstream, event.replica), None)
            return
        history = self._replicas.setdefault((event.upstream, event.replica), ReplicaHistory())
        history.change(self._clock(), event.reason)

    def _add(self, subject: str, what: str, reason: str) -> None:
        self._changes.append(StatusChange(self._clock(), subject, what, reason))

    def observe_attempt(self, event: AttemptFinished) -> None:
        """Take the latency of a successful attempt into the mean of its replica.

        A replica that was removed before the end of its last attempt has no entry: nothing would remove it.
        """
        history = self._replicas.get((event.upstream, event.replica))
        if history is not None and event.outcome == "ok":
            history.add_latency(event.duration_s)


def _name(event: ReplicaChanged | ReplicaSlow | SpaceChecked) -> str:
    if event.upstream == event.replica:
        return event.upstream
    return f"{event.upstream} {event.replica}"


CALLS_MAX = 250
# Failed calls that are kept longer, of so many tenants.
FAILED_OF_TENANT = 10
FAILED_TENANTS = 50
WRITE_INTERVAL_S = 1.0
# Removed tenants whose calls other workers may still have in their files.
FORGOTTEN_MAX = 1000
FILE_PREFIX = "recent-calls-"


class RecentCall(msgspec.Struct, frozen=True):
    """One call that ended.

    at_s: its end, in seconds since 1970. gateway: that served it, in a list of several. trace_id: None unless
    its trace was recorded. The other fields are those of the event.
    """

    at_s: float
    request_id: str
    route: str
    status: int
    outcome: str
    duration_s: float
    tenant: str | None
    key_id: str | None
    model: str | None
    operation: str | None
    inputs: int
    tokens: int
    stages: Mapping[Stage, float]
    replicas: tuple[str, ...] = ()
    attempts: int = 0
    upstream_status: str | None = None
    upstream_words: str | None = None
    end_user: str | None = None
    trace_id: str | None = None
    cost: float | None = None
    truncated_inputs: int | None = 0
    message: str | None = None
    gateway: str | None = None


class RecentCalls:
    """The last calls of this worker, and of the others by their files.

    The last failed calls of a tenant stay when calls of others have taken the places of the rest.
    folder: shared by the workers, None in a gateway of one worker. clock: seconds since 1970.
    """

    def __init__(
        self, folder: Path | None = None, worker: int = 0, clock: Callable[[], float] = time.time
    ) -> None:
        self._folder = folder
        self._file = None if folder is None else folder / f"{FILE_PREFIX}{worker}.json"
        self._clock = clock
        # Events are kept as they are: most are dropped before anybody reads them.
        self._ended: deque[tuple[float, CallFinished]] = deque(maxlen=CALLS_MAX)
        # By tenant, the one that failed last at the end.
        self._failed: OrderedDict[str | None, deque[tuple[float, CallFinished]]] = OrderedDict()
        self._is_written = True
        # When tenants were removed: their calls until then belong to no tenant of the same name.
        self._forgotten: dict[str | None, float] = {}
        # Of other workers, with the time of the file's change.
        self._read_files: dict[Path, tuple[int, list[RecentCall]]] = {}

    def observe(self, event: Event) -> None:
        """Keep a call, unless it belongs to monitoring."""
        if isinstance(event, CallFinished) and not is_monitoring(event.route):
            ended = self._clock(), event
            self._ended.append(ended)
            self._is_written = False
            if event.outcome != "ok":
                self._keep_failed(ended)

    def forget(self, tenants: Collection[str]) -> None:
        """Drop the calls of removed tenants: another tenant of the same name must not see them."""
        self._ended = deque((ended for ended in self._ended if ended[1].tenant not in tenants), CALLS_MAX)
        now_s = self._clock()
        for tenant in tenants:
            self._failed.pop(tenant, None)
            self._forgotten.pop(tenant, None)
            self._forgotten[tenant] = now_s
        while len(self._forgotten) > FORGOTTEN_MAX:
            del self._forgotten[next(iter(self._forgotten))]
        self._is_written = False

    def _keep_failed(self, ended: tuple[float, CallFinished]) -> None:
        tenant = ended[1].tenant
        self._failed.setdefault(tenant, deque(maxlen=FAILED_OF_TENANT)).append(ended)
        self._failed.move_to_end(tenant)
        if len(self._failed) > FAILED_TENANTS:
            self._failed.popitem(last=False)

    def calls(self, tenant: str | None = None) -> list[RecentCall]:
        """Return the last calls of all workers, the newest first, and behind them failed ones before.

        tenant: whose calls alone are returned, None for all.
        """
        others = (call for file in self._other_files() for call in self._read(file))
        found = self._own(tenant) + [
            call
            for call in others
            if tenant in {None, call.tenant} and call.at_s > self._forgotten.get(call.tenant, 0.0)
        ]
        # Of calls that ended in the same millisecond, the last one is the newest.
        found.reverse()
        found.sort(key=attrgetter("at_s"), reverse=True)
        failed = [call for call in found[CALLS_MAX:] if call.outcome != "ok"]
        return found[:CALLS_MAX] + failed[: FAILED_TENANTS * FAILED_OF_TENANT]

    def _own(self, tenant: str | None = None) -> list[RecentCall]:
        """Return the calls of this worker, each once."""
        first = self._ended[0] if self._ended else None
        older = (ended for failed in self._failed.values() for ended in failed)
        dropped = [] if first is None else [ended for ended in older if ended[0] < first[0]]
        return [
            _recent(at_s, event) for at_s, event in (*dropped, *self._ended) if tenant in {None, event.tenant}
        ]

    def _read(self, file: Path) -> list[RecentCall]:
        """Return the calls of another worker, which are decoded once for each version of its file."""
        try:
            version = file.stat().st_mtime_ns
        except OSError:
            return []
        if (known := self._read_files.get(file)) is None or known[0] != version:
            known = self._read_files[file] = version, _read_shared(file, RecentCall)
        return known[1]

    def write(self) -> None:
        """Write this worker's calls for the others, if there are new ones."""
        if self._file is None or self._is_written:
            return
        self._is_written = True
        _write_shared(self._file, self._own())

    async def write_forever(self) -> None:
        """Write every `WRITE_INTERVAL_S`, until cancelled."""
        while True:
            self.write()
            await asyncio.sleep(WRITE_INTERVAL_S)

    def _other_files(self) -> list[Path]:
        if self._folder is None:
            return []
        return [file for file in self._folder.glob(f"{FILE_PREFIX}*.json") if file != self._file]


# Of an event, what a recent call repeats: all between its time and its gateway, but the trace.
_REPEATED_FIELDS = [name for name in RecentCall.__struct_fields__[1:-1] if name != "trace_id"]
_REPEATED = attrgetter(*_REPEATED_FIELDS)


def _recent(at_s: float, event: CallFinished) -> RecentCall:
    repeated = dict(zip(_REPEATED_FIELDS, _REPEATED(event), strict=True))
    trace_id = event.trace_id if event.is_recorded else None
    return RecentCall(at_s=round(at_s, 3), trace_id=trace_id, **repeated)


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
        points = self._points if self._file is None else _read_shared(self._file, TrafficPoint)
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
            _write_shared(self._file, self._points)

    async def record_forever(self, read: Callable[[], Totals]) -> None:
        """Sample every `INTERVAL_S`, until cancelled."""
        if self._file is not None:
            self._points.extend(_read_shared(self._file, TrafficPoint))
        while True:
            self.record(read())
            await asyncio.sleep(INTERVAL_S)


def _read_shared(file: Path, kind: type[Item]) -> list[Item]:
    """Return what a file of the workers' folder lists, nothing if it is not there or cannot be read."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=list[kind])  # type: ignore[valid-type]
    except (OSError, msgspec.MsgspecError):
        return []


def _write_shared(file: Path, items: Iterable[object]) -> None:
    partial = file.with_suffix(".partial")
    try:
        partial.write_bytes(msgspec.json.encode(list(items)))
        partial.replace(file)
    except OSError as error:
        logger.warning("%s could not be written: %s", file.name, error)


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


class History:
    """History of one worker, with the calls and the traffic of the others. worker: None for a single one."""

    def __init__(self, worker: int | None) -> None:
        self._worker = worker
        self.changes = ChangeHistory()
        # The folder in which the workers share their metrics.
        folder = None if worker is None else Path(os.environ["PROMETHEUS_MULTIPROC_DIR"])
        self.traffic = TrafficHistory(None if folder is None else folder / FILE_NAME)
        self.calls = RecentCalls(folder, worker or 0)

    def join(self, observers: Observers) -> None:
        """Record the events that are of interest from now on."""
        observers.add(self.calls.observe, CallFinished)
        observers.add(self.changes.observe_attempt, AttemptFinished)
        observers.add(self.changes.observe, *CHANGES)
        observers.add(self.changes.observe_drain, GatewayDrained)

    def tasks(self, read: Callable[[], Totals]) -> list[Coroutine[Any, Any, None]]:
        """Return the background tasks. read: returns the totals of all workers, which one of them samples."""
        tasks = [] if self._worker is None else [self.calls.write_forever()]
        if not self._worker:
            tasks.append(self.traffic.record_forever(read))
        return tasks
