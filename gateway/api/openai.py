"""OpenAI: POST /v1/embeddings.

Source: OpenAI OpenAPI document 2.3.0, openai-python 3.3.1 (it asks for base64 unless told otherwise).
"""

from typing import Annotated

import msgspec
from litestar import post
from litestar.di import NamedDependency
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import FromPath, JSONBody

from backends.contract import Embed, Embedded
from gateway.api.answering import STRAIGHT, Answer, Api, finished, reply_as
from gateway.api.body import ModelName
from gateway.api.exchange import Exchange
from gateway.api.failures import documented
from gateway.api.rendering import EncodingFormat, json_bytes, vector_items
from gateway.calls import Call

FAILURES = documented("openai")
# No vector is longer.
Dimensions = Annotated[int, msgspec.Meta(ge=1, le=65536)]


class EmbeddingsRequest(msgspec.Struct):
    """input: one text or a list of texts; token ids are refused."""

    input: str | list[str]
    model: ModelName | None = None
    encoding_format: EncodingFormat | None = None
    dimensions: Dimensions | None = None
    user: str | None = None


class EmbeddingItem(msgspec.Struct):
    """embedding: numbers, or for base64 their little-endian float32 bytes."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingsUsage(msgspec.Struct):
    """Tokens after truncation, specials and prompt included."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsResponse(msgspec.Struct):
    """Vectors of length 1, in input order."""

    data: list[EmbeddingItem]
    model: str
    usage: EmbeddingsUsage
    object: str = "list"


def decode_embeddings(data: EmbeddingsRequest, name: str | None, api: Api) -> Call:
    """Raises: EmptyInput, InvalidInput."""
    work = Embed(api.whole_texts(data.input, "input"), dimensions=data.dimensions)
    return Call(work, name or data.model)


def encode_embeddings(reply: Embedded, model: str, encoding_format: EncodingFormat) -> bytes:
    """The body; model is the name that the caller used."""
    items = [
        {"object": "embedding", "index": index, "embedding": item}
        for index, item in enumerate(vector_items(reply.vectors, encoding_format))
    ]
    usage = {"prompt_tokens": reply.tokens, "total_tokens": reply.tokens}
    return json_bytes({"object": "list", "data": items, "model": model, "usage": usage})


@post(
    [
        "/v1/embeddings",
        "/embeddings",
        "/models/{name:str}/v1/embeddings",
        "/models/{name:str}/embeddings",
    ],
    status_code=200,
    opt=STRAIGHT,
    responses={200: ResponseSpec(EmbeddingsResponse, description="One vector for each input")} | FAILURES,
    tags=["OpenAI"],
)
async def embeddings(
    data: JSONBody[EmbeddingsRequest],
    exchange: NamedDependency[Exchange],
    api: NamedDependency[Api],
    name: FromPath[str | None] = None,
) -> Answer:
    """Turn texts into vectors."""
    served = await api.serve(exchange, decode_embeddings(data, name, api))
    reply = reply_as(served.reply, Embedded)
    body = encode_embeddings(reply, served.route.model, data.encoding_format or "float")
    return finished(exchange, served, body)


HANDLERS = [embeddings]
