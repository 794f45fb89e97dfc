"""Fields that no dialect has are named in a header of the reply, or refused in the caller's dialect."""

from typing import Any

import httpx
import msgspec
import pytest

from gateway.api.dialects.openai.embeddings import OpenAIEmbeddingsRequest
from gateway.api.server.endpoints import endpoint_of
from gateway.api.server.paths import options_of
from gateway.api.server.unknown_fields import (
    EXAMINED_MAX,
    HEADER,
    NAME_CHARACTERS_MAX,
    NAMES_MAX,
    scan_fields,
    strict_twin,
    takes_other_fields,
)
from gateway.app import HANDLERS
from tests.conftest import CONFIG, Running, running_gateway
from tests.fakes.hooks import embedder_and_reranker
from tests.fakes.tei import assert_vectors

REFUSING = CONFIG + "limits: {unknown_fields: refuse}\n"
MSGPACK = "application/msgpack"
TEXTS = {"content": {"parts": [{"text": "a"}]}}

# Path, body with unknown fields, their names, a part of the error, and the known name that is most similar.
BODIES: list[tuple[str, dict[str, Any], str, str]] = [
    ("/v1/embeddings", {"input": "a", "dimension": 3}, "dimension", "dimensions"),
    ("/openai/deployments/bge/embeddings", {"input": "a", "dimension": 3}, "dimension", "dimensions"),
    ("/v1/embeddings", {"input": [{"text": "a", "txt": 1}]}, "input[].txt", "text"),
    ("/embed", {"inputs": "a", "normalise": True}, "normalise", "normalize"),
    ("/", {"inputs": "a", "normalise": True}, "normalise", "normalize"),
    (
        "/similarity",
        {"inputs": {"source_sentence": "a", "sentences": ["b"]}, "parameters": {"prompt": "q"}},
        "parameters.prompt",
        "prompt_name",
    ),
    ("/vertex", {"instances": [{"inputs": "a", "dimension": 3}]}, "instances[].dimension", "dimensions"),
    ("/tokenize", {"inputs": "a", "add_special_token": 1}, "add_special_token", "add_special_tokens"),
    ("/rerank", {"query": "q", "texts": ["a"], "raw_score": True}, "raw_score", "raw_scores"),
    ("/rerank", {"query": "q", "documents": ["a"], "topn": 1}, "topn", "top_n"),
    ("/v2/rerank", {"query": "q", "documents": ["a"], "topn": 1}, "topn", "top_n"),
    ("/v2/embed", {"texts": ["a"], "embedding_type": ["float"]}, "embedding_type", "embedding_types"),
    (
        "/v1/ranking",
        {"query": {"text": "q"}, "passages": [{"text": "a"}], "trunkate": "END"},
        "trunkate",
        "truncate",
    ),
    ("/v1/multimodalembeddings", {"inputs": [], "output_type": "float"}, "output_type", "output_dtype"),
    ("/score", {"text_1": "a", "text_2": "b", "softmaxx": True}, "softmaxx", "softmax"),
    ("/pooling", {"input": "a", "dimension": 3}, "dimension", "dimensions"),
    ("/classify", {"input": "a", "activations": True}, "activations", "activation"),
    ("/infinity/embeddings", {"input": "a", "dimension": 3}, "dimension", "dimensions"),
    (
        "/v1beta/models/bge:batchEmbedContents",
        {"requests": [TEXTS | {"outputDimension": 3}]},
        "requests[].outputDimension",
        "outputDimensionality",
    ),
    ("/api/embed", {"input": "a", "dimension": 3}, "dimension", "dimensions"),
    ("/v1/encode/bge", {"items": [{"text": "a", "image": 1}]}, "items[].image", "images"),
]


def encoded(body: Any) -> bytes:
    return msgspec.json.encode(body)


async def post(gateway: Running, path: str, content: bytes, kind: str = "application/json") -> httpx.Response:
    return await gateway.client.post(path, content=content, headers={"content-type": kind})


# The body of every inference endpoint.
STRUCTS: list[type[msgspec.Struct]] = list(
    dict.fromkeys(
        endpoint.body for handler in HANDLERS if (endpoint := endpoint_of(options_of(handler).answer))
    )
)


@pytest.mark.parametrize(("path", "body", "name", "similar"), BODIES)
async def test_reply_names_unknown_fields(path: str, body: dict[str, Any], name: str, similar: str) -> None:
    async with running_gateway(embedder_and_reranker()) as gateway:
        reply = await post(gateway, path, encoded(body))

    # Whatever becomes of the call: not every model here offers every operation.
    assert name == reply.headers[HEADER], reply.text


@pytest.mark.parametrize(("path", "body", "name", "similar"), BODIES)
async def test_unknown_fields_are_refused_in_each_dialect(
    path: str, body: dict[str, Any], name: str, similar: str
) -> None:
    async with running_gateway(embedder_and_reranker(), REFUSING) as gateway:
        reply = await post(gateway, path, encoded(body))

    # The envelope is that of any other refusal of a body at the path.
    async with running_gateway(embedder_and_reranker()) as gateway:
        mistyped = body | dict.fromkeys(("model", "requests", "items", "instances"), 5)
        other = await post(gateway, path, encoded(mistyped))
    assert reply.status_code in (400, 422)
    assert f"`{name}` is not a field of this request; did you mean `{similar}`?" in reply.text.replace(
        "\\u0060", "`"
    )
    assert other.json().keys() == reply.json().keys()
    assert HEADER not in reply.headers


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__qualname__)
def test_every_body_has_a_twin_that_refuses_unknown_fields(struct: type[msgspec.Struct]) -> None:
    twin = strict_twin(struct)

    assert issubclass(twin, struct)
    assert set(struct.__struct_encode_fields__) == set(twin.__struct_encode_fields__)
    with pytest.raises(msgspec.ValidationError) as refused:
        msgspec.json.decode(b'{"no_such_field": 1}', type=twin)
    is_about_it = "unknown field `no_such_field`" in str(refused.value)
    assert is_about_it is not takes_other_fields(struct)


async def test_unknown_fields_change_no_result() -> None:
    async with running_gateway(embedder_and_reranker()) as gateway:
        reply = await post(
            gateway, "/v1/embeddings", b" \n" + encoded({"dimension": 3, "input": ["a", "b"], "x": [[{}]]})
        )

    assert_vectors(reply, "a", "b")
    assert "dimension, x" == reply.headers[HEADER]


async def test_reply_to_a_body_of_known_fields_has_no_such_header() -> None:
    body = {"input": ["a"], "user": "u", "encoding_format": "float", "dimensions": None}
    async with running_gateway(embedder_and_reranker(), REFUSING) as gateway:
        reply = await post(gateway, "/v1/embeddings", encoded(body))

    assert_vectors(reply, "a")
    assert HEADER not in reply.headers


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/rerank", {"query": "q", "documents": [{"text": "a", "id": 7, "source": {"page": 1}}]}),
        ("/api/embed", {"input": "a", "options": {"temperature": 0, "num_ctx": 64}, "keep_alive": "5m"}),
    ],
)
async def test_fields_that_documents_say_are_ignored_are_not_reported(
    path: str, body: dict[str, Any]
) -> None:
    async with running_gateway(embedder_and_reranker(), REFUSING) as gateway:
        reply = await post(gateway, path, encoded(body))

    assert 200 == reply.status_code, reply.text
    assert HEADER not in reply.headers


async def test_header_is_bounded_and_has_safe_characters_only() -> None:
    names = ["a\r\nset-cookie: b=c", "ключ", "x" * 5000, *(f"field-{number}" for number in range(100))]
    async with running_gateway(embedder_and_reranker()) as gateway:
        reply = await post(gateway, "/v1/embeddings", encoded({"input": "a"} | dict.fromkeys(names, 1)))

    assert "set-cookie" not in reply.headers
    found = reply.headers[HEADER].split(", ")
    assert ["a??set-cookie??b?c", "????", "x" * NAME_CHARACTERS_MAX, "field-0"] == found[:4]
    assert NAMES_MAX + 1 == len(found)
    assert "..." == found[-1]


def test_a_bounded_number_of_unknown_names_is_examined() -> None:
    # All of them are shown as one name, so that there is no sixteenth to stop at.
    names = [f"{'!' * NAME_CHARACTERS_MAX}{number}" for number in range(EXAMINED_MAX)]
    body = {"input": "a"} | dict.fromkeys(names, 1)
    below = scan_fields(encoded(body), OpenAIEmbeddingsRequest, is_msgpack=False)
    above = scan_fields(encoded(body | {"k": 1}), OpenAIEmbeddingsRequest, is_msgpack=False)

    assert "?" * NAME_CHARACTERS_MAX == below.header()
    assert "?" * NAME_CHARACTERS_MAX + ", ..." == above.header()


@pytest.mark.parametrize("config", [CONFIG, REFUSING])
async def test_large_bodies_are_read_too(config: str) -> None:
    texts = [f"{{{number}: {'a' * 100}" for number in range(1000)]
    async with running_gateway(embedder_and_reranker(), config) as gateway:
        reply = await post(gateway, "/v1/embeddings", encoded({"input": texts, "dimension": 3}))

    if config == REFUSING:
        assert (400, "dimension") == (reply.status_code, reply.json()["error"]["param"])
    else:
        assert_vectors(reply, *texts)
        assert "dimension" == reply.headers[HEADER]


async def test_msgpack_is_read_too() -> None:
    body = {"items": [{"text": "a", "image": b"1"}], "param": {}}
    async with running_gateway(embedder_and_reranker()) as gateway:
        reply = await post(gateway, "/v1/encode/bge", msgspec.msgpack.encode(body), MSGPACK)

    assert "items[].image, param" == reply.headers[HEADER]


async def test_fields_that_are_refused_by_themselves_still_are() -> None:
    body = {"messages": [{"role": "user", "content": "a", "tool_calls": []}], "dimension": 3}
    async with running_gateway(embedder_and_reranker()) as gateway:
        reply = await post(gateway, "/v1/embeddings", encoded(body))

    assert 400 == reply.status_code
    assert "tool_calls" in reply.text


@pytest.mark.parametrize(
    "body", [b'{"input": "a", "\xff": 1}', b'{"input": "a", "x": ', b'{"input": "a", "x": [}']
)
async def test_broken_bodies_are_refused_as_such(body: bytes) -> None:
    async with running_gateway(embedder_and_reranker()) as gateway:
        reply = await post(gateway, "/v1/embeddings", body)

    assert 400 == reply.status_code
    assert "invalid_request_error" == reply.json()["error"]["type"]


async def test_a_reload_changes_the_rule() -> None:
    async with running_gateway(embedder_and_reranker()) as gateway:
        body = encoded({"input": "a", "dimension": 3})
        assert 200 == (await post(gateway, "/v1/embeddings", body)).status_code
        await gateway.follow(REFUSING)

        assert 400 == (await post(gateway, "/v1/embeddings", body)).status_code
