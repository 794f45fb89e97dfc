"""Gauges that are read only for a scrape: lanes, replicas and calls in flight."""

from collections.abc import Awaitable, Callable, Iterable, Mapping

import msgspec

from backends.torch.stats import EngineStats
from gateway.events import (
    ConnectionFaulted,
    DescriptionRejected,
    LaneBacklog,
    ReplicaChanged,
    SpaceChecked,
)
from gateway.telemetry.budget_metrics import ReadBudgets
from gateway.telemetry.cache_metrics import ReadCache
from gateway.telemetry.metric_factory import MetricFactory
from gateway.telemetry.store_metrics import ReadStored, StoredCounts


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
            "Comparisons of a replica's reference texts with its upstream's fingerprint.",
            (*replica_labels, "outcome"),
        )
        self._replica_up = create.gauge(
            "replica_up", "1 while a replica receives work.", replica_labels, "livemin"
        )
        self._space_cosine = create.gauge(
            "vector_space_min_cosine",
            "Smallest cosine of a replica's reference texts at their last comparison.",
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
