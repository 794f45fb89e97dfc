"""Operators read where a call was sent and what the upstream said; callers do not."""

from typing import Any

import msgspec
import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from gateway.config.schema import Tracing
from gateway.events import CallFinished
from gateway.telemetry.access_log import call_line
from gateway.telemetry.tracing import create_traces
from tests.conftest import Boots, Running
from tests.fakes.openai import FakeOpenAI
from tests.fakes.tei import FakeTei, is_reference_texts

TWO = """
upstreams: {u: {backend: tei, replicas: ["http://tei-0", "http://tei-1"], policy: round_robin}}
models: {m: {upstream: u}}
"""
OPENAI = """
upstreams: {u: {backend: openai, model: fake-model, replicas: ["http://tei-0/v1"]}}
models: {m: {upstream: u}}
"""
SECRET = "the private text of a tenant that no log may contain"
CUDA = "CUDA error: an illegal memory access was encountered"


def failing(status: int, words: str) -> FakeTei:
    """Return a server that answers every call with an error."""
    server = FakeTei()

    async def fail(path: str, body: dict[str, Any]) -> tuple[int, bytes] | None:
        is_call = path != "/info" and not is_reference_texts(body.get("inputs", body.get("input")))
        return (status, b'{"error":"%b","error_type":"Backend"}' % words.encode()) if is_call else None

    server.hook = fail
    return server


def last_call(gateway: Running) -> CallFinished:
    """Return the event of the latest call."""
    return [event for event in gateway.events if isinstance(event, CallFinished)][-1]


async def test_failed_call_has_its_replicas_and_the_words_of_the_upstream(boot: Boots) -> None:
    servers = {f"tei-{i}": failing(500, f"{CUDA} at '{SECRET}'") for i in range(2)}
    exporter = InMemorySpanExporter()
    traces = create_traces(Tracing(sample=1.0), SimpleSpanProcessor(exporter))
    async with boot(servers, TWO, traces=traces) as gateway:
        reply = await gateway.post("/embed", {"inputs": SECRET})
        event = last_call(gateway)
        spans = [span for span in exporter.get_finished_spans() if span.attributes is not None]
        recent = (await gateway.client.get("/admin/calls")).text
    call = next(dict(span.attributes or {}) for span in spans if span.name == "POST /embed")
    attempts = [dict(span.attributes or {}) for span in spans if span.kind is SpanKind.CLIENT]

    words = f"{CUDA} at '[input]'"
    assert event.replicas == call["gateway.replicas"]
    assert (event.attempts, "500", words) == (
        call["gateway.attempts"],
        call["gateway.upstream.status"],
        call["gateway.upstream.words"],
    )
    assert set(event.replicas) == {attempt["gateway.replica"] for attempt in attempts}
    assert {("500", words)} == {
        (attempt["gateway.upstream.status"], attempt["gateway.upstream.words"]) for attempt in attempts
    }
    listed = msgspec.json.decode(recent)["calls"][0]
    assert (list(event.replicas), event.attempts) == (listed["replicas"], listed["attempts"])
    assert reply.status_code >= 400
    assert CUDA not in reply.text
    assert {"http://tei-0", "http://tei-1"} == set(event.replicas)
    assert event.attempts >= 2
    assert "500" == event.upstream_status
    assert f"{CUDA} at '[input]'" == event.upstream_words
    assert f'upstream_status=500  upstream_words="{CUDA} at' in call_line(event)
    assert SECRET not in recent
    assert '"upstream_status":"500"' in recent
    assert CUDA in recent


async def test_call_that_another_replica_answered_has_both(boot: Boots) -> None:
    async with boot({"tei-0": failing(500, CUDA), "tei-1": FakeTei()}, TWO) as gateway:
        events = []
        for number in range(4):
            assert 200 == (await gateway.post("/embed", {"inputs": f"text {number}"})).status_code
            events.append(last_call(gateway))

    moved = [event for event in events if event.attempts > 1]
    assert moved
    assert {("http://tei-0", "http://tei-1")} == {event.replicas for event in moved}
    assert {CUDA} == {event.upstream_words for event in moved}
    assert all(event.upstream_words is None for event in events if event.attempts == 1)


async def test_duration_of_attempts_is_known_by_replica(boot: Boots) -> None:
    async with boot({"tei-0": FakeTei(), "tei-1": FakeTei()}, TWO) as gateway:
        for _ in range(2):
            await gateway.post("/embed", {"inputs": "a"})
        metrics = (await gateway.client.get("/metrics")).text

    for number in range(2):
        labels = f'replica="http://tei-{number}",upstream="u"'
        assert f"gateway_attempt_duration_seconds_count{{{labels}}} 1.0" in metrics


class PausingOpenAI(FakeOpenAI):
    """Server that answers calls with 429 and these headers while `is_full`."""

    def __init__(self, headers: dict[str, str]) -> None:
        super().__init__()
        self.is_full = False
        self.pause = [(name.encode(), value.encode()) for name, value in headers.items()]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one ASGI request."""
        if not self.is_full or scope["method"] == "GET":
            await super().__call__(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 429, "headers": self.pause})
        await send({"type": "http.response.body", "body": b""})


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, "2"),
        ({"retry-after": "7"}, "7"),
        ({"retry-after-ms": "6250", "retry-after": "9"}, "7"),
        (
            {"retry-after": "Fri, 27 Nov 2026 10:00:20 GMT", "date": "Fri, 27 Nov 2026 10:00:00 GMT"},
            "20",
        ),
        ({"retry-after": "86400"}, "60"),
    ],
)
async def test_pause_that_an_upstream_asks_for_reaches_the_caller(
    boot: Boots, headers: dict[str, str], expected: str
) -> None:
    server = PausingOpenAI(headers)
    async with boot({"tei-0": server}, OPENAI) as gateway:
        server.is_full = True
        reply = await gateway.post("/v1/embeddings", {"input": "a"}, x_timeout_s="5")

    assert (429, expected) == (reply.status_code, reply.headers["retry-after"])
