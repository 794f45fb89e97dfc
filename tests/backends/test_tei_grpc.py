"""The TEI adapter over gRPC: the same contract as over HTTP, against a strict server in this process."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from backends.contract import (
    Backend,
    Capabilities,
    Classify,
    Detokenize,
    Embed,
    EmbedReply,
    Encode,
    Output,
    ReplicaSpec,
    Reply,
    Rerank,
    Score,
    TlsFiles,
    Tokenize,
    TokenizerSource,
    Truncate,
    Work,
)
from backends.contract.errors import (
    AttemptTimedOut,
    BackendError,
    ConnectionLost,
    CredentialRefused,
    InvalidWork,
    PermitsTaken,
    ReplicaFailed,
    ReplicaOverloaded,
    ReplicaUnavailable,
    RequestTooLarge,
)
from backends.http.client import UpstreamClient
from backends.kinds import open_replica
from backends.tei import grpc_channel
from backends.tei.adapter import TeiBackend
from backends.tei.grpc_channel import RpcStatus
from backends.tei.grpc_wire import decode, encode, failure, model_type_of, tei_info
from backends.tei_protos import tei_pb2 as pb
from backends.tracing import Carrier, carrier
from tests.backends.test_connect_failures import closed_port
from tests.fakes.checkpoint import write_small_files
from tests.fakes.hooks import CLASSIFIER, LABELS, RERANKER, SPLADE, Gate, respond_with, until
from tests.fakes.tei import FakeTei, vector_of
from tests.fakes.tei_grpc import FakeTeiGrpc, grpc_tei
from tests.processes.tls_files import Authority
from tests.waiting import PATIENCE_S

DENSE = {"embedding": {"pooling": "cls"}}
LONG = "w " * 20
PAIRS = (("q", "red"), ("r", "green and blue"), ("q", ""))
TEXTS = ("red", "green and blue", "cyan")
SPARSE, TOKENS = frozenset({Output.SPARSE}), frozenset({Output.TOKENS})
INFO = tei_info(
    pb.InfoResponse(model_id="m", max_input_length=16, max_client_batch_size=4, max_concurrent_requests=512),
    DENSE,
)
GOLDEN = [
    json.loads(line)
    for line in (Path(__file__).parent.parent / "golden/tei/grpc.jsonl").read_text().splitlines()
]


@asynccontextmanager
async def joined(handlers: FakeTeiGrpc, **spec: Any) -> AsyncIterator[Backend]:
    """Yield the joined adapter of a server; its later requests alone are recorded."""
    async with grpc_tei(handlers) as address:
        backend = open_replica("tei", ReplicaSpec(address, **spec))
        try:
            await backend.describe(10.0)
            handlers.model.requests.clear()
            handlers.methods.clear()
            yield backend
        finally:
            await backend.aclose()


async def described(address: str, **spec: Any) -> Capabilities:
    """Return what the adapter of an address describes."""
    backend = open_replica("tei", ReplicaSpec(address, **spec))
    try:
        return await backend.describe(10.0)
    finally:
        await backend.aclose()


async def held(
    handlers: FakeTeiGrpc, backend: Backend, texts: tuple[str, ...], timeout_s: float = 60.0
) -> "tuple[Gate, asyncio.Task[Reply]]":
    """Start a call, and return it with the gate at which its server holds it."""
    gate = Gate()
    handlers.model.hook = gate  # type: ignore[assignment]
    running = asyncio.create_task(backend.run(Embed(texts), timeout_s))
    await until(lambda: gate.waiting == 1)
    return gate, running


def server_of(model_type: dict[str, Any] | None = None, **info: Any) -> FakeTeiGrpc:
    """Return a server of a type of model."""
    return FakeTeiGrpc(FakeTei(model_type=model_type or DENSE, **info))


async def over_http(model: FakeTei) -> TeiBackend:
    """Return the joined adapter of the same model over HTTP."""
    backend = TeiBackend(UpstreamClient("http://tei", transport=httpx.ASGITransport(model)))
    await backend.describe(10.0)
    return backend


WORKS: list[tuple[dict[str, Any], Work]] = [
    (DENSE, Embed(("a",))),
    (DENSE, Embed(TEXTS, dimensions=4)),
    (DENSE, Embed(TEXTS, normalize=False)),
    (DENSE, Embed(TEXTS, prompt_name="query")),
    (DENSE, Embed(("a", LONG), truncate=Truncate.LEFT)),
    (DENSE, Encode(TEXTS, TOKENS)),
    (DENSE, Encode(TEXTS, frozenset({Output.DENSE, Output.TOKENS}), dimensions=4)),
    (DENSE, Tokenize(("red", "blue é x"))),
    (DENSE, Tokenize(("red",), add_special_tokens=False)),
    (DENSE, Detokenize(((101, 7, 102), (8, 9)))),
    (DENSE, Detokenize(((101, 7, 102),), skip_special_tokens=False)),
    (SPLADE, Encode(TEXTS, SPARSE)),
    (CLASSIFIER, Classify(TEXTS)),
    (CLASSIFIER, Classify(("red", ("a", "b")), raw_scores=True)),
    (RERANKER, Rerank("q", TEXTS)),
    (RERANKER, Rerank("q", ("a",), raw_scores=True)),
    (RERANKER, Score(PAIRS)),
    (RERANKER, Score(PAIRS[:1], raw_scores=True)),
    (RERANKER, Classify(TEXTS)),
]


def comparable(reply: Any) -> dict[str, Any]:
    """Return a reply's fields in one form, with label scores by label."""
    fields = {
        name: np.asarray(value).tolist() if name in ("vectors", "scores", "dense") else value
        for name, value in msgspec.structs.asdict(reply).items()
        if name not in ("truncated", "input_tokens")
    }
    if "labels" in fields:
        fields["scores"] = [dict(zip(fields["labels"], row, strict=True)) for row in fields["scores"]]
        fields["labels"] = sorted(fields["labels"])
    for name in ("sparse", "token_vectors"):
        if fields.get(name) is not None:
            fields[name] = [msgspec.to_builtins(entry, enc_hook=np.ndarray.tolist) for entry in fields[name]]
    return fields


@pytest.mark.parametrize(("model_type", "work"), WORKS, ids=lambda value: type(value).__name__)
async def test_replies_equal_those_over_http(model_type: dict[str, Any], work: Work) -> None:
    handlers = server_of(model_type)
    async with joined(handlers) as backend:
        reply = await backend.run(work, 10.0)

    expected = await (await over_http(handlers.model)).run(work, 10.0)
    assert comparable(expected) == comparable(reply)
    assert not handlers.aborted


@pytest.mark.parametrize("model_type", [DENSE, SPLADE, CLASSIFIER, RERANKER], ids=str)
async def test_capabilities_equal_those_over_http(model_type: dict[str, Any]) -> None:
    handlers = server_of(model_type)
    async with grpc_tei(handlers) as address:
        found = await described(address)
    http = TeiBackend(UpstreamClient("http://tei", transport=httpx.ASGITransport(handlers.model)))
    expected = await http.describe(10.0)

    def common(capabilities: Capabilities) -> Capabilities:
        labels = tuple(sorted(capabilities.labels))
        return msgspec.structs.replace(
            capabilities, labels=labels, pooling=None, truncates=None, request_bytes=None
        )

    assert common(expected) == common(found)
    assert ("splade" if model_type is SPLADE else None, False) == (found.pooling, found.truncates)


async def test_what_info_lacks_is_probed_once() -> None:
    handlers = server_of()
    async with joined(handlers) as backend:
        await backend.describe(10.0)
        assert ["Info/Info", "/grpc.health.v1.Health/Check"] == handlers.methods
        handlers.model.info["model_type"] = SPLADE
        with pytest.raises(ReplicaFailed):
            await backend.run(Embed(("a",)), 10.0)
        found = await backend.describe(10.0)

    assert "splade" == found.pooling


async def test_checkpoint_files_order_the_labels(tmp_path: Path) -> None:
    source = TokenizerSource(str(write_small_files(tmp_path, labels=LABELS)))
    async with grpc_tei(server_of(CLASSIFIER)) as address:
        assert LABELS == (await described(address, tokenizer=source)).labels


async def test_model_that_is_not_ready_does_not_join() -> None:
    handlers = server_of()
    async with joined(handlers) as backend:
        handlers.serving = False
        with pytest.raises(ReplicaUnavailable, match="not ready"):
            await backend.describe(10.0)
        handlers.serving = True
        await backend.describe(10.0)


@pytest.mark.parametrize(
    ("work", "empty"),
    [
        (Embed((LONG,), truncate=Truncate.ERROR), False),
        (Embed(("a", LONG, "b"), truncate=Truncate.ERROR), False),
        (Embed(("a",), dimensions=9), False),
        (Embed(("a",), dimensions=2**32), False),
        (Embed(("a", "")), True),
        (Detokenize(((1,), ())), True),
    ],
    ids=str,
)
async def test_refusals_of_a_strict_server_are_invalid_work(work: Work, empty: bool) -> None:
    async with joined(server_of()) as backend:
        with pytest.raises(InvalidWork) as caught:
            await backend.run(work, 10.0)
        # The stream that ended early leaves the connection as it was.
        await backend.run(Embed(("a", "b")), 10.0)

    assert (empty, "caller", False) == (caught.value.empty, caught.value.source, caught.value.retryable)
    assert "Input validation error" not in caught.value.message


async def test_rerank_of_too_many_texts_is_invalid_work() -> None:
    async with joined(server_of(RERANKER)) as backend:
        with pytest.raises(InvalidWork, match="batch size 5 > maximum allowed batch size 4"):
            await backend.run(Rerank("q", ("a",) * 5), 10.0)


@pytest.mark.parametrize("status", [401, 404, 424, 429, 500, 503])
@pytest.mark.parametrize("texts", [("a",), ("a", "b")], ids=["unary", "stream"])
async def test_errors_are_those_over_http(status: int, texts: tuple[str, ...]) -> None:
    handlers = server_of()
    http = await over_http(handlers.model)
    async with joined(handlers) as backend:
        handlers.model.hook = respond_with(status, b"of the upstream")
        with pytest.raises(BackendError) as caught:
            await backend.run(Embed(texts), 10.0)
        with pytest.raises(BackendError) as expected:
            await http.run(Embed(texts), 10.0)

    assert (expected.type, "upstream") == (caught.type, caught.value.source)
    assert "of the upstream" not in caught.value.message


@pytest.mark.parametrize(
    ("code", "details", "expected"),
    [
        ("RESOURCE_EXHAUSTED", "Model is overloaded", PermitsTaken),
        ("RESOURCE_EXHAUSTED", "slow down", ReplicaOverloaded),
        ("RESOURCE_EXHAUSTED", "SERVER: Received message larger than max (9 vs. 4)", RequestTooLarge),
        ("OUT_OF_RANGE", "Error, decoded message length too large: found 9 bytes", RequestTooLarge),
        ("UNAVAILABLE", "unhealthy", ReplicaUnavailable),
        ("PERMISSION_DENIED", "no", CredentialRefused),
        ("NOT_FOUND", "no model", ReplicaFailed),
        ("CANCELLED", "", ReplicaFailed),
        ("INTERNAL", "secret of the upstream", ReplicaFailed),
    ],
)
def test_statuses_become_backend_errors(code: str, details: str, expected: type[BackendError]) -> None:
    error = failure(RpcStatus("/tei.v1.Embed/Embed", code, details))

    assert expected is type(error)
    assert "secret" not in error.message


KINDS = {"INVALID_ARGUMENT": InvalidWork, "FAILED_PRECONDITION": ReplicaFailed, "NOT_FOUND": ReplicaFailed}


def test_statuses_of_a_real_server_become_backend_errors() -> None:
    failed = [case for case in GOLDEN if case["status"] in KINDS]
    for case in failed:
        error = failure(RpcStatus(case["call"], case["status"], case["details"]))
        assert KINDS[case["status"]] is type(error), case
        assert error.empty == case["details"].endswith("cannot be empty"), case

    assert len(failed) > 10


async def test_streams_keep_1024_messages_in_flight_and_the_order() -> None:
    handlers = server_of(max_client_batch_size=2000)
    gate = Gate()
    texts = tuple(f"t{number}" for number in range(1500))
    async with joined(handlers) as backend:
        handlers.model.hook = gate  # type: ignore[assignment]
        running = asyncio.create_task(backend.run(Embed(texts), 60.0))
        await until(lambda: handlers.read_ahead == 1024)
        gate.opened.set()
        reply = await running

    assert isinstance(reply, EmbedReply)
    np.testing.assert_array_equal([vector_of(text) for text in texts], reply.vectors)
    assert ((3,) * 1500, 4500) == (reply.input_tokens, reply.tokens)
    assert (1024, ["Embed/EmbedStream"]) == (handlers.read_ahead, handlers.methods)


async def test_full_server_refuses_a_text_at_once() -> None:
    handlers = server_of(max_concurrent_requests=1)
    async with joined(handlers) as backend:
        handlers.model.in_flight = 1
        with pytest.raises(PermitsTaken):
            await backend.run(Embed(("a",)), 10.0)
        running = asyncio.create_task(backend.run(Embed(("a", "b")), 10.0))
        await until(lambda: "Embed/EmbedStream" in handlers.methods)
        handlers.model.in_flight = 0
        # The texts of a stream wait for permits.
        await running


@pytest.mark.parametrize("texts", [("a",), ("a", "b")], ids=["unary", "stream"])
async def test_timeout_and_cancellation_end_the_rpc(texts: tuple[str, ...]) -> None:
    handlers = server_of()
    async with joined(handlers) as backend:
        gate, running = await held(handlers, backend, texts, 0.5)
        with pytest.raises(AttemptTimedOut):
            await running
        assert 0 < (handlers.deadlines[-1] or 0) <= 1
        await until(lambda: handlers.cancelled == 1 and not gate.waiting)
        _, running = await held(handlers, backend, texts)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await until(lambda: handlers.cancelled == 2)


async def test_closed_client_fails_its_rpcs() -> None:
    handlers = server_of()
    async with joined(handlers) as backend:
        _, running = await held(handlers, backend, ("a",))
        await backend.aclose()
        with pytest.raises(ConnectionLost):
            await running


async def test_dead_server_is_unavailable_at_once_and_found_again() -> None:
    port = closed_port()
    backend = open_replica("tei", ReplicaSpec(f"grpc://127.0.0.1:{port}"))
    with pytest.raises(ReplicaUnavailable, match="nothing listens at its port"):
        await backend.describe(60.0)
    handlers = server_of()
    async with grpc_tei(handlers, port):
        async with asyncio.timeout(PATIENCE_S):
            while not await _joins(backend):  # noqa: ASYNC110 - grpc reconnects by itself
                await asyncio.sleep(0.05)
        _, running = await held(handlers, backend, ("a",))
    with pytest.raises(ConnectionLost):
        await running
    with pytest.raises(ReplicaUnavailable):
        await backend.run(Embed(("a",)), 60.0)
    await backend.aclose()


async def _joins(backend: Backend) -> bool:
    try:
        await backend.describe(10.0)
    except ReplicaUnavailable:
        return False
    return True


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("host", "reason"), [("127.0.0.1", "nothing listens at its port"), ("no-such-host.invalid", "not known")]
)
async def test_rpc_without_a_connection_was_not_sent_even_if_the_channel_seemed_connected(
    monkeypatch: pytest.MonkeyPatch, host: str, reason: str, is_stream: bool
) -> None:
    """A channel is READY until it has read that its server closed: a moment that no test can hold."""

    async def seems_connected(_: Any) -> bool:
        return True

    monkeypatch.setattr(grpc_channel, "_connect", seems_connected)
    client = grpc_channel.GrpcClient(ReplicaSpec(f"grpc://{host}:{closed_port()}"))
    sent = client.stream("/m", [b"", b""], 60.0, 1) if is_stream else client.unary("/m", b"", 60.0, 1)
    with pytest.raises(ReplicaUnavailable, match=reason):
        await sent
    await client.aclose()


async def test_unknown_name_is_told() -> None:
    with pytest.raises(ReplicaUnavailable, match="its host name is not known"):
        await described("grpc://no-such-host.invalid:80")


async def test_server_of_http_is_told() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    with pytest.raises(ReplicaUnavailable, match="does not speak gRPC"):
        await described(f"grpc://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    server.close()


async def test_work_before_joining_is_unavailable() -> None:
    backend = open_replica("tei", ReplicaSpec("grpc://127.0.0.1:1"))
    with pytest.raises(ReplicaUnavailable):
        await backend.run(Embed(("a",)), 1.0)


async def test_metadata_has_headers_model_and_trace() -> None:
    handlers = server_of()
    handlers.model.api_key = "key-of-the-server"
    headers = {"Authorization": "Bearer key-of-the-server", "X-Team": "search"}
    token = carrier.set(Carrier({"traceparent": "00-1-2-01"}))
    try:
        async with joined(handlers, headers=headers, model="org/bge") as backend:
            await backend.run(Embed(("a", "b")), 10.0)
    finally:
        carrier.reset(token)

    expected = {"authorization": headers["Authorization"], "x-team": "search", "model": "org/bge"}
    assert expected | {"traceparent": "00-1-2-01"} == {
        name: value for name, value in handlers.metadata.items() if name != "user-agent"
    }


async def test_refused_credential_is_not_the_callers_fault_nor_shown() -> None:
    handlers = server_of()
    handlers.model.api_key = "other"
    with pytest.raises(ReplicaFailed, match="refused the gateway's credential"):
        async with joined(handlers, headers={"authorization": "Bearer key-of-the-server"}):
            pass


async def test_connects_to_one_address_of_a_name() -> None:
    handlers = server_of()
    async with grpc_tei(handlers) as address:
        named = address.replace("127.0.0.1", "no-such-host.invalid")
        assert "fake/model" == (await described(named, ip="127.0.0.1")).model_id


async def test_checks_certificates_of_both_sides(tmp_path: Path) -> None:
    ours, strangers = Authority(tmp_path / "ours"), Authority(tmp_path / "strangers")
    handlers = server_of()
    certificate, key = ours.sign("server")
    async with grpc_tei(handlers, certificates=(key, certificate, ours.ca)) as address:
        for authority, ca, is_trusted in (
            (ours, ours.ca, True),
            (ours, strangers.ca, False),
            (strangers, ours.ca, False),
        ):
            own, own_key = authority.sign("caller")
            error = pytest.raises((ReplicaUnavailable, ConnectionLost))
            with nullcontext() if is_trusted else error:
                await described(address, tls=TlsFiles(str(ca), str(own), str(own_key)))
        with pytest.raises(ReplicaUnavailable, match="certificate is not trusted"):
            await described(address)


async def test_reply_is_bounded_by_its_inputs() -> None:
    handlers = server_of()
    wide = pb.EmbedResponse(embeddings=[0.5] * 140_000).SerializeToString()
    async with joined(handlers) as backend:
        handlers.model.hook = respond_with(200, wide)
        with pytest.raises(ReplicaFailed, match="larger than 524288 bytes"):
            await backend.run(Embed(("a",)), 10.0)


def test_reply_of_too_many_values_is_refused() -> None:
    exchange = encode(Rerank("q", ("a",)), INFO)
    with pytest.raises(ReplicaFailed, match="more than 32 values"):
        decode(Rerank("q", ("a",)), exchange, [b"\n\x00" * 40_000], INFO)


def vectors(*rows: Sequence[float], tokens: int = 2) -> list[bytes]:
    """Return a message per row."""
    metadata = pb.Metadata(compute_tokens=tokens)
    return [pb.EmbedResponse(embeddings=row, metadata=metadata).SerializeToString() for row in rows]


INVALID: dict[str, tuple[Work, list[bytes]]] = {
    "garbage": (Embed(("a",)), [b"<html>"]),
    "nothing": (Embed(("a",)), [b""]),
    "cut_off": (Embed(("a",)), [vectors([1.0] * 8)[0][:20]]),
    "endless_length": (Embed(("a",)), [b"\n" + b"\xff" * 20]),
    "huge_length": (Embed(("a",)), [b"\n\xff\xff\xff\xff\x0f1"]),
    "half_a_float": (Embed(("a",)), [b"\n\x03abc"]),
    "nan": (Embed(("a",)), vectors([float("nan")])),
    "ragged": (Embed(("a", "b")), vectors([1.0], [1.0, 2.0])),
    "empty_rows": (Embed(("a", "b")), vectors([], [])),
    "too_many_tokens": (Embed(("a",)), vectors([1.0], tokens=17)),
    "no_token_vectors": (Encode(("a",), TOKENS), [b""]),
    "cut_off_token_vectors": (Encode(("a",), TOKENS), [b"\n\x06\n\x08"]),
    "endless_token_vectors": (Encode(("a",), TOKENS), [b"\n\x06\n\x04\x00\x00\x80?" * 17]),
    "no_ranks": (Rerank("q", ("a",)), [b""]),
    "other_ranks": (Rerank("q", ("a",)), [pb.RerankResponse(ranks=[pb.Rank(index=1)]).SerializeToString()]),
    "no_predictions": (Score((("a", "b"),)), [b""]),
    "no_tokens": (Tokenize(("a",)), [b"\n\x05"]),
    "no_text": (Detokenize(((1,),)), [b"\n\x02\xff\xff"]),
}


@pytest.mark.parametrize(("work", "replies"), INVALID.values(), ids=INVALID.keys())
def test_invalid_replies_fail(work: Work, replies: list[bytes]) -> None:
    with pytest.raises(ReplicaFailed):
        decode(work, encode(work, INFO), replies, INFO)


async def test_missing_reply_of_a_stream_fails() -> None:
    handlers = server_of()
    async with joined(handlers) as backend:
        handlers.replies_max = 1
        with pytest.raises(ReplicaFailed, match="asked for 2 inputs, got 1"):
            await backend.run(Embed(("a", "b")), 10.0)


@pytest.mark.parametrize(
    ("work", "tokens", "expected"),
    [
        (Embed(("a", "b")), 8, ()),
        (Embed(("a", LONG)), 16, None),
        (Embed((LONG, LONG), truncate=Truncate.ERROR), 16, ()),
        (Embed(("x" * 4001, "b")), 8, None),
        (Embed(("a", LONG)), 0, None),
    ],
    ids=str,
)
def test_reports_no_truncation_only_if_certain(
    work: Embed, tokens: int, expected: tuple[int, ...] | None
) -> None:
    reply = decode(work, encode(work, INFO), vectors([1.0], [1.0], tokens=tokens), INFO)

    assert isinstance(reply, EmbedReply)
    assert (expected, 2 * tokens) == (reply.truncated, reply.tokens)


def test_model_type_of_a_classifier_has_its_labels_in_order() -> None:
    described = pb.InfoResponse(model_type=pb.MODEL_TYPE_CLASSIFIER)

    assert {"classifier": {"id2label": {0: "b", 1: "a"}}} == model_type_of(
        described, is_sparse=False, labels=("b", "a")
    )
