"""Haystack's embedders for OpenAI and Azure OpenAI, and its classes for other vendors."""

from typing import Any

import openai
import pytest
from haystack import Document
from haystack.components.embedders import (
    AzureOpenAITextEmbedder,
    OpenAIDocumentEmbedder,
    OpenAITextEmbedder,
)
from haystack.utils import Secret
from haystack_integrations.components.embedders.cohere import CohereDocumentEmbedder, CohereTextEmbedder
from haystack_integrations.components.embedders.google_genai import (
    GoogleGenAIDocumentEmbedder,
    GoogleGenAITextEmbedder,
)
from haystack_integrations.components.embedders.huggingface_api import (
    HuggingFaceAPIDocumentEmbedder,
    HuggingFaceAPITextEmbedder,
)
from haystack_integrations.components.embedders.jina import JinaDocumentEmbedder, JinaTextEmbedder
from haystack_integrations.components.embedders.mistral import MistralDocumentEmbedder, MistralTextEmbedder
from haystack_integrations.components.embedders.nvidia import NvidiaDocumentEmbedder, NvidiaTextEmbedder
from haystack_integrations.components.embedders.ollama import OllamaDocumentEmbedder, OllamaTextEmbedder
from haystack_integrations.components.rankers.cohere import CohereRanker
from haystack_integrations.components.rankers.jina import JinaRanker
from haystack_integrations.components.rankers.nvidia import NvidiaRanker

from tests.clients.conftest import (
    FRUIT,
    FRUIT_QUESTION,
    Expected,
    Gateway,
    assert_ranks,
    assert_vectors,
    run_documented,
)

TEXTS = ["a car", "an apple", "the sea"]
DIMENSIONS = 384


def embedder(
    gateway: Gateway, key: str | None = None, model: str | None = None, dimensions: int | None = None
) -> OpenAITextEmbedder:
    return OpenAITextEmbedder(
        api_key=Secret.from_token(key or gateway.key),
        model=model or gateway.model,
        api_base_url=f"{gateway.url}/v1",
        dimensions=dimensions,
    )


def test_documents_and_texts_get_the_same_vectors(gateway: Gateway) -> None:
    documents = OpenAIDocumentEmbedder(
        api_key=Secret.from_token(gateway.key),
        model=gateway.model,
        api_base_url=f"{gateway.url}/v1",
        batch_size=2,
        progress_bar=False,
    )
    reply = documents.run([Document(content=text) for text in TEXTS])["documents"]

    assert TEXTS == [document.content for document in reply]
    for document in reply:
        single = embedder(gateway).run(document.content)
        assert document.embedding == pytest.approx(single["embedding"], abs=1e-3)
        assert DIMENSIONS == len(document.embedding)


def test_cuts_dimensions(gateway: Gateway) -> None:
    reply = embedder(gateway, dimensions=64).run("an apple")

    assert 64 == len(reply["embedding"])
    assert gateway.model == reply["meta"]["model"]


def test_azures_embedder_gets_the_same_vector(gateway: Gateway) -> None:
    azure = AzureOpenAITextEmbedder(
        azure_endpoint=gateway.url,
        azure_deployment=gateway.model,
        api_key=Secret.from_token(gateway.key),
    )

    expected = embedder(gateway).run("an apple")["embedding"]
    assert expected == pytest.approx(azure.run("an apple")["embedding"], abs=1e-3)


def test_errors_are_openais(gateway: Gateway) -> None:
    with pytest.raises(openai.AuthenticationError):
        embedder(gateway, key="wrong").run("an apple")
    with pytest.raises(openai.NotFoundError):
        embedder(gateway, model="nowhere").run("an apple")


def test_the_documented_lines_embed(gateway: Gateway) -> None:
    made = run_documented(gateway, "connect-libraries", "Haystack")["embedder"]

    assert DIMENSIONS == len(made.run("a car")["embedding"])


def vendors_embedders(vendor: str, gateway: Gateway) -> tuple[Any, Any]:
    """Return the classes for texts and documents of a vendor, by the lines of docs/connect-classes.md."""
    key = {"api_key": Secret.from_token(gateway.key)}
    if vendor == "cohere":
        options = key | {"model": gateway.prompted, "api_base_url": gateway.url}
        return CohereTextEmbedder(**options), CohereDocumentEmbedder(**options)
    if vendor == "jina":
        options = key | {"model": gateway.prompted, "base_url": f"{gateway.url}/v1/embeddings"}
        return (
            JinaTextEmbedder(**options, task="retrieval.query"),
            JinaDocumentEmbedder(**options, task="retrieval.passage"),
        )
    if vendor == "nvidia":
        options = key | {"model": gateway.prompted, "api_url": f"{gateway.url}/v1"}
        return NvidiaTextEmbedder(**options), NvidiaDocumentEmbedder(**options)
    if vendor == "mistral":
        options = key | {"model": gateway.model, "api_base_url": f"{gateway.url}/v1"}
        return MistralTextEmbedder(**options), MistralDocumentEmbedder(**options)
    if vendor == "google":
        options = key | {"model": gateway.model}
        return GoogleGenAITextEmbedder(**options), GoogleGenAIDocumentEmbedder(**options)
    if vendor == "ollama":
        options = {"model": gateway.model, "url": gateway.url}
        return OllamaTextEmbedder(**options), OllamaDocumentEmbedder(**options)
    options = {
        "api_type": "text_embeddings_inference",
        "api_params": {"url": f"{gateway.url}/models/{gateway.model}"},
        "token": Secret.from_token(gateway.key),
        "normalize": True,
    }
    return HuggingFaceAPITextEmbedder(**options), HuggingFaceAPIDocumentEmbedder(**options)


@pytest.mark.parametrize(
    ("vendor", "has_roles"),
    [
        ("cohere", True),
        ("jina", True),
        ("nvidia", True),
        ("mistral", False),
        ("google", False),
        ("ollama", False),
        ("huggingface", False),
    ],
)
def test_vendors_embedders_return_the_gateways_vectors(
    vendor: str, has_roles: bool, gateway: Gateway, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOOGLE_GEMINI_BASE_URL", gateway.url)
    monkeypatch.setenv("OLLAMA_API_KEY", gateway.key)
    texts, documents = vendors_embedders(vendor, gateway)
    for embedder in (texts, documents):
        getattr(embedder, "warm_up", lambda: None)()
    found = documents.run([Document(content=text) for text in FRUIT])["documents"]

    assert_vectors(
        expected.documents if has_roles else expected.plain, [document.embedding for document in found]
    )
    query = expected.query if has_roles else expected.plain[0]
    assert_vectors([query], [texts.run(FRUIT[0])["embedding"]])


def ranked(ranker: Any) -> list[tuple[int, float]]:
    """Return the (index, score) of each text of `FRUIT`, as a ranker returns them."""
    getattr(ranker, "warm_up", lambda: None)()
    found = ranker.run(query=FRUIT_QUESTION, documents=[Document(content=text) for text in FRUIT])
    return [(FRUIT.index(document.content), document.score) for document in found["documents"]]


def test_vendors_rankers_return_the_gateways_scores(gateway: Gateway, expected: Expected) -> None:
    key = Secret.from_token(gateway.key)
    cohere = CohereRanker(model=gateway.model, api_key=key, api_base_url=gateway.url)
    jina = JinaRanker(model=gateway.model, api_key=key, base_url=f"{gateway.url}/v1/rerank", top_k=len(FRUIT))
    nvidia = NvidiaRanker(model=gateway.cross, api_key=key, api_url=f"{gateway.url}/v1")

    assert_ranks(expected.ranks, ranked(cohere))
    assert_ranks(expected.ranks, ranked(jina))
    assert_ranks(expected.logits, ranked(nvidia))
