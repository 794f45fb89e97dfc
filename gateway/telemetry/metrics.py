"""Events as Prometheus metrics; the one door to prometheus-client.

Rule: a label's values come from the config or from a closed list, never from a caller.

A lone worker keeps its numbers to itself. Several write theirs into files of one folder, which the
environment names (PROMETHEUS_MULTIPROC_DIR), so that each can answer for all. A worker writes as its number,
not as its process: one that is started again counts on where its predecessor ended.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, values
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

from gateway.events import (
    AttemptFinished,
    CallFinished,
    Event,
    QuotaDecided,
    ReplicaChanged,
    SpaceChecked,
    StoreChanged,
)

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
# How old the depth of another worker's lanes may be when somebody asks.
REFRESH_S = 1.0

Key = TypeVar("Key")
Child = TypeVar("Child")


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
        self._registry = CollectorRegistry()
        self._shown = self._registry
        self._process: ProcessShare | None = None
        self._queued_tokens: Mapping[str, Callable[[], int]] = {}
        if worker is None:
            ProcessCollector(registry=self._registry)
        else:
            # The library has no types for its several processes.
            values.ValueClass = values.MultiProcessValue(lambda: worker)  # type: ignore[no-untyped-call]
            self._shown = CollectorRegistry()
            MultiProcessCollector(self._shown)  # type: ignore[no-untyped-call]
            self._process = ProcessShare(self._registry)
        self._calls = Counter(
            "gateway_calls",
            "Calls answered, by path, status and outcome.",
            ["route", "status", "outcome"],
            registry=self._registry,
        )
        self._call_duration = Histogram(
            "gateway_call_duration_seconds",
            "From a call's first byte to its answer's last.",
            ["route"],
            buckets=DURATION_BUCKETS_S,
            registry=self._registry,
        )
        self._tokens = Counter(
            "gateway_tokens",
            "Tokens computed, as settled.",
            ["tenant", "model"],
            registry=self._registry,
        )
        self._inputs = Counter(
            "gateway_inputs",
            "Inputs answered.",
            ["tenant", "model"],
            registry=self._registry,
        )
        self._attempts = Counter(
            "gateway_attempts",
            "Tries of a batch at a replica.",
            ["upstream", "replica", "outcome"],
            registry=self._registry,
        )
        self._attempt_duration = Histogram(
            "gateway_attempt_duration_seconds",
            "One try at one replica.",
            ["upstream"],
            buckets=DURATION_BUCKETS_S,
            registry=self._registry,
        )
        self._decisions = Counter(
            "gateway_quota_decisions",
            "Calls that the ledger admitted or refused.",
            ["tenant", "decision"],
            registry=self._registry,
        )
        self._store_away = Gauge(
            "gateway_quota_store_away",
            "1 while quotas are kept without their shared store.",
            multiprocess_mode="livemax",
            registry=self._registry,
        )
        self._store_changes = Counter(
            "gateway_quota_store_changes",
            "Times that the quotas' store was given up, or came back.",
            ["change"],
            registry=self._registry,
        )
        self._replica_up = Gauge(
            "gateway_replica_up",
            "1 while a replica is given work.",
            ["upstream", "replica"],
            multiprocess_mode="livemin",
            registry=self._registry,
        )
        self._space_checks = Counter(
            "gateway_vector_space_checks",
            "Times that a replica's canaries were held against its upstream's fingerprint.",
            ["upstream", "replica", "outcome"],
            registry=self._registry,
        )
        self._space_cosine = Gauge(
            "gateway_vector_space_min_cosine",
            "The least cosine of a replica's canaries, when they were last compared.",
            ["upstream", "replica"],
            multiprocess_mode="livemin",
            registry=self._registry,
        )
        self._queued = Gauge(
            "gateway_lane_queued_tokens",
            "Tokens that wait for a replica, as an upper bound.",
            ["upstream"],
            multiprocess_mode="livesum",
            registry=self._registry,
        )
        self._find_children()

    def watch_lanes(self, queued_tokens: Mapping[str, Callable[[], int]]) -> None:
        """Each lane's depth, which is read when somebody asks for it."""
        self._queued_tokens = queued_tokens

    async def keep(self) -> None:
        """For the other workers: what is read only when asked for is written down every REFRESH_S."""
        while True:
            self._refresh()
            await asyncio.sleep(REFRESH_S)

    def observe(self, event: Event) -> None:
        """Count one event."""
        match event:
            case CallFinished():
                self._count_call(event)
            case AttemptFinished():
                self._attempts_of[event.upstream, event.replica, event.outcome].inc()
                self._attempt_duration_of[event.upstream].observe(event.duration_s)
            case QuotaDecided():
                self._decisions_of[event.tenant, event.decision].inc()
            case ReplicaChanged():
                up = 1 if event.state in ("up", "probation") else 0
                self._replica_up.labels(event.upstream, event.replica).set(up)
            case SpaceChecked():
                self._count_space(event)
            case StoreChanged():
                self._store_away.set(1 if event.away else 0)
                self._store_changes.labels("away" if event.away else "back").inc()

    def render(self) -> tuple[bytes, str]:
        """The exposition of all workers together, and its content type."""
        self._refresh()
        return generate_latest(self._shown), CONTENT_TYPE_LATEST

    def _refresh(self) -> None:
        for upstream, depth in self._queued_tokens.items():
            self._queued.labels(upstream).set(depth())
        if self._process is not None:
            self._process.refresh()

    def _count_call(self, event: CallFinished) -> None:
        self._calls_of[event.route, event.status, event.outcome].inc()
        self._call_duration_of[event.route].observe(event.duration_s)
        if event.tenant is not None and event.model is not None:
            tokens, inputs = self._used_of[event.tenant, event.model]
            tokens.inc(event.tokens)
            inputs.inc(event.inputs)

    def _count_space(self, event: SpaceChecked) -> None:
        self._space_checks.labels(event.upstream, event.replica, event.outcome).inc()
        if event.cosine is not None:
            self._space_cosine.labels(event.upstream, event.replica).set(event.cosine)

    def _find_children(self) -> None:
        """Where the metrics of what happens on every call are found."""
        self._calls_of = Children[tuple[str, int, str], Counter](
            lambda key: self._calls.labels(key[0], str(key[1]), key[2])
        )
        self._call_duration_of = Children[str, Histogram](self._call_duration.labels)
        self._used_of = Children[tuple[str, str], tuple[Counter, Counter]](
            lambda key: (self._tokens.labels(*key), self._inputs.labels(*key))
        )
        self._attempts_of = Children[tuple[str, str, str], Counter](lambda key: self._attempts.labels(*key))
        self._attempt_duration_of = Children[str, Histogram](self._attempt_duration.labels)
        self._decisions_of = Children[tuple[str, str], Counter](lambda key: self._decisions.labels(*key))


class ProcessShare:
    """What this process adds to the `process_*` metrics of all workers; the library knows but one's own."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._collector = ProcessCollector(registry=None)
        self._cpu = Counter("process_cpu_seconds", "CPU time of all workers, in seconds.", registry=registry)
        self._cpu_told_s = 0.0
        self._gauges = {
            name: Gauge(name, documentation, multiprocess_mode="livesum", registry=registry)
            for name, documentation in (
                ("process_resident_memory_bytes", "Resident memory of all workers, in bytes."),
                ("process_open_fds", "Open file descriptors of all workers."),
            )
        }

    def refresh(self) -> None:
        """Read /proc; where there is none, nothing is told."""
        read = {one.name: one.samples[0].value for one in self._collector.collect()}
        cpu_s = read.get("process_cpu_seconds", self._cpu_told_s)
        self._cpu.inc(cpu_s - self._cpu_told_s)
        self._cpu_told_s = cpu_s
        for name, gauge in self._gauges.items():
            if name in read:
                gauge.set(read[name])


def forget_worker(folder: str, worker: int) -> None:
    """A worker has ended: its counters stay, its gauges are no longer true. folder: of all workers' files."""
    mark_process_dead(worker, folder)  # type: ignore[no-untyped-call]
