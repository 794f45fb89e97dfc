"""One call is one trace, with its stages, its attempts, and the headers sent upstream."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import pairwise
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from gateway.config.schema import Tracing
from gateway.events import CallFinished
from gateway.telemetry.tracing import create_traces
from tests.conftest import CONFIG, KEY, Running, running_gateway
from tests.fakes.hooks import RERANKER, Gate, respond_with, tei_with_hook, until
from tests.fakes.tei import DIMENSIONS, FakeTei

OPENAI = "/v1/embeddings"
TRACE = "0af7651916cd43dd8448eb211c80319c"
SAMPLED = f"00-{TRACE}-b7ad6b7169203331-01"
# The model as the fake server names it.
ATTEMPT = "embeddings fake/model"
UNSAMPLED = f"00-{TRACE}-b7ad6b7169203331-00"


class Traced:
    """Gateway whose spans are exported to memory."""

    def __init__(self, gateway: Running, exporter: InMemorySpanExporter) -> None:
        self.gateway = gateway
        self._exporter = exporter

    @property
    def spans(self) -> Sequence[ReadableSpan]:
        """Return the finished spans, in the order in which they ended."""
        return self._exporter.get_finished_spans()

    def named(self, name: str) -> list[ReadableSpan]:
        """Return the finished spans with a name."""
        return [span for span in self.spans if span.name == name]

    async def embed(self, *texts: str, **headers: str) -> httpx.Response:
        """Call OpenAI's embeddings endpoint."""
        reply = await self.gateway.post(OPENAI, {"input": list(texts)}, **headers)
        assert 200 == reply.status_code, reply.text
        return reply

    async def wait_queued(self, inputs: int) -> None:
        """Wait until this many inputs are queued for the embedding model."""
        lane = self.gateway.application.gateway.upstreams["embedder"].lanes["texts"]
        await until(lambda: lane.backlog().inputs == inputs)

    def children(self, parent: ReadableSpan) -> list[str]:
        """Return the names of a span's children, in the order of their start."""
        below = [span for span in self.spans if span.parent and span.parent.span_id == parent.context.span_id]
        return [span.name for span in sorted(below, key=lambda span: span.start_time or 0)]


Boots = Callable[..., AbstractAsyncContextManager[Traced]]


@pytest.fixture
def traced() -> Boots:
    """Boot a gateway that samples every call, or the given share."""

    @asynccontextmanager
    async def booted(
        servers: dict[str, Any], config: str = CONFIG, sample: float = 1.0
    ) -> AsyncIterator[Traced]:
        exporter = InMemorySpanExporter()
        traces = create_traces(Tracing(sample=sample), SimpleSpanProcessor(exporter))
        async with running_gateway(servers, config, traces=traces) as gateway:
            yield Traced(gateway, exporter)

    return booted


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def traced_requests(server: FakeTei) -> list[dict[str, str]]:
    """Return the headers of the requests that a server received for calls."""
    return [headers for headers in server.headers if "traceparent" in headers]


def own_id(span: ReadableSpan) -> int:
    assert span.context is not None
    return span.context.span_id


async def test_call_span_has_stages_and_attempts_below_it(traced: Boots) -> None:
    async with traced({"tei-0": FakeTei()}) as gateway:
        await gateway.embed("one two", "three")
        (call,) = gateway.named(f"POST {OPENAI}")
        (dispatch,) = gateway.named("dispatch")

        assert ["parse", "auth", "quota", "dispatch", "encode"] == gateway.children(call)
        # A call of a busy machine may wait, which is a span too.
        assert [ATTEMPT] == [name for name in gateway.children(dispatch) if name != "queue"]
    assert call.parent is None
    assert {
        "http.request.method": "POST",
        "http.route": OPENAI,
        "http.response.status_code": 200,
        "gateway.operation": "embeddings",
        "gateway.model": "bge",
        "gateway.tokens": 7,
        "gateway.tenant": "default",
        "gateway.key_id": "first",
        "gateway.inputs": 2,
    }.items() <= attributes(call).items()


async def test_attempt_span_follows_the_genai_conventions(traced: Boots) -> None:
    config = CONFIG.replace("http://rerank-0", "https://rerank-0:8443")
    servers = {"tei-0": FakeTei(), "rerank-0": FakeTei(model_type=RERANKER)}
    async with traced(servers, config) as gateway:
        await gateway.embed("one two", "three")
        rerank = {"query": "q", "documents": ["d"], "model": "cross"}
        assert 200 == (await gateway.gateway.post("/v1/rerank", rerank)).status_code
        (embedded,) = gateway.named(ATTEMPT)
        (reranked,) = gateway.named("rerank fake/model")

    assert SpanKind.CLIENT is embedded.kind
    assert {
        "gen_ai.operation.name": "embeddings",
        "gen_ai.provider.name": "tei",
        "gen_ai.request.model": "fake/model",
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.embeddings.dimension.count": DIMENSIONS,
        "server.address": "tei-0",
        "server.port": 80,
    } == {name: value for name, value in attributes(embedded).items() if not name.startswith("gateway.")}
    assert ("rerank", "rerank-0", 8443) == tuple(
        attributes(reranked)[name] for name in ("gen_ai.operation.name", "server.address", "server.port")
    )
    assert attributes(reranked)["gen_ai.usage.input_tokens"]
    assert "gen_ai.embeddings.dimension.count" not in attributes(reranked)
    # Only requests to upstreams are GenAI's, so that sums over spans count tokens once.
    others = [span for span in gateway.spans if span.kind is not SpanKind.CLIENT]
    assert not [name for span in others for name in attributes(span) if name.startswith("gen_ai.")]


async def test_stages_follow_each_other_inside_the_call(traced: Boots) -> None:
    async with traced({"tei-0": FakeTei()}) as gateway:
        await gateway.embed("a")
        (call,) = gateway.named(f"POST {OPENAI}")
        names = ["parse", "auth", "quota", "dispatch", "encode"]
        stages = [gateway.named(name)[0] for name in names]

    moments = [
        call.start_time,
        *(at for stage in stages for at in (stage.start_time, stage.end_time)),
        call.end_time,
    ]
    # The end of the call is read from another clock.
    assert all(earlier - 1_000_000 <= later for earlier, later in pairwise(moments))


async def test_split_call_with_failover_is_one_trace(traced: Boots) -> None:
    config = CONFIG.replace("embedder: {", "embedder: {request_inputs: 2, policy: round_robin, ")
    async with traced({"tei-0": tei_with_hook(respond_with(500)), "tei-1": FakeTei()}, config) as gateway:
        await gateway.embed("a", "b", "c", "d", "e")
        (call,) = gateway.named(f"POST {OPENAI}")
        attempts = gateway.named(ATTEMPT)
        below = gateway.children(gateway.named("dispatch")[0])

    assert {call.context.trace_id} == {span.context.trace_id for span in gateway.spans}
    succeeded = [span for span in attempts if "error.type" not in attributes(span)]
    failed = [attributes(span) for span in attempts if "error.type" in attributes(span)]
    assert 3 == len(succeeded)
    assert {"http://tei-1"} == {attributes(span)["gateway.replica"] for span in succeeded}
    assert failed
    assert {("500", "failed", "http://tei-0")} == {
        (span["error.type"], span["gateway.attempt.outcome"], span["gateway.replica"]) for span in failed
    }
    assert len(attempts) == below.count(ATTEMPT)
    assert 1 == max(attributes(span)["gateway.attempt.tries_before"] for span in succeeded)


async def test_joined_attempt_is_in_the_trace_of_each_call(traced: Boots) -> None:
    gate = Gate()
    config = CONFIG.replace("embedder: {", "embedder: {in_flight_batches: 1, ")
    async with traced({"tei-0": tei_with_hook(gate)}, config) as gateway:
        calls = [asyncio.create_task(gateway.embed("first"))]
        await until(lambda: gate.waiting == 1)
        calls += [asyncio.create_task(gateway.embed(text)) for text in ("second", "third")]
        await gateway.wait_queued(2)
        gate.opened.set()
        await asyncio.gather(*calls)
        joined = [span for span in gateway.named(ATTEMPT) if attributes(span)["gateway.batch.calls"] == 2]
        roots = {span.context.trace_id: own_id(span) for span in gateway.named(f"POST {OPENAI}")}

    assert 2 == len(joined) == len({span.context.trace_id for span in joined})
    lead, other = (
        (joined[0], joined[1]) if joined[1].links[0].context.span_id == own_id(joined[0]) else joined[::-1]
    )
    assert (SpanKind.CLIENT, SpanKind.INTERNAL) == (lead.kind, other.kind)
    assert 6 == attributes(lead)["gen_ai.usage.input_tokens"]
    assert "gen_ai.usage.input_tokens" not in attributes(other)
    assert [own_id(lead)] == [link.context.span_id for link in other.links]
    assert [roots[other.context.trace_id]] == [link.context.span_id for link in lead.links]


async def test_upstream_request_carries_the_attempts_span_id(traced: Boots) -> None:
    server = FakeTei()
    async with traced({"tei-0": server}) as gateway:
        await gateway.embed("a", traceparent=SAMPLED, tracestate="vendor=1")
        (attempt,) = gateway.named(ATTEMPT)
        (call,) = gateway.named(f"POST {OPENAI}")

    (sent,) = traced_requests(server)
    assert f"00-{TRACE}-{own_id(attempt):016x}-01" == sent["traceparent"]
    assert "vendor=1" == sent["tracestate"]
    assert call.parent is not None
    assert 0xB7AD6B7169203331 == call.parent.span_id


async def test_caller_overrides_the_sample_share(traced: Boots) -> None:
    server = FakeTei()
    async with traced({"tei-0": server}, sample=0.0) as gateway:
        await gateway.embed("a")
        await gateway.embed("b", traceparent=UNSAMPLED)
        unrecorded = list(gateway.spans)
        await gateway.embed("c", traceparent=SAMPLED)

    assert [] == unrecorded
    assert {int(TRACE, 16)} == {span.context.trace_id for span in gateway.spans}
    # Unsampled calls are sent upstream without the sampled flag, so that servers do not record them either.
    assert [0, 0, 1] == [int(span["traceparent"][-2:], 16) & 1 for span in traced_requests(server)]


@pytest.mark.parametrize(
    "sent", ["", "nonsense", f"00-{'0' * 32}-b7ad6b7169203331-01", f"{SAMPLED}-", "ff" * 40]
)
async def test_malformed_traceparent_starts_a_new_trace(traced: Boots, sent: str) -> None:
    async with traced({"tei-0": FakeTei()}) as gateway:
        await gateway.embed("a", traceparent=sent)
        (call,) = gateway.named(f"POST {OPENAI}")

    assert call.parent is None
    assert int(TRACE, 16) != call.context.trace_id


async def test_span_of_a_rejected_call_has_the_error_type(traced: Boots) -> None:
    async with traced({"tei-0": FakeTei()}) as gateway:
        await gateway.gateway.post(OPENAI, {"input": "a", "model": "nowhere"})
        (call,) = gateway.named(f"POST {OPENAI}")

    facts = attributes(call)
    assert (404, "model_not_found") == (facts["http.response.status_code"], facts["error.type"])
    assert call.status.is_unset
    assert [] == gateway.named("dispatch")


async def test_probes_create_no_spans(traced: Boots) -> None:
    async with traced({"tei-0": FakeTei()}) as gateway:
        for path in ("/livez", "/readyz", "/metrics", "/health", "/models/bge/health"):
            await gateway.gateway.client.get(path)

    assert () == tuple(gateway.spans)


async def test_no_span_contains_inputs_or_keys(traced: Boots) -> None:
    async with traced({"tei-0": FakeTei(), "tei-1": tei_with_hook(respond_with(500))}) as gateway:
        await gateway.embed("a secret text", x_request_id="mine")
        await gateway.gateway.post(OPENAI, {"input": ["a secret text", ""]})
        exported = "".join(span.to_json() for span in gateway.spans)

    assert '"gateway.request_id": "mine"' in exported
    assert "secret" not in exported
    assert KEY not in exported


async def test_finished_call_event_has_the_trace_id(traced: Boots) -> None:
    async with traced({"tei-0": FakeTei()}) as gateway:
        await gateway.embed("a", traceparent=SAMPLED)

    (event,) = [
        event for event in gateway.gateway.events if isinstance(event, CallFinished) and event.route == OPENAI
    ]
    assert TRACE == event.trace_id
