"""LangChain's reranker over Infinity's wire, which calls with Infinity's own client."""

import pytest
from infinity_client.client import Client
from langchain_community.document_compressors.infinity_rerank import InfinityRerank
from langchain_core.documents import Document

from tests.clients.conftest import Gateway

DOCUMENTS = [Document(text, metadata={"place": i}) for i, text in enumerate(["car", "apple", "sea", "pear"])]


@pytest.fixture
def client(gateway: Gateway) -> Client:
    """Of Infinity's two clients this class takes only the one without a token."""
    headers = {"authorization": f"Bearer {gateway.key}"}
    return Client(base_url=f"{gateway.url}/infinity", headers=headers)


def test_rerank_keeps_the_best(client: Client, gateway: Gateway) -> None:
    rerank = InfinityRerank(client=client, model=gateway.model, top_n=2)
    ordered = rerank.compress_documents(DOCUMENTS, "fruit to eat")

    assert {("apple", 1), ("pear", 3)} == {(one.page_content, one.metadata["place"]) for one in ordered}
    scores = [one.metadata["relevance_score"] for one in ordered]
    assert sorted(scores, reverse=True) == scores


def test_a_cross_encoder_scores_all_of_them(client: Client, gateway: Gateway) -> None:
    rerank = InfinityRerank(client=client, model=gateway.cross)

    assert {0, 1, 2, 3} == {one["index"] for one in rerank.rerank(DOCUMENTS, "fruit", top_n=None)}
