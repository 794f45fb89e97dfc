"""vLLM's POST /pooling: vectors, classes, or a vector for each token, by task.

Source: vLLM 0.33, entrypoints/pooling; older names of the same fields are accepted too.
"""

from functools import partial
from typing import Literal

import msgspec

from backends.contract import (
    Capabilities,
    Classify,
    ClassifyReply,
    Embed,
    EmbedParts,
    EmbedReply,
    Encode,
    EncodeReply,
    Operation,
    Output,
)
from backends.contract.vectors import shape_vectors
from gateway.api.server.body import Integer, ModelName
from gateway.api.server.encoding import (
    BYTES,
    EmbedDtype,
    Endianness,
    LazyList,
    NumberFormat,
    VectorFormat,
    base64_numbers,
)
from gateway.api.server.endpoints import BodyForms, inference
from gateway.api.server.error_bodies import VLLM
from gateway.api.server.request import Request
from gateway.api.server.responses import HttpReply
from gateway.api.wire.inputs import InputField, Inputs, check_token_vectors, read_inputs
from gateway.api.wire.media import VectorOptions, embed_parts, have_media, parts_of_messages
from gateway.api.wire.vllm import VllmOptions, VllmReply, check_metadata, reply_packed, reply_with
from gateway.calls import Call
from gateway.errors import InvalidInput, OperationUnsupported
from gateway.media.sources import Fetch

endpoint = partial(inference, errors=VLLM, tags=["vLLM"])
OPERATION_OF = {"embed": Operation.EMBED, "classify": Operation.CLASSIFY, "token_embed": Operation.ENCODE}


class PoolingRequest(VllmOptions, kw_only=True):
    """Body of /pooling. Without `task` the model's own task is used."""

    input: Inputs | None = None
    task: Literal["embed", "classify", "token_embed", "token_classify", "plugin"] | None = None
    encoding_format: VectorFormat = "float"
    embed_dtype: EmbedDtype = "float32"
    endianness: Endianness = "native"
    dimensions: Integer | None = None
    model: ModelName | None = None


class VllmPoolingItem(msgspec.Struct):
    """One input's vector, classes, or vectors of its tokens; in base64 their bytes."""

    index: int
    data: list[float | list[float]] | str
    object: str = "pooling"


class PoolingResponse(VllmReply):
    """Results of the task, in the order of the inputs."""

    data: list[VllmPoolingItem]
    object: str = "list"


async def decode_pooling(request: Request[PoolingRequest]) -> Call:
    """Decode a body.

    Raises: EmptyInput, InvalidInput, OperationUnsupported, and the errors of `Routes.resolve`.
    """
    data, api = request.body, request.api
    data.check_of_texts()
    if data.dimensions is not None:
        raise InvalidInput("`dimensions` is not supported at this path", param="dimensions")
    model = request.model or api.gateway.routes.root_model(request.context.tenant)
    capabilities = api.capabilities_of(model, Operation.EMBED, request.context.tenant)
    task = data.task or task_of(capabilities)
    operation = OPERATION_OF.get(task)
    if operation is None:
        raise OperationUnsupported(f"the task {task!r} is not supported by this gateway", param="task")
    if data.messages is not None and have_media(data.messages):
        work_of_media = await _media_work(data, operation, partial(api.fetch_media, request.context, model))
        return data.call(work_of_media, model)
    field = InputField("input", model, operation)
    texts = await read_inputs(data.input, data.messages, field, request.context, api)
    check_metadata(data.encoding_format, len(texts))
    work = pooling_work(operation, texts, capabilities, raw=data.is_raw())
    return data.call(data.with_chat(work), model)


async def _media_work(data: PoolingRequest, operation: Operation, fetch: Fetch) -> EmbedParts:
    """Return the work of a message with images or sound. Raises: EmptyInput, InvalidInput."""
    if data.input:
        raise InvalidInput("send `input` or `messages`, one of them", param="messages")
    if operation is Operation.CLASSIFY:
        raise OperationUnsupported("images and sound are embedded, and not classified", param="task")
    is_late = operation is Operation.ENCODE
    if is_late and data.is_raw():
        raise InvalidInput(
            "vectors of images are normalized: leave out `use_activation`", param="use_activation"
        )
    options = VectorOptions(normalize=not data.is_raw(), multivector=is_late)
    inputs, turns = parts_of_messages(data.messages or [])
    check_metadata(data.encoding_format, len(inputs))
    work = await embed_parts(inputs, "messages", options, fetch, turns)
    return msgspec.structs.replace(work, chat=data.chat(), special_tokens=bool(data.add_special_tokens))


def task_of(capabilities: Capabilities | None) -> str:
    """Return the task of a model if the request specifies none."""
    operations = capabilities.operations if capabilities else frozenset()
    if Operation.CLASSIFY in operations:
        return "classify"
    return "token_embed" if Operation.ENCODE in operations and Operation.EMBED not in operations else "embed"


def pooling_work(
    operation: Operation, texts: tuple[str, ...], capabilities: Capabilities | None, *, raw: bool
) -> Embed | Encode | Classify:
    """Return the work of a task.

    Token vectors of a late-interaction model are its multi-vectors, unless the request asks for raw output.
    Raises: InvalidInput.
    """
    if operation is Operation.EMBED:
        return Embed(texts, normalize=not raw)
    if operation is Operation.CLASSIFY:
        return Classify(texts, raw_scores=raw)
    check_token_vectors(texts, "input", capabilities)
    late = not raw and capabilities is not None and Output.MULTIVECTOR in capabilities.outputs
    return Encode(texts, frozenset({Output.MULTIVECTOR if late else Output.TOKENS}))


def pooled_rows(reply: EmbedReply | ClassifyReply | EncodeReply, *, raw: bool) -> LazyList:
    """Return for each input its vector, its classes, or a vector for each token."""
    if not isinstance(reply, EncodeReply):
        rows = reply.vectors if isinstance(reply, EmbedReply) else reply.scores
        return LazyList(rows, len(rows), rows.size)
    if reply.multivector is not None:
        return LazyList(reply.multivector, len(reply.multivector), reply.numbers)
    matrices = reply.token_vectors or ()
    # vLLM returns token vectors of length 1 unless the request asks for raw ones.
    shaped = (rows if raw else shape_vectors(rows, dimensions=None, normalize=True) for rows in matrices)
    return LazyList(shaped, len(matrices), reply.numbers)


def pooling_items(rows: LazyList, numbers: NumberFormat | None) -> LazyList:
    """Return the rows as vLLM lists them. numbers: the format of rows in base64; None is plain JSON."""
    items = (
        {
            "index": index,
            "object": "pooling",
            "data": row if numbers is None else base64_numbers(row, numbers),
        }
        for index, row in enumerate(rows)
    )
    return LazyList(items, len(rows), rows.size)


@endpoint(
    "/pooling",
    reply=PoolingResponse,
    description="Result of the task for each input",
    forms=BodyForms(octets=True),
)
async def pooling(request: Request[PoolingRequest]) -> HttpReply:
    """Turn texts, images or sound into vectors, classes, or a vector for each token.

    `task` selects the result; without it the model's own task is used.
    """
    data = request.body
    kinds = EmbedReply | ClassifyReply | EncodeReply
    served, reply = await request.serve(await decode_pooling(request), kinds)
    rows = pooled_rows(reply, raw=data.is_raw())
    numbers = NumberFormat(data.embed_dtype, data.endianness)
    if data.encoding_format in BYTES:
        return await reply_packed(request, served, rows, numbers)
    items = pooling_items(rows, numbers if data.encoding_format == "base64" else None)
    return await reply_with(request, served, "pooling", items)


HANDLERS = [pooling]
