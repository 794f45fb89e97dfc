"""Tests of the parts that all adapters share."""

import json
from collections.abc import Callable

import httpx
import pytest

from backends.bedrock.kind import BedrockSettings
from backends.contract import Backend, Embed, QueueDepth, ReplicaSpec, ReportsQueueDepth, Rerank, Truncate
from backends.contract.errors import BackendError, InvalidWork, ReplicaFailed, UnsupportedWork
from backends.http.client import UpstreamClient, UpstreamResponse
from backends.http.openai_wire import decode_embeddings
from backends.http.replies import check_reported_cuts, read_gauge
from backends.infinity.wire import failure as infinity_failure
from backends.kinds import KINDS, open_replica
from backends.openai.api import decode_scores
from backends.openai.api import failure as openai_failure
from backends.tei.adapter import TeiBackend
from backends.tei.adapter import failure as tei_failure
from backends.vllm.wire import failure as vllm_failure
from tests.backends.invalid_replies import packed

QUEUE = b"""# HELP te_queue_size The number of requests in the queue
# TYPE te_queue_size gauge
te_queue_size 3
te_queue_size_total 99
"""


@pytest.mark.parametrize(
    ("exposition", "name", "expected"),
    [
        (QUEUE, "te_queue_size", 3.0),
        (b'waiting{engine="0"} 1.0\nwaiting{engine="1"} 2.0', "waiting", 3.0),
        (QUEUE, "te_queue", None),
        (b"", "te_queue_size", None),
        (b"te_queue_size many", "te_queue_size", None),
        (b"te_queue_size NaN", "te_queue_size", None),
        (b"te_queue_size +Inf", "te_queue_size", None),
        (b"<html>", "te_queue_size", None),
    ],
)
def test_gauge_is_the_sum_of_its_samples(exposition: bytes, name: str, expected: float | None) -> None:
    assert expected == read_gauge(exposition, name)


@pytest.mark.parametrize(
    ("status", "body", "expected"), [(200, QUEUE, QueueDepth(3)), (200, b"", None), (404, b"", None)]
)
async def test_tei_reports_its_queue_depth_if_the_metric_exists(
    status: int, body: bytes, expected: QueueDepth | None
) -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(status, content=body))

    assert expected == await TeiBackend(UpstreamClient("http://tei", transport=transport)).queue_depth(1.0)


@pytest.mark.parametrize("kind", KINDS)
async def test_opening_a_backend_sends_nothing(kind: str) -> None:
    # Bedrock has another request for each model.
    settings = BedrockSettings(region="us-east-1", family="cohere.embed") if kind == "bedrock" else None
    spec = ReplicaSpec("http://nowhere.invalid", settings=settings)
    backend: Backend = open_replica(kind, spec)  # type: ignore[arg-type]
    try:
        assert isinstance(backend, ReportsQueueDepth) is (kind in {"tei", "infinity", "vllm"})
    finally:
        await backend.aclose()


@pytest.mark.parametrize("reported", ["0", "0-3,7", "unknown"])
def test_a_cut_that_was_forbidden_is_a_refusal(reported: str) -> None:
    """Another gateway cuts by its own setting where the wire has no field that forbids it."""
    response = UpstreamResponse(200, {"x-truncated-inputs": reported}, b"")
    with pytest.raises(InvalidWork, match="context length") as caught:
        check_reported_cuts(Embed(("a",), truncate=Truncate.ERROR), response)
    assert (None if reported == "unknown" else 0) == caught.value.input_index

    with pytest.raises(UnsupportedWork, match="right end"):
        check_reported_cuts(Rerank("q", ("a",), truncate=Truncate.LEFT), response)
    check_reported_cuts(Embed(("a",), truncate=Truncate.RIGHT), response)
    with pytest.raises(ReplicaFailed, match="did not get"):
        check_reported_cuts(
            Embed(("a",), truncate=Truncate.ERROR), UpstreamResponse(200, {"x-truncated-inputs": "1"}, b"")
        )
    check_reported_cuts(Embed(("a",), truncate=Truncate.ERROR), UpstreamResponse(200, {}, b""))


@pytest.mark.parametrize("failure", [tei_failure, openai_failure, vllm_failure])
@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("content_policy_violation", "the upstream refused the input: content_policy_violation"),
        ("a sentence with the text", "the upstream refused the input"),
        ("x" * 65, "the upstream refused the input"),
    ],
)
def test_a_refusal_has_the_servers_code_and_none_of_its_words(
    failure: Callable[[UpstreamResponse], BackendError], code: str, message: str
) -> None:
    error = {"message": "this text is secret", "type": "invalid_request_error", "code": code}
    refusal = failure(UpstreamResponse(400, {}, json.dumps({"error": error}).encode()))

    assert isinstance(refusal, InvalidWork)
    assert message == refusal.message


def _row(index: object, embedding: object) -> dict[str, object]:
    return {"index": index, "embedding": embedding}


@pytest.mark.parametrize(
    ("body", "detail", "input_index"),
    [
        ({"data": [_row(0, [1.0]), _row(1, None)]}, "`data[1].embedding`: null", 1),
        ({"data": [_row(0, [1.0]), _row(1, [1.0, None])]}, "`data[1].embedding[1]`: null", 1),
        ({"data": [_row(0, [1.0]), _row(1, [float("nan")])]}, "`data[1].embedding[0]`: NaN", 1),
        ({"data": [_row(0, [1.0]), _row(1, "!!")]}, '`data[1].embedding`: "!!"', 1),
        ({"data": [_row(0, [1.0]), _row("one", [1.0])]}, '`data[1].index`: "one"', 1),
        ({"data": [{"index": 0}, _row(1, [1.0])]}, "`data[0]`: Object missing required field `embedding`", 0),
        ({"error": {"message": "CUDA error: device-side assert"}}, "CUDA error: device-side assert", None),
        ({"object": "error", "message": "out of memory"}, "out of memory", None),
        (b"", "it is empty", None),
        (b'{"data": [}', 'JSON is malformed: invalid character (byte 10): "{\\"data\\": [}"', None),
    ],
    ids=repr,
)
def test_unreadable_reply_names_the_place_and_what_stood_there(
    body: object, detail: str, input_index: int | None
) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()

    with pytest.raises(ReplicaFailed) as failed:
        decode_embeddings(content, 2)

    assert "the upstream's answer could not be read" == failed.value.message
    assert detail == failed.value.detail
    assert input_index == failed.value.input_index
    assert f"{failed.value.message}: {detail}" == failed.value.explanation


def test_detail_of_a_vector_that_is_not_finite_or_of_another_width_names_it() -> None:
    with pytest.raises(ReplicaFailed) as infinite:
        decode_embeddings(json.dumps(packed([1.0], [float("inf")])).encode(), 2)
    with pytest.raises(ReplicaFailed) as ragged:
        decode_embeddings(json.dumps(packed([1.0, 2.0], [3.0])).encode(), 2)

    assert 1 == infinite.value.input_index
    assert "number 0 of vector 1: inf" == infinite.value.detail
    assert "vector 0 has 2 numbers, vector 1 has 1" == ragged.value.detail


@pytest.mark.parametrize("indices", [(None, 1, 2), (0, None, 2), (None, None, None), (2, None, 0)])
def test_one_missing_index_or_all_of_them_are_not_ambiguous(indices: tuple[int | None, ...]) -> None:
    own = [index if index is not None else place for place, index in enumerate(indices)]
    data = [
        {"embedding": [float(place)]} | ({} if index is None else {"index": index})
        for index, place in zip(indices, own, strict=True)
    ]

    vectors, _ = decode_embeddings(json.dumps({"data": data}).encode(), 3)

    assert [[0.0], [1.0], [2.0]] == vectors.tolist()


def test_several_missing_indices_are_refused_with_the_first() -> None:
    data = [{"embedding": [1.0]}, {"embedding": [1.0]}, {"embedding": [1.0], "index": 0}]

    with pytest.raises(ReplicaFailed) as failed:
        decode_embeddings(json.dumps({"data": data}).encode(), 3)

    assert "`data[0].index`: null" == failed.value.detail


def test_scores_sorted_by_value_need_all_indices_but_one() -> None:
    one_missing = [{"relevance_score": 0.9}, {"relevance_score": 0.1, "index": 1}]
    all_missing = [{"relevance_score": 0.9}, {"relevance_score": 0.1}]

    scores, _ = decode_scores(UpstreamResponse(200, {}, json.dumps({"results": one_missing}).encode()), 2)
    with pytest.raises(ReplicaFailed):
        decode_scores(UpstreamResponse(200, {}, json.dumps({"results": all_missing}).encode()), 2)

    assert [0.9, 0.1] == pytest.approx(scores.tolist())


@pytest.mark.parametrize("count", [7, 7.0, "7", "7.0"])
def test_whole_numbers_in_any_notation_are_counts(count: object) -> None:
    reply = packed([1.0], usage={"prompt_tokens": count})

    assert 7 == decode_embeddings(json.dumps(reply).encode(), 1)[1]


@pytest.mark.parametrize("count", [7.5, "7.5", "many", "", "1e3"])
def test_other_counts_are_refused_with_their_path(count: object) -> None:
    reply = packed([1.0], usage={"prompt_tokens": count})

    with pytest.raises(ReplicaFailed) as failed:
        decode_embeddings(json.dumps(reply).encode(), 1)

    assert f"`usage.prompt_tokens`: {json.dumps(count)}" == failed.value.detail


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"error": {"message": "CUDA error: out of memory"}}, "CUDA error: out of memory"),
        ({"error": "CUDA error", "error_type": "Backend"}, "CUDA error"),
        ({"detail": [{"loc": ["body"], "msg": "field required"}]}, "field required"),
        (b"<html><h1>502 Bad Gateway</h1>\n nginx</html>", "502 Bad Gateway nginx"),
        ({"message": "x" * 600 + "\n\x1b[31m"}, "x" * 499 + "…"),
        ({"message": "one\ntwo\x1b"}, "one two "),
    ],
    ids=["openai", "tei", "fastapi", "html", "long", "control characters"],
)
@pytest.mark.parametrize("failure", [openai_failure, tei_failure, vllm_failure, infinity_failure])
def test_words_of_an_error_are_for_operators_only(
    failure: Callable[[UpstreamResponse], BackendError], body: object, words: str
) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()

    error = failure(UpstreamResponse(500, {}, content))

    assert words == error.detail
    assert "500" == error.upstream_status
    assert words not in error.message


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after-ms": "250", "retry-after": "9"}, 0.25),
        ({"retry-after": "Fri, 27 Nov 2026 10:00:20 GMT", "date": "Fri, 27 Nov 2026 10:00:00 GMT"}, 20.0),
        ({"retry-after": "86400"}, 60.0),
        ({"retry-after": "Fri, 27 Nov 2020 10:00:20 GMT"}, 0.0),
        ({"retry-after": "soon"}, None),
        ({}, None),
    ],
)
@pytest.mark.parametrize("status", [429, 503])
def test_requested_pause_is_read_in_every_form_and_bounded(
    headers: dict[str, str], expected: float | None, status: int
) -> None:
    assert expected == openai_failure(UpstreamResponse(status, headers, b"")).retry_after_s
    assert openai_failure(UpstreamResponse(500, headers, b"")).retry_after_s is None


async def test_byte_order_mark_before_a_reply_is_ignored() -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=b"\xef\xbb\xbf{}"))

    assert b"{}" == (await UpstreamClient("http://up", transport=transport).get("/", 1.0)).body
