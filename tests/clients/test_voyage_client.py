"""Voyage's own client."""

from typing import Any

import pytest
import voyageai
import voyageai.error

from tests.clients.conftest import Gateway

DOCUMENTS = ["a car", "an apple", "the sea", "a pear"]
DIMENSIONS = 384
# Lengths of vectors of 64 dimensions.
LENGTHS = {"float": 64, "int8": 64, "uint8": 64, "binary": 8, "ubinary": 8}


def connect(gateway: Gateway, key: str | None = None) -> Any:
    return voyageai.Client(api_key=key or gateway.key, base_url=f"{gateway.url}/v1")


def test_embeds_in_order_with_usage(gateway: Gateway) -> None:
    client = connect(gateway)
    reply = client.embed(DOCUMENTS, model=gateway.model)

    singles = [client.embed([text], model=gateway.model) for text in DOCUMENTS]
    for vector, single in zip(reply.embeddings, singles, strict=True):
        assert vector == pytest.approx(single.embeddings[0], abs=1e-3)
    assert sum(single.total_tokens for single in singles) == reply.total_tokens
    assert DIMENSIONS == len(reply.embeddings[0])


@pytest.mark.parametrize("kind", LENGTHS)
def test_returns_every_type_in_its_size(gateway: Gateway, kind: str) -> None:
    reply = connect(gateway).embed(DOCUMENTS, model=gateway.model, output_dtype=kind, output_dimension=64)

    assert [LENGTHS[kind]] * 4 == [len(vector) for vector in reply.embeddings]


def test_input_type_changes_the_vector_where_the_model_has_prompts(gateway: Gateway) -> None:
    client = connect(gateway)
    query, document = (
        client.embed(["an apple"], model=gateway.prompted, input_type=role).embeddings[0]
        for role in ("query", "document")
    )

    assert query != pytest.approx(document, abs=1e-3)


def test_rerank_puts_the_best_documents_first(gateway: Gateway) -> None:
    reply = connect(gateway).rerank("fruit to eat", DOCUMENTS, model=gateway.model, top_k=2)

    assert {"an apple", "a pear"} == {result.document for result in reply.results}
    assert all(DOCUMENTS[result.index] == result.document for result in reply.results)
    assert reply.results[0].relevance_score >= reply.results[1].relevance_score
    assert reply.total_tokens > 0


def test_errors_are_the_clients_own(gateway: Gateway) -> None:
    client = connect(gateway)

    with pytest.raises(voyageai.error.APIError, match="no model 'nowhere'"):
        client.embed(DOCUMENTS, model="nowhere")
    with pytest.raises(voyageai.error.InvalidRequestError, match="256 tokens"):
        client.embed(["w " * 1000], model=gateway.model, truncation=False)
    with pytest.raises(voyageai.error.AuthenticationError):
        connect(gateway, "wrong").embed(DOCUMENTS, model=gateway.model)
