"""Events as Prometheus metrics; the one door to prometheus-client.

Rule: a label's values come from the config or from a closed list, never from a caller.
"""

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from gateway.events import AttemptFinished, CallFinished, Event, QuotaDecided, ReplicaChanged, StoreChanged

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


class Metrics:
    """One registry a process. is_open: whether /metrics needs no key."""

    def __init__(self, *, is_open: bool) -> None:
        self.is_open = is_open
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
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
            registry=self._registry,
        )
        self._queued = Gauge(
            "gateway_lane_queued_tokens",
            "Tokens that wait for a replica, as an upper bound.",
            ["upstream"],
            registry=self._registry,
        )

    def watch_lanes(self, queued_tokens: Mapping[str, Callable[[], int]]) -> None:
        """Read each lane's depth when somebody asks for it."""
        for upstream, depth in queued_tokens.items():
            self._queued.labels(upstream).set_function(depth)

    def observe(self, event: Event) -> None:
        """Count one event."""
        match event:
            case CallFinished():
                self._count_call(event)
            case AttemptFinished():
                self._attempts.labels(event.upstream, event.replica, event.outcome).inc()
                self._attempt_duration.labels(event.upstream).observe(event.duration_s)
            case ReplicaChanged():
                up = 1 if event.state in ("up", "probation") else 0
                self._replica_up.labels(event.upstream, event.replica).set(up)
            case QuotaDecided():
                self._decisions.labels(event.tenant, event.decision).inc()
            case StoreChanged():
                self._store_away.set(1 if event.away else 0)
                self._store_changes.labels("away" if event.away else "back").inc()

    def render(self) -> tuple[bytes, str]:
        """The exposition and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def _count_call(self, event: CallFinished) -> None:
        self._calls.labels(event.route, str(event.status), event.outcome).inc()
        self._call_duration.labels(event.route).observe(event.duration_s)
        if event.tenant is not None and event.model is not None:
            self._tokens.labels(event.tenant, event.model).inc(event.tokens)
            self._inputs.labels(event.tenant, event.model).inc(event.inputs)
