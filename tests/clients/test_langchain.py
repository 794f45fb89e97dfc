"""LangChain's classes over Cohere's and Jina's wires."""

from typing import Any

import pytest
from langchain_cohere import CohereEmbeddings, CohereRerank
from langchain_community.document_compressors import jina_rerank
from langchain_community.embeddings import jina
from langchain_core.documents import Document

from tests.clients.conftest import Gateway

DOCUMENTS = [Document(text, metadata={"place": i}) for i, text in enumerate(["car", "apple", "sea", "pear"])]
DIMENSIONS = 384


@pytest.fixture
def jinas(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> Gateway:
    """The gateway, where LangChain thinks that Jina is: its address is a constant there."""
    monkeypatch.setattr(jina_rerank, "JINA_API_URL", f"{gateway.url}/v1/rerank")
    monkeypatch.setattr(jina, "JINA_API_URL", f"{gateway.url}/v1/embeddings")
    return gateway


def assert_fruit_first(ordered: Any) -> None:
    """The two fruits, each with what it carried and its score."""
    assert {"apple", "pear"} == {one.page_content for one in ordered}
    assert {1, 3} == {one.metadata["place"] for one in ordered}
    scores = [one.metadata["relevance_score"] for one in ordered]
    assert sorted(scores, reverse=True) == scores


def test_cohere_rerank_keeps_the_best(gateway: Gateway) -> None:
    rerank = CohereRerank(cohere_api_key=gateway.key, base_url=gateway.url, model=gateway.model, top_n=2)

    assert_fruit_first(rerank.compress_documents(DOCUMENTS, "fruit to eat"))


def test_fewer_documents_than_top_n_all_come_back(gateway: Gateway) -> None:
    rerank = CohereRerank(cohere_api_key=gateway.key, base_url=gateway.url, model=gateway.model)

    assert {0, 1} == {one["index"] for one in rerank.rerank(["a", "b"], "fruit")}


def test_cohere_embeddings_tell_queries_from_documents(gateway: Gateway) -> None:
    embeddings = CohereEmbeddings(cohere_api_key=gateway.key, base_url=gateway.url, model=gateway.prompted)

    (document,) = embeddings.embed_documents(["an apple"])
    assert DIMENSIONS == len(document)
    assert document != embeddings.embed_query("an apple")


def test_jina_rerank_keeps_the_best(jinas: Gateway) -> None:
    rerank = jina_rerank.JinaRerank(jina_api_key=jinas.key, model=jinas.model, top_n=2)

    assert_fruit_first(rerank.compress_documents(DOCUMENTS, "fruit to eat"))


def test_jina_rerank_shows_the_gateways_reason(jinas: Gateway) -> None:
    rerank = jina_rerank.JinaRerank(jina_api_key=jinas.key, model="nowhere")

    with pytest.raises(RuntimeError, match="there is no model 'nowhere' here"):
        rerank.compress_documents(DOCUMENTS, "fruit")


def test_jina_embeddings_come_in_order(jinas: Gateway) -> None:
    embeddings = jina.JinaEmbeddings(jina_api_key=jinas.key, model_name=jinas.model)

    texts = ["apple", "sea"]
    assert [embeddings.embed_query(text) for text in texts] == [
        pytest.approx(one, abs=1e-3) for one in embeddings.embed_documents(texts)
    ]
