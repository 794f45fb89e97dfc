"""OpenTelemetry collector for tests: accepts OTLP over HTTP and keeps spans and metrics.

It needs the extra `otlp`, which contains the format.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import HistogramDataPoint, Metric
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.waiting import PATIENCE_S

METRICS = "/v1/metrics"


def values_of(attributes: Any) -> dict[str, str | int | bool]:
    """Return the attributes of a span, a resource or a data point as plain values."""
    pairs: list[KeyValue] = list(attributes)
    return {pair.key: getattr(pair.value, str(pair.value.WhichOneof("value"))) for pair in pairs}


class Collector:
    """Received spans and metrics. url, metrics_url: where to send them.

    requests: those that have begun. headers, metrics_headers: of the last spans, and the last metrics.
    metrics: the last ones of each process, by its `service.instance.id`. span_instances: of all spans.
    """

    def __init__(self, origin: str) -> None:
        self.url = f"{origin}/v1/traces"
        self.metrics_url = origin + METRICS
        self.requests = 0
        self.spans: list[Span] = []
        self.span_instances: set[str] = set()
        self.metrics: dict[str, dict[str, Metric]] = {}
        self.headers: dict[str, str] = {}
        self.metrics_headers: dict[str, str] = {}

    def names(self) -> set[str]:
        """Return the names of all spans."""
        return {span.name for span in self.spans}

    def points(self, name: str) -> list[HistogramDataPoint]:
        """Return the data points of a histogram, of all processes."""
        found = [metrics[name] for metrics in self.metrics.values() if name in metrics]
        return [point for metric in found for point in metric.histogram.data_points]

    def receive(self, path: str, headers: dict[str, str], body: bytes) -> None:
        """Keep the content of one request."""
        if path == METRICS:
            self.metrics_headers = headers
            for process in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                instance = str(values_of(process.resource.attributes)["service.instance.id"])
                self.metrics[instance] = {
                    metric.name: metric for scope in process.scope_metrics for metric in scope.metrics
                }
            return
        self.headers = headers
        for sender in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.span_instances.add(str(values_of(sender.resource.attributes)["service.instance.id"]))
            for scope in sender.scope_spans:
                self.spans += scope.spans


@contextmanager
def collecting(released: Event | None = None) -> Iterator[Collector]:
    """Run a collector on a free loopback port. released: until it is set, the collector takes nothing."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.requests += 1
            if released is not None:
                released.wait(PATIENCE_S)
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.receive(self.path, {name.lower(): value for name, value in self.headers.items()}, body)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector = Collector(f"http://127.0.0.1:{server.server_port}")
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield collector
        server.shutdown()
        thread.join(5)
