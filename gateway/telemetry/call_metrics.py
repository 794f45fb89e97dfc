"""Metrics of calls, and of what they use: attempts, quota decisions, cache, budgets, batches, and the store.

Events that every call causes are counted in batches.
"""

from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Literal

import msgspec
from prometheus_client import Counter

from gateway.events import (
    AttemptFinished,
    BatchChanged,
    CacheLookedUp,
    CallFinished,
    QuotaDecided,
    StoreChanged,
    StoreLost,
)
from gateway.telemetry.instruments import (
    DURATION_BUCKETS_S,
    BatchedHistogram,
    Children,
    MetricFactory,
    observe_in_each,
)

# A stage may be much shorter than a call.
STAGE_BUCKETS_S = (0.0001, *DURATION_BUCKETS_S)
# Keys with series of their own in one process. Operators may make any number of keys, and a series is never
# removed: the calls of all further keys are counted together.
KEYS_MAX = 500
# The same of tenants. One has some 30 series with two models: 1,000 of them are 30,000 series, which a scrape
# reads in 3 MB; thousands more would cost each scrape of every gateway seconds.
TENANTS_MAX = 1000
OTHER = "other"


class CallMetrics:
    """Calls by route, outcome, tenant, model and key. links_traces: as of `Metrics`."""

    def __init__(self, create: MetricFactory, *, links_traces: bool = False) -> None:
        self._links_traces = links_traces
        calls = create.counter(
            "calls", "Calls answered, by path, status and outcome.", ("route", "status", "outcome")
        )
        duration = create.seconds("call_duration", "From a call's first byte to its answer's last.", "route")
        bulk_duration = create.seconds("bulk_duration", "Calls of class bulk, as call_duration.", "route")
        stage_duration = create.seconds(
            "stage_duration", "Time of calls by stage, as in server-timing.", "stage", buckets=STAGE_BUCKETS_S
        )
        model_duration = create.seconds("model_duration", "Calls by model, as call_duration.", "model")
        tenant_duration = create.seconds("tenant_duration", "Calls by tenant, as call_duration.", "tenant")
        tokens = create.counter("tokens", "Tokens computed, as settled.", ("tenant", "model"))
        inputs = create.counter("inputs", "Inputs answered.", ("tenant", "model"))
        tenant_calls = create.counter(
            "tenant_calls", "Calls of a tenant that named a model it may use.", ("tenant", "model")
        )
        key_calls = create.counter(
            "key_calls", "Calls with a known API key, by the key's id.", ("tenant", "key", "outcome")
        )
        key_tokens = create.counter(
            "key_tokens", "Tokens computed, as settled, by the key's id.", ("tenant", "key")
        )
        failures = create.counter(
            "tenant_failures", "Calls of a tenant that failed, by the kind of error.", ("tenant", "outcome")
        )
        model_failures = create.counter(
            "model_failures", "Calls of a model that failed, by the kind of error.", ("model", "outcome")
        )
        decisions = create.counter(
            "quota_decisions", "Calls that the ledger admitted or refused.", ("tenant", "decision")
        )
        self._calls = Children[tuple[str, int, str], Counter](
            lambda key: calls.labels(key[0], str(key[1]), key[2])
        )
        self._duration = Children[str, BatchedHistogram](duration.labels)
        self._bulk_duration = Children[str, BatchedHistogram](bulk_duration.labels)
        self._stage_duration = Children[str, BatchedHistogram](stage_duration.labels)
        self._model_duration = Children[str, BatchedHistogram](model_duration.labels)
        self._tenant_duration = Children[str, BatchedHistogram](tenant_duration.labels)
        self._tenant_calls = Children[tuple[str, str], tuple[Counter, Counter, Counter]](
            lambda key: (tokens.labels(*key), inputs.labels(*key), tenant_calls.labels(*key))
        )
        self._key_calls = Children[tuple[str, str], tuple[Counter, Counter, Counter]](
            lambda key: (
                key_calls.labels(*key, "ok"),
                key_calls.labels(*key, "failed"),
                key_tokens.labels(*key),
            )
        )
        self._failures = Children[tuple[str, str], Counter](lambda key: failures.labels(*key))
        self._model_failures = Children[tuple[str, str], Counter](lambda key: model_failures.labels(*key))
        self._decisions = Children[tuple[str, str], Counter](lambda key: decisions.labels(*key))
        # Tenants with series of their own.
        self._tenants: set[str] = set()

    def count(self, calls: Sequence[CallFinished]) -> None:
        """Count finished calls."""
        # Calls of one batch are mostly alike: one pass over them costs less than one for each metric.
        alike: dict[tuple[str, int, str, str | None, str | None, str | None, bool], list[CallFinished]]
        alike = defaultdict(list)
        for call in calls:
            labels = call.route, call.status, call.outcome, call.tenant, call.model, call.key_id, call.is_bulk
            alike[labels].append(call)
        for group in alike.values():
            self._count_alike(group)

    def _count_alike(self, calls: Sequence[CallFinished]) -> None:
        """Count calls that have the values of all labels in common."""
        first, count = calls[0], len(calls)
        self._calls[first.route, first.status, first.outcome].inc(count)
        stages = [call.stages for call in calls]
        for stage in set(chain.from_iterable(stages)):
            seconds = [laps[stage] for laps in stages if stage in laps]
            self._stage_duration[stage].observe_many(seconds)
        tokens = sum([call.tokens for call in calls])
        durations = [self._duration[first.route]]
        if first.is_bulk:
            durations.append(self._bulk_duration[first.route])
        tenant = self._tenant_label(first.tenant) if first.tenant else ""
        if tenant and first.outcome != "ok":
            self._failures[tenant, first.outcome].inc(count)
        if tenant and first.model:
            computed, inputs, tenant_calls = self._tenant_calls[tenant, first.model]
            computed.inc(tokens)
            inputs.inc(sum([call.inputs for call in calls]))
            tenant_calls.inc(count)
            if first.outcome != "ok":
                self._model_failures[first.model, first.outcome].inc(count)
            durations += self._model_duration[first.model], self._tenant_duration[tenant]
        observe_in_each(durations, [call.duration_s for call in calls])
        if self._links_traces:
            _link(durations, [(call.duration_s, call.trace_id) for call in calls if call.is_recorded])
        if first.tenant and first.key_id:
            self._count_key(first.tenant, first.key_id, count if first.outcome == "ok" else 0, count, tokens)

    def _count_key(self, tenant: str, key: str, answered: int, calls: int, tokens: int) -> None:
        known = (tenant, key)
        if known not in self._key_calls and len(self._key_calls) >= KEYS_MAX:
            known = (OTHER, OTHER)
        good, failed, computed = self._key_calls[known]
        good.inc(answered)
        failed.inc(calls - answered)
        computed.inc(tokens)

    def count_decisions(self, decisions: Sequence[QuotaDecided]) -> None:
        """Count admissions and refusals of the ledger."""
        for (tenant, decision), count in Tally(
            [(event.tenant, event.decision) for event in decisions]
        ).items():
            self._decisions[self._tenant_label(tenant), decision].inc(count)

    def _tenant_label(self, tenant: str) -> str:
        """Return the value of the label for a tenant, which is `other` once there are too many."""
        if tenant in self._tenants:
            return tenant
        if len(self._tenants) >= TENANTS_MAX:
            return OTHER
        self._tenants.add(tenant)
        return tenant


def _link(histograms: Sequence[BatchedHistogram], traced: Sequence[tuple[float, str | None]]) -> None:
    """Link the buckets of histograms to the traces of what was observed in them."""
    known = [(seconds, trace_id) for seconds, trace_id in traced if trace_id is not None]
    if known:
        for histogram in histograms:
            histogram.link(known)


class AttemptMetrics:
    """Attempts by upstream, replica and outcome, and the sizes of their batches.

    links_traces: as of `Metrics`.
    """

    def __init__(self, create: MetricFactory, *, links_traces: bool = False) -> None:
        self._links_traces = links_traces
        attempts = create.counter(
            "attempts", "Attempts of a batch at a replica.", ("upstream", "replica", "outcome")
        )
        duration = create.seconds("attempt_duration", "One attempt at one replica.", "upstream", "replica")
        inputs = create.sizes("upstream_request_inputs", "Inputs in one upstream request.")
        calls = create.sizes("batch_calls", "Slices of calls in one upstream request.")
        self._hedges = create.counter("hedges", "Second attempts, for a batch that was late.", ("upstream",))
        self._attempts = Children[tuple[str, str, str], Counter](lambda key: attempts.labels(*key))
        # A replica is one of the configuration, or the number of an address that a name resolves to.
        self._durations = Children[tuple[str, str], BatchedHistogram](lambda key: duration.labels(*key))
        self._batches = Children[str, tuple[BatchedHistogram, BatchedHistogram]](
            lambda key: (inputs.labels(key), calls.labels(key))
        )

    def count(self, attempts: Sequence[AttemptFinished]) -> None:
        """Count finished attempts."""
        alike: dict[tuple[str, str, str], list[AttemptFinished]] = defaultdict(list)
        for attempt in attempts:
            alike[attempt.upstream, attempt.replica, attempt.outcome].append(attempt)
        for (upstream, replica, outcome), group in alike.items():
            self._attempts[upstream, replica, outcome].inc(len(group))
            durations = self._durations[upstream, replica]
            durations.observe_many([attempt.duration_s for attempt in group])
            if self._links_traces:
                _link((durations,), [(attempt.duration_s, attempt.trace_id) for attempt in group])
            inputs, calls = self._batches[upstream]
            inputs.observe_many([attempt.inputs for attempt in group])
            calls.observe_many([attempt.calls for attempt in group])
            if hedges := sum([attempt.hedge for attempt in group]):
                self._hedges.labels(upstream).inc(hedges)


# Bytes of all entries, and entries that were evicted or not stored since the start.
ReadCache = Callable[[], tuple[int, int]]


class CacheMetrics:
    """Texts found and not found by model, and the size of the store."""

    def __init__(self, create: MetricFactory) -> None:
        self._hits = create.counter("cache_hits", "Texts whose vectors were found in the cache.", ("model",))
        self._misses = create.counter(
            "cache_misses", "Texts that were looked up in the cache and not found.", ("model",)
        )
        self._bytes = create.gauge(
            "cache_bytes", "Bytes of all entries; of those in Redis, an upper bound.", (), "livesum"
        )
        self._evictions = create.counter(
            "cache_evictions", "Entries that left the cache, or were not stored, for want of room.", ()
        )
        self._counted_evictions = 0

    def count(self, event: CacheLookedUp) -> None:
        """Count the lookup of a call."""
        self._hits.labels(event.model).inc(event.hits)
        self._misses.labels(event.model).inc(event.misses)

    def refresh(self, read: ReadCache) -> None:
        """Read the store into the metrics."""
        size, evictions = read()
        self._bytes.set(size)
        self._evictions.inc(evictions - self._counted_evictions)
        self._counted_evictions = evictions


# tenant: of all keys of a tenant. key: of one key.
BudgetOwner = Literal["tenant", "key"]


class BudgetShare(msgspec.Struct, frozen=True):
    """Share of one budget that is spent, reservations included."""

    tenant: str
    owner: BudgetOwner
    share: float


ReadBudgets = Callable[[], Iterable[BudgetShare]]


class BudgetMetrics:
    """Largest spent share of each tenant's budgets."""

    def __init__(self, create: MetricFactory) -> None:
        self._spent = create.live(
            create.gauge(
                "budget_spent_ratio",
                "Largest spent share of the budgets of a tenant, or of its keys.",
                ("tenant", "owner"),
                "livemax",
            )
        )

    def refresh(self, read: ReadBudgets) -> None:
        """Read the budgets into the gauge."""
        shares: dict[tuple[str, str], float] = {}
        for budget in read():
            key = (budget.tenant, budget.owner)
            shares[key] = max(shares.get(key, 0.0), budget.share)
        self._spent.keep_only(shares)
        for labels, share in shares.items():
            self._spent.show(labels, share)


class BatchCounts(msgspec.Struct, frozen=True):
    """Batches that have not ended, and bytes of all files, as this process last saw them.

    idle_s: longest time for which one of them has made no progress.
    """

    active: int = 0
    file_bytes: int = 0
    idle_s: float = 0.0


ReadBatches = Callable[[], BatchCounts]


class BatchMetrics:
    """Batches by the statuses that they have reached, and the bytes of their files."""

    def __init__(self, create: MetricFactory) -> None:
        self._changes = create.counter("batches", "Batches that have reached a status.", ("status",))
        self._lines = create.counter("batch_lines", "Lines of batches that have ended.", ("outcome",))
        self._active = create.gauge("batches_active", "Batches that have not ended.", (), "livemax")
        self._bytes = create.gauge(
            "batch_file_bytes", "Bytes of the files and results of batches.", (), "livemax"
        )
        # Each worker measures from its own start: the one that has watched for longest knows most.
        self._idle = create.gauge(
            "batch_idle_seconds",
            "Longest time without progress of a batch that has not ended.",
            (),
            "livemax",
        )

    def count(self, event: BatchChanged) -> None:
        """Count a status, and the lines of a batch that has ended."""
        self._changes.labels(event.status).inc()
        if event.has_ended:
            self._lines.labels("completed").inc(event.completed)
            self._lines.labels("failed").inc(event.failed)

    def refresh(self, read: ReadBatches) -> None:
        """Read the table into the metrics."""
        counts = read()
        self._active.set(counts.active)
        self._bytes.set(counts.file_bytes)
        self._idle.set(counts.idle_s)


class StoredCounts(msgspec.Struct, frozen=True):
    """Number of keys and tenants: in the store, and of those kept although it has lost them."""

    keys: int = 0
    tenants: int = 0
    kept_keys: int = 0
    kept_tenants: int = 0


ReadStored = Callable[[], StoredCounts]


class StoreMetrics:
    """Gauges and counters of the shared store."""

    def __init__(self, create: MetricFactory) -> None:
        self._changes = create.counter(
            "quota_store_changes", "Times that the quota store became unreachable, or recovered.", ("change",)
        )
        self._away = create.gauge(
            "quota_store_away", "1 while quotas are counted without their shared store.", (), "livemax"
        )
        self._keys = create.gauge(
            "store_keys", "Keys in the store of tenants and keys, as last read.", (), "livemax"
        )
        self._tenants = create.gauge(
            "store_tenants", "Tenants in the store of tenants and keys, as last read.", (), "livemax"
        )
        self._kept_keys = create.gauge(
            "store_kept_keys", "Keys that the store has lost and that are still valid.", (), "livemax"
        )
        self._kept_tenants = create.gauge(
            "store_kept_tenants", "Tenants that the store has lost and that are still valid.", (), "livemax"
        )
        self._losses = create.counter(
            "store_losses", "Times that the store had lost keys or tenants, of each worker.", ()
        )

    def count_change(self, event: StoreChanged) -> None:
        """Count a change of the store."""
        self._away.set(1 if event.away else 0)
        self._changes.labels("away" if event.away else "back").inc()

    def count_loss(self, event: StoreLost) -> None:
        """Count a loss that was not noticed before."""
        if not event.is_repeated:
            self._losses.inc()

    def refresh(self, read: ReadStored) -> None:
        """Read the numbers into the gauges."""
        counts = read()
        self._keys.set(counts.keys)
        self._tenants.set(counts.tenants)
        self._kept_keys.set(counts.kept_keys)
        self._kept_tenants.set(counts.kept_tenants)
