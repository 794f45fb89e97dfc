"""Voyage's own client."""

from typing import Any

import PIL.Image
import pytest
import voyageai
import voyageai.error

from tests.clients.conftest import Gateway, Pictures

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


def test_pictures_and_texts_have_the_vectors_of_the_model(gateway: Gateway, pictures: Pictures) -> None:
    client = connect(gateway)
    images = [PIL.Image.open(file) for file in pictures.files]
    reply = client.multimodal_embed([[image] for image in images] + [["a car"]], model=gateway.clip)
    text = client.embed(["a car"], model=gateway.clip)

    pictures.assert_equal(reply.embeddings[:2])
    assert text.embeddings[0] == pytest.approx(reply.embeddings[2], abs=1e-3)
    assert text.total_tokens == reply.text_tokens < reply.total_tokens
    assert (60 + 61) * 40 == reply.image_pixels


async def test_async_client_gets_pictures_in_bits(gateway: Gateway, pictures: Pictures) -> None:
    client = voyageai.AsyncClient(api_key=gateway.key, base_url=f"{gateway.url}/v1")
    content = [{"content": [{"type": "image_base64", "image_base64": uri}]} for uri in pictures.uris]
    reply = await client.multimodal_embed(content, model=gateway.clip, output_dtype="ubinary")

    for vector, octets in zip(pictures.vectors, reply.embeddings, strict=True):
        bits = "".join(f"{octet:08b}" for octet in octets)
        assert [component > 0 for component in vector] == [bit == "1" for bit in bits[: len(vector)]]


CHUNKS = [["Berlin is the capital of Germany. ", "It has many lakes."], ["A cat sleeps."]]


@pytest.mark.parametrize("kind", LENGTHS)
def test_chunks_have_vectors_in_their_document(gateway: Gateway, kind: str) -> None:
    client = connect(gateway)
    options = {"model": gateway.model, "input_type": "document", "output_dtype": kind, "output_dimension": 64}
    reply = client.contextualized_embed(CHUNKS, **options)
    lone = client.contextualized_embed([[CHUNKS[0][1]]], **options)

    assert [2, 1] == [len(result.embeddings) for result in reply.results]
    assert {LENGTHS[kind]} == {len(vector) for result in reply.results for vector in result.embeddings}
    assert list(reply.results[0].embeddings[1]) != list(lone.results[0].embeddings[0])
    assert reply.total_tokens > 0


def test_queries_are_lone_chunks(gateway: Gateway) -> None:
    client = connect(gateway)
    reply = client.contextualized_embed(["an apple", "the sea"], model=gateway.prompted, input_type="query")
    plain = client.embed(["an apple"], model=gateway.prompted, input_type="query")

    assert plain.embeddings[0] == pytest.approx(list(reply.results[0].embeddings[0]), abs=1e-3)
    assert 2 == len(reply.results)


async def test_auto_chunking_returns_the_texts(gateway: Gateway) -> None:
    text = "".join(CHUNKS[0]) * 6
    client = voyageai.AsyncClient(api_key=gateway.key, base_url=f"{gateway.url}/v1")
    reply = await client.contextualized_embed(
        [text, "short"],
        model=gateway.model,
        input_type="document",
        enable_auto_chunking=True,
        chunk_size=16,
        chunk_overlap=4,
    )

    first, second = reply.results
    assert ["short"] == second.chunk_texts
    assert len(first.chunk_texts) == len(first.embeddings) > 2
    assert first.chunk_texts[0].startswith("Berlin")
    assert all(chunk in text for chunk in first.chunk_texts)


def test_a_document_longer_than_the_model_is_refused(gateway: Gateway) -> None:
    with pytest.raises(voyageai.error.InvalidRequestError, match="256 tokens"):
        connect(gateway).contextualized_embed([["w " * 200] * 2], model=gateway.model, input_type="document")
