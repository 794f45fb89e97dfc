"""Tests of the parts that all adapters share."""

import json
from collections.abc import Callable

import httpx
import pytest

from backends.contract import Backend, Embed, QueueDepth, ReplicaSpec, ReportsQueueDepth, Rerank, Truncate
from backends.errors import BackendError, InvalidWork, ReplicaFailed, UnsupportedWork
from backends.http import UpstreamClient, UpstreamResponse
from backends.openai_api import failure as openai_failure
from backends.registry import BACKENDS, open_replica
from backends.replies import check_reported_cuts, read_gauge
from backends.tei import TeiBackend
from backends.tei import failure as tei_failure
from backends.vllm_wire import failure as vllm_failure

QUEUE = b"""# HELP te_queue_size The number of requests in the queue
# TYPE te_queue_size gauge
te_queue_size 3
te_queue_size_total 99
"""


@pytest.mark.parametrize(
    ("exposition", "name", "expected"),
    [
        (QUEUE, "te_queue_size", 3.0),
        (b'waiting{engine="0"} 1.0\nwaiting{engine="1"} 2.0', "waiting", 3.0),
        (QUEUE, "te_queue", None),
        (b"", "te_queue_size", None),
        (b"te_queue_size many", "te_queue_size", None),
        (b"te_queue_size NaN", "te_queue_size", None),
        (b"te_queue_size +Inf", "te_queue_size", None),
        (b"<html>", "te_queue_size", None),
    ],
)
def test_gauge_is_the_sum_of_its_samples(exposition: bytes, name: str, expected: float | None) -> None:
    assert expected == read_gauge(exposition, name)


@pytest.mark.parametrize(
    ("status", "body", "expected"), [(200, QUEUE, QueueDepth(3)), (200, b"", None), (404, b"", None)]
)
async def test_tei_reports_its_queue_depth_if_the_metric_exists(
    status: int, body: bytes, expected: QueueDepth | None
) -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(status, content=body))

    assert expected == await TeiBackend(UpstreamClient("http://tei", transport=transport)).queue_depth(1.0)


@pytest.mark.parametrize("kind", BACKENDS)
async def test_opening_a_backend_sends_nothing(kind: str) -> None:
    backend: Backend = open_replica(kind, ReplicaSpec("http://nowhere.invalid"))  # type: ignore[arg-type]
    try:
        assert isinstance(backend, ReportsQueueDepth) is (kind in {"tei", "infinity", "vllm"})
    finally:
        await backend.aclose()


@pytest.mark.parametrize("reported", ["0", "0-3,7", "unknown"])
def test_a_cut_that_was_forbidden_is_a_refusal(reported: str) -> None:
    """Another gateway cuts by its own setting where the wire has no field that forbids it."""
    response = UpstreamResponse(200, {"x-truncated-inputs": reported}, b"")
    with pytest.raises(InvalidWork, match="context length") as caught:
        check_reported_cuts(Embed(("a",), truncate=Truncate.ERROR), response)
    assert (None if reported == "unknown" else 0) == caught.value.input_index

    with pytest.raises(UnsupportedWork, match="right end"):
        check_reported_cuts(Rerank("q", ("a",), truncate=Truncate.LEFT), response)
    check_reported_cuts(Embed(("a",), truncate=Truncate.RIGHT), response)
    with pytest.raises(ReplicaFailed, match="did not get"):
        check_reported_cuts(
            Embed(("a",), truncate=Truncate.ERROR), UpstreamResponse(200, {"x-truncated-inputs": "1"}, b"")
        )
    check_reported_cuts(Embed(("a",), truncate=Truncate.ERROR), UpstreamResponse(200, {}, b""))


@pytest.mark.parametrize("failure", [tei_failure, openai_failure, vllm_failure])
@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("content_policy_violation", "the upstream refused the input: content_policy_violation"),
        ("a sentence with the text", "the upstream refused the input"),
        ("x" * 65, "the upstream refused the input"),
    ],
)
def test_a_refusal_has_the_servers_code_and_none_of_its_words(
    failure: Callable[[UpstreamResponse], BackendError], code: str, message: str
) -> None:
    error = {"message": "this text is secret", "type": "invalid_request_error", "code": code}
    refusal = failure(UpstreamResponse(400, {}, json.dumps({"error": error}).encode()))

    assert isinstance(refusal, InvalidWork)
    assert message == refusal.message
