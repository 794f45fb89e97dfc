"""Status of a gateway at one moment, and rates between two moments. Pure.

Rule: counters are reported as totals; a client that wants a rate subtracts two snapshots. Therefore any
number of clients can watch, each at its own pace, and the gateway keeps no state for them.
"""

from collections.abc import Mapping

import msgspec

from gateway.config.schema import LimitAmount


class Durations(msgspec.Struct, frozen=True):
    """Histogram of durations since the start.

    bounds_s: upper bounds of all buckets but the last. counts: cumulative, one more than bounds; the last
    counts all durations.
    """

    bounds_s: tuple[float, ...] = ()
    counts: tuple[float, ...] = ()
    sum_s: float = 0.0


class UpstreamLimitStatus(msgspec.Struct, frozen=True):
    """Limit of an upstream's account. used_ratio: used share of it, as a worker last saw it."""

    name: str
    amount: LimitAmount
    used_ratio: float = 0.0


class LaneStatus(msgspec.Struct, frozen=True):
    """Queue in front of one upstream, and the batches in flight behind it. attempts: since the start.

    limits: of the upstream's account. limited: requests since the start for which it had no room.
    """

    upstream: str
    queued_inputs: int
    queued_tokens: int
    oldest_s: float
    in_flight_batches: int
    window_batches: int
    attempts: Durations
    limits: tuple[UpstreamLimitStatus, ...] = ()
    limited: int = 0


class ReplicaStatus(msgspec.Struct, frozen=True):
    """One replica.

    state, reason, since_s (seconds since 1970) and latency_s are the view of the worker that answers; all
    else is summed over workers. latency_s: running mean of successful attempts, None before the first.
    attempts, failed: since the start; a cancelled attempt has not failed. learned_bytes: most bytes of inputs
    in one request, learned by the worker that answers; None if the replica refused no size. is_drained: an
    operator keeps work away from it.
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
    learned_bytes: int | None = None
    is_drained: bool = False


class ModelUpstreamStatus(msgspec.Struct, frozen=True):
    """One upstream of a model that has several, a canary or a mirror, as the worker that answers sees it.

    role: member, canary or mirror. weight, priority: of a member. share: of the calls that a canary or a
    mirror gets. standing: serving, waiting, refused or withdrawn, with the reason; a mirror always serves.
    state: ready if it has a replica in use, else the reason, as of a model.
    calls: served since the start, or copies of a mirror. cosine: the smallest of a canary's comparisons,
    None before the first one.
    """

    name: str
    role: str
    standing: str
    reason: str
    state: str
    calls: int
    weight: int | None = None
    priority: int | None = None
    share: float | None = None
    cosine: float | None = None
    min_cosine: float | None = None


class ModelStatus(msgspec.Struct, frozen=True):
    """Public model name.

    state: ready, loading, refused, unavailable, or canary_only if only its canary serves its share.
    dimensions: of its vectors, None if it has none or they are not known yet. notes: guesses and further
    facts about its replicas, for operators. cache: `on`, or why its vectors are not cached; None if the
    configuration does not ask for it. memory_bytes: of a model in this gateway's engine, None elsewhere.
    upstreams: of a model that has several, a canary or a mirror; `upstream` is the main one.
    price_per_million_tokens: in the currency of the snapshot, None if its tokens cost nothing.
    """

    name: str
    upstream: str
    backend: str
    state: str
    operations: tuple[str, ...]
    fingerprint: str | None
    dimensions: int | None
    notes: tuple[str, ...] = ()
    cache: str | None = None
    memory_bytes: int | None = None
    upstreams: tuple[ModelUpstreamStatus, ...] = ()
    price_per_million_tokens: float | None = None

    @property
    def upstream_names(self) -> str:
        """Names of all upstreams, those that are no member with their role: `a, b, c (canary)`."""
        names = (
            upstream.name if upstream.role == "member" else f"{upstream.name} ({upstream.role})"
            for upstream in self.upstreams
        )
        return ", ".join(names) or self.upstream


class TenantStatus(msgspec.Struct, frozen=True):
    """Usage of one tenant since the start. refused: calls that its quotas did not admit."""

    name: str
    calls: int
    inputs: int
    tokens: int
    refused: int


class TenantTotals(msgspec.Struct, frozen=True):
    """Usage of all tenants since the start. tenants: those that have sent calls."""

    tenants: int = 0
    calls: int = 0
    inputs: int = 0
    tokens: int = 0
    refused: int = 0


class CallsStatus(msgspec.Struct, frozen=True):
    """Calls since the start, without probes and operator requests.

    outcomes: "ok" or an error's kind. bulk: durations of those that yield to interactive calls, among them
    lines of batches.
    """

    outcomes: Mapping[str, int]
    durations: Durations
    bulk: Durations = Durations()

    @property
    def interactive(self) -> Durations:
        """Durations of the calls that are not of class bulk."""
        return during(self.bulk, self.durations)


class LossStatus(msgspec.Struct, frozen=True):
    """Keys and tenants that the store has lost and that are still valid.

    since_s: when it noticed the loss, until_s: how long they stay valid, in seconds since 1970.
    """

    since_s: float
    until_s: float
    reason: str
    keys: int
    tenants: int


class StoreStatus(msgspec.Struct, frozen=True):
    """Quota store. away: at least one worker currently counts without it.

    reason: why it is away, if the worker that answers knows it.
    keys, tenants: those in the store. loss: None while nothing is lost.
    """

    kind: str
    away: bool
    keys: int = 0
    tenants: int = 0
    loss: LossStatus | None = None
    reason: str = ""


class StatusChange(msgspec.Struct, frozen=True):
    """Recent change, as the worker that answers saw it. at_s: seconds since 1970."""

    at_s: float
    subject: str
    what: str
    reason: str


class InstanceStatus(msgspec.Struct, frozen=True):
    """Model server that operators started on the gateway's host. reason: why it failed."""

    name: str
    kind: str
    model_id: str
    upstream: str
    status: str
    pid: int | None
    restarts: int
    device: str | None
    reason: str | None


class CheckpointStatus(msgspec.Struct, frozen=True):
    """Model of the Hub on the gateway's host.

    state: available, downloading, downloaded, loading, verified or failed. done_bytes, total_bytes,
    bytes_per_s: of a download. upstreams: that serve it. error: why the last download or check failed.
    """

    model: str
    state: str
    stored_bytes: int
    done_bytes: int | None
    total_bytes: int | None
    bytes_per_s: float | None
    upstreams: tuple[str, ...]
    error: str | None


class Snapshot(msgspec.Struct, frozen=True):
    """Status of the gateway.

    at_s: seconds since 1970. uptime_s, worker: of the worker that answers. registry: at most
    `REGISTRY_REFRESH_S` old; empty without `manager`. currency: of the prices, None without one.
    drained_since_s: when an operator took this gateway out, in seconds since 1970; None if it is in.
    trace_link: address of a trace, with `{trace_id}` in it; None without `tracing.link`.
    tenants: empty if the request left them out. tenant_totals: their sums in any case.
    """

    version: str
    at_s: float
    uptime_s: float
    worker: int
    workers: int
    calls_in_flight: int
    in_flight_bytes: int
    store: StoreStatus
    calls: CallsStatus
    lanes: tuple[LaneStatus, ...]
    replicas: tuple[ReplicaStatus, ...]
    models: tuple[ModelStatus, ...]
    tenants: tuple[TenantStatus, ...]
    changes: tuple[StatusChange, ...]
    instances: tuple[InstanceStatus, ...] = ()
    registry: tuple[CheckpointStatus, ...] = ()
    currency: str | None = None
    drained_since_s: float | None = None
    trace_link: str | None = None
    tenant_totals: TenantTotals = TenantTotals()


class TenantRates(msgspec.Struct, frozen=True):
    """Usage of one tenant per second."""

    calls: float
    tokens: float
    refused: float


class Rates(msgspec.Struct, frozen=True):
    """Rates per second between two snapshots.

    failures: by kind, only those that occurred. p50_s, p95_s: of interactive calls, None if none finished.
    attempts_p50_s: by upstream, likewise.
    """

    calls: float
    tokens: float
    failures: Mapping[str, float]
    p50_s: float | None
    p95_s: float | None
    attempts_p50_s: Mapping[str, float | None]
    tenants: Mapping[str, TenantRates]


def rates_between(before: Snapshot, after: Snapshot) -> Rates | None:
    """Return the rates between two snapshots, None if the second is not later than the first."""
    seconds = after.at_s - before.at_s
    if seconds <= 0:
        return None
    outcomes = {
        kind: since(before.calls.outcomes.get(kind, 0), count) / seconds
        for kind, count in after.calls.outcomes.items()
    }
    durations = during(before.calls.interactive, after.calls.interactive)
    attempts_before = {lane.upstream: lane.attempts for lane in before.lanes}
    tenants = _tenant_rates(before, after, seconds)
    return Rates(
        sum(outcomes.values()),
        sum(tenant.tokens for tenant in tenants.values()),
        {kind: rate for kind, rate in outcomes.items() if kind != "ok" and rate},
        quantile(durations, 0.5),
        quantile(durations, 0.95),
        {
            lane.upstream: quantile(
                during(attempts_before.get(lane.upstream, Durations()), lane.attempts), 0.5
            )
            for lane in after.lanes
        },
        tenants,
    )


def _tenant_rates(before: Snapshot, after: Snapshot, seconds: float) -> dict[str, TenantRates]:
    earlier = {tenant.name: tenant for tenant in before.tenants}
    unused = TenantStatus("", 0, 0, 0, 0)
    rates = {}
    for tenant in after.tenants:
        start = earlier.get(tenant.name, unused)
        rates[tenant.name] = TenantRates(
            since(start.calls, tenant.calls) / seconds,
            since(start.tokens, tenant.tokens) / seconds,
            since(start.refused, tenant.refused) / seconds,
        )
    return rates


def since(before: float, after: float) -> float:
    """Return the growth of a counter; a smaller value means that it was reset."""
    return after - before if after >= before else after


def during(before: Durations, after: Durations) -> Durations:
    """Return the growth of a histogram between two snapshots, or what one has in addition to another."""
    if before.bounds_s != after.bounds_s or _total(before) > _total(after):
        return after
    counts = tuple(end - start for start, end in zip(before.counts, after.counts, strict=True))
    return Durations(after.bounds_s, counts, after.sum_s - before.sum_s)


def quantile(durations: Durations, share: float) -> float | None:
    """Estimate a quantile, as if each bucket were filled evenly; None for an empty histogram.

    A quantile above the last bound is reported as that bound.
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
