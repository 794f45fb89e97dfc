"""Tests of the parts that all adapters share."""

import httpx
import pytest

from backends.contract import Backend, QueueDepth, ReplicaSpec, ReportsQueueDepth
from backends.http import UpstreamClient
from backends.registry import BACKENDS, open_replica
from backends.replies import read_gauge
from backends.tei import TeiBackend

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
