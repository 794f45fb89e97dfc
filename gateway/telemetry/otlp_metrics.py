"""Metrics that are sent to an OpenTelemetry collector; loaded only if the config has an endpoint for them.

These are the histograms of OpenTelemetry's GenAI conventions for clients, of each attempt at a replica, and
of its HTTP conventions for servers. All other metrics are Prometheus' alone.

Each worker sends its own, with its own `service.instance.id`, as sums since its start: what a collector
missed is in the next request to it. The SDK's instruments take a lock and hash all attributes for each
amount, so this module counts events in batches, as `call_metrics` does, and uses only the SDK's exporter. A
thread of its own sends, and never delays a call; while it waits for a collector, no second one is started.
"""

import asyncio
import time
from bisect import bisect_left
from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from threading import Thread
from typing import TypeAlias

import msgspec
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExporter,
    MetricsData,
    ResourceMetrics,
    ScopeMetrics,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from gateway import __version__
from gateway.config.boot import MetricNames
from gateway.config.schema import OtlpMetrics
from gateway.events import LINE_ROUTES, AttemptFinished, CallFinished
from gateway.telemetry.otlp import (
    EXPORT_TIMEOUT_S,
    error_type,
    log_losses_only,
    operation_name,
    resource_of,
    server_attributes,
)

Attributes: TypeAlias = Mapping[str, str | int | bool]

# Bounds of the conventions.
GENAI_SECONDS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
GENAI_TOKENS = tuple(4**power for power in range(14))
HTTP_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
# Sets of attributes of one histogram; further ones are counted together, as the SDK does.
SERIES_MAX = 2000
OVERFLOW: Attributes = {"otel.metric.overflow": True}
# Events that wait to be counted together.
EVENTS_MAX = 512
HTTP_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH"))
LINES = frozenset(LINE_ROUTES.values())


class Series(msgspec.Struct):
    """Amounts with the same attributes. buckets: their counts by bucket, the last of which has no bound."""

    attributes: Attributes
    buckets: list[int]
    total: float = 0.0
    least: float = float("inf")
    most: float = float("-inf")


class CountedHistogram:
    """One histogram of this process. bounds: upper ones, which belong to their bucket."""

    def __init__(self, name: str, unit: str, description: str, bounds: Sequence[float]) -> None:
        self.name = name
        self._unit = unit
        self._description = description
        self._bounds = bounds
        self._series: dict[Hashable, Series] = {}

    def observe_many(self, attributes: Attributes, amounts: Sequence[float]) -> None:
        """Count amounts with the same attributes; there is at least one."""
        series = self._series_of(attributes)
        for number, count in Tally([bisect_left(self._bounds, amount) for amount in amounts]).items():
            series.buckets[number] += count
        series.total += sum(amounts)
        series.least = min(series.least, *amounts)
        series.most = max(series.most, *amounts)

    def collected(self, started_ns: int, now_ns: int) -> Metric | None:
        """Return all amounts since the start, None if there are none."""
        if not self._series:
            return None
        points = [
            HistogramDataPoint(
                dict(series.attributes),
                started_ns,
                now_ns,
                sum(series.buckets),
                series.total,
                tuple(series.buckets),
                self._bounds,
                series.least,
                series.most,
            )
            for series in self._series.values()
        ]
        data = Histogram(points, AggregationTemporality.CUMULATIVE)
        return Metric(self.name, self._description, self._unit, data)

    def _series_of(self, attributes: Attributes) -> Series:
        key = tuple(attributes.items())
        series = self._series.get(key)
        if series is None:
            if len(self._series) >= SERIES_MAX:
                attributes, key = OVERFLOW, ()
            if key not in self._series:
                self._series[key] = Series(attributes, [0] * (len(self._bounds) + 1))
            series = self._series[key]
        return series


class ClientHistograms(msgspec.Struct, frozen=True):
    """Histograms of requests to upstreams. token_type: the tokens have the attribute of that name."""

    duration: CountedHistogram
    tokens: CountedHistogram
    token_type: bool


def _embeddings_histograms() -> ClientHistograms:
    """Return the histograms that the last conventions have for embeddings."""
    return ClientHistograms(
        CountedHistogram(
            "gen_ai.client.embeddings.duration", "s", "Duration of an embeddings request.", GENAI_SECONDS
        ),
        CountedHistogram(
            "gen_ai.client.embeddings.operation.input_tokens",
            "{token}",
            "Input tokens of an embeddings request.",
            GENAI_TOKENS,
        ),
        token_type=False,
    )


def _general_histograms() -> ClientHistograms:
    """Return the histograms for all operations, which those of v1.41.0 have for embeddings too."""
    return ClientHistograms(
        CountedHistogram(
            "gen_ai.client.operation.duration", "s", "Duration of a request to a model.", GENAI_SECONDS
        ),
        CountedHistogram(
            "gen_ai.client.token.usage", "{token}", "Tokens of a request to a model.", GENAI_TOKENS
        ),
        token_type=True,
    )


class CollectorMetrics:
    """Histograms of one process and their way to a collector.

    names: of the metrics of embeddings. scheme: of the addresses that callers use. interval_s: between two
    requests to the collector.
    """

    def __init__(
        self, exporter: MetricExporter, resource: Resource, names: MetricNames, scheme: str, interval_s: float
    ) -> None:
        self._exporter = exporter
        self._resource = resource
        self._scheme = scheme
        self._interval_s = interval_s
        self._started_ns = time.time_ns()
        self._sending: Thread | None = None
        self._attempts: list[AttemptFinished] = []
        self._calls: list[CallFinished] = []
        general, embeddings = _general_histograms(), _embeddings_histograms()
        # Rerank and the others are not on the metrics of embeddings: conventions for them do not exist.
        self._others = [general]
        self._embeddings = {
            "latest": [embeddings],
            "v1.41": [general],
            "both": [embeddings, general],
        }[names]
        self._requests = CountedHistogram(
            "http.server.request.duration", "s", "Duration of a caller's HTTP request.", HTTP_SECONDS
        )
        clients = (embeddings, general)
        self._all = [self._requests, *(each for pair in clients for each in (pair.duration, pair.tokens))]

    def observe_attempt(self, event: AttemptFinished) -> None:
        """Count an attempt with others that follow it."""
        self._attempts.append(event)
        if len(self._attempts) >= EVENTS_MAX:
            self._count_attempts()

    def observe_call(self, event: CallFinished) -> None:
        """Count a call with others that follow it."""
        self._calls.append(event)
        if len(self._calls) >= EVENTS_MAX:
            self._count_calls()

    def collected(self) -> MetricsData | None:
        """Return the metrics since the start, None if there are none yet."""
        self._count_attempts()
        self._count_calls()
        now_ns = time.time_ns()
        found = [each.collected(self._started_ns, now_ns) for each in self._all]
        metrics = [metric for metric in found if metric is not None]
        if not metrics:
            return None
        scope = ScopeMetrics(InstrumentationScope("gateway", __version__), metrics, "")
        return MetricsData([ResourceMetrics(self._resource, [scope], "")])

    async def run(self) -> None:
        """Send the metrics again and again, until cancelled."""
        while True:
            await asyncio.sleep(self._interval_s)
            if self._sending is None or not self._sending.is_alive():
                self._send()

    def begin_close(self) -> Thread:
        """Send the last metrics, and return the thread that does it; it may outlive every patience."""
        before, data = self._sending, self.collected()

        def finish() -> None:
            if before is not None:
                before.join(EXPORT_TIMEOUT_S)
            if data is not None:
                self._exporter.export(data)
            self._exporter.shutdown()

        closing = Thread(target=finish, daemon=True)
        closing.start()
        return closing

    def _send(self) -> None:
        data = self.collected()
        if data is not None:
            # Not in the loop's own pool of threads, which a name that does not resolve would hold for long.
            self._sending = Thread(target=self._exporter.export, args=(data,), daemon=True)
            self._sending.start()

    def _count_attempts(self) -> None:
        events, self._attempts = self._attempts, []
        alike: dict[Hashable, list[AttemptFinished]] = defaultdict(list)
        for event in events:
            alike[event.operation, event.server, event.model, event.outcome, event.status].append(event)
        for group in alike.values():
            first = group[0]
            operation = operation_name(first.operation)
            attributes = server_attributes(operation, first.server, first.model)
            failed = {} if first.outcome == "ok" else {"error.type": error_type(first.outcome, first.status)}
            seconds = [event.duration_s for event in group]
            tokens = [event.tokens for event in group if event.tokens]
            for client in self._embeddings if operation == "embeddings" else self._others:
                client.duration.observe_many(attributes | failed, seconds)
                if tokens:
                    kind = {"gen_ai.token.type": "input"} if client.token_type else {}
                    client.tokens.observe_many(attributes | kind, tokens)

    def _count_calls(self) -> None:
        events, self._calls = self._calls, []
        alike: dict[tuple[str, str, int, str], list[float]] = defaultdict(list)
        for event in events:
            # Lines of jobs, and RPCs, are no HTTP requests.
            if event.route not in LINES and event.method != "GRPC":
                method = event.method if event.method in HTTP_METHODS else "_OTHER"
                # By the HTTP conventions a 4xx is no error of a server.
                error = event.outcome if event.status >= 500 else ""
                alike[method, event.route, event.status, error].append(event.duration_s)
        for (method, route, status, error), seconds in alike.items():
            attributes: dict[str, str | int] = {
                "http.request.method": method,
                "http.route": route,
                "http.response.status_code": status,
                "url.scheme": self._scheme,
            }
            self._requests.observe_many(attributes | ({"error.type": error} if error else {}), seconds)


def create_collector_metrics(
    settings: OtlpMetrics, names: MetricNames, scheme: str, instance: str
) -> CollectorMetrics:
    """Return metrics that are sent to an OpenTelemetry collector. instance: of this process."""
    # From the extra `otlp`; without it the config was refused before this point.
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

    log_losses_only()
    exporter = OTLPMetricExporter(settings.endpoint, headers=settings.headers, timeout=EXPORT_TIMEOUT_S)
    resource = resource_of(settings.service_name, instance)
    return CollectorMetrics(exporter, resource, names, scheme, settings.interval_s)
