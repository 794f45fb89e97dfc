"""Upstreams of OpenAI's API and its relatives as callers see them: roles, reranks, keys, and a gateway."""

import base64
from typing import Any

import numpy as np
import pytest

from backends.openai.settings import ApiKind
from backends.openai.shapes import SHAPES
from gateway.tenants.keyring import key_digest
from tests.conftest import KEY, Boots
from tests.fakes.hooks import RERANKER
from tests.fakes.hosted_api import FakeHostedApi, chunk_vectors
from tests.fakes.openai import FIELDS, FakeOpenAI, scores_of
from tests.fakes.tei import FakeTei, score_of, vector_of
from tests.fakes.vllm import FakeVllm
from tests.pictures import encoded, noise
from tests.socket_gateway import socket_gateway

KINDS: tuple[ApiKind, ...] = ("cohere", "jina", "voyage")
DOCUMENTS = ["red", "green and blue", "cyan"]
INNER = f"""
upstreams: {{one: {{backend: tei, replicas: ["http://tei-0"]}}}}
models: {{bge: {{upstream: one}}}}
tenants: {{outer: {{keys: ["{key_digest(KEY)}"]}}}}
"""
COHERE = {"model": "m", "texts": ["a"], "embedding_types": ["float"]}


def config_of(settings: str) -> str:
    return f"upstreams: {{up: {{{settings}}}}}\nmodels: {{m: {{upstream: up}}}}\n"


def hosted(kind: ApiKind) -> str:
    """Return a config of one hosted API at the host `api`, with the base path of the real one."""
    path = "/v2" if kind == "cohere" else "/v1"
    return config_of(
        f'backend: {kind}, model: embed-1, replicas: ["http://api{path}"], api_key: secret-key-1'
    )


@pytest.mark.parametrize("kind", KINDS)
async def test_roles_of_every_dialect_reach_the_server(boot: Boots, kind: ApiKind) -> None:
    server, shape = FakeHostedApi(kind), SHAPES[kind]
    async with boot({"api": server}, hosted(kind)) as gateway:
        replies = [
            await gateway.post("/v2/embed", COHERE | {"input_type": "search_query"}),
            await gateway.post("/v1/embeddings", {"input": "a", "task": "retrieval.passage"}),
            await gateway.post("/v1/embeddings", {"input": "a"}),
        ]

    assert [200] * 3 == [reply.status_code for reply in replies]
    bodies = [body for path, body in server.requests if path.endswith(shape.embeddings)][-3:]
    words = [shape.input_type.get(name) for name in ("query", "document", "default")]
    assert words == [body.get(shape.type_field) for body in bodies]
    assert {"Bearer secret-key-1"} == {headers["authorization"] for headers in server.headers}
    np.testing.assert_allclose([vector_of("a")], replies[0].json()["embeddings"]["float"], rtol=1e-5)
    assert {"prompt_tokens": 3, "total_tokens": 3, "completion_tokens": 0} == replies[2].json()["usage"]


@pytest.mark.parametrize("kind", KINDS)
async def test_reranks_with_a_hosted_api(boot: Boots, kind: ApiKind) -> None:
    server = FakeHostedApi(kind, embeds=False, usage_of_rerank=True)
    async with boot({"api": server}, hosted(kind)) as gateway:
        body = {"model": "m", "query": "q", "documents": DOCUMENTS, "top_n": 2}
        reply = await gateway.post("/v1/rerank", body)
        refused = await gateway.post("/v1/embeddings", {"input": "a"})

    expected = scores_of({"query": "q", "documents": DOCUMENTS})[:2]
    results = reply.json()["results"]
    assert [item["index"] for item in expected] == [item["index"] for item in results]
    np.testing.assert_allclose(
        [item["relevance_score"] for item in expected],
        [item["relevance_score"] for item in results],
        rtol=1e-5,
    )
    assert {"top_n", "top_k"}.isdisjoint(server.requests[-1][1])
    assert 400 == refused.status_code


async def test_typed_model_does_not_rerank_by_cosine(boot: Boots) -> None:
    server = FakeOpenAI(fields=FIELDS | {"input_type"})
    types = "input_type: {query: search_query, document: search_document}"
    config = config_of(f'backend: openai, replicas: ["http://api"], {types}')
    async with boot({"api": server}, config) as gateway:
        before = len(server.requests)
        reply = await gateway.post("/v1/rerank", {"model": "m", "query": "q", "documents": DOCUMENTS})
        instructed = await gateway.post("/v1/embeddings", {"input": "a", "instruction": "find"})

    assert 400 == reply.status_code
    assert "name a reranker" in reply.json()["message"]
    assert 400 == instructed.status_code
    assert "its own prompt" in instructed.json()["error"]["message"]
    assert before == len(server.requests)


async def test_azure_receives_its_query_string_and_key(boot: Boots, caplog: pytest.LogCaptureFixture) -> None:
    server = FakeOpenAI(prefix="/openai/deployments/e", models=None)
    url = "http://azure/openai/deployments/e?api-version=2024-10-21"
    settings = f'backend: openai, replicas: ["{url}"], api_key: secret-key-1, api_key_header: api-key'
    async with boot({"azure": server}, config_of(settings)) as gateway:
        reply = await gateway.post("/v1/embeddings", {"input": "a"})
        server.hook = refuse_with_the_key
        failed = await gateway.post("/v1/embeddings", {"input": "a"})

    assert 200 == reply.status_code
    assert {b"api-version=2024-10-21"} == set(server.queries)
    assert {"secret-key-1"} == {headers["api-key"] for headers in server.headers}
    assert all("authorization" not in headers for headers in server.headers)
    assert 502 == failed.status_code
    assert "secret-key-1" not in failed.text + caplog.text


async def refuse_with_the_key(path: str, body: dict[str, Any]) -> tuple[int, bytes]:
    return 401, b'{"error": {"message": "Access denied due to invalid key secret-key-1"}}'


@pytest.mark.parametrize("does", ["embed", "rerank"])
async def test_gateway_behind_a_gateway(boot: Boots, does: str) -> None:
    replica = FakeTei(model_type=RERANKER) if does == "rerank" else FakeTei()
    async with socket_gateway(replica, INNER) as inner:
        url = f"http://127.0.0.1:{inner.port}"
        settings = f'backend: openai, replicas: ["{url}"], rerank: /v1/rerank, api_key: {KEY}'
        async with boot({}, config_of(settings), sockets=True) as gateway:
            embedded = await gateway.post("/v1/embeddings", {"input": DOCUMENTS})
            ranked = await gateway.post("/v1/rerank", {"model": "m", "query": "q", "documents": DOCUMENTS})

    scores = {item["index"]: item["relevance_score"] for item in ranked.json()["results"]}
    if does == "rerank":
        assert 400 == embedded.status_code
        assert {i: score_of("q", d) for i, d in enumerate(DOCUMENTS)} == pytest.approx(scores, abs=1e-6)
    else:
        vectors = [item["embedding"] for item in embedded.json()["data"]]
        np.testing.assert_allclose([vector_of(text) for text in DOCUMENTS], vectors, rtol=1e-5)
        cosines = {i: float(vector_of("q") @ vector_of(d)) for i, d in enumerate(DOCUMENTS)}
        assert cosines == pytest.approx(scores, abs=1e-6)


PICTURES = [
    f"data:image/png;base64,{base64.b64encode(encoded(noise(9, 7, seed))).decode()}" for seed in range(2)
]
MIXED = {"input": [{"image": PICTURES[0]}, "a b", {"image": PICTURES[1]}, "c"]}


def with_images(kind: ApiKind) -> str:
    model = "voyage-multimodal-3" if kind == "voyage" else "embed-1"
    return hosted(kind).replace("embed-1", model)


def seen(kind: ApiKind, picture: str) -> str:
    """Return the text of which a provider makes the vector of a picture."""
    return picture.partition(",")[2] if kind == "jina" else picture


@pytest.mark.parametrize("kind", KINDS)
async def test_pictures_reach_hosted_apis_in_their_own_forms(boot: Boots, kind: ApiKind) -> None:
    server = FakeHostedApi(kind, images=True)
    async with boot({"api": server}, with_images(kind)) as gateway:
        mixed = await gateway.post("/v1/embeddings", MIXED)
        texts = await gateway.post("/v1/embeddings", {"input": ["a b", "c"]})
        models = (await gateway.client.get("/v1/models")).json()["data"]

    assert 200 == mixed.status_code, mixed.text
    sources = [seen(kind, PICTURES[0]), "a b", seen(kind, PICTURES[1]), "c"]
    found = [item["embedding"] for item in mixed.json()["data"]]
    np.testing.assert_allclose([vector_of(source) for source in sources], found, atol=1e-6)
    np.testing.assert_allclose(
        [found[1], found[3]], [i["embedding"] for i in texts.json()["data"]], atol=1e-6
    )
    assert "embed_image" in models[0]["operations"]
    assert mixed.json()["usage"]["total_tokens"] >= 4


@pytest.mark.parametrize(("kind", "joins"), [("cohere", True), ("voyage", True), ("jina", False)])
async def test_texts_and_pictures_of_one_input_reach_apis_that_read_them(
    boot: Boots, kind: ApiKind, joins: bool
) -> None:
    content = [{"type": "text", "text": "a b"}, {"type": "image_url", "image_url": {"url": PICTURES[0]}}]
    body = {"messages": [{"role": "user", "content": content}]}
    async with boot({"api": FakeHostedApi(kind, images=True)}, with_images(kind)) as gateway:
        reply = await gateway.post("/v1/embeddings", body)
        templated = await gateway.post("/v1/embeddings", body | {"chat_template_kwargs": {"a": "b"}})

    assert (200 if joins else 400) == reply.status_code, reply.text
    if joins:
        (item,) = reply.json()["data"]
        np.testing.assert_allclose(vector_of(f"a b {PICTURES[0]}"), item["embedding"], atol=1e-6)
    else:
        assert "input 0 is more" in reply.text
    assert 400 == templated.status_code
    assert "chat_template_kwargs" in templated.text


@pytest.mark.parametrize("kind", KINDS)
async def test_hosted_models_of_texts_refuse_pictures(boot: Boots, kind: ApiKind) -> None:
    server = FakeHostedApi(kind)
    async with boot({"api": server}, hosted(kind)) as gateway:
        before = len(server.requests)
        reply = await gateway.post("/v1/embeddings", MIXED)

    assert 400 == reply.status_code
    assert "no model here can embed images" in reply.text
    assert before == len(server.requests)


@pytest.mark.parametrize("backend", ["jina", "vllm"])
async def test_a_gateway_behind_a_gateway_embeds_pictures(boot: Boots, backend: str) -> None:
    inner_config = INNER.replace("backend: tei", "backend: vllm").replace("http://tei-0", "http://vllm-0")
    async with socket_gateway(FakeVllm(images=True), inner_config) as inner:
        url = f"http://127.0.0.1:{inner.port}"
        settings = f'backend: {backend}, model: bge, replicas: ["{url}"], api_key: {KEY}'
        async with boot({}, config_of(settings), sockets=True) as gateway:
            reply = await gateway.post("/v1/embeddings", MIXED)

    assert 200 == reply.status_code, reply.text
    sources = [f"user: {PICTURES[0]}", "a b", f"user: {PICTURES[1]}", "c"]
    found = [item["embedding"] for item in reply.json()["data"]]
    np.testing.assert_allclose([vector_of(source) for source in sources], found, atol=1e-6)


CHUNKS = [["red", "green"], ["blue"]]
CONTEXT_MODELS: dict[ApiKind, str] = {
    "jina": "jina-embeddings-v3",
    "voyage": "voyage-context-3",
    "perplexity": "pplx-embed-context-v1-0.6b",
}


def contextual(kind: ApiKind) -> str:
    return hosted(kind).replace("embed-1", CONTEXT_MODELS[kind])


@pytest.mark.parametrize("kind", CONTEXT_MODELS)
async def test_documents_reach_the_apis_that_read_them(boot: Boots, kind: ApiKind) -> None:
    server = FakeHostedApi(kind)
    async with boot({"api": server}, contextual(kind)) as gateway:
        reply = await gateway.post("/v1/contextualizedembeddings", {"model": "m", "inputs": CHUNKS})
        late = await gateway.post("/v1/embeddings", {"input": CHUNKS[0], "late_chunking": True})
        plain = await gateway.post("/v1/embeddings", {"input": CHUNKS[0]})
        cut = await gateway.post(
            "/v1/contextualizedembeddings",
            {"inputs": [["a"]], "enable_auto_chunking": True, "input_type": "document"},
        )
        long = await gateway.post("/v1/contextualizedembeddings", {"inputs": [["a"], ["w " * 9] * 2]})

    # Perplexity's numbers have 8 bits.
    tolerance = 0.01 if kind == "perplexity" else 1e-6
    assert 200 == reply.status_code, reply.text
    for item, chunks in zip(reply.json()["data"], CHUNKS, strict=True):
        vectors = [each["embedding"] for each in item["data"]]
        np.testing.assert_allclose(chunk_vectors(chunks), vectors, atol=tolerance)
    assert 9 == reply.json()["usage"]["total_tokens"]
    found = [item["embedding"] for item in late.json()["data"]]
    np.testing.assert_allclose(chunk_vectors(CHUNKS[0]), found, atol=tolerance)
    found = [item["embedding"] for item in plain.json()["data"]]
    np.testing.assert_allclose([vector_of(text) for text in CHUNKS[0]], found, atol=tolerance)
    assert (400, "cuts no texts") == (cut.status_code, cut.json()["detail"][14:27])
    assert 400 == long.status_code
    assert long.json()["detail"].startswith("input 1: ")


async def test_a_hosted_model_without_context_refuses_documents(boot: Boots) -> None:
    async with boot({"api": FakeHostedApi("voyage")}, hosted("voyage")) as gateway:
        reply = await gateway.post("/v1/contextualizedembeddings", {"model": "m", "inputs": CHUNKS})

    assert (400, "model") == (reply.status_code, reply.json()["error"]["param"])


M0 = config_of('backend: jina, model: jina-reranker-m0, task: rerank, replicas: ["http://api/v1"]')
RANKED = [base64.b64encode(encoded(noise(9, 7, seed))).decode() for seed in (1, 2)]


async def test_jinas_reranker_scores_texts_and_images(boot: Boots) -> None:
    server = FakeHostedApi("jina")
    first, second = [{"image": f"data:image/png;base64,{picture}"} for picture in RANKED]
    body = {"documents": [{"text": "red"}, first, "cyan", second], "return_documents": False}
    async with boot({"api": server}, M0) as gateway:
        replies = [await gateway.post("/v1/rerank", body | {"query": query}) for query in ("q", first)]
        several = await gateway.post(
            "/v1/rerank", body | {"query": "q", "documents": [first | {"text": "a"}]}
        )
        (model,) = (await gateway.client.get("/v1/models")).json()["data"]

    sent = ["red", {"image": RANKED[0]}, "cyan", {"image": RANKED[1]}]
    assert [("q", sent), ({"image": RANKED[0]}, sent)] == [
        (asked["query"], asked["documents"]) for _, asked in server.requests[-2:]
    ]
    texts = ["red", RANKED[0], "cyan", RANKED[1]]
    for reply, query in zip(replies, ("q", RANKED[0]), strict=True):
        assert 200 == reply.status_code, reply.text
        found = {item["index"]: item["relevance_score"] for item in reply.json()["results"]}
        expected = {
            item["index"]: item["relevance_score"] for item in scores_of({"query": query, "documents": texts})
        }
        assert expected == pytest.approx(found, abs=1e-6)
        assert reply.json()["usage"]["total_tokens"] >= 4
    assert (400, True) == (several.status_code, "one text or one image" in several.text)
    assert {"rerank", "rerank_image"} <= set(model["operations"])


async def test_other_rerankers_of_jina_take_no_images(boot: Boots) -> None:
    server = FakeHostedApi("jina")
    body = {"query": "q", "documents": [{"image": f"data:image/png;base64,{RANKED[0]}"}]}
    async with boot({"api": server}, M0.replace("reranker-m0", "reranker-v3")) as gateway:
        asked = len(server.requests)
        reply = await gateway.post("/v1/rerank", body)

    assert 400 == reply.status_code
    assert asked == len(server.requests)
