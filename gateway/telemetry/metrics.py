"""Events as Prometheus metrics.

Rule: the values of a label come from the config, from operators or from a closed list, never from a caller.

A single worker keeps its numbers in memory. Several workers write theirs to files of one folder, which the
environment specifies (PROMETHEUS_MULTIPROC_DIR), so that each can report for all. Files are named by the
worker's number and not by its process: a restarted worker continues the counters of its predecessor.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Metric,
    ProcessCollector,
    disable_created_metrics,
    values,
)
from prometheus_client.core import CounterMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from gateway.events import (
    AttemptFinished,
    BatchChanged,
    CacheLookedUp,
    CallFinished,
    CanaryCompared,
    ConnectionFaulted,
    CopyFinished,
    DescriptionRejected,
    Event,
    ModelStateReported,
    ProcessRestarted,
    QuotaDecided,
    ReplicaChanged,
    SpaceChecked,
    StoreChanged,
    StoreLost,
    UpstreamJudged,
    UpstreamLimited,
    UpstreamTried,
)
from gateway.telemetry.call_metrics import (
    AttemptMetrics,
    BatchCounts,
    BatchMetrics,
    BudgetMetrics,
    CacheMetrics,
    CallMetrics,
    ReadBatches,
    StoreMetrics,
)
from gateway.telemetry.config_metrics import ConfigMetrics, ReadDigest
from gateway.telemetry.instruments import MetricFactory
from gateway.telemetry.upstream_metrics import (
    GroupMetrics,
    LimitMetrics,
    LoadMetrics,
    ModelMetrics,
    Sources,
    families,
    waiting_inputs,
)

LAG_BUCKETS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)
# Greatest age of other workers' gauges in a scrape.
REFRESH_S = 1.0
# Delay in which events of calls collect, to be counted together. A scrape of this worker counts them at once.
BATCH_DELAY_S = 0.02
# An engine that does not answer in this time is left out: a scrape must not wait for a hung engine.
ENGINE_TIMEOUT_S = 1.0

OPEN_METRICS = "application/openmetrics-text"

# Events that every call causes.
CallEvent: TypeAlias = CallFinished | AttemptFinished | QuotaDecided


class Metrics:
    """Registry of one process.

    is_open: `/metrics` needs no key. worker: number of this worker, None for a single one. links_traces:
    calls are traced, so that the buckets of histograms can name a trace. The files of several workers have no
    place for that.
    """

    def __init__(self, *, is_open: bool, worker: int | None = None, links_traces: bool = False) -> None:
        self.is_open = is_open
        # The time at which each series was created would be one more series for each.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self._exposed = self._registry
        self._process: ProcessShare | None = None
        self._sources = Sources()
        self._call_events: list[CallEvent] = []
        # Every worker receives all restarts: the one that is scraped reports them, and nothing is added up.
        self._restarts: dict[tuple[str, str], int] = {}
        if worker is None:
            ProcessCollector(registry=self._registry)
        else:
            # The library has no types for its multiprocess mode.
            values.ValueClass = values.MultiProcessValue(lambda: worker)  # type: ignore[no-untyped-call]
            self._exposed = CollectorRegistry()
            MultiProcessCollector(self._exposed)  # type: ignore[no-untyped-call]
            self._process = ProcessShare(self._registry)
        create = MetricFactory(self._registry, removes_series=worker is None)
        self._links_traces = links_traces and worker is None
        self._calls = CallMetrics(create, links_traces=self._links_traces)
        self._attempts = AttemptMetrics(create, links_traces=self._links_traces)
        self._loads = LoadMetrics(create)
        # Every worker receives the reports of the same models: only one counts them.
        self._models = ModelMetrics(create, counts=worker in {None, 0})
        self._cache = CacheMetrics(create)
        self._budgets, self._limits = BudgetMetrics(create), LimitMetrics(create)
        self._groups = GroupMetrics(create)
        self._stored = StoreMetrics(create)
        self._batches = BatchMetrics(create)
        self._config = ConfigMetrics(create)
        self._read_batches: ReadBatches = BatchCounts
        self._lag = Histogram(
            "gateway_event_loop_lag_seconds",
            "Delay of a task's wake-up, sampled twice a second.",
            buckets=LAG_BUCKETS_S,
            registry=self._registry,
        )

        # By the type of event.
        self.handlers: Mapping[type, Callable[[Any], None]] = {
            **dict.fromkeys((CallFinished, AttemptFinished, QuotaDecided), self._observe_call),
            ReplicaChanged: self._loads.count_change,
            ConnectionFaulted: self._loads.count_fault,
            DescriptionRejected: self._loads.count_rejection,
            SpaceChecked: self._loads.count_space,
            UpstreamLimited: self._limits.count,
            UpstreamTried: self._groups.count_call,
            UpstreamJudged: self._groups.show_standing,
            CanaryCompared: self._groups.count_comparison,
            CopyFinished: self._groups.count_copy,
            StoreChanged: self._stored.count_change,
            StoreLost: self._stored.count_loss,
            ModelStateReported: self._models.count,
            CacheLookedUp: self._cache.count,
            ProcessRestarted: self._observe_restart,
            BatchChanged: self._batches.count,
        }

    def watch(self, sources: Sources) -> None:
        """Set the sources that are read when metrics are collected."""
        self._sources = sources
        self._config.show(sources.configured)
        self._models.keep_only(sources.engines)
        self._groups.keep_only(sources.judged)

    def watch_batches(self, read: ReadBatches) -> None:
        """Set the source of the state of batches."""
        self._read_batches = read

    def watch_configuration(self, read_digest: ReadDigest) -> None:
        """Set the source of the digest of the configuration."""
        self._config.read_digest = read_digest

    async def refresh_forever(self) -> None:
        """Write this worker's gauges for the other workers every REFRESH_S."""
        while True:
            self._refresh()
            await asyncio.sleep(REFRESH_S)

    def observe_lag(self, seconds: float) -> None:
        """Record by how much the event loop woke a task too late."""
        self._lag.observe(seconds)

    def observe(self, event: Event) -> None:
        """Count one event; must be called on an event loop."""
        if (count := self.handlers.get(type(event))) is not None:
            count(event)

    def _observe_call(self, event: CallEvent) -> None:
        """Count an event of a call with those that follow it soon, at a fraction of the cost."""
        if not self._call_events:
            asyncio.get_running_loop().call_later(BATCH_DELAY_S, self._count_call_events)
        self._call_events.append(event)

    def _observe_restart(self, event: ProcessRestarted) -> None:
        self._restarts[event.process, event.reason] = event.times

    def collected(self) -> list[Metric]:
        """Return the counters of all workers, and their current gauges."""
        self._refresh()
        exposed = self._exposed.collect()
        if self._process is not None:
            exposed = map(self._only_current, exposed)
        return [*exposed, self._restart_counter()]

    async def render(self, accept: str = "") -> tuple[bytes, str]:
        """Return the exposition of all workers and engines, and its content type.

        accept: header of the scraper. Only OpenMetrics has a place for links to traces.
        """
        engines = self._sources.engines
        reports = await asyncio.gather(*(read(ENGINE_TIMEOUT_S) for read in engines.values()))
        stats = {name: report for name, report in zip(engines, reports, strict=True) if report is not None}
        collected = self.collected()
        exposition = _Collected([*collected, *families(stats, waiting_inputs(collected))])
        if self._links_traces and OPEN_METRICS in accept:
            # The library has no types for it.
            body = openmetrics.generate_latest(exposition)  # type: ignore[no-untyped-call]
            return body, openmetrics.CONTENT_TYPE_LATEST
        return generate_latest(exposition), CONTENT_TYPE_LATEST

    def _only_current(self, family: Metric) -> Metric:
        """Drop the gauges of removed lanes and replicas, whose series cannot be deleted from files."""
        if family.type == "gauge":
            family.samples = [sample for sample in family.samples if self._loads.is_current(sample.labels)]
        return family

    def _restart_counter(self) -> Metric:
        family = CounterMetricFamily(
            "gateway_process_restarts",
            "Times that a worker or an engine exited unexpectedly and was restarted.",
            labels=("process", "reason"),
        )
        for labels, times in self._restarts.items():
            family.add_metric(labels, times)
        return family

    def _refresh(self) -> None:
        # Count first: events that are counted after a series was removed would bring it back.
        self._count_call_events()
        self._loads.refresh(self._sources)
        self._cache.refresh(self._sources.cache)
        self._budgets.refresh(self._sources.budgets)
        self._limits.refresh(self._sources.limits())
        self._stored.refresh(self._sources.stored)
        self._batches.refresh(self._read_batches)
        self._config.refresh(self._sources.store_memory)
        if self._process is not None:
            self._process.refresh()

    def _count_call_events(self) -> None:
        events, self._call_events = self._call_events, []
        self._calls.count([event for event in events if isinstance(event, CallFinished)])
        self._attempts.count([event for event in events if isinstance(event, AttemptFinished)])
        self._calls.count_decisions([event for event in events if isinstance(event, QuotaDecided)])


class _Collected(Collector):
    """Metrics that were collected already, in the form that the exposition needs."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def forget_worker(folder: str, worker: int) -> None:
    """Remove the gauges of a worker that has exited; its counters stay. folder: of all workers' files."""
    mark_process_dead(worker, folder)  # type: ignore[no-untyped-call]


# Interval between two samples of the event loop's lag.
LAG_EVERY_S = 0.5


class ProcessShare:
    """Share of this process in the `process_*` metrics of all workers.

    The library's own collector reports one process only.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._collector = ProcessCollector(registry=None)
        self._cpu = Counter("process_cpu_seconds", "CPU time of all workers, in seconds.", registry=registry)
        self._reported_cpu_s = 0.0
        self._gauges = {
            name: Gauge(name, documentation, multiprocess_mode="livesum", registry=registry)
            for name, documentation in (
                ("process_resident_memory_bytes", "Resident memory of all workers, in bytes."),
                ("process_open_fds", "Open file descriptors of all workers."),
            )
        }

    def refresh(self) -> None:
        """Read /proc into the metrics; without /proc they stay as they are."""
        read = {family.name: family.samples[0].value for family in self._collector.collect()}
        cpu_s = read.get("process_cpu_seconds", self._reported_cpu_s)
        self._cpu.inc(cpu_s - self._reported_cpu_s)
        self._reported_cpu_s = cpu_s
        for name, gauge in self._gauges.items():
            if name in read:
                gauge.set(read[name])


async def measure_lag(observe: Callable[[float], None]) -> None:
    """Report by how many seconds the event loop wakes a task too late, until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due_s = loop.time() + LAG_EVERY_S
        await asyncio.sleep(LAG_EVERY_S)
        observe(max(0.0, loop.time() - due_s))
