"""Metrics on their way to a collector that receives them, hangs, or is not there."""

import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event

import pytest

from tests.conftest import CONFIG, running_gateway
from tests.fakes.hooks import embedder_and_reranker, until
from tests.fakes.otlp_collector import Collector, collecting
from tests.fakes.tei import assert_vectors

CALLS = 10
DURATION = "gen_ai.client.embeddings.duration"


def exporting_to(url: str) -> str:
    return CONFIG + f"metrics: {{endpoint: '{url}', interval_s: 0.01}}\n"


def counted(collector: Collector) -> int:
    return sum(point.count for point in collector.points(DURATION))


@contextmanager
def closed_port() -> Iterator[int]:
    """Reserve a port at which nothing listens."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


async def test_collector_has_all_calls_once_the_gateway_has_stopped() -> None:
    with collecting() as collector:
        async with running_gateway(embedder_and_reranker(), exporting_to(collector.metrics_url)) as gateway:
            for _ in range(CALLS):
                assert_vectors(await gateway.post("/v1/embeddings", {"input": "a"}), "a")

        assert CALLS == counted(collector)


async def test_calls_are_served_while_the_collector_hangs() -> None:
    released = Event()
    with collecting(released) as collector:
        async with running_gateway(embedder_and_reranker(), exporting_to(collector.metrics_url)) as gateway:
            assert_vectors(await gateway.post("/v1/embeddings", {"input": "a"}), "a")
            await until(lambda: collector.requests > 0)
            for _ in range(CALLS):
                assert_vectors(await gateway.post("/v1/embeddings", {"input": "a"}), "a")
            assert 0 == counted(collector)
            released.set()

        # Sums since the start: nothing is lost.
        assert CALLS + 1 == counted(collector)


async def test_calls_are_served_without_a_collector(caplog: pytest.LogCaptureFixture) -> None:
    with closed_port() as port, caplog.at_level(logging.ERROR):
        url = f"http://127.0.0.1:{port}/v1/metrics"
        async with running_gateway(embedder_and_reranker(), exporting_to(url)) as gateway:
            assert_vectors(await gateway.post("/v1/embeddings", {"input": "a"}), "a")
            await until(lambda: any(line.name.startswith("opentelemetry") for line in caplog.records))
            assert_vectors(await gateway.post("/v1/embeddings", {"input": "b"}), "b")
