"""OpenAI: POST /v1/embeddings, with the fields that Jina's and vLLM's clients add to it.

Source: OpenAI OpenAPI document 2.3.0, openai-python 3.3.1 (which requests base64 by default), Jina's OpenAPI
document 2026.04.02.
"""

from typing import Any, Literal

import msgspec
from litestar.openapi.datastructures import ResponseSpec

from backends.contract import Embed, EmbedReply, Operation
from gateway.api.server.body import Integer, ModelName
from gateway.api.server.encoding import EmbeddingType, EncodingFormat, json_bytes, vector_items
from gateway.api.server.endpoints import inference
from gateway.api.server.error_bodies import OPENAI
from gateway.api.server.inference_api import InferenceApi, expect_reply, respond
from gateway.api.server.request_context import RequestContext
from gateway.api.server.responses import HttpReply
from gateway.api.wire.inputs import Dimensions, InputField, Inputs, read_texts
from gateway.api.wire.vllm_options import (
    VllmOptions,
    check_options,
    instruction_of,
    is_raw,
    truncate_of,
    truncation_side,
)
from gateway.calls import Call
from gateway.errors import InvalidInput
from gateway.prompts import Role

# Jina's names, as its models have them. `input_type` takes two of the gateway's own roles.
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
# Fields for Jina's multi-modal and multi-vector models, which the gateway does not serve.
UNSUPPORTED_FIELDS = ("late_chunking", "return_multivector")


class InputObject(msgspec.Struct):
    """An input in Jina's form. image and pdf are refused."""

    text: str | None = None
    image: Any = None
    pdf: Any = None


TextInput = str | InputObject
EmbeddingsInput = TextInput | list[str | InputObject | Integer | list[Integer]]


class OpenAIEmbeddingsRequest(VllmOptions, kw_only=True):
    """Body of /v1/embeddings.

    input: one text or a list of texts; or token ids, if the model's config specifies their vocabulary. The
    fields from `task` on are Jina's, from `embed_dtype` on vLLM's. embedding_type overrides encoding_format.
    """

    input: EmbeddingsInput
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


class OpenAIEmbeddingItem(msgspec.Struct):
    """One vector.

    embedding: numbers; for binary types packed bits; for base64 the little-endian float32 bytes.
    """

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class OpenAIEmbeddingsUsage(msgspec.Struct):
    """Tokens after truncation, with special tokens and the prompt."""

    prompt_tokens: int
    total_tokens: int


class OpenAIEmbeddingsResponse(msgspec.Struct):
    """Vectors of length 1, in the order of the inputs."""

    data: list[OpenAIEmbeddingItem]
    model: str
    usage: OpenAIEmbeddingsUsage
    object: str = "list"


async def decode_embeddings(
    data: OpenAIEmbeddingsRequest, name: str | None, context: RequestContext, api: InferenceApi
) -> Call:
    """Decode a body. name: the model in the path.

    Raises: EmptyInput, InvalidInput, and the errors of `read_texts`.
    """
    for unsupported in UNSUPPORTED_FIELDS:
        if getattr(data, unsupported):
            raise InvalidInput(f"`{unsupported}` is not supported", param=unsupported)
    check_options(data)
    model = name or data.model
    field = InputField("input", model, Operation.EMBED)
    texts = await read_texts(inputs_of(data.input, api), field, context, api)
    normalize = data.normalized is not False and not is_raw(data)
    work = Embed(texts, normalize=normalize, dimensions=data.dimensions)
    role = data.input_type if data.task is None else ROLE_OF[data.task]
    truncate = data.truncate
    if data.truncate_prompt_tokens is not None:
        capabilities = api.capabilities_of(model, Operation.EMBED)
        truncate = truncate_of(data, capabilities.max_input_tokens if capabilities else None)
    instruction = instruction_of(data)
    return Call(work, model, truncate, truncation_side(data), role=role, instruction=instruction)


def inputs_of(inputs: EmbeddingsInput, api: InferenceApi) -> Inputs:
    """Return the inputs with each object replaced by its text.

    Raises: EmptyInput, InvalidInput.
    """
    if isinstance(inputs, list):
        # A list of numbers is one input.
        if not inputs or not isinstance(inputs[0], int):
            api.check_count(len(inputs), "input")
        return [_text_of(item) if isinstance(item, InputObject) else item for item in inputs]
    return inputs if isinstance(inputs, str) else _text_of(inputs)


def _text_of(item: InputObject) -> str:
    if item.text is None or item.image is not None or item.pdf is not None:
        raise InvalidInput("an input is a text, or an object with `text` alone", param="input")
    return item.text


def encoding_of(data: OpenAIEmbeddingsRequest) -> EmbeddingType:
    """Return the format of the vectors in the reply.

    Raises: InvalidInput.
    """
    kinds = data.embedding_type
    if kinds is None:
        return data.encoding_format or "float"
    if isinstance(kinds, str):
        return kinds
    if len(kinds) != 1:
        raise InvalidInput("`embedding_type` is one type, of several a call each", param="embedding_type")
    return kinds[0]


def encode_embeddings(reply: EmbedReply, model: str, encoding: EmbeddingType) -> bytes:
    """Encode the reply. model: the name that the caller used."""
    items = [
        {"object": "embedding", "index": index, "embedding": item}
        for index, item in enumerate(vector_items(reply.vectors, encoding))
    ]
    usage = {"prompt_tokens": reply.tokens, "total_tokens": reply.tokens}
    return json_bytes({"object": "list", "data": items, "model": model, "usage": usage})


@inference(
    "/v1/embeddings",
    "/embeddings",
    dialect=OPENAI,
    reply=ResponseSpec(OpenAIEmbeddingsResponse, description="One vector for each input"),
    tags=["OpenAI"],
)
async def embeddings(
    data: OpenAIEmbeddingsRequest,
    context: RequestContext,
    api: InferenceApi,
    name: str | None,
) -> HttpReply:
    """Turn texts into vectors.

    Returns one vector for each input, in the order of the inputs. Also takes Jina's fields (`task`,
    `normalized`, `embedding_type`) and vLLM's (`truncate_prompt_tokens`, `use_activation`).
    """
    encoding = encoding_of(data)
    served = await api.serve(context, await decode_embeddings(data, name, context, api))
    reply = expect_reply(served.reply, EmbedReply)
    body = encode_embeddings(reply, served.route.model, encoding)
    return respond(context, served, body)


HANDLERS = [embeddings]
