"""Cohere's own client, both of its versions."""

import base64
import struct
from collections.abc import Callable
from typing import Any

import cohere
import numpy as np
import pytest

from tests.clients.conftest import Gateway, Pictures

DOCUMENTS = ["a car", "an apple", "the sea", "a pear"]
TYPES = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
DIMENSIONS = 384


@pytest.fixture(params=[cohere.Client, cohere.ClientV2], ids=["v1", "v2"])
def client(request: pytest.FixtureRequest, gateway: Gateway) -> Any:
    """Return a client of either version."""
    return request.param(api_key=gateway.key, base_url=gateway.url)


def rows_of(reply: Any, kind: str) -> list[Any]:
    """Return the vectors of one type in a reply."""
    return getattr(reply.embeddings, "float_" if kind == "float" else kind)


def test_rerank_puts_the_best_documents_first(client: Any, gateway: Gateway) -> None:
    reply = client.rerank(model=gateway.model, query="fruit to eat", documents=DOCUMENTS, top_n=2)

    assert {1, 3} == {result.index for result in reply.results}
    assert reply.results[0].relevance_score >= reply.results[1].relevance_score
    assert 1 == reply.meta.billed_units.search_units
    assert reply.id


def test_v1_returns_documents(gateway: Gateway) -> None:
    client = cohere.Client(api_key=gateway.key, base_url=gateway.url)
    documents = [{"text": result} for result in DOCUMENTS]
    reply = client.rerank(model=gateway.model, query="fruit", documents=documents, return_documents=True)

    assert all(DOCUMENTS[result.index] == result.document.text for result in reply.results)


@pytest.mark.parametrize("kind", TYPES)
def test_embed_returns_every_type_in_its_size(client: Any, gateway: Gateway, kind: str) -> None:
    reply = client.embed(
        model=gateway.model, texts=DOCUMENTS, input_type="search_document", embedding_types=[kind]
    )

    vectors = rows_of(reply, kind)
    length = {"binary": DIMENSIONS // 8, "ubinary": DIMENSIONS // 8}.get(kind, DIMENSIONS)
    if kind == "base64":
        vectors = [base64.b64decode(vector) for vector in vectors]
        length = DIMENSIONS * 4
    assert [length] * len(DOCUMENTS) == [len(vector) for vector in vectors]
    assert DOCUMENTS == reply.texts


def test_types_of_one_call_are_the_same_vectors(client: Any, gateway: Gateway) -> None:
    reply = client.embed(
        model=gateway.model, texts=["an apple"], input_type="search_query", embedding_types=TYPES
    )

    (floats,) = rows_of(reply, "float")
    assert floats == pytest.approx(
        struct.unpack(f"<{DIMENSIONS}f", base64.b64decode(rows_of(reply, "base64")[0])), abs=1e-7
    )
    (integers,) = rows_of(reply, "int8")
    assert np.dot(floats, integers) > 0.999 * np.linalg.norm(integers)
    assert sum(component > 0 for component in floats) == sum(
        component.bit_count() for component in rows_of(reply, "ubinary")[0]
    )
    assert reply.meta.billed_units.input_tokens > 2


def test_input_type_changes_the_vector_where_the_model_has_prompts(client: Any, gateway: Gateway) -> None:
    def vector(model: str, input_type: str) -> list[float]:
        options = {"texts": ["an apple"], "input_type": input_type, "embedding_types": ["float"]}
        return rows_of(client.embed(model=model, **options), "float")[0]

    assert vector(gateway.prompted, "search_query") != vector(gateway.prompted, "search_document")
    assert vector(gateway.model, "search_query") == vector(gateway.model, "search_document")


def test_v1_client_splits_long_lists_and_gets_plain_vectors(gateway: Gateway) -> None:
    client = cohere.Client(api_key=gateway.key, base_url=gateway.url)
    reply = client.embed(model=gateway.model, texts=[f"text {i}" for i in range(200)])

    assert (200, DIMENSIONS) == (len(reply.embeddings), len(reply.embeddings[0]))


def test_v2_accepts_inputs_and_fewer_dimensions(gateway: Gateway) -> None:
    client = cohere.ClientV2(api_key=gateway.key, base_url=gateway.url)
    inputs = [{"content": [{"type": "text", "text": item}]} for item in DOCUMENTS]
    reply = client.embed(
        model=gateway.model,
        inputs=inputs,
        input_type="search_document",
        embedding_types=["float"],
        output_dimension=64,
    )

    assert [64] * len(DOCUMENTS) == [len(item) for item in reply.embeddings.float_]


REFUSED: list[tuple[type[Exception], Callable[[Any, Gateway], Any]]] = [
    (
        cohere.NotFoundError,
        lambda client, _: client.rerank(model="nowhere", query="q", documents=["a"]),
    ),
    (
        cohere.BadRequestError,
        lambda client, gateway: client.rerank(model=gateway.model, query="", documents=["a"]),
    ),
    (
        cohere.BadRequestError,
        lambda client, gateway: client.embed(
            model=gateway.strict, texts=["w " * 1000], input_type="search_query", embedding_types=["float"]
        ),
    ),
]


@pytest.mark.parametrize(("error", "call"), REFUSED, ids=["model", "query", "length"])
def test_errors_are_the_clients_own_with_a_message(
    client: Any, gateway: Gateway, error: type[Exception], call: Callable[[Any, Gateway], Any]
) -> None:
    with pytest.raises(error) as raised:
        call(client, gateway)

    body: Any = raised.value.body  # type: ignore[attr-defined]
    assert body["message"]


def test_a_wrong_key_is_unauthorized(gateway: Gateway) -> None:
    with pytest.raises(cohere.UnauthorizedError):
        cohere.ClientV2(api_key="wrong", base_url=gateway.url).rerank(
            model=gateway.model, query="q", documents=["a"]
        )


def test_pictures_have_the_vectors_of_the_model(client: Any, gateway: Gateway, pictures: Pictures) -> None:
    reply = client.embed(
        model=gateway.clip, images=pictures.uris, input_type="image", embedding_types=["float"]
    )

    pictures.assert_equal(rows_of(reply, "float"))


def test_v2_takes_pictures_and_texts_in_one_request(gateway: Gateway, pictures: Pictures) -> None:
    client = cohere.ClientV2(api_key=gateway.key, base_url=gateway.url)
    parts = [{"type": "image_url", "image_url": {"url": uri}} for uri in pictures.uris]
    content = [{"content": [part]} for part in [*parts, {"type": "text", "text": "a car"}]]
    options: dict[str, Any] = {"input_type": "search_document", "embedding_types": ["float"]}
    mixed = rows_of(client.embed(model=gateway.clip, inputs=content, **options), "float")
    (text,) = rows_of(client.embed(model=gateway.clip, texts=["a car"], **options), "float")

    pictures.assert_equal(mixed[:2])
    assert text == pytest.approx(mixed[2], abs=1e-3)
