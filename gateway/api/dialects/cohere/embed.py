"""Cohere: POST /v2/embed and /v1/embed. Its rerank endpoints are in `rerank.py`.

Source: cohere-python 7.0.9, types `EmbedByTypeResponse` and `EmbedFloatsResponse`.
"""

from typing import Annotated, Any

import msgspec

from backends.contract import Embed, EmbedParts, EmbedReply
from gateway.api.dialects.cohere.errors import COHERE
from gateway.api.server.body import INTEGER_MAX, Integer, ModelName
from gateway.api.server.encoding import EmbeddingType, Encoding
from gateway.api.server.endpoints import inference
from gateway.api.server.inference_api import InferenceApi
from gateway.api.server.request import Request
from gateway.api.server.responses import HttpReply
from gateway.api.wire.conversations import ContentPart
from gateway.api.wire.inputs import SIDE_OF, Dimensions, TruncateSide
from gateway.api.wire.media import VectorOptions, embed_parts, part_of
from gateway.api.wire.replies import vector_list
from gateway.calls import Call
from gateway.errors import InvalidInput
from gateway.media.sources import PictureSource, SourcePart
from gateway.prompts import Role

ROLE_OF: dict[str, Role] = {
    "search_document": "document",
    "search_query": "query",
    "classification": "classification",
    "clustering": "clustering",
}
InputType = Annotated[str, msgspec.Meta(min_length=1)]

TextTokens = Annotated[int, msgspec.Meta(ge=1, le=INTEGER_MAX)]
# Each of them is computed; there are six.
EmbeddingTypes = Annotated[list[EmbeddingType], msgspec.Meta(max_length=16)]


class CohereInput(msgspec.Struct):
    """An input in parts: one text, or texts and images for a model that reads them together."""

    content: list[ContentPart]


class EmbedV1Request(msgspec.Struct, kw_only=True):
    """Body of /v1/embed.

    input_type: Cohere's, or the name of a prompt of the model, as for vLLM; without it the model's default
    prompt applies. Without embedding_types the reply contains plain vectors. output_dimension and max_tokens
    are those of the second version: the most tokens of each text, which `truncate` cuts or refuses. images:
    `data:` URIs, instead of texts.
    """

    texts: list[str] | None = None
    model: ModelName | None = None
    input_type: InputType | None = None
    embedding_types: EmbeddingTypes | None = None
    truncate: TruncateSide | None = None
    images: list[str] | None = None
    output_dimension: Dimensions | None = None
    max_tokens: TextTokens | None = None


class EmbedV2Request(EmbedV1Request, kw_only=True):
    """Body of /v2/embed: texts, images, or inputs of one text or one image each.

    priority: 0, Cohere's highest and default, is interactive; any other value is bulk.
    """

    inputs: list[CohereInput] | None = None
    priority: Integer | None = None


class Embeddings(msgspec.Struct, omit_defaults=True):
    """The requested types, with one row for each input. docs/dialects.md describes how bits are packed."""

    float_: list[list[float]] | None = msgspec.field(default=None, name="float")
    int8: list[list[int]] | None = None
    uint8: list[list[int]] | None = None
    binary: list[list[int]] | None = None
    ubinary: list[list[int]] | None = None
    base64: list[str] | None = None


class EmbedMeta(msgspec.Struct):
    """Metadata of a reply: api_version {version} and billed_units {input_tokens}.

    Tokens are counted after truncation, with special tokens and the prompt.
    """

    api_version: dict[str, str]
    billed_units: dict[str, int]


class EmbedByTypeResponse(msgspec.Struct, omit_defaults=True):
    """Vectors by type. texts: as they were sent; absent if the request had `inputs`."""

    id: str
    embeddings: Embeddings
    meta: EmbedMeta
    response_type: str = msgspec.field(default_factory=lambda: "embeddings_by_type")
    texts: list[str] | None = None


class EmbedFloatsResponse(msgspec.Struct):
    """Plain vectors, for a /v1/embed request without types."""

    id: str
    embeddings: list[list[float]]
    texts: list[str]
    meta: EmbedMeta
    response_type: str = "embeddings_floats"


# Litestar's annotation of a response does not accept unions.
EITHER_RESPONSE: Any = EmbedFloatsResponse | EmbedByTypeResponse


async def decode_embed(request: "Request[EmbedV1Request] | Request[EmbedV2Request]") -> Call:
    """Decode a body of either version. Raises: EmptyInput, InvalidInput."""
    data = request.body
    if (call := await _decode_pictures(request)) is not None:
        return call
    texts = texts_of(data, request.api) if isinstance(data, EmbedV2Request) else data.texts or []
    if data.input_type == "image":
        raise InvalidInput("`input_type` image needs `images`", param="input_type")
    prompt_name = None if data.input_type in ROLE_OF else data.input_type
    whole = request.api.whole_texts(texts, "texts")
    return _call_of(
        data, Embed(whole, dimensions=data.output_dimension, prompt_name=prompt_name), request.model
    )


def _call_of(data: EmbedV1Request, work: Embed | EmbedParts, model: str | None) -> Call:
    """Return the call of a body. Raises: InvalidInput."""
    if data.embedding_types == []:
        raise InvalidInput("`embedding_types` is an empty list", param="embedding_types")
    if isinstance(work, EmbedParts) and data.max_tokens is not None:
        raise InvalidInput("`max_tokens` is for texts: leave it out", param="max_tokens")
    return Call(
        work,
        model,
        truncate=None if data.truncate is None else data.truncate != "NONE",
        side=None if data.truncate is None else SIDE_OF.get(data.truncate),
        role=ROLE_OF.get(data.input_type or ""),
        text_tokens=data.max_tokens,
        bulk=isinstance(data, EmbedV2Request) and bool(data.priority),
    )


async def _decode_pictures(request: "Request[EmbedV1Request] | Request[EmbedV2Request]") -> Call | None:
    """Decode a body with pictures, None if it has none. Raises: EmptyInput, InvalidInput."""
    data, api = request.body, request.api
    inputs = data.inputs if isinstance(data, EmbedV2Request) else None
    if data.images is not None:
        if data.texts is not None or inputs is not None:
            raise InvalidInput("send `images` or texts, one of them", param="images")
        api.check_count(len(data.images), "images")
        field = "images"
        sources: list[list[SourcePart]] = [[PictureSource(text)] for text in data.images]
    elif inputs is not None and any(part.image_url is not None for item in inputs for part in item.content):
        if data.texts is not None:
            raise InvalidInput("send `texts` or `inputs`, one of them", param="texts")
        api.check_count(len(inputs), "inputs")
        field = "inputs"
        sources = [[part_of(part, "inputs") for part in item.content] for item in inputs]
    else:
        return None
    options = VectorOptions(dimensions=data.output_dimension)
    work = await embed_parts(sources, field, options, request.fetch)
    if data.input_type not in {*ROLE_OF, "image", None}:
        work = msgspec.structs.replace(work, prompt_name=data.input_type)
    return _call_of(data, work, request.model)


def texts_of(data: EmbedV2Request, api: InferenceApi) -> list[str]:
    """Return the texts of a /v2/embed body. Raises: EmptyInput, InvalidInput."""
    if (data.texts is None) is (data.inputs is None):
        raise InvalidInput("send `texts` or `inputs`, one of them", param="texts")
    if data.inputs is not None:
        api.check_count(len(data.inputs), "inputs")
        return [_text_of(item, index) for index, item in enumerate(data.inputs)]
    return data.texts or []


def _text_of(item: CohereInput, index: int) -> str:
    parts = item.content
    if len(parts) == 1 and parts[0].text is not None and parts[0].type == "text":
        return parts[0].text
    raise InvalidInput(f"`inputs` {index} is not a single part of type text", param="inputs")


def encode_by_type(reply: EmbedReply, kinds: list[EmbeddingType]) -> dict[str, Any]:
    """Return the rows of each requested type, by type."""
    return {kind: vector_list(reply.vectors, Encoding((kind,))) for kind in dict.fromkeys(kinds)}


def meta_of(reply: EmbedReply, version: str) -> dict[str, Any]:
    """Return Cohere's metadata of a reply."""
    return {"api_version": {"version": version}, "billed_units": {"input_tokens": reply.tokens}}


@inference(
    "/v2/embed",
    errors=COHERE,
    reply=EmbedByTypeResponse,
    description="Vectors of each requested type",
    tags=["Cohere and Jina"],
)
async def embed_v2(request: Request[EmbedV2Request]) -> HttpReply:
    """Turn texts into vectors.

    Send `texts`, `images`, or `inputs` of one text or image each. Returns the vectors in each of
    `embedding_types`.
    """
    data = request.body
    served, reply = await request.serve(await decode_embed(request), EmbedReply)
    body = {
        "id": request.context.request_id,
        "response_type": "embeddings_by_type",
        "embeddings": encode_by_type(reply, data.embedding_types or ["float"]),
        "meta": meta_of(reply, "2"),
    }
    if data.texts is not None:
        body["texts"] = data.texts
    return await request.reply(served, body)


@inference(
    "/v1/embed",
    errors=COHERE,
    reply=EITHER_RESPONSE,
    description="Plain vectors, or vectors of each requested type",
    tags=["Cohere and Jina"],
)
async def embed_v1(request: Request[EmbedV1Request]) -> HttpReply:
    """Turn texts into vectors, with Cohere's first version of the API.

    Returns plain vectors, or the vectors in each type of `embedding_types` if the request lists any.
    """
    data = request.body
    served, reply = await request.serve(await decode_embed(request), EmbedReply)
    kinds = data.embedding_types
    body = {
        "id": request.context.request_id,
        "response_type": "embeddings_by_type" if kinds else "embeddings_floats",
        "embeddings": encode_by_type(reply, kinds) if kinds else reply.vectors,
        "texts": data.texts or [],
        "meta": meta_of(reply, "1"),
    }
    return await request.reply(served, body)


HANDLERS = [embed_v1, embed_v2]
