"""Voyage's own client, sync and async."""

import asyncio
import base64
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import voyageai
from voyageai import error

from tests.clients.conftest import Gateway

DOCUMENTS = ["a car", "an apple", "the sea", "a pear"]
DIMENSIONS = 384
WIDTH_OF = {"float": DIMENSIONS, "int8": DIMENSIONS, "uint8": DIMENSIONS, "binary": 48, "ubinary": 48}
Call = Callable[..., Any]


@pytest.fixture(params=["sync", "async"])
def call(request: pytest.FixtureRequest, gateway: Gateway) -> Call:
    """Return a function that calls a method of a client: its name, then the arguments."""
    settings = {"api_key": gateway.key, "base_url": f"{gateway.url}/v1"}

    def call_sync(method: str, *args: Any, **options: Any) -> Any:
        return getattr(voyageai.Client(**settings), method)(*args, **options)

    def call_async(method: str, *args: Any, **options: Any) -> Any:
        return asyncio.run(getattr(voyageai.AsyncClient(**settings), method)(*args, **options))

    return call_sync if request.param == "sync" else call_async


@pytest.mark.parametrize("kind", WIDTH_OF)
def test_embed_returns_every_type_in_its_size(call: Call, gateway: Gateway, kind: str) -> None:
    reply = call("embed", DOCUMENTS, model=gateway.model, output_dtype=kind)

    assert [WIDTH_OF[kind]] * len(DOCUMENTS) == [len(vector) for vector in reply.embeddings]
    assert reply.total_tokens > len(DOCUMENTS)


def test_types_of_a_text_are_the_same_vector(call: Call, gateway: Gateway) -> None:
    (floats,) = call("embed", ["an apple"], model=gateway.model).embeddings
    (integers,) = call("embed", ["an apple"], model=gateway.model, output_dtype="int8").embeddings

    assert 1 == pytest.approx(np.linalg.norm(floats), abs=1e-3)
    assert np.dot(floats, integers) > 0.999 * np.linalg.norm(integers)


def test_embed_cuts_to_the_output_dimension(call: Call, gateway: Gateway) -> None:
    (vector,) = call("embed", ["an apple"], model=gateway.model, output_dimension=64).embeddings

    assert 64 == len(vector)


def test_input_type_changes_the_vector_where_the_model_has_prompts(call: Call, gateway: Gateway) -> None:
    def vector(model: str, input_type: str) -> Any:
        return call("embed", ["an apple"], model=model, input_type=input_type).embeddings

    assert vector(gateway.prompted, "query") != vector(gateway.prompted, "document")
    assert vector(gateway.model, "query") == vector(gateway.model, "document")


def test_base64_is_returned_as_it_is_sent(gateway: Gateway) -> None:
    reply = voyageai.Embedding.create(
        input=["an apple"],
        model=gateway.model,
        encoding_format="base64",
        api_key=gateway.key,
        base_url=f"{gateway.url}/v1",
    )

    assert DIMENSIONS * 4 == len(base64.b64decode(reply.data[0]["embedding"]))


@pytest.mark.parametrize("top_k", [None, 2])
def test_rerank_puts_the_best_documents_first(call: Call, gateway: Gateway, top_k: int | None) -> None:
    reply = call("rerank", "fruit to eat", DOCUMENTS, model=gateway.model, top_k=top_k)

    assert {1, 3} == {result.index for result in reply.results[:2]}
    assert (top_k or len(DOCUMENTS)) == len(reply.results)
    assert all(DOCUMENTS[result.index] == result.document for result in reply.results)
    assert reply.total_tokens > len(DOCUMENTS)


LONG = "word " * 1000
REFUSED: list[tuple[type[Exception], str, tuple[Any, ...], dict[str, Any]]] = [
    (error.InvalidRequestError, "embed", ([LONG],), {"truncation": False}),
    (error.InvalidRequestError, "embed", (["a"],), {"output_dimension": 1000}),
    (error.InvalidRequestError, "embed", ([""],), {}),
    (error.InvalidRequestError, "rerank", ("", ["a"]), {}),
]


@pytest.mark.parametrize(("kind", "method", "args", "options"), REFUSED, ids=range(len(REFUSED)))
def test_refusals_are_the_clients_own_errors(
    call: Call, gateway: Gateway, kind: type[Exception], method: str, args: Any, options: Any
) -> None:
    with pytest.raises(kind) as failure:
        call(method, *args, model=gateway.model, **options)
    assert str(failure.value)


def test_a_wrong_key_and_a_spent_limit_have_their_own_errors(gateway: Gateway) -> None:
    def embed(key: str) -> Any:
        client = voyageai.Client(api_key=key, base_url=f"{gateway.url}/v1")
        return client.embed(["a"], model=gateway.model)

    with pytest.raises(error.AuthenticationError):
        embed("wrong")
    embed(gateway.spent)
    with pytest.raises(error.RateLimitError):
        embed(gateway.spent)
