"""Weaviate's containers: the requests of its Go modules, and replies read by the modules' rules."""

import base64
from typing import Any

import httpx
import numpy as np
import pytest

from gateway import __version__
from tests.api.test_picture_dialects import FIRST, PICTURES, SECOND, seen_by
from tests.conftest import CONFIG, KEY, Boots, posted
from tests.fakes.hooks import RERANKER
from tests.fakes.hooks import embedder_and_reranker as fakes
from tests.fakes.tei import FakeTei, vector_of
from tests.fakes.vllm import FakeVllm

# As Go's client makes it of http://:KEY@gateway.
USERINFO = {"authorization": "Basic " + base64.b64encode(f":{KEY}".encode()).decode()}
NO_KEY = {"authorization": ""}
# What the struct of the module writes into each request.
EMPTY = {"dims": 0, "vector": None, "error": ""}


def vector_in(reply: httpx.Response) -> list[float]:
    """Return the vector of a reply, by the rules of text2vec-transformers: JSON first, then the status."""
    body = reply.json()
    if reply.status_code != 200:
        raise RuntimeError(f"fail with status {reply.status_code}: {body.get('error', '')}")
    assert body["dims"] == body["dim"] == len(body["vector"])
    return body["vector"]


@pytest.mark.parametrize("path", ["/vectors", "/vectors/", "/models/org/bge/vectors"])
@pytest.mark.parametrize("task", ["query", "passage"])
async def test_one_text_with_the_key_in_the_address(boot: Boots, path: str, task: str) -> None:
    body = {"text": "red", **EMPTY, "config": {"pooling_strategy": "masked_mean", "task_type": task}}
    async with boot(fakes()) as gateway:
        reply = await gateway.client.post(path, json=body, headers=USERINFO)

    assert "red" == reply.json()["text"]
    np.testing.assert_allclose(vector_of("red"), vector_in(reply), rtol=1e-6)


async def test_texts_of_the_batch_form(boot: Boots) -> None:
    texts = ["red", "green and blue", "red"]
    reply = await posted(boot(fakes()), "/vectors", {"texts": texts, "config": {"task_type": "passage"}})

    body = reply.json()
    assert {"vectors", "dims"} == body.keys()
    assert len(body["vectors"][0]) == body["dims"]
    np.testing.assert_allclose([vector_of(text) for text in texts], body["vectors"], rtol=1e-6)


async def test_tasks_select_prompts_and_dimensions_cut(boot: Boots) -> None:
    config = CONFIG.replace("bge: {", 'bge: {prompts: {query: "Q: ", passage: "P: "}, ', 1)
    async with boot(fakes(), config) as gateway:
        replies = {
            task: await gateway.post(
                "/vectors", {"text": "red", **EMPTY, "config": {"task_type": task, "dimensions": 4}}
            )
            for task in ("query", "passage")
        }

    for task, prompt in (("query", "Q: "), ("passage", "P: ")):
        cut = np.array(vector_of(f"{prompt}red")[:4])
        np.testing.assert_allclose(cut / np.linalg.norm(cut), vector_in(replies[task]), rtol=1e-5)


@pytest.mark.parametrize(("pooling", "noted"), [("masked_mean", True), ("cls", False)])
async def test_another_pooling_than_the_models_own_is_noted(boot: Boots, pooling: str, noted: bool) -> None:
    servers = fakes() | {"tei-0": FakeTei(model_type={"embedding": {"pooling": "cls"}})}
    body = {"text": "red", **EMPTY, "config": {"pooling_strategy": pooling}, "other": 1}
    async with boot(servers) as gateway:
        reply = await gateway.post("/vectors", body)
    async with boot(servers, f"{CONFIG}limits: {{unknown_fields: refuse}}\n") as gateway:
        strict = await gateway.post("/vectors", {"text": "red", "config": {"pooling_strategy": pooling}})

    expected = "other, config.pooling_strategy" if noted else "other"
    assert expected == reply.headers["x-ignored-fields"]
    assert (400 if noted else 200) == strict.status_code
    assert not noted or "pooling_strategy" in strict.json()["error"]


async def test_texts_and_pictures_get_vectors_of_their_kind(boot: Boots) -> None:
    config = 'upstreams: {one: {backend: vllm, replicas: ["http://one"]}}\nmodels: {clip: {upstream: one}}\n'
    body = {"texts": ["a b"], "images": [source.partition(",")[2] for source in PICTURES]}
    async with boot({"one": FakeVllm(images=True)}, config) as gateway:
        both = (await gateway.post("/vectorize", body)).json()
        texts = (await gateway.post("/vectorize", {"texts": ["a b"]})).json()
        images = (await gateway.post("/models/clip/vectorize", {"images": body["images"][:1]})).json()

    assert {"textVectors", "imageVectors"} == both.keys() == texts.keys() == images.keys()
    np.testing.assert_allclose([vector_of("a b")], both["textVectors"], rtol=1e-5)
    seen = [vector_of(seen_by("vllm", source)) for source in (FIRST, SECOND)]
    np.testing.assert_allclose(seen, both["imageVectors"], rtol=1e-5)
    np.testing.assert_allclose(both["textVectors"], texts["textVectors"], rtol=1e-5)
    np.testing.assert_allclose(both["imageVectors"][:1], images["imageVectors"], rtol=1e-5)
    assert [] == texts["imageVectors"] == images["textVectors"]


@pytest.mark.parametrize("path", ["/rerank", "/models/cross/rerank"])
async def test_rerank_repeats_each_document_with_its_score(boot: Boots, path: str) -> None:
    documents = ["panda", "bamboo forest", "", "a panda eats bamboo"]
    async with boot(fakes()) as gateway:
        ranked = await gateway.client.post(
            path, json={"query": "panda", "documents": documents, "property": ""}, headers=USERINFO
        )
        known = await gateway.post(
            path, {"query": "panda", "documents": documents, "return_documents": False}
        )
        single = await gateway.post(path, {"query": "panda", "property": documents[1]})

    scores = {item["index"]: item["relevance_score"] for item in known.json()["results"]}
    expected = [{"document": text, "score": scores[index]} for index, text in enumerate(documents)]
    assert {"query": "panda", "scores": expected} == ranked.json()
    assert {"query": "panda", "property": documents[1], "score": scores[1]} == single.json()


@pytest.mark.parametrize(
    ("path", "body", "status", "reason"),
    [
        ("/vectors", {"text": "", **EMPTY}, 400, "`text`"),
        ("/vectors", {**EMPTY}, 400, "`text`"),
        ("/vectors", {"text": "a", "texts": ["b"]}, 400, "one of them"),
        ("/vectors", {"texts": []}, 400, "`texts`"),
        ("/vectors", {"text": "a", "config": {"pooling_strategy": "max"}}, 400, "cls, masked_mean"),
        ("/vectors", {"text": "a", "config": {"dimensions": 99_999}}, 400, "dimensions"),
        ("/models/no/vectors", {"text": "a", "config": {"pooling_strategy": "cls"}}, 404, "'no'"),
        ("/models/cross/vectors", {"text": "a"}, 400, "does not embed"),
        ("/vectorize", {}, 400, "`texts`"),
        ("/vectorize", {"texts": ["a", ""]}, 400, "`texts` 1"),
        ("/vectorize", {"depth": ["a"]}, 400, "`depth`"),
        ("/vectorize", {"images": ["§"]}, 400, "base64"),
        ("/vectorize", {"images": [FIRST]}, 400, "images"),
        ("/rerank", {"query": "", "documents": ["a"], "property": ""}, 400, "`query`"),
        ("/rerank", {"query": "q", "documents": [], "property": ""}, 400, "`documents`"),
        ("/rerank", {"query": "q", "documents": [{"text": "a"}], "property": ""}, 400, "`documents`"),
        ("/rerank", {"query": "q", "texts": ["a"], "property": ""}, 400, "`texts`"),
        ("/rerank", {"query": "q", "documents": ["a"], "property": "", "top_n": 1}, 400, "`top_n`"),
        ("/rerank", {"query": "q", "documents": ["a"], "property": 1}, 400, "property"),
    ],
)
async def test_errors_are_json_with_one_sentence(
    boot: Boots, path: str, body: dict[str, Any], status: int, reason: str
) -> None:
    reply = await posted(boot(fakes()), path, body)

    assert status == reply.status_code, reply.text
    assert {"error", "kind"} == reply.json().keys()
    assert reason in reply.json()["error"]


@pytest.mark.parametrize("path", ["/vectors", "/vectorize", "/models/bge/vectors"])
async def test_without_a_key_nothing_is_computed(boot: Boots, path: str) -> None:
    async with boot(fakes()) as gateway:
        reply = await gateway.client.post(path, json={"text": "a", "texts": ["a"]}, headers=NO_KEY)

    assert 401 == reply.status_code
    assert "key" in reply.json()["error"]


@pytest.mark.parametrize("prefix", ["", "/models/bge", "/models/org/bge"])
async def test_readiness_and_facts_need_no_key(boot: Boots, prefix: str) -> None:
    async with boot(fakes()) as gateway:
        replies = {
            path: await gateway.client.get(prefix + path, headers=NO_KEY)
            for path in ("/.well-known/ready", "/.well-known/live", "/meta")
        }

    assert [200, 200, 200] == [reply.status_code for reply in replies.values()]
    assert b"" == replies["/.well-known/ready"].content
    expected = {"version": __version__} | ({"model": prefix.removeprefix("/models/")} if prefix else {})
    assert expected == replies["/meta"].json()


async def test_a_model_without_a_replica_is_not_ready(boot: Boots) -> None:
    servers = {"rerank-0": FakeTei(model_type=RERANKER)}
    async with boot(servers, wait=False) as gateway:
        await gateway.client.get("/readyz")
        known = await gateway.client.get("/models/bge/.well-known/ready", headers=NO_KEY)
        unknown = await gateway.client.get("/models/no/.well-known/ready", headers=NO_KEY)
        facts = await gateway.client.get("/models/no/meta", headers=NO_KEY)

    assert [503, 404, 404] == [reply.status_code for reply in (known, unknown, facts)]
    assert {"error", "kind"} == known.json().keys() == unknown.json().keys() == facts.json().keys()
