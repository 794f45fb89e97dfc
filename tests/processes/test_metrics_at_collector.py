"""Metrics of several workers at a collector: each attempt is counted once, under OpenTelemetry's names."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.fakes.hooks import RERANKER, respond_with, tei_with_hook
from tests.fakes.otlp_collector import Collector, collecting, values_of
from tests.fakes.tei import FakeTei
from tests.fakes.threaded import serve_in_thread
from tests.processes.conftest import Served, wait_until
from tests.quotas.redis_server import RedisServer

pytestmark = pytest.mark.slow

CONFIG = """
listen: 127.0.0.1:0
workers: 2
quotas: {{store: "{store}"}}
metrics: {{endpoint: "{metrics}", headers: {{x-token: t}}, interval_s: 0.2}}
tracing: {{endpoint: "{traces}", sample: 1}}
upstreams:
  pair: {{backend: tei, replicas: ["{broken}", "{working}"]}}
  reranker: {{backend: tei, replicas: ["{reranker}"]}}
models: {{m: {{upstream: pair}}, cross: {{upstream: reranker}}}}
"""
CALLS = 24
SECONDS = [0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92]
TOKENS = [4**power for power in range(14)]
EMBEDDINGS = "gen_ai.client.embeddings.duration"
EMBEDDINGS_TOKENS = "gen_ai.client.embeddings.operation.input_tokens"
GENERAL, GENERAL_TOKENS = "gen_ai.client.operation.duration", "gen_ai.client.token.usage"
HTTP = "http.server.request.duration"


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Collector]:
    """Run a gateway of two workers with calls, stop it, and return the collector that it has sent to."""
    folder = tmp_path_factory.mktemp("collected")
    with ExitStack() as resources:
        collector = resources.enter_context(collecting())
        servers = {
            "broken": tei_with_hook(respond_with(500)),
            "working": FakeTei(),
            "reranker": FakeTei(model_type=RERANKER),
        }
        urls = {name: resources.enter_context(serve_in_thread(each)) for name, each in servers.items()}
        redis = RedisServer(folder)
        resources.callback(redis.stop)
        path = folder / "router.yaml"
        addresses = {"metrics": collector.metrics_url, "traces": collector.url, "store": redis.url}
        path.write_text(CONFIG.format(**addresses, **urls))
        gateway = Served(path, {"OTEL_SEMCONV_STABILITY_OPT_IN": "http, gen_ai/dup"}).wait_until_up()
        try:
            for number in range(CALLS):
                # A connection of its own, so that both workers are asked.
                with gateway.client() as client:
                    body = {"model": "m", "input": ["one two", f"text {number}"]}
                    assert 200 == client.post("/v1/embeddings", json=body).status_code
            with gateway.client() as client:
                rerank = {"query": "q", "documents": ["d"], "model": "cross"}
                assert 200 == client.post("/v1/rerank", json=rerank).status_code
                assert 404 == client.post("/v1/embeddings", json={"model": "x", "input": "a"}).status_code
            # Sent while it serves, and the rest when it stops.
            assert wait_until(lambda: len(collector.metrics) == 2)
        finally:
            gateway.stop()
        yield collector


def counts(collector: Collector, name: str, attribute: str, **wanted: str) -> dict[object, int]:
    """Return the sums of a histogram's counts by one attribute. wanted: others, with `_` for dots."""
    found: dict[object, int] = {}
    for point in collector.points(name):
        values = values_of(point.attributes)
        if wanted.items() <= {key.replace(".", "_"): value for key, value in values.items()}.items():
            key = values.get(attribute)
            found[key] = found.get(key, 0) + point.count
    return found


def test_every_attempt_is_counted_once_by_one_of_the_workers(collected: Collector) -> None:
    by_error = counts(collected, EMBEDDINGS, "error.type")
    clients = [span for span in collected.spans if span.kind == Span.SPAN_KIND_CLIENT]
    embeddings = [span for span in clients if span.name == "embeddings fake/model"]

    assert CALLS == by_error[None]
    assert by_error["500"]
    assert sum(by_error.values()) == len(embeddings)
    assert 2 == len(collected.metrics)
    assert collected.metrics.keys() == collected.span_instances
    # Each text has two words and two special tokens.
    assert 8 * CALLS == sum(point.sum for point in collected.points(EMBEDDINGS_TOKENS))
    assert {200: CALLS, 404: 1} == counts(
        collected, HTTP, "http.response.status_code", http_route="/v1/embeddings"
    )
    assert "t" == collected.metrics_headers["x-token"]


def test_names_attributes_and_bounds_are_those_of_the_conventions(collected: Collector) -> None:
    working = next(
        point for point in collected.points(EMBEDDINGS) if "error.type" not in values_of(point.attributes)
    )
    values = values_of(working.attributes)

    assert {"gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model"} < values.keys()
    assert ("embeddings", "tei", "fake/model", "127.0.0.1") == tuple(
        values[name]
        for name in (
            "gen_ai.operation.name",
            "gen_ai.provider.name",
            "gen_ai.request.model",
            "server.address",
        )
    )
    assert isinstance(values["server.port"], int)
    assert SECONDS == list(working.explicit_bounds)
    assert len(SECONDS) + 1 == len(working.bucket_counts)
    assert working.count == sum(working.bucket_counts)
    assert 0 < working.min <= working.max <= working.sum
    (tokens, *_) = collected.points(EMBEDDINGS_TOKENS)
    assert TOKENS == list(tokens.explicit_bounds)
    units = {name: metric.unit for metrics in collected.metrics.values() for name, metric in metrics.items()}
    assert {EMBEDDINGS: "s", EMBEDDINGS_TOKENS: "{token}"}.items() <= units.items()
    cumulative = AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
    assert {cumulative} == {
        metric.histogram.aggregation_temporality
        for metrics in collected.metrics.values()
        for metric in metrics.values()
    }


def test_older_names_are_sent_too_where_the_environment_asks_for_both(collected: Collector) -> None:
    latest = counts(collected, EMBEDDINGS, "error.type")

    assert latest == counts(collected, GENERAL, "error.type", gen_ai_operation_name="embeddings")
    assert {"input": CALLS} == counts(
        collected, GENERAL_TOKENS, "gen_ai.token.type", gen_ai_operation_name="embeddings"
    )


def test_rerank_is_not_on_the_metrics_of_embeddings(collected: Collector) -> None:
    assert {"embeddings": sum(counts(collected, EMBEDDINGS, "error.type").values())} == counts(
        collected, EMBEDDINGS, "gen_ai.operation.name"
    )
    assert 1 == counts(collected, GENERAL, "gen_ai.operation.name")["rerank"]
