"""Metrics of upstreams: load of lanes and replicas, engines, their models, and upstreams of one model."""

from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import TypeAlias

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Metric
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
    UpstreamTried,
)
from gateway.telemetry.call_metrics import ReadBudgets, ReadCache, ReadStored, StoredCounts
from gateway.telemetry.instruments import MetricFactory


class ReplicaLoad(msgspec.Struct, frozen=True):
    """Batches in flight to a replica, and the most that may be."""

    upstream: str
    replica: str
    batches: int
    window: int


class Sources(msgspec.Struct, frozen=True):
    """Values that are read only when metrics are collected.

    lanes, engines: by upstream. in_flight: number of calls, and bytes of their bodies. cache: bytes and
    evictions. budgets: spent shares. judged: models that have several upstreams, with each of these. stored:
    numbers of stored keys and tenants.
    """

    lanes: Mapping[str, Callable[[], LaneBacklog]] = {}
    replicas: Callable[[], Iterable[ReplicaLoad]] = tuple
    in_flight: Callable[[], tuple[int, int]] = lambda: (0, 0)
    engines: Mapping[str, Callable[[float], Awaitable[EngineStats | None]]] = {}
    cache: ReadCache = lambda: (0, 0)
    budgets: ReadBudgets = tuple
    judged: frozenset[tuple[str, str]] = frozenset()
    stored: ReadStored = StoredCounts


class LoadMetrics:
    """Gauges of lanes and replicas.

    removes_series: series of removed lanes and replicas are deleted. Several workers write to files, from
    which no series can be deleted; there they are set to 0, and `is_current` excludes them.
    """

    def __init__(self, create: MetricFactory, *, removes_series: bool) -> None:
        self._removes_series = removes_series
        # (upstream, replica) and upstreams at the last refresh.
        self._replicas: set[tuple[str, str]] = set()
        self._lanes: set[str] = set()
        replica_labels = ("upstream", "replica")
        self._replica_changes = create.counter(
            "replica_changes", "Times that a replica changed its state.", (*replica_labels, "state")
        )
        self._connection_faults = create.counter(
            "connection_faults",
            "Connections to a replica that ended badly and cost no call.",
            (*replica_labels, "fault"),
        )
        self._rejected_descriptions = create.counter(
            "replica_rejected_descriptions",
            "Descriptions of a replica that responds, but does not offer what it should.",
            replica_labels,
        )
        self._space_checks = create.counter(
            "vector_space_checks",
            "Comparisons of a replica's canaries with its upstream's fingerprint.",
            (*replica_labels, "outcome"),
        )
        self._replica_up = create.gauge(
            "replica_up", "1 while a replica receives work.", replica_labels, "livemin"
        )
        self._space_cosine = create.gauge(
            "vector_space_min_cosine",
            "Smallest cosine of a replica's canaries at their last comparison.",
            replica_labels,
            "livemin",
        )
        self._batches = create.gauge(
            "replica_in_flight_batches", "Batches in flight to a replica.", replica_labels, "livesum"
        )
        self._window = create.gauge(
            "replica_window_batches", "Batches that may be in flight.", replica_labels, "livesum"
        )
        self._queued_tokens = create.gauge(
            "lane_queued_tokens", "Queued tokens, as an upper bound.", ("upstream",), "livesum"
        )
        self._queued_inputs = create.gauge("lane_queued_inputs", "Queued inputs.", ("upstream",), "livesum")
        self._oldest = create.gauge(
            "lane_oldest_seconds", "Age of the oldest queued input.", ("upstream",), "livemax"
        )
        self._calls_in_flight = create.gauge("calls_in_flight", "Calls in progress.", (), "livesum")
        self._bytes_in_flight = create.gauge("in_flight_bytes", "Bytes of bodies in memory.", (), "livesum")

    def observe(self, event: ReplicaChanged | ConnectionFaulted | DescriptionRejected | SpaceChecked) -> None:
        """Count an event of a replica."""
        match event:
            case ReplicaChanged():
                self._count_change(event)
            case ConnectionFaulted():
                self._connection_faults.labels(event.upstream, event.replica, event.kind).inc()
            case DescriptionRejected():
                self._rejected_descriptions.labels(event.upstream, event.replica).inc()
            case SpaceChecked():
                self._count_space(event)

    def _count_change(self, event: ReplicaChanged) -> None:
        is_up = event.state in ("up", "probation")
        self._replica_up.labels(event.upstream, event.replica).set(1 if is_up else 0)
        self._replica_changes.labels(event.upstream, event.replica, event.state).inc()

    def _count_space(self, event: SpaceChecked) -> None:
        self._space_checks.labels(event.upstream, event.replica, event.outcome).inc()
        if event.cosine is not None:
            self._space_cosine.labels(event.upstream, event.replica).set(event.cosine)

    def refresh(self, sources: Sources) -> None:
        """Read the sources into the gauges."""
        self._refresh_lanes(sources.lanes)
        self._refresh_replicas(sources.replicas())
        calls, held_bytes = sources.in_flight()
        self._calls_in_flight.set(calls)
        self._bytes_in_flight.set(held_bytes)

    def is_current(self, labels: Mapping[str, str]) -> bool:
        """Return whether a series with these labels belongs to a lane or replica that still exists."""
        upstream, replica = labels.get("upstream"), labels.get("replica")
        if replica is not None:
            return (upstream, replica) in self._replicas
        return upstream is None or upstream in self._lanes

    def _refresh_lanes(self, lanes: Mapping[str, Callable[[], LaneBacklog]]) -> None:
        for upstream in self._lanes - lanes.keys():
            self._remove_lane(upstream)
        self._lanes = set(lanes)
        for upstream, read in lanes.items():
            backlog = read()
            self._queued_tokens.labels(upstream).set(backlog.tokens)
            self._queued_inputs.labels(upstream).set(backlog.inputs)
            self._oldest.labels(upstream).set(backlog.oldest_s)

    def _remove_lane(self, upstream: str) -> None:
        for gauge in (self._queued_tokens, self._queued_inputs, self._oldest):
            gauge.labels(upstream).set(0)
            if self._removes_series:
                gauge.remove(upstream)

    def _refresh_replicas(self, replicas: Iterable[ReplicaLoad]) -> None:
        loads = {(load.upstream, load.replica): load for load in replicas}
        for labels, load in loads.items():
            self._batches.labels(*labels).set(load.batches)
            self._window.labels(*labels).set(load.window)
        for labels in self._replicas - loads.keys():
            self._batches.labels(*labels).set(0)
            self._window.labels(*labels).set(0)
            if self._removes_series:
                for gauge in (self._replica_up, self._space_cosine, self._batches, self._window):
                    gauge.remove(*labels)
        self._replicas = set(loads)


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
    """Metrics of loaded models: memory, loads and unloads."""

    def __init__(self, registry: CollectorRegistry) -> None:
        # Upstreams that have gauges.
        self._upstreams: set[str] = set()
        self._loaded = Gauge(
            "gateway_model_loaded",
            "1 while an engine's model is in memory.",
            ["upstream"],
            multiprocess_mode="livemax",
            registry=registry,
        )
        self._memory = Gauge(
            "gateway_model_memory_bytes",
            "Memory that an engine's model uses.",
            ["upstream"],
            multiprocess_mode="livemax",
            registry=registry,
        )
        self._loads = Counter(
            "gateway_model_loads", "Loads of a model.", ["upstream", "outcome"], registry=registry
        )
        self._unloads = Counter(
            "gateway_model_unloads",
            "Times that a model was unloaded.",
            ["upstream", "reason"],
            registry=registry,
        )
        self._out_of_memory = Counter(
            "gateway_model_out_of_memory",
            "Batches that did not fit into memory and were split.",
            ["upstream"],
            registry=registry,
        )

    def observe(self, event: ModelStateReported, *, counts: bool) -> None:
        """Record a report. counts: this process adds to the counters, and not to the gauges only."""
        self._upstreams.add(event.upstream)
        self._loaded.labels(event.upstream).set(1 if event.loaded else 0)
        self._memory.labels(event.upstream).set(event.memory_bytes)
        if not counts:
            return
        self._loads.labels(event.upstream, "ok").inc(event.loads)
        self._loads.labels(event.upstream, "failed").inc(event.failed_loads)
        self._out_of_memory.labels(event.upstream).inc(event.out_of_memory)
        for reason, times in event.unloads.items():
            self._unloads.labels(event.upstream, reason).inc(times)

    def keep_only(self, upstreams: Collection[str], *, removes_series: bool) -> None:
        """Drop the gauges of all other upstreams.

        removes_series: delete them; several workers can only set theirs to 0, because they are in files.
        """
        for upstream in self._upstreams.difference(upstreams):
            for gauge in (self._loaded, self._memory):
                gauge.labels(upstream).set(0)
                if removes_series:
                    gauge.remove(upstream)
        self._upstreams.intersection_update(upstreams)


# The nearer to 1, the more a difference matters.
COSINE_BUCKETS = (0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 0.9999, 1.0)
STANDINGS = ("serving", "waiting", "refused", "withdrawn")

GroupEvent: TypeAlias = UpstreamTried | UpstreamJudged | CanaryCompared | CopyFinished


class GroupMetrics:
    """Calls, standings, comparisons and copies by model and upstream."""

    def __init__(self, create: MetricFactory) -> None:
        labels = ("model", "upstream")
        self._calls = create.counter(
            "upstream_calls",
            "Calls sent to one of several upstreams of a model, by outcome there.",
            (*labels, "outcome"),
        )
        self._standing = create.gauge(
            "upstream_standing",
            "1 for the standing of an upstream in a model that has several.",
            (*labels, "standing"),
            "livemax",
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

        self._judged: set[tuple[str, str]] = set()

    def keep_only(self, judged: Collection[tuple[str, str]], *, removes_series: bool) -> None:
        """Forget the standings of upstreams that a reload has removed. judged: models and upstreams."""
        for labels in self._judged.difference(judged):
            for standing in STANDINGS:
                self._standing.labels(*labels, standing).set(0)
                if removes_series:
                    self._standing.remove(*labels, standing)
        self._judged.intersection_update(judged)

    def observe(self, event: GroupEvent) -> None:
        """Count one event."""
        match event:
            case UpstreamTried():
                self._calls.labels(event.model, event.upstream, event.outcome).inc()
            case UpstreamJudged():
                self._judged.add((event.model, event.upstream))
                for standing in STANDINGS:
                    is_current = standing == event.standing
                    self._standing.labels(event.model, event.upstream, standing).set(is_current)
            case CanaryCompared():
                self._cosine.labels(event.model, event.upstream).observe(event.cosine)
            case CopyFinished():
                labels = event.model, event.upstream, event.purpose, event.outcome
                self._copies.labels(*labels).inc()
                if event.outcome != "dropped":
                    self._copy_duration.labels(event.upstream).observe(event.duration_s)
