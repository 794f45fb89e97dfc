"""Tests of the vLLM adapter: pure encode and decode functions, and the backend against several releases."""

import asyncio
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.contract import (
    Embed,
    EmbedParts,
    EmbedReply,
    Image,
    Operation,
    QueueDepth,
    Rerank,
    RerankReply,
    Score,
    ScoreParts,
    Token,
    Tokenize,
    TokenizeReply,
    TokenizerSource,
    Truncate,
)
from backends.contract.errors import (
    AttemptTimedOut,
    BackendError,
    CredentialRefused,
    InvalidWork,
    ReplicaFailed,
    ReplicaOverloaded,
    ReplicaUnavailable,
    UnsupportedWork,
)
from backends.contract.vectors import sigmoid
from backends.http.client import UpstreamClient, UpstreamResponse
from backends.http.media import data_uri, probe_image
from backends.vllm.adapter import VllmBackend, decode, encode
from backends.vllm.probe import VllmProfile, count_specials, detect_score_support
from backends.vllm.wire import failure, restore_status
from tests.backends.invalid_replies import body_of, packed, ranking
from tests.fakes.server import logit_of
from tests.fakes.tei import vector_of
from tests.fakes.vllm import FakeVllm

PROFILE = VllmProfile("m", 16, "0.32.0", 8, "use_activation", "on_request", (1, 1))
LONG = "w " * 20
RELEASES = ["0.8.5", "0.11.2", "0.20.2", "0.32.0"]

texts = st.lists(st.text(), min_size=1, max_size=4).map(tuple)
truncates = st.sampled_from(Truncate)
works = st.one_of(
    st.builds(Embed, texts, st.booleans(), st.none() | st.integers(1, 8), st.none(), truncates),
    st.builds(Rerank, st.text(), texts, st.booleans(), truncates),
)


def backend_of(server: Any, model: str | None = None, tokenizer: str | None = None) -> VllmBackend:
    """Return the backend of a server, not joined yet."""
    source = None if tokenizer is None else TokenizerSource(tokenizer)
    return VllmBackend(UpstreamClient("http://vllm", transport=httpx.ASGITransport(server)), model, source)


async def joined(server: FakeVllm, tokenizer: str | None = None) -> VllmBackend:
    """Return the backend of a server, joined."""
    backend = backend_of(server, tokenizer=tokenizer)
    await backend.describe(5.0)
    return backend


@settings(max_examples=200, deadline=None)
@given(works)
def test_never_sends_null_and_sends_every_input_in_order(work: Embed | Rerank) -> None:
    _, body = encode(work, PROFILE)

    assert None not in body.values()
    # vLLM would score an empty document as no document.
    documents = tuple(text or " " for text in work.documents) if isinstance(work, Rerank) else ()
    expected = documents if isinstance(work, Rerank) else work.inputs
    assert expected == (body.get("input") or body.get("text_2"))
    # truncation_side would cut off a special token, and most models refuse dimensions.
    assert not {"truncation_side", "dimensions"} & body.keys()


@pytest.mark.parametrize("version", RELEASES)
async def test_embedding_models_of_every_release_join(version: str) -> None:
    capabilities = await backend_of(FakeVllm(version=version)).describe(5.0)

    assert {Operation.EMBED, Operation.TOKENIZE, Operation.DETOKENIZE} == capabilities.operations
    assert ("fake/model", 16, 8) == (
        capabilities.model_id,
        capabilities.max_input_tokens,
        capabilities.dimensions,
    )
    assert f"vLLM {version}" == capabilities.version


@pytest.mark.parametrize("version", RELEASES)
async def test_cross_encoders_of_every_release_join(version: str) -> None:
    capabilities = await backend_of(FakeVllm(version=version, task="classify")).describe(5.0)

    # The routes of 0.11 and before reply to a cross-encoder's single texts with an error.
    classifies = {Operation.CLASSIFY} if version in ("0.20.2", "0.32.0") else set()
    free = {Operation.TOKENIZE, Operation.DETOKENIZE}
    assert {Operation.RERANK} | free | classifies == capabilities.operations


async def test_late_interaction_is_neither_embedding_nor_reranking() -> None:
    capabilities = await backend_of(FakeVllm(task="token_embed")).describe(5.0)

    assert {Operation.TOKENIZE, Operation.DETOKENIZE, Operation.ENCODE} == capabilities.operations


@pytest.mark.parametrize(
    ("version", "note"),
    [
        ("0.8.5", "no raw vectors"),
        ("0.11.2", "raw vectors by normalize"),
        ("0.20.2", "raw vectors by use_activation"),
        ("0.32.0", "raw vectors by use_activation"),
    ],
)
async def test_notes_the_normalization_switch_of_a_release(version: str, note: str) -> None:
    assert note in (await backend_of(FakeVllm(version=version)).describe(5.0)).notes


@pytest.mark.parametrize("version", RELEASES)
@pytest.mark.parametrize("options", [{}, {"dimensions": 4}])
async def test_returns_equal_vectors_from_every_release(version: str, options: dict[str, Any]) -> None:
    reply = await (await joined(FakeVllm(version=version))).run(Embed(("a", "b c"), **options), 5.0)

    assert isinstance(reply, EmbedReply)
    raw = np.array([vector_of("a"), vector_of("b c")])[:, : options.get("dimensions", 8)]
    np.testing.assert_allclose(raw / np.linalg.norm(raw, axis=1)[:, None], reply.vectors, rtol=1e-6)
    assert (3 + 4, ()) == (reply.tokens, reply.truncated)


@pytest.mark.parametrize("version", RELEASES)
async def test_raw_vectors_are_raw_or_refused(version: str) -> None:
    backend = await joined(FakeVllm(version=version))
    work = Embed(("a",), normalize=False, dimensions=4)
    if version == "0.8.5":
        with pytest.raises(UnsupportedWork):
            await backend.run(work, 5.0)
    else:
        reply = await backend.run(work, 5.0)
        assert isinstance(reply, EmbedReply)
        np.testing.assert_allclose([vector_of("a")[:4] * 2], reply.vectors, rtol=1e-6)


@pytest.mark.parametrize("activation", ["sigmoid", "none"])
@pytest.mark.parametrize("version", RELEASES)
@pytest.mark.parametrize("raw_scores", [True, False])
async def test_returns_equal_scores_from_every_release(
    version: str, raw_scores: bool, activation: str
) -> None:
    backend = await joined(FakeVllm(version=version, task="classify", activation=activation))
    work = Rerank("q", ("a", "", "c"), raw_scores=raw_scores)
    if raw_scores and version == "0.8.5" and activation == "sigmoid":
        with pytest.raises(UnsupportedWork):
            await backend.run(work, 5.0)
        return
    reply = await backend.run(work, 5.0)

    assert isinstance(reply, RerankReply)
    logits = np.array([logit_of("q", text) for text in ("a", "", "c")], np.float32)
    np.testing.assert_allclose(logits if raw_scores else sigmoid(logits), reply.scores, rtol=1e-5)


@pytest.mark.parametrize(
    ("raw", "plain", "expected"),
    [
        ([2.0, -3.0], [0.8808, 0.0474], "on_request"),
        ([17.0, 16.0], [1.0, 1.0], "on_request"),
        ([2.0, -3.0], [2.0, -3.0], "logits"),
        ([0.9, 0.1], [0.9, 0.1], "sigmoid"),
        ([2.0, 3.0], [14.0, 21.0], None),
    ],
)
def test_detects_the_score_support(raw: list[float], plain: list[float], expected: str | None) -> None:
    assert expected == detect_score_support(np.array(raw, np.float32), np.array(plain, np.float32))


@pytest.mark.parametrize("version", RELEASES)
@pytest.mark.parametrize("task", ["embed", "classify"])
async def test_long_inputs_are_truncated_or_refused(version: str, task: str) -> None:
    backend = await joined(FakeVllm(version=version, task=task))

    def work(truncate: Truncate) -> Embed | Rerank:
        return Embed((LONG,), truncate=truncate) if task == "embed" else Rerank("q", (LONG,), False, truncate)

    reply = await backend.run(work(Truncate.RIGHT), 5.0)
    assert (16, None) == (reply.tokens, reply.truncated)
    if isinstance(reply, EmbedReply):
        np.testing.assert_allclose([vector_of("w " * 13 + "w")], reply.vectors, rtol=1e-6)
    with pytest.raises(InvalidWork):
        await backend.run(work(Truncate.ERROR), 5.0)
    with pytest.raises(UnsupportedWork):
        await backend.run(work(Truncate.LEFT), 5.0)


@pytest.mark.parametrize("truncate", list(Truncate))
async def test_never_refuses_inputs_that_fit(truncate: Truncate) -> None:
    reply = await (await joined(FakeVllm())).run(Embed(("a b",), truncate=truncate), 5.0)

    assert (4, ()) == (reply.tokens, reply.truncated)


async def test_takes_a_named_prompt_from_the_checkpoint(small_files: str) -> None:
    server = FakeVllm()
    reply = await (await joined(server, small_files)).run(Embed(("a",), prompt_name="query"), 5.0)

    assert (["query: a"], 4) == (server.requests[-1][1]["input"], reply.tokens)


@pytest.mark.parametrize("special", [True, False])
async def test_marks_special_tokens(special: bool) -> None:
    work = Tokenize(("red", "green blue"), add_special_tokens=special)
    reply = await (await joined(FakeVllm())).run(work, 5.0)

    assert isinstance(reply, TokenizeReply)
    assert [len(tokens) - 2 * special for tokens in reply.inputs] == [1, 2]
    assert [token.special for token in reply.inputs[0]] == ([True, False, True] if special else [False])
    assert Token(1005, "green", special=False) in reply.inputs[1]


async def test_local_tokenizer_adds_token_offsets(small_files: str) -> None:
    reply = await (await joined(FakeVllm(), small_files)).run(Tokenize(("red",)), 5.0)

    assert isinstance(reply, TokenizeReply)
    assert (0, 3) == (reply.inputs[0][1].start, reply.inputs[0][1].stop)


@pytest.mark.parametrize(
    ("whole", "bare", "expected"),
    [
        ([101, 7, 102], [7], (1, 1)),
        ([7, 2], [7], (0, 1)),
        ([7], [7], (0, 0)),
        ([101, 8, 102], [7], None),
        ([], [7], None),
        ([0] * 600_000, [0] * 300_000 + [1], None),
    ],
)
def test_counts_special_tokens_around_the_text(
    whole: list[int], bare: list[int], expected: tuple[int, int] | None
) -> None:
    assert expected == count_specials(whole, bare)


TOO_LONG = "This model's maximum context length is 16 tokens. However, your prompt contains 22 input tokens"


def envelope(status: int, kind: str, message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (400, envelope(400, "BadRequestError", TOO_LONG), InvalidWork),
        (400, {"object": "error", "message": TOO_LONG, "type": "x", "code": 400}, InvalidWork),
        (400, envelope(400, "BadRequestError", "The decoder prompt cannot be empty"), InvalidWork),
        (400, envelope(400, "Bad Request", "1 validation error: secret"), ReplicaFailed),
        (400, b"Invalid HTTP request received.", ReplicaFailed),
        (401, {"error": "Unauthorized"}, CredentialRefused),
        (404, envelope(404, "NotFoundError", "The model `secret` does not exist."), ReplicaFailed),
        (404, {"detail": "Not Found"}, ReplicaFailed),
        (501, envelope(501, "NotImplementedError", "no"), ReplicaFailed),
        (429, b"", ReplicaOverloaded),
        (503, envelope(503, "Service Unavailable", "max_num_queued_reqs, secret"), ReplicaOverloaded),
        (503, envelope(503, "ServiceUnavailableError", "please retry"), ReplicaOverloaded),
        (503, b"upstream connect error", ReplicaUnavailable),
        (503, b"", ReplicaUnavailable),
        (500, envelope(500, "InternalServerError", "secret"), ReplicaFailed),
        (500, b"\xff\xfe", ReplicaFailed),
        (502, b"<html>", ReplicaFailed),
    ],
    ids=str,
)
def test_error_statuses_become_backend_errors(status: int, body: Any, expected: type[BackendError]) -> None:
    error = failure(UpstreamResponse(status, {}, body_of(body)))

    assert expected is type(error)
    assert "secret" not in error.message


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"object": "error", "message": "no", "type": "BadRequestError", "code": 400}, 400),
        (envelope(404, "NotFoundError", "no"), 404),
        ({"error": {"message": "no", "code": "odd"}}, 500),
        ({"error": {"message": "no", "code": 200}}, 500),
        (packed([1.0]), 200),
    ],
    ids=str,
)
def test_restores_the_status_of_an_error_sent_with_200(body: Any, status: int) -> None:
    assert status == restore_status(UpstreamResponse(200, {}, body_of(body))).status


@pytest.mark.parametrize("usage", [None, {}, {"prompt_tokens": 33}, {"prompt_tokens": -1}])
def test_implausible_token_counts_fail(usage: Any) -> None:
    with pytest.raises(ReplicaFailed):
        decode(
            Embed(("a", "b")), UpstreamResponse(200, {}, body_of(packed([1.0], [1.0], usage=usage))), PROFILE
        )


def test_ranking_without_usage_fails() -> None:
    body = body_of({"data": ranking("vllm", (0, 0.5), (1, 0.5))["data"]})
    with pytest.raises(ReplicaFailed):
        decode(Rerank("q", ("a", "b")), UpstreamResponse(200, {}, body), PROFILE)


@pytest.mark.parametrize("model", ["fake/model", "other"])
async def test_uses_the_configured_model(model: str) -> None:
    backend = backend_of(FakeVllm(), model)
    if model == "other":
        with pytest.raises(ReplicaFailed, match="fake/model"):
            await backend.describe(5.0)
    else:
        await backend.describe(5.0)


async def test_reports_the_queue_depth_of_all_engines() -> None:
    server = FakeVllm()
    backend = await joined(server)
    server.waiting = 3

    assert QueueDepth(6) == await backend.queue_depth(5.0)


async def test_busy_server_rejoins_with_its_earlier_profile() -> None:
    server = FakeVllm()
    backend = await joined(server)

    async def busy(path: str, sent: dict[str, Any]) -> tuple[int, bytes] | None:
        return (429, b"") if path == "/v1/embeddings" else None

    server.hook = busy
    capabilities = await backend.describe(5.0)

    assert 8 == capabilities.dimensions
    server.version = "0.33.0"
    with pytest.raises(ReplicaOverloaded):
        await backend.describe(5.0)


async def test_long_input_is_read_whole_by_a_server_that_chunks() -> None:
    backend = await joined(FakeVllm(chunked=True))
    whole = await backend.run(Embed(("word " * 40,), truncate=Truncate.ERROR), 1.0)
    cut = await backend.run(Embed(("word " * 40,), truncate=Truncate.RIGHT), 1.0)

    assert (42, ()) == (whole.tokens, whole.truncated)
    assert cut.tokens == 16


@pytest.mark.parametrize("instructed", [True, False])
async def test_an_instruction_reaches_only_a_server_that_applies_it(instructed: bool) -> None:
    server = FakeVllm(task="classify", instructed=instructed)
    backend = backend_of(server)
    found = await backend.describe(5.0)
    work = Score((("q", "a"), ("r", "b")), raw_scores=True, instruction="find")

    assert instructed == found.takes_instruction
    if not instructed:
        with pytest.raises(UnsupportedWork, match="instruction"):
            await backend.run(work, 5.0)
        return
    reply = await backend.run(work, 5.0)
    assert isinstance(reply, RerankReply)
    np.testing.assert_allclose([logit_of("find q", "a"), logit_of("find r", "b")], reply.scores, rtol=1e-5)


async def test_a_server_that_refused_the_first_question_alone_embeds() -> None:
    """A server that is starting, or a proxy before it, may refuse one path and answer the next."""
    server, refused = FakeVllm(), []

    async def refuse_once(path: str, _: Any) -> tuple[int, bytes] | None:
        if path.endswith("/embeddings") and not refused:
            refused.append(path)
            return 404, b'{"detail":"Not Found"}'
        return None

    server.hook = refuse_once
    backend = backend_of(server)
    offered = await backend.describe(5.0)

    assert 1 == len(refused)
    assert Operation.EMBED in offered.operations


PICTURE = Image(b"abc", "image/png", 40, 30)
PICTURED = ScoreParts(
    (
        (("how many",), (PICTURE,)),
        (("how many",), ("a text",)),
        ((PICTURE, "and"), ("b", PICTURE)),
        (("how many",), (PICTURE,)),
    )
)


@pytest.mark.parametrize("activation", ["sigmoid", "none"])
@pytest.mark.parametrize("raw", [True, False])
async def test_each_pair_with_images_has_its_own_score(raw: bool, activation: str) -> None:
    server = FakeVllm(task="classify", images=True, activation=activation)
    backend = backend_of(server)
    found = await backend.describe(5.0)
    reply = await backend.run(ScoreParts(PICTURED.pairs, raw), 5.0)

    assert Operation.RERANK_IMAGE in found.operations
    assert "pairs with images" in found.notes
    assert isinstance(reply, RerankReply)
    uri = data_uri(PICTURE)
    pairs = [("how many", uri), ("how many", "a text"), (f"{uri} and", f"b {uri}"), ("how many", uri)]
    logits = np.array([logit_of(*pair) for pair in pairs])
    np.testing.assert_allclose(logits if raw else sigmoid(logits), reply.scores, rtol=1e-5)
    assert () == reply.truncated


@pytest.mark.parametrize(
    "server",
    [
        FakeVllm(task="classify"),
        FakeVllm(task="classify", images=True, is_blind=True),
        FakeVllm(task="classify", images=True, classes=3),
        FakeVllm(images=True),
    ],
    ids=["texts", "blind", "classifier", "embedder"],
)
async def test_pairs_with_images_are_offered_only_by_servers_that_score_them(server: FakeVllm) -> None:
    backend = backend_of(server)
    found = await backend.describe(5.0)

    assert Operation.RERANK_IMAGE not in found.operations
    with pytest.raises(UnsupportedWork, match="pairs of texts only"):
        await backend.run(PICTURED, 5.0)


async def test_a_server_that_breaks_at_an_image_scores_texts() -> None:
    server = FakeVllm(task="classify", images=True)

    async def fail(_: str, body: Any) -> tuple[int, bytes] | None:
        return (500, b"{}") if "data:image" in str(body) else None

    server.hook = fail
    found = await backend_of(server).describe(5.0)

    assert Operation.RERANK in found.operations
    assert Operation.RERANK_IMAGE not in found.operations


async def test_options_of_pairs_with_images_are_applied_or_refused() -> None:
    server = FakeVllm(task="classify", images=True, instructed=True)
    backend = await joined(server)
    work = ScoreParts(((("q",), (probe_image(),)),), raw_scores=True, instruction="find")
    reply = await backend.run(work, 5.0)

    assert isinstance(reply, RerankReply)
    np.testing.assert_allclose([logit_of("find q", data_uri(probe_image()))], reply.scores, rtol=1e-5)
    # "find q", the separator and the address, with two special tokens.
    whole = await backend.run(work.with_lengths(Truncate.RIGHT, 6), 5.0)
    assert isinstance(whole, RerankReply)
    assert reply.scores.tolist() == whole.scores.tolist()
    with pytest.raises(InvalidWork, match="length is 5 tokens; this input has 6 tokens"):
        await backend.run(work.with_lengths(Truncate.RIGHT, 5), 5.0)
    plain = await joined(FakeVllm(task="classify", images=True))
    with pytest.raises(UnsupportedWork, match="instruction"):
        await plain.run(work, 5.0)


async def test_a_pair_with_an_image_that_is_too_long_is_the_callers_error() -> None:
    backend = await joined(FakeVllm(task="classify", images=True))

    with pytest.raises(InvalidWork):
        await backend.run(ScoreParts(((("q",), (PICTURE, LONG)),)), 5.0)


@pytest.mark.parametrize(
    ("server", "work"),
    [
        (
            FakeVllm(task="classify", images=True, max_tokens=64),
            ScoreParts(tuple([((f"q{index}",), (PICTURE,)) for index in range(9)])),
        ),
        (
            FakeVllm(images=True, max_tokens=64),
            EmbedParts(tuple([(f"a{index}", PICTURE) for index in range(9)])),
        ),
    ],
    ids=["scores", "vectors"],
)
async def test_requests_of_one_piece_of_work_share_its_timeout(
    server: FakeVllm, work: ScoreParts | EmbedParts
) -> None:
    backend = await joined(server)

    async def answer_late(_: str, __: Any) -> None:
        await asyncio.sleep(0.7)

    server.hook = answer_late
    # Eight are in flight at a time, and the ninth begins after more than half of the time.
    with pytest.raises(AttemptTimedOut):
        await backend.run(work, 1.0)
