"""DSPy's embedder and retriever, through OpenAI's and Infinity's API."""

from typing import Any

import dspy
import numpy as np
import pytest

from tests.clients.conftest import Gateway

DOCUMENTS = ["a car", "an apple", "the sea", "a pear"]
DIMENSIONS = 384


def embedder(gateway: Gateway, key: str | None = None, model: str | None = None) -> Any:
    return dspy.Embedder(
        f"openai/{model or gateway.model}",
        api_base=f"{gateway.url}/v1",
        api_key=key or gateway.key,
        caching=False,
    )


def test_embeds_one_text_and_several(gateway: Gateway) -> None:
    found = embedder(gateway)
    assert (4, DIMENSIONS) == found(DOCUMENTS).shape
    assert (DIMENSIONS,) == found("a").shape


def test_both_apis_return_the_same_vectors(gateway: Gateway) -> None:
    infinity = dspy.Embedder(
        f"infinity/{gateway.model}", api_base=f"{gateway.url}/infinity", api_key=gateway.key, caching=False
    )
    np.testing.assert_allclose(embedder(gateway)(DOCUMENTS), infinity(DOCUMENTS), atol=1e-3)


def test_retrieves_the_nearest_documents(gateway: Gateway) -> None:
    retriever = dspy.retrievers.Embeddings(corpus=DOCUMENTS, embedder=embedder(gateway), k=2)
    assert {"an apple", "a pear"} == set(retriever("fruit to eat").passages)


@pytest.mark.parametrize(
    ("key", "model", "name"), [("x", None, "Authentication"), (None, "nowhere", "NotFound")]
)
def test_errors_are_the_clients_own(gateway: Gateway, key: str | None, model: str | None, name: str) -> None:
    with pytest.raises(Exception, match=r"(?i)api key|does not exist|no model") as raised:
        embedder(gateway, key, model)(DOCUMENTS)
    assert name in type(raised.value).__name__
