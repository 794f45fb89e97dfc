"""Cohere's and Jina's rerank: /v1/rerank, /v2/rerank and /rerank with documents."""

import json
from typing import Any

import numpy as np
import pytest

from gateway.api.dialects.rerank import NOT_CUT, RerankRequest, decode_documents
from gateway.api.server.inference_api import InferenceApi
from tests.conftest import CONFIG, Boots
from tests.fakes.hooks import RERANKER, respond_with, tei_with_hook
from tests.fakes.tei import FakeTei, score_of, vector_of

V1, V2, SHARED = "/v1/rerank", "/v2/rerank", "/rerank"
TEXTS = ["red", "green", "blue", "", "cyan", "pink"]
ORDER = sorted(range(len(TEXTS)), key=lambda i: -score_of("q", TEXTS[i]))
BODY = {"query": "q", "documents": TEXTS}


def fakes() -> dict[str, FakeTei]:
    """Return an embedding model and a reranker."""
    return {"tei-0": FakeTei(), "rerank-0": FakeTei(model_type=RERANKER)}


async def post_json(boot: Boots, path: str, body: Any, status: int = 200) -> Any:
    """Return the JSON of one POST, after a check of its status."""
    async with boot(fakes()) as gateway:
        reply = await gateway.post(path, body)
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


@pytest.mark.parametrize("path", [V1, SHARED])
async def test_v1_reply_has_the_fields_that_coheres_and_jinas_clients_read(boot: Boots, path: str) -> None:
    reply = await post_json(boot, path, BODY | {"model": "cross"})

    assert {"id", "object", "model", "results", "usage", "meta"} == reply.keys()
    assert ("list", "cross") == (reply["object"], reply["model"])
    assert reply["usage"]["total_tokens"] == reply["usage"]["prompt_tokens"] > 0
    assert {"search_units": 1} == reply["meta"]["billed_units"]
    assert all({"index", "relevance_score"} == result.keys() for result in reply["results"])


async def test_v2_reply_has_only_the_fields_that_coheres_clients_read(boot: Boots) -> None:
    reply = await post_json(boot, V2, BODY | {"return_documents": True})

    assert {"id", "results", "meta"} == reply.keys()
    assert "2" == reply["meta"]["api_version"]["version"]
    assert all({"index", "relevance_score"} == result.keys() for result in reply["results"])


@pytest.mark.parametrize(("documents", "units"), [(1, 1), (100, 1), (101, 2), (250, 3)])
async def test_a_search_unit_is_a_query_with_a_hundred_documents(
    boot: Boots, documents: int, units: int
) -> None:
    reply = await post_json(boot, V2, {"query": "q", "documents": ["a"] * documents})

    assert units == reply["meta"]["billed_units"]["search_units"]


@pytest.mark.parametrize("path", [V1, SHARED])
async def test_returns_documents_on_request(boot: Boots, path: str) -> None:
    documents = [{"text": text, "title": "ignored"} if i % 2 else text for i, text in enumerate(TEXTS)]
    reply = await post_json(boot, path, {"query": "q", "documents": documents, "return_documents": True})

    assert ORDER == [result["index"] for result in reply["results"]]
    assert all({"text": TEXTS[result["index"]]} == result["document"] for result in reply["results"])


@pytest.mark.parametrize("path", [V1, V2, SHARED])
@pytest.mark.parametrize("top_n", [None, 1, 3, 6, 100])
async def test_top_n_limits_the_results(boot: Boots, path: str, top_n: int | None) -> None:
    reply = await post_json(boot, path, BODY | {"top_n": top_n})

    assert ORDER[:top_n] == [result["index"] for result in reply["results"]]


@pytest.mark.parametrize(("path", "status"), [(V1, 200), (SHARED, 200), (V2, 400)])
async def test_top_n_0_returns_all_for_vllm_and_is_rejected_for_cohere(
    boot: Boots, path: str, status: int
) -> None:
    reply = await post_json(boot, path, BODY | {"top_n": 0}, status)

    assert "top_n" in reply["message"] if status == 400 else len(TEXTS) == len(reply["results"])


@pytest.mark.parametrize("path", [V1, V2, SHARED])
async def test_equal_scores_keep_the_requests_order(boot: Boots, path: str) -> None:
    ranks = [{"index": i, "score": score} for i, score in enumerate([0.5, 0.25, 0.5, 0.25])]
    server = tei_with_hook(respond_with(200, json.dumps(ranks).encode()), model_type=RERANKER)
    async with boot({"rerank-0": server}) as gateway:
        reply = await gateway.post(path, {"query": "q", "documents": ["a", "b", "c", "d"]})

    assert [0, 2, 1, 3] == [result["index"] for result in reply.json()["results"]]


async def test_an_embedding_model_reranks_by_cosine(boot: Boots) -> None:
    reply = await post_json(boot, V2, {"query": "q", "documents": ["a", "b", "c"], "model": "bge"})

    cosines = {i: float(vector_of("q") @ vector_of(text)) for i, text in enumerate("abc")}
    assert cosines == pytest.approx(
        {result["index"]: result["relevance_score"] for result in reply["results"]}, abs=1e-6
    )


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
async def test_warns_if_max_tokens_per_doc_would_cut_a_document(
    boot: Boots, allowed: int | None, warned: bool
) -> None:
    body = {"query": "q", "documents": ["a", "one two three"], "max_tokens_per_doc": allowed}

    warnings = (await post_json(boot, V2, body))["meta"].get("warnings")
    assert ([NOT_CUT] if warned else None) == warnings


@pytest.mark.parametrize("path", [V1, V2, SHARED])
@pytest.mark.parametrize(
    "wrong",
    [
        {"query": ""},
        {"query": 5},
        {"query": None},
        {"documents": []},
        {"documents": "a"},
        {"documents": None},
        {"documents": [5]},
        {"documents": [{"image": "https://example.org/a.png"}]},
        {"documents": [{"title": "a"}]},
        {"top_n": -1},
        {"top_n": "3"},
        {"rank_fields": ["text"]},
        {"max_chunks_per_doc": 10},
        {"return_embeddings": True},
        {"max_tokens_per_doc": -1},
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
def test_priority_above_0_is_bulk(priority: int | None, bulk: bool) -> None:
    unused: Any = None
    api = InferenceApi(unused, unused, 10)
    data = RerankRequest(query="q", documents=["a"], priority=priority)

    assert bulk is decode_documents(data, data.documents, None, api).bulk
