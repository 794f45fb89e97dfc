"""A gateway with its engine: one trace through both, metrics under TEI's names, and log lines."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from backends.torch.stats import BOUNDS, COUNTERS
from tests.fakes.otlp_collector import Collector, collecting
from tests.processes.conftest import Served, wait_until

pytestmark = pytest.mark.slow

TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    """Run the collector that receives the spans of these tests."""
    with collecting() as running:
        yield running


@pytest.fixture(scope="module")
def traced(
    repository: Path, tmp_path_factory: pytest.TempPathFactory, collector: Collector
) -> Iterator[Served]:
    """Serve the project's own router.yaml with tracing."""
    file = tmp_path_factory.mktemp("traced") / "router.yaml"
    tracing = f"tracing: {{endpoint: '{collector.url}', sample: 0, headers: {{x-token: t}}}}\n"
    file.write_text(tracing + (repository / "router.yaml").read_text())
    gateway = Served(file).wait_until_up()
    yield gateway
    gateway.stop()


def families(gateway: Served) -> dict[str, Metric]:
    with gateway.client() as client:
        text = client.get("/metrics").text
    return {family.name: family for family in text_string_to_metric_families(text)}


def total(family: Metric, sample: str = "") -> float:
    return sum(value.value for value in family.samples if value.name == (sample or family.name))


def test_one_trace_spans_gateway_and_engine(traced: Served, collector: Collector) -> None:
    with traced.client() as client:
        body = {"input": ["a text", "another"], "model": "all-minilm-l6-v2"}
        headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
        assert 200 == client.post("/v1/embeddings", json=body, headers=headers).status_code
        assert 200 == client.post("/v1/embeddings", json=body).status_code
    engine = {"engine tokenize", "engine queue", "engine forward"}
    assert wait_until(lambda: {"POST /v1/embeddings", *engine} <= collector.names())

    assert {TRACE} == {span.trace_id.hex() for span in collector.spans}
    assert "t" == collector.headers["x-token"]
    by_name = {span.name: span for span in collector.spans}
    attempt = next(span for span in collector.spans if span.kind == Span.SPAN_KIND_CLIENT)
    for name in engine:
        inside = by_name[name]
        assert attempt.span_id == inside.parent_span_id
        assert attempt.start_time_unix_nano <= inside.start_time_unix_nano
        assert inside.end_time_unix_nano <= attempt.end_time_unix_nano


def test_engine_counts_under_tei_metric_names(traced: Served) -> None:
    before = families(traced)
    with traced.client() as client:
        client.post("/embed", json={"inputs": ["one", "two", "three"]}).raise_for_status()
        assert 400 <= client.post("/embed", json={"inputs": "a", "prompt_name": "nowhere"}).status_code
    after = families(traced)

    assert {"te_queue_size", *COUNTERS, *BOUNDS} == {name for name in after if name.startswith("te_")}
    assert 3 == total(after["te_embed_success"]) - total(
        before.get("te_embed_success", after["te_embed_success"])
    )
    grown = total(after["te_batch_next_size"], "te_batch_next_size_sum") - total(
        before["te_batch_next_size"], "te_batch_next_size_sum"
    )
    assert 3 == grown
    assert 0 == total(after["te_queue_size"])
    assert {"validation"} <= {value.labels["err"] for value in after["te_request_failure"].samples}
    longest = after["te_request_duration"]
    assert total(longest, "te_request_duration_count") > 0


def test_metrics_answer_without_the_engine(traced: Served) -> None:

    os.kill(traced.child("backends.torch.serving.server"), signal.SIGKILL)

    assert "gateway_calls" in families(traced)
    assert wait_until(lambda: "te_queue_size" in families(traced))


def test_log_lines_are_json_without_a_terminal(traced: Served) -> None:

    with traced.client() as client:
        client.post("/embed", json={"inputs": "a"}, headers={"x-request-id": "look-for-me"})
    found = []

    def logged() -> bool:
        found[:] = [line for line in traced.log if "look-for-me" in line]
        return bool(found)

    assert wait_until(logged)
    fields = json.loads(found[0])
    assert ("call", "/embed", 200, "default") == (
        fields["event"],
        fields["route"],
        fields["status"],
        fields["tenant"],
    )
    assert 32 == len(fields["trace_id"])
