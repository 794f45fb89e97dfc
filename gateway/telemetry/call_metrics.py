"""Metrics of events that every call causes: calls, attempts and quota decisions, counted in batches."""

from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain

from prometheus_client import Counter

from gateway.events import AttemptFinished, CallFinished, QuotaDecided
from gateway.telemetry.batched_histogram import BatchedHistogram, observe_in_each
from gateway.telemetry.metric_factory import DURATION_BUCKETS_S, Children, MetricFactory, grouped

# A stage may be much shorter than a call.
STAGE_BUCKETS_S = (0.0001, *DURATION_BUCKETS_S)
# Keys with series of their own in one process. Operators may make any number of keys, and a series is never
# removed: the calls of all further keys are counted together.
KEYS_MAX = 500
OTHER_KEYS = "other"


class CallMetrics:
    """Calls by route, outcome, tenant, model and key."""

    def __init__(self, create: MetricFactory) -> None:
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
        self._usage = Children[tuple[str, str], tuple[Counter, Counter, Counter]](
            lambda key: (tokens.labels(*key), inputs.labels(*key), tenant_calls.labels(*key))
        )
        self._key_calls = Children[tuple[str, str], tuple[Counter, Counter, Counter]](
            lambda key: (
                key_calls.labels(*key, "ok"),
                key_calls.labels(*key, "failed"),
                key_tokens.labels(*key),
            )
        )
        self._decisions = Children[tuple[str, str], Counter](lambda key: decisions.labels(*key))

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
        if first.tenant and first.model:
            computed, inputs, tenant_calls = self._usage[first.tenant, first.model]
            computed.inc(tokens)
            inputs.inc(sum([call.inputs for call in calls]))
            tenant_calls.inc(count)
            durations += self._model_duration[first.model], self._tenant_duration[first.tenant]
        observe_in_each(durations, [call.duration_s for call in calls])
        if first.tenant and first.key_id:
            self._count_key(first.tenant, first.key_id, count if first.outcome == "ok" else 0, count, tokens)

    def _count_key(self, tenant: str, key: str, answered: int, calls: int, tokens: int) -> None:
        known = (tenant, key)
        if known not in self._key_calls and len(self._key_calls) >= KEYS_MAX:
            known = (OTHER_KEYS, OTHER_KEYS)
        good, failed, computed = self._key_calls[known]
        good.inc(answered)
        failed.inc(calls - answered)
        computed.inc(tokens)

    def count_decisions(self, decisions: Sequence[QuotaDecided]) -> None:
        """Count admissions and refusals of the ledger."""
        for key, count in Tally((event.tenant, event.decision) for event in decisions).items():
            self._decisions[key].inc(count)


class AttemptMetrics:
    """Attempts by upstream, replica and outcome, and the sizes of their batches."""

    def __init__(self, create: MetricFactory) -> None:
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
        keys = ((attempt.upstream, attempt.replica, attempt.outcome) for attempt in attempts)
        for key, count in Tally(keys).items():
            self._attempts[key].inc(count)
        seconds = (((attempt.upstream, attempt.replica), attempt.duration_s) for attempt in attempts)
        for places, durations in grouped(seconds).items():
            self._durations[places].observe_many(durations)
        for upstream, of_upstream in grouped((attempt.upstream, attempt) for attempt in attempts).items():
            inputs, calls = self._batches[upstream]
            inputs.observe_many([attempt.inputs for attempt in of_upstream])
            calls.observe_many([attempt.calls for attempt in of_upstream])
            if hedges := sum(attempt.hedge for attempt in of_upstream):
                self._hedges.labels(upstream).inc(hedges)
