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
    ReplicaSpec,
    ReportsQueueDepth,
    Rerank,
    RerankReply,
    Score,
    Tokenize,
    TokenizeReply,
    TokenizerSource,
    Truncate,
)
from backends.contract.errors import (
    BackendError,
    ConnectionLost,
    CredentialRefused,
    InvalidWork,
    ModelNotServed,
    ReplicaFailed,
    ReplicaOverloaded,
    ReplicaUnavailable,
    UnsupportedWork,
)
from backends.contract.vectors import sigmoid
from backends.http.client import UpstreamResponse
from backends.openai.adapter import OpenAIBackend
from backends.openai.api import OpenAIProfile, decode, encode, failure
from backends.openai.kind import API_ADDRESSES
from backends.openai.settings import ApiKind, ApiSettings
from backends.openai.shapes import SHAPES, path_of
from tests.backends.invalid_replies import body_of, packed
from tests.conftest import remote_backend
from tests.fakes.hooks import fail_with, respond_with
from tests.fakes.hosted_api import COHERE, FakeHostedApi
from tests.fakes.openai import FIELDS, FakeOpenAI
from tests.fakes.server import logit_of
from tests.fakes.tei import vector_of

OPENAI = ApiSettings()
PROFILE = OpenAIProfile("m", 16, 8)
LONG = "w " * 20

texts = st.lists(st.text(), min_size=1, max_size=4).map(tuple)


def backend_of(
    server: Any,
    model: str | None = None,
    tokenizer: str | None = None,
    address: str = "http://api",
    api: ApiSettings = OPENAI,
) -> OpenAIBackend:
    """Return the backend of a server, not joined yet."""
    source = None if tokenizer is None else TokenizerSource(tokenizer)
    spec = ReplicaSpec(address, model, tokenizer=source, settings=api)
    backend = remote_backend("openai", spec, httpx.ASGITransport(server))
    assert isinstance(backend, OpenAIBackend)
    return backend


async def joined(server: Any, model: str | None = None, **options: Any) -> OpenAIBackend:
    """Return the backend of a server, joined."""
    backend = backend_of(server, model, **options)
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
    ("address", "path", "expected"),
    [
        ("http://ollama:11434", "embeddings", "/v1/embeddings"),
        ("http://ollama:11434/", "embeddings", "/v1/embeddings"),
        ("https://api.openai.com/v1", "embeddings", "/v1/embeddings"),
        ("https://example.org/openai/v1beta/", "embeddings", "/openai/v1beta/embeddings"),
        ("https://example.org/openai/v1", "/v1/rerank", "/v1/rerank"),
        ("http://llama:8080", "/embedding", "/embedding"),
        (
            "https://x.azure.com/openai/deployments/e?api-version=1",
            "embeddings",
            "/openai/deployments/e/embeddings?api-version=1",
        ),
        ("https://x.azure.com?a=1&b=%20", "models", "/v1/models?a=1&b=%20"),
    ],
)
def test_paths_are_below_the_base_url_or_from_the_root(address: str, path: str, expected: str) -> None:
    assert expected == path_of(address, path, "/v1")


@pytest.mark.parametrize(("address", "prefix"), [("http://api", "/v1"), ("http://api/x/v4", "/x/v4")])
async def test_base_url_is_the_one_of_openai_clients(address: str, prefix: str) -> None:
    server = FakeOpenAI(prefix=prefix)
    backend = await joined(server, address=address)
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


@pytest.mark.parametrize("truncate", [Truncate.RIGHT, Truncate.ERROR])
async def test_too_long_input_is_invalid_work(truncate: Truncate) -> None:
    backend = await joined(FakeOpenAI())
    with pytest.raises(InvalidWork, match="maximum context length is 16 tokens"):
        await backend.run(Embed((LONG,), truncate=truncate), 5.0)


async def test_tokenizer_detects_silent_truncation(small_files: str) -> None:
    backend = await joined(FakeOpenAI(cuts=True), tokenizer=small_files)
    reply = await backend.run(Embed(("a", LONG)), 5.0)

    assert (3 + 16, (1,)) == (reply.tokens, reply.truncated)
    for truncate, error in ((Truncate.ERROR, InvalidWork), (Truncate.LEFT, UnsupportedWork)):
        with pytest.raises(error):
            await backend.run(Embed((LONG,), truncate=truncate), 5.0)


async def test_server_without_usage_needs_the_tokenizer(small_files: str) -> None:
    with pytest.raises(ReplicaFailed, match="tokenizer"):
        await joined(FakeOpenAI(usage=False))
    reply = await (await joined(FakeOpenAI(usage=False), tokenizer=small_files)).run(Embed(("a b",)), 5.0)

    assert 4 == reply.tokens


async def test_tokenizer_adds_prompts_and_tokenization(small_files: str) -> None:
    server = FakeOpenAI()
    backend = await joined(server, tokenizer=small_files)
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
        (404, envelope("no secret", "model_not_found"), ModelNotServed),
        (400, envelope("no secret", "model_not_found"), ModelNotServed),
        # Mistral's.
        (400, envelope("Invalid model: secret", "1500", "invalid_model"), ModelNotServed),
        (404, b"404 page not found", ReplicaFailed),
        (401, envelope("Incorrect API key: secret", "invalid_api_key"), CredentialRefused),
        (403, b"", CredentialRefused),
        (429, envelope("slow down", "rate_limit_exceeded", "tokens"), ReplicaOverloaded),
        (429, envelope("no money", "insufficient_quota", "insufficient_quota"), ReplicaOverloaded),
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


@pytest.mark.parametrize(
    ("hook", "error"),
    [
        *((respond_with(status), ReplicaFailed) for status in (400, 404, 405, 500)),
        (fail_with(httpx.ReadError("gone")), ConnectionLost),
    ],
    ids=["400", "404", "405", "500", "broken"],
)
async def test_server_without_embeddings_does_not_join(hook: Any, error: type[BackendError]) -> None:
    server = FakeOpenAI()
    server.hook = hook
    with pytest.raises(error):
        await backend_of(server).describe(5.0)


async def test_busy_server_joins_without_a_width() -> None:
    server = FakeOpenAI()
    server.hook = respond_with(429)
    capabilities = await backend_of(server).describe(5.0)

    assert capabilities.dimensions is None
    assert "width not learnt" in capabilities.notes[0]


def test_wire_has_no_queue_depth() -> None:
    assert not isinstance(backend_of(FakeOpenAI()), ReportsQueueDepth)


PAIRS = (("q", "red"), ("r", "green and blue"), ("q", "cyan"))
DOCUMENTS = ("red", "green and blue", "cyan")
RERANKS = ApiSettings(rerank="/v1/rerank")
API_KINDS: tuple[ApiKind, ...] = ("cohere", "jina", "voyage")


def sent(server: FakeOpenAI | FakeHostedApi, path: str) -> list[dict[str, Any]]:
    """Return the bodies that a server received at a path."""
    return [body for received, body in server.requests if received.endswith(path)]


async def test_reranks_at_the_configured_path() -> None:
    server = FakeOpenAI(reranks=True)
    backend = backend_of(server, api=RERANKS)
    found = await backend.describe(5.0)
    reply = await backend.run(Rerank("q", DOCUMENTS), 5.0)

    assert frozenset({Operation.EMBED, Operation.RERANK}) == found.operations
    assert isinstance(reply, RerankReply)
    np.testing.assert_allclose(
        sigmoid(np.array([logit_of("q", d) for d in DOCUMENTS])), reply.scores, rtol=1e-5
    )
    assert sum(len(f"q {document}".split()) + 3 for document in DOCUMENTS) == reply.tokens
    assert {"model": "fake-model", "query": "q", "documents": list(DOCUMENTS)} == sent(server, "/v1/rerank")[
        -1
    ]


async def test_scores_pairs_with_one_rerank_per_query(small_files: str) -> None:
    server = FakeOpenAI(reranks=True, usage=False)
    backend = await joined(server, tokenizer=small_files, api=RERANKS)
    before = len(server.requests)
    reply = await backend.run(Score(PAIRS), 5.0)

    assert isinstance(reply, RerankReply)
    np.testing.assert_allclose(
        sigmoid(np.array([logit_of(*pair) for pair in PAIRS])), reply.scores, rtol=1e-5
    )
    assert ["q", "r"] == [body["query"] for _, body in server.requests[before:]]
    assert sum(len(" ".join(pair).split()) + 3 for pair in PAIRS) == reply.tokens


@pytest.mark.parametrize("raw_scores", [True, False])
async def test_logits_are_recognized_and_converted(raw_scores: bool) -> None:
    backend = backend_of(FakeOpenAI(reranks=True, logits=True), api=RERANKS)
    found = await backend.describe(5.0)
    reply = await backend.run(Rerank("q", DOCUMENTS, raw_scores=raw_scores), 5.0)

    assert "scores: logit" in found.notes
    assert isinstance(reply, RerankReply)
    logits = np.array([logit_of("q", document) for document in DOCUMENTS])
    np.testing.assert_allclose(logits if raw_scores else sigmoid(logits), reply.scores, rtol=1e-5)


async def test_scores_of_another_scale_than_before_fail() -> None:
    server = FakeOpenAI(reranks=True)
    backend = await joined(server, api=RERANKS)
    server.logits = True
    with pytest.raises(ReplicaFailed, match="scale"):
        await backend.run(Rerank("q", ("a recipe for soup", *DOCUMENTS)), 5.0)


@pytest.mark.parametrize(
    "work",
    [
        Rerank("q", ("a",), raw_scores=True),
        Rerank("q", ("a",), instruction="i"),
        Score(PAIRS, instruction="i"),
    ],
    ids=["raw scores", "instruction", "instruction of pairs"],
)
async def test_reranks_only_as_requested(work: Any) -> None:
    backend = await joined(FakeOpenAI(reranks=True), api=RERANKS)
    with pytest.raises(UnsupportedWork):
        await backend.run(work, 5.0)


@pytest.mark.parametrize(
    ("task", "embeds", "expected"),
    [
        (None, False, {Operation.RERANK}),
        ("rerank", True, {Operation.RERANK}),
        ("embed", True, {Operation.EMBED}),
    ],
)
async def test_offers_what_the_model_does(task: Any, embeds: bool, expected: set[Operation]) -> None:
    server = FakeOpenAI(reranks=True, embeds=embeds)
    backend = backend_of(server, api=ApiSettings(rerank="rerank", task=task))
    found = await backend.describe(5.0)

    assert expected == found.operations
    assert (None if Operation.RERANK in expected else 8) == found.dimensions
    with pytest.raises(UnsupportedWork):
        await backend.run(Rerank("q", ("a",)) if expected == {Operation.EMBED} else Embed(("a",)), 5.0)


async def test_model_without_any_operation_does_not_join() -> None:
    with pytest.raises(ReplicaFailed, match=r"embeddings endpoint .* 400; .* /v1/rerank with status 404"):
        await backend_of(FakeOpenAI(embeds=False), api=RERANKS).describe(5.0)


async def test_rerank_without_token_counts_needs_the_tokenizer(small_files: str) -> None:
    with pytest.raises(ReplicaFailed, match="tokenizer"):
        await backend_of(FakeHostedApi("cohere", embeds=False), "m", api=COHERE).describe(5.0)
    backend = backend_of(FakeHostedApi("cohere", embeds=False), "m", small_files, api=COHERE)
    found = await backend.describe(5.0)
    reply = await backend.run(Rerank("q", DOCUMENTS), 5.0)

    assert Operation.RERANK in found.operations
    assert sum(len(f"q {document}".split()) + 3 for document in DOCUMENTS) == reply.tokens


async def test_known_operations_are_not_paid_for_again() -> None:
    server = FakeOpenAI(reranks=True)
    backend = backend_of(server, api=RERANKS)
    first = await backend.describe(5.0)
    second = await backend.describe(5.0)
    hosted = FakeHostedApi("voyage")
    metered = backend_of(hosted, "m", api=ApiSettings("voyage"))
    descriptions = [await metered.describe(5.0) for _ in range(3)]

    assert first == second
    assert 1 == len(sent(server, "/rerank"))
    assert 2 == len(sent(server, "/embeddings"))
    assert [descriptions[0]] * 3 == descriptions
    assert (1, 1) == (len(sent(hosted, "/embeddings")), len(sent(hosted, "/rerank")))


async def test_known_hosted_api_that_fails_is_noticed() -> None:
    server = FakeHostedApi("jina")
    backend = await joined(server, "m", api=ApiSettings("jina"))
    server.hook = respond_with(503)
    with pytest.raises(ReplicaUnavailable):
        await backend.describe(5.0)


async def test_sends_the_fields_of_the_operator() -> None:
    server = FakeOpenAI()
    api = ApiSettings(extra_body={"user": "gateway", "input": "not this"}, embeddings="/v1/embeddings")
    backend = await joined(server, "fake-model", address="http://api/other?api-version=1", api=api)
    await backend.run(Embed(("a",)), 5.0)

    assert ["gateway", ["a"]] == [server.requests[-1][1][name] for name in ("user", "input")]
    assert {b"api-version=1"} == set(server.queries)


@pytest.mark.parametrize("kind", API_KINDS)
async def test_hosted_api_receives_the_role_in_its_own_words(kind: ApiKind) -> None:
    server, shape = FakeHostedApi(kind), SHAPES[kind]
    backend = backend_of(server, "m", address=API_ADDRESSES[kind] or "", api=ApiSettings(kind))
    found = await backend.describe(5.0)
    replies = [
        await backend.run(Embed(("a", "b c"), prompt_name=name), 5.0) for name in ("query", "document", None)
    ]

    assert {Operation.EMBED, Operation.RERANK} == found.operations
    assert found.typed_inputs
    bodies = sent(server, shape.embeddings)[-3:]
    types = [shape.input_type.get(name) for name in ("query", "document", "default")]
    assert types == [body.get(shape.type_field) for body in bodies]
    for reply in replies:
        assert isinstance(reply, EmbedReply)
        np.testing.assert_allclose([vector_of("a"), vector_of("b c")], reply.vectors, rtol=1e-5)
        assert 3 + 4 == reply.tokens


@pytest.mark.parametrize("kind", API_KINDS)
async def test_hosted_api_is_told_how_to_treat_long_inputs(kind: ApiKind) -> None:
    server, shape = FakeHostedApi(kind, usage_of_rerank=True), SHAPES[kind]
    backend = await joined(server, "m", address=API_ADDRESSES[kind] or "", api=ApiSettings(kind))
    works = [Embed(("a",), truncate=cut) for cut in Truncate] + [
        Rerank("q", ("a",), truncate=cut) for cut in Truncate
    ]
    for work in works:
        offered = shape.truncation if isinstance(work, Embed) else shape.rerank_truncation
        if work.truncate not in offered:
            with pytest.raises(UnsupportedWork):
                await backend.run(work, 5.0)
            continue
        await backend.run(work, 5.0)
        assert offered[work.truncate].items() <= server.requests[-1][1].items()


async def test_refuses_a_role_that_the_server_does_not_know() -> None:
    server = FakeOpenAI(fields=FIELDS | {"input_type"})
    api = ApiSettings(input_type={"query": "q", "default": "d"})
    backend = await joined(server, api=api)
    with pytest.raises(InvalidWork, match="known here: query"):
        await backend.run(Embed(("a",), prompt_name="document"), 5.0)
    await backend.run(Embed(("a",), prompt_name="query"), 5.0)
    await backend.run(Embed(("a",)), 5.0)

    assert ["q", "d"] == [body["input_type"] for _, body in server.requests[-2:]]


async def test_busy_server_that_may_rerank_names_the_setting() -> None:
    server = FakeOpenAI(reranks=True)
    server.hook = respond_with(429)
    with pytest.raises(ReplicaOverloaded, match="`task: rerank`"):
        await backend_of(server, api=RERANKS).describe(5.0)
    with pytest.raises(ReplicaOverloaded, match=r"overloaded$"):
        await backend_of(server, api=ApiSettings(rerank="rerank", task="rerank")).describe(5.0)


async def test_server_that_breaks_at_a_picture_joins_without_pictures() -> None:
    server = FakeHostedApi("jina", images=True)
    broken = 0

    async def break_at_pictures(_path: str, body: dict[str, Any]) -> None:
        nonlocal broken
        if "image" in str(body.get("input")):
            broken += 1
            raise httpx.ReadError("reset")

    server.hook = break_at_pictures
    backend = backend_of(server, "jina-embeddings-v4", address="http://api/v1", api=ApiSettings("jina"))

    found = await backend.describe(5.0)
    again = await backend.describe(5.0)

    assert {Operation.EMBED} <= found.operations
    assert Operation.EMBED_IMAGE not in found.operations | again.operations
    assert any("picture" in note for note in found.notes)
    assert 1 == broken
