"""Chroma's embedding functions for OpenAI, TEI and Perplexity, in collections."""

from typing import Any

import chromadb
import numpy as np
import openai
import pytest
from chromadb.utils.embedding_functions import (
    HuggingFaceEmbeddingServer,
    OpenAIEmbeddingFunction,
    PerplexityEmbeddingFunction,
)

from tests.clients.conftest import Gateway, run_documented

DOCUMENTS = ["a car", "an apple", "the sea", "a pear"]
DIMENSIONS = 384


def of_openai(gateway: Gateway, key: str | None = None, model: str | None = None) -> Any:
    return OpenAIEmbeddingFunction(
        api_key=key or gateway.key, model_name=model or gateway.model, api_base=f"{gateway.url}/v1"
    )


def of_tei(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("GATEWAY_KEY", gateway.key)
    url = f"{gateway.url}/models/{gateway.model}/embed"
    return HuggingFaceEmbeddingServer(url=url, api_key_env_var="GATEWAY_KEY")


def test_both_functions_return_the_same_vectors(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = np.asarray(of_openai(gateway)(DOCUMENTS))

    assert (4, DIMENSIONS) == vectors.shape
    np.testing.assert_allclose(vectors, of_tei(gateway, monkeypatch)(DOCUMENTS), atol=1e-3)


@pytest.mark.parametrize("server", ["openai", "tei"])
def test_collections_find_the_nearest_documents(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, server: str
) -> None:
    function = of_openai(gateway) if server == "openai" else of_tei(gateway, monkeypatch)
    collection = chromadb.EphemeralClient().create_collection(server, embedding_function=function)
    collection.add(ids=["car", "apple", "sea", "pear"], documents=DOCUMENTS)

    found = collection.query(query_texts=["fruit to eat"], n_results=2)
    assert [{"apple", "pear"}] == [set(ids) for ids in found["ids"]]


def test_perplexitys_function_has_the_same_directions(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Perplexity's client takes an address from nowhere else.
    monkeypatch.setenv("PERPLEXITY_BASE_URL", f"{gateway.url}/perplexity")
    found = np.asarray(PerplexityEmbeddingFunction(api_key=gateway.key)(DOCUMENTS))
    expected = np.asarray(of_openai(gateway)(DOCUMENTS))

    assert (4, DIMENSIONS) == found.shape
    lengths = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
    assert ((found * expected).sum(axis=1) / lengths > 0.99).all()


def test_errors_are_openais(gateway: Gateway) -> None:
    with pytest.raises(openai.AuthenticationError):
        of_openai(gateway, key="wrong")(DOCUMENTS)
    with pytest.raises(openai.NotFoundError):
        of_openai(gateway, model="nowhere")(DOCUMENTS)


def test_the_documented_lines_make_a_function(gateway: Gateway) -> None:
    function = run_documented(gateway, "connect-databases", "Chroma")["function"]

    np.testing.assert_allclose(of_openai(gateway)(DOCUMENTS), function(DOCUMENTS), atol=1e-3)
