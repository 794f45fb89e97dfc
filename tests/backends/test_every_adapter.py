"""Behaviour that the adapters of all kinds over HTTP share."""

from typing import Any

import httpx
import pytest

from backends.contract import BackendKind, Embed, Rerank, RerankReply, Tokenize, Truncate, Work
from backends.contract.errors import (
    BackendError,
    InvalidWork,
    ReplicaFailed,
    ReplicaUnavailable,
    UnsupportedWork,
)
from backends.http.client import UpstreamResponse
from tests.backends.adapters import SERVERS, adapter
from tests.backends.invalid_replies import NOT_RANKS, NOT_VECTORS, RANK_KEYS, body_of, ranking
from tests.backends.test_fuzzed_replies import DECODERS

LONG = "w " * 20


@pytest.mark.parametrize("kind", SERVERS)
async def test_work_before_joining_is_unavailable(kind: BackendKind, small_files: str) -> None:
    with pytest.raises(ReplicaUnavailable):
        await adapter(kind, SERVERS[kind](), small_files).run(Embed(("a",)), 5.0)


@pytest.mark.parametrize("sent", [{}, {"authorization": "Bearer other"}], ids=["none", "other"])
@pytest.mark.parametrize("kind", SERVERS)
async def test_refused_credential_is_not_the_callers_fault(
    kind: BackendKind, sent: dict[str, str], small_files: str
) -> None:
    server = SERVERS[kind]()
    server.api_key = "k"
    with pytest.raises(ReplicaFailed, match="credential") as caught:
        await adapter(kind, server, small_files, **sent).describe(5.0)

    assert "upstream" == caught.value.source


@pytest.mark.parametrize("kind", SERVERS)
async def test_sends_the_credential_with_every_request(kind: BackendKind, small_files: str) -> None:
    server = SERVERS[kind]()
    server.api_key = "k"
    backend = adapter(kind, server, small_files, authorization="Bearer k")
    found = await backend.describe(5.0)

    assert found.model_id.startswith("fake")
    assert 3 == (await backend.run(Embed(("a",)), 5.0)).tokens
    assert {"Bearer k"} == {headers["authorization"] for headers in server.headers}


@pytest.mark.parametrize(
    "body", [b"", b"<html>", b"{}", b"[]", b"\xff", b'{"model_id": "m"}', b'{"data": [{"id": "m"}]}']
)
@pytest.mark.parametrize("kind", SERVERS)
async def test_other_servers_do_not_join(kind: BackendKind, body: bytes, small_files: str) -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=body))
    with pytest.raises(ReplicaFailed):
        await adapter(kind, transport, small_files).describe(5.0)


@pytest.mark.parametrize(
    ("kind", "does", "work", "error"),
    [
        ("infinity", {}, Embed((LONG,), truncate=Truncate.ERROR), InvalidWork),
        ("infinity", {}, Rerank("q", (LONG,), truncate=Truncate.ERROR), UnsupportedWork),
        ("infinity", {}, Embed((LONG,), truncate=Truncate.LEFT), UnsupportedWork),
        ("infinity", {}, Embed(("a",), normalize=False), UnsupportedWork),
        ("infinity", {}, Embed(("a",), dimensions=9), InvalidWork),
        ("infinity", {}, Embed(("a",), prompt_name="nowhere"), InvalidWork),
        ("infinity", {}, Rerank("q", ("a",)), UnsupportedWork),
        ("vllm", {}, Embed(("a",), dimensions=9), InvalidWork),
        ("vllm", {}, Embed(("a",), prompt_name="query"), InvalidWork),
        ("vllm", {}, Rerank("q", ("a",)), UnsupportedWork),
        ("vllm", {"task": "classify"}, Embed(("a",)), UnsupportedWork),
        ("openai", {}, Embed(("a",), normalize=False), UnsupportedWork),
        ("openai", {}, Embed(("a",), dimensions=9), InvalidWork),
        ("openai", {}, Embed(("a",), prompt_name="query"), InvalidWork),
        ("openai", {}, Embed(("a",), truncate=Truncate.LEFT), UnsupportedWork),
        ("openai", {}, Rerank("q", ("a",)), UnsupportedWork),
        ("openai", {}, Tokenize(("a",)), UnsupportedWork),
    ],
    ids=str,
)
async def test_refuses_unsupported_work_before_sending(
    kind: BackendKind, does: dict[str, str], work: Work, error: type[BackendError], small_files: str
) -> None:
    server = SERVERS[kind](**does)
    backend = adapter(kind, server, small_files)
    await backend.describe(5.0)
    sent = len(server.requests)
    with pytest.raises(error):
        await backend.run(work, 5.0)

    assert sent == len(server.requests)


def response_of(reply: Any) -> UpstreamResponse:
    return UpstreamResponse(200, {"x-compute-tokens": "2"}, body_of(reply))


@pytest.mark.parametrize("reply", NOT_VECTORS.values(), ids=NOT_VECTORS.keys())
@pytest.mark.parametrize("kind", SERVERS)
def test_invalid_vectors_fail(kind: BackendKind, reply: Any) -> None:
    _, decode = DECODERS[kind]
    with pytest.raises(ReplicaFailed):
        decode(response_of(reply))


@pytest.mark.parametrize("pairs", NOT_RANKS.values(), ids=NOT_RANKS.keys())
@pytest.mark.parametrize("kind", RANK_KEYS)
def test_invalid_rankings_fail(kind: str, pairs: Any) -> None:
    _, decode = DECODERS[f"{kind}_ranks"]
    with pytest.raises(ReplicaFailed):
        decode(response_of(pairs if isinstance(pairs, bytes) else ranking(kind, *pairs)))


@pytest.mark.parametrize("kind", RANK_KEYS)
def test_scores_are_in_the_order_of_the_documents(kind: str) -> None:
    _, decode = DECODERS[f"{kind}_ranks"]
    reply = decode(response_of(ranking(kind, (1, 0.25), (0, 0.5))))

    assert isinstance(reply, RerankReply)
    assert reply.scores[0] > reply.scores[1]
