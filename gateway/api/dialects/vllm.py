"""vLLM's pooling server: POST /score, /v1/score, /classify and /pooling.

Source: vLLM 0.33, entrypoints/pooling; older names of the same fields are taken too.
"""

import secrets
import time
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
import pybase64
from litestar import post
from litestar.di import NamedDependency
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import FromPath, JSONBody

from backends.contract import (
    Capabilities,
    Classify,
    ClassifyReply,
    Embed,
    EmbedReply,
    Encode,
    EncodeReply,
    Operation,
    Output,
    Reply,
    RerankReply,
    Score,
    Vectors,
)
from backends.vectors import shaped
from gateway.api.wire.inputs import Inputs, read_texts
from gateway.api.dialects.tei_outputs import check_token_vectors
from gateway.api.wire.vllm_options import VllmOptions, check_options, is_raw, side_of, truncate_of
from gateway.api.server.body import ModelName
from gateway.api.server.encoding import EncodingFormat, json_bytes
from gateway.api.server.error_bodies import documented
from gateway.api.server.request_context import RequestContext
from gateway.api.server.responses import DIRECT, Api, HttpReply, expect_reply, respond
from gateway.calls import Call, Work
from gateway.errors import EmptyInput, InvalidInput, OperationUnsupported
from gateway.serve import Served

FAILURES = documented("vllm")


class ContentPart(msgspec.Struct):
    """A part of a message; only text is taken."""

    type: str
    text: str | None = None


class Content(msgspec.Struct):
    """A text written as a message's content."""

    content: list[ContentPart]


Side: TypeAlias = str | Content | list[str | Content]


class ScoreRequest(VllmOptions, kw_only=True):
    """Two sides by one of the pairs of names: queries and documents (or items), data_1 and data_2, text_1
    and text_2; one against one, one against many, or as many against as many.
    """

    queries: Side | None = None
    documents: Side | None = None
    items: Side | None = None
    data_1: Side | None = None
    data_2: Side | None = None
    text_1: Side | None = None
    text_2: Side | None = None
    max_tokens_per_query: int = 0
    max_tokens_per_doc: int = 0
    model: ModelName | None = None


class ClassifyRequest(VllmOptions, kw_only=True):
    """Texts to classify."""

    input: Inputs | None = None
    model: ModelName | None = None


class PoolingRequest(VllmOptions, kw_only=True):
    """Texts to pool, as the task says; absent, as the model does."""

    input: Inputs | None = None
    task: Literal["embed", "classify", "token_embed", "token_classify", "plugin"] | None = None
    encoding_format: EncodingFormat = "float"
    embed_dtype: Literal["float32"] = "float32"
    endianness: Literal["native", "little"] = "native"
    dimensions: int | None = None
    model: ModelName | None = None


class Usage(msgspec.Struct):
    """Tokens after truncation, specials included."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: None = None


class ScoreItem(msgspec.Struct):
    """One pair's score."""

    index: int
    score: float
    object: str = "score"


class ClassItem(msgspec.Struct):
    """One input's likeliest label, and all classes by their ids."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class PoolingItem(msgspec.Struct):
    """One input's vector, classes, or a vector for each of its tokens; in base64 their float32 bytes."""

    index: int
    data: list[float | list[float]] | str
    object: str = "pooling"


class Listed(msgspec.Struct):
    """What every reply has around its items."""

    id: str
    created: int
    model: str
    usage: Usage


class ScoreResponse(Listed):
    """In the order of the pairs."""

    data: list[ScoreItem]
    object: str = "list"


class ClassifyResponse(Listed):
    """In the order of the inputs."""

    data: list[ClassItem]
    object: str = "list"


class PoolingResponse(Listed):
    """In the order of the inputs."""

    data: list[PoolingItem]
    object: str = "list"


def sides_of(data: ScoreRequest) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The two sides. Raises: InvalidInput, EmptyInput."""
    named = (
        ("queries", data.queries, "documents", data.documents),
        ("queries", data.queries, "items", data.items),
        ("data_1", data.data_1, "data_2", data.data_2),
        ("text_1", data.text_1, "text_2", data.text_2),
    )
    for first, one, second, other in named:
        if one is not None and other is not None:
            return _texts(one, first), _texts(other, second)
    raise InvalidInput("send `queries` and `documents`, `data_1` and `data_2`, or `text_1` and `text_2`")


def _texts(side: Side, field: str) -> tuple[str, ...]:
    items = side if isinstance(side, list) else [side]
    if not items:
        raise EmptyInput(f"`{field}` is an empty list", param=field)
    return tuple(one if isinstance(one, str) else _text_of(one, field) for one in items)


def _text_of(content: Content, field: str) -> str:
    parts = content.content
    if len(parts) != 1 or parts[0].type != "text" or parts[0].text is None:
        raise InvalidInput(f"`{field}` holds content that is not one text; only text is taken", param=field)
    return parts[0].text


def pairs_of(firsts: tuple[str, ...], seconds: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """One against one, one against many, or each with the one beside it. Raises: InvalidInput, EmptyInput."""
    if len(firsts) not in (1, len(seconds)):
        raise InvalidInput(
            f"{len(firsts)} texts against {len(seconds)}: lengths are 1:1, 1:N or N:N", param="queries"
        )
    if not all(firsts):
        raise EmptyInput("a query is an empty string", param="queries")
    return tuple(zip(firsts * (len(seconds) // len(firsts)), seconds, strict=True))


def called(work: Work, data: VllmOptions, model: str | None, told: Capabilities | None) -> Call:
    """The call, with what the options say of truncation. Raises: InvalidInput."""
    truncate = truncate_of(data, told.max_input_tokens if told else None)
    return Call(work, model, truncate, side_of(data))


def decode_score(data: ScoreRequest, name: str | None, api: Api) -> Call:
    """Raises: EmptyInput, InvalidInput, and what `Routes.resolve` raises."""
    check_options(data)
    if data.max_tokens_per_query or data.max_tokens_per_doc:
        raise InvalidInput("`max_tokens_per_query` and `max_tokens_per_doc` are not supported here")
    pairs = pairs_of(*sides_of(data))
    api.texts([""] * len(pairs), "documents")
    model = name or data.model
    told = api.capabilities_of(model, Operation.RERANK)
    return called(Score(pairs, raw_scores=is_raw(data)), data, model, told)


async def decode_classify(data: ClassifyRequest, name: str | None, context: RequestContext, api: Api) -> Call:
    """Raises: EmptyInput, InvalidInput, and what `Routes.resolve` raises."""
    check_options(data)
    model = name or data.model
    texts = await _inputs(data.input, model, context, api, Operation.CLASSIFY)
    told = api.capabilities_of(model, Operation.CLASSIFY)
    return called(Classify(texts, raw_scores=is_raw(data)), data, model, told)


async def _inputs(
    given: Inputs | None, model: str | None, context: RequestContext, api: Api, operation: Operation
) -> tuple[str, ...]:
    if given is None:
        raise InvalidInput("`input` is missing", param="input")
    return await read_texts(given, "input", model, context, api, operation)


async def decode_pooling(data: PoolingRequest, name: str | None, context: RequestContext, api: Api) -> Call:
    """Raises: EmptyInput, InvalidInput, OperationUnsupported, and what `Routes.resolve` raises."""
    check_options(data)
    if data.dimensions is not None:
        raise InvalidInput("`dimensions` is not supported at this path", param="dimensions")
    model = name or data.model or api.gateway.routes.root_model()
    told = api.capabilities_of(model, Operation.EMBED)
    task = data.task or task_of(told)
    operation = OPERATION_OF.get(task)
    if operation is None:
        raise OperationUnsupported(f"the task {task!r} is not supported by this gateway", param="task")
    texts = await _inputs(data.input, model, context, api, operation)
    work = pooled(operation, texts, told, raw=is_raw(data))
    return called(work, data, model, told)


OPERATION_OF = {
    "embed": Operation.EMBED,
    "classify": Operation.CLASSIFY,
    "token_embed": Operation.ENCODE,
}


def task_of(told: Capabilities | None) -> str:
    """What a model does where the caller does not say."""
    operations = told.operations if told else frozenset()
    if Operation.CLASSIFY in operations:
        return "classify"
    return "token_embed" if Operation.ENCODE in operations and Operation.EMBED not in operations else "embed"


def pooled(
    operation: Operation, texts: tuple[str, ...], told: Capabilities | None, *, raw: bool
) -> Embed | Encode | Classify:
    """The work of a task. Token vectors are late interaction's where the model has those."""
    if operation is Operation.EMBED:
        return Embed(texts, normalize=not raw)
    if operation is Operation.CLASSIFY:
        return Classify(texts, raw_scores=raw)
    check_token_vectors(texts, "input")
    late = not raw and told is not None and Output.MULTIVECTOR in told.outputs
    return Encode(texts, frozenset({Output.MULTIVECTOR if late else Output.TOKENS}))


def encode_listed(kind: str, served: Served, items: list[Any]) -> bytes:
    """The body around the items of a reply."""
    tokens = served.reply.tokens
    usage = {
        "prompt_tokens": tokens,
        "total_tokens": tokens,
        "completion_tokens": 0,
        "prompt_tokens_details": None,
    }
    head = {"id": f"{kind}-{secrets.token_hex(16)}", "object": "list", "created": int(time.time())}
    return json_bytes(head | {"model": served.route.model, "data": items, "usage": usage})


def class_items(reply: ClassifyReply) -> list[Any]:
    """Classes by id, with the likeliest one's name."""
    return [
        {
            "index": index,
            "label": reply.labels[int(row.argmax())],
            "probs": row,
            "num_classes": len(reply.labels),
        }
        for index, row in enumerate(reply.scores)
    ]


def pooled_rows(reply: Reply, *, raw: bool) -> list[Vectors]:
    """Of each input its vector, its classes, or a vector for each token."""
    match reply:
        case EmbedReply():
            return list(reply.vectors)
        case ClassifyReply():
            return list(reply.scores)
    encoded: EncodeReply = expect_reply(reply, EncodeReply)
    if encoded.multivector is not None:
        return list(encoded.multivector)
    rows = encoded.token_vectors or ()
    # vLLM's own are of length 1 unless raw ones are asked for.
    return [one if raw else shape_vectors(one, dimensions=None, normalize=True) for one in rows]


def pooling_items(rows: list[Vectors], encoding_format: EncodingFormat) -> list[Any]:
    """Rows as vLLM lists them."""
    shown: list[Any] = list(rows)
    if encoding_format == "base64":
        shown = [
            pybase64.b64encode_as_string(np.ascontiguousarray(row, dtype="<f4").tobytes()) for row in rows
        ]
    return [{"index": index, "object": "pooling", "data": one} for index, one in enumerate(shown)]


@post(
    ["/score", "/v1/score", "/models/{name:str}/score", "/models/{name:str}/v1/score"],
    status_code=200,
    opt=DIRECT,
    responses={200: ResponseSpec(ScoreResponse, description="A score for each pair")} | FAILURES,
    tags=["vLLM"],
)
async def score(
    data: JSONBody[ScoreRequest],
    context: NamedDependency[RequestContext],
    api: NamedDependency[Api],
    name: FromPath[str | None] = None,
) -> HttpReply:
    """Score pairs of texts."""
    served = await api.serve(context, decode_score(data, name, api))
    scores = expect_reply(served.reply, RerankReply).scores
    items = [{"index": index, "object": "score", "score": one} for index, one in enumerate(scores)]
    return respond(context, served, encode_listed("score", served, items))


@post(
    ["/classify", "/models/{name:str}/classify"],
    status_code=200,
    opt=DIRECT,
    responses={200: ResponseSpec(ClassifyResponse, description="The classes of each input")} | FAILURES,
    tags=["vLLM"],
)
async def classify(
    data: JSONBody[ClassifyRequest],
    context: NamedDependency[RequestContext],
    api: NamedDependency[Api],
    name: FromPath[str | None] = None,
) -> HttpReply:
    """Tell how likely each class is."""
    served = await api.serve(context, await decode_classify(data, name, context, api))
    items = class_items(expect_reply(served.reply, ClassifyReply))
    return respond(context, served, encode_listed("classify", served, items))


@post(
    ["/pooling", "/models/{name:str}/pooling"],
    status_code=200,
    opt=DIRECT,
    responses={200: ResponseSpec(PoolingResponse, description="What the task gives of each input")}
    | FAILURES,
    tags=["vLLM"],
)
async def pooling(
    data: JSONBody[PoolingRequest],
    context: NamedDependency[RequestContext],
    api: NamedDependency[Api],
    name: FromPath[str | None] = None,
) -> HttpReply:
    """Turn texts into vectors, classes, or a vector for each token."""
    served = await api.serve(context, await decode_pooling(data, name, context, api))
    rows = pooled_rows(served.reply, raw=is_raw(data))
    body = encode_listed("pool", served, pooling_items(rows, data.encoding_format))
    return respond(context, served, body)


HANDLERS = [score, classify, pooling]
