"""OpenAI: POST /v1/embeddings, with the fields that Jina's and vLLM's clients add to it.

Source: OpenAI OpenAPI document 2.3.0, openai-python 3.3.1 (it asks for base64 unless told otherwise), Jina's
OpenAPI document 2026.04.02.
"""

from typing import Annotated, Any, Literal

import msgspec
from litestar import post
from litestar.di import NamedDependency
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import FromPath, JSONBody

from backends.contract import Embed, EmbedReply, Operation
from gateway.api.wire.inputs import Inputs, read_texts
from gateway.api.wire.vllm_options import VllmOptions, check_options, is_raw, side_of, truncate_of
from gateway.api.server.body import ModelName
from gateway.api.server.encoding import EmbeddingType, EncodingFormat, json_bytes, vector_items
from gateway.api.server.error_bodies import documented
from gateway.api.server.request_context import RequestContext
from gateway.api.server.responses import DIRECT, Api, HttpReply, expect_reply, respond
from gateway.calls import Call
from gateway.errors import InvalidInput
from gateway.prompts import Role

FAILURES = documented("openai")
# No vector is longer.
Dimensions = Annotated[int, msgspec.Meta(ge=1, le=65536)]


# Jina's, as its models name them; `input_type` has two of ours beside.
Task = Literal[
    "retrieval.query",
    "retrieval.passage",
    "code.query",
    "code.passage",
    "text-matching",
    "classification",
    "clustering",
    "separation",
]
ROLE_OF: dict[Task, Role] = {
    "retrieval.query": "query",
    "retrieval.passage": "document",
    "code.query": "query",
    "code.passage": "document",
    "text-matching": "similarity",
    "classification": "classification",
    "clustering": "clustering",
    "separation": "separation",
}
JinaType = Literal["float", "base64", "binary", "ubinary"]
# What Jina's multi-modal and multi-vector models take, and nothing here does.
REFUSED = ("late_chunking", "return_multivector")


class InputObject(msgspec.Struct):
    """Jina's form of an input; image and pdf are refused."""

    text: str | None = None
    image: Any = None
    pdf: Any = None


Given = str | InputObject


class EmbeddingsRequest(VllmOptions, kw_only=True):
    """input: one text or a list of texts; token ids, where the model's config says of which vocabulary.

    From `task` on the fields are Jina's, from `embed_dtype` on vLLM's. embedding_type goes before
    encoding_format.
    """

    input: Given | list[str | InputObject | int | list[int]]
    model: ModelName | None = None
    encoding_format: EncodingFormat | None = None
    dimensions: Dimensions | None = None
    user: str | None = None
    task: Task | None = None
    input_type: Literal["query", "document"] | None = None
    normalized: bool | None = None
    truncate: bool | None = None
    embedding_type: JinaType | list[JinaType] | None = None
    late_chunking: bool | None = None
    return_multivector: bool | None = None
    embed_dtype: Literal["float32"] | None = None
    endianness: Literal["native", "little"] | None = None


class EmbeddingItem(msgspec.Struct):
    """embedding: numbers or, for binary types, packed bits; for base64 little-endian float32 bytes."""

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


async def decode_embeddings(
    data: EmbeddingsRequest, name: str | None, context: RequestContext, api: Api
) -> Call:
    """Raises: EmptyInput, InvalidInput, and what reading token ids raises."""
    for field in REFUSED:
        if getattr(data, field):
            raise InvalidInput(f"`{field}` is not supported", param=field)
    check_options(data)
    model = name or data.model
    texts = await read_texts(inputs_of(data.input), "input", model, context, api, Operation.EMBED)
    normalize = data.normalized is not False and not is_raw(data)
    work = Embed(texts, normalize=normalize, dimensions=data.dimensions)
    role = data.input_type if data.task is None else ROLE_OF[data.task]
    truncate = data.truncate
    if data.truncate_prompt_tokens is not None:
        told = api.capabilities_of(model, Operation.EMBED)
        truncate = truncate_of(data, told.max_input_tokens if told else None)
    return Call(work, model, truncate, side_of(data), role=role)


def inputs_of(given: Given | list[str | InputObject | int | list[int]]) -> Inputs:
    """Texts and ids, objects read. Raises: InvalidInput."""
    if isinstance(given, list):
        return [_text_of(one) if isinstance(one, InputObject) else one for one in given]
    return given if isinstance(given, str) else _text_of(given)


def _text_of(given: InputObject) -> str:
    """Raises: InvalidInput."""
    if given.text is None or given.image is not None or given.pdf is not None:
        raise InvalidInput("an input is a text, or an object with `text` alone", param="input")
    return given.text


def encoding_of(data: EmbeddingsRequest) -> EmbeddingType:
    """How vectors are written. Raises: InvalidInput."""
    asked = data.embedding_type
    if asked is None:
        return data.encoding_format or "float"
    if isinstance(asked, str):
        return asked
    if len(asked) != 1:
        raise InvalidInput("`embedding_type` is one type, of several a call each", param="embedding_type")
    return asked[0]


def encode_embeddings(reply: EmbedReply, model: str, encoding: EmbeddingType) -> bytes:
    """The body; model is the name that the caller used."""
    items = [
        {"object": "embedding", "index": index, "embedding": item}
        for index, item in enumerate(vector_items(reply.vectors, encoding))
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
    opt=DIRECT,
    responses={200: ResponseSpec(EmbeddingsResponse, description="One vector for each input")} | FAILURES,
    tags=["OpenAI"],
)
async def embeddings(
    data: JSONBody[EmbeddingsRequest],
    context: NamedDependency[RequestContext],
    api: NamedDependency[Api],
    name: FromPath[str | None] = None,
) -> HttpReply:
    """Turn texts into vectors."""
    encoding = encoding_of(data)
    served = await api.serve(context, await decode_embeddings(data, name, context, api))
    reply = expect_reply(served.reply, EmbedReply)
    body = encode_embeddings(reply, served.route.model, encoding)
    return respond(context, served, body)


HANDLERS = [embeddings]
