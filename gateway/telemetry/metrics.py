"""Events as Prometheus metrics; the one door to prometheus-client.

Rule: a label's values come from the config or from a closed list, never from a caller.

A lone worker keeps its numbers to itself. Several write theirs into files of one folder, which the
environment names (PROMETHEUS_MULTIPROC_DIR), so that each can answer for all. A worker writes as its number,
not as its process: one that is started again counts on where its predecessor ended.
"""

import asyncio
from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Generic, Literal, TypeAlias, TypeVar

import msgspec
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
from prometheus_client.registry import Collector

from backends.torch.stats import Stats
from gateway import __version__
from gateway.events import (
    AttemptFinished,
    CallFinished,
    Event,
    LaneBacklog,
    ModelStateReported,
    ProcessRestarted,
    QuotaDecided,
    ReplicaChanged,
    SpaceChecked,
    StoreChanged,
)
from gateway.telemetry.batched_histogram import ManyHistogram
from gateway.telemetry.engine_metrics import families, waiting_inputs
from gateway.telemetry.model_metrics import ModelMetrics
from gateway.telemetry.process import ProcessShare

# From a call that touches nothing to a bulk call at its deadline, about 2.5 a step.
DURATION_BUCKETS_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    5,
    10,
    30,
    60,
)
# A stage may be much shorter than a call.
STAGE_BUCKETS_S = (0.0001, *DURATION_BUCKETS_S)
SIZE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
LAG_BUCKETS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)
# How old the depth of another worker's lanes may be when somebody asks.
REFRESH_S = 1.0
# So long do events of calls wait to be counted together; whoever asks this worker hears of them at once.
TOGETHER_S = 0.02
# An engine that does not answer in this time is left out: a scrape must not wait for a hung one.
ENGINE_TIMEOUT_S = 1.0

Key = TypeVar("Key")
Child = TypeVar("Child")
Member = TypeVar("Member")
# What happens on every call.
Frequent: TypeAlias = CallFinished | AttemptFinished | QuotaDecided
# How the gauges of several workers become one.
Together = Literal["livesum", "livemax", "livemin"]


class ReplicaLoad(msgspec.Struct, frozen=True):
    """What is in flight to a replica, and its window."""

    upstream: str
    replica: str
    batches: int
    window: int


class Sources(msgspec.Struct, frozen=True):
    """What is read only when somebody asks for it.

    lanes, engines: by upstream; in_flight: calls and bytes of bodies.
    """

    lanes: Mapping[str, Callable[[], LaneBacklog]] = {}
    replicas: Callable[[], Iterable[ReplicaLoad]] = tuple
    in_flight: Callable[[], tuple[int, int]] = lambda: (0, 0)
    engines: Mapping[str, Callable[[float], Awaitable[Stats | None]]] = {}


class Children(dict[Key, Child], Generic[Key, Child]):
    """The children of one metric by the labels of events: looking them up anew costs more than counting."""

    def __init__(self, make: Callable[[Key], Child]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, key: Key) -> Child:
        """Make it, once."""
        child = self[key] = self._make(key)
        return child


class Metrics:
    """One registry a process. is_open: whether /metrics needs no key. worker: its number among several."""

    def __init__(self, *, is_open: bool, worker: int | None = None) -> None:
        self.is_open = is_open
        # When each series began is one more series for each, which nobody asks for.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self._shown = self._registry
        # Every worker hears of the same models: one counts.
        self._counts_models = worker in {None, 0}
        self._process: ProcessShare | None = None
        self._sources = Sources()
        self._frequent: list[Frequent] = []
        # Replicas, by upstream and name, that were there when they were last looked at.
        self._known: set[tuple[str, str]] = set()
        self._lanes: set[str] = set()
        # Every worker hears of all: whoever is asked tells, and nothing is added up.
        self._restarts: dict[tuple[str, str], int] = {}
        if worker is None:
            ProcessCollector(registry=self._registry)
        else:
            # The library has no types for its several processes.
            values.ValueClass = values.MultiProcessValue(lambda: worker)  # type: ignore[no-untyped-call]
            self._shown = CollectorRegistry()
            MultiProcessCollector(self._shown)  # type: ignore[no-untyped-call]
            self._process = ProcessShare(self._registry)
        self._define_calls()
        self._define_attempts()
        self._define_gauges()
        self._models = ModelMetrics(self._registry)
        self._find_children()

    def watch(self, sources: Sources) -> None:
        """What to read when somebody asks."""
        self._sources = sources
        self._models.keep_only(sources.engines.keys(), removes=self._process is None)

    async def keep(self) -> None:
        """For the other workers: what is read only when asked for is written down every REFRESH_S."""
        while True:
            self._refresh()
            await asyncio.sleep(REFRESH_S)

    def late(self, seconds: float) -> None:
        """The event loop woke a task so much too late."""
        self._lag.observe(seconds)

    def observe(self, event: Event) -> None:
        """Count one event; of what every call brings, many together, which costs a fraction.

        Called on an event loop.
        """
        match event:
            case CallFinished() | AttemptFinished() | QuotaDecided():
                if not self._frequent:
                    asyncio.get_running_loop().call_later(TOGETHER_S, self._count_frequent)
                self._frequent.append(event)
            case ReplicaChanged():
                up = 1 if event.state in ("up", "probation") else 0
                self._replica_up.labels(event.upstream, event.replica).set(up)
                self._replica_changes.labels(event.upstream, event.replica, event.state).inc()
            case _:
                self._take_note(event)

    def _take_note(self, event: Event) -> None:
        """What does not happen often."""
        match event:
            case SpaceChecked():
                self._count_space(event)
            case ModelStateReported():
                self._models.observe(event, counts=self._counts_models)
            case StoreChanged():
                self._store_away.set(1 if event.away else 0)
                self._store_changes.labels("away" if event.away else "back").inc()
            case ProcessRestarted():
                self._restarts[event.process, event.reason] = event.times

    def collected(self) -> list[Metric]:
        """What all workers have counted, and what they hold now."""
        self._refresh()
        shown = self._shown.collect()
        if self._process is not None:
            shown = map(self._of_those_there, shown)
        return [*shown, self._restarted()]

    def _of_those_there(self, family: Metric) -> Metric:
        """Of several processes' files no series can be removed: gauges of what is gone are left out here."""
        if family.type == "gauge":
            family.samples = [one for one in family.samples if self._is_there(one.labels)]
        return family

    def _is_there(self, labels: Mapping[str, str]) -> bool:
        upstream, replica = labels.get("upstream"), labels.get("replica")
        if replica is not None:
            return (upstream, replica) in self._known
        return upstream is None or upstream in self._lanes

    async def render(self) -> tuple[bytes, str]:
        """The exposition of all workers and engines together, and its content type."""
        names, asked = list(self._sources.engines), self._sources.engines.values()
        told = await asyncio.gather(*(ask(ENGINE_TIMEOUT_S) for ask in asked))
        stats = {name: one for name, one in zip(names, told, strict=True) if one is not None}
        shown = self.collected()
        return generate_latest(_Read([*shown, *families(stats, waiting_inputs(shown))])), CONTENT_TYPE_LATEST

    def _restarted(self) -> Metric:
        family = CounterMetricFamily(
            "gateway_process_restarts",
            "Times that a worker or an engine ended unasked and was started again.",
            labels=("process", "reason"),
        )
        for labels, times in self._restarts.items():
            family.add_metric(labels, times)
        return family

    def _refresh(self) -> None:
        # Before any series is removed: what is counted later would bring it back.
        self._count_frequent()
        for upstream in self._lanes - self._sources.lanes.keys():
            self._forget_lane(upstream)
        self._lanes = set(self._sources.lanes)
        for upstream, read in self._sources.lanes.items():
            waiting = read()
            self._queued.labels(upstream).set(waiting.tokens)
            self._queued_inputs.labels(upstream).set(waiting.inputs)
            self._oldest.labels(upstream).set(waiting.oldest_s)
        self._refresh_replicas()
        calls, held = self._sources.in_flight()
        self._calls_in_flight.set(calls)
        self._bytes_in_flight.set(held)
        if self._process is not None:
            self._process.refresh()

    def _forget_lane(self, upstream: str) -> None:
        for gauge in (self._queued, self._queued_inputs, self._oldest):
            gauge.labels(upstream).set(0)
            if self._process is None:
                gauge.remove(upstream)

    def _refresh_replicas(self) -> None:
        loads = {(one.upstream, one.replica): one for one in self._sources.replicas()}
        for labels, one in loads.items():
            self._batches.labels(*labels).set(one.batches)
            self._window.labels(*labels).set(one.window)
        for labels in self._known - loads.keys():
            self._batches.labels(*labels).set(0)
            self._window.labels(*labels).set(0)
            if self._process is None:
                self._forget(labels)
        self._known = set(loads)

    def _forget(self, replica: tuple[str, str]) -> None:
        for gauge in (self._replica_up, self._space_cosine, self._batches, self._window):
            gauge.remove(*replica)

    def _count_frequent(self) -> None:
        frequent, self._frequent = self._frequent, []
        self._count_calls([one for one in frequent if isinstance(one, CallFinished)])
        self._count_attempts([one for one in frequent if isinstance(one, AttemptFinished)])
        decided = [one for one in frequent if isinstance(one, QuotaDecided)]
        for key, count in Tally((one.tenant, one.decision) for one in decided).items():
            self._decisions_of[key].inc(count)

    def _count_calls(self, calls: Sequence[CallFinished]) -> None:
        for key, count in Tally((one.route, one.status, one.outcome) for one in calls).items():
            self._calls_of[key].inc(count)
        for route, seconds in _grouped((one.route, one.duration_s) for one in calls).items():
            self._call_duration_of[route].observe_many(seconds)
        for stage, seconds in _grouped(lap for one in calls for lap in one.stages.items()).items():
            self._stage_duration_of[stage].observe_many(seconds)
        known = [((one.tenant, one.model), one) for one in calls if one.tenant and one.model]
        for (tenant, model), own in _grouped(known).items():
            tokens, inputs, answered = self._used_of[tenant or "", model or ""]
            tokens.inc(sum(one.tokens for one in own))
            inputs.inc(sum(one.inputs for one in own))
            answered.inc(len(own))

    def _count_attempts(self, attempts: Sequence[AttemptFinished]) -> None:
        for key, count in Tally((one.upstream, one.replica, one.outcome) for one in attempts).items():
            self._attempts_of[key].inc(count)
        for upstream, own in _grouped((one.upstream, one) for one in attempts).items():
            duration, inputs, calls = self._batches_of[upstream]
            duration.observe_many([one.duration_s for one in own])
            inputs.observe_many([one.inputs for one in own])
            calls.observe_many([one.calls for one in own])
            if hedges := sum(one.hedge for one in own):
                self._hedges.labels(upstream).inc(hedges)

    def _define_calls(self) -> None:
        self._calls = self._counter(
            "calls", "Calls answered, by path, status and outcome.", ("route", "status", "outcome")
        )
        self._call_duration = self._seconds(
            "call_duration", "From a call's first byte to its answer's last.", "route", DURATION_BUCKETS_S
        )
        self._stage_duration = self._seconds(
            "stage_duration", "Where calls' time went, as server-timing tells it.", "stage", STAGE_BUCKETS_S
        )
        self._tokens = self._counter("tokens", "Tokens computed, as settled.", ("tenant", "model"))
        self._inputs = self._counter("inputs", "Inputs answered.", ("tenant", "model"))
        self._tenant_calls = self._counter(
            "tenant_calls", "Calls of a tenant that named a model it may use.", ("tenant", "model")
        )
        self._decisions = self._counter(
            "quota_decisions", "Calls that the ledger admitted or refused.", ("tenant", "decision")
        )
        self._store_changes = self._counter(
            "quota_store_changes", "Times that the quotas' store was given up, or came back.", ("change",)
        )

    def _define_attempts(self) -> None:
        self._attempts = self._counter(
            "attempts", "Tries of a batch at a replica.", ("upstream", "replica", "outcome")
        )
        self._hedges = self._counter("hedges", "Attempts sent beside another that was late.", ("upstream",))
        self._attempt_duration = self._seconds(
            "attempt_duration", "One try at one replica.", "upstream", DURATION_BUCKETS_S
        )
        self._batch_inputs = self._sizes("batch_inputs", "Inputs that travelled in one upstream request.")
        self._batch_calls = self._sizes("batch_calls", "Slices of calls that travelled in one request.")
        self._space_checks = self._counter(
            "vector_space_checks",
            "Times that a replica's canaries were held against its upstream's fingerprint.",
            ("upstream", "replica", "outcome"),
        )
        self._replica_changes = self._counter(
            "replica_changes", "Times that a replica changed its state.", ("upstream", "replica", "state")
        )

    def _define_gauges(self) -> None:
        self._store_away = self._gauge(
            "quota_store_away", "1 while quotas are kept without their shared store.", (), "livemax"
        )
        self._replica_up = self._gauge(
            "replica_up", "1 while a replica is given work.", ("upstream", "replica"), "livemin"
        )
        self._space_cosine = self._gauge(
            "vector_space_min_cosine",
            "The least cosine of a replica's canaries, when they were last compared.",
            ("upstream", "replica"),
            "livemin",
        )
        self._batches = self._gauge(
            "replica_in_flight_batches", "Batches in flight to a replica.", ("upstream", "replica"), "livesum"
        )
        self._window = self._gauge(
            "replica_window_batches", "Batches that may be in flight.", ("upstream", "replica"), "livesum"
        )
        self._queued = self._gauge(
            "lane_queued_tokens",
            "Tokens that wait for a replica, as an upper bound.",
            ("upstream",),
            "livesum",
        )
        self._queued_inputs = self._gauge(
            "lane_queued_inputs", "Inputs that wait for a replica.", ("upstream",), "livesum"
        )
        self._oldest = self._gauge(
            "lane_oldest_seconds", "How long what waits longest has waited.", ("upstream",), "livemax"
        )
        self._calls_in_flight = self._gauge("calls_in_flight", "Calls being answered.", (), "livesum")
        self._bytes_in_flight = self._gauge("in_flight_bytes", "Bodies held in memory.", (), "livesum")
        self._lag = Histogram(
            "gateway_event_loop_lag_seconds",
            "How much later than it asked a task was woken; looked at twice a second.",
            buckets=LAG_BUCKETS_S,
            registry=self._registry,
        )
        self._gauge("build_info", "1, with the version that runs.", ("version",), "livemax").labels(
            __version__
        ).set(1)

    def _counter(self, name: str, documentation: str, labels: Sequence[str]) -> Counter:
        return Counter(f"gateway_{name}", documentation, labels, registry=self._registry)

    def _gauge(self, name: str, documentation: str, labels: Sequence[str], together: Together) -> Gauge:
        return Gauge(
            f"gateway_{name}", documentation, labels, multiprocess_mode=together, registry=self._registry
        )

    def _seconds(self, name: str, documentation: str, label: str, buckets: Sequence[float]) -> ManyHistogram:
        return ManyHistogram(
            f"gateway_{name}_seconds", documentation, [label], buckets=buckets, registry=self._registry
        )

    def _sizes(self, name: str, documentation: str) -> ManyHistogram:
        return ManyHistogram(
            f"gateway_{name}", documentation, ["upstream"], buckets=SIZE_BUCKETS, registry=self._registry
        )

    def _count_space(self, event: SpaceChecked) -> None:
        self._space_checks.labels(event.upstream, event.replica, event.outcome).inc()
        if event.cosine is not None:
            self._space_cosine.labels(event.upstream, event.replica).set(event.cosine)

    def _find_children(self) -> None:
        """Where the metrics of what happens on every call are found."""
        self._calls_of = Children[tuple[str, int, str], Counter](
            lambda key: self._calls.labels(key[0], str(key[1]), key[2])
        )
        self._call_duration_of = Children[str, ManyHistogram](self._call_duration.labels)
        self._stage_duration_of = Children[str, ManyHistogram](self._stage_duration.labels)
        self._used_of = Children[tuple[str, str], tuple[Counter, Counter, Counter]](
            lambda key: (
                self._tokens.labels(*key),
                self._inputs.labels(*key),
                self._tenant_calls.labels(*key),
            )
        )
        self._attempts_of = Children[tuple[str, str, str], Counter](lambda key: self._attempts.labels(*key))
        self._batches_of = Children[str, tuple[ManyHistogram, ManyHistogram, ManyHistogram]](
            lambda key: (
                self._attempt_duration.labels(key),
                self._batch_inputs.labels(key),
                self._batch_calls.labels(key),
            )
        )
        self._decisions_of = Children[tuple[str, str], Counter](lambda key: self._decisions.labels(*key))


def _grouped(pairs: Iterable[tuple[Key, Member]]) -> dict[Key, list[Member]]:
    groups: dict[Key, list[Member]] = defaultdict(list)
    for key, member in pairs:
        groups[key].append(member)
    return groups


class _Read(Collector):
    """Families that were collected already."""

    def __init__(self, collected: Sequence[Metric]) -> None:
        self._collected = collected

    def collect(self) -> Iterable[Metric]:
        return self._collected


def forget_worker(folder: str, worker: int) -> None:
    """A worker has ended: its counters stay, its gauges are no longer true. folder: of all workers' files."""
    mark_process_dead(worker, folder)  # type: ignore[no-untyped-call]
