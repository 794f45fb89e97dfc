"""Tests of the TEI adapter: pure encode and decode functions, and the backend against a strict server."""

from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.contract import (
    Detokenize,
    Embed,
    EmbedParts,
    EmbedReply,
    Operation,
    Rerank,
    RerankReply,
    Tokenize,
    TokenizeReply,
    Truncate,
)
from backends.contract.errors import (
    BackendError,
    CredentialRefused,
    InvalidWork,
    PermitsTaken,
    ReplicaFailed,
    ReplicaOverloaded,
    ReplicaUnavailable,
    RequestTooLarge,
    UnsupportedWork,
)
from backends.http.adapters import route_of
from backends.http.client import UpstreamClient, UpstreamResponse
from backends.tei.adapter import (
    ROUTES,
    TeiBackend,
    TeiInfo,
    capabilities,
    check_supported,
    decode,
    encode,
    failure,
)
from tests.backends.invalid_replies import body_of, packed
from tests.fakes.hooks import RERANKER
from tests.fakes.tei import FakeTei, score_of, vector_of

INFO = TeiInfo("m", {"embedding": {"pooling": "cls"}}, 16, auto_truncate=True)
OPENAI, EMBED = "/v1/embeddings", "/embed"
LONG = "w " * 20

texts = st.lists(st.text(), min_size=1, max_size=4).map(tuple)
truncates = st.sampled_from(Truncate)
names = st.none() | st.text(min_size=1)
works = st.one_of(
    st.builds(Embed, texts, st.booleans(), st.none() | st.integers(1, 8), names, truncates),
    st.builds(Rerank, st.text(), texts, st.booleans(), truncates),
    st.builds(Tokenize, texts, st.booleans(), names),
)


async def joined(server: FakeTei) -> TeiBackend:
    """Return the backend of a server, joined."""
    backend = TeiBackend(UpstreamClient("http://tei", transport=httpx.ASGITransport(server)))
    await backend.describe(1.0)
    return backend


def response_of(body: Any, tokens: str = "2") -> UpstreamResponse:
    return UpstreamResponse(200, {"x-compute-tokens": tokens}, body_of(body))


@settings(max_examples=200, deadline=None)
@given(works, st.booleans())
def test_never_sends_null(work: Embed | Rerank | Tokenize, auto_truncate: bool) -> None:
    _, body = encode(work, msgspec.structs.replace(INFO, auto_truncate=auto_truncate))

    assert None not in body.values()
    assert b"null" not in msgspec.json.encode(
        {k: v for k, v in body.items() if not isinstance(v, str | list | tuple)}
    )


@settings(max_examples=200, deadline=None)
@given(works)
def test_sends_every_input_in_order(work: Embed | Rerank | Tokenize) -> None:
    _, body = encode(work, INFO)
    sent = body.get("inputs") or body.get("input") or body.get("texts")

    assert list(work.documents if isinstance(work, Rerank) else work.inputs) == list(sent)


@pytest.mark.parametrize(
    ("options", "auto_truncate", "path"),
    [
        ({}, True, OPENAI),
        ({"dimensions": 4}, True, OPENAI),
        # The OpenAI route truncates as configured at the server, normalizes, and accepts no prompt.
        ({}, False, EMBED),
        ({"truncate": Truncate.ERROR}, False, OPENAI),
        ({"truncate": Truncate.LEFT}, True, EMBED),
        ({"truncate": Truncate.ERROR}, True, EMBED),
        ({"normalize": False}, True, EMBED),
        ({"prompt_name": "query"}, True, EMBED),
        ({"prompt_name": ""}, True, OPENAI),
    ],
)
def test_requests_base64_only_if_the_openai_route_is_equivalent(
    options: dict[str, Any], auto_truncate: bool, path: str
) -> None:
    info = msgspec.structs.replace(INFO, auto_truncate=auto_truncate)

    assert path == encode(Embed(("a", "word " * info.max_input_length), **options), info)[0]


@pytest.mark.parametrize("truncate", Truncate)
@pytest.mark.parametrize("auto_truncate", [True, False])
def test_texts_with_nothing_to_cut_are_requested_in_base64(truncate: Truncate, auto_truncate: bool) -> None:
    info = msgspec.structs.replace(INFO, auto_truncate=auto_truncate, max_input_length=32)

    assert encode(Embed(("a", "é" * 4), truncate=truncate), info)[0] == OPENAI
    assert encode(Embed(("a", "é" * 32), truncate=Truncate.LEFT), info)[0] == EMBED


@pytest.mark.parametrize(
    ("truncate", "expected"),
    [
        (Truncate.ERROR, {"truncate": False}),
        (Truncate.LEFT, {"truncate": True, "truncation_direction": "Left"}),
        (Truncate.RIGHT, {"truncate": True, "truncation_direction": "Right"}),
    ],
)
def test_sends_truncation_as_every_release_accepts_it(truncate: Truncate, expected: dict[str, Any]) -> None:
    for work in (Embed(("a",), truncate=truncate, normalize=False), Rerank("q", ("a",), truncate=truncate)):
        _, body = encode(work, INFO)
        assert expected == {k: v for k, v in body.items() if k.startswith("trunca")}


def test_clips_long_texts_to_what_the_server_reads() -> None:
    long_text = "x" * (16 * 250) + "end"

    assert ("x" * 4000,) == encode(Embed((long_text,)), INFO)[1]["input"]
    left = encode(Embed((long_text,), truncate=Truncate.LEFT), INFO)[1]["inputs"][0]
    assert (4000, "end") == (len(left), left[-3:])
    assert (long_text,) == encode(Embed((long_text,), truncate=Truncate.ERROR), INFO)[1]["inputs"]


@pytest.mark.parametrize(
    ("model_type", "operations"),
    [
        (
            {"embedding": {"pooling": "mean"}},
            {Operation.EMBED, Operation.ENCODE, Operation.TOKENIZE, Operation.DETOKENIZE},
        ),
        ({"embedding": {"pooling": "splade"}}, {Operation.ENCODE, Operation.TOKENIZE, Operation.DETOKENIZE}),
        (RERANKER, {Operation.RERANK, Operation.CLASSIFY, Operation.TOKENIZE, Operation.DETOKENIZE}),
        ({"classifier": {"id2label": {}, "label2id": {}}}, {Operation.TOKENIZE, Operation.DETOKENIZE}),
    ],
)
def test_derives_operations_from_the_model_type(
    model_type: dict[str, Any], operations: set[Operation]
) -> None:
    assert operations == capabilities(msgspec.structs.replace(INFO, model_type=model_type), ROUTES).operations


def test_offers_only_operations_of_the_wires_own_table() -> None:
    routes = {kind: ROUTES[kind] for kind in (Embed, Tokenize)}

    assert {Operation.EMBED, Operation.TOKENIZE} == capabilities(INFO, routes).operations
    with pytest.raises(UnsupportedWork, match="this upstream's model does not detokenize"):
        check_supported(Detokenize(((1,),)), INFO, routes)


def test_refusal_of_a_wire_names_the_operation() -> None:
    with pytest.raises(UnsupportedWork, match="this upstream's wire does not carry rerank"):
        route_of(Rerank("q", ("a",)), {})
    with pytest.raises(UnsupportedWork, match="this upstream reads text only, neither images nor sound"):
        route_of(EmbedParts((("a",),)), {})


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (400, {"error": "`inputs` cannot be empty", "error_type": "Empty"}, InvalidWork),
        (422, {"error": "too long", "error_type": "Validation"}, InvalidWork),
        (413, {"error": "too long", "error_type": "Validation"}, InvalidWork),
        (422, {"message": "too long", "code": 422, "type": "Validation"}, InvalidWork),
        (413, {"message": "too long", "code": 413, "type": "Validation"}, InvalidWork),
        (422, {"error": "tokenizer error", "error_type": "Tokenizer"}, InvalidWork),
        (413, b"length limit exceeded", RequestTooLarge),
        (413, b"", RequestTooLarge),
        (429, {"error": "Model is overloaded", "error_type": "Overloaded"}, PermitsTaken),
        (429, b"<html>slow down</html>", ReplicaOverloaded),
        (503, {"error": "unhealthy", "error_type": "Unhealthy"}, ReplicaUnavailable),
        (503, b"", ReplicaUnavailable),
        # Faults of the gateway or of the server, never of the caller.
        (400, b"Failed to parse the request body as JSON", ReplicaFailed),
        (422, b"Failed to deserialize the JSON body", ReplicaFailed),
        (415, b"Expected request with `Content-Type: application/json`", ReplicaFailed),
        (401, b"", CredentialRefused),
        (403, b"", CredentialRefused),
        (401, {"error": "no key", "error_type": "Validation"}, CredentialRefused),
        (404, b"", ReplicaFailed),
        (405, b"", ReplicaFailed),
        (
            424,
            {"error": "Backend error: model is not an embedding model", "error_type": "Backend"},
            ReplicaFailed,
        ),
        (500, b"\xff\xfe", ReplicaFailed),
        (502, b"<html>", ReplicaFailed),
        (301, b"", ReplicaFailed),
        (204, b"", ReplicaFailed),
    ],
    ids=str,
)
def test_error_statuses_become_backend_errors(status: int, body: Any, expected: type[BackendError]) -> None:
    error = failure(UpstreamResponse(status, {}, body_of(body)))

    assert expected is type(error)
    assert error.message


@pytest.mark.parametrize("status", [401, 403, 404, 424, 500])
def test_upstream_failure_does_not_expose_its_body(status: int) -> None:
    body = {"error": "secret of the upstream", "error_type": "Backend"}

    assert "secret" not in failure(UpstreamResponse(status, {}, body_of(body))).message


def test_marks_only_empty_inputs_as_empty() -> None:
    empty = failure(UpstreamResponse(400, {}, b'{"error":"no","error_type":"Empty"}'))
    wrong = failure(UpstreamResponse(422, {}, b'{"error":"no","error_type":"Validation"}'))

    assert (True, False) == (empty.empty, wrong.empty)


NOT_VECTORS: dict[str, tuple[str, Any]] = {
    "html": (EMBED, b"<html>welcome</html>"),
    "nothing": (EMBED, b""),
    "cut_off": (EMBED, b"[[0.1,0.2],[0.3"),
    "too_few": (EMBED, [[0.1, 0.2]]),
    "too_many": (EMBED, [[0.1], [0.2], [0.3]]),
    "none": (EMBED, []),
    "empty_rows": (EMBED, [[], []]),
    "ragged": (EMBED, [[0.1, 0.2], [0.3]]),
    "nan_literal": (EMBED, b"[[NaN],[0.1]]"),
    "null": (EMBED, [[None], [0.1]]),
    "strings": (EMBED, [["a"], ["b"]]),
    "flat": (EMBED, [0.1, 0.2]),
    "three_deep": (EMBED, [[[0.1]], [[0.2]]]),
    "object": (EMBED, {"error": "no", "error_type": "Backend"}),
    "other_shape": (OPENAI, {"embeddings": [[0.1]]}),
    "no_usage": (OPENAI, {"data": packed([1.0], [2.0])["data"]}),
}


@pytest.mark.parametrize(("path", "body"), NOT_VECTORS.values(), ids=NOT_VECTORS.keys())
def test_invalid_vectors_of_its_own_route_fail(path: str, body: Any) -> None:
    with pytest.raises(ReplicaFailed):
        decode(Embed(("a", "b")), path, response_of(body), INFO)


@pytest.mark.parametrize("number", ["1e39", "-1e39", "1e400"])
def test_numbers_outside_float32_fail(number: str) -> None:
    vectors = response_of(f"[[{number}]]".encode())
    ranks = response_of(f'[{{"index":0,"score":{number}}}]'.encode())

    with pytest.raises(ReplicaFailed):
        decode(Embed(("a",)), EMBED, vectors, INFO)
    # JSON would encode an infinite score as null.
    with pytest.raises(ReplicaFailed):
        decode(Rerank("q", ("a",)), "/rerank", ranks, INFO)


@pytest.mark.parametrize(("path", "body"), [(EMBED, [[0.6, 0.8, 0.0]]), (OPENAI, packed([0.6, 0.8, 0.0]))])
def test_ignored_dimensions_are_applied_or_refused(path: str, body: Any) -> None:
    # Releases before 1.8 ignore the field and return complete vectors.
    try:
        reply = decode(Embed(("a",), dimensions=2), path, response_of(body), INFO)
    except BackendError:
        return
    assert isinstance(reply, EmbedReply)
    np.testing.assert_allclose([[0.6, 0.8]], reply.vectors, rtol=1e-6)


def test_sorts_rows_by_index() -> None:
    reply = decode(Embed(("a", "b")), OPENAI, response_of(packed([2.0], [1.0], indices=[1, 0])), INFO)

    assert isinstance(reply, EmbedReply)
    np.testing.assert_array_equal([[1.0], [2.0]], reply.vectors)
    assert (np.float32, True) == (reply.vectors.dtype, reply.vectors.flags["C_CONTIGUOUS"])


def test_ranking_of_predictions_fails() -> None:
    predictions = [[{"score": 0.5, "label": "a"}], [{"score": 0.5, "label": "a"}]]
    with pytest.raises(ReplicaFailed):
        decode(Rerank("q", ("a", "b")), "/rerank", response_of(predictions), INFO)


@pytest.mark.parametrize("body", [[], [[]], [[], [], []], b"<html>", {"tokens": []}, [[{"id": "a"}], []]])
def test_invalid_token_lists_fail(body: Any) -> None:
    with pytest.raises(ReplicaFailed):
        decode(Tokenize(("a", "b")), "/tokenize", response_of(body), INFO)


@pytest.mark.parametrize(
    ("work", "tokens", "expected"),
    [
        (Embed(("a",)), "3", ()),
        (Embed(("a",)), "15", ()),
        (Embed((LONG,)), "16", None),
        (Embed(("a", LONG)), "19", None),
        (Embed((LONG,), truncate=Truncate.ERROR), "16", ()),
        # Twelve bytes and four special tokens cannot be more than 16 tokens.
        (Embed(("twelve bytes",) * 8), "40", ()),
        (Embed(("thirteen byte",) * 8), "40", None),
        (Embed((LONG,)), "0", None),
        (Embed((LONG,)), "many", None),
        # Only the server knows the length of the prompt.
        (Embed(("twelve bytes",) * 8, prompt_name="query"), "128", None),
    ],
    ids=str,
)
def test_reports_no_truncation_only_if_certain(
    work: Embed, tokens: str, expected: tuple[int, ...] | None
) -> None:
    body = [[1.0]] * len(work.inputs)

    assert expected == decode(work, EMBED, response_of(body, tokens), INFO).truncated


def test_clipped_text_is_not_reported_as_complete() -> None:
    long_text = "x" * (16 * 250 + 1)
    reply = decode(Embed((long_text,)), EMBED, response_of([[1.0]], "3"), INFO)

    assert () != reply.truncated


@pytest.mark.parametrize("options", [{}, {"normalize": False}, {"dimensions": 4}, {"prompt_name": "query"}])
async def test_returns_the_servers_vectors(options: dict[str, Any]) -> None:
    backend = await joined(FakeTei())
    reply = await backend.run(Embed(("a", "b c"), **options), 1.0)

    assert isinstance(reply, EmbedReply)
    width = options.get("dimensions", 8)
    raw = np.array([vector_of("a"), vector_of("b c")])[:, :width]
    expected = raw * 2 if options.get("normalize") is False else raw / np.linalg.norm(raw, axis=1)[:, None]
    np.testing.assert_allclose(expected, reply.vectors, rtol=1e-6)
    assert 3 + 4 == reply.tokens


async def test_returns_scores_in_document_order() -> None:
    backend = await joined(FakeTei(model_type=RERANKER))
    reply = await backend.run(Rerank("q", ("a", "", "c")), 1.0)

    assert isinstance(reply, RerankReply)
    np.testing.assert_allclose([score_of("q", text) for text in ("a", "", "c")], reply.scores, rtol=1e-6)
    assert 0 < reply.tokens


async def test_returns_tokens_in_input_order() -> None:
    reply = await (await joined(FakeTei())).run(Tokenize(("red", "blue")), 1.0)

    assert isinstance(reply, TokenizeReply)
    assert ["red", "blue"] == [tokens[1].text for tokens in reply.inputs]


@pytest.mark.parametrize(
    ("work", "empty"),
    [
        (Embed(("a",) * 5), False),
        (Embed((LONG,), truncate=Truncate.ERROR), False),
        (Embed(("a",), dimensions=9), False),
        (Embed(("",)), True),
    ],
    ids=str,
)
async def test_refusals_of_a_strict_server_are_invalid_work(work: Embed, empty: bool) -> None:
    backend = await joined(FakeTei())
    with pytest.raises(InvalidWork) as caught:
        await backend.run(work, 1.0)

    assert (empty, "caller", False) == (caught.value.empty, caught.value.source, caught.value.retryable)
    assert "Input validation error" not in caught.value.message
