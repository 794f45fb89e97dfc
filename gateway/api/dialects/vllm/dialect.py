"""vLLM's pooling server: /score, /v1/score, /classify, /detokenize and /version.

Source: vLLM 0.33, entrypoints/pooling; older names of the same fields are accepted too.
"""

from typing import Any, TypeAlias

import msgspec
from litestar import get
from litestar.di import NamedDependency

from backends.contract import (
    Classify,
    ClassifyReply,
    Detokenize,
    DetokenizeReply,
    Operation,
    RerankReply,
    Score,
)
from gateway import __version__
from gateway.api.dialects.vllm import pooling
from gateway.api.dialects.vllm.pooling import PoolingRequest, endpoint
from gateway.api.document.fields import NORMALIZE, PACKED, QUERY, TEXTS, of_texts
from gateway.api.server.body import Integer, ModelName
from gateway.api.server.dialect import Dialect
from gateway.api.server.encoding import LazyList
from gateway.api.server.error_bodies import VLLM, document_errors
from gateway.api.server.inference_api import InferenceApi
from gateway.api.server.paths import route_options
from gateway.api.server.request import LEAST_WITHOUT_TOKENS, Request
from gateway.api.server.request_context import RequestContext
from gateway.api.server.responses import HttpReply
from gateway.api.wire.conversations import Content, is_media, text_of_parts
from gateway.api.wire.inputs import InputField, Inputs, read_inputs
from gateway.api.wire.media import one_text, part_of, score_parts
from gateway.api.wire.tokens import decode_ids
from gateway.api.wire.vllm import TextTokens, VllmOptions, VllmReply, reply_with
from gateway.calls import Call
from gateway.errors import EmptyInput, InvalidInput
from gateway.media.sources import SourcePart

Side: TypeAlias = str | Content | list[str | Content]


class VllmScoreRequest(VllmOptions, kw_only=True):
    """Body of /score: two sides, under one of four pairs of names.

    The pairs are queries and documents, queries and items, data_1 and data_2, text_1 and text_2. The sides
    have one text each, one and many, or as many each.
    """

    queries: Side | None = None
    documents: Side | None = None
    items: Side | None = None
    data_1: Side | None = None
    data_2: Side | None = None
    text_1: Side | None = None
    text_2: Side | None = None
    max_tokens_per_query: TextTokens = 0
    max_tokens_per_doc: TextTokens = 0
    model: ModelName | None = None


class VllmClassifyRequest(VllmOptions, kw_only=True):
    """Body of /classify."""

    input: Inputs | None = None
    model: ModelName | None = None


class VllmScoreItem(msgspec.Struct):
    """Score of one pair."""

    index: int
    score: float
    object: str = "score"


class VllmClassItem(msgspec.Struct):
    """The likeliest label of one input, and the probabilities of all classes by class id."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class VllmScoreResponse(VllmReply):
    """Scores, in the order of the pairs."""

    data: list[VllmScoreItem]
    object: str = "list"


class VllmClassifyResponse(VllmReply):
    """Classes, in the order of the inputs."""

    data: list[VllmClassItem]
    object: str = "list"


# A field of one side, and its inputs.
NamedSide: TypeAlias = tuple[str, list[str | Content]]


def sides_of(data: VllmScoreRequest, api: InferenceApi) -> tuple[NamedSide, NamedSide]:
    """Return both sides, of which the longer one is the number of pairs. Raises: InvalidInput, EmptyInput."""
    pairs = (
        ("queries", data.queries, "documents", data.documents),
        ("queries", data.queries, "items", data.items),
        ("data_1", data.data_1, "data_2", data.data_2),
        ("text_1", data.text_1, "text_2", data.text_2),
    )
    for first_field, first, second_field, second in pairs:
        if first is not None and second is not None:
            return _items(first, first_field, api), _items(second, second_field, api)
    raise InvalidInput("send `queries` and `documents`, `data_1` and `data_2`, or `text_1` and `text_2`")


def _items(side: Side, field: str, api: InferenceApi) -> NamedSide:
    items = side if isinstance(side, list) else [side]
    api.check_count(len(items), field)
    return field, items


def _texts(side: NamedSide) -> tuple[str, ...]:
    field, items = side
    return tuple(item if isinstance(item, str) else text_of_parts(item.content, field) for item in items)


def _parts(side: NamedSide) -> tuple[str, list[list[SourcePart]]]:
    field, items = side
    return field, [
        [item] if isinstance(item, str) else one_text([part_of(part, field) for part in item.content])
        for item in items
    ]


def pairs_of(firsts: tuple[str, ...], seconds: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Pair one text with one, one with each of many, or two lists of equal length item by item.

    Raises: InvalidInput, EmptyInput.
    """
    if len(firsts) not in (1, len(seconds)):
        raise InvalidInput(
            f"{len(firsts)} texts against {len(seconds)}: lengths are 1:1, 1:N or N:N", param="queries"
        )
    if not all(firsts):
        raise EmptyInput("a query is an empty string", param="queries")
    return tuple(zip(firsts * (len(seconds) // len(firsts)), seconds, strict=True))


async def decode_score(request: Request[VllmScoreRequest]) -> Call:
    """Decode a body of /score. Raises: EmptyInput, InvalidInput, and the errors of `Routes.resolve`."""
    data, model = request.body, request.model
    data.check()
    first, second = sides_of(data, request.api)
    if any(isinstance(item, Content) and is_media(item.content) for item in (*first[1], *second[1])):
        if data.max_tokens_per_query or data.max_tokens_per_doc:
            field = "max_tokens_per_query" if data.max_tokens_per_query else "max_tokens_per_doc"
            raise InvalidInput(f"`{field}` is for texts: leave it out of a request with images", param=field)
        work = await score_parts(_parts(first), _parts(second), request.fetch, raw=data.is_raw())
        return data.call(work, model)
    pairs = pairs_of(_texts(first), _texts(second))
    call = data.call(Score(pairs, raw_scores=data.is_raw()), model)
    if not data.max_tokens_per_query and not data.max_tokens_per_doc:
        return call
    query_tokens, text_tokens = data.max_tokens_per_query or None, data.max_tokens_per_doc or None
    return msgspec.structs.replace(call, query_tokens=query_tokens, text_tokens=text_tokens)


async def decode_classify(request: Request[VllmClassifyRequest]) -> Call:
    """Decode a body of /classify. Raises: EmptyInput, InvalidInput, and the errors of `Routes.resolve`."""
    data, model = request.body, request.model
    data.check_of_texts()
    field = InputField("input", model, Operation.CLASSIFY)
    texts = await read_inputs(data.input, data.messages, field, request.context, request.api)
    return data.call(data.with_chat(Classify(texts, raw_scores=data.is_raw())), model)


def class_items(reply: ClassifyReply) -> LazyList:
    """Return the classes of each input by class id, with the name of the likeliest."""
    items = (
        {
            "index": index,
            "label": reply.labels[int(row.argmax())],
            "probs": row,
            "num_classes": len(reply.labels),
        }
        for index, row in enumerate(reply.scores)
    )
    return LazyList(items, len(reply.scores), reply.scores.size)


@endpoint("/score", "/v1/score", reply=VllmScoreResponse, description="A score for each pair")
async def score(request: Request[VllmScoreRequest]) -> HttpReply:
    """Score pairs of texts or images.

    Returns one score for each pair, in the order of the pairs.
    """
    served, reply = await request.serve(await decode_score(request), RerankReply)
    items = ({"index": index, "object": "score", "score": value} for index, value in enumerate(reply.scores))
    return await reply_with(request, served, "score", LazyList(items, len(reply.scores)))


@endpoint("/classify", reply=VllmClassifyResponse, description="The classes of each input")
async def classify(request: Request[VllmClassifyRequest]) -> HttpReply:
    """Classify texts.

    Returns the likeliest label of each input, and the probabilities of all classes.
    """
    served, reply = await request.serve(await decode_classify(request), ClassifyReply)
    return await reply_with(request, served, "classify", class_items(reply))


class DetokenizeRequest(msgspec.Struct):
    """Body of vLLM's /detokenize: one list of ids, special tokens included in the text."""

    tokens: list[Integer]
    model: ModelName | None = None


class VllmDetokenizeResponse(msgspec.Struct):
    """The text of the ids."""

    prompt: str


@endpoint(
    "/detokenize", reply=VllmDetokenizeResponse, description="The text of the ids", least=LEAST_WITHOUT_TOKENS
)
async def detokenize(request: Request[DetokenizeRequest]) -> HttpReply:
    """Turn token ids into a text, special tokens included."""
    ids = decode_ids([list(request.body.tokens)], "tokens", request.api)
    call = Call(Detokenize(ids, skip_special_tokens=False), request.model)
    served, reply = await request.serve(call, DetokenizeReply)
    (text,) = reply.texts
    return request.reply_bytes(served, msgspec.json.encode(VllmDetokenizeResponse(text)))


class Version(msgspec.Struct):
    """Release of the gateway."""

    version: str


@get("/version", responses=document_errors(VLLM), tags=["vLLM"], opt=route_options(errors=VLLM))
async def version(context: NamedDependency[RequestContext], api: NamedDependency[InferenceApi]) -> Version:
    """Return the release of the gateway, in the form of vLLM's.

    Any valid key may ask.
    """
    api.authenticator.authenticate(context)
    return Version(__version__)


EXAMPLES: dict[type[msgspec.Struct], Any] = {
    DetokenizeRequest: {"tokens": [101, 7592, 102]},
    PoolingRequest: {"model": "bge", "input": TEXTS},
    VllmClassifyRequest: {"model": "emotions", "input": TEXTS},
    VllmScoreRequest: {"model": "reranker", "queries": QUERY, "documents": TEXTS},
}
MEANINGS = of_texts("VllmScoreRequest") | {
    "tokens": "Token ids of one text.",
    "data_1": "First side of the pairs: one text or a list.",
    "data_2": "Second side of the pairs: one text or a list.",
    "queries": "First side of the pairs: one text or a list.",
    "text_1": "First side of the pairs: one text or a list.",
    "text_2": "Second side of the pairs: one text or a list.",
    "PoolingRequest.encoding_format": PACKED,
    "PoolingRequest.normalize": NORMALIZE,
    "VllmClassifyRequest.normalize": NORMALIZE,
    "PoolingRequest.dimensions": "Refused unless it is null.",
    "PoolingRequest.task": "Output of the model. By default the model's own.",
    "VllmScoreRequest.documents": "Second side of the pairs: one text or a list.",
    "VllmScoreRequest.items": "Second side of the pairs: one text or a list.",
}
DIALECT = Dialect(
    handlers=[score, classify, detokenize, version, *pooling.HANDLERS],
    tags={"vLLM": "The pooling paths of vLLM."},
    examples=EXAMPLES,
    meanings=MEANINGS,
)
