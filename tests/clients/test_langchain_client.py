"""LangChain's classes for OpenAI, Cohere, Jina, Infinity and other vendors, and its own test suite."""

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
from langchain_google_genai import GoogleGenerativeAIEmbeddings
from langchain_nvidia_ai_endpoints import NVIDIAEmbeddings, NVIDIARerank
from langchain_ollama import OllamaEmbeddings
from langchain_openai import OpenAIEmbeddings
from langchain_tests.integration_tests import EmbeddingsIntegrationTests
from langchain_together import TogetherEmbeddings
from langchain_voyageai import VoyageAIRerank

from tests.clients.conftest import (
    FRUIT,
    FRUIT_QUESTION,
    Expected,
    Gateway,
    Pictures,
    assert_ranks,
    assert_vectors,
    run_documented,
)

DOCUMENTS = [Document(text, metadata={"place": i}) for i, text in enumerate(["car", "apple", "sea", "pear"])]
DIMENSIONS = 384


@pytest.fixture
def jina_gateway(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> Gateway:
    """Replace Jina's address, which is a constant in LangChain, by the gateway's."""
    monkeypatch.setattr(jina_rerank, "JINA_API_URL", f"{gateway.url}/v1/rerank")
    monkeypatch.setattr(jina, "JINA_API_URL", f"{gateway.url}/v1/embeddings")
    return gateway


def assert_fruit_first(ordered: Any) -> None:
    """Check that the two fruits come first, with their metadata and scores."""
    assert {"apple", "pear"} == {document.page_content for document in ordered}
    assert {1, 3} == {document.metadata["place"] for document in ordered}
    scores = [document.metadata["relevance_score"] for document in ordered]
    assert sorted(scores, reverse=True) == scores


def test_cohere_rerank_keeps_the_best(gateway: Gateway) -> None:
    rerank = CohereRerank(cohere_api_key=gateway.key, base_url=gateway.url, model=gateway.model, top_n=2)

    assert_fruit_first(rerank.compress_documents(DOCUMENTS, "fruit to eat"))


def test_returns_all_of_fewer_documents_than_top_n(gateway: Gateway) -> None:
    rerank = CohereRerank(cohere_api_key=gateway.key, base_url=gateway.url, model=gateway.model)

    assert {0, 1} == {result["index"] for result in rerank.rerank(["a", "b"], "fruit")}


def test_cohere_embeddings_differ_for_queries_and_documents(gateway: Gateway) -> None:
    embeddings = CohereEmbeddings(cohere_api_key=gateway.key, base_url=gateway.url, model=gateway.prompted)

    (document,) = embeddings.embed_documents(["an apple"])
    assert DIMENSIONS == len(document)
    assert document != embeddings.embed_query("an apple")


def test_jina_rerank_keeps_the_best(jina_gateway: Gateway) -> None:
    rerank = jina_rerank.JinaRerank(jina_api_key=jina_gateway.key, model=jina_gateway.model, top_n=2)

    assert_fruit_first(rerank.compress_documents(DOCUMENTS, "fruit to eat"))


def test_jina_rerank_error_has_the_gateways_reason(jina_gateway: Gateway) -> None:
    rerank = jina_rerank.JinaRerank(jina_api_key=jina_gateway.key, model="nowhere")

    with pytest.raises(RuntimeError, match="there is no model 'nowhere' here"):
        rerank.compress_documents(DOCUMENTS, "fruit")


def test_jina_embeddings_come_in_order(jina_gateway: Gateway) -> None:
    embeddings = jina.JinaEmbeddings(jina_api_key=jina_gateway.key, model_name=jina_gateway.model)

    texts = ["apple", "sea"]
    assert [embeddings.embed_query(text) for text in texts] == [
        pytest.approx(vector, abs=1e-3) for vector in embeddings.embed_documents(texts)
    ]


def infinity_embeddings(gateway: Gateway) -> InfinityEmbeddings:
    """Return a client with the key in its URL, the only place where it accepts a key."""
    url = gateway.url.replace("http://", f"http://:{gateway.key}@")
    return InfinityEmbeddings(model=gateway.model, infinity_api_url=f"{url}/infinity")


def openai_embeddings(gateway: Gateway, model: str, **options: Any) -> OpenAIEmbeddings:
    """Return LangChain's client for OpenAI."""
    return OpenAIEmbeddings(api_key=gateway.key, base_url=f"{gateway.url}/v1", model=model, **options)


def test_infinity_embeddings_come_in_the_callers_order(gateway: Gateway) -> None:
    embeddings = infinity_embeddings(gateway)
    # The client sorts texts by length, sends 128 per call and restores the order.
    texts = [f"number {'and more ' * (i % 7)}{i}" for i in range(300)]

    vectors = embeddings.embed_documents(texts)
    for i in (0, 1, 150, 299):
        assert embeddings.embed_query(texts[i]) == pytest.approx(vectors[i], abs=1e-3)


def test_openai_embeddings_as_texts(gateway: Gateway) -> None:
    embeddings = openai_embeddings(gateway, gateway.model, check_embedding_ctx_length=False)

    (vector,) = embeddings.embed_documents(["an apple"])
    assert DIMENSIONS == len(vector)
    assert embeddings.embed_query("an apple") == pytest.approx(vector, abs=1e-6)


@pytest.fixture
def bytes_for_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give LangChain's tokenizer the vocabulary of the gateway's `token_encoding`.

    Its own vocabulary would be downloaded.
    """
    ranks = {bytes([byte]): byte for byte in range(256)}
    encoding = tiktoken.Encoding("bytes", pat_str=r"[\s\S]+", mergeable_ranks=ranks, special_tokens={})
    monkeypatch.setattr(tiktoken, "get_encoding", lambda _: encoding)


@pytest.mark.usefixtures("bytes_for_tokens")
def test_openai_embeddings_token_ids_are_decoded_with_the_configs_vocabulary(
    gateway: Gateway,
) -> None:
    texts = ["an apple", "Größe und 向量\n"]
    as_ids = openai_embeddings(gateway, gateway.decoding).embed_documents(texts)
    as_texts = openai_embeddings(gateway, gateway.model, check_embedding_ctx_length=False).embed_documents(
        texts
    )

    for from_ids, from_text in zip(as_ids, as_texts, strict=True):
        assert from_ids == pytest.approx(from_text, abs=1e-3)


@pytest.mark.usefixtures("bytes_for_tokens")
def test_openai_embeddings_token_ids_are_rejected_elsewhere_with_the_remedy(gateway: Gateway) -> None:
    with pytest.raises(openai.BadRequestError, match="check_embedding_ctx_length=False"):
        openai_embeddings(gateway, gateway.model).embed_query("an apple")


MAKERS: dict[str, Callable[[Gateway], Embeddings]] = {
    "openai": lambda gateway: openai_embeddings(gateway, gateway.model, check_embedding_ctx_length=False),
    "cohere": lambda gateway: CohereEmbeddings(
        cohere_api_key=gateway.key, base_url=gateway.url, model=gateway.model
    ),
    "infinity": infinity_embeddings,
    "jina": lambda gateway: jina.JinaEmbeddings(jina_api_key=gateway.key, model_name=gateway.model),
}


class TestLangChainsOwnSuite(EmbeddingsIntegrationTests):
    """LangChain's own tests for embeddings classes."""

    @property
    def embeddings_class(self) -> type[Embeddings]:
        """Return the base class, which is unused, because `model` creates the instances."""
        return Embeddings

    @pytest.fixture(params=MAKERS)
    def model(self, request: pytest.FixtureRequest, jina_gateway: Gateway) -> Embeddings:
        """Return the embeddings of each client."""
        return MAKERS[request.param](jina_gateway)


def test_jina_embeddings_read_pictures_from_files(jina_gateway: Gateway, pictures: Pictures) -> None:
    embeddings = jina.JinaEmbeddings(jina_api_key=jina_gateway.key, model_name=jina_gateway.clip)

    pictures.assert_equal(embeddings.embed_images([str(file) for file in pictures.files]))
    pictures.assert_equal(embeddings.embed_images(pictures.uris))


def test_the_documented_lines_embed_and_rank(gateway: Gateway) -> None:
    made = run_documented(gateway, "connect-libraries", "LangChain")

    assert DIMENSIONS == len(made["embeddings"].embed_query("fruit"))
    assert len(DOCUMENTS) > len(made["reranker"].compress_documents(DOCUMENTS, "fruit")) > 0


def vendors_embeddings(vendor: str, gateway: Gateway) -> Embeddings:
    """Return the class for a vendor, by the lines of docs/connect-classes.md, with prompts for roles."""
    if vendor == "google":
        return GoogleGenerativeAIEmbeddings(
            model=gateway.prompted, google_api_key=gateway.key, base_url=gateway.url
        )
    if vendor == "nvidia":
        return NVIDIAEmbeddings(model=gateway.prompted, api_key=gateway.key, base_url=f"{gateway.url}/v1")
    if vendor == "together":
        return TogetherEmbeddings(model=gateway.model, api_key=gateway.key, base_url=f"{gateway.url}/v1")
    headers = {"Authorization": f"Bearer {gateway.key}"}
    return OllamaEmbeddings(model=gateway.model, base_url=gateway.url, client_kwargs={"headers": headers})


@pytest.mark.parametrize(
    ("vendor", "has_roles"), [("google", True), ("nvidia", True), ("together", False), ("ollama", False)]
)
async def test_vendors_embeddings_are_the_gateways(
    vendor: str, has_roles: bool, gateway: Gateway, expected: Expected
) -> None:
    embeddings = vendors_embeddings(vendor, gateway)
    documents, query = expected.plain, expected.plain[0]
    if has_roles:
        documents, query = expected.documents, expected.query

    assert_vectors(documents, embeddings.embed_documents(FRUIT))
    assert_vectors(documents, await embeddings.aembed_documents(FRUIT))
    assert_vectors([query], [embeddings.embed_query(FRUIT[0])])


def ranked(compressor: Any) -> list[tuple[int, float]]:
    """Return the (index, score) of each text of `FRUIT`, as a compressor returns them."""
    found = compressor.compress_documents([Document(text) for text in FRUIT], FRUIT_QUESTION)
    return [(FRUIT.index(item.page_content), item.metadata["relevance_score"]) for item in found]


def test_vendors_compressors_return_the_gateways_scores(gateway: Gateway, expected: Expected) -> None:
    options: dict[str, Any] = {"api_key": gateway.key, "base_url": f"{gateway.url}/v1"}

    assert_ranks(expected.ranks, ranked(VoyageAIRerank(model=gateway.model, top_k=len(FRUIT), **options)))
    assert_ranks(expected.logits, ranked(NVIDIARerank(model=gateway.cross, **options)))
