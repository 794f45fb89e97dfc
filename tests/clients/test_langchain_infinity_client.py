"""LangChain's reranker for Infinity, which uses Infinity's own client."""

import pytest
from infinity_client.client import Client
from langchain_community.document_compressors.infinity_rerank import InfinityRerank
from langchain_core.documents import Document

from tests.clients.conftest import Gateway

DOCUMENTS = [Document(text, metadata={"place": i}) for i, text in enumerate(["car", "apple", "sea", "pear"])]


@pytest.fixture
def client(gateway: Gateway) -> Client:
    """Return Infinity's client without a token, the only client that LangChain's class accepts."""
    headers = {"authorization": f"Bearer {gateway.key}"}
    return Client(base_url=f"{gateway.url}/infinity", headers=headers)


def test_rerank_keeps_the_best(client: Client, gateway: Gateway) -> None:
    rerank = InfinityRerank(client=client, model=gateway.model, top_n=2)
    ordered = rerank.compress_documents(DOCUMENTS, "fruit to eat")

    assert {("apple", 1), ("pear", 3)} == {
        (document.page_content, document.metadata["place"]) for document in ordered
    }
    scores = [document.metadata["relevance_score"] for document in ordered]
    assert sorted(scores, reverse=True) == scores


def test_a_cross_encoder_scores_all_documents(client: Client, gateway: Gateway) -> None:
    rerank = InfinityRerank(client=client, model=gateway.cross)

    assert {0, 1, 2, 3} == {result["index"] for result in rerank.rerank(DOCUMENTS, "fruit", top_n=None)}
