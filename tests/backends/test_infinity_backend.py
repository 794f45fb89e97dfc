"""Tests of the Infinity adapter: pure encode and decode functions, and the backend with a strict server."""

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
    QueueDepth,
    Rerank,
    RerankReply,
    Tokenize,
    TokenizeReply,
    TokenizerSource,
    Truncate,
)
from backends.contract.errors import (
    BackendError,
    CredentialRefused,
    InvalidWork,
    ModelUnavailable,
    ReplicaFailed,
    ReplicaOverloaded,
    ReplicaUnavailable,
)
from backends.contract.vectors import sigmoid
from backends.http.client import UpstreamClient, UpstreamResponse
from backends.infinity.adapter import CHARACTERS_MAX, InfinityBackend, normalize_texts
from backends.infinity.wire import decode, encode, failure
from backends.tokens.tokenizer import TokenCount
from tests.backends.invalid_replies import body_of, packed, ranking
from tests.fakes.hooks import respond_with
from tests.fakes.infinity import FakeInfinity
from tests.fakes.server import logit_of
from tests.fakes.tei import Hook, vector_of

LONG = "w " * 20
COUNTED = TokenCount(7, (1,))

texts = st.lists(st.text(), min_size=1, max_size=4).map(tuple)
works = st.one_of(
    st.builds(Embed, texts, st.booleans(), st.none() | st.integers(1, 8)),
    st.builds(Rerank, st.text(), texts, st.booleans()),
)


def backend_of(server: Any, tokenizer: str | None, model: str | None = None) -> InfinityBackend:
    """Return the backend of a server, not joined yet."""
    client = UpstreamClient("http://infinity", transport=httpx.ASGITransport(server))
    return InfinityBackend(client, model, None if tokenizer is None else TokenizerSource(tokenizer))


async def joined(server: FakeInfinity, tokenizer: str, model: str | None = None) -> InfinityBackend:
    """Return the backend of a server, joined."""
    backend = backend_of(server, tokenizer, model)
    await backend.describe(5.0)
    return backend


def reply_to_embeddings(status: int, reply: Any) -> Hook:
    async def hook(path: str, sent: dict[str, Any]) -> tuple[int, bytes] | None:
        return (status, body_of(reply)) if path == "/embeddings" else None

    return hook


@settings(max_examples=200, deadline=None)
@given(works)
def test_never_sends_null_or_dimensions(work: Embed | Rerank) -> None:
    _, body = encode(work, "m")

    assert None not in body.values()
    assert "dimensions" not in body


@settings(max_examples=200, deadline=None)
@given(works)
def test_sends_every_input_in_order(work: Embed | Rerank) -> None:
    _, body = encode(work, "m")

    expected = work.documents if isinstance(work, Rerank) else work.inputs
    assert expected == (body.get("input") or body.get("documents"))


def test_normalizes_texts_as_the_server_does() -> None:
    long_text = " " + "x" * (CHARACTERS_MAX + 9)

    assert Embed(("a b",)) == normalize_texts(Embed(("  a b\n",)), 512)
    (sent,) = normalize_texts(Embed((long_text,)), 512).inputs
    assert CHARACTERS_MAX == len(sent)
    strict = normalize_texts(Rerank(long_text, ("a",), truncate=Truncate.ERROR), 512)
    assert CHARACTERS_MAX + 9 == len(strict.query)


async def test_describes_an_embedding_model(small_files: str) -> None:
    capabilities = await backend_of(FakeInfinity(), small_files).describe(5.0)

    assert {Operation.EMBED, Operation.TOKENIZE, Operation.DETOKENIZE} == capabilities.operations
    assert ("fake/model", 16, 4, 8) == (
        capabilities.model_id,
        capabilities.max_input_tokens,
        capabilities.request_inputs,
        capabilities.dimensions,
    )
    assert {"query": "query: "} == capabilities.prompts


async def test_reranker_offers_no_vectors(small_files: str) -> None:
    capabilities = await backend_of(FakeInfinity(capability="rerank"), small_files).describe(5.0)

    assert {Operation.RERANK, Operation.TOKENIZE, Operation.DETOKENIZE} == capabilities.operations


async def test_does_not_join_without_a_tokenizer() -> None:
    with pytest.raises(ReplicaFailed, match="tokenizer"):
        await backend_of(FakeInfinity(), None).describe(5.0)


async def test_missing_tokenizer_raises_model_unavailable(tmp_path: Any) -> None:
    with pytest.raises(ModelUnavailable):
        await backend_of(FakeInfinity(), str(tmp_path / "nowhere")).describe(5.0)


@pytest.mark.parametrize(
    ("models", "configured", "expected"),
    [
        (("a",), None, "a"),
        (("a",), "a", "a"),
        (("a", "b"), "b", "b"),
        # A server of one model accepts any name, so that a wrong name would go unnoticed.
        (("a",), "b", None),
        (("a", "b"), None, None),
        (("a", "b"), "c", None),
    ],
)
async def test_uses_the_configured_model_or_the_only_one(
    small_files: str, models: tuple[str, ...], configured: str | None, expected: str | None
) -> None:
    backend = backend_of(FakeInfinity(models=models), small_files, configured)
    if expected is None:
        with pytest.raises(ReplicaFailed, match="serves"):
            await backend.describe(5.0)
    else:
        assert expected == (await backend.describe(5.0)).model_id


async def test_one_vector_per_token_is_no_embedding(small_files: str) -> None:
    server = FakeInfinity()
    # Flattened; the two texts of the probe differ in length.
    server.hook = reply_to_embeddings(200, packed([0.6, 0.8], [0.6, 0.8, 0.6, 0.8]))
    capabilities = await backend_of(server, small_files).describe(5.0)

    assert Operation.EMBED not in capabilities.operations


@pytest.mark.parametrize(
    ("hook", "reason"),
    [
        (reply_to_embeddings(200, packed([100.0, 27.0], [-3.0, 90.0])), "float32"),
        (reply_to_embeddings(200, b"<html>welcome</html>"), None),
        (reply_to_embeddings(500, b""), None),
        (respond_with(500), None),
    ],
    ids=["quantized", "html", "failed", "failed server"],
)
async def test_server_with_an_unusable_probe_does_not_join(
    small_files: str, hook: Hook, reason: str | None
) -> None:
    server = FakeInfinity()
    server.hook = hook
    with pytest.raises(ReplicaFailed, match=reason):
        await backend_of(server, small_files).describe(5.0)


async def test_embeds_and_counts_tokens_of_the_model(small_files: str) -> None:
    server = FakeInfinity()
    reply = await (await joined(server, small_files)).run(Embed(("a", "many letters here")), 5.0)

    assert isinstance(reply, EmbedReply)
    np.testing.assert_allclose([vector_of("a"), vector_of("many letters here")], reply.vectors, rtol=1e-6)
    assert (3 + 5, ()) == (reply.tokens, reply.truncated)


async def test_truncates_dimensions_before_normalizing(small_files: str) -> None:
    reply = await (await joined(FakeInfinity(), small_files)).run(Embed(("a",), dimensions=4), 5.0)

    assert isinstance(reply, EmbedReply)
    expected = vector_of("a")[:4] / np.linalg.norm(vector_of("a")[:4])
    np.testing.assert_allclose([expected], reply.vectors, rtol=1e-6)


async def test_reports_truncated_inputs(small_files: str) -> None:
    reply = await (await joined(FakeInfinity(), small_files)).run(Embed(("a", LONG)), 5.0)

    assert (3 + 16, (1,)) == (reply.tokens, reply.truncated)


@pytest.mark.parametrize("truncate", [Truncate.LEFT, Truncate.ERROR])
async def test_accepts_every_truncation_for_short_texts(small_files: str, truncate: Truncate) -> None:
    reply = await (await joined(FakeInfinity(), small_files)).run(Embed(("a",), truncate=truncate), 5.0)

    assert () == reply.truncated


async def test_prepends_a_named_prompt(small_files: str) -> None:
    server = FakeInfinity()
    reply = await (await joined(server, small_files)).run(Embed(("a",), prompt_name="query"), 5.0)

    assert ["query: a"] == server.requests[-1][1]["input"]
    assert 4 == reply.tokens


@pytest.mark.parametrize("raw_scores", [True, False])
async def test_returns_scores_in_document_order(small_files: str, raw_scores: bool) -> None:
    backend = await joined(FakeInfinity(capability="rerank"), small_files)
    reply = await backend.run(Rerank("q", ("a", "", "c"), raw_scores=raw_scores), 5.0)

    assert isinstance(reply, RerankReply)
    logits = np.array([logit_of("q", text) for text in ("a", "", "c")], np.float32)
    np.testing.assert_allclose(logits if raw_scores else sigmoid(logits), reply.scores, rtol=1e-5)
    assert 5 + 4 + 5 == reply.tokens


async def test_tokenizes_with_the_local_tokenizer(small_files: str) -> None:
    reply = await (await joined(FakeInfinity(), small_files)).run(Tokenize(("red blue",)), 5.0)

    assert isinstance(reply, TokenizeReply)
    assert [(None, None), (0, 3), (4, 8), (None, None)] == [
        (token.start, token.stop) for token in reply.inputs[0]
    ]


async def test_base_url_includes_the_url_prefix(small_files: str) -> None:
    server = FakeInfinity(prefix="/v1")
    client = UpstreamClient("http://infinity/v1", transport=httpx.ASGITransport(server))
    backend = InfinityBackend(client, None, TokenizerSource(small_files))
    await backend.describe(5.0)
    await backend.run(Embed(("a",)), 5.0)

    assert {"/v1/embeddings"} == {path for path, _ in server.requests}


UNREADABLE_SOUND = (
    "<class 'infinity_emb.primitives.AudioCorruption'> -> Error opening audio: at 16000Hz.\nsecret"
)


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (429, {"error": {"message": "model m is currently overloaded", "code": 429}}, ReplicaOverloaded),
        (503, b"", ReplicaUnavailable),
        (401, {"detail": "Unauthorized"}, CredentialRefused),
        (422, {"detail": [{"type": "too_long", "loc": ["body", "input"], "msg": "x"}]}, ReplicaFailed),
        (400, {"error": {"message": "ModelNotDeployedError: no", "code": 400}}, ReplicaFailed),
        (400, {"error": {"message": "Invalid model: m", "code": 400}}, ReplicaFailed),
        (400, {"error": {"message": UNREADABLE_SOUND, "code": 400}}, InvalidWork),
        (404, {"detail": "Not Found"}, ReplicaFailed),
        (500, {"error": {"message": "InternalServerError: secret", "code": 500}}, ReplicaFailed),
        (502, b"<html>", ReplicaFailed),
        (500, b"\xff\xfe", ReplicaFailed),
    ],
    ids=str,
)
def test_error_statuses_become_backend_errors(status: int, body: Any, expected: type[BackendError]) -> None:
    error = failure(UpstreamResponse(status, {}, body_of(body)))

    assert expected is type(error)
    assert "secret" not in error.message


def test_ranking_of_tei_fails() -> None:
    response = UpstreamResponse(200, {}, body_of(ranking("tei", (0, 0.5), (1, 0.5))))
    with pytest.raises(ReplicaFailed):
        decode(Rerank("q", ("a", "b")), response, COUNTED)


async def test_reports_its_queue_depth(small_files: str) -> None:
    server = FakeInfinity()
    backend = await joined(server, small_files)
    server.queued = 17

    assert QueueDepth(17) == await backend.queue_depth(5.0)


async def test_busy_server_rejoins_with_its_earlier_profile(small_files: str) -> None:
    server = FakeInfinity()
    backend = await joined(server, small_files)
    server.hook = reply_to_embeddings(429, b"")

    assert 8 == (await backend.describe(5.0)).dimensions
    with pytest.raises(ReplicaOverloaded):
        await backend_of(server, small_files).describe(5.0)
