"""Haystack's embedders for OpenAI and Azure OpenAI."""

import openai
import pytest
from haystack import Document
from haystack.components.embedders import (
    AzureOpenAITextEmbedder,
    OpenAIDocumentEmbedder,
    OpenAITextEmbedder,
)
from haystack.utils import Secret

from tests.clients.conftest import Gateway, run_documented

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
