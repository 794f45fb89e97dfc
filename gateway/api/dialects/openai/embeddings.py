"""OpenAI and Azure OpenAI: embeddings, with the fields that other services' clients add to them.

Source: OpenAI OpenAPI document 2.3.0, openai-python 3.3.1 (which requests base64 by default), and Azure
OpenAI's reference 2024-10-21, whose body is the same in every `api-version`. The fields of
Jina, NVIDIA NIM and Voyage are in `options.py`, those of vLLM in `gateway/api/wire/vllm.py`.
"""

from collections.abc import Iterator
from operator import attrgetter
from typing import Any, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from backends.contract import (
    Capabilities,
    ChunkSize,
    Embed,
    EmbedChunks,
    EmbedChunksReply,
    EmbedReply,
    Encode,
    EncodeReply,
    Operation,
    Output,
    Turns,
)
from gateway.api.dialects.openai.options import EmbeddingOptions
from gateway.api.server.body import Integer, ModelName
from gateway.api.server.encoding import BYTES, PLAIN_FLOATS, Encoding, LazyList
from gateway.api.server.endpoints import BodyForms, inference
from gateway.api.server.error_bodies import OPENAI
from gateway.api.server.inference_api import InferenceApi
from gateway.api.server.request import Request
from gateway.api.server.responses import HttpReply
from gateway.api.wire.arrow import write_vectors
from gateway.api.wire.arrow_http import arrow_body, arrow_stream, facts_of, wants_arrow
from gateway.api.wire.conversations import ContentPart, is_media
from gateway.api.wire.inputs import InputField, Inputs, check_token_vectors, read_inputs
from gateway.api.wire.media import (
    VectorOptions,
    embed_parts,
    have_media,
    one_text,
    part_of,
    parts_of_messages,
)
from gateway.api.wire.replies import vector_list, with_dimensions
from gateway.api.wire.vllm import check_metadata, reply_head, reply_packed
from gateway.calls import Call
from gateway.errors import InvalidInput
from gateway.media.sources import PictureSource, SoundSource, SourcePart

# What prepares texts, and has no effect on a conversation.
CHUNKING = ("late_chunking", "late_chunking_params")
ONLY_OF_TEXTS = ("input_type", "task", *CHUNKING)
PICTURE_KINDS = ("image", "url", "bytes")
MEDIA_KINDS = (*PICTURE_KINDS, "audio")
OTHER_KINDS = ("pdf", "video")
ALL_KINDS = ("text", "content", *MEDIA_KINDS, *OTHER_KINDS)


# Parts of each input, and its messages if it is a conversation.
MediaInputs: TypeAlias = tuple[list[list[SourcePart]], tuple[Turns, ...]]


class InputObject(msgspec.Struct):
    """An input in Jina's form: `text`, or `image` or `audio` as base64. pdf and video are refused.

    url, bytes: an image in Jina's first form, which LangChain and LlamaIndex send. content: OpenRouter's
    form, the parts of an input with one vector.
    """

    text: str | None = None
    image: str | None = None
    audio: str | None = None
    url: str | None = None
    bytes: str | None = None
    pdf: Any = None
    video: Any = None
    content: list[ContentPart] | None = None


TextInput = str | InputObject
EmbeddingsInput = TextInput | list[str | InputObject | Integer | list[Integer]]


class OpenAIEmbeddingsRequest(EmbeddingOptions, kw_only=True):
    """Body of /v1/embeddings.

    input: one text or a list of texts; or token ids, if the model's config specifies their vocabulary. Only
    a body with `messages` is without it, or has an empty one.
    """

    input: EmbeddingsInput | UnsetType | None = UNSET
    model: ModelName | None = None


Embedding = list[float] | str


class LateChunk(msgspec.Struct):
    """First token and character of a chunk of an input, and the ones after its last.

    char_range: null for a chunk of special tokens only.
    """

    token_range: tuple[int, int]
    char_range: tuple[int, int] | None


class LateChunking(msgspec.Struct):
    """Chunks that were made of an input, in order. input_tokens: of the input, special ones included."""

    input_tokens: int | None
    chunks: list[LateChunk]


class OpenAIEmbeddingItem(msgspec.Struct):
    """One vector.

    embedding: numbers; for binary types packed bits; for base64 the little-endian bytes of the numbers; for
    several types an object with one of these for each type; for `late_chunking_params` a list with one of
    these for each chunk, whose places are in late_chunking.
    """

    index: int
    embedding: list[float | Embedding] | str | dict[str, Embedding]
    object: str = "embedding"
    late_chunking: LateChunking | UnsetType = UNSET


class PatchPlaces(msgspec.Struct):
    """Vectors of a page's patches: the upper left one, the others behind it row by row."""

    first: int
    rows: int
    columns: int


class MultiVectorItem(msgspec.Struct):
    """One vector for each token of an input, each in a form of `OpenAIEmbeddingItem.embedding`."""

    index: int
    embeddings: list[Embedding | dict[str, Embedding]]
    object: str = "embeddings"
    patch_grid: PatchPlaces | msgspec.UnsetType = msgspec.UNSET


class CachedTokens(msgspec.Struct):
    """Tokens of the texts whose vectors were found in the cache; they are part of `prompt_tokens`."""

    cached_tokens: int


class OpenAIEmbeddingsUsage(msgspec.Struct):
    """Tokens after truncation, with special tokens and the prompt.

    completion_tokens: 0, which clients of chat APIs require. prompt_tokens_details: only if the model has a
    cache.
    """

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: CachedTokens | msgspec.UnsetType = msgspec.UNSET


class OpenAIEmbeddingsResponse(msgspec.Struct):
    """Vectors of length 1, in the order of the inputs. With `return_multivector` as /v1/multi-vector.

    id: of the request, which Mistral's clients require.
    """

    id: str
    data: list[OpenAIEmbeddingItem]
    model: str
    usage: OpenAIEmbeddingsUsage
    object: str = "list"


class MultiVectorResponse(msgspec.Struct):
    """One vector for each token of an input, in the order of the inputs."""

    id: str
    data: list[MultiVectorItem]
    model: str
    usage: OpenAIEmbeddingsUsage
    object: str = "list"


# Fields that decide what is computed. Read at once, because every call is checked.
_options_of = attrgetter(
    *(field for field in EmbeddingOptions.__struct_fields__ if field not in {"encoding_format", "user"})
)
_NO_OPTIONS = _options_of(OpenAIEmbeddingsRequest())


async def decode_embeddings(request: Request[OpenAIEmbeddingsRequest]) -> Call:
    """Decode a body. Raises: EmptyInput, InvalidInput, and the errors of `read_texts`."""
    data, api = request.body, request.api
    if _options_of(data) != _NO_OPTIONS or _has_objects(data.input):
        return await _decode_options(request)
    model = request.model
    field = InputField("input", model, Operation.EMBED)
    texts = await read_inputs(inputs_of(data.input, api), None, field, request.context, api)
    check_metadata(data.encoding_format, len(texts))
    return Call(Embed(texts), model)


async def _decode_options(request: Request[OpenAIEmbeddingsRequest]) -> Call:
    """Decode a body with options. Raises: as `decode_embeddings`."""
    data, api, model = request.body, request.api, request.model
    data.check_all()
    if (media := _with_media(data, api)) is not None:
        return await _decode_media(request, *media)
    operation = Operation.ENCODE if data.return_multivector else Operation.EMBED
    field = InputField("input", model, operation)
    inputs_of_body = data.input if data.messages is None else data.input or None
    texts = await read_inputs(inputs_of(inputs_of_body, api), data.messages, field, request.context, api)
    tenant = request.context.tenant
    if data.return_multivector:
        check_token_vectors(texts, "input", api.capabilities_of(model, operation, tenant))
    check_metadata(data.encoding_format, len(texts))
    truncate, side = data.cut_and_side()
    if data.messages is not None:
        _check_only_chat(data)
    if data.makes_chunks:
        capabilities = api.capabilities_of(model, operation, tenant)
        work: Embed | EmbedChunks | Encode = _chunks_of(data, texts, capabilities)
    else:
        work = data.with_chat(_work_of(data, texts))
    return Call(
        work,
        model,
        truncate,
        side,
        role=data.role(),
        instruction=data.checked_instruction(),
        prompt_tokens=data.length,
    )


def _has_objects(inputs: object) -> bool:
    """Return whether an input is in Jina's form."""
    # Types in C, because every call is asked; there are one or two.
    kinds = set(map(type, inputs)) if isinstance(inputs, list) else {type(inputs)}
    for kind in kinds:  # noqa: SIM110 - a generator costs more
        if issubclass(kind, InputObject):
            return True
    return False


def _with_media(data: OpenAIEmbeddingsRequest, api: InferenceApi) -> MediaInputs | None:
    """Return the inputs of a request if one is a picture or a recording. Raises: EmptyInput, InvalidInput."""
    if data.messages is not None and have_media(data.messages):
        if data.input not in (UNSET, None, "", []):
            raise InvalidInput("send `input` or `messages`, one of them", param="messages")
        inputs, turns = parts_of_messages(data.messages)
        api.check_count(len(inputs), "messages")
        return inputs, turns
    items = data.input if isinstance(data.input, list) else [data.input]
    if not any(isinstance(item, InputObject) and _is_medium(item) for item in items):
        return None
    api.check_count(len(items), "input")
    return [_parts_of(item) for item in items], ()


def _is_medium(item: InputObject) -> bool:
    """Return whether an input is a picture or a recording, or has one among its parts."""
    if item.content is not None and is_media(item.content):
        return True
    return item.audio is not None or _picture_of(item) is not None


def _picture_of(item: InputObject) -> str | None:
    """Return the address or the base64 of an input that is a picture."""
    return next((source for kind in PICTURE_KINDS if (source := getattr(item, kind)) is not None), None)


def _parts_of(item: Any) -> list[SourcePart]:
    """Return the text, picture or recording of an input, or its parts. Raises: InvalidInput."""
    if isinstance(item, str):
        return [item]
    if not isinstance(item, InputObject):
        raise InvalidInput("`input` mixes token ids with images or sound", param="input")
    if not _is_medium(item):
        return [_text_of(item)]
    if sum(getattr(item, kind) is not None for kind in ALL_KINDS) > 1:
        raise InvalidInput(
            "an input is one text or one image, or one `audio`; send each as its own, or all as `content`",
            param="input",
        )
    if item.content is not None:
        return one_text([part_of(part, "input") for part in item.content])
    picture = _picture_of(item)
    return [SoundSource(str(item.audio)) if picture is None else PictureSource(picture)]


async def _decode_media(
    request: Request[OpenAIEmbeddingsRequest], inputs: list[list[SourcePart]], turns: tuple[Turns, ...]
) -> Call:
    """Return the call of inputs with pictures or sound. turns: of conversations.

    Raises: EmptyInput, InvalidInput.
    """
    data = request.body
    for field in CHUNKING:
        if getattr(data, field):
            raise InvalidInput(f"`{field}` is for texts: leave it out", param=field)
    options = VectorOptions(data.normalizes(), data.width(), bool(data.return_multivector))
    field = "input" if data.messages is None else "messages"
    work = await embed_parts(inputs, field, options, request.fetch, turns)
    check_metadata(data.encoding_format, len(inputs))
    chat = data.chat()
    if chat is not None:
        _check_only_chat(data)
        work = msgspec.structs.replace(work, special_tokens=bool(data.add_special_tokens))
    truncate, side = data.cut_and_side()
    return Call(
        msgspec.structs.replace(work, chat=chat, prompt_name=data.prompt_name()),
        request.model,
        truncate,
        side,
        role=data.role(),
        instruction=data.checked_instruction(),
        prompt_tokens=data.length,
    )


def _chunks_of(
    data: EmbeddingOptions, texts: tuple[str, ...], capabilities: Capabilities | None
) -> EmbedChunks:
    """Return the work of one document whose chunks are the texts, or of texts that are cut into chunks.

    capabilities: of the model. Raises: InvalidInput.
    """
    field = "late_chunking_params" if data.late_chunking_params is not None else "late_chunking"
    if field == "late_chunking_params" and data.late_chunking:
        raise InvalidInput("send `late_chunking` or `late_chunking_params`, one of them", param=field)
    if data.return_multivector:
        raise InvalidInput(f"send `{field}` or `return_multivector`, one of them", param=field)
    for name, is_set in (
        ("truncate_prompt_tokens", data.truncate_prompt_tokens is not None),
        ("add_special_tokens", data.add_special_tokens is False),
    ):
        if is_set:
            raise InvalidInput(
                f"`{name}` has no effect on `{field}`, which reads whole documents: leave one of them out",
                param=name,
            )
    documents: tuple[tuple[str, ...], ...] = (texts,)
    size = None
    if data.late_chunking_params is not None:
        documents, size = tuple([(text,) for text in texts]), ChunkSize(data.late_chunking_params.chunk_size)
        check_token_vectors(texts, "input", capabilities, size.tokens)
    return EmbedChunks(
        documents,
        size,
        normalize=data.normalizes(),
        dimensions=data.width(),
        prompt_name=data.prompt_name(),
    )


def _work_of(data: EmbeddingOptions, texts: tuple[str, ...]) -> Embed | Encode:
    """Return the work of a request. Raises: InvalidInput."""
    normalize = data.normalizes()
    dimensions, prompt_name = data.width(), data.prompt_name()
    if not data.return_multivector:
        return Embed(texts, normalize=normalize, dimensions=dimensions, prompt_name=prompt_name)
    if not normalize:
        field = "normalized" if data.normalized is False else "use_activation"
        raise InvalidInput(f"multi-vectors are normalized: leave out `{field}`", param=field)
    return Encode(texts, frozenset({Output.MULTIVECTOR}), prompt_name=prompt_name)


def _check_only_chat(data: EmbeddingOptions) -> None:
    """Check that a request with conversations has no field that puts prompts before texts or joins them.

    Raises: InvalidInput.
    """
    for field in ONLY_OF_TEXTS:
        if getattr(data, field):
            raise InvalidInput(f"`{field}` is for texts: send it without `messages`", param=field)


def inputs_of(inputs: EmbeddingsInput | UnsetType | None, api: InferenceApi) -> Inputs | None:
    """Return the inputs with each object replaced by its text, None if the field is absent.

    Raises: EmptyInput, InvalidInput.
    """
    if inputs is None or isinstance(inputs, UnsetType):
        return None
    if isinstance(inputs, list):
        # A list of numbers is one input.
        if not inputs or not isinstance(inputs[0], int):
            api.check_count(len(inputs), "input")
        return [_text_of(item) if isinstance(item, InputObject) else item for item in inputs]
    return inputs if isinstance(inputs, str) else _text_of(inputs)


def _text_of(item: InputObject) -> str:
    if item.content and sum(getattr(item, kind) is not None for kind in ALL_KINDS) == 1:
        # Parts with media are read elsewhere.
        return "\n".join([str(part_of(part, "input")) for part in item.content])
    if item.text is None or any(getattr(item, kind) is not None for kind in (*OTHER_KINDS, "content")):
        raise InvalidInput(
            "an input is a text, or an object with `text`, `image`, `audio` or `content` alone", param="input"
        )
    return item.text


@inference(
    "/v1/embeddings",
    "/embeddings",
    errors=OPENAI,
    reply=OpenAIEmbeddingsResponse,
    description="One vector for each input",
    tags=["OpenAI"],
    forms=BodyForms(arrow=arrow_body(OpenAIEmbeddingsRequest, "input"), octets=True),
)
async def embeddings(request: Request[OpenAIEmbeddingsRequest]) -> HttpReply:
    """Turn texts into vectors.

    Returns one vector for each input, in the order of the inputs. Also takes the fields of Jina (`task`,
    `embedding_type`), NIM (`input_type`, `truncate`), Voyage (`output_dimension`, `output_dtype`) and vLLM.
    Takes and returns Arrow as `/embed` does.
    """
    return await _serve(request)


@inference(
    "/v1/multi-vector",
    errors=OPENAI,
    reply=MultiVectorResponse,
    description="One vector for each token of each input",
    tags=["Cohere and Jina"],
)
async def multi_vector(request: Request[OpenAIEmbeddingsRequest]) -> HttpReply:
    """Turn texts into one vector for each token, as late interaction compares them.

    The same as `/v1/embeddings` with `return_multivector`.
    """
    request.body.return_multivector = True
    return await _serve(request)


@inference(
    "/openai/v1/embeddings",
    "/openai/embeddings",
    "/openai/deployments/{name:str}/embeddings",
    errors=OPENAI,
    reply=OpenAIEmbeddingsResponse,
    description="One vector for each input",
    tags=["Azure"],
    below_models=False,
)
async def deployment_embeddings(request: Request[OpenAIEmbeddingsRequest]) -> HttpReply:
    """Turn texts into vectors, as Azure OpenAI does.

    The same as `/v1/embeddings`. The deployment in the path is the model; `api-version` is ignored.
    """
    return await _serve(request)


@inference(
    "/perplexity/v1/embeddings",
    errors=OPENAI,
    reply=OpenAIEmbeddingsResponse,
    description="One vector for each input, as bytes in base64",
    tags=["OpenAI"],
    below_models=False,
)
async def perplexity_embeddings(request: Request[OpenAIEmbeddingsRequest]) -> HttpReply:
    """Turn texts into vectors, as Perplexity does.

    The same as `/v1/embeddings`, but `encoding_format` is `base64_int8` by default, because Perplexity has no
    vectors of numbers.
    """
    if request.body.encoding_format is None:
        request.body.encoding_format = "base64_int8"
    return await _serve(request)


async def _serve(request: Request[OpenAIEmbeddingsRequest]) -> HttpReply:
    data, context = request.body, request.context
    encoding = data.encoding()
    as_arrow = wants_arrow(context)
    if as_arrow:
        _check_arrow(data, encoding)
    if (data.return_multivector or data.late_chunking_params) and data.encoding_format in BYTES:
        raise InvalidInput("multi-vectors are sent as `float` or `base64`", param="encoding_format")
    served, reply = await request.serve(
        await decode_embeddings(request), EmbedReply | EmbedChunksReply | EncodeReply
    )
    if as_arrow:
        facts = facts_of(served.route.model, reply.tokens)
        stream, media_type = await arrow_stream(context, write_vectors, reply.vectors, facts)
        return request.reply_bytes(served, stream, None, media_type)
    if data.encoding_format in BYTES:
        return await reply_packed(request, served, list(reply.vectors), data.numbers())
    dimensions = data.width()
    if dimensions and isinstance(reply, EncodeReply):
        reply = await with_dimensions(reply, dimensions)
    cached_tokens = None if served.cache is None else served.cache.tokens
    reply_id: str = reply_head("embd", context, data.request_id)["id"]
    body = body_of(reply, served.route.model, encoding, cached_tokens, reply_id=reply_id)
    return await request.reply(served, body)


def _check_arrow(data: OpenAIEmbeddingsRequest, encoding: Encoding) -> None:
    """Check that the reply is one float32 vector for each input, as Arrow's is. Raises: InvalidInput."""
    for field in ("return_multivector", "late_chunking_params"):
        if getattr(data, field):
            raise InvalidInput("multi-vectors are sent as JSON: accept it", param=field)
    if encoding != PLAIN_FLOATS or data.encoding_format not in {None, "float"}:
        raise InvalidInput(
            "an Arrow reply has float32 numbers: leave out the encoding and the type", param="encoding_format"
        )


def body_of(
    reply: EmbedReply | EmbedChunksReply | EncodeReply,
    model: str,
    encoding: Encoding,
    cached_tokens: int | None = None,
    *,
    reply_id: str,
) -> dict[str, Any]:
    """Return the body of a reply.

    model: the name that the caller used. cached_tokens: None without a cache.
    """
    usage: dict[str, Any] = {
        "prompt_tokens": reply.tokens,
        "total_tokens": reply.tokens,
        "completion_tokens": 0,
    }
    if cached_tokens is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
    data = _items_of(reply, encoding)
    return {"id": reply_id, "object": "list", "data": data, "model": model, "usage": usage}


def _items_of(reply: EmbedReply | EmbedChunksReply | EncodeReply, encoding: Encoding) -> LazyList:
    """Return an item for each vector, or for each input that has several."""
    if isinstance(reply, EncodeReply):
        matrices = reply.multivector or ()
        return LazyList(_multi_vectors(reply, encoding), len(matrices), reply.numbers)
    if isinstance(reply, EmbedChunksReply) and reply.ranges is not None:
        return LazyList(_documents(reply, encoding), len(reply.counts), reply.vectors.size)
    return vector_list(reply.vectors, encoding, _embedding)


def _embedding(index: int, value: Any) -> dict[str, Any]:
    return {"object": "embedding", "index": index, "embedding": value}


def _documents(reply: EmbedChunksReply, encoding: Encoding) -> Iterator[dict[str, Any]]:
    """Yield the vectors and ranges of the chunks that were made of each input."""
    ranges, tokens = reply.ranges or (), reply.input_tokens or (None,) * len(reply.counts)
    for index, span in enumerate(reply.spans):
        chunks = [{"token_range": each.tokens, "char_range": each.characters} for each in ranges[span]]
        places = {"input_tokens": tokens[index], "chunks": chunks}
        yield _embedding(index, vector_list(reply.vectors[span], encoding)) | {"late_chunking": places}


def _multi_vectors(reply: EncodeReply, encoding: Encoding) -> Iterator[dict[str, Any]]:
    grids = reply.grids or (None,) * len(reply.multivector or ())
    for index, (rows, grid) in enumerate(zip(reply.multivector or (), grids, strict=True)):
        item = {"object": "embeddings", "index": index, "embeddings": vector_list(rows, encoding)}
        yield item if grid is None else item | {"patch_grid": msgspec.to_builtins(grid)}


HANDLERS = [embeddings, multi_vector, perplexity_embeddings]
