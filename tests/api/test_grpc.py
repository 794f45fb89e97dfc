"""TEI's services over gRPC: replies, defaults, statuses, streams, bounds, health and reflection."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from backends.tei_protos import tei_pb2 as pb
from gateway.api.grpc import answers
from gateway.api.grpc.messages import check_fields, field, parse, varint, vector_field
from gateway.api.grpc.server import GrpcServer
from gateway.api.grpc.statuses import STATUSES
from gateway.api.server.paths import OTHER
from gateway.errors import FACTS, InvalidInput, MalformedBody
from gateway.events import CallFinished
from tests.conftest import CONFIG, KEY, Running, running_gateway
from tests.fakes.hooks import CLASSIFIER, SPLADE, Gate, embedder_and_reranker, until
from tests.fakes.tei import FakeTei, score_of, vector_of
from tests.waiting import PATIENCE_S

AUTHORIZED = (("authorization", f"Bearer {KEY}"),)
GRPC = CONFIG + "grpc: {listen: 127.0.0.1:0}\n"
Code = grpc.StatusCode


class Client:
    """Client without generated stubs. gateway: the one that it calls. address, server: its gRPC listener."""

    server: GrpcServer

    def __init__(self, gateway: Running, channel: grpc.aio.Channel, address: str = "") -> None:
        self.gateway = gateway
        self.channel = channel
        self.address = address

    def call(self, method: str, request: Any, reply: Any = None, **metadata: str) -> Any:
        """Start a unary RPC with a valid key. request: a message, or its bytes."""
        rpc = self.channel.unary_unary(method, response_deserializer=reply and reply.FromString)
        content = request if isinstance(request, bytes) else request.SerializeToString()
        return rpc(content, metadata=AUTHORIZED + tuple(metadata.items()), timeout=PATIENCE_S)

    def stream(self, method: str, requests: Any, reply: Any, **metadata: str) -> Any:
        """Start a bidirectional RPC with a valid key."""
        rpc = self.channel.stream_stream(
            method, lambda request: request.SerializeToString(), reply.FromString
        )
        return rpc(requests, metadata=AUTHORIZED + tuple(metadata.items()), timeout=PATIENCE_S)

    def finished(self) -> list[CallFinished]:
        """Return the events of RPCs."""
        events = self.gateway.events
        return [event for event in events if isinstance(event, CallFinished) and event.method == "GRPC"]


@asynccontextmanager
async def grpc_gateway(config: str = GRPC, **servers: Any) -> AsyncIterator[Client]:
    """Boot a gateway on fakes, with a gRPC listener on a port of its own."""
    fakes = embedder_and_reranker() | {"tei-1": FakeTei()}
    named = {name.replace("_", "-"): server for name, server in servers.items()}
    async with running_gateway(fakes | named, config) as gateway:
        assert gateway.application.create_grpc is not None
        server = gateway.application.create_grpc()
        await server.start("127.0.0.1:0")
        try:
            address = f"127.0.0.1:{server.port}"
            async with grpc.aio.insecure_channel(address) as channel:
                client = Client(gateway, channel, address)
                client.server = server
                yield client
        finally:
            await server.stop()


@asynccontextmanager
async def held_gateway(config: str = GRPC) -> AsyncIterator[tuple[Client, Gate]]:
    """Boot such a gateway whose embedding replicas hold every request at a gate once it has started."""
    gate, servers = Gate(), {f"tei_{number}": FakeTei() for number in range(2)}
    async with grpc_gateway(config, **servers) as client:
        for server in servers.values():
            server.hook = gate
        yield client, gate


async def status_of(call: Any) -> tuple[grpc.StatusCode, str]:
    """Return the status and the details of an RPC."""
    return await call.code(), await call.details()


async def test_a_text_is_embedded_with_teis_metadata() -> None:
    async with grpc_gateway() as client:
        call = client.call("/tei.v1.Embed/Embed", pb.EmbedRequest(inputs="a b"), pb.EmbedResponse)
        reply = await call
        metadata = dict(await call.initial_metadata())
        await until(lambda: bool(client.finished()))

    np.testing.assert_array_equal(vector_of("a b"), np.array(reply.embeddings, np.float32))
    assert (3, 4) == (reply.metadata.compute_chars, reply.metadata.compute_tokens)
    assert reply.metadata.total_time_ns > 0
    assert {"x-compute-tokens", "x-inference-time", "x-request-id", "server-timing"} <= metadata.keys()
    (event,) = client.finished()
    assert ("/tei.v1.Embed/Embed", 200, "ok") == (event.route, event.status, event.outcome)
    assert ("bge", 1, 4, "127.0.0.1") == (event.model, event.inputs, event.tokens, event.address)


@pytest.mark.parametrize(
    ("normalize", "sent"), [(None, True), (True, True), (False, False)], ids=["absent", "true", "false"]
)
async def test_absent_fields_have_teis_defaults(normalize: bool | None, sent: bool) -> None:
    servers = [FakeTei(), FakeTei()]
    async with grpc_gateway(tei_0=servers[0], tei_1=servers[1]) as client:
        await client.call("/tei.v1.Embed/Embed", pb.EmbedRequest(inputs="a", normalize=normalize))
        long = " ".join("a" * 40)
        refused = client.call("/tei.v1.Embed/Embed", pb.EmbedRequest(inputs=long))
        cut = client.call("/tei.v1.Embed/Embed", pb.EmbedRequest(inputs=long, truncate=True))
        assert Code.INVALID_ARGUMENT == await refused.code()
        assert Code.OK == await cut.code()

    sent_to = [
        (path, body.get("normalize", True))
        for server in servers
        for path, body in server.requests
        if ["a"] in (body.get("inputs"), body.get("input"))
    ]
    # A short text is the same at the route with packed vectors, which are normalized.
    assert [("/v1/embeddings" if sent else "/embed", sent)] == sent_to


async def test_all_operations_answer() -> None:
    config = GRPC.replace(
        "models:\n",
        "  classes: {backend: tei, replicas: ['http://classes']}\n"
        "  splade: {backend: tei, replicas: ['http://splade']}\nmodels:\n"
        "  labels: {upstream: classes}\n  sparse: {upstream: splade}\n",
    )
    servers = {"classes": FakeTei(model_type=CLASSIFIER), "splade": FakeTei(model_type=SPLADE)}
    async with grpc_gateway(config, **servers) as client:
        terms = await client.call(
            "/tei.v1.Embed/EmbedSparse",
            pb.EmbedSparseRequest(inputs="a b"),
            pb.EmbedSparseResponse,
            model="sparse",
        )
        tokens = await client.call(
            "/tei.v1.Embed/EmbedAll", pb.EmbedAllRequest(inputs="a b"), pb.EmbedAllResponse
        )
        labels = await client.call(
            "/tei.v1.Predict/Predict", pb.PredictRequest(inputs="a"), pb.PredictResponse, model="labels"
        )
        pair = await client.call(
            "/tei.v1.Predict/PredictPair",
            pb.PredictPairRequest(inputs=["a", "b"]),
            pb.PredictResponse,
            model="cross",
        )
        ranks = await client.call(
            "/tei.v1.Rerank/Rerank",
            pb.RerankRequest(query="q", texts=["a", "b"], return_text=True),
            pb.RerankResponse,
        )
        ids = await client.call(
            "/tei.v1.Tokenize/Tokenize",
            pb.EncodeRequest(inputs="a b", add_special_tokens=True),
            pb.EncodeResponse,
        )
        plain = client.call("/tei.v1.Tokenize/Tokenize", pb.EncodeRequest(inputs="a b"), pb.EncodeResponse)
        plain_metadata = dict(await plain.initial_metadata())
        text = await client.call(
            "/tei.v1.Tokenize/Decode",
            pb.DecodeRequest(ids=[token.id for token in (await plain).tokens]),
            pb.DecodeResponse,
        )
        info = await client.call("/tei.v1.Info/Info", pb.InfoRequest(), pb.InfoResponse, model="cross")

    assert [700, 800, 900][1:] == [value.index for value in terms.sparse_embeddings]
    assert {8} == {len(token.embeddings) for token in tokens.token_embeddings}
    assert 4 == len(tokens.token_embeddings)
    assert {"joy", "anger", "fear"} == {item.label for item in labels.predictions}
    assert sorted((item.score for item in labels.predictions), reverse=True) == [
        item.score for item in labels.predictions
    ]
    assert ["LABEL_0"] == [item.label for item in pair.predictions]
    scores = {text: score_of("q", text) for text in "ab"}
    assert sorted(scores, key=scores.__getitem__, reverse=True) == [rank.text for rank in ranks.ranks]
    assert pytest.approx(sorted(scores.values(), reverse=True)) == [rank.score for rank in ranks.ranks]
    assert (4, 2) == (len(ids.tokens), len((await plain).tokens))
    assert [True, False, False, True] == [token.special for token in ids.tokens]
    assert not any(name.startswith("x-compute") for name in plain_metadata)
    assert text.text
    assert (pb.MODEL_TYPE_RERANKER, 16) == (info.model_type, info.max_input_length)


@pytest.mark.parametrize(
    ("method", "request_", "code", "reason"),
    [
        ("Embed/Embed", pb.EmbedRequest(), Code.INVALID_ARGUMENT, "`inputs`"),
        ("Embed/Embed", pb.EmbedRequest(inputs="a", dimensions=0), Code.INVALID_ARGUMENT, "`dimensions`"),
        (
            "Embed/Embed",
            pb.EmbedRequest(inputs="a", truncation_direction=7),  # type: ignore[arg-type]
            Code.INVALID_ARGUMENT,
            "`truncation_direction` is 0 for right or 1 for left, not 7",
        ),
        ("Embed/Embed", b"\x0a\xff", Code.INVALID_ARGUMENT, "no valid protobuf EmbedRequest"),
        ("Embed/EmbedSparse", pb.EmbedSparseRequest(inputs="a"), Code.FAILED_PRECONDITION, ""),
        (
            "Predict/PredictPair",
            pb.PredictPairRequest(inputs=["a"] * 3),
            Code.INVALID_ARGUMENT,
            "`inputs` must have a single or two elements. Given: 3",
        ),
        ("Rerank/Rerank", pb.RerankRequest(query="q"), Code.INVALID_ARGUMENT, "`texts`"),
        ("Tokenize/Tokenize", pb.EncodeRequest(), Code.INVALID_ARGUMENT, "`inputs`"),
        ("Tokenize/Decode", pb.DecodeRequest(), Code.INVALID_ARGUMENT, "`ids`"),
        ("Embed/Nothing", pb.EmbedRequest(), Code.UNIMPLEMENTED, "no service here has this method"),
    ],
)
async def test_bad_messages_have_teis_statuses(method: str, request_: Any, code: Any, reason: str) -> None:
    async with grpc_gateway() as client:
        found, details = await status_of(client.call(f"/tei.v1.{method}", request_))
    assert code == found, details
    assert reason in details


async def test_an_unknown_model_and_a_bad_key_are_refused() -> None:
    async with grpc_gateway() as client:
        request = pb.EmbedRequest(inputs="a")
        unknown = await status_of(client.call("/tei.v1.Embed/Embed", request, model="nothing"))
        rpc = client.channel.unary_unary("/tei.v1.Embed/Embed")
        keyless = rpc(request.SerializeToString(), timeout=PATIENCE_S)
        wrong = rpc(
            request.SerializeToString(), metadata=(("authorization", "Bearer no"),), timeout=PATIENCE_S
        )
        stream = client.channel.stream_stream("/tei.v1.Embed/EmbedStream")(timeout=PATIENCE_S)
        assert Code.NOT_FOUND == unknown[0]
        assert [Code.UNAUTHENTICATED] * 3 == [await call.code() for call in (keyless, wrong, stream)]
        assert "x-request-id" in dict(await keyless.trailing_metadata())
        await until(lambda: len(client.finished()) == 4)

    assert {404, 401} == {event.status for event in client.finished()}


def test_each_error_kind_has_a_status() -> None:
    assert FACTS.keys() == STATUSES.keys()


TENANT = GRPC + "tenants: {acme: {keys: ['KEY'], limits: {LIMITS}}}\n"


def limited(limits: str) -> str:
    """Return a config whose only tenant has these limits."""
    from gateway.tenants.keyring import key_digest

    return TENANT.replace("KEY", f"sha256:{key_digest(KEY)}".replace("sha256:sha256:", "sha256:")).replace(
        "LIMITS", limits
    )


async def test_quotas_are_shared_with_http_and_name_the_wait() -> None:
    async with grpc_gateway(limited("requests_per_hour: 2")) as client:
        first = client.call("/tei.v1.Embed/Embed", pb.EmbedRequest(inputs="a"))
        assert Code.OK == await first.code()
        second = await client.gateway.post("/embed", {"inputs": "a"})
        third = client.call("/tei.v1.Embed/Embed", pb.EmbedRequest(inputs="a"))
        code, trailing = await third.code(), dict(await third.trailing_metadata())
        initial = dict(await first.initial_metadata())

    assert (200, Code.RESOURCE_EXHAUSTED) == (second.status_code, code)
    assert int(trailing["retry-after"]) >= 1
    assert "1" == initial["x-ratelimit-remaining-requests"]


async def test_bad_messages_are_charged() -> None:
    async with grpc_gateway(limited("requests_per_hour: 1")) as client:
        bad = await status_of(client.call("/tei.v1.Embed/Embed", b"\x0a\xff"))
        spent = await status_of(client.call("/tei.v1.Embed/Embed", pb.EmbedRequest(inputs="a")))
    assert (Code.INVALID_ARGUMENT, Code.RESOURCE_EXHAUSTED) == (bad[0], spent[0])


def texts(count: int) -> list[pb.EmbedRequest]:
    """Return messages with a text each."""
    return [pb.EmbedRequest(inputs=f"text {number}") for number in range(count)]


async def test_a_stream_answers_in_order_and_shares_batches() -> None:
    servers = [FakeTei(), FakeTei()]
    async with grpc_gateway(tei_0=servers[0], tei_1=servers[1]) as client:
        gate = servers[0].hook = servers[1].hook = Gate()
        call = client.stream("/tei.v1.Embed/EmbedStream", iter(texts(1000)), pb.EmbedResponse)
        lane = client.gateway.application.gateway.upstreams["embedder"].lanes["texts"]
        await until(lambda: lane.backlog().inputs > 900)
        gate.opened.set()
        replies = [reply async for reply in call]
        code = await call.code()
        await until(lambda: bool(client.finished()))

    assert Code.OK == code
    expected = np.array([vector_of(request.inputs) for request in texts(1000)])
    np.testing.assert_array_equal(expected, np.array([reply.embeddings for reply in replies], np.float32))
    (event,) = client.finished()
    assert (1000, "bge") == (event.inputs, event.model)
    requests = [body for server in servers for path, body in server.requests if path == "/embed"]
    assert len(requests) < 500
    assert 0 == client.gateway.application.in_flight.bytes


async def test_the_first_message_that_fails_ends_its_stream() -> None:
    requests = [*texts(2), pb.EmbedRequest(), *texts(3)]
    async with grpc_gateway() as client:
        call = client.stream("/tei.v1.Embed/EmbedStream", iter(requests), pb.EmbedResponse)
        replies = []
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            replies += [reply async for reply in call]
        await until(lambda: client.gateway.application.in_flight.calls == 0)
        assert 0 == client.gateway.application.in_flight.bytes

    assert Code.INVALID_ARGUMENT == raised.value.code()
    assert (raised.value.details() or "").startswith("message 2: `inputs`")
    assert len(replies) <= 2


async def test_an_empty_stream_ends_well() -> None:
    async with grpc_gateway() as client:
        call = client.stream("/tei.v1.Embed/EmbedStream", iter(()), pb.EmbedResponse)
        assert [] == [reply async for reply in call]
        assert Code.OK == await call.code()


async def test_requests_in_flight_slows_a_stream_down() -> None:
    async with grpc_gateway(limited("requests_in_flight: 2")) as client:
        call = client.stream("/tei.v1.Embed/EmbedStream", iter(texts(20)), pb.EmbedResponse)
        assert 20 == len([reply async for reply in call])


async def rerank_stream(client: Client, requests: list[pb.RerankStreamRequest]) -> Any:
    """Send a RerankStream; return its call."""
    rpc = client.channel.stream_unary(
        "/tei.v1.Rerank/RerankStream",
        pb.RerankStreamRequest.SerializeToString,
        pb.RerankResponse.FromString,
    )
    return rpc(iter(requests), metadata=AUTHORIZED, timeout=PATIENCE_S)


async def test_a_rerank_stream_answers_once() -> None:
    requests = [pb.RerankStreamRequest(query="q", text=text) for text in "abcd"]
    requests[0].return_text = True
    mixed = [*requests, pb.RerankStreamRequest(query="other", text="e")]
    async with grpc_gateway() as client:
        reply = await (await rerank_stream(client, requests))
        none = await status_of(await rerank_stream(client, []))
        refused = await status_of(await rerank_stream(client, mixed))

    expected = sorted("abcd", key=lambda text: score_of("q", text), reverse=True)
    assert expected == [rank.text for rank in reply.ranks]
    assert Code.INVALID_ARGUMENT == none[0]
    assert Code.INVALID_ARGUMENT == refused[0]
    assert "`query` differs" in refused[1]


async def test_a_deadline_and_a_cancellation_end_the_call() -> None:
    async with held_gateway() as (client, gate):
        rpc = client.channel.unary_unary("/tei.v1.Embed/Embed")
        content = pb.EmbedRequest(inputs="a").SerializeToString()
        late = rpc(content, metadata=AUTHORIZED, timeout=0.2)
        assert Code.DEADLINE_EXCEEDED == await late.code()
        own = rpc(content, metadata=(*AUTHORIZED, ("x-timeout-s", "0.2")), timeout=PATIENCE_S)
        assert Code.DEADLINE_EXCEEDED == await own.code()
        cancelled = rpc(content, metadata=AUTHORIZED, timeout=PATIENCE_S)
        await until(lambda: gate.waiting > 0)
        cancelled.cancel()
        in_flight = client.gateway.application.in_flight
        await until(lambda: in_flight.calls == 0)
        gate.opened.set()

    assert "cancelled" in {event.outcome for event in client.finished()}


async def test_a_message_over_the_bound_is_refused() -> None:
    async with grpc_gateway(GRPC + "limits: {body_bytes: 10000}\n") as client:
        large = await status_of(client.call("/tei.v1.Embed/Embed", pb.EmbedRequest(inputs="a" * 20_000)))
        small = await status_of(client.call("/tei.v1.Embed/Embed", pb.EmbedRequest(inputs="a")))
    assert (Code.RESOURCE_EXHAUSTED, Code.OK) == (large[0], small[0])


async def test_draining_refuses_and_abandoning_ends_calls() -> None:
    async with held_gateway() as (client, gate):
        in_flight = client.gateway.application.in_flight
        begun = client.call("/tei.v1.Embed/Embed", pb.EmbedRequest(inputs="a"))
        await until(lambda: gate.waiting > 0)
        assert not await in_flight.drain(0.0)
        refused = client.call("/tei.v1.Embed/Embed", pb.EmbedRequest(inputs="a"))
        assert Code.UNAVAILABLE == await refused.code()
        assert "retry-after" in dict(await refused.trailing_metadata())
        in_flight.abandon()
        assert Code.UNAVAILABLE == await begun.code()
        gate.opened.set()


async def test_connections_over_the_bound_are_closed() -> None:
    async with grpc_gateway(GRPC + "limits: {connections: 5}\n") as client:
        host, port = client.address.split(":")
        connections = [await asyncio.open_connection(host, int(port)) for _ in range(12)]
        ends = [asyncio.create_task(reader.read()) for reader, _ in connections]
        await until(lambda: sum(end.done() for end in ends) >= 6)
        for _, writer in connections:
            writer.close()
        await asyncio.gather(*ends)
        # The server closes its ends a moment later.
        code = None
        for _ in range(200):
            code = await client.call("/tei.v1.Embed/Embed", pb.EmbedRequest(inputs="a")).code()
            if code is Code.OK:
                break
            await asyncio.sleep(0.1)
        assert Code.OK == code


async def test_health_is_answered_while_calls_without_a_key_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "OPEN_WAIT_S", 2.0)
    of_one, count = answers.OPEN_RPCS_OF_ONE_MAX, answers.OPEN_RPCS_MAX

    async def nothing() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    async with grpc_gateway() as client, AsyncExitStack() as stack:
        # Channels with different options have connections of their own.
        channels = [
            await stack.enter_async_context(
                grpc.aio.insecure_channel(
                    client.address, options=(("grpc.primary_user_agent", f"c{number}"),)
                )
            )
            for number in range(count // of_one + 1)
        ]
        waiting = [
            channel.stream_unary("/grpc.health.v1.Health/Check")(nothing())
            for channel in channels
            for _ in range(of_one + 2)
        ]
        calls = asyncio.gather(*[call.code() for call in waiting])
        await until(lambda: sum(connection.open_calls for connection in client.server.connections) == count)
        check = client.channel.unary_unary("/grpc.health.v1.Health/Check")
        answered = [await check(b"", timeout=PATIENCE_S) for _ in range(3)]
        codes = Counter(await calls)

    # Which of them are held is not defined; the others are answered without being read.
    assert {Code.DEADLINE_EXCEEDED: count, Code.OK: len(waiting) - count} == codes
    expected = health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)
    assert [expected.SerializeToString()] * 3 == answered


async def test_unknown_methods_are_reported_under_one_route() -> None:
    async with grpc_gateway() as client:
        for method in ("/tei.v1.Embed/Nothing", "/a/b"):
            assert (
                Code.UNIMPLEMENTED == await client.channel.unary_unary(method)(b"", timeout=PATIENCE_S).code()
            )
        await until(lambda: len(client.finished()) == 2)
    assert {(OTHER, "method_not_allowed", None)} == {
        (event.route, event.outcome, event.tenant) for event in client.finished()
    }


async def test_health_and_reflection_need_no_key() -> None:
    async with grpc_gateway() as client:
        check = client.channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            health_pb2.HealthCheckRequest.SerializeToString,
            health_pb2.HealthCheckResponse.FromString,
        )
        statuses = [
            (await check(health_pb2.HealthCheckRequest(service=name), timeout=PATIENCE_S)).status
            for name in ("", "tei.v1.Embed", "tei.v1.Info")
        ]
        unknown = await status_of(check(health_pb2.HealthCheckRequest(service="nothing"), timeout=PATIENCE_S))
        files = [await files_of(client.channel, version) for version in ("v1alpha", "v1")]

    assert [health_pb2.HealthCheckResponse.SERVING] * 3 == statuses
    assert (Code.NOT_FOUND, "service not registered") == unknown
    for names, file in files:
        assert {"tei.v1.Embed", "tei.v1.Rerank", "grpc.health.v1.Health"} <= set(names)
        assert "EmbedRequest" in [message.name for message in file.message_type]


async def files_of(channel: grpc.aio.Channel, version: str) -> tuple[list[str], FileDescriptorProto]:
    """Return the services that reflection lists, and the file of one of them."""
    call = channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        reflection_pb2.ServerReflectionRequest.SerializeToString,
        reflection_pb2.ServerReflectionResponse.FromString,
    )
    requests = (
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="tei.v1.Embed"),
    )
    replies = [reply async for reply in call(iter(requests), timeout=PATIENCE_S)]
    file = FileDescriptorProto.FromString(replies[1].file_descriptor_response.file_descriptor_proto[0])
    return [service.name for service in replies[0].list_services_response.service], file


async def test_a_model_without_a_replica_is_unhealthy_and_unavailable() -> None:
    config = GRPC.replace("http://tei-0", "http://gone-0").replace("http://tei-1", "http://gone-1")
    async with running_gateway({}, config, wait=False) as gateway:
        assert gateway.application.create_grpc is not None
        server = gateway.application.create_grpc()
        await server.start("127.0.0.1:0")
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            client = Client(gateway, channel)
            check = client.call("/grpc.health.v1.Health/Check", b"", health_pb2.HealthCheckResponse)
            assert health_pb2.HealthCheckResponse.NOT_SERVING == (await check).status
            code, _ = await status_of(client.call("/tei.v1.Info/Info", pb.InfoRequest()))
            assert Code.UNAVAILABLE == code
        await server.stop()


@pytest.mark.parametrize("size", [0, 1, 31, 32, 384, 4096, 5000])
def test_vectors_are_written_as_protobuf_writes_them(size: int) -> None:
    vector = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    own = vector_field(1, vector) + field(2, b"")
    expected = pb.EmbedResponse(embeddings=vector.tolist(), metadata=pb.Metadata()).SerializeToString()
    assert expected == own
    assert expected == vector_field(1, np.stack([vector, vector], axis=1)[:, 0]) + field(2, b"")


def test_large_messages_are_counted_before_they_are_decoded() -> None:
    many = pb.RerankRequest(query="q", texts=[""] * 50_000).SerializeToString()
    with pytest.raises(InvalidInput, match="more than 2048 fields"):
        parse(pb.RerankRequest, many, 2048)
    assert 50_000 == len(parse(pb.RerankRequest, many, 50_001).texts)
    for malformed in (b"\x0a" + varint(2**40), b"\x0b", b"\x08" + b"\xff" * 11, b"\x0d\x00", b"\x80"):
        with pytest.raises(MalformedBody):
            check_fields(malformed, 10)


async def test_random_messages_get_a_clear_status() -> None:
    generator = np.random.default_rng(7)
    paths = ["Embed/Embed", "Embed/EmbedAll", "Predict/PredictPair", "Rerank/Rerank", "Tokenize/Decode"]
    async with grpc_gateway() as client:
        calls = [
            client.call(f"/tei.v1.{paths[number % 5]}", generator.bytes(int(generator.integers(1, 40))))
            for number in range(200)
        ]
        codes = {await call.code() for call in calls}
    assert codes <= {Code.OK, Code.INVALID_ARGUMENT, Code.FAILED_PRECONDITION}
