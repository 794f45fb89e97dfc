"""Requests of databases and applications that do not run here, and their rules for a reply.

Each row is what the source of a product sends, with the address, key and model of docs/connect*.md, and how
it reads the reply. Qdrant and Weaviate have tests of their own.
"""

import base64
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.conftest import CONFIG, KEY, Boots
from tests.fakes.tei import FakeTei, score_of, vector_of

ROOT = Path(__file__).parents[2]
TEXTS = ["an apple", "the sea"]
QUERY = "fruit"
PAGES = sorted((ROOT / "docs").glob("connect*.md"))
Read = Callable[[Any], Any]


class Replay(NamedTuple):
    """One request of a product. read: returns the vectors, or the scores in the order of the documents."""

    product: str
    path: str
    body: dict[str, Any]
    read: Read
    headers: Mapping[str, str] = MappingProxyType({"authorization": f"Bearer {KEY}"})


def by_position(reply: Any) -> list[list[float]]:
    return [_floats(item["embedding"]) for item in reply["data"]]


def by_index(reply: Any) -> list[list[float]]:
    return [_floats(item["embedding"]) for item in sorted(reply["data"], key=lambda item: item["index"])]


def with_usage(reply: Any) -> list[tuple[float, ...]]:
    assert reply["usage"]["total_tokens"] > 0
    assert "list" == reply["object"]
    assert {"embedding"} == {item["object"] for item in reply["data"]}
    return decoded(reply)


def decoded(reply: Any) -> list[tuple[float, ...]]:
    """Read base64 only, as Vespa, MongoDB and Roo Code do."""
    raw = [base64.b64decode(item["embedding"], validate=True) for item in reply["data"]]
    return [struct.unpack(f"<{len(row) // 4}f", row) for row in raw]


def rows(reply: Any) -> list[list[float]]:
    assert isinstance(reply, list)
    return [_floats(row) for row in reply]


def results(reply: Any) -> list[float]:
    return _scores(reply["results"], "relevance_score")


def descending(reply: Any) -> list[float]:
    found = [item["relevance_score"] for item in reply["results"]]
    assert sorted(found, reverse=True) == found
    assert reply["meta"]["tokens"]["input_tokens"] > 0
    return results(reply)


def with_texts(reply: Any) -> list[float]:
    assert all(TEXTS[item["index"]] == item["document"]["text"] for item in reply["results"])
    return results(reply)


def voyages(reply: Any) -> list[float]:
    return _scores(reply["data"], "relevance_score")


def teis(reply: Any) -> list[float]:
    return _scores(reply, "score")


def teis_with_texts(reply: Any) -> list[float]:
    assert all(TEXTS[item["index"]] == item["text"] for item in reply)
    return teis(reply)


EMBEDDED = {"model": "bge", "input": TEXTS}
RANKED = {"model": "cross", "query": QUERY, "documents": TEXTS}
TEI_RANKED = {"query": QUERY, "texts": TEXTS}
BOTH_KEYS = {"authorization": f"Bearer {KEY}", "api-key": KEY}
FLOAT = {"encoding_format": "float"}
VOYAGE_IN_MONGOT = {
    "input_type": "document",
    "encoding_format": "base64",
    "truncation": True,
    "output_dimension": 8,
    "output_dtype": "float",
}
REPLAYS = [
    Replay("Weaviate text2vec-openai", "/v1/embeddings", EMBEDDED, by_position),
    Replay("Milvus OpenAI", "/v1/embeddings", EMBEDDED | FLOAT, by_index),
    Replay("Milvus TEI", "/embed", {"inputs": TEXTS, "truncate": True}, rows),
    Replay("Milvus TEI rerank", "/rerank", TEI_RANKED, teis),
    Replay("Milvus vLLM", "/v1/embeddings", {"input": TEXTS} | FLOAT, by_index),
    Replay("Milvus vLLM rerank", "/rerank", {"query": QUERY, "documents": TEXTS}, results),
    Replay("Milvus Voyage rerank", "/v1/rerank", RANKED, voyages),
    Replay("Milvus Cohere rerank", "/v1/rerank", RANKED, results, {"authorization": f"bearer {KEY}"}),
    Replay("Elasticsearch openai", "/v1/embeddings", EMBEDDED | {"user": "es"}, by_position),
    Replay("Elasticsearch hugging_face", "/models/bge/embed", {"inputs": TEXTS}, rows),
    Replay("Elasticsearch custom", "/v1/rerank", RANKED, results),
    Replay("OpenSearch openai", "/v1/embeddings", EMBEDDED, by_position),
    Replay("OpenSearch cohere", "/v1/rerank", RANKED | {"top_n": 2}, results),
    Replay("Vespa", "/v1/embeddings", EMBEDDED | {"dimensions": 8, "encoding_format": "base64"}, decoded),
    Replay("MongoDB", "/v1/embeddings", EMBEDDED | VOYAGE_IN_MONGOT, with_usage),
    Replay("pgai", "/v1/embeddings", EMBEDDED | FLOAT | {"user": "pgai", "dimensions": 8}, by_position),
    Replay("Typesense", "/v1/embeddings", EMBEDDED, by_position),
    Replay("Meilisearch rest", "/v1/embeddings", EMBEDDED, by_position),
    Replay("Dify", "/v1/embeddings", EMBEDDED | FLOAT, by_position),
    Replay("Dify rerank", "/v1/rerank", RANKED | {"top_n": 2}, results),
    Replay("Dify TEI", "/models/bge/v1/embeddings", {"input": TEXTS}, by_position),
    Replay("Dify TEI rerank", "/models/cross/rerank", TEI_RANKED | {"return_text": True}, teis_with_texts),
    Replay("RAGFlow", "/v1/embeddings", EMBEDDED | FLOAT | {"drop_params": True}, by_index),
    Replay("RAGFlow rerank", "/v1/rerank", RANKED | {"top_n": 2}, results),
    Replay(
        "RAGFlow Xinference",
        "/v1/rerank",
        RANKED | {"return_documents": "true", "return_len": "true"},
        with_texts,
    ),
    Replay("RAGFlow HuggingFace", "/models/bge/embed", {"inputs": TEXTS}, rows),
    Replay("Open WebUI", "/v1/embeddings", EMBEDDED | {"input_prefix": "query: "}, by_position),
    Replay("Open WebUI rerank", "/v1/rerank", RANKED | {"top_n": 2}, results),
    Replay("AnythingLLM", "/v1/embeddings", EMBEDDED | {"encoding_format": "base64"}, decoded),
    Replay("n8n rerank", "/v1/rerank", RANKED | {"top_n": 2}, results),
    Replay("FastGPT", "/v1/embeddings", EMBEDDED | FLOAT, by_position),
    Replay("FastGPT rerank", "/v1/rerank", RANKED, descending),
    Replay("MaxKB SILICONFLOW", "/v1/rerank", RANKED | {"return_documents": True}, with_texts),
    Replay("Onyx", "/v1/embeddings", EMBEDDED, by_position),
    Replay("Onyx rerank", "/v1/rerank", RANKED, results),
    Replay("Khoj", "/v1/embeddings", EMBEDDED | FLOAT, by_position),
    Replay("Continue", "/v1/embeddings", EMBEDDED, by_position, BOTH_KEYS),
    Replay("Continue rerank", "/v1/rerank", RANKED, results),
    Replay(
        "Continue TEI rerank",
        "/models/cross/rerank",
        TEI_RANKED
        | {"return_text": False, "raw_scores": False, "truncation_direction": "Right", "truncate": True},
        teis,
    ),
    Replay("Roo Code", "/v1/embeddings", EMBEDDED | {"encoding_format": "base64"}, decoded, BOTH_KEYS),
    Replay("Cognee", "/v1/embeddings", EMBEDDED | FLOAT | {"input_type": "query"}, by_position),
    Replay("LightRAG rerank", "/v1/rerank", RANKED | {"top_n": 2, "return_documents": False}, results),
    Replay("LangChain4j rerank", "/v1/rerank", RANKED, results),
    Replay("Spring AI", "/v1/embeddings", EMBEDDED, by_position),
]


@pytest.mark.parametrize("replay", REPLAYS, ids=lambda replay: replay.product)
async def test_a_product_reads_vectors_and_scores_of_its_request(boot: Boots, replay: Replay) -> None:
    async with boot(_servers(), CONFIG) as gateway:
        reply = await gateway.client.post(replay.path, json=replay.body, headers=replay.headers)

    assert 200 == reply.status_code, reply.text
    found = replay.read(reply.json())
    if "query" in replay.body:
        assert [score_of(QUERY, text) for text in TEXTS] == pytest.approx(found, abs=1e-6)
    else:
        np.testing.assert_allclose(found, [vector_of(text) for text in TEXTS], atol=1e-6)


async def test_dify_checks_a_server_of_tei_by_its_info(boot: Boots) -> None:
    async with boot(_servers(), CONFIG) as gateway:
        headers = {"authorization": f"Bearer {KEY}"}
        infos = [
            (await gateway.client.get(f"/models/{name}/info", headers=headers)).json()
            for name in ("bge", "cross")
        ]

    assert [{"embedding"}, {"reranker"}] == [info["model_type"].keys() for info in infos]
    assert all(info["max_input_length"] and info["max_client_batch_size"] for info in infos)


async def test_a_key_with_an_empty_value_is_no_key(boot: Boots) -> None:
    async with boot(_servers(), CONFIG) as gateway:
        reply = await gateway.client.post("/v1/embeddings", json=EMBEDDED, headers={"authorization": ""})

    assert 401 == reply.status_code
    assert "no API key" in reply.json()["error"]["message"]


async def test_elasticsearch_and_cognee_know_a_text_that_is_too_long(boot: Boots) -> None:
    body = {"model": "strict", "input": ["w " * 200]}
    async with boot(_servers(), CONFIG) as gateway:
        headers = {"authorization": f"Bearer {KEY}"}
        reply = await gateway.client.post("/v1/embeddings", json=body, headers=headers)

    message = reply.json()["error"]["message"]
    assert 400 == reply.status_code
    assert "Please reduce your prompt; or completion length." in message
    assert "maximum context length" in message


async def test_every_address_of_the_pages_is_served(boot: Boots) -> None:
    text = "".join(page.read_text() for page in PAGES)
    named = set(re.findall(r"gateway:8080((?:/[\w-]+)+)", text))
    async with boot({}, wait=False) as gateway:
        document = (await gateway.client.get("/docs/openapi.json")).json()
    routes = [re.escape(path) for path in document["paths"]]
    patterns = [re.compile(re.sub(r"\\{\w+\\}", ".+", path) + "$") for path in routes]

    assert {"/v1", "/v2", "/v1/rerank", "/models/bge-m3"} <= named
    for address in named:
        is_route = any(pattern.match(address) for pattern in patterns)
        # A base, to which the client appends the rest.
        ends = (
            "/embeddings",
            "/embed",
            "/rerank",
            "/v1/embeddings",
            "/bge-m3/embeddings",
            "/bge:embedContent",
        )
        is_base = any(pattern.match(address + end) for pattern in patterns for end in ends)
        assert is_route or is_base, address


def test_every_product_has_a_sign() -> None:
    for page in PAGES:
        if page.name == "connect.md":
            continue
        for section in page.read_text().split("\n## ")[1:]:
            assert re.search(r"\*\*(tried|replayed)\*\*", section, re.IGNORECASE), (page.name, section[:40])


def _servers() -> dict[str, FakeTei]:
    ranker = FakeTei(model_type={"reranker": {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}})
    return {"tei-0": FakeTei(), "tei-1": FakeTei(), "rerank-0": ranker}


def _floats(values: Sequence[float]) -> list[float]:
    assert isinstance(values, list)
    assert all(isinstance(value, float) for value in values)
    return values


def _scores(items: Sequence[dict[str, Any]], field: str) -> list[float]:
    """Return the scores in the order of the documents, each of which has one, written with a point."""
    scores = {item["index"]: item[field] for item in items}
    assert all(isinstance(score, float) for score in scores.values())
    return [scores[index] for index in range(len(TEXTS))]
