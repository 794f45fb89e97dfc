"""Qdrant's inference protocol: a Qdrant server sends the inputs of one of its API calls to POST /qdrant.

Source: qdrant 1.18, src/common/inference. One request has all inputs of an upsert or a query, of any number
of models. Its key is the field `token`, unless the configured address has it as userinfo. Headers of Qdrant's
own callers whose names end in `-api-key` come with it, and are not read.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from backends.contract import (
    Capabilities,
    Embed,
    EmbedParts,
    EmbedReply,
    Encode,
    EncodeReply,
    Operation,
    Output,
    Part,
)
from gateway.api.dialects.qdrant.body import (
    QdrantInput,
    QdrantObject,
    QdrantOptions,
    QdrantRequest,
    QdrantResponse,
)
from gateway.api.document.fields import CUT, QUERY, TEXTS
from gateway.api.document.fields import MEANINGS as SHARED
from gateway.api.server.body_bounds import too_many_inputs
from gateway.api.server.dialect import Dialect
from gateway.api.server.encoding import encode_json
from gateway.api.server.endpoints import inference
from gateway.api.server.error_bodies import ErrorFormat
from gateway.api.server.inference_api import InferenceApi, joined_headers
from gateway.api.server.request import Request
from gateway.api.server.responses import HttpReply
from gateway.api.server.several_calls import CallPart, serve_parts
from gateway.api.wire.inputs import check_instruction, check_token_vectors
from gateway.api.wire.media import part_of
from gateway.api.wire.replies import with_dimensions
from gateway.calls import Call, Work
from gateway.dispatch import REPLY_NUMBERS_MAX
from gateway.errors import EmptyInput, GatewayError, InvalidInput
from gateway.media.sources import (
    PictureSource,
    SoundSource,
    SourcePart,
    embed_operation,
    fetch_sources,
    read_parts,
)
from gateway.prompts import Role
from gateway.serve import Served

# Qdrant sends the points of a whole upsert at once: so many times `limits.inputs`, in calls of that size.
FULL_CALLS_MAX = 16
# Each model with each set of options takes a call of its own.
CALLS_MAX = 32
# Calls of one request in flight, such as those of a search by dense and sparse vectors.
PARALLEL = 4
ROLE_OF: Mapping[str, Role] = {"update": "document", "search": "query"}
NO_OPTIONS = QdrantOptions()


class QdrantError(msgspec.Struct):
    """One sentence, which Qdrant shows to its own caller."""

    error: str


QDRANT = ErrorFormat("qdrant", QdrantError, lambda error: QdrantError(error.message), ("/qdrant/",))


class GroupKey(NamedTuple):
    """Facts that the inputs of one call have in common. has_media: one of them is more than a text."""

    model: str
    options: QdrantOptions
    has_media: bool


class Group(NamedTuple):
    """Inputs that are computed alike. rows: of the inputs, in the request. capabilities: of the model."""

    key: GroupKey
    rows: Sequence[int]
    output: Output
    capabilities: Capabilities | None


def parts_of(item: QdrantInput, index: int) -> list[SourcePart]:
    """Return the parts of an input: a picture, then a recording, then a text, or those of `content`.

    Raises: EmptyInput, InvalidInput.
    """
    data, field = item.data, f"inputs[{index}].data"
    if isinstance(data, QdrantObject) is not (item.data_type == "object"):
        form = "an object" if item.data_type == "object" else "a string"
        raise InvalidInput(f"`{field}` of the type {item.data_type} is {form}", param="inputs")
    if isinstance(data, str):
        parts: list[SourcePart] = [PictureSource(data) if item.data_type == "image" and data else data]
    elif data.content is not None:
        if any(value is not None for value in (data.text, data.image, data.audio)):
            raise InvalidInput(f"`{field}` has `content` or other fields, not both", param="inputs")
        parts = [part_of(part, field) for part in data.content]
    else:
        parts = [] if data.image is None else [PictureSource(data.image)]
        parts += [] if data.audio is None else [SoundSource(data.audio)]
        parts += [] if data.text is None else [data.text]
    if not parts or "" in parts:
        raise EmptyInput(f"`{field}` is empty, or has an empty text", param="inputs")
    return parts


async def read_inputs(request: Request[QdrantRequest]) -> Sequence[Sequence[Part]]:
    """Return the parts of each input, with pictures and recordings read, or fetched for the first model.

    Raises: EmptyInput, InvalidInput, and the errors of `InferenceApi.fetch_media`.
    """
    items, api = request.body.inputs, request.api
    sources = [parts_of(item, index) for index, item in enumerate(items)]
    media = [item for item, parts in zip(items, sources, strict=True) if not is_text(parts)]
    fetch = partial(api.fetch_media, request.context, media[0].model) if media else None
    return await read_parts(sources, "inputs", await fetch_sources(sources, embed_operation(sources), fetch))


def is_text(parts: Sequence[object]) -> bool:
    """Return whether an input is one text."""
    return len(parts) == 1 and isinstance(parts[0], str)


def groups_of(
    items: Sequence[QdrantInput], inputs: Sequence[Sequence[Part]], api: InferenceApi
) -> list[Group]:
    """Return the inputs of each model with each set of options.

    Raises: InvalidInput, and the errors of `InferenceApi.capabilities_of`.
    """
    rows: dict[GroupKey, list[int]] = {}
    for index, (item, parts) in enumerate(zip(items, inputs, strict=True)):
        key = GroupKey(item.model, item.options or NO_OPTIONS, not is_text(parts))
        rows.setdefault(key, []).append(index)
        if len(rows) > CALLS_MAX:
            raise InvalidInput(
                f"`inputs` have more than {CALLS_MAX} different models and `options`: send several requests",
                param="inputs",
            )
    groups = []
    for key, places in rows.items():
        capabilities = api.capabilities_of(key.model, Operation.EMBED, None)
        output = key.options.output or default_output(capabilities)
        check_options(key, output)
        groups.append(Group(key, places, output, capabilities))
    return groups


def default_output(capabilities: Capabilities | None) -> Output:
    """Return the kind of vector that a model computes: dense if it can."""
    if capabilities is not None and Operation.EMBED not in capabilities.operations:
        for output in (Output.SPARSE, Output.MULTIVECTOR):
            if output in capabilities.outputs:
                return output
    return Output.DENSE


def check_options(key: GroupKey, output: Output) -> None:
    """Check that the options of a call are for its kind of vector. Raises: InvalidInput."""
    options = key.options
    if output is Output.SPARSE and key.has_media:
        raise InvalidInput("sparse vectors are of texts: send a text", param="inputs")
    if output is Output.SPARSE and options.dimensions is not None:
        raise InvalidInput("`dimensions` is not for sparse vectors: leave it out", param="options")
    if output is not Output.DENSE and options.normalize is False:
        raise InvalidInput("`normalize` false is for dense vectors alone: leave it out", param="options")


def check_size(groups: Sequence[Group]) -> None:
    """Check the numbers of all dense vectors, as far as their width is known. Raises: InvalidInput."""
    numbers = 0
    for group in groups:
        width = group.key.options.dimensions or (group.capabilities and group.capabilities.dimensions) or 0
        numbers += len(group.rows) * width if group.output is Output.DENSE else 0
    check_numbers(numbers)


def check_numbers(numbers: int) -> None:
    """Check the size of the reply. Raises: InvalidInput."""
    if numbers > REPLY_NUMBERS_MAX:
        raise InvalidInput(
            f"the vectors have more than {REPLY_NUMBERS_MAX} numbers: send fewer inputs in a request",
            param="inputs",
        )


def calls_of(
    group: Group, inputs: Sequence[Sequence[Part]], role: Role | None, inputs_max: int
) -> Iterator[CallPart]:
    """Yield the calls of a group, each with its rows. Raises: InvalidInput."""
    options = group.key.options
    instruction = check_instruction(options.instruction)
    for start in range(0, len(group.rows), inputs_max):
        rows = group.rows[start : start + inputs_max]
        work = work_of(group, [inputs[row] for row in rows])
        call = Call(work, group.key.model, options.truncate, options.side, role=role, instruction=instruction)
        yield CallPart(call, rows)


def work_of(group: Group, inputs: Sequence[Sequence[Part]]) -> Work:
    """Return the work of some inputs of a group. Raises: InvalidInput."""
    options, output = group.key.options, group.output
    normalize = options.normalize is not False
    if group.key.has_media:
        parts = tuple([tuple(item) for item in inputs])
        return EmbedParts(parts, output, normalize, options.dimensions, prompt_name=options.prompt_name)
    texts = tuple([str(text) for (text,) in inputs])
    if output is Output.DENSE:
        return Embed(texts, normalize, options.dimensions, options.prompt_name)
    if output is Output.MULTIVECTOR:
        check_token_vectors(texts, "inputs", group.capabilities)
    return Encode(texts, frozenset({output}), prompt_name=options.prompt_name)


async def vectors_of(reply: EmbedReply | EncodeReply, options: QdrantOptions) -> Sequence[Any]:
    """Return the vector of each input of a call as JSON has it. Raises: InvalidInput."""
    if isinstance(reply, EmbedReply):
        return list(reply.vectors)
    if reply.sparse is not None:
        return [{"indices": terms.indices, "values": terms.values} for terms in reply.sparse]
    if options.dimensions is not None:
        reply = await with_dimensions(reply, options.dimensions)
    return list(reply.multivector or ())


async def decode(request: Request[QdrantRequest]) -> list[CallPart]:
    """Decode a body to calls, one for each model with each set of options, or several if it has many inputs.

    Raises: EmptyInput, InvalidInput, and the errors of `read_inputs` and `groups_of`.
    """
    data, api = request.body, request.api
    most = FULL_CALLS_MAX * api.inputs_max
    if not data.inputs:
        raise EmptyInput("`inputs` is an empty list", param="inputs")
    if len(data.inputs) > most:
        raise too_many_inputs(len(data.inputs), most, "inputs")
    inputs = await read_inputs(request)
    groups = groups_of(data.inputs, inputs, api)
    check_size(groups)
    role = None if data.inference is None else ROLE_OF[data.inference]
    return [part for group in groups for part in calls_of(group, inputs, role, api.inputs_max)]


def name_error(error: GatewayError, part: CallPart, *, several: bool) -> None:
    """Name the input at fault by its place in the request, and the model if there are several."""
    error.name_rows(part.rows, "input")
    if several and part.call.model is not None:
        error.name_model(part.call.model)


@inference(
    "/qdrant",
    errors=QDRANT,
    reply=QdrantResponse,
    description="One vector for each input",
    tags=["Qdrant"],
    below_models=False,
    key_field="token",
    calls_max=FULL_CALLS_MAX,
)
async def infer(request: Request[QdrantRequest]) -> HttpReply:
    """Turn texts, pictures and objects into vectors, as a Qdrant server asks for them.

    Returns one vector for each input, in the order of the inputs, and the tokens of each model. The inputs of
    one model with the same options are one call, which counts as a request in quotas.
    """
    parts = await decode(request)
    several = len({part.call.model for part in parts}) > 1
    name = partial(name_error, several=several)
    found = await serve_parts(request.api, request.context, parts, PARALLEL, name)
    body = await encode_json(await body_of(request.body.inputs, parts, found))
    headers = joined_headers([(served, part.rows) for served, part in zip(found, parts, strict=True)])
    timeline = request.context.timeline
    timeline.lap("encode")
    return HttpReply(body, headers | {"server-timing": timeline.server_timing()})


async def body_of(
    items: Sequence[QdrantInput], parts: Sequence[CallPart], found: Sequence[Served]
) -> dict[str, Any]:
    """Return the body of a reply. Raises: InvalidInput."""
    embeddings: list[Any] = [None] * len(items)
    tokens: dict[str, int] = {}
    numbers = 0
    for part, served in zip(parts, found, strict=True):
        reply = served.reply
        assert isinstance(reply, EmbedReply | EncodeReply)
        numbers += reply.vectors.size if isinstance(reply, EmbedReply) else reply.numbers
        check_numbers(numbers)
        first = items[part.rows[0]]
        tokens[first.model] = tokens.get(first.model, 0) + reply.tokens
        vectors = await vectors_of(reply, first.options or NO_OPTIONS)
        for row, vector in zip(part.rows, vectors, strict=True):
            embeddings[row] = vector
    usage = {"models": {model: {"tokens": count} for model, count in tokens.items()}}
    return {"embeddings": embeddings, "usage": usage}


EXAMPLES: dict[type[msgspec.Struct], Any] = {
    QdrantRequest: {
        "inputs": [
            {"data": text, "data_type": "text", "model": "bge", "options": None} for text in (QUERY, *TEXTS)
        ],
        "inference": "search",
        "token": None,
    }
}
MEANINGS = {
    "inference": "`update` for points to store, which are documents; `search` for queries.",
    "token": "The key, unless the header `authorization` has one. Such a body has at most 64 KiB.",
    "QdrantRequest.inputs": "Inputs of any models, at most 16 times as many as the gateway's config allows.",
    "QdrantInput.data": "A text, a picture as base64, `data:` URI or address, or an object, by `data_type`.",
    "QdrantInput.data_type": "`text`, `image` or `object`.",
    "QdrantInput.options": "Options of this input. One that the gateway does not have is refused.",
    "QdrantObject.text": "The text of the input.",
    "QdrantObject.image": "Its picture.",
    "QdrantObject.audio": "Its recording.",
    "QdrantObject.content": "Its parts in order, instead of the other fields.",
    "QdrantInput.model": "Public name of the model.",
    "QdrantOptions.output_type": (
        "Kind of the vector. By default the model's dense one, or the only kind that it computes."
    ),
    "QdrantOptions.dimensions": SHARED["dimensions"],
    "QdrantOptions.instruction": "The task in words, for queries of a model that takes one.",
    "QdrantOptions.normalize": "Whether dense vectors are scaled to length 1.",
    "QdrantOptions.prompt_name": "Name of a prompt of the model, in place of that of `inference`.",
    "QdrantOptions.truncate": CUT,
    "QdrantOptions.truncation_direction": "The end at which a long input is cut.",
}
DIALECT = Dialect(
    handlers=[infer],
    tags={"Qdrant": "Qdrant's inference protocol."},
    examples=EXAMPLES,
    meanings=MEANINGS,
)
