"""Perplexity's own client."""

import base64

import perplexity
import pytest
from perplexity import Perplexity

from tests.clients.conftest import Gateway

CHUNKS = [["Berlin is the capital of Germany. ", "It has many lakes."], ["A cat sleeps."]]
TEXTS = ["an apple", "the sea"]
DIMENSIONS = 384
# The client takes no other names, so that a gateway has models of these names.
MODEL, CONTEXT = "pplx-embed-v1-0.6b", "pplx-embed-context-v1-0.6b"


def connect(gateway: Gateway, key: str | None = None) -> Perplexity:
    return Perplexity(api_key=key or gateway.key, base_url=f"{gateway.url}/perplexity", max_retries=0)


def numbers(text: str) -> list[int]:
    return [octet - 256 if octet > 127 else octet for octet in base64.b64decode(text)]


def cosine(first: list[int], second: list[int]) -> float:
    def dot(left: list[int], right: list[int]) -> int:
        return sum(a * b for a, b in zip(left, right, strict=True))

    return dot(first, second) / (dot(first, first) * dot(second, second)) ** 0.5


def test_chunks_have_bytes_without_a_format(gateway: Gateway) -> None:
    client = connect(gateway)
    reply = client.contextualized_embeddings.create(input=CHUNKS, model=CONTEXT)
    again = client.contextualized_embeddings.create(
        input=CHUNKS, model=CONTEXT, encoding_format="base64_int8", dimensions=128
    )

    assert [2, 1] == [len(document.data) for document in reply.data]
    assert {DIMENSIONS} == {len(numbers(item.embedding)) for document in reply.data for item in document.data}
    assert {128} == {len(numbers(item.embedding)) for document in again.data for item in document.data}
    assert reply.usage.total_tokens == reply.usage.prompt_tokens > 0


def test_texts_have_bytes_and_bits(gateway: Gateway) -> None:
    client = connect(gateway)
    octets = client.embeddings.create(input=TEXTS, model=MODEL)
    bits = client.embeddings.create(input=TEXTS, model=MODEL, encoding_format="base64_binary")
    lone = client.contextualized_embeddings.create(input=[[text] for text in TEXTS], model=CONTEXT)

    for item, packed, document in zip(octets.data, bits.data, lone.data, strict=True):
        vector = numbers(item.embedding)
        assert cosine(vector, numbers(document.data[0].embedding)) > 0.999
        written = "".join(f"{octet:08b}" for octet in base64.b64decode(packed.embedding))
        # Numbers next to 0 may have been rounded to it.
        assert all(
            (number > 0) == (bit == "1") for number, bit in zip(vector, written, strict=True) if number
        )


def test_errors_are_the_clients_own(gateway: Gateway) -> None:
    with pytest.raises(perplexity.BadRequestError, match="no chunk, or an empty one"):
        connect(gateway).contextualized_embeddings.create(input=[["a", ""]], model=CONTEXT)
    with pytest.raises(perplexity.BadRequestError, match="maximum context length is 256"):
        connect(gateway).contextualized_embeddings.create(input=[["w " * 300]], model=CONTEXT)
    with pytest.raises(perplexity.AuthenticationError):
        connect(gateway, "wrong").embeddings.create(input=TEXTS, model=MODEL)
    with pytest.raises(perplexity.NotFoundError):
        connect(gateway).embeddings.create(input=TEXTS, model="pplx-embed-v1-4b")
