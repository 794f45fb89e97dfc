"""OpenTelemetry collector for tests: accepts OTLP over HTTP and keeps the spans.

It needs the extra `otlp`, which contains the format.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector:
    """Received spans. url: where to send them. headers: of the last request."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.spans: list[Span] = []
        self.headers: dict[str, str] = {}

    def names(self) -> set[str]:
        """Return the names of all spans."""
        return {span.name for span in self.spans}


@contextmanager
def collecting() -> Iterator[Collector]:
    """Run a collector on a free loopback port."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in resource.scope_spans:
                    collector.spans += scope.spans
            collector.headers = {name.lower(): value for name, value in self.headers.items()}
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector = Collector(f"http://127.0.0.1:{server.server_port}/v1/traces")
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield collector
        server.shutdown()
        thread.join(5)
