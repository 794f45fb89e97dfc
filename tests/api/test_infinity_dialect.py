"""Infinity's endpoints below /infinity."""

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from backends.contract.vectors import sigmoid
from tests.conftest import Boots, posted
from tests.fakes.hooks import CLASSIFIER, LABELS
from tests.fakes.server import logit_of
from tests.fakes.tei import FakeTei, logits_of, vector_of
from tests.fakes.vllm import FakeVllm

CONFIG = """
upstreams:
  embedder: {backend: tei, replicas: ["http://embed"]}
  reranker: {backend: vllm, replicas: ["http://cross"]}
  classifier: {backend: tei, replicas: ["http://classes"]}
models:
  bge: {upstream: embedder}
  cross: {upstream: reranker}
  moods: {upstream: classifier}
defaults: {embed: bge, rerank: cross, classify: moods}
"""
TEXTS = ["red", "green and blue", "cyan", "pink", "grey"]
DIMENSIONS = [(0, 8), (4, 4), (8, 8)]


def fakes() -> dict[str, Any]:
    """Return an embedding model, a cross-encoder and a classifier."""
    return {
        "embed": FakeTei(),
        "cross": FakeVllm(task="classify"),
        "classes": FakeTei(model_type=CLASSIFIER),
    }


def assert_frame(body: dict[str, Any], kind: str, model: str, tokens: int) -> None:
    """Check the fields of a reply that are not its items."""
    assert (kind, model) == (body["object"], body["model"])
    assert {"prompt_tokens": tokens, "total_tokens": tokens} == body["usage"]
    assert body["id"].startswith("infinity-")
    assert isinstance(body["created"], int)


@pytest.mark.parametrize(("dimensions", "width"), DIMENSIONS)
@pytest.mark.parametrize("model", [{}, {"model": "bge"}, {"model": "default/not-specified"}])
@pytest.mark.parametrize("field", ["dimensions", "output_dimension"])
async def test_embeddings(
    boot: Boots, dimensions: int, width: int, model: dict[str, str], field: str
) -> None:
    async with boot(fakes(), CONFIG) as gateway:
        reply = await gateway.post("/infinity/embeddings", {"input": TEXTS, field: dimensions} | model)

    expected = np.array([vector_of(text)[:width] for text in TEXTS])
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    data = reply.json()["data"]
    np.testing.assert_allclose(expected, [item["embedding"] for item in data], rtol=1e-5)
    assert [(i, "embedding") for i in range(5)] == [(item["index"], item["object"]) for item in data]
    # Usage is in tokens. Infinity itself would count characters.
    assert_frame(reply.json(), "list", "bge", sum(len(text.split()) + 2 for text in TEXTS))


def order_of(scores: Sequence[float]) -> list[int]:
    """Return the indices, best first."""
    return sorted(range(len(scores)), key=lambda index: -scores[index])


@pytest.mark.parametrize("raw_scores", [False, True])
@pytest.mark.parametrize(("top_n", "count"), [(None, 5), (2, 2), (9, 5)])
@pytest.mark.parametrize("return_documents", [False, True])
async def test_rerank(
    boot: Boots, raw_scores: bool, top_n: int | None, count: int, return_documents: bool
) -> None:
    body = {"query": "q", "documents": TEXTS, "raw_scores": raw_scores, "top_n": top_n}
    async with boot(fakes(), CONFIG) as gateway:
        reply = await gateway.post("/infinity/rerank", body | {"return_documents": return_documents})

    logits = np.array([logit_of("q", text) for text in TEXTS], np.float32)
    scores = logits if raw_scores else sigmoid(logits)
    results = reply.json()["results"]
    order = order_of(scores.tolist())[:count]
    assert order == [result["index"] for result in results]
    np.testing.assert_allclose(scores[order], [result["relevance_score"] for result in results], rtol=1e-5)
    assert [TEXTS[i] if return_documents else None for i in order] == [
        result["document"] for result in results
    ]
    # The query, two special tokens and the separator of the pair.
    assert_frame(reply.json(), "rerank", "cross", sum(len(text.split()) + 4 for text in TEXTS))


async def test_infinitys_clients_read_the_reply_at_the_path_of_its_server(boot: Boots) -> None:
    body = {"model": "cross", "query": "q", "documents": TEXTS, "return_documents": False, "top_n": 2}
    async with boot(fakes(), CONFIG) as gateway:
        expected = await gateway.post("/infinity/rerank", body)
        found = await gateway.post("/rerank", body)

    assert "rerank" == found.json()["object"]
    # At its own path the field is null where there is no document.
    assert expected.json()["results"] == [{"document": None} | item for item in found.json()["results"]]


async def test_classify(boot: Boots) -> None:
    reply = await posted(boot(fakes(), CONFIG), "/infinity/classify", {"input": ["red", "blue"]})

    for text, row in zip(("red", "blue"), reply.json()["data"], strict=True):
        logits = logits_of((text,), len(LABELS))
        assert [LABELS[i] for i in order_of(logits)] == [label["label"] for label in row]
        assert 1.0 == pytest.approx(sum(label["score"] for label in row), rel=1e-5)
    assert_frame(reply.json(), "classify", "moods", 6)


async def test_classify_returns_raw_scores_on_request(boot: Boots) -> None:
    reply = await posted(boot(fakes(), CONFIG), "/infinity/classify", {"input": ["red"], "raw_scores": True})

    assert max(logits_of(("red",), 3)) == pytest.approx(reply.json()["data"][0][0]["score"], rel=1e-5)


async def test_models_list_the_capabilities_of_each(boot: Boots) -> None:
    async with boot(fakes(), CONFIG) as gateway:
        reply = await gateway.client.get("/infinity/models")

    models = {model["id"]: (model["backend"], model["capabilities"]) for model in reply.json()["data"]}
    assert {
        "bge": ("tei", ["embed", "rerank"]),
        "cross": ("vllm", ["rerank", "classify"]),
        "moods": ("tei", ["classify"]),
    } == models
    assert {
        "queue_fraction": 0.0,
        "queue_absolute": 0,
        "results_pending": 0,
        "batch_size": 4,
    } == reply.json()["data"][0]["stats"]


async def test_health_needs_no_key(boot: Boots) -> None:
    async with boot(fakes(), CONFIG) as gateway:
        reply = await gateway.client.get("/infinity/health", headers={"authorization": ""})

    assert 200 == reply.status_code
    assert 1_700_000_000 < reply.json()["unix"]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("embeddings", {"input": []}, "input"),
        ("embeddings", {"input": [""]}, "input"),
        ("embeddings", {"input": [1, 2]}, "input"),
        ("embeddings", {"input": ["a"], "dimensions": None}, "dimensions"),
        ("embeddings", {"input": ["a"], "dimensions": -1}, "dimensions"),
        ("embeddings", {"input": ["a"], "dimensions": 2, "output_dimension": 3}, "output_dimension"),
        ("embeddings", {"input": ["a"], "modality": "audio"}, "input"),
        ("embeddings", {"input": ["a"], "modality": "smell"}, "modality"),
        ("embeddings", {"input": ["a"] * 2049}, "input"),
        ("rerank", {"query": "q", "documents": []}, "documents"),
        ("rerank", {"query": "", "documents": ["a"]}, "query"),
        ("rerank", {"query": "q", "documents": [{"text": "a"}]}, "documents"),
        ("rerank", {"query": "q", "documents": ["a"], "top_n": 0}, "top_n"),
        ("classify", {"input": "a"}, "input"),
        ("classify", {"input": [["a", "b"]]}, "input"),
    ],
    ids=str,
)
async def test_rejects_invalid_bodies_with_422_and_the_field(
    boot: Boots, path: str, body: Any, field: str
) -> None:
    reply = await posted(boot(fakes(), CONFIG), f"/infinity/{path}", body)

    assert 422 == reply.status_code, reply.text
    (problem,) = reply.json()["detail"]
    assert ["body", field] == problem["loc"]


async def test_rejects_a_model_of_another_kind_and_a_wrong_key(boot: Boots) -> None:
    async with boot(fakes(), CONFIG) as gateway:
        embedder = await gateway.post("/infinity/classify", {"input": ["a"], "model": "bge"})
        gateway.client.headers["authorization"] = "Bearer wrong"
        wrong_key = await gateway.post("/infinity/embeddings", {"input": ["a"]})

    assert (400, 400) == (embedder.status_code, embedder.json()["error"]["code"])
    assert "does not classify" in embedder.json()["error"]["message"]
    assert (401, str) == (wrong_key.status_code, type(wrong_key.json()["detail"]))


LATE = """
upstreams: {late: {backend: vllm, replicas: ["http://late"]}}
models: {colbert: {upstream: late}}
"""


async def test_a_model_of_late_interaction_returns_a_vector_for_each_token(boot: Boots) -> None:
    body = {"input": ["a b", "c"], "model": "colbert"}
    async with boot({"late": FakeVllm(task="token_embed")}, LATE) as gateway:
        reply = await gateway.post("/infinity/embeddings", body)
        packed = await gateway.post("/infinity/embeddings", body | {"encoding_format": "base64"})
        cut = await gateway.post("/infinity/embeddings", body | {"dimensions": 4})
        (listed,) = (await gateway.client.get("/infinity/models")).json()["data"]

    matrices = [np.array(item["embedding"], np.float32) for item in reply.json()["data"]]
    assert [4, 3] == [len(rows) for rows in matrices]
    for item, rows in zip(packed.json()["data"], matrices, strict=True):
        np.testing.assert_array_equal(rows.ravel(), np.frombuffer(base64.b64decode(item["embedding"]), "<f4"))
    for item, rows in zip(cut.json()["data"], matrices, strict=True):
        expected = rows[:, :4] / np.linalg.norm(rows[:, :4], axis=1, keepdims=True)
        np.testing.assert_allclose(expected, item["embedding"], rtol=1e-5)
    assert "embed" in listed["capabilities"]
