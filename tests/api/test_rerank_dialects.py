"""Cohere's and Jina's rerank: /v1/rerank, /v2/rerank and /rerank with documents."""

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from backends.contract.vectors import sigmoid
from gateway.api.dialects.cohere.rerank import NOT_CUT, NOT_SPLIT, REFUSED, RerankRequest, decode_documents
from gateway.api.server.inference_api import InferenceApi
from gateway.api.server.request import Request
from gateway.api.wire.vllm import VllmOptions
from gateway.config.schema import Limits
from tests.conftest import CONFIG, Boots, posted
from tests.fakes.checkpoint import write_small_files
from tests.fakes.hooks import RERANKER, respond_with, tei_with_hook
from tests.fakes.hooks import embedder_and_reranker as fakes
from tests.fakes.server import logit_of
from tests.fakes.tei import score_of, vector_of

V1, V2, SHARED = "/v1/rerank", "/v2/rerank", "/rerank"
TEXTS = ["red", "green", "blue", "", "cyan", "pink"]
ORDER = sorted(range(len(TEXTS)), key=lambda i: -score_of("q", TEXTS[i]))
BODY = {"query": "q", "documents": TEXTS}


async def post_json(boot: Boots, path: str, body: Any, status: int = 200) -> Any:
    """Return the JSON of one POST, after a check of its status."""
    reply = await posted(boot(fakes()), path, body)
    assert status == reply.status_code, reply.text
    return reply.json()


@pytest.mark.parametrize("path", [V1, V2, SHARED])
async def test_returns_documents_best_first_with_the_callers_indices(boot: Boots, path: str) -> None:
    reply = await post_json(boot, path, BODY)

    assert ORDER == [result["index"] for result in reply["results"]]
    scores = [result["relevance_score"] for result in reply["results"]]
    np.testing.assert_allclose([score_of("q", TEXTS[i]) for i in ORDER], scores, rtol=1e-6)


@pytest.mark.parametrize("path", ["/models/cross" + path for path in (V1, V2, SHARED)])
async def test_a_base_url_may_name_the_model(boot: Boots, path: str) -> None:
    assert ORDER == [result["index"] for result in (await post_json(boot, path, BODY))["results"]]


@pytest.mark.parametrize(
    ("path", "version", "kind", "fields"),
    [
        (V1, "1", "list", {"index", "relevance_score", "document"}),
        (SHARED, "1", "rerank", {"index", "relevance_score", "document"}),
        (V2, "2", "list", {"index", "relevance_score"}),
    ],
)
async def test_the_reply_has_the_fields_of_every_client_of_its_paths(
    boot: Boots, path: str, version: str, kind: str, fields: set[str]
) -> None:
    """Cohere's and Jina's clients read `results`, Voyage's `data`, Vercel's all three counts of tokens."""
    reply = await post_json(boot, path, BODY | {"model": "cross"})

    assert {"id", "object", "model", "results", "data", "usage", "meta"} == reply.keys()
    assert (kind, "cross") == (reply["object"], reply["model"])
    assert reply["usage"]["total_tokens"] == reply["usage"]["prompt_tokens"] > 0
    assert 0 == reply["usage"]["completion_tokens"]
    assert {"search_units": 1} == reply["meta"]["billed_units"]
    assert version == reply["meta"]["api_version"]["version"]
    assert all(fields == result.keys() for result in reply["results"])
    plain = [{name: result[name] for name in ("index", "relevance_score")} for result in reply["results"]]
    assert plain == reply["data"]


@pytest.mark.parametrize("path", [V1, V2, SHARED])
async def test_data_has_the_documents_as_texts_if_they_are_asked_for(boot: Boots, path: str) -> None:
    reply = await post_json(boot, path, BODY | {"return_documents": True})

    assert [TEXTS[index] for index in ORDER] == [result["document"] for result in reply["data"]]
    assert [{"text": TEXTS[index]} for index in ORDER] == [item["document"] for item in reply["results"]]


RANK_PATHS: dict[str, tuple[Any, str]] = {
    **dict.fromkeys((V1, V2, SHARED), ({"query": "q", "documents": ["a", "b", "c"]}, "relevance_score")),
    "/infinity/rerank": ({"query": "q", "documents": ["a", "b", "c"], "model": "cross"}, "relevance_score"),
    "/models/cross/rerank": ({"query": "q", "texts": ["a", "b", "c"]}, "score"),
    "/score": ({"queries": "q", "documents": ["a", "b", "c"], "model": "cross"}, "score"),
    "/v1/score/cross": ({"query": {"text": "q"}, "items": [{"text": text} for text in "abc"]}, "score"),
}


@pytest.mark.parametrize("path", RANK_PATHS)
async def test_whole_scores_are_written_with_a_point_and_no_document_is_left_out(
    boot: Boots, path: str
) -> None:
    """OpenSearch casts each score to a Double; it and Weaviate keep one place for each document."""
    scores = [1, 0, 0]
    replies = {
        "/rerank": [{"index": index, "score": score} for index, score in enumerate(scores)],
        "/predict": [[{"label": "LABEL_0", "score": score}] for score in scores],
    }

    async def hook(upstream_path: str, _: dict[str, Any]) -> tuple[int, bytes] | None:
        found = replies.get(upstream_path)
        return None if found is None else (200, json.dumps(found).encode())

    body, name = RANK_PATHS[path]
    reply = await posted(boot({"rerank-0": tei_with_hook(hook, model_type=RERANKER)}), path, body)

    assert 200 == reply.status_code, reply.text
    assert ["1.0", "0.0", "0.0"] == re.findall(rf'"{name}": ?([^,}}]+)', reply.text)[:3]


WRITTEN: list[tuple[dict[str, Any], bool]] = [
    ({"return_documents": "true", "return_len": "true"}, True),
    ({"return_documents": "false", "return_len": None, "kwargs": "{}"}, False),
]


@pytest.mark.parametrize(("fields", "returned"), WRITTEN, ids=str)
async def test_reads_xinferences_options(boot: Boots, fields: Any, returned: bool) -> None:
    """RAGFlow sends booleans as texts, and Xinference's client repeats fields in `kwargs`."""
    reply = await posted(boot(fakes()), V1, BODY | fields)

    assert (200, None) == (reply.status_code, reply.headers.get("x-ignored-fields")), reply.text
    body = reply.json()
    assert all(returned is ("document" in result) for result in (*body["results"], *body["data"]))
    assert body["meta"]["tokens"]["input_tokens"] > 0


@pytest.mark.parametrize("value", ["yes", 1, ""])
async def test_an_option_has_the_values_of_a_boolean(boot: Boots, value: Any) -> None:
    reply = await post_json(boot, V1, BODY | {"return_documents": value}, 400)

    assert "return_documents" in reply["message"]


KWARGS: list[tuple[dict[str, Any], str | None]] = [
    ({"kwargs": '{"user": "ann", "top_n": 2}', "top_n": 2, "user": "ann"}, None),
    ({"kwargs": '{"top_n": 3}', "top_n": 2}, "`kwargs` has what the body has not"),
    ({"kwargs": '{"check": null, "odd": 1}'}, "`kwargs` has what the body has not"),
    ({"kwargs": "[1]"}, "`kwargs` is not an object of JSON in a string"),
    ({"kwargs": "{"}, "`kwargs` is not an object of JSON in a string"),
    ({"kwargs": "[" * 4000}, "`kwargs` is not an object of JSON in a string"),
    ({"kwargs": " " * 5000}, "4096"),
]


@pytest.mark.parametrize(("fields", "reason"), KWARGS, ids=[str(i) for i in range(len(KWARGS))])
async def test_kwargs_only_repeats_the_body(boot: Boots, fields: Any, reason: str | None) -> None:
    reply = await posted(boot(fakes()), V1, BODY | fields)

    if reason is None:
        assert 200 == reply.status_code, reply.text
    else:
        assert (400, True) == (reply.status_code, reason in reply.json()["message"]), reply.text


@pytest.mark.parametrize("path", [V1, V2, SHARED])
@pytest.mark.parametrize(
    "fields",
    [{"max_chunks_per_doc": 10}, {"overlap_tokens": 80}, {"top_k": 2, "max_chunks_per_doc": 1024}],
    ids=str,
)
async def test_says_that_documents_are_not_split(boot: Boots, path: str, fields: Any) -> None:
    reply = await post_json(boot, path, BODY | fields)

    assert ORDER[: fields.get("top_k")] == [result["index"] for result in reply["results"]]
    assert [NOT_SPLIT] == reply["meta"]["warnings"]


@pytest.mark.parametrize("value", [None, 0])
async def test_no_chunks_need_no_warning(boot: Boots, value: int | None) -> None:
    reply = await post_json(boot, V1, BODY | {"max_chunks_per_doc": value, "overlap_tokens": value})

    assert "warnings" not in reply["meta"]


@pytest.mark.parametrize(("documents", "units"), [(1, 1), (100, 1), (101, 2), (250, 3)])
async def test_a_search_unit_is_a_query_with_a_hundred_documents(
    boot: Boots, documents: int, units: int
) -> None:
    reply = await post_json(boot, V2, {"query": "q", "documents": ["a"] * documents})

    assert units == reply["meta"]["billed_units"]["search_units"]


@pytest.mark.parametrize(
    ("path", "wanted", "returned"),
    [
        (V1, {}, True),
        (SHARED, {}, True),
        (V1, {"return_documents": None}, True),
        (V1, {"return_documents": False}, False),
        (V2, {}, False),
        (V2, {"return_documents": True}, True),
    ],
    ids=str,
)
async def test_returns_documents_as_jina_and_on_request(
    boot: Boots, path: str, wanted: Any, returned: bool
) -> None:
    documents = [{"text": text, "title": "ignored"} if i % 2 else text for i, text in enumerate(TEXTS)]
    reply = await post_json(boot, path, {"query": "q", "documents": documents} | wanted)

    assert ORDER == [result["index"] for result in reply["results"]]
    texts = [{"text": TEXTS[index]} if returned else None for index in ORDER]
    assert texts == [result.get("document") for result in reply["results"]]


@pytest.mark.parametrize(
    ("fields", "count", "documents"),
    [
        ({"top_k": None, "truncation": True}, 6, False),
        ({"top_k": 2}, 2, False),
        ({"top_k": 3, "return_documents": True}, 3, True),
    ],
    ids=str,
)
async def test_a_body_with_top_k_has_documents_only_on_request(
    boot: Boots, fields: Any, count: int, documents: bool
) -> None:
    reply = await post_json(boot, V1, BODY | {"model": "cross"} | fields)

    assert all(documents is ("document" in result) for result in reply["results"])
    assert ORDER[:count] == [result["index"] for result in reply["data"]]
    texts = [TEXTS[index] if documents else None for index in ORDER[:count]]
    assert texts == [result.get("document") for result in reply["data"]]


@pytest.mark.parametrize("path", [V1, V2, SHARED])
@pytest.mark.parametrize("top_n", [None, 0, 1, 3, 6, 100])
async def test_top_n_limits_the_results(boot: Boots, path: str, top_n: int | None) -> None:
    """0 means all documents, as in vLLM."""
    reply = await post_json(boot, path, BODY | {"top_n": top_n})

    assert ORDER[: top_n or None] == [result["index"] for result in reply["results"]]


@pytest.mark.parametrize("path", [V1, V2, SHARED])
async def test_equal_scores_keep_the_requests_order(boot: Boots, path: str) -> None:
    ranks = [{"index": i, "score": score} for i, score in enumerate([0.5, 0.25, 0.5, 0.25])]
    server = tei_with_hook(respond_with(200, json.dumps(ranks).encode()), model_type=RERANKER)
    reply = await posted(boot({"rerank-0": server}), path, {"query": "q", "documents": ["a", "b", "c", "d"]})

    assert [0, 2, 1, 3] == [result["index"] for result in reply.json()["results"]]


async def test_rerank_by_cosine_uses_the_prompts_of_query_and_documents(boot: Boots) -> None:
    prompted = "bge: {upstream: embedder, prompts: {query: 'q: ', passage: 'p: '}}"
    async with boot(fakes(), CONFIG.replace("bge: {upstream: embedder}", prompted, 1)) as gateway:
        reply = await gateway.post(V2, {"query": "q", "documents": ["a", "b"], "model": "bge"})

    cosines = {i: float(vector_of("q: q") @ vector_of(f"p: {text}")) for i, text in enumerate("ab")}
    scores_by_index = {result["index"]: result["relevance_score"] for result in reply.json()["results"]}
    assert cosines == pytest.approx(scores_by_index, abs=1e-6)


@pytest.mark.parametrize(("truncation", "status"), [(True, 200), (None, 200), (False, 400)])
async def test_truncation_decides_whether_long_documents_are_cut(
    boot: Boots, truncation: bool | None, status: int
) -> None:
    body = {"query": "q", "documents": ["w " * 20], "truncation": truncation, "model": "bge"}

    await post_json(boot, V1, body, status)


@pytest.mark.parametrize(("allowed", "warned"), [(None, False), (0, False), (5, True), (4096, False)])
@pytest.mark.parametrize("field", ["max_tokens_per_doc", "max_doc_length"])
async def test_warns_if_a_document_cannot_be_cut(
    boot: Boots, field: str, allowed: int | None, warned: bool
) -> None:
    body = {"query": "q", "documents": ["a", "one two three"], field: allowed}
    if field == "max_doc_length" and allowed == 0:
        await post_json(boot, V2, body, 400)
        return

    warnings = (await post_json(boot, V2, body))["meta"].get("warnings")
    assert ([NOT_CUT] if warned else None) == warnings


@pytest.mark.parametrize("field", ["max_tokens_per_doc", "max_doc_length"])
@pytest.mark.parametrize("model", ["cross", "bge"])
async def test_documents_are_cut_to_the_requested_tokens(
    boot: Boots, tmp_path: Path, field: str, model: str
) -> None:
    tokenizer = f"tokenizer: {write_small_files(tmp_path)}, backend: tei"
    body = {"query": "q", "documents": ["a", "one two three"], field: 2, "model": model}
    reply = await posted(boot(fakes(), CONFIG.replace("backend: tei", tokenizer)), V1, body)

    texts = ["a", "one two"]
    expected = [
        score_of("q", text) if model == "cross" else vector_of("q") @ vector_of(text) for text in texts
    ]
    scores = {result["index"]: result["relevance_score"] for result in reply.json()["results"]}
    assert dict(enumerate(map(float, expected))) == pytest.approx(scores, abs=1e-6)
    assert "1" == reply.headers["x-truncated-inputs"]
    assert "warnings" not in reply.json()["meta"]


@pytest.mark.parametrize("model", ["cross", "bge"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (V1, {"query": "one two three", "documents": ["four", "five six seven"]}),
        ("/score", {"queries": "one two three", "documents": ["four", "five six seven"]}),
        ("/score", {"queries": ["one two three"] * 2, "documents": ["four", "five six seven"]}),
    ],
    ids=str,
)
async def test_queries_and_documents_are_cut_apart(
    boot: Boots, tmp_path: Path, path: str, body: dict[str, Any], model: str
) -> None:
    bounds = {"max_tokens_per_query": 1, "max_tokens_per_doc": 2, "model": model}
    async with boot(fakes(), CONFIG) as gateway:
        unknown = await gateway.post(path, body | bounds)
        unbound = await gateway.post(path, body | {"max_tokens_per_query": 0, "model": model})
    tokenizer = f"tokenizer: {write_small_files(tmp_path)}, backend: tei"
    reply = await posted(boot(fakes(), CONFIG.replace("backend: tei", tokenizer)), path, body | bounds)

    assert (400, 200, 200) == (unknown.status_code, unbound.status_code, reply.status_code), reply.text
    assert "tokenizer" in unknown.text
    texts = ("four", "five six")
    if model == "bge":
        expected = [vector_of("one") @ vector_of(text) for text in texts]
    elif path == "/score":
        # Pairs go to the fake's classifier.
        expected = list(sigmoid(np.array([logit_of("one", text) for text in texts], np.float32)))
    else:
        expected = [score_of("one", text) for text in texts]
    results = reply.json().get("results") or reply.json()["data"]
    scores = {item["index"]: item.get("score", item.get("relevance_score")) for item in results}
    assert dict(enumerate(map(float, expected))) == pytest.approx(scores, abs=1e-6)
    assert "0-1" == reply.headers["x-truncated-inputs"]


@pytest.mark.parametrize("path", [V1, V2, SHARED])
@pytest.mark.parametrize(
    "wrong",
    [
        {"query": ""},
        {"query": 5},
        {"query": None},
        {"documents": []},
        {"documents": None},
        {"documents": [5]},
        {"documents": [{"image": "https://example.org/a.png"}]},
        {"documents": [{"title": "a"}]},
        {"top_n": -1},
        {"top_n": "3"},
        {"rank_fields": ["text"]},
        {"return_embeddings": True},
        {"max_tokens_per_doc": -1},
        {"max_doc_length": 8193},
        {"max_doc_length": 5, "max_tokens_per_doc": 4},
        {"max_tokens_per_query": -1},
        {"top_k": -1},
        {"top_k": 2, "top_n": 3},
        {"truncation": "yes"},
    ],
    ids=str,
)
async def test_rejects_unsupported_requests_with_400_and_a_reason(boot: Boots, path: str, wrong: Any) -> None:
    reply = await post_json(boot, path, BODY | wrong, 400)

    assert ({"message"} if path == V2 else {"message", "detail"}) == reply.keys()
    assert reply["message"]


async def test_unknown_fields_are_ignored(boot: Boots) -> None:
    await post_json(boot, V1, BODY | {"unheard_of": [1]})


@pytest.mark.parametrize(
    ("body", "status", "keys"),
    [
        ({"query": "q", "texts": [5]}, 422, {"error", "error_type"}),
        ({"query": "q"}, 422, {"error", "error_type"}),
        ({"query": "q", "texts": ["a"], "documents": ["a"]}, 422, {"error", "error_type"}),
        ({"texts": ["a"], "documents": ["a"]}, 422, {"error", "error_type"}),
        ({"documents": ["a"]}, 400, {"message", "detail"}),
        ({"query": "q", "documents": ["a"], "model": "nowhere"}, 404, {"message", "detail"}),
        ({"query": "q", "texts": ["a"], "model": "nowhere"}, 404, {"error", "error_type"}),
    ],
    ids=str,
)
async def test_field_of_the_body_selects_the_dialect_of_errors(
    boot: Boots, body: Any, status: int, keys: set[str]
) -> None:
    assert keys == (await post_json(boot, SHARED, body, status)).keys()


async def test_malformed_json_on_the_shared_path_gets_teis_error(boot: Boots) -> None:
    async with boot(fakes()) as gateway:
        reply = await gateway.client.post(SHARED, content=b'{"query": "q", "documents": ["a"], ')

    assert (400, {"error", "error_type"}) == (reply.status_code, reply.json().keys())


@pytest.mark.parametrize(("priority", "bulk"), [(0, False), (None, False), (7, True)])
async def test_priority_above_0_is_bulk(priority: int | None, bulk: bool) -> None:
    unused: Any = None
    api = InferenceApi(unused, unused, unused, unused, Limits(inputs=10))
    data = RerankRequest(query="q", documents=["a"], priority=priority)

    call = await decode_documents(Request(data, unused, api), data.documents)
    assert bulk is call.bulk


# The fields that each peer documents. Those of `REFUSED` are refused, the others are applied.
FIELDS_OF = {
    "cohere v1": {
        "model",
        "query",
        "documents",
        "top_n",
        "rank_fields",
        "return_documents",
        "max_chunks_per_doc",
    },
    "cohere v2": {"model", "query", "documents", "top_n", "max_tokens_per_doc", "priority"},
    "jina": {
        *("model", "query", "documents", "top_n", "return_documents", "max_doc_length", "return_embeddings"),
        "truncation",
    },
    "voyage": {"model", "query", "documents", "top_k", "return_documents", "truncation"},
    "siliconflow": {
        *("model", "query", "documents", "top_n", "return_documents", "max_chunks_per_doc", "overlap_tokens"),
        "instruction",
    },
    "xinference": {
        *("model", "query", "documents", "top_n", "return_documents", "max_chunks_per_doc", "return_len"),
        "kwargs",
    },
}


@pytest.mark.parametrize("peer", FIELDS_OF)
def test_each_documented_field_is_applied_or_refused_by_name(peer: str) -> None:
    fields = {field.name for field in msgspec.structs.fields(RerankRequest)}

    assert not FIELDS_OF[peer] - fields


def test_each_field_of_the_body_belongs_to_a_peer() -> None:
    vllms = {field.name for field in msgspec.structs.fields(VllmOptions)} | {"max_tokens_per_query"}
    fields = {field.name for field in msgspec.structs.fields(RerankRequest)}

    assert fields - vllms == set().union(*FIELDS_OF.values()) - vllms


@pytest.mark.parametrize("field", REFUSED)
async def test_a_refused_field_is_named_with_the_way_out(boot: Boots, field: str) -> None:
    value = {"rank_fields": ["a"], "return_embeddings": True}.get(field, 5)
    message = (await post_json(boot, V1, BODY | {field: value}, 400))["message"]

    assert f"`{field}` is not supported: {REFUSED[field]}" == message


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"query": {"text": ""}}, "query"),
        ({"passages": []}, "passages"),
        ({"passages": ["red"]}, "passages"),
        ({"truncate": "MIDDLE"}, "truncate"),
    ],
)
async def test_nims_ranking_refuses_what_it_cannot_read(boot: Boots, change: Any, named: str) -> None:
    body = {"model": "cross", "query": {"text": "q"}, "passages": [{"text": "red"}]} | change
    reply = await post_json(boot, "/v1/ranking", body, 400)

    assert named in reply["error"]["message"]
