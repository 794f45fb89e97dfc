"""Metrics of upstreams: load of lanes and replicas, engines, their models, and upstreams of one model."""

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from itertools import accumulate

import msgspec
from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily

from backends.torch.stats import BOUNDS, COUNTERS, Distribution, EngineStats
from gateway.events import (
    CanaryCompared,
    ConnectionFaulted,
    CopyFinished,
    DescriptionRejected,
    LaneBacklog,
    ModelStateReported,
    ReplicaChanged,
    SpaceChecked,
    UpstreamJudged,
    UpstreamLimited,
    UpstreamTried,
)
from gateway.telemetry.call_metrics import ReadBudgets, ReadCache, ReadStored, StoredCounts
from gateway.telemetry.config_metrics import Configured, ReadMemory
from gateway.telemetry.instruments import MetricFactory


class ReplicaLoad(msgspec.Struct, frozen=True):
    """Batches in flight to a replica, and the most that may be.

    slowness: times that its batches take as long as those of the fastest replica of its upstream.
    """

    upstream: str
    replica: str
    batches: int
    window: int
    slowness: float = 1.0


class LimitShare(msgspec.Struct, frozen=True):
    """Used share of one limit of an upstream's account, reservations included."""

    upstream: str
    limit: str
    share: float


class LimitMetrics:
    """Limits of the accounts of upstreams."""

    def __init__(self, create: MetricFactory) -> None:
        self._refused = create.counter(
            "upstream_limited",
            "Requests that waited or moved: the upstream's account had no room.",
            ("upstream",),
        )
        self._used = create.live(
            create.gauge(
                "upstream_limit_used_ratio",
                "Used share of a limit of an upstream's account.",
                ("upstream", "limit"),
                "livemax",
            )
        )

    def count(self, event: UpstreamLimited) -> None:
        """Count a request that was not sent."""
        self._refused.labels(event.upstream).inc()

    def refresh(self, shares: Iterable[LimitShare]) -> None:
        """Read the limits into the gauge."""
        found = {(share.upstream, share.limit): share.share for share in shares}
        self._used.keep_only(found)
        for labels, share in found.items():
            self._used.show(labels, share)


class Sources(msgspec.Struct, frozen=True):
    """Values that are read only when metrics are collected.

    lanes, engines: by upstream. in_flight: number of calls, and bytes of their bodies. cache: bytes and
    evictions. budgets: spent shares. judged: models that have several upstreams, with each of these. stored:
    numbers of stored keys and tenants. configured: facts of the configuration, which do not change before the
    next one. store_memory: of the shared store. limits: used shares of the accounts of upstreams.
    """

    lanes: Mapping[str, Callable[[], LaneBacklog]] = {}
    replicas: Callable[[], Iterable[ReplicaLoad]] = tuple
    in_flight: Callable[[], tuple[int, int]] = lambda: (0, 0)
    engines: Mapping[str, Callable[[float], Awaitable[EngineStats | None]]] = {}
    cache: ReadCache = lambda: (0, 0)
    budgets: ReadBudgets = tuple
    judged: frozenset[tuple[str, str]] = frozenset()
    stored: ReadStored = StoredCounts
    configured: Configured = Configured()
    store_memory: ReadMemory = lambda: (0, 0)
    limits: Callable[[], Iterable[LimitShare]] = tuple


class LoadMetrics:
    """Gauges of lanes and replicas, and changes of replicas."""

    def __init__(self, create: MetricFactory) -> None:
        labels = ("upstream", "replica")
        self._changes = create.counter(
            "replica_changes", "Times that a replica changed its state.", (*labels, "state")
        )
        self._connection_faults = create.counter(
            "connection_faults",
            "Connections to a replica that ended badly and cost no call.",
            (*labels, "fault"),
        )
        self._rejected_descriptions = create.counter(
            "replica_rejected_descriptions",
            "Descriptions of a replica that responds, but does not offer what it should.",
            labels,
        )
        self._space_checks = create.counter(
            "vector_space_checks",
            "Comparisons of a replica's reference texts with its upstream's fingerprint.",
            (*labels, "outcome"),
        )
        self._up = create.gauge("replica_up", "1 while a replica receives work.", labels, "livemin")
        self._cosine = create.gauge(
            "vector_space_min_cosine",
            "Smallest cosine of a replica's reference texts at their last comparison.",
            labels,
            "livemin",
        )
        self._removes_series = create.removes_series
        self._replicas = create.live(
            create.gauge("replica_in_flight_batches", "Batches in flight to a replica.", labels, "livesum"),
            create.gauge("replica_window_batches", "Batches that may be in flight.", labels, "livesum"),
            create.gauge(
                "replica_slowness_ratio",
                "Times that batches take as long as alike ones at the fastest replica.",
                labels,
                "livemax",
            ),
        )
        upstream = ("upstream",)
        self._lanes = create.live(
            create.gauge("lane_queued_tokens", "Queued tokens, as an upper bound.", upstream, "livesum"),
            create.gauge("lane_queued_inputs", "Queued inputs.", upstream, "livesum"),
            create.gauge("lane_oldest_seconds", "Age of the oldest queued input.", upstream, "livemax"),
        )
        self._calls_in_flight = create.gauge("calls_in_flight", "Calls in progress.", (), "livesum")
        self._bytes_in_flight = create.gauge("in_flight_bytes", "Bytes of bodies in memory.", (), "livesum")

    def count_change(self, event: ReplicaChanged) -> None:
        """Count a change of a replica's state."""
        is_up = event.state in ("up", "probation")
        self._up.labels(event.upstream, event.replica).set(1 if is_up else 0)
        self._changes.labels(event.upstream, event.replica, event.state).inc()

    def count_fault(self, event: ConnectionFaulted) -> None:
        """Count a connection that ended badly."""
        self._connection_faults.labels(event.upstream, event.replica, event.kind).inc()

    def count_rejection(self, event: DescriptionRejected) -> None:
        """Count a description that was not accepted."""
        self._rejected_descriptions.labels(event.upstream, event.replica).inc()

    def count_space(self, event: SpaceChecked) -> None:
        """Count a comparison of reference texts."""
        self._space_checks.labels(event.upstream, event.replica, event.outcome).inc()
        if event.cosine is not None:
            self._cosine.labels(event.upstream, event.replica).set(event.cosine)

    def refresh(self, sources: Sources) -> None:
        """Read the sources into the gauges."""
        self._lanes.keep_only([(upstream,) for upstream in sources.lanes])
        for upstream, read in sources.lanes.items():
            backlog = read()
            self._lanes.show((upstream,), backlog.tokens, backlog.inputs, backlog.oldest_s)
        loads = {(load.upstream, load.replica): load for load in sources.replicas()}
        if self._removes_series:
            for gone in self._replicas.shown - loads.keys():
                self._up.remove(*gone)
                self._cosine.remove(*gone)
        self._replicas.keep_only(loads)
        for labels, load in loads.items():
            self._replicas.show(labels, load.batches, load.window, load.slowness)
        calls, held_bytes = sources.in_flight()
        self._calls_in_flight.set(calls)
        self._bytes_in_flight.set(held_bytes)

    def is_current(self, labels: Mapping[str, str]) -> bool:
        """Return whether a series with these labels belongs to a lane or replica that still exists."""
        upstream, replica = labels.get("upstream"), labels.get("replica")
        if upstream is not None and replica is not None:
            return (upstream, replica) in self._replicas.shown
        return upstream is None or (upstream,) in self._lanes.shown


LABEL = "upstream"


def families(stats: Mapping[str, EngineStats], waiting: Mapping[str, float]) -> Iterator[Metric]:
    """Yield the metrics of all engines that answered. waiting: inputs in each upstream's lane."""
    if not stats:
        return
    size = GaugeMetricFamily("te_queue_size", "Queued inputs of the engine.", labels=[LABEL])
    for name, engine in stats.items():
        size.add_metric([name], engine.queue_size + waiting.get(name, 0.0))
    yield size
    for name, label in COUNTERS.items():
        yield _counter(name, label, stats)
    for name in BOUNDS:
        yield _histogram(name, stats)


def waiting_inputs(metrics: Iterable[Metric]) -> dict[str, float]:
    """Return the inputs in each upstream's lane, summed over all workers."""
    return {
        sample.labels[LABEL]: sample.value
        for family in metrics
        if family.name == "gateway_lane_queued_inputs"
        for sample in family.samples
    }


def _counter(name: str, label: str, stats: Mapping[str, EngineStats]) -> Metric:
    # Untyped: names of counters end in _total in this format, and TEI's do not.
    family = Metric(name, "TEI's counter of that name.", "untyped")
    for upstream, engine in stats.items():
        counts = engine.counters[name] if label else {"": engine.counters[name].get("", 0)}
        for value, number in counts.items():
            family.add_sample(name, {LABEL: upstream} | ({label: value} if label else {}), number)
    return family


def _histogram(name: str, stats: Mapping[str, EngineStats]) -> Metric:
    family = HistogramMetricFamily(name, "TEI's histogram of that name.", labels=[LABEL])
    for upstream, engine in stats.items():
        distribution = engine.distributions[name]
        family.add_metric([upstream], _buckets(name, distribution), distribution.total)
    return family


def _buckets(name: str, distribution: Distribution) -> list[tuple[str, float]]:
    bounds = [f"{bound:.6g}" for bound in BOUNDS[name]] + ["+Inf"]
    return list(zip(bounds, map(float, accumulate(distribution.counts)), strict=True))


class ModelMetrics:
    """Metrics of loaded models: memory, loads and unloads. counts: as of `Metrics`."""

    def __init__(self, create: MetricFactory, *, counts: bool) -> None:
        upstream = ("upstream",)
        self._counts = counts
        self._gauges = create.live(
            create.gauge("model_loaded", "1 while an engine's model is in memory.", upstream, "livemax"),
            create.gauge("model_memory_bytes", "Memory that an engine's model uses.", upstream, "livemax"),
        )
        self._loads = create.counter("model_loads", "Loads of a model.", (*upstream, "outcome"))
        self._unloads = create.counter(
            "model_unloads", "Times that a model was unloaded.", (*upstream, "reason")
        )
        self._out_of_memory = create.counter(
            "model_out_of_memory", "Batches that did not fit into memory and were split.", upstream
        )

    def count(self, event: ModelStateReported) -> None:
        """Take a report; only one worker adds to the counters."""
        self._gauges.show((event.upstream,), 1 if event.loaded else 0, event.memory_bytes)
        if not self._counts:
            return
        self._loads.labels(event.upstream, "ok").inc(event.loads)
        self._loads.labels(event.upstream, "failed").inc(event.failed_loads)
        self._out_of_memory.labels(event.upstream).inc(event.out_of_memory)
        for reason, times in event.unloads.items():
            self._unloads.labels(event.upstream, reason).inc(times)

    def keep_only(self, upstreams: Iterable[str]) -> None:
        """Drop the gauges of all other upstreams."""
        self._gauges.keep_only([(upstream,) for upstream in upstreams])


# The nearer to 1, the more a difference matters.
COSINE_BUCKETS = (0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 0.9999, 1.0)
STANDINGS = ("serving", "waiting", "refused", "withdrawn")


class GroupMetrics:
    """Calls, standings, comparisons and copies by model and upstream."""

    def __init__(self, create: MetricFactory) -> None:
        labels = ("model", "upstream")
        self._calls = create.counter(
            "upstream_calls",
            "Calls sent to one of several upstreams of a model, by outcome there.",
            (*labels, "outcome"),
        )
        self._standings = create.live(
            create.gauge(
                "upstream_standing",
                "1 for the standing of an upstream in a model that has several.",
                (*labels, "standing"),
                "livemax",
            )
        )
        self._cosine = create.cosines(
            "canary_cosine",
            "Smallest cosine of a canary's vectors in one comparison.",
            labels,
            COSINE_BUCKETS,
        )
        self._copies = create.counter(
            "copies",
            "Copies of calls, to compare a canary or to a mirror, by outcome.",
            (*labels, "purpose", "outcome"),
        )
        self._copy_duration = create.seconds("copy_duration", "Copies of calls by upstream.", "upstream")

    def keep_only(self, judged: Iterable[tuple[str, str]]) -> None:
        """Forget the standings of upstreams that a reload has removed. judged: models and upstreams."""
        self._standings.keep_only([(*labels, standing) for labels in judged for standing in STANDINGS])

    def count_call(self, event: UpstreamTried) -> None:
        """Count a call at one of several upstreams."""
        self._calls.labels(event.model, event.upstream, event.outcome).inc()

    def show_standing(self, event: UpstreamJudged) -> None:
        """Show the standing of an upstream."""
        for standing in STANDINGS:
            self._standings.show((event.model, event.upstream, standing), standing == event.standing)

    def count_comparison(self, event: CanaryCompared) -> None:
        """Count a comparison of a canary's vectors."""
        self._cosine.labels(event.model, event.upstream).observe(event.cosine)

    def count_copy(self, event: CopyFinished) -> None:
        """Count a copy of a call."""
        self._copies.labels(event.model, event.upstream, event.purpose, event.outcome).inc()
        if event.outcome != "dropped":
            self._copy_duration.labels(event.upstream).observe(event.duration_s)
