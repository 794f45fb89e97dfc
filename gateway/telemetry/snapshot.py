"""What a gateway is doing at one moment, and what went on between two of them. Pure.

Rule: whatever counts up is told as it stands; who wants a rate takes two snapshots and subtracts. So any
number of people may watch, each at their own pace, and the gateway keeps nothing for them.
"""

from collections.abc import Mapping

import msgspec


class Durations(msgspec.Struct, frozen=True):
    """A histogram since the start. bounds_s: of its buckets but the last, which has none.

    counts: how many took at most that long, one more than bounds; the last is all of them.
    """

    bounds_s: tuple[float, ...] = ()
    counts: tuple[float, ...] = ()
    sum_s: float = 0.0


class LaneShown(msgspec.Struct, frozen=True):
    """The queue in front of one upstream, and what is in flight behind it. attempts: since the start."""

    upstream: str
    queued_inputs: int
    queued_tokens: int
    oldest_s: float
    in_flight_batches: int
    window_batches: int
    attempts: Durations


class ReplicaShown(msgspec.Struct, frozen=True):
    """One replica. state, reason, since_s (since 1970), latency_s: as the worker that answers sees it.

    latency_s: a running mean of its good attempts; None before the first. attempts, failed: since the start,
    of all workers, as are batches in flight and the window; what was called off has not failed.
    """

    upstream: str
    name: str
    state: str
    reason: str
    since_s: float | None
    in_flight_batches: int
    window_batches: int
    latency_s: float | None
    attempts: int
    failed: int


class ModelShown(msgspec.Struct, frozen=True):
    """A name that callers use. dimensions: of its vectors, None where it has none or nothing is known yet."""

    name: str
    upstream: str
    backend: str
    state: str
    operations: tuple[str, ...]
    fingerprint: str | None
    dimensions: int | None


class TenantShown(msgspec.Struct, frozen=True):
    """What a tenant has used since the start; refused: calls that its quotas did not admit."""

    name: str
    calls: int
    inputs: int
    tokens: int
    refused: int


class CallsShown(msgspec.Struct, frozen=True):
    """Calls since the start, without those of probes and of operators. outcomes: "ok" or an error's kind."""

    outcomes: Mapping[str, int]
    durations: Durations


class StoreShown(msgspec.Struct, frozen=True):
    """Where quotas are counted; away: they are counted without it for now, by any worker."""

    kind: str
    away: bool


class Change(msgspec.Struct, frozen=True):
    """Something that happened, as the worker that answers saw it. at_s: seconds since 1970."""

    at_s: float
    subject: str
    what: str
    reason: str


class Snapshot(msgspec.Struct, frozen=True):
    """All of it. at_s: seconds since 1970. uptime_s: of the worker that answers; worker: its number."""

    version: str
    at_s: float
    uptime_s: float
    worker: int
    workers: int
    calls_in_flight: int
    in_flight_bytes: int
    store: StoreShown
    calls: CallsShown
    lanes: tuple[LaneShown, ...]
    replicas: tuple[ReplicaShown, ...]
    models: tuple[ModelShown, ...]
    tenants: tuple[TenantShown, ...]
    changes: tuple[Change, ...]


class TenantRates(msgspec.Struct, frozen=True):
    """Each second."""

    calls: float
    tokens: float
    refused: float


class Rates(msgspec.Struct, frozen=True):
    """Each second, between two snapshots. failures: by kind, only those that there were.

    p50_s, p95_s: of calls, None where none ended. attempts_p50_s: by upstream, likewise.
    """

    calls: float
    tokens: float
    failures: Mapping[str, float]
    p50_s: float | None
    p95_s: float | None
    attempts_p50_s: Mapping[str, float | None]
    tenants: Mapping[str, TenantRates]


def rates_between(before: Snapshot, after: Snapshot) -> Rates | None:
    """None where they are not two moments of one after the other."""
    seconds = after.at_s - before.at_s
    if seconds <= 0:
        return None
    outcomes = {
        kind: since(before.calls.outcomes.get(kind, 0), count) / seconds
        for kind, count in after.calls.outcomes.items()
    }
    durations = during(before.calls.durations, after.calls.durations)
    lanes = {one.upstream: one for one in before.lanes}
    tenants = _tenant_rates(before, after, seconds)
    return Rates(
        sum(outcomes.values()),
        sum(one.tokens for one in tenants.values()),
        {kind: rate for kind, rate in outcomes.items() if kind != "ok" and rate},
        quantile(durations, 0.5),
        quantile(durations, 0.95),
        {
            one.upstream: quantile(
                during(lanes[one.upstream].attempts if one.upstream in lanes else Durations(), one.attempts),
                0.5,
            )
            for one in after.lanes
        },
        tenants,
    )


def _tenant_rates(before: Snapshot, after: Snapshot, seconds: float) -> dict[str, TenantRates]:
    known = {one.name: one for one in before.tenants}
    nothing = TenantShown("", 0, 0, 0, 0)
    told = {}
    for one in after.tenants:
        was = known.get(one.name, nothing)
        told[one.name] = TenantRates(
            since(was.calls, one.calls) / seconds,
            since(was.tokens, one.tokens) / seconds,
            since(was.refused, one.refused) / seconds,
        )
    return told


def since(before: float, after: float) -> float:
    """How much a counter grew; one that is less than before began anew."""
    return after - before if after >= before else after


def during(before: Durations, after: Durations) -> Durations:
    """What came to a histogram between two looks at it."""
    if before.bounds_s != after.bounds_s or _total(before) > _total(after):
        return after
    counts = tuple(now - was for was, now in zip(before.counts, after.counts, strict=True))
    return Durations(after.bounds_s, counts, after.sum_s - before.sum_s)


def quantile(durations: Durations, share: float) -> float | None:
    """Which time that share of them did not exceed, as if each bucket were filled evenly; None of none.

    Of what took longer than the last bound, that bound is told.
    """
    rank = share * _total(durations)
    if not rank:
        return None
    below_s = below = 0.0
    for bound_s, count in zip(durations.bounds_s, durations.counts, strict=False):
        if count >= rank:
            return below_s + (bound_s - below_s) * (rank - below) / (count - below)
        below_s, below = bound_s, count
    return below_s


def _total(durations: Durations) -> float:
    return durations.counts[-1] if durations.counts else 0.0
