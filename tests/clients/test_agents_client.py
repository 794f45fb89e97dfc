"""Agno, Pydantic AI, DeepEval and rerankers, by the lines of docs/connect-agents.md."""

from typing import Any

import cohere
import pytest
from agno.knowledge.document import Document
from agno.knowledge.embedder.azure_openai import AzureOpenAIEmbedder
from agno.knowledge.embedder.base import Embedder as AgnoEmbedder
from agno.knowledge.embedder.cohere import CohereEmbedder
from agno.knowledge.embedder.google import GeminiEmbedder
from agno.knowledge.embedder.jina import JinaEmbedder
from agno.knowledge.embedder.mistral import MistralEmbedder
from agno.knowledge.embedder.ollama import OllamaEmbedder
from agno.knowledge.embedder.voyageai import VoyageAIEmbedder
from agno.knowledge.reranker.cohere import CohereReranker
from deepeval.models import LocalEmbeddingModel
from pydantic_ai import Embedder
from pydantic_ai.embeddings.cohere import CohereEmbeddingModel
from pydantic_ai.embeddings.google import GoogleEmbeddingModel
from pydantic_ai.embeddings.voyageai import VoyageAIEmbeddingModel
from pydantic_ai.providers.cohere import CohereProvider
from pydantic_ai.providers.google import GoogleProvider
from pydantic_ai.providers.voyageai import VoyageAIProvider
from rerankers import Reranker
from voyageai import AsyncClient

from tests.clients.conftest import (
    FRUIT,
    FRUIT_QUESTION,
    Expected,
    Gateway,
    assert_ranks,
    assert_vectors,
    run_documented,
)

DIMENSIONS = 384


def agnos_embedder(vendor: str, gateway: Gateway) -> AgnoEmbedder:
    """Return Agno's class for a vendor."""
    model, key, url = gateway.model, gateway.key, gateway.url
    if vendor == "azure":
        return AzureOpenAIEmbedder(id=model, api_key=key, azure_endpoint=url, dimensions=DIMENSIONS)
    if vendor == "cohere":
        return CohereEmbedder(id=model, api_key=key, client_params={"base_url": url})
    if vendor == "google":
        options = {"http_options": {"base_url": url}}
        return GeminiEmbedder(id=model, api_key=key, dimensions=DIMENSIONS, client_params=options)
    if vendor == "jina":
        address = f"{url}/v1/embeddings"
        return JinaEmbedder(id=model, api_key=key, dimensions=DIMENSIONS, base_url=address)
    if vendor == "mistral":
        return MistralEmbedder(id=model, api_key=key, endpoint=url)
    if vendor == "ollama":
        headers = {"headers": {"Authorization": f"Bearer {key}"}}
        return OllamaEmbedder(id=model, dimensions=DIMENSIONS, host=url, client_kwargs=headers)
    return VoyageAIEmbedder(id=model, api_key=key, client_params={"base_url": f"{url}/v1"})


@pytest.mark.parametrize("vendor", ["azure", "cohere", "google", "jina", "mistral", "ollama", "voyage"])
async def test_agnos_embedders_return_the_gateways_vectors(
    vendor: str, gateway: Gateway, expected: Expected
) -> None:
    embedder = agnos_embedder(vendor, gateway)

    assert_vectors(expected.plain, [embedder.get_embedding(text) for text in FRUIT])
    assert_vectors(expected.plain, [await embedder.async_get_embedding(text) for text in FRUIT])


async def test_agnos_documented_lines_embed(gateway: Gateway, expected: Expected) -> None:
    embedder = run_documented(gateway, "connect-agents", "Agno")["embedder"]

    vectors, usage = await embedder.async_get_embeddings_batch_and_usage(FRUIT)
    assert_vectors(expected.plain, vectors)
    assert usage[0]["prompt_tokens"] > 0


def test_agnos_reranker_returns_the_gateways_scores(gateway: Gateway, expected: Expected) -> None:
    client = cohere.Client(gateway.key, base_url=gateway.url)
    reranker = CohereReranker(model=gateway.model, cohere_client=client)
    found = reranker.rerank(FRUIT_QUESTION, [Document(content=text) for text in FRUIT])

    assert_ranks(expected.ranks, [(FRUIT.index(item.content), item.reranking_score) for item in found])


async def test_pydantic_ais_documented_lines_embed(gateway: Gateway, expected: Expected) -> None:
    embedder = run_documented(gateway, "connect-agents", "Pydantic AI")["embedder"]

    found = await embedder.embed_documents(FRUIT)
    assert_vectors(expected.plain, found.embeddings)
    assert found.usage.input_tokens > 0


@pytest.mark.parametrize("vendor", ["cohere", "google", "voyage"])
async def test_pydantic_ai_states_roles_with_other_vendors(
    vendor: str, gateway: Gateway, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CO_BASE_URL", gateway.url)
    model: Any
    if vendor == "cohere":
        model = CohereEmbeddingModel(gateway.prompted, provider=CohereProvider(api_key=gateway.key))
    elif vendor == "google":
        provider = GoogleProvider(api_key=gateway.key, base_url=gateway.url)
        model = GoogleEmbeddingModel(gateway.prompted, provider=provider)
    else:
        client = AsyncClient(gateway.key, base_url=f"{gateway.url}/v1")
        model = VoyageAIEmbeddingModel(gateway.prompted, provider=VoyageAIProvider(voyageai_client=client))
    embedder = Embedder(model)

    assert_vectors(expected.documents, (await embedder.embed_documents(FRUIT)).embeddings)
    assert_vectors([expected.query], (await embedder.embed_query(FRUIT[0])).embeddings)


async def test_deepeval_embeds(gateway: Gateway, expected: Expected) -> None:
    model = LocalEmbeddingModel(model=gateway.model, base_url=f"{gateway.url}/v1", api_key=gateway.key)

    assert_vectors(expected.plain, model.embed_texts(FRUIT))
    assert_vectors(expected.plain, await model.a_embed_texts(FRUIT))


@pytest.mark.parametrize(
    ("vendor", "path"),
    [
        ("cohere", "/v1/rerank"),
        ("jina", "/v1/rerank"),
        ("voyage", "/v1/rerank"),
        ("text-embeddings-inference", "/models/all-minilm-l6-v2/rerank"),
    ],
)
def test_rerankers_return_the_gateways_scores(
    vendor: str, path: str, gateway: Gateway, expected: Expected
) -> None:
    reranker = Reranker(
        gateway.model,
        model_type="APIRanker",
        api_provider=vendor,
        api_key=gateway.key,
        url=gateway.url + path,
        verbose=0,
    )
    found = reranker.rank(query=FRUIT_QUESTION, docs=FRUIT)

    assert_ranks(expected.ranks, [(item.doc_id, item.score) for item in found.results])
