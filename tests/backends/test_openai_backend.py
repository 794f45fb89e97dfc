"""Tests of the OpenAI adapter: pure encode and decode functions, and the backend with differing servers."""

from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.contract import (
    Embed,
    EmbedReply,
    Operation,
    ReportsQueueDepth,
    Rerank,
    Tokenize,
    TokenizeReply,
    TokenizerSource,
    Truncate,
)
from backends.errors import (
    BackendError,
    ConnectionLost,
    InvalidWork,
    ReplicaFailed,
    ReplicaOverloaded,
    ReplicaUnavailable,
    UnsupportedWork,
)
from backends.http import UpstreamClient, UpstreamResponse
from backends.openai import OpenAIBackend, OpenAIProfile, decode, encode, failure, route
from tests.backends.invalid_replies import NOT_VECTORS, body_of, packed
from tests.fakes.hooks import fail_with, respond_with
from tests.fakes.openai import FIELDS, FakeOpenAI
from tests.fakes.tei import vector_of

PROFILE = OpenAIProfile("m", 16, 8)
LONG = "w " * 20

texts = st.lists(st.text(), min_size=1, max_size=4).map(tuple)


def backend_of(
    server: Any, model: str | None = None, tokenizer: str | None = None, address: str = "http://api"
) -> OpenAIBackend:
    """Return the backend of a server, not joined yet."""
    source = None if tokenizer is None else TokenizerSource(tokenizer)
    return OpenAIBackend(UpstreamClient(address, transport=httpx.ASGITransport(server)), model, source)


async def joined(server: FakeOpenAI, tokenizer: str | None = None) -> OpenAIBackend:
    """Return the backend of a server, joined."""
    backend = backend_of(server, tokenizer=tokenizer)
    await backend.describe(5.0)
    return backend


@settings(max_examples=200, deadline=None)
@given(texts, st.none() | st.integers(1, 8))
def test_sends_only_fields_that_every_server_knows(inputs: tuple[str, ...], dimensions: int | None) -> None:
    body = encode(Embed(inputs, dimensions=dimensions), PROFILE)

    assert body.keys() <= FIELDS - {"dimensions"}
    assert None not in body.values()
    assert inputs == body["input"]


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("http://ollama:11434", "/v1"),
        ("http://ollama:11434/", "/v1"),
        ("https://api.openai.com/v1", ""),
        ("https://example.org/openai/v1beta/", ""),
    ],
)
def test_base_url_without_a_path_gets_v1(address: str, expected: str) -> None:
    assert expected == route(address)


@pytest.mark.parametrize(("address", "prefix"), [("http://api", "/v1"), ("http://api/x/v4", "/x/v4")])
async def test_base_url_is_the_one_of_openai_clients(address: str, prefix: str) -> None:
    server = FakeOpenAI(prefix=prefix)
    backend = backend_of(server, address=address)
    await backend.describe(5.0)
    await backend.run(Embed(("a",)), 5.0)

    assert {f"{prefix}/embeddings"} == {path for path, _ in server.requests}


@pytest.mark.parametrize(
    ("server", "model", "expected"),
    [
        (FakeOpenAI(), None, "fake-model"),
        (FakeOpenAI(models=("a", "b")), "b", "b"),
        # A server without a list of models joins as well.
        (FakeOpenAI(models=None), "any", "any"),
        (FakeOpenAI(models=None), None, "unnamed"),
        (FakeOpenAI(models=("a", "b")), None, None),
        (FakeOpenAI(models=("a", "b")), "c", None),
    ],
)
async def test_uses_the_configured_or_the_listed_model(
    server: FakeOpenAI, model: str | None, expected: str | None
) -> None:
    backend = backend_of(server, model)
    if expected is None:
        with pytest.raises(ReplicaFailed):
            await backend.describe(5.0)
        return
    capabilities = await backend.describe(5.0)

    assert (expected, frozenset({Operation.EMBED}), 8) == (
        capabilities.model_id,
        capabilities.operations,
        capabilities.dimensions,
    )


@pytest.mark.parametrize("base64", [True, False])
@pytest.mark.parametrize("dimensions", [None, 4])
async def test_returns_vectors_as_requested(base64: bool, dimensions: int | None) -> None:
    backend = await joined(FakeOpenAI(base64=base64))
    reply = await backend.run(Embed(("a", "b c"), dimensions=dimensions), 5.0)

    assert isinstance(reply, EmbedReply)
    raw = np.array([vector_of("a"), vector_of("b c")])[:, : dimensions or 8]
    np.testing.assert_allclose(raw / np.linalg.norm(raw, axis=1)[:, None], reply.vectors, rtol=1e-6)
    assert 3 + 4 == reply.tokens


async def test_normalizes_vectors_of_other_lengths() -> None:
    reply = decode(
        Embed(("a", "b")), UpstreamResponse(200, {}, body_of(packed([3.0, 4.0], [0.0, 2.0]))), PROFILE, None
    )

    np.testing.assert_allclose([[0.6, 0.8], [0.0, 1.0]], reply.vectors, rtol=1e-6)


@pytest.mark.parametrize(
    ("work", "error"),
    [
        (Embed(("a",), normalize=False), UnsupportedWork),
        (Embed(("a",), dimensions=9), InvalidWork),
        (Embed(("a",), prompt_name="query"), InvalidWork),
        (Embed(("a",), truncate=Truncate.LEFT), UnsupportedWork),
        (Rerank("q", ("a",)), UnsupportedWork),
        (Tokenize(("a",)), UnsupportedWork),
    ],
    ids=str,
)
async def test_refuses_unsupported_work_before_sending(work: Any, error: type[BackendError]) -> None:
    server = FakeOpenAI()
    backend = await joined(server)
    sent = len(server.requests)
    with pytest.raises(error):
        await backend.run(work, 5.0)

    assert sent == len(server.requests)


@pytest.mark.parametrize("truncate", [Truncate.RIGHT, Truncate.ERROR])
async def test_too_long_input_is_invalid_work(truncate: Truncate) -> None:
    backend = await joined(FakeOpenAI())
    with pytest.raises(InvalidWork, match="maximum context length is 16 tokens"):
        await backend.run(Embed((LONG,), truncate=truncate), 5.0)


async def test_tokenizer_detects_silent_truncation(small_files: str) -> None:
    backend = await joined(FakeOpenAI(cuts=True), small_files)
    reply = await backend.run(Embed(("a", LONG)), 5.0)

    assert (3 + 16, (1,)) == (reply.tokens, reply.truncated)
    for truncate, error in ((Truncate.ERROR, InvalidWork), (Truncate.LEFT, UnsupportedWork)):
        with pytest.raises(error):
            await backend.run(Embed((LONG,), truncate=truncate), 5.0)


async def test_server_without_usage_needs_the_tokenizer(small_files: str) -> None:
    with pytest.raises(ReplicaFailed, match="tokenizer"):
        await joined(FakeOpenAI(usage=False))
    reply = await (await joined(FakeOpenAI(usage=False), small_files)).run(Embed(("a b",)), 5.0)

    assert 4 == reply.tokens


async def test_tokenizer_adds_prompts_and_tokenization(small_files: str) -> None:
    server = FakeOpenAI()
    backend = await joined(server, small_files)
    await backend.run(Embed(("a",), prompt_name="query"), 5.0)
    reply = await backend.run(Tokenize(("red",)), 5.0)

    assert ["query: a"] == server.requests[-1][1]["input"]
    assert isinstance(reply, TokenizeReply)
    assert (0, 3) == (reply.inputs[0][1].start, reply.inputs[0][1].stop)


def envelope(message: str, code: str | None = None, kind: str = "invalid_request_error") -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (400, envelope("This model's maximum context length is 8192 tokens"), InvalidWork),
        (400, envelope("the input length exceeds the context length"), InvalidWork),
        (500, envelope("input is too large to process. increase the physical batch size"), InvalidWork),
        (400, envelope("'$.input' is invalid. secret"), InvalidWork),
        (404, envelope("no secret", "model_not_found"), ReplicaFailed),
        (400, envelope("no secret", "model_not_found"), ReplicaFailed),
        (404, b"404 page not found", ReplicaFailed),
        (401, envelope("Incorrect API key: secret", "invalid_api_key"), ReplicaFailed),
        (403, b"", ReplicaFailed),
        (429, envelope("slow down", "rate_limit_exceeded", "tokens"), ReplicaOverloaded),
        (429, envelope("no money", "insufficient_quota", "insufficient_quota"), ReplicaFailed),
        (503, b"Loading model", ReplicaUnavailable),
        (500, b"secret", ReplicaFailed),
        (502, b"<html>", ReplicaFailed),
    ],
    ids=str,
)
def test_error_statuses_become_backend_errors(status: int, body: Any, expected: type[BackendError]) -> None:
    error = failure(UpstreamResponse(status, {}, body_of(body)))

    assert expected is type(error)
    assert "secret" not in error.message


@pytest.mark.parametrize("body", NOT_VECTORS.values(), ids=NOT_VECTORS.keys())
def test_invalid_vectors_fail(body: Any) -> None:
    with pytest.raises(ReplicaFailed):
        decode(Embed(("a", "b")), UpstreamResponse(200, {}, body_of(body)), PROFILE, None)


@pytest.mark.parametrize("status", [400, 404, 405, 500])
async def test_server_without_embeddings_does_not_join(status: int) -> None:
    server = FakeOpenAI()
    server.hook = respond_with(status)
    with pytest.raises(ReplicaFailed):
        await backend_of(server).describe(5.0)


@pytest.mark.parametrize("hook", [respond_with(429)])
async def test_busy_server_joins_without_a_width(hook: Any) -> None:
    server = FakeOpenAI()
    server.hook = hook
    capabilities = await backend_of(server).describe(5.0)

    assert capabilities.dimensions is None
    assert "width not learnt" in capabilities.notes[0]


async def test_broken_probe_does_not_join() -> None:
    server = FakeOpenAI()
    server.hook = fail_with(httpx.ReadError("gone"))
    with pytest.raises(ConnectionLost):
        await backend_of(server).describe(5.0)


async def test_refused_credential_is_not_the_callers_fault() -> None:
    server = FakeOpenAI()
    server.api_key = "k"
    with pytest.raises(ReplicaFailed, match="credential"):
        await backend_of(server).describe(5.0)


async def test_work_before_joining_is_unavailable() -> None:
    with pytest.raises(ReplicaUnavailable):
        await backend_of(FakeOpenAI()).run(Embed(("a",)), 5.0)


def test_wire_has_no_queue_depth() -> None:
    assert not isinstance(backend_of(FakeOpenAI()), ReportsQueueDepth)
