"""Inference of Hugging Face: bodies, replies and errors."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import httpx
import numpy as np
import pytest

from backends.contract import (
    Backend,
    Embed,
    EmbedReply,
    Operation,
    ReplicaSpec,
    Rerank,
    RerankReply,
    TokenizerSource,
    Truncate,
)
from backends.contract.errors import (
    BackendError,
    CredentialRefused,
    InvalidWork,
    ModelNotLoaded,
    ModelNotServed,
    ReplicaFailed,
    ReplicaOverloaded,
)
from backends.http.client import UpstreamResponse
from backends.huggingface.adapter import EMBED, failure
from backends.huggingface.kind import HUGGINGFACE, HuggingFaceSettings
from tests.conftest import remote_backend
from tests.fakes.huggingface import MODEL, FakeRouter
from tests.fakes.tei import score_of, vector_of

LONG = "w " * 20
Opens = Callable[..., tuple[Backend, FakeRouter]]


@pytest.fixture
async def opened() -> AsyncIterator[Opens]:
    """Return a function that opens a model at a router of its own."""
    async with AsyncExitStack() as stack:

        def open_model(tokenizer: str | None = None, **settings: Any) -> tuple[Backend, FakeRouter]:
            server = FakeRouter()
            server.api_key = "hf_a-token"
            spec = ReplicaSpec(
                "http://api/hf-inference/models",
                MODEL,
                {"authorization": "Bearer hf_a-token"},
                tokenizer=None if tokenizer is None else TokenizerSource(tokenizer),
                settings=HuggingFaceSettings(**settings),
            )
            backend = remote_backend("huggingface", spec, httpx.ASGITransport(server))
            stack.push_async_callback(backend.aclose)
            return backend, server

        yield open_model


async def test_embeds_through_the_pipeline(opened: Opens) -> None:
    backend, server = opened()
    found = await backend.describe(5.0)
    reply = await backend.run(Embed(("a", "b c"), truncate=Truncate.LEFT), 5.0)

    assert isinstance(reply, EmbedReply)
    np.testing.assert_allclose([vector_of("a"), vector_of("b c")], reply.vectors, rtol=1e-5)
    path, body = server.requests[-1]
    assert f"/hf-inference/models/{MODEL}/pipeline/feature-extraction" == path
    expected = {"inputs": ["a", "b c"], "normalize": True, "truncate": True, "truncation_direction": "Left"}
    assert expected == body
    assert found.notes
    assert {Operation.EMBED} == found.operations
    raw = await backend.run(Embed(("a",), normalize=False, dimensions=4), 5.0)
    assert isinstance(raw, EmbedReply)
    np.testing.assert_allclose([2 * vector_of("a")[:4]], raw.vectors, rtol=1e-5)


async def test_tokenizer_counts_and_puts_prompts(opened: Opens, small_files: str) -> None:
    backend, _ = opened(small_files)
    found = await backend.describe(5.0)
    reply = await backend.run(Embed(("a b",)), 5.0)
    assert 4 == reply.tokens
    assert () == found.notes
    assert {Operation.TOKENIZE, Operation.DETOKENIZE, Operation.EMBED} == found.operations


async def test_reranks_in_the_form_of_tei(opened: Opens) -> None:
    backend, server = opened(task="rerank")
    await backend.describe(5.0)
    reply = await backend.run(Rerank("q", ("red", "blue"), raw_scores=True), 5.0)

    assert isinstance(reply, RerankReply)
    scores = [score_of("q", text) for text in ("red", "blue")]
    assert scores == pytest.approx(reply.scores.tolist(), abs=1e-6)
    expected = {"query": "q", "texts": ["red", "blue"], "raw_scores": True, "truncate": True}
    assert expected | {"truncation_direction": "Right"} == server.requests[-1][1]


async def test_long_input_is_the_callers_fault(opened: Opens) -> None:
    backend, _ = opened()
    await backend.describe(5.0)
    with pytest.raises(InvalidWork, match="maximum context length is 16 tokens"):
        await backend.run(Embed((LONG,), truncate=Truncate.ERROR), 5.0)


@pytest.mark.parametrize(
    ("status", "body", "error", "pause_s"),
    [
        (503, {"error": "Model is loading", "estimated_time": 20.5}, ModelNotLoaded, 20.5),
        (503, {"error": "Model is loading", "estimated_time": 900.0}, ModelNotLoaded, 60.0),
        (402, {"error": "You have exceeded your monthly included credits"}, ReplicaOverloaded, 60.0),
        (429, {"error": "Too many requests"}, ReplicaOverloaded, None),
        (401, {"error": "Invalid credentials"}, CredentialRefused, None),
        (404, {"error": "Model not found"}, ModelNotServed, None),
        (422, {"error": ["words"]}, InvalidWork, None),
        (502, {"error": "Bad gateway"}, ReplicaFailed, None),
    ],
    ids=str,
)
def test_errors(status: int, body: Any, error: type[BackendError], pause_s: float | None) -> None:
    found = failure(UpstreamResponse(status, {}, json.dumps(body).encode()))
    assert error is type(found)
    assert pause_s == found.retry_after_s
    assert found.detail


@pytest.mark.parametrize("body", [b"[[[0.5]]]", b"[0.5]", b"[[0.5], [0.5, 1]]", b"[]", b"{}", b"[[null]]"])
def test_matrices_and_other_shapes_fail(body: bytes) -> None:
    with pytest.raises(ReplicaFailed):
        EMBED.decode(UpstreamResponse(200, {}, body), 2)


def test_address() -> None:
    assert "https://router.huggingface.co/hf-inference/models" == HUGGINGFACE.address
