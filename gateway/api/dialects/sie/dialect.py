"""SIE: POST /v1/encode/{model} and /v1/score/{model}, with JSON or msgpack bodies.

Source: SIE 0.3.1, wire of its gateway (JSON unless the caller accepts msgpack), and sie-sdk 0.10.1, which
uses msgpack with numpy arrays as msgpack-numpy writes them. In msgpack the content of an image is bytes; in
JSON, which has none, it is base64.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from backends.contract import (
    Embed,
    EmbedParts,
    EmbedReply,
    Encode,
    EncodeReply,
    Operation,
    Output,
    Rerank,
    RerankReply,
    Vectors,
)
from gateway.api.document.fields import QUERY, REFUSED, TEXTS
from gateway.api.server.body import Integer
from gateway.api.server.dialect import Dialect
from gateway.api.server.encoding import LazyList, msgpack_bytes, quantize_rows
from gateway.api.server.endpoints import BodyForms, inference
from gateway.api.server.error_bodies import ErrorFormat
from gateway.api.server.request import Request
from gateway.api.server.responses import HttpReply
from gateway.api.wire.inputs import check_instruction, check_token_vectors
from gateway.api.wire.media import VectorOptions, embed_parts, score_parts
from gateway.api.wire.replies import rank_list
from gateway.calls import Call
from gateway.errors import EmptyInput, GatewayError, InvalidInput
from gateway.media.sources import PictureSource, SoundSource, SourcePart
from gateway.prompts import Role
from gateway.serve import Served

MSGPACK = "application/msgpack"

OutputType = Literal["dense", "sparse", "multivector"]
OutputDtype = Literal["float32", "float16", "int8", "uint8", "binary", "ubinary"]
# More are repetitions.
KINDS_MAX = 16
# Why each of these options is refused, and the way out.
REFUSED_OPTIONS = {
    "lora_id": "the config chooses a model's adapter; name the model that has it",
    "muvera": "send `output_types` multivector, and encode the vectors yourself",
    "smve": "send `output_types` multivector, and encode the vectors yourself",
}
UNSUPPORTED_KINDS = ("video", "document")
HALF_MAX = float(np.finfo(np.float16).max)


class SieErrorDetail(msgspec.Struct):
    """Source: SIE 0.3.1. Kinds that SIE does not know get a code of their own."""

    code: str
    message: str


class SieError(msgspec.Struct):
    """SIE's native envelope."""

    detail: SieErrorDetail


SIE_CODES = {
    "empty_input": "INVALID_INPUT",
    "malformed_body": "INVALID_INPUT",
    "request_exceeds_limit": "INVALID_INPUT",
    "no_replica": "MODEL_NOT_LOADED",
    "upstream_failed": "INFERENCE_ERROR",
    "internal": "INFERENCE_ERROR",
}


def _sie_error(error: GatewayError) -> SieError:
    return SieError(SieErrorDetail(SIE_CODES.get(error.kind, error.kind.upper()), error.message))


SIE = ErrorFormat("sie", SieError, _sie_error, ("/v1/encode/", "/v1/score/"))
endpoint = partial(inference, errors=SIE, tags=["SIE"], below_models=False)


class SieImage(msgspec.Struct):
    """An image. data: its bytes; in JSON base64. format: SIE's; the content decides it."""

    data: bytes
    format: str | None = None


class SieAudio(msgspec.Struct):
    """A recording. data: its bytes; in JSON base64. format, sample_rate: SIE's; the content decides them."""

    data: bytes
    format: str | None = None
    sample_rate: Integer | None = None


class SieItem(msgspec.Struct):
    """One input. id: returned with its output. video and document are refused."""

    id: str | None = None
    text: str | None = None
    images: list[SieImage] | None = None
    audio: SieAudio | None = None
    video: Any = None
    document: Any = None

    @property
    def has_media(self) -> bool:
        """True if the item is more than a text."""
        return bool(self.images) or self.audio is not None


class SieOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Options of an encode or score request. Each of them changes a computation, so others are refused.

    is_query: whether items are queries or documents. normalize: of dense vectors. profile: only SIE's
    "default". lora_id, muvera and smve are refused.
    """

    is_query: bool | None = None
    normalize: bool | None = None
    profile: str | None = None
    lora_id: str | None = None
    muvera: Any = None
    smve: Any = None


class EncodeParams(msgspec.Struct):
    """Outputs of an encode request. instruction: the task in words, for queries of a model that takes one."""

    output_types: Annotated[list[OutputType], msgspec.Meta(min_length=1, max_length=KINDS_MAX)] | None = None
    output_dtype: OutputDtype | None = None
    instruction: str | None = None
    options: SieOptions | None = None


class SieEncodeRequest(msgspec.Struct):
    """Body of /v1/encode. items: the inputs; input and inputs are aliases of items."""

    items: list[SieItem] | None = None
    input: list[SieItem] | None = None
    inputs: list[SieItem] | None = None
    params: EncodeParams | None = None


class SieScoreRequest(msgspec.Struct):
    """Body of /v1/score: items to score against a query.

    instruction: the task in words, for a model that takes one.
    """

    query: SieItem
    items: list[SieItem]
    instruction: str | None = None
    options: SieOptions | None = None


class DenseOutput(msgspec.Struct):
    """One vector."""

    dims: int
    dtype: str
    values: list[float]


class SparseOutput(msgspec.Struct):
    """Weights of some terms. dims: size of the vocabulary, null if the model does not report it."""

    dims: int | None
    dtype: str
    indices: list[int]
    values: list[float]


class MultivectorOutput(msgspec.Struct):
    """One vector for each token."""

    token_dims: int
    num_tokens: int
    dtype: str
    values: list[list[float]]


class EncodedItem(msgspec.Struct, omit_defaults=True):
    """The requested outputs of one item. id: only if the item has one."""

    id: str | UnsetType = UNSET
    dense: DenseOutput | UnsetType = UNSET
    sparse: SparseOutput | UnsetType = UNSET
    multivector: MultivectorOutput | UnsetType = UNSET


class EncodeTiming(msgspec.Struct):
    """Time spent on the request, in milliseconds."""

    total_ms: float
    queue_ms: float
    inference_ms: float


class SieEncodeResponse(msgspec.Struct):
    """Outputs of the items, in the request's order."""

    model: str
    items: list[EncodedItem]
    timing: EncodeTiming


class ItemScore(msgspec.Struct):
    """Score of one item. rank: 0 is the best. item_id: `item-<index>` if the item has no id."""

    item_id: str
    score: float
    rank: int


class SieScoreResponse(msgspec.Struct):
    """Scores, best first. Equal scores are in the request's order."""

    model: str
    query_id: str | None
    scores: list[ItemScore]


async def decode_encode(request: Request[SieEncodeRequest]) -> Call:
    """Decode a body of /v1/encode.

    A request for dense output only is an embedding; anything else is an encoding.
    Raises: EmptyInput, InvalidInput.
    """
    data, api, name = request.body, request.api, request.name
    params = data.params or EncodeParams()
    check_options(params.options)
    items = items_of(data)
    api.check_count(len(items), "items")
    outputs = frozenset(Output(kind) for kind in params.output_types or ["dense"])
    instruction = check_instruction(params.instruction, param="params.instruction")
    if any(item.has_media for item in items):
        work = await _media_work(items, outputs, params.options)
        return Call(work, name, role=_role(params.options), instruction=instruction)
    texts = api.whole_texts([text_of_item(item, "items", index) for index, item in enumerate(items)], "items")
    if Output.MULTIVECTOR in outputs:
        check_token_vectors(
            texts, "items", api.capabilities_of(name, Operation.ENCODE, request.context.tenant)
        )
    normalize = params.options is None or params.options.normalize is not False
    if not normalize and outputs != {Output.DENSE}:
        raise InvalidInput("`normalize` false is for dense output alone", param="params.options")
    texts_work = Embed(texts, normalize) if outputs == {Output.DENSE} else Encode(texts, outputs)
    return Call(texts_work, name, role=_role(params.options), instruction=instruction)


async def _media_work(
    items: list[SieItem], outputs: frozenset[Output], options: SieOptions | None
) -> EmbedParts:
    """Return the work of items of which one has media. Raises: EmptyInput, InvalidInput."""
    if outputs not in ({Output.DENSE}, {Output.MULTIVECTOR}):
        raise InvalidInput(
            "`output_types` of items with media is dense or multivector, one of them",
            param="params.output_types",
        )
    normalize = options is None or options.normalize is not False
    is_late = outputs == {Output.MULTIVECTOR}
    if is_late and not normalize:
        raise InvalidInput("`normalize` false is for dense output alone", param="params.options")
    parts = [parts_of_item(item, "items", index) for index, item in enumerate(items)]
    return await embed_parts(parts, "items", VectorOptions(normalize, multivector=is_late), None)


def _role(options: SieOptions | None) -> Role | None:
    if options is None or options.is_query is None:
        return None
    return "query" if options.is_query else "document"


async def decode_score(request: Request[SieScoreRequest]) -> Call:
    """Decode a body of /v1/score. Raises: EmptyInput, InvalidInput."""
    data, api, name = request.body, request.api, request.name
    check_options(data.options)
    if data.options is not None and data.options.normalize is not None:
        raise InvalidInput("`normalize` is for dense vectors; scores have none", param="options")
    api.check_count(len(data.items), "items")
    instruction = check_instruction(data.instruction)
    if any(item.has_media for item in (data.query, *data.items)):
        query_parts = [parts_of_item(data.query, "query", 0)]
        parts = [parts_of_item(item, "items", index) for index, item in enumerate(data.items)]
        work = await score_parts(("query", query_parts), ("items", parts), None, raw=False)
        return Call(work, name, instruction=instruction)
    query = text_of_item(data.query, "query", 0)
    if not query:
        raise EmptyInput("`query` is an empty string", param="query")
    texts = api.texts([text_of_item(item, "items", index) for index, item in enumerate(data.items)], "items")
    return Call(Rerank(query, texts), name, instruction=instruction)


def text_of_item(item: SieItem, field: str, index: int) -> str:
    """Return the text of an item without media. Raises: InvalidInput."""
    _check_kinds(item, field, index)
    if item.text is None:
        raise InvalidInput(f"`{field}` {index} has no `text`", param=field)
    return item.text


def parts_of_item(item: SieItem, field: str, index: int) -> list[SourcePart]:
    """Return the parts of an item: images, then sound, then text. Raises: EmptyInput, InvalidInput."""
    _check_kinds(item, field, index)
    parts: list[SourcePart] = [PictureSource(image.data) for image in item.images or ()]
    if item.audio is not None:
        parts.append(SoundSource(item.audio.data))
    if item.text is not None:
        parts.append(item.text)
    if not parts:
        raise EmptyInput(f"`{field}` {index} has no `text`, `images` or `audio`", param=field)
    return parts


def _check_kinds(item: SieItem, field: str, index: int) -> None:
    """Check that an item has nothing that no model here reads. Raises: InvalidInput."""
    for kind in UNSUPPORTED_KINDS:
        if getattr(item, kind) is not None:
            raise InvalidInput(
                f"`{field}` {index} has `{kind}`; texts, images and sound are taken", param=field
            )


def items_of(data: SieEncodeRequest) -> list[SieItem]:
    """Return the inputs of a body, whichever of the three fields contains them. Raises: InvalidInput."""
    lists = [items for items in (data.items, data.input, data.inputs) if items is not None]
    if len(lists) != 1:
        raise InvalidInput("send `items`", param="items")
    return lists[0]


def check_options(options: SieOptions | None) -> None:
    """Check that no option asks for a computation that the gateway does not do. Raises: InvalidInput."""
    if options is None:
        return
    for field, way_out in REFUSED_OPTIONS.items():
        if getattr(options, field) is not None:
            raise InvalidInput(f"`{field}` is not supported: {way_out}", param="options")
    if options.profile not in {None, "default"}:
        raise InvalidInput(
            "`profile` is default only: each model here has one; name a model", param="options"
        )


def encode_items(reply: EmbedReply | EncodeReply, ids: Sequence[str | None], dtype: OutputDtype) -> LazyList:
    """Return the outputs of each item, with its id if it has one."""
    dense = reply.vectors if isinstance(reply, EmbedReply) else reply.dense
    columns = dict(_columns(reply, dense, dtype))
    items = (
        ({} if item_id is None else {"id": item_id}) | dict(zip(columns, outputs, strict=True))
        for item_id, *outputs in zip(ids, *columns.values(), strict=True)
    )
    return LazyList(items, len(ids), reply.numbers + (0 if dense is None else dense.size))


def _columns(
    reply: EmbedReply | EncodeReply, dense: Vectors | None, dtype: OutputDtype
) -> Iterator[tuple[str, Iterator[dict[str, Any]]]]:
    """Yield the outputs of all items by their kind."""
    if dense is not None:
        yield "dense", (_dense(row, dtype) for row in dense)
    if isinstance(reply, EncodeReply):
        if reply.sparse is not None:
            yield "sparse", (_sparse(terms.indices, terms.values, dtype) for terms in reply.sparse)
        if reply.multivector is not None:
            yield "multivector", (_multivector(rows, dtype) for rows in reply.multivector)


def _dense(row: Any, dtype: OutputDtype) -> dict[str, Any]:
    return {"dims": len(row), "dtype": dtype, "values": _as_dtype(row, dtype)}


def _sparse(indices: Any, values: Any, dtype: OutputDtype) -> dict[str, Any]:
    # Weights are not quantized: for these types they stay float32.
    if dtype == "float16":
        return {"dims": None, "dtype": dtype, "indices": indices, "values": _halves(values)}
    return {"dims": None, "dtype": "float32", "indices": indices, "values": values}


def _multivector(rows: Any, dtype: OutputDtype) -> dict[str, Any]:
    tokens, dims = rows.shape
    return {"token_dims": dims, "num_tokens": tokens, "dtype": dtype, "values": _as_dtype(rows, dtype)}


def _as_dtype(rows: Any, dtype: OutputDtype) -> Any:
    if dtype == "float16":
        return _halves(rows)
    return rows if dtype == "float32" else quantize_rows(rows, dtype)


def _halves(numbers: Any) -> Any:
    """Return float16 numbers. Raises: InvalidInput if one of them is too large."""
    if np.abs(numbers).max(initial=0) > HALF_MAX:
        raise InvalidInput(
            f"a number of this model is larger than {HALF_MAX:g}, the largest float16: ask for float32",
            param="output_dtype",
        )
    return numbers.astype(np.float16)


def score_items(reply: RerankReply, ids: Sequence[str | None]) -> LazyList:
    """Return the scores, best first. Equal scores stay in the request's order, unless their logits differ."""
    ranks = count()

    def item(index: int, score: Any) -> dict[str, Any]:
        item_id = ids[index]
        name = f"item-{index}" if item_id is None else item_id
        return {"item_id": name, "score": float(score), "rank": next(ranks)}

    return rank_list(reply, None, item)


async def _reply(request: Request[Any], served: Served, value: dict[str, Any]) -> HttpReply:
    """Return the reply in JSON, or in msgpack if the Accept header has it."""
    headers = {"x-sie-request-id": request.context.request_id}
    if "msgpack" in request.context.header(b"accept").lower():
        return request.reply_bytes(served, msgpack_bytes(value), headers, MSGPACK)
    return await request.reply(served, value, headers)


@endpoint(
    "/v1/encode/{name:str}",
    reply=SieEncodeResponse,
    description="The outputs of each item",
    forms=BodyForms(msgpack=True),
)
async def encode(request: Request[SieEncodeRequest]) -> HttpReply:
    """Turn items into dense, sparse and multi-vector outputs in one request.

    Returns the requested outputs of each item, in the request's order. Bodies are JSON or msgpack.
    """
    data, timeline = request.body, request.context.timeline
    served, reply = await request.serve(await decode_encode(request), EmbedReply | EncodeReply)
    dtype = (data.params.output_dtype if data.params else None) or "float32"
    items = encode_items(reply, [item.id for item in items_of(data)], dtype)
    timing = {
        "total_ms": round(timeline.total_s() * 1000, 2),
        "queue_ms": timeline.milliseconds("queue"),
        "inference_ms": timeline.milliseconds("upstream"),
    }
    return await _reply(request, served, {"model": served.route.model, "items": items, "timing": timing})


@endpoint(
    "/v1/score/{name:str}",
    reply=SieScoreResponse,
    description="Items, best first",
    forms=BodyForms(msgpack=True),
)
async def score(request: Request[SieScoreRequest]) -> HttpReply:
    """Rank items by their relevance to a query.

    Returns the score and rank of each item, best first. Bodies are JSON or msgpack.
    """
    data = request.body
    served, reply = await request.serve(await decode_score(request), RerankReply)
    scores = score_items(reply, [item.id for item in data.items])
    return await _reply(
        request, served, {"model": served.route.model, "query_id": data.query.id, "scores": scores}
    )


EXAMPLES: dict[type[msgspec.Struct], Any] = {
    SieEncodeRequest: {"items": [{"text": TEXTS[0]}], "params": {"output_types": ["dense"]}},
    SieScoreRequest: {"query": {"text": QUERY}, "items": [{"text": text} for text in TEXTS]},
}
MEANINGS = {
    "items": "Inputs of the request.",
    "options": "Options of the request.",
    "params": "Outputs and options of the request.",
    "SieEncodeRequest.input": "Alias of `items`.",
    "SieEncodeRequest.inputs": "Alias of `items`.",
    "SieScoreRequest.items": "Texts to score against the query.",
    "EncodeParams.output_types": "Kinds of output for each item.",
    "EncodeParams.output_dtype": "Number format of the dense vectors.",
    "EncodeParams.instruction": "The task in words, for a model that takes one.",
    "EncodeParams.options": "Options of the model.",
    "SieAudio.data": "The recording: bytes, or base64 in JSON.",
    "SieAudio.format": "Changes nothing: the content decides it.",
    "SieAudio.sample_rate": "Changes nothing: the content decides it.",
    "SieImage.data": "The image: bytes, or base64 in JSON.",
    "SieImage.format": "Changes nothing: the content decides it.",
    "SieItem.id": "Name of the item, which is repeated in the reply.",
    "SieItem.text": "The input.",
    "SieItem.images": "Images of the item.",
    "SieItem.audio": "Recording of the item.",
    "SieItem.video": REFUSED,
    "SieItem.document": REFUSED,
    "SieOptions.is_query": "Whether the items are queries, which selects their prompt.",
    "SieOptions.normalize": "Whether dense vectors are scaled to length 1.",
    "SieOptions.profile": "Profile of the model; `default` is served.",
    "SieOptions.lora_id": "Refused unless it is null: adapters are merged when a model is loaded.",
    "SieOptions.muvera": "Refused unless it is null: fixed encodings of multi-vectors are not computed.",
    "SieOptions.smve": "Refused unless it is null: fixed encodings of multi-vectors are not computed.",
    "SieScoreRequest.query": "The query.",
}
DIALECT = Dialect(
    handlers=[encode, score],
    tags={"SIE": "The encode and score paths of SIE."},
    examples=EXAMPLES,
    meanings=MEANINGS,
)
