"""RedisVL, mem0, Graphiti, LightRAG and Weaviate's client, by the lines of docs/connect*.md."""

import asyncio
import json

import pytest
from lightrag.llm.openai import openai_embed
from lightrag.rerank import cohere_rerank
from weaviate.classes.config import Configure

from tests.clients.conftest import Gateway, documented, run_documented

WIDTH = 384
TEXTS = ["an apple", "the sea"]


def test_redisvl_embeds_and_ranks(gateway: Gateway) -> None:
    made = run_documented(gateway, "connect-databases", "RedisVL")
    vectorizer = made["vectorizer"]

    assert WIDTH == vectorizer.dims
    assert [WIDTH] * 2 == [len(row) for row in vectorizer.embed_many(TEXTS)]
    found, scores = made["reranker"].rank("fruit", TEXTS)
    assert (set(TEXTS), 2) == (set(found), len(scores))


def test_mem0_embeds_for_adding_and_for_searching(gateway: Gateway) -> None:
    embeddings = run_documented(gateway, "connect-libraries", "mem0")["embeddings"]
    added, searched = (embeddings.embed("an\napple", action) for action in ("add", "search"))

    assert WIDTH == len(added)
    assert added == pytest.approx(searched, abs=1e-3)


def test_graphiti_embeds_one_text_and_several(gateway: Gateway) -> None:
    embedder = run_documented(gateway, "connect-libraries", "Graphiti")["embedder"]

    async def both() -> tuple[list[float], list[list[float]]]:
        return await embedder.create(TEXTS[0]), await embedder.create_batch(TEXTS)

    one, several = asyncio.run(both())
    assert [WIDTH] * 3 == [len(row) for row in (one, *several)]
    assert one == pytest.approx(several[0], abs=1e-2)


def test_lightrag_embeds_and_ranks_by_its_variables(gateway: Gateway) -> None:
    lines = documented(gateway, "connect-apps", "LightRAG", "text").split()
    settings = dict(line.split("=", 1) for line in lines)
    embedding = {
        "model": settings["EMBEDDING_MODEL"],
        "base_url": settings["EMBEDDING_BINDING_HOST"],
        "api_key": settings["EMBEDDING_BINDING_API_KEY"],
    }
    ranking = {
        "model": settings["RERANK_MODEL"],
        "base_url": settings["RERANK_BINDING_HOST"],
        "api_key": settings["RERANK_BINDING_API_KEY"],
    }

    vectors = asyncio.run(openai_embed.func(TEXTS, **embedding))
    ranks = asyncio.run(cohere_rerank("fruit", TEXTS, **ranking))
    assert (2, int(settings["EMBEDDING_DIM"])) == vectors.shape
    assert {0, 1} == {item["index"] for item in ranks}


def test_weaviates_client_writes_the_documented_addresses(gateway: Gateway) -> None:
    block = documented(gateway, "connect-databases", "Weaviate")
    vectors = Configure.Vectors.text2vec_openai(base_url=gateway.url, model=gateway.model)
    reranker = Configure.Reranker.cohere(base_url=gateway.url, model=gateway.cross)

    assert f'base_url="{gateway.url}", model="{gateway.model}"' in block
    for made, model in ((vectors.vectorizer, gateway.model), (reranker, gateway.cross)):
        written = json.loads(made.model_dump_json())
        assert (model, f"{gateway.url}/") == (written["model"], written["baseURL"])
