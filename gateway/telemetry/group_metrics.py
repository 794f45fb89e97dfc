"""Metrics of models that have several upstreams, a canary or a mirror."""

from collections.abc import Collection
from typing import TypeAlias

from gateway.events import CanaryCompared, CopyFinished, UpstreamJudged, UpstreamTried
from gateway.telemetry.metric_factory import MetricFactory

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
