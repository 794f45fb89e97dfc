"""Infinity: embeddings, rerank, classify, models and health below /infinity, which a client's base URL gets.

Source: michaelfeil/infinity 0.0.77, fastapi_schemas/pymodels.py.
"""

import secrets
import time
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from litestar import Request, get, post
from litestar.di import NamedDependency
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import FromPath, JSONBody

from backends.contract import Classify, ClassifyReply, Embed, EmbedReply, Operation, Rerank, RerankReply
from gateway.api.server.body import ModelName
from gateway.api.server.encoding import EncodingFormat, json_bytes, vector_items
from gateway.api.server.error_bodies import documented
from gateway.api.server.request_context import RequestContext, context_of
from gateway.api.server.responses import DIRECT, Api, HttpReply, expect_reply, respond
from gateway.calls import Call
from gateway.errors import EmptyInput, InvalidInput
from gateway.serve import Served

FAILURES = documented("infinity")
# What its clients send where they name no model.
ANY_MODEL = "default/not-specified"
# INFINITY_QUEUE_SIZE's default: what `queue_fraction` is of.
QUEUE_SIZE = 32_000
CREATED = 1_700_000_000

Dimensions = Annotated[int, msgspec.Meta(ge=0, le=65536)]


class EmbeddingsRequest(msgspec.Struct):
    """input: one text or a list. dimensions: 0 is all of them."""

    input: str | list[str]
    model: ModelName = ANY_MODEL
    encoding_format: EncodingFormat = "float"
    user: str | None = None
    dimensions: Dimensions = 0
    modality: Literal["text", "image", "audio"] = "text"


class RerankRequest(msgspec.Struct):
    """documents are texts; raw_scores asks for logits."""

    query: str
    documents: list[str]
    return_documents: bool = False
    raw_scores: bool = False
    model: ModelName = ANY_MODEL
    top_n: Annotated[int, msgspec.Meta(gt=0)] | None = None


class ClassifyRequest(msgspec.Struct):
    """Texts, in a list."""

    input: list[str]
    model: ModelName = ANY_MODEL
    raw_scores: bool = False


class Usage(msgspec.Struct):
    """Tokens of the model, where Infinity itself counts characters."""

    prompt_tokens: int
    total_tokens: int


class Item(msgspec.Struct):
    """One vector."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class Rank(msgspec.Struct):
    """One document; its text where it was asked for."""

    relevance_score: float
    index: int
    document: str | None = None


class Label(msgspec.Struct):
    """One label and how well it fits."""

    score: float
    label: str


class EmbeddingsResponse(msgspec.Struct):
    """In the order of the inputs."""

    data: list[Item]
    model: str
    usage: Usage
    id: str
    created: int
    object: str = "list"


class RerankResponse(msgspec.Struct):
    """Best first."""

    results: list[Rank]
    model: str
    usage: Usage
    id: str
    created: int
    object: str = "rerank"


class ClassifyResponse(msgspec.Struct):
    """In the order of the inputs, the labels of each best first."""

    data: list[list[Label]]
    model: str
    usage: Usage
    id: str
    created: int
    object: str = "classify"


class Stats(msgspec.Struct):
    """How much waits in front of a model."""

    queue_fraction: float
    queue_absolute: int
    results_pending: int
    batch_size: int


class ModelItem(msgspec.Struct):
    """One model and what it can do, in Infinity's words."""

    id: str
    stats: Stats
    backend: str
    capabilities: list[str]
    created: int = CREATED
    object: str = "model"
    owned_by: str = "infinity"


class ModelList(msgspec.Struct):
    """All models that the key may use."""

    data: list[ModelItem]
    object: str = "list"


class Health(msgspec.Struct):
    """The time, in seconds since 1970."""

    unix: float


def named(model: str) -> str | None:
    """The model that is asked for, if one is."""
    return None if model == ANY_MODEL else model


def decode_embeddings(data: EmbeddingsRequest, api: Api) -> Call:
    """Raises: EmptyInput, InvalidInput."""
    if data.modality != "text":
        raise InvalidInput(f"`modality` {data.modality} is not supported; only text is", param="modality")
    work = Embed(api.whole_texts(data.input, "input"), dimensions=data.dimensions or None)
    return Call(work, named(data.model))


def decode_rerank(data: RerankRequest, api: Api) -> Call:
    """Raises: EmptyInput, InvalidInput."""
    if not data.query:
        raise EmptyInput("`query` is an empty string", param="query")
    work = Rerank(data.query, api.texts(data.documents, "documents"), raw_scores=data.raw_scores)
    return Call(work, named(data.model))


def decode_classify(data: ClassifyRequest, api: Api) -> Call:
    """Raises: EmptyInput, InvalidInput."""
    work = Classify(api.whole_texts(data.input, "input"), raw_scores=data.raw_scores)
    return Call(work, named(data.model))


def encode_listed(kind: str, items: dict[str, Any], served: Served) -> bytes:
    """The body around the items of a reply."""
    tokens = served.reply.tokens
    tail = {
        "model": served.route.model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        "id": f"infinity-{secrets.token_hex(16)}",
        "created": int(time.time()),
    }
    return json_bytes({"object": kind} | items | tail)


def encode_ranks(reply: RerankReply, data: RerankRequest) -> list[dict[str, Any]]:
    """Best first, as many as were asked for."""
    order = np.argsort(-reply.scores, kind="stable")[: data.top_n]
    return [
        {
            "relevance_score": reply.scores[i],
            "index": int(i),
            "document": data.documents[i] if data.return_documents else None,
        }
        for i in order
    ]


def encode_labels(reply: ClassifyReply) -> list[list[dict[str, Any]]]:
    """The labels of each input, best first."""
    orders = np.argsort(-reply.scores, axis=1, kind="stable")
    return [
        [{"score": row[i], "label": reply.labels[i]} for i in order]
        for row, order in zip(reply.scores, orders, strict=True)
    ]


@post(
    "/infinity/embeddings",
    status_code=200,
    opt=DIRECT,
    responses={200: ResponseSpec(EmbeddingsResponse, description="One vector for each input")} | FAILURES,
    tags=["Infinity"],
)
async def embeddings(
    data: JSONBody[EmbeddingsRequest],
    context: NamedDependency[RequestContext],
    api: NamedDependency[Api],
    name: FromPath[str | None] = None,  # noqa: ARG001 - what every handler is given
) -> HttpReply:
    """Turn texts into vectors."""
    served = await api.serve(context, decode_embeddings(data, api))
    items = [
        {"object": "embedding", "embedding": item, "index": index}
        for index, item in enumerate(
            vector_items(expect_reply(served.reply, EmbedReply).vectors, data.encoding_format)
        )
    ]
    return respond(context, served, encode_listed("list", {"data": items}, served))


@post(
    "/infinity/rerank",
    status_code=200,
    opt=DIRECT,
    responses={200: ResponseSpec(RerankResponse, description="Documents, best first")} | FAILURES,
    tags=["Infinity"],
)
async def rerank(
    data: JSONBody[RerankRequest],
    context: NamedDependency[RequestContext],
    api: NamedDependency[Api],
    name: FromPath[str | None] = None,  # noqa: ARG001 - what every handler is given
) -> HttpReply:
    """Order documents by how well they answer a query."""
    served = await api.serve(context, decode_rerank(data, api))
    ranks = encode_ranks(expect_reply(served.reply, RerankReply), data)
    return respond(context, served, encode_listed("rerank", {"results": ranks}, served))


@post(
    "/infinity/classify",
    status_code=200,
    opt=DIRECT,
    responses={200: ResponseSpec(ClassifyResponse, description="The labels of each input")} | FAILURES,
    tags=["Infinity"],
)
async def classify(
    data: JSONBody[ClassifyRequest],
    context: NamedDependency[RequestContext],
    api: NamedDependency[Api],
    name: FromPath[str | None] = None,  # noqa: ARG001 - what every handler is given
) -> HttpReply:
    """Tell how well each label fits."""
    served = await api.serve(context, decode_classify(data, api))
    labels = encode_labels(expect_reply(served.reply, ClassifyReply))
    return respond(context, served, encode_listed("classify", {"data": labels}, served))


WORDS = {Operation.EMBED: "embed", Operation.RERANK: "rerank", Operation.CLASSIFY: "classify"}


def described(name: str, api: Api) -> ModelItem:
    """A model as Infinity lists it; what waits are parts of calls, of some inputs each."""
    routes = api.gateway.routes
    upstream = api.gateway.upstreams[routes.upstream_of(name)]
    words = [WORDS[one] for one in routes.operations(name) if one in WORDS]
    waiting = upstream.lane.waiting().inputs
    stats = Stats(min(1.0, waiting / QUEUE_SIZE), waiting, 0, upstream.bounds.inputs)
    return ModelItem(name, stats, upstream.settings.backend, words)


@get("/infinity/models", tags=["Infinity"])
async def models(request: Request[Any, Any, Any], api: NamedDependency[Api]) -> ModelList:
    """The models that this key may use."""
    tenant = api.authenticator.authenticate(context_of(request.scope))
    return ModelList([described(name, api) for name in api.gateway.routes.names(tenant)])


@get("/infinity/health", tags=["Infinity"])
async def health() -> Health:
    """The process answers; needs no key."""
    return Health(time.time())


HANDLERS = [embeddings, rerank, classify, models, health]
