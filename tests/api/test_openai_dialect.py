"""POST /v1/embeddings, as OpenAI's clients use it."""

import base64
from typing import Any

import msgspec
import numpy as np
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from backends.contract import EmbedReply
from gateway.api.dialects.openai.embeddings import body_of
from gateway.api.server.encoding import Encoding, EncodingFormat, json_bytes
from tests.conftest import KEY, Boots, posted
from tests.fakes.hooks import embedder_and_reranker as fakes
from tests.fakes.tei import FakeTei, vector_of

PATH = "/v1/embeddings"


def vector_in(item: dict[str, Any]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the vector of an item, from numbers or base64."""
    embedding = item["embedding"]
    return (
        np.frombuffer(base64.b64decode(embedding), "<f4")
        if isinstance(embedding, str)
        else np.array(embedding, "<f4")
    )


@pytest.mark.parametrize("options", [{}, {"encoding_format": "float"}, {"encoding_format": None}])
async def test_vectors_are_numbers_without_base64(boot: Boots, options: dict[str, Any]) -> None:
    reply = await posted(boot({"tei-0": FakeTei()}), PATH, {"input": "a", "model": "bge", **options})

    assert 200 == reply.status_code
    assert isinstance(reply.json()["data"][0]["embedding"], list)
    np.testing.assert_array_equal(vector_of("a"), vector_in(reply.json()["data"][0]))


async def test_base64_holds_the_same_bits_as_numbers(boot: Boots) -> None:
    async with boot({"tei-0": FakeTei()}) as gateway:
        numbers = await gateway.post(PATH, {"input": ["a", "b"], "encoding_format": "float"})
        packed = await gateway.post(PATH, {"input": ["a", "b"], "encoding_format": "base64"})

    for plain, encoded in zip(numbers.json()["data"], packed.json()["data"], strict=True):
        assert vector_in(plain).tobytes() == vector_in(encoded).tobytes()


async def test_reply_has_every_field_of_openai(boot: Boots) -> None:
    async with boot({"tei-0": FakeTei()}) as gateway:
        reply = await gateway.post(PATH, {"input": "one two", "model": "org/bge"})

    body = reply.json()
    assert {"id", "object", "data", "model", "usage"} == body.keys()
    assert f"embd-{reply.headers['x-request-id']}" == body["id"]
    assert ("list", "org/bge") == (body["object"], body["model"])
    assert {"prompt_tokens": 4, "total_tokens": 4, "completion_tokens": 0} == body["usage"]
    assert {"object": "embedding", "index": 0} == {k: body["data"][0][k] for k in ("object", "index")}


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embeddings"])
@pytest.mark.parametrize("extra", [{"user": "u-1"}, {"user": None}, {"unheard_of": {"deep": [1]}}])
async def test_ignores_fields_that_change_nothing(boot: Boots, path: str, extra: dict[str, Any]) -> None:
    reply = await posted(boot({"tei-0": FakeTei()}), path, {"input": "a", **extra})

    assert 200 == reply.status_code
    np.testing.assert_array_equal(vector_of("a"), vector_in(reply.json()["data"][0]))


async def test_uses_and_names_the_default_model(boot: Boots) -> None:
    reply = await posted(boot({"tei-0": FakeTei()}), PATH, {"input": "a"})

    assert "bge" == reply.json()["model"]


async def test_rejects_a_model_that_does_not_embed(boot: Boots) -> None:
    async with boot(fakes()) as gateway:
        reply = await gateway.post(PATH, {"input": "a", "model": "cross"})

    assert 400 == reply.status_code
    error = reply.json()["error"]
    assert ("invalid_request_error", "model", "model_not_supported") == (
        error["type"],
        error["param"],
        error["code"],
    )


async def test_official_client_reads_replies(boot: Boots) -> None:
    async with boot({"tei-0": FakeTei()}) as gateway:
        client = openai.AsyncOpenAI(
            api_key=KEY, base_url="http://gateway/v1", http_client=gateway.client, max_retries=0
        )
        reply = await client.embeddings.create(model="bge", input=["a", "b"])

    np.testing.assert_array_equal(vector_of("b"), np.array(reply.data[1].embedding, dtype=np.float32))
    assert 6 == reply.usage.total_tokens


async def test_official_client_raises_its_own_errors(boot: Boots) -> None:
    async with boot({"tei-0": FakeTei()}) as gateway:
        client = openai.AsyncOpenAI(
            api_key=KEY, base_url="http://gateway/v1", http_client=gateway.client, max_retries=0
        )
        with pytest.raises(openai.NotFoundError) as caught:
            await client.embeddings.create(model="nowhere", input="a")

    assert ("model_not_found", "model") == (caught.value.code, caught.value.param)
    assert caught.value.request_id


@settings(max_examples=200, deadline=None)
@given(
    vectors=arrays(
        np.float32,
        st.tuples(st.integers(1, 4), st.integers(1, 8)),
        elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
    ),
    encoding_format=st.sampled_from(["float", "base64"]),
)
def test_encoded_vectors_decode_bit_for_bit(
    vectors: np.ndarray[Any, np.dtype[np.float32]], encoding_format: EncodingFormat
) -> None:
    body = msgspec.json.decode(
        json_bytes(body_of(EmbedReply(vectors, 1), "m", Encoding((encoding_format,)), reply_id="x"))
    )

    assert vectors.tobytes() == b"".join(vector_in(item).tobytes() for item in body["data"])


@pytest.mark.parametrize(
    ("model", "newer"), [("bge", "/openai/v1/embeddings"), ("org/bge", "/openai/embeddings")]
)
async def test_azures_clients_name_the_model_in_the_path(boot: Boots, model: str, newer: str) -> None:
    path = f"/openai/deployments/{model}/embeddings?api-version=2024-10-21"
    async with boot({"tei-0": FakeTei()}) as gateway:
        reply = await gateway.post(path, {"input": "red", "model": "other"}, authorization="", api_key=KEY)
        latest = await gateway.post(newer, {"input": "red", "model": model})
        listed = await gateway.client.get("/openai/models?api-version=2024-10-21")

    assert model == reply.json()["model"]
    assert latest.json()["data"] == reply.json()["data"]
    assert model in [item["id"] for item in listed.json()["data"]]


async def test_wrong_keys_of_azures_header_are_throttled(boot: Boots) -> None:
    path = "/openai/deployments/bge/embeddings"
    async with boot({"tei-0": FakeTei()}) as gateway:
        replies = [
            await gateway.post(path, {"input": "red"}, authorization="", api_key=f"wrong-{number}")
            for number in range(40)
        ]

    assert {401, 429} == {reply.status_code for reply in replies}
    assert "invalid_api_key" == replies[0].json()["error"]["code"]
