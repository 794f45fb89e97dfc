"""LangChain's classes over OpenAI's, Cohere's, Jina's and Infinity's wires, and its own suite of tests."""

from collections.abc import Callable
from typing import Any

import openai
import pytest
import tiktoken
from langchain_cohere import CohereEmbeddings, CohereRerank
from langchain_community.document_compressors import jina_rerank
from langchain_community.embeddings import InfinityEmbeddings, jina
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_openai import OpenAIEmbeddings
from langchain_tests.integration_tests import EmbeddingsIntegrationTests

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


def test_returns_all_of_fewer_documents_than_top_n(gateway: Gateway) -> None:
    rerank = CohereRerank(cohere_api_key=gateway.key, base_url=gateway.url, model=gateway.model)

    assert {0, 1} == {one["index"] for one in rerank.rerank(["a", "b"], "fruit")}


def test_cohere_embeddings_differ_for_queries_and_documents(gateway: Gateway) -> None:
    embeddings = CohereEmbeddings(cohere_api_key=gateway.key, base_url=gateway.url, model=gateway.prompted)

    (document,) = embeddings.embed_documents(["an apple"])
    assert DIMENSIONS == len(document)
    assert document != embeddings.embed_query("an apple")


def test_jina_rerank_keeps_the_best(jinas: Gateway) -> None:
    rerank = jina_rerank.JinaRerank(jina_api_key=jinas.key, model=jinas.model, top_n=2)

    assert_fruit_first(rerank.compress_documents(DOCUMENTS, "fruit to eat"))


def test_jina_rerank_error_has_the_gateways_reason(jinas: Gateway) -> None:
    rerank = jina_rerank.JinaRerank(jina_api_key=jinas.key, model="nowhere")

    with pytest.raises(RuntimeError, match="there is no model 'nowhere' here"):
        rerank.compress_documents(DOCUMENTS, "fruit")


def test_jina_embeddings_come_in_order(jinas: Gateway) -> None:
    embeddings = jina.JinaEmbeddings(jina_api_key=jinas.key, model_name=jinas.model)

    texts = ["apple", "sea"]
    assert [embeddings.embed_query(text) for text in texts] == [
        pytest.approx(one, abs=1e-3) for one in embeddings.embed_documents(texts)
    ]


def infinity(gateway: Gateway) -> InfinityEmbeddings:
    """A client whose key stands in its URL: it has no other place for one."""
    url = gateway.url.replace("http://", f"http://:{gateway.key}@")
    return InfinityEmbeddings(model=gateway.model, infinity_api_url=f"{url}/infinity")


def openais(gateway: Gateway, model: str, **options: Any) -> OpenAIEmbeddings:
    """One of OpenAI's clients."""
    return OpenAIEmbeddings(api_key=gateway.key, base_url=f"{gateway.url}/v1", model=model, **options)


def test_infinity_embeddings_come_in_the_callers_order(gateway: Gateway) -> None:
    embeddings = infinity(gateway)
    # It sorts by length, cuts into calls of 128 and puts the answers back.
    texts = [f"number {'and more ' * (i % 7)}{i}" for i in range(300)]

    vectors = embeddings.embed_documents(texts)
    for i in (0, 1, 150, 299):
        assert embeddings.embed_query(texts[i]) == pytest.approx(vectors[i], abs=1e-3)


def test_openai_embeddings_as_texts(gateway: Gateway) -> None:
    embeddings = openais(gateway, gateway.model, check_embedding_ctx_length=False)

    (vector,) = embeddings.embed_documents(["an apple"])
    assert DIMENSIONS == len(vector)
    assert embeddings.embed_query("an apple") == pytest.approx(vector, abs=1e-6)


@pytest.fixture
def bytes_for_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """LangChain's tokenizer with the vocabulary of the gateway's `token_encoding`.

    The one that it would fetch from the network is not at hand.
    """
    ranks = {bytes([one]): one for one in range(256)}
    encoding = tiktoken.Encoding("bytes", pat_str=r"[\s\S]+", mergeable_ranks=ranks, special_tokens={})
    monkeypatch.setattr(tiktoken, "get_encoding", lambda _: encoding)


@pytest.mark.usefixtures("bytes_for_tokens")
def test_openai_embeddings_token_ids_are_decoded_with_the_configs_vocabulary(
    gateway: Gateway,
) -> None:
    texts = ["an apple", "Größe und 向量\n"]
    as_ids = openais(gateway, gateway.decoding).embed_documents(texts)
    as_texts = openais(gateway, gateway.model, check_embedding_ctx_length=False).embed_documents(texts)

    for one, other in zip(as_ids, as_texts, strict=True):
        assert one == pytest.approx(other, abs=1e-3)


@pytest.mark.usefixtures("bytes_for_tokens")
def test_openai_embeddings_token_ids_are_rejected_elsewhere_with_the_remedy(gateway: Gateway) -> None:
    with pytest.raises(openai.BadRequestError, match="check_embedding_ctx_length=False"):
        openais(gateway, gateway.model).embed_query("an apple")


MAKERS: dict[str, Callable[[Gateway], Embeddings]] = {
    "openai": lambda gateway: openais(gateway, gateway.model, check_embedding_ctx_length=False),
    "cohere": lambda gateway: CohereEmbeddings(
        cohere_api_key=gateway.key, base_url=gateway.url, model=gateway.model
    ),
    "infinity": infinity,
    "jina": lambda gateway: jina.JinaEmbeddings(jina_api_key=gateway.key, model_name=gateway.model),
}


class TestLangChainsOwnSuite(EmbeddingsIntegrationTests):
    """What LangChain holds against every class of embeddings."""

    @property
    def embeddings_class(self) -> type[Embeddings]:
        """Not asked: `model` makes them."""
        return Embeddings

    @pytest.fixture(params=MAKERS)
    def model(self, request: pytest.FixtureRequest, jinas: Gateway) -> Embeddings:
        """One of each kind."""
        return MAKERS[request.param](jinas)
