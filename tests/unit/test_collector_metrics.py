"""Metrics for a collector: bounded series, one export at a time, and names that the environment chooses."""

import asyncio
import logging
from threading import Event
from typing import Any

import pytest
from opentelemetry.sdk.metrics.export import (
    Histogram,
    HistogramDataPoint,
    MetricExporter,
    MetricExportResult,
    MetricsData,
)

from gateway.cli.serve import metric_names
from gateway.config.boot import MetricNames
from gateway.events import AttemptFinished, CallFinished, UpstreamServer
from gateway.telemetry.otlp import resource_of
from gateway.telemetry.otlp_metrics import EVENTS_MAX, SERIES_MAX, CollectorMetrics
from tests.fakes.hooks import until
from tests.waiting import PATIENCE_S

SERVER = UpstreamServer("tei", "tei", 80)


class HeldExporter(MetricExporter):
    """Exporter that answers no export before it is released. exports: those that it has begun."""

    def __init__(self) -> None:
        super().__init__()
        self.exports: list[MetricsData] = []
        self.released = Event()

    def export(self, metrics_data: MetricsData, *_: Any, **__: Any) -> MetricExportResult:
        self.exports.append(metrics_data)
        self.released.wait(PATIENCE_S)
        return MetricExportResult.SUCCESS

    def force_flush(self, *_: Any) -> bool:
        return True

    def shutdown(self, *_: Any, **__: Any) -> None:
        pass


def created(names: MetricNames = "latest", exporter: MetricExporter | None = None) -> CollectorMetrics:
    return CollectorMetrics(exporter or HeldExporter(), resource_of("gateway", "1"), names, "http", 0.001)


def attempt(model: str = "m", operation: str = "embed", **facts: Any) -> AttemptFinished:
    settings: dict[str, Any] = {"outcome": "ok", "duration_s": 0.1, "tokens": 5, **facts}
    return AttemptFinished("up", "r", server=SERVER, model=model, operation=operation, **settings)


def points(data: MetricsData | None) -> dict[str, list[HistogramDataPoint]]:
    assert data is not None
    ((scope,),) = [process.scope_metrics for process in data.resource_metrics]
    return {
        metric.name: list(metric.data.data_points)
        for metric in scope.metrics
        if isinstance(metric.data, Histogram)
    }


def test_number_of_series_is_bounded() -> None:
    metrics = created()
    for number in range(SERIES_MAX + 100):
        metrics.observe_attempt(attempt(f"model-{number}"))
    (durations, _) = points(metrics.collected()).values()

    assert SERIES_MAX + 1 == len(durations)
    assert {"otel.metric.overflow": True} == durations[-1].attributes
    assert 100 == durations[-1].count


def test_events_that_wait_to_be_counted_are_bounded() -> None:
    metrics = created()
    for _ in range(3 * EVENTS_MAX + 1):
        metrics.observe_attempt(attempt())

    assert 1 == len(metrics._attempts)
    assert 3 * EVENTS_MAX + 1 == points(metrics.collected())["gen_ai.client.embeddings.duration"][0].count


async def test_a_collector_that_does_not_answer_gets_one_request_at_a_time() -> None:
    exporter = HeldExporter()
    metrics = created(exporter=exporter)
    metrics.observe_attempt(attempt())
    running = asyncio.create_task(metrics.run())
    await until(lambda: len(exporter.exports) == 1)
    # The loop runs on meanwhile, and counts.
    for _ in range(50):
        metrics.observe_attempt(attempt())
        await asyncio.sleep(0.001)
    assert 1 == len(exporter.exports)

    exporter.released.set()
    await until(lambda: len(exporter.exports) > 1)
    running.cancel()
    await asyncio.to_thread(metrics.begin_close().join, PATIENCE_S)
    # Sums since the start: the last one has all that the first one lacked.
    assert [1, 51] == [
        points(exporter.exports[place])["gen_ai.client.embeddings.duration"][0].count for place in (0, -1)
    ]


@pytest.mark.parametrize(
    ("names", "sent"),
    [
        ("latest", {"gen_ai.client.embeddings.duration", "gen_ai.client.embeddings.operation.input_tokens"}),
        ("v1.41", {"gen_ai.client.operation.duration", "gen_ai.client.token.usage"}),
    ],
)
def test_names_are_of_one_version(names: MetricNames, sent: set[str]) -> None:
    metrics = created(names)
    metrics.observe_attempt(attempt())

    assert sent == points(metrics.collected()).keys()


def test_free_and_failed_work_has_no_tokens() -> None:
    metrics = created()
    metrics.observe_attempt(attempt(operation="tokenize", tokens=0))
    metrics.observe_attempt(attempt(outcome="unavailable", tokens=0))
    found = points(metrics.collected())

    assert {"gen_ai.client.embeddings.duration", "gen_ai.client.operation.duration"} == found.keys()
    assert {"unavailable"} == {
        (point.attributes or {}).get("error.type") for point in found["gen_ai.client.embeddings.duration"]
    }


def test_only_http_requests_are_counted_as_such() -> None:
    metrics = created()
    for method, route in (("POST", "/embed"), ("BREW", "/embed"), ("GRPC", "/tei.v1.Embed/Embed")):
        metrics.observe_call(CallFinished("id", method, route, 200, "ok", 0.1))
    metrics.observe_call(CallFinished("id", "POST", "/v1/embeddings (batch)", 200, "ok", 0.1))
    found = points(metrics.collected())["http.server.request.duration"]

    assert ["POST", "_OTHER"] == [(point.attributes or {})["http.request.method"] for point in found]


def test_nothing_is_sent_before_something_is_counted() -> None:
    assert created().collected() is None


@pytest.mark.parametrize(
    ("variable", "names"),
    [
        ("", "latest"),
        ("http,gen_ai_latest_experimental", "latest"),
        ("gen_ai/v1.41", "v1.41"),
        ("database/dup , gen_ai/dup", "both"),
    ],
)
def test_environment_chooses_the_names(variable: str, names: MetricNames) -> None:
    assert names == metric_names({"OTEL_SEMCONV_STABILITY_OPT_IN": variable})


def test_unknown_wish_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert "latest" == metric_names({"OTEL_SEMCONV_STABILITY_OPT_IN": "gen_ai/v1.40"})

    assert "'gen_ai/v1.40'" in caplog.text
