"""Voyage: multimodal and contextualized embeddings. Others are at /v1/embeddings, its rerank at /v1/rerank.

Source: Voyage's API reference, multimodal embeddings; voyageai 0.5.0.
"""

from typing import Any, Literal

import msgspec

from backends.contract import EmbedParts, EmbedReply, Image
from gateway.api.dialects.voyage.contextualized import (
    CHUNK_TOKENS,
    ContextualizedRequest,
    contextualized_embeddings,
    perplexity_contextualized,
)
from gateway.api.document.fields import TEXTS
from gateway.api.server.body import ModelName
from gateway.api.server.dialect import Dialect
from gateway.api.server.encoding import Encoding, QuantizedType
from gateway.api.server.endpoints import inference
from gateway.api.server.error_bodies import OPENAI
from gateway.api.server.request import Request
from gateway.api.server.responses import HttpReply
from gateway.api.wire.inputs import Dimensions
from gateway.api.wire.media import VectorOptions, check_sole_content, embed_inputs, one_text
from gateway.api.wire.replies import vector_list
from gateway.calls import Call, Work
from gateway.errors import InvalidInput
from gateway.media.sources import PictureSource, SourcePart
from gateway.prompts import Role


class VoyagePart(msgspec.Struct):
    """A part of an input: a text, or an image as a `data:` URI. video_url and video_base64 are refused."""

    type: str
    text: str | None = None
    image_base64: str | None = None
    image_url: str | None = None


class VoyageInput(msgspec.Struct):
    """An input: texts and images in order."""

    content: list[VoyagePart]


class MultimodalRequest(msgspec.Struct, kw_only=True):
    """Body of /v1/multimodalembeddings.

    output_dtype: type of the numbers. output_encoding: `base64` packs each vector into one string.
    """

    inputs: list[VoyageInput]
    model: ModelName | None = None
    input_type: Literal["query", "document"] | None = None
    truncation: bool | None = None
    output_dtype: Literal["float"] | QuantizedType | None = None
    output_encoding: Literal["base64"] | None = None
    output_dimension: Dimensions | None = None


class MultimodalEmbedding(msgspec.Struct):
    """The vector of one input. index: its place in the request."""

    embedding: list[float] | str
    index: int
    object: Literal["embedding"] = "embedding"


class MultimodalUsage(msgspec.Struct):
    """Usage of a request; the client `voyageai` requires every field.

    text_tokens: of the inputs without images; 0 if the model's server reports only the sum with images.
    image_pixels: of all images. video_pixels: 0. total_tokens: of the model, for texts and images.
    """

    text_tokens: int
    image_pixels: int
    video_pixels: int
    total_tokens: int


class MultimodalResponse(msgspec.Struct):
    """Vectors, in the order of the inputs."""

    data: list[MultimodalEmbedding]
    model: str
    usage: MultimodalUsage
    object: Literal["list"] = "list"


async def decode_multimodal(request: Request[MultimodalRequest]) -> Call:
    """Decode a body. Raises: EmptyInput, InvalidInput."""
    data, model = request.body, request.model
    request.api.check_count(len(data.inputs), "inputs")
    inputs = [one_text([_part_of(part) for part in item.content]) for item in data.inputs]
    role: Role | None = data.input_type
    options = VectorOptions(dimensions=data.output_dimension)
    work = await embed_inputs(inputs, "inputs", options, request.fetch)
    return Call(work, model, data.truncation, role=role)


def _part_of(part: VoyagePart) -> SourcePart:
    """Return a text or a picture. Raises: InvalidInput."""
    check_sole_content(part, part.type, "inputs")
    if part.type == "text" and part.text is not None:
        return part.text
    source = {"image_base64": part.image_base64, "image_url": part.image_url}.get(part.type)
    if source is None:
        raise InvalidInput(
            f"`inputs` has a part of type {part.type[:64]!r}; send text, or image_base64 with a `data:` URI",
            param="inputs",
        )
    return PictureSource(source)


def usage_of(work: Work, reply: EmbedReply) -> MultimodalUsage:
    """Return the usage of a request for vectors."""
    if not isinstance(work, EmbedParts):
        return MultimodalUsage(reply.tokens, 0, 0, reply.tokens)
    images = [[part for part in parts if isinstance(part, Image)] for parts in work.inputs]
    pixels = sum(image.width * image.height for group in images for image in group)
    counts = reply.input_tokens or [0] * len(images)
    text_tokens = sum(tokens for tokens, group in zip(counts, images, strict=True) if not group)
    return MultimodalUsage(text_tokens, pixels, 0, reply.tokens)


@inference(
    "/v1/multimodalembeddings",
    errors=OPENAI,
    reply=MultimodalResponse,
    description="One vector for each input",
    tags=["Cohere and Jina"],
)
async def multimodal_embeddings(request: Request[MultimodalRequest]) -> HttpReply:
    """Turn texts and images into vectors, using Voyage's API.

    Returns one vector for each input, in the order of the inputs.
    """
    data, call = request.body, await decode_multimodal(request)
    served, reply = await request.serve(call, EmbedReply)
    encoding = Encoding((data.output_dtype or "float",), packed=data.output_encoding is not None)
    embeddings = vector_list(
        reply.vectors,
        encoding,
        lambda index, row: {"object": "embedding", "embedding": row, "index": index},
    )
    body = {
        "object": "list",
        "data": embeddings,
        "model": served.route.model,
        "usage": msgspec.to_builtins(usage_of(call.work, reply)),
    }
    return await request.reply(served, body)


EXAMPLES: dict[type[msgspec.Struct], Any] = {
    MultimodalRequest: {"model": "clip", "inputs": [{"content": [{"type": "text", "text": TEXTS[0]}]}]},
    ContextualizedRequest: {"model": "bge", "inputs": [TEXTS], "input_type": "document"},
}
MEANINGS = {
    "MultimodalRequest.inputs": "Inputs, each of texts and images.",
    "MultimodalRequest.input_type": "Purpose of the inputs, which selects the prompt put before a text.",
    "MultimodalRequest.output_encoding": "`base64` packs each vector into one string.",
    "ContextualizedRequest.inputs": "Chunks of each document, in order.",
    "ContextualizedRequest.input": "The same as `inputs`, as Perplexity names it.",
    "ContextualizedRequest.input_type": "Purpose of the documents, which selects the prompt before each.",
    "ContextualizedRequest.encoding_format": (
        "`base64` packs the numbers of `output_dtype` into a string. `base64_int8` and `base64_binary` are "
        "Perplexity's; its `input` has `base64_int8` by default."
    ),
    "ContextualizedRequest.enable_auto_chunking": (
        "Whether each document is one text, which is cut into chunks; it needs `input_type` `document`."
    ),
    "ContextualizedRequest.chunk_size": f"Tokens of a chunk that is made; by default {CHUNK_TOKENS}.",
    "ContextualizedRequest.chunk_overlap": "Tokens that a chunk shares with the one before it.",
    "VoyageInput.content": "Texts and images of one input, in order.",
    "VoyagePart.type": "`text`, `image_base64` or `image_url`; videos are refused.",
    "VoyagePart.text": "The text of the part.",
    "VoyagePart.image_base64": "`data:` URI of the image.",
    "VoyagePart.image_url": "`data:` URI of the image, or an address that `media.fetch` allows.",
}
DIALECT = Dialect(
    handlers=[multimodal_embeddings, contextualized_embeddings, perplexity_contextualized],
    examples=EXAMPLES,
    meanings=MEANINGS,
)
