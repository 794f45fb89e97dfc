"""SIE: POST /v1/encode/{model} and /v1/score/{model}, JSON or msgpack in and out.

Source: SIE 0.3.1, wire of its gateway (JSON unless msgpack is asked for), and sie-sdk 0.10.1, which speaks
msgpack with numpy's arrays as msgpack-numpy writes them.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from litestar import post
from litestar.di import NamedDependency
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import FromPath, JSONBody
from msgspec import UNSET, UnsetType

from backends.contract import Embed, EmbedReply, Encode, EncodeReply, Output, Rerank, RerankReply
from gateway.api.server.encoding import json_bytes, msgpack_bytes, quantized
from gateway.api.server.error_bodies import documented
from gateway.api.server.request_context import RequestContext
from gateway.api.server.responses import DIRECT, Api, HttpReply, expect_reply, respond
from gateway.calls import Call
from gateway.errors import EmptyInput, InvalidInput
from gateway.prompts import Role
from gateway.serve import Served

FAILURES = documented("sie")
TAKES_MSGPACK = {**DIRECT, "msgpack": True}
MSGPACK = "application/msgpack"

OutputType = Literal["dense", "sparse", "multivector"]
OutputDtype = Literal["float32", "float16", "int8", "uint8", "binary", "ubinary"]
UNREAD = ("images", "audio", "video", "document")


class Item(msgspec.Struct):
    """One input. id: given back. images, audio, video and document are refused."""

    id: str | None = None
    text: str | None = None
    images: Any = None
    audio: Any = None
    video: Any = None
    document: Any = None


class Options(msgspec.Struct):
    """is_query: whether items are queries or documents. profile: SIE's "default"; the rest is refused."""

    is_query: bool | None = None
    profile: str | None = None
    lora_id: str | None = None
    muvera: Any = None


class EncodeParams(msgspec.Struct):
    """What each item is turned into. instruction is refused: how it is worded is the model's affair."""

    output_types: Annotated[list[OutputType], msgspec.Meta(min_length=1)] | None = None
    output_dtype: OutputDtype | None = None
    instruction: str | None = None
    options: Options | None = None


class EncodeRequest(msgspec.Struct):
    """items: the inputs; input and inputs are other names of theirs."""

    items: list[Item] | None = None
    input: list[Item] | None = None
    inputs: list[Item] | None = None
    params: EncodeParams | None = None


class ScoreRequest(msgspec.Struct):
    """items are scored against the query."""

    query: Item
    items: list[Item]
    instruction: str | None = None
    options: Options | None = None


class DenseOutput(msgspec.Struct):
    """One vector."""

    dims: int
    dtype: str
    values: list[float]


class SparseOutput(msgspec.Struct):
    """Weights of some terms. dims: of the vocabulary, null where the model does not tell."""

    dims: int | None
    dtype: str
    indices: list[int]
    values: list[float]


class MultivectorOutput(msgspec.Struct):
    """A vector for each token."""

    token_dims: int
    num_tokens: int
    dtype: str
    values: list[list[float]]


class EncodedItem(msgspec.Struct, omit_defaults=True):
    """What was asked for; id only where one was sent."""

    id: str | UnsetType = UNSET
    dense: DenseOutput | UnsetType = UNSET
    sparse: SparseOutput | UnsetType = UNSET
    multivector: MultivectorOutput | UnsetType = UNSET


class EncodeTiming(msgspec.Struct):
    """Where the call's time went, in milliseconds."""

    total_ms: float
    queue_ms: float
    inference_ms: float


class EncodeResponse(msgspec.Struct):
    """Items in the request's order."""

    model: str
    items: list[EncodedItem]
    timing: EncodeTiming


class ItemScore(msgspec.Struct):
    """rank: from 0, the best. item_id: `item-<index>` where none was sent."""

    item_id: str
    score: float
    rank: int


class ScoreResponse(msgspec.Struct):
    """Best first; equal scores in the request's order."""

    model: str
    query_id: str | None
    scores: list[ItemScore]


def decode_encode(data: EncodeRequest, name: str | None, api: Api) -> Call:
    """Dense alone is embedding; anything more is encoding.

    Raises: EmptyInput, InvalidInput.
    """
    params = data.params or EncodeParams()
    _check(params.instruction, params.options)
    texts = api.whole_texts([_text_of(one, "items", i) for i, one in enumerate(items_of(data))], "items")
    outputs = frozenset(Output(one) for one in params.output_types or ["dense"])
    work = Embed(texts) if outputs == {Output.DENSE} else Encode(texts, outputs)
    return Call(work, name, role=_role(params.options))


def _role(options: Options | None) -> Role | None:
    if options is None or options.is_query is None:
        return None
    return "query" if options.is_query else "document"


def decode_score(data: ScoreRequest, name: str | None, api: Api) -> Call:
    """Raises: EmptyInput, InvalidInput."""
    _check(data.instruction, data.options)
    query = _text_of(data.query, "query", 0)
    if not query:
        raise EmptyInput("`query` is an empty string", param="query")
    texts = api.texts([_text_of(one, "items", index) for index, one in enumerate(data.items)], "items")
    return Call(Rerank(query, texts), name)


def items_of(data: EncodeRequest) -> list[Item]:
    """Raises: InvalidInput."""
    given = [one for one in (data.items, data.input, data.inputs) if one is not None]
    if len(given) != 1:
        raise InvalidInput("send `items`", param="items")
    return given[0]


def _text_of(item: Item, field: str, index: int) -> str:
    """Raises: InvalidInput."""
    for kind in UNREAD:
        if getattr(item, kind) is not None:
            raise InvalidInput(f"`{field}` {index} has `{kind}`; only texts are taken", param=field)
    if item.text is None:
        raise InvalidInput(f"`{field}` {index} has no `text`", param=field)
    return item.text


def _check(instruction: str | None, options: Options | None) -> None:
    """Raises: InvalidInput."""
    if instruction is not None:
        raise InvalidInput("`instruction` is not supported: write it into the texts", param="instruction")
    one = options or Options()
    if one.lora_id is not None or one.muvera is not None or one.profile not in {None, "default"}:
        raise InvalidInput("`options` may hold is_query, and the profile default", param="options")


def encode_items(
    reply: EmbedReply | EncodeReply, ids: Sequence[str | None], dtype: OutputDtype
) -> list[dict[str, Any]]:
    """What each item became, with its id where it has one."""
    columns = dict(_columns(reply, dtype))
    return [
        ({"id": one} if one is not None else {}) | {kind: values[index] for kind, values in columns.items()}
        for index, one in enumerate(ids)
    ]


def _columns(reply: EmbedReply | EncodeReply, dtype: OutputDtype) -> "list[tuple[str, list[dict[str, Any]]]]":
    if isinstance(reply, EmbedReply):
        return [("dense", _dense(reply.vectors, dtype))]
    columns = []
    if reply.dense is not None:
        columns.append(("dense", _dense(reply.dense, dtype)))
    if reply.sparse is not None:
        columns.append(("sparse", [_sparse(one.indices, one.values) for one in reply.sparse]))
    if reply.multivector is not None:
        columns.append(("multivector", [_multivector(one, dtype) for one in reply.multivector]))
    return columns


def _dense(vectors: Any, dtype: OutputDtype) -> list[dict[str, Any]]:
    dims = vectors.shape[1]
    return [{"dims": dims, "dtype": dtype, "values": row} for row in _typed(vectors, dtype)]


def _sparse(indices: Any, values: Any) -> dict[str, Any]:
    # Weights have no range that fewer bits could stand for, so they stay as they are.
    return {"dims": None, "dtype": "float32", "indices": indices, "values": values}


def _multivector(rows: Any, dtype: OutputDtype) -> dict[str, Any]:
    tokens, dims = rows.shape
    return {"token_dims": dims, "num_tokens": tokens, "dtype": dtype, "values": _typed(rows, dtype)}


def _typed(rows: Any, dtype: OutputDtype) -> Any:
    if dtype == "float16":
        return rows.astype(np.float16)
    return rows if dtype == "float32" else quantized(rows, dtype)


def encode_scores(reply: RerankReply, ids: Sequence[str | None]) -> list[dict[str, Any]]:
    """Best first, equal scores in the request's order."""
    scores = reply.scores.tolist()
    order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
    named = [f"item-{index}" if one is None else one for index, one in enumerate(ids)]
    return [
        {"item_id": named[index], "score": scores[index], "rank": rank} for rank, index in enumerate(order)
    ]


def _answer(context: RequestContext, served: Served, body: dict[str, Any]) -> HttpReply:
    """JSON, or msgpack where the caller's Accept asks for that."""
    accepted = context.header(b"accept").lower()
    packed = "msgpack" in accepted
    headers = {"x-sie-request-id": context.request_id}
    answer = respond(context, served, msgpack_bytes(body) if packed else json_bytes(body), headers)
    return msgspec.structs.replace(answer, media_type=MSGPACK) if packed else answer


@post(
    "/v1/encode/{name:str}",
    status_code=200,
    opt=TAKES_MSGPACK,
    responses={200: ResponseSpec(EncodeResponse, description="What each item was turned into")} | FAILURES,
    tags=["SIE"],
)
async def encode(
    data: JSONBody[EncodeRequest],
    context: NamedDependency[RequestContext],
    api: NamedDependency[Api],
    name: FromPath[str],
) -> HttpReply:
    """Turn items into dense, sparse and multi-vector outputs in one call."""
    served = await api.serve(context, decode_encode(data, name, api))
    dtype = (data.params.output_dtype if data.params else None) or "float32"
    reply = expect_reply(served.reply, EmbedReply | EncodeReply)
    body = {
        "model": served.route.model,
        "items": encode_items(reply, [one.id for one in items_of(data)], dtype),
        "timing": _timing(context),
    }
    return _answer(context, served, body)


def _timing(context: RequestContext) -> dict[str, float]:
    timeline = context.timeline
    return {
        "total_ms": round(timeline.total_s() * 1000, 2),
        "queue_ms": timeline.milliseconds("queue"),
        "inference_ms": timeline.milliseconds("upstream"),
    }


@post(
    "/v1/score/{name:str}",
    status_code=200,
    opt=TAKES_MSGPACK,
    responses={200: ResponseSpec(ScoreResponse, description="Items, best first")} | FAILURES,
    tags=["SIE"],
)
async def score(
    data: JSONBody[ScoreRequest],
    context: NamedDependency[RequestContext],
    api: NamedDependency[Api],
    name: FromPath[str],
) -> HttpReply:
    """Order items by how well they answer a query."""
    served = await api.serve(context, decode_score(data, name, api))
    scores = encode_scores(expect_reply(served.reply, RerankReply), [one.id for one in data.items])
    return _answer(
        context, served, {"model": served.route.model, "query_id": data.query.id, "scores": scores}
    )


HANDLERS = [encode, score]
