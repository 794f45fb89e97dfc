"""TEI Manager's multiplexer: recorded RPCs, targets, streams, Arrow batches."""

import json
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pytest
from grpc_health.v1 import health_pb2

from backends.tei_protos import tei_multiplexer_pb2 as mux
from backends.tei_protos import tei_pb2 as pb
from gateway.api.grpc.messages import Envelope, field, open_envelope
from gateway.api.grpc.server import guarded_answers
from gateway.api.grpc.tei import MULTIPLEXER
from gateway.api.wire.arrow import BATCHES_MAX
from gateway.declared.host import InstanceInfo
from gateway.errors import InvalidInput, MalformedBody
from tests.api.test_arrow import DELTAS, LONG, TEXT_TYPES, rows_of, stream, written
from tests.api.test_grpc import AUTHORIZED, GRPC, Client, grpc_gateway, limited, status_of
from tests.fakes.hooks import RERANKER, SPLADE, until
from tests.fakes.tei import FakeTei, vector_of
from tests.waiting import PATIENCE_S

Code = grpc.StatusCode
RECORDED: list[dict[str, Any]] = [
    json.loads(line)
    for line in Path("tests/golden/tei-manager/grpc.jsonl").read_text(encoding="utf-8").splitlines()
]
BGE = mux.Target(instance_name="bge")
CROSS = mux.Target(instance_name="cross")
TOO_LONG = "a " * 40
TEXTS = ["a b", "c", LONG]


def embed(text: str = "hello", target: mux.Target | None = BGE) -> mux.EmbedRequest:
    """Return a message of Embed."""
    return mux.EmbedRequest(target=target, request=pb.EmbedRequest(inputs=text))


def arrow(content: bytes, target: mux.Target = BGE, **fields: bool) -> mux.EmbedArrowRequest:
    """Return a message of EmbedArrow."""
    return mux.EmbedArrowRequest(target=target, arrow_ipc=content, **fields)


# Messages of the recorded RPCs, which the records do not have.
SENT: dict[str, list[Any]] = {
    "by name": [embed()],
    "by model": [embed(target=mux.Target(model_id="fake/model"))],
    "by index": [embed(target=mux.Target(instance_index=0))],
    "no target": [embed(target=None)],
    "empty name": [embed(target=mux.Target(instance_name=""))],
    "unknown": [embed(target=mux.Target(instance_name="zz"))],
    "no request": [mux.EmbedRequest(target=BGE)],
    "empty input": [embed("")],
    "embed on reranker": [embed(target=CROSS)],
    "info": [mux.InfoRequest(target=BGE)],
    "rerank": [mux.RerankRequest(target=CROSS, request=pb.RerankRequest(query="q", texts=["a", "b"]))],
    "tokenize": [mux.EncodeRequest(target=BGE, request=pb.EncodeRequest(inputs="a b"))],
    "3 texts": [arrow(stream(TEXTS))],
    "normalize": [arrow(stream(TEXTS), normalize=True)],
    "with a null": [arrow(stream(["a", None, "b"]))],
    "two batches": [arrow(stream(["a", "b"], ["c", "d"]))],
    "large_utf8": [arrow(stream(["a"], kind=pa.large_string()))],
    "dictionary": [arrow(stream(["a"], kind=TEXT_TYPES[3]))],
    "ints": [arrow(written([pa.record_batch({"n": pa.array([1])})]))],
    "empty": [arrow(stream([]))],
    "garbage": [arrow(b"garbage")],
    "nothing": [arrow(b"")],
    "lz4 in": [arrow(stream(["a"] * 50, codec="lz4"))],
    "zstd in": [arrow(stream(["a"] * 50, codec="zstd"))],
    "an empty string": [arrow(stream(["a", ""]))],
    "too long, no truncate": [arrow(stream(["a", TOO_LONG]))],
    "too long, truncate": [arrow(stream(["a", TOO_LONG]), truncate=True)],
    "noop": [arrow(stream(["a", "b"]), noop=True)],
    "reranker": [arrow(stream(["a"]), CROSS)],
    "sparse of a dense model": [mux.EmbedSparseArrowRequest(target=BGE, arrow_ipc=stream(["a"]))],
    "5": [embed(f"text {number}") for number in range(5)],
    "third of five is empty": [embed("" if number == 2 else "a") for number in range(5)],
    "targets change within the stream": [embed(target=CROSS), embed(target=BGE)],
}
# Differences that are kept, in the order of the table in docs/grpc.md: the gateway's status, and its rows.
KEPT: dict[str, tuple[str, int]] = {
    "by model": ("OK", 1),
    "by index": ("OK", 1),
    "with a null": ("OK", 3),
    "two batches": ("OK", 4),
    "large_utf8": ("OK", 1),
    "dictionary": ("OK", 1),
    "zstd in": ("OK", 50),
    "an empty string": ("INVALID_ARGUMENT", 0),
    "too long, no truncate": ("INVALID_ARGUMENT", 0),
    "reranker": ("FAILED_PRECONDITION", 0),
    "sparse of a dense model": ("FAILED_PRECONDITION", 0),
}


async def replies_of(client: Client, method: str, messages: list[Any]) -> tuple[Any, list[bytes]]:
    """Send messages; return the call and its replies."""
    call = client.channel.stream_stream(f"/{MULTIPLEXER}/{method}")(
        iter([message.SerializeToString() for message in messages]), metadata=AUTHORIZED, timeout=PATIENCE_S
    )
    replies: list[bytes] = []
    with suppress(grpc.aio.AioRpcError):
        replies += [reply async for reply in call]
    return call, replies


def table_of(reply: bytes, kind: Any = mux.EmbedArrowResponse) -> pa.ipc.RecordBatchStreamReader:
    """Return the reader of an Arrow reply."""
    return pa.ipc.open_stream(kind.FromString(reply).arrow_ipc)


def test_all_methods_are_answered() -> None:
    service = mux.DESCRIPTOR.services_by_name["TeiMultiplexer"]
    assert {f"/{MULTIPLEXER}/{method.name}" for method in service.methods} <= guarded_answers().keys()
    assert {recorded["case"] for recorded in RECORDED} == SENT.keys()
    assert KEPT.keys() < SENT.keys()


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda recorded: recorded["case"])
async def test_an_rpc_is_answered_as_tei_manager_does(recorded: dict[str, Any]) -> None:
    case = recorded["case"]
    async with grpc_gateway(rerank_0=FakeTei(model_type=RERANKER, model_id="fake/cross")) as client:
        call, replies = await replies_of(client, recorded["call"], SENT[case])
        status, details = (await call.code()).name, await call.details()
        metadata = dict(await call.initial_metadata())

    expected = recorded["status"]
    rows = recorded["reply"].get("rows") if "reply" in recorded else None
    if case in KEPT:
        expected, rows = KEPT[case]
    assert expected == status, details
    if status != "OK":
        kept_words = {"no target", "empty name", "unknown", "no request"}
        assert details == recorded["details"] if case in kept_words else details
    elif recorded["call"] == "EmbedArrow":
        reader = table_of(replies[0])
        line = str(reader.schema).split("\n")[0]
        nullable = "" if case == "with a null" else " not null"
        assert f"embeddings: fixed_size_list<item: float not null>[8]{nullable}" == line
        assert rows == sum(batch.num_rows for batch in reader)
    else:
        assert recorded.get("received", 1) == len(replies)
        names = {name for name in recorded.get("metadata", ()) if name.startswith("x-")}
        assert names <= metadata.keys()


async def test_a_stream_has_one_target() -> None:
    async with grpc_gateway() as client:
        call, replies = await replies_of(
            client, "EmbedStream", [embed("a"), embed("b", mux.Target(instance_index=0))]
        )
        assert Code.INVALID_ARGUMENT == await call.code()
        assert "message 1: `target` differs" in await call.details()
        without = mux.EmbedRequest(request=pb.EmbedRequest(inputs="b"))
        same, found = await replies_of(client, "EmbedStream", [embed("a"), without])
        assert Code.OK == await same.code()
    assert len(replies) <= 1
    vectors = [pb.EmbedResponse.FromString(reply).embeddings for reply in found]
    np.testing.assert_array_equal(np.array([vector_of("a"), vector_of("b")]), np.array(vectors, np.float32))


@pytest.mark.parametrize(
    ("target", "code", "reason"),
    [
        (mux.Target(model_id="cross"), Code.FAILED_PRECONDITION, "'cross' does not embed"),
        (mux.Target(model_id="nothing"), Code.NOT_FOUND, "Model 'nothing' not found"),
        (mux.Target(model_id="fake/model"), Code.INVALID_ARGUMENT, "several models are 'fake/model'"),
        (mux.Target(instance_index=99), Code.NOT_FOUND, "Instance 99 not found"),
        (mux.Target(), Code.INVALID_ARGUMENT, "Missing target"),
        (mux.Target(instance_name="z" * 5000), Code.NOT_FOUND, "not found"),
    ],
)
async def test_targets_that_name_no_model(target: mux.Target, code: Any, reason: str) -> None:
    async with grpc_gateway() as client:
        call, _ = await replies_of(client, "Embed", [embed(target=target)])
        assert code == await call.code()
        assert reason in await call.details()
        assert len(await call.details()) < 300


async def test_targets_name_instances() -> None:
    async with grpc_gateway() as client:
        instances = [
            instance_info("first", "embedder", "running", joined=True),
            instance_info("second", "embedder", "failed", joined=False),
        ]
        client.gateway.application.instances.update(tuple(instances))
        for target, code, reason in (
            (mux.Target(instance_name="first"), Code.OK, ""),
            (mux.Target(instance_index=0), Code.OK, ""),
            (
                mux.Target(instance_name="second"),
                Code.UNAVAILABLE,
                "Instance 'second' is failed, not running",
            ),
            (mux.Target(instance_index=1), Code.UNAVAILABLE, "Instance 1 is failed, not running"),
            (mux.Target(instance_index=2), Code.NOT_FOUND, "Instance 2 not found; there are 2"),
            (BGE, Code.OK, ""),
        ):
            call, _ = await replies_of(client, "Embed", [embed(target=target)])
            assert (code, reason) == (await call.code(), await call.details())


async def test_an_instance_leads_to_a_model_that_the_key_may_use() -> None:
    config = limited("requests_per_hour: 100").replace("limits:", "models: [strict], limits:")
    async with grpc_gateway(config) as client:
        client.gateway.application.instances.update((instance_info("i", "embedder", "running", joined=True),))
        call, _ = await replies_of(client, "Embed", [embed(target=mux.Target(instance_name="i"))])
        assert Code.OK == await call.code(), await call.details()
        await until(lambda: bool(client.finished()))
        assert "strict" == client.finished()[-1].model


def instance_info(name: str, upstream: str, status: Any, *, joined: bool) -> InstanceInfo:
    """Return an instance of an upstream."""
    created_at, kind, reason = "2026-01-01T00:00:00Z", "engine", None
    process = (8080, status, 4711, created_at, 1, 0, 0, None, None, None)
    return InstanceInfo(name, "org/x", *process, kind, upstream, "cpu", reason, joined)


async def test_a_key_reaches_its_own_models_only() -> None:
    config = limited("requests_per_hour: 100").replace("limits:", "models: [cross], limits:")
    async with grpc_gateway(config) as client:
        for target, code in (
            (BGE, Code.PERMISSION_DENIED),
            (mux.Target(instance_index=1), Code.NOT_FOUND),
            (mux.Target(model_id="bge"), Code.NOT_FOUND),
        ):
            for method, message in (
                ("Embed", embed(target=target)),
                ("EmbedArrow", arrow(stream(["a"]), target, noop=True)),
            ):
                call, _ = await replies_of(client, method, [message])
                assert code == await call.code(), await call.details()


async def test_no_method_is_open() -> None:
    async with grpc_gateway() as client:
        for path in guarded_answers():
            assert (
                Code.UNAUTHENTICATED == await client.channel.stream_stream(path)(timeout=PATIENCE_S).code()
            ), path
        check = client.channel.unary_unary("/grpc.health.v1.Health/Check")
        reply = await check(
            health_pb2.HealthCheckRequest(service=MULTIPLEXER).SerializeToString(), timeout=PATIENCE_S
        )
    assert health_pb2.HealthCheckResponse.SERVING == health_pb2.HealthCheckResponse.FromString(reply).status


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (DELTAS, "the Arrow stream has a delta of a dictionary; send each dictionary as a whole"),
        (stream(["a"], *[[]] * BATCHES_MAX), "more than 4096 batches; send fewer at once"),
    ],
    ids=["deltas", "batches without rows"],
)
async def test_streams_of_more_work_than_bytes_are_refused(content: bytes, reason: str) -> None:
    async with grpc_gateway() as client:
        call, replies = await replies_of(client, "EmbedArrow", [arrow(content)])
        assert (Code.INVALID_ARGUMENT, []) == (await call.code(), replies)
        assert reason in await call.details()


async def test_arrow_batches_keep_nulls_and_rows() -> None:
    async with grpc_gateway() as client:
        content = stream(["a b", None], [], ["c"], kind=pa.string_view(), codec="zstd")
        message = arrow(content, normalize=True)
        call, (reply,) = await replies_of(client, "EmbedArrow", [message])
        assert Code.OK == await call.code()
        await until(lambda: bool(client.finished()))
    batches = list(table_of(reply))
    assert [2, 0, 1] == [batch.num_rows for batch in batches]
    found = [row for batch in batches for row in rows_of(batch.column(0))]
    assert found.pop(1) is None
    np.testing.assert_array_equal(np.array([vector_of("a b"), vector_of("c")]), np.array(found))
    (event,) = client.finished()
    assert (2, "bge", f"/{MULTIPLEXER}/EmbedArrow") == (event.inputs, event.model, event.route)


async def test_a_table_without_batches_has_none_in_the_reply() -> None:
    sink = pa.BufferOutputStream()
    pa.ipc.new_stream(sink, pa.schema([("text", pa.string())])).close()
    async with grpc_gateway() as client:
        call, (reply,) = await replies_of(client, "EmbedArrow", [arrow(bytes(sink.getvalue()))])
        assert Code.OK == await call.code(), await call.details()

    assert [] == list(table_of(reply))


async def test_a_table_longer_than_a_call_is_several_calls() -> None:
    texts = [f"text {number}" for number in range(25)]
    message = arrow(stream(texts[:20], [None], texts[20:]), normalize=True)
    async with grpc_gateway(limited("requests_per_hour: 4") + "limits: {inputs: 10}\n") as client:
        call, (reply,) = await replies_of(client, "EmbedArrow", [message])
        assert Code.OK == await call.code()
        assert "1" == dict(await call.initial_metadata())["x-ratelimit-remaining-requests"]
    rows = [row for batch in table_of(reply) for row in rows_of(batch.column(0))]
    assert rows.pop(20) is None
    np.testing.assert_array_equal(np.array([vector_of(text) for text in texts]), np.array(rows))


async def test_arrow_reads_the_first_column_whatever_the_names_are() -> None:
    columns = {"title": pa.array(["a b", "c"]), "text": pa.array(["not this", "nor this"])}
    ids_first = {"id": pa.array([1, 2]), "text": pa.array(["a", "b"])}
    async with grpc_gateway() as client:
        content = written([pa.record_batch(columns)])
        _, (reply,) = await replies_of(client, "EmbedArrow", [arrow(content, normalize=True)])
        refused, _ = await replies_of(client, "EmbedArrow", [arrow(written([pa.record_batch(ids_first)]))])
        assert Code.INVALID_ARGUMENT == await refused.code()
        assert "the Arrow column `id` is int64; send strings" in await refused.details()
    (batch,) = table_of(reply)
    expected = np.array([vector_of("a b"), vector_of("c")])
    np.testing.assert_array_equal(expected, np.array(rows_of(batch.column(0))))


async def test_term_weights_as_arrow() -> None:
    config = GRPC.replace(
        "models:\n",
        "  splade: {backend: tei, replicas: ['http://splade']}\nmodels:\n  s: {upstream: splade}\n",
    )
    target = mux.Target(instance_name="s")
    async with grpc_gateway(config, splade=FakeTei(model_type=SPLADE)) as client:
        for noop in (False, True):
            message = mux.EmbedSparseArrowRequest(target=target, arrow_ipc=stream(["a b", None]), noop=noop)
            call, (reply,) = await replies_of(client, "EmbedSparseArrow", [message])
            assert Code.OK == await call.code()
            (batch,) = table_of(reply, mux.EmbedSparseArrowResponse)
            kind = batch.schema.field("sparse_embeddings").type
            assert not kind.value_field.nullable
            assert [False, False] == [kind.value_type.field(at).nullable for at in range(2)]
            first, null = batch.column("sparse_embeddings").to_pylist()
            assert null is None
            assert [] == first if noop else [800, 900] == [item["index"] for item in first]


async def test_noop_is_one_request() -> None:
    async with grpc_gateway(limited("requests_per_hour: 1")) as client:
        served, (reply,) = await replies_of(client, "EmbedArrow", [arrow(stream(TEXTS), noop=True)])
        spent, _ = await replies_of(client, "EmbedArrow", [arrow(stream(TEXTS), noop=True)])
        assert (Code.OK, Code.RESOURCE_EXHAUSTED) == (await served.code(), await spent.code())
    assert [[0.0] * 8] * 3 == table_of(reply).read_all()["embeddings"].to_pylist()


def test_envelopes_are_opened_as_protobuf_does() -> None:
    whole = mux.EmbedRequest(target=BGE, request=pb.EmbedRequest(inputs="a", truncate=True))
    assert Envelope(BGE.SerializeToString(), whole.request.SerializeToString()) == open_envelope(
        whole.SerializeToString(), 10
    )
    first = mux.EmbedRequest(request=pb.EmbedRequest(inputs="a")).SerializeToString()
    second = mux.EmbedRequest(request=pb.EmbedRequest(truncate=True)).SerializeToString()
    merged = open_envelope(first + b"\x18\x05" + second, 10)
    assert whole.request == pb.EmbedRequest.FromString(merged.request or b"")
    assert Envelope(None, b"") == open_envelope(field(2, b""), 10)
    for damaged in (b"\x0a\xff", b"\x0b", b"\x12\x05ab"):
        with pytest.raises(MalformedBody):
            open_envelope(damaged, 10)
    with pytest.raises(InvalidInput, match="more than 10 fields"):
        open_envelope(field(1, b"") * 11, 10)


async def test_the_table_of_differences_from_tei_manager_is_true() -> None:
    path, target = "/tei_multiplexer.v1.TeiMultiplexer/EmbedStream", mux.Target(instance_name="bge")

    async def nothing() -> AsyncIterator[mux.EmbedRequest]:
        for _ in ():
            yield mux.EmbedRequest()

    async def without_request() -> AsyncIterator[mux.EmbedRequest]:
        yield mux.EmbedRequest(target=target)

    async with grpc_gateway() as client:
        empty = client.stream(path, nothing(), pb.EmbedResponse)
        odd = client.stream(path, without_request(), pb.EmbedResponse)
        unnamed = client.call("/tei.v1.Embed/Embed", pb.EmbedRequest(inputs="a", prompt_name=""))
        statuses = [await status_of(call) for call in (empty, odd, unnamed)]

    assert [Code.OK, Code.INVALID_ARGUMENT, Code.INVALID_ARGUMENT] == [code for code, _ in statuses]
    assert ("message 0: Missing embed request", "`prompt_name` is empty") == (statuses[1][1], statuses[2][1])
