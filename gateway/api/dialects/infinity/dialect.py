"""Infinity: embeddings, rerank, classify, models and health, below /infinity.

A client appends /infinity to its base URL.

Source: michaelfeil/infinity 0.0.77, fastapi_schemas/pymodels.py.
"""

import secrets
import time
from contextlib import suppress
from functools import partial
from itertools import starmap
from typing import Annotated, Any, Literal

import msgspec
from litestar import get
from litestar.di import NamedDependency

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
    Rerank,
    RerankReply,
)
from gateway.api.document.fields import QUERY, TEXTS
from gateway.api.server.body import INTEGER_MAX, ModelName
from gateway.api.server.dialect import Dialect
from gateway.api.server.encoding import Encoding, EncodingFormat, LazyList, base64_numbers
from gateway.api.server.endpoints import inference
from gateway.api.server.error_bodies import ErrorFormat, document_errors
from gateway.api.server.inference_api import InferenceApi
from gateway.api.server.paths import route_options
from gateway.api.server.request import Request
from gateway.api.server.request_context import RequestContext
from gateway.api.server.responses import NO_KEY, HttpReply
from gateway.api.wire.inputs import check_token_vectors
from gateway.api.wire.media import VectorOptions, embed_parts
from gateway.api.wire.replies import label_items, rank_list, vector_list, with_dimensions
from gateway.calls import Call
from gateway.errors import EmptyInput, GatewayError, InvalidInput
from gateway.media.sources import PictureSource, SoundSource
from gateway.serve import Served

# The value of `model` that its clients send by default.
ANY_MODEL = "default/not-specified"
# Default of INFINITY_QUEUE_SIZE, the denominator of `queue_fraction`.
QUEUE_SIZE = 32_000
CREATED = 1_700_000_000

SOURCES: dict[str, type[PictureSource | SoundSource]] = {"image": PictureSource, "audio": SoundSource}
OPERATION_OF = {"image": Operation.EMBED_IMAGE, "audio": Operation.EMBED_AUDIO}
# Unlike in the other dialects, 0 is allowed and means all dimensions.
DimensionsOrAll = Annotated[int, msgspec.Meta(ge=0, le=65536)]


class InfinityErrorDetail(msgspec.Struct):
    """Source: Infinity 0.0.77: two keys are always null, code repeats the status."""

    message: str
    code: int
    type: None = None
    param: None = None


class InfinityError(msgspec.Struct):
    """Infinity's envelope for errors outside the request body."""

    error: InfinityErrorDetail


class FastAPIProblem(msgspec.Struct):
    """One problem in a body. loc: the path to it."""

    type: str
    loc: list[str]
    msg: str


class FastAPIError(msgspec.Struct):
    """Envelope of FastAPI, on which Infinity runs: 422 with problems; 401, 404 and 405 with a sentence."""

    detail: list[FastAPIProblem] | str


# FastAPI returns these statuses before Infinity's own code runs.
FASTAPI_STATUSES = frozenset({401, 404, 405})


def _infinity_error(error: GatewayError) -> InfinityError | FastAPIError:
    status = error.facts.infinity_status
    if status == 422:
        loc = ["body", error.param] if error.param else ["body"]
        return FastAPIError([FastAPIProblem("value_error", loc, error.message)])
    if status in FASTAPI_STATUSES:
        return FastAPIError(error.message)
    return InfinityError(InfinityErrorDetail(error.message, status))


INFINITY = ErrorFormat(
    "infinity",
    InfinityError | FastAPIError,
    _infinity_error,
    ("/infinity/",),
    lambda facts: facts.infinity_status,
)
endpoint = partial(inference, errors=INFINITY, tags=["Infinity"], below_models=False)


class InfinityEmbeddingsRequest(msgspec.Struct):
    """Body of /infinity/embeddings.

    input: one text or a list. dimensions: 0 means all. output_dimension: the same, as LiteLLM spells it.
    """

    input: str | list[str]
    model: ModelName = ANY_MODEL
    encoding_format: EncodingFormat = "float"
    user: str | None = None
    dimensions: DimensionsOrAll = 0
    output_dimension: DimensionsOrAll | None = None
    modality: Literal["text", "image", "audio"] = "text"


class InfinityRerankRequest(msgspec.Struct):
    """Body of /infinity/rerank. raw_scores: return logits."""

    query: str
    documents: list[str]
    return_documents: bool = False
    raw_scores: bool = False
    model: ModelName = ANY_MODEL
    top_n: Annotated[int, msgspec.Meta(gt=0, le=INTEGER_MAX)] | None = None


class InfinityClassifyRequest(msgspec.Struct):
    """Body of /infinity/classify. raw_scores: return logits."""

    input: list[str]
    model: ModelName = ANY_MODEL
    raw_scores: bool = False


class InfinityUsage(msgspec.Struct):
    """Tokens of the model. Infinity itself counts characters."""

    prompt_tokens: int
    total_tokens: int


class InfinityEmbedding(msgspec.Struct):
    """One vector, or for a model of late interaction one for each token."""

    index: int
    embedding: list[float | list[float]] | str
    object: str = "embedding"


class InfinityRank(msgspec.Struct):
    """Score of one document. document: its text, only with `return_documents`."""

    relevance_score: float
    index: int
    document: str | None = None


class InfinityLabel(msgspec.Struct):
    """One label and its score."""

    score: float
    label: str


class InfinityEmbeddingsResponse(msgspec.Struct):
    """Vectors, in the order of the inputs."""

    data: list[InfinityEmbedding]
    model: str
    usage: InfinityUsage
    id: str
    created: int
    object: str = "list"


class InfinityRerankResponse(msgspec.Struct):
    """Documents, best first."""

    results: list[InfinityRank]
    model: str
    usage: InfinityUsage
    id: str
    created: int
    object: str = "rerank"


class InfinityClassifyResponse(msgspec.Struct):
    """The labels of each input, best first, in the order of the inputs."""

    data: list[list[InfinityLabel]]
    model: str
    usage: InfinityUsage
    id: str
    created: int
    object: str = "classify"


class InfinityQueueStats(msgspec.Struct):
    """Queue in front of a model."""

    queue_fraction: float
    queue_absolute: int
    results_pending: int
    batch_size: int


class InfinityModelItem(msgspec.Struct):
    """One model, with its operations under Infinity's names."""

    id: str
    stats: InfinityQueueStats
    backend: str
    capabilities: list[str]
    created: int = CREATED
    object: str = "model"
    owned_by: str = "infinity"


class InfinityModelList(msgspec.Struct):
    """The models that the key may use."""

    data: list[InfinityModelItem]
    object: str = "list"


class InfinityHealth(msgspec.Struct):
    """Liveness of the process. unix: the time in seconds since 1970."""

    unix: float


def model_of(model: str) -> str | None:
    """Return the model that the body names, or None for the default."""
    return None if model == ANY_MODEL else model


async def decode_embeddings(request: Request[InfinityEmbeddingsRequest]) -> Call:
    """Decode a body of /infinity/embeddings. A model that has only multi-vectors returns these.

    Raises: EmptyInput, InvalidInput.
    """
    data, api = request.body, request.api
    model = model_of(data.model)
    if data.modality != "text":
        capabilities = _capabilities_of(model, OPERATION_OF[data.modality], request)
        source = SOURCES[data.modality]
        sources = [[source(text)] for text in api.texts(data.input, "input")]
        # Multi-vectors are cut once they have come.
        pages = is_late(capabilities)
        options = VectorOptions(dimensions=None if pages else width_of(data), multivector=pages)
        fetch = partial(api.fetch_media, request.context, model)
        return Call(await embed_parts(sources, "input", options, fetch), model)
    texts = api.whole_texts(data.input, "input")
    # The model decides the operation.
    model = model or api.gateway.routes.root_model(request.context.tenant)
    capabilities = _capabilities_of(model, Operation.EMBED, request)
    if not is_late(capabilities):
        return Call(Embed(texts, dimensions=width_of(data)), model)
    check_token_vectors(texts, "input", capabilities)
    return Call(Encode(texts, frozenset({Output.MULTIVECTOR})), model)


def width_of(data: InfinityEmbeddingsRequest) -> int | None:
    """Return the requested width of the vectors, None for all. Raises: InvalidInput."""
    widths = {data.dimensions, data.output_dimension or 0} - {0}
    if len(widths) > 1:
        raise InvalidInput("send `dimensions` or `output_dimension`, one of them", param="output_dimension")
    return next(iter(widths), None)


def _capabilities_of(model: str | None, operation: Operation, request: Request[Any]) -> Capabilities | None:
    """Return the capabilities of a model or of the default, None if there is none of that name."""
    # The call itself reports an unknown name, with a suggestion from the caller's models.
    with suppress(GatewayError):
        return request.api.capabilities_of(model, operation, request.context.tenant)
    return None


def is_late(capabilities: Capabilities | None) -> bool:
    """Return whether a model has multi-vectors and no dense vectors, as those of late interaction."""
    if capabilities is None or Operation.EMBED in capabilities.operations:
        return False
    return Output.MULTIVECTOR in capabilities.outputs


def decode_rerank(data: InfinityRerankRequest, api: InferenceApi) -> Call:
    """Decode a body of /infinity/rerank. Raises: EmptyInput, InvalidInput."""
    if not data.query:
        raise EmptyInput("`query` is an empty string", param="query")
    work = Rerank(data.query, api.texts(data.documents, "documents"), raw_scores=data.raw_scores)
    return Call(work, model_of(data.model))


def decode_classify(data: InfinityClassifyRequest, api: InferenceApi) -> Call:
    """Decode a body of /infinity/classify. Raises: EmptyInput, InvalidInput."""
    work = Classify(api.whole_texts(data.input, "input"), raw_scores=data.raw_scores)
    return Call(work, model_of(data.model))


async def _reply(request: Request[Any], served: Served, kind: str, items: dict[str, Any]) -> HttpReply:
    """Return a reply. kind: its `object`. items: the field of its items."""
    tokens = served.reply.tokens
    tail = {
        "model": served.route.model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        "id": f"infinity-{secrets.token_hex(16)}",
        "created": int(time.time()),
    }
    return await request.reply(served, {"object": kind} | items | tail)


async def embedding_items(reply: EmbedReply | EncodeReply, data: InfinityEmbeddingsRequest) -> LazyList:
    """Return the vector of each input, or the vectors of its tokens.

    base64 has the float32 values of all tokens, one vector after the other. Raises: InvalidInput.
    """
    if isinstance(reply, EmbedReply):
        return vector_list(reply.vectors, Encoding((data.encoding_format,)), _embedding)
    width = width_of(data)
    cut = reply if width is None else await with_dimensions(reply, width)
    matrices = cut.multivector or ()
    rows = map(base64_numbers, matrices) if data.encoding_format == "base64" else matrices
    return LazyList(starmap(_embedding, enumerate(rows)), len(matrices), cut.numbers)


def _embedding(index: int, value: Any) -> dict[str, Any]:
    return {"object": "embedding", "embedding": value, "index": index}


def rank_items(reply: RerankReply, data: InfinityRerankRequest) -> LazyList:
    """Return at most top_n documents, best first."""

    def item(index: int, score: Any) -> dict[str, Any]:
        document = data.documents[index] if data.return_documents else None
        return {"relevance_score": score, "index": index, "document": document}

    return rank_list(reply, data.top_n, item)


@endpoint("/infinity/embeddings", reply=InfinityEmbeddingsResponse, description="One vector for each input")
async def embeddings(request: Request[InfinityEmbeddingsRequest]) -> HttpReply:
    """Turn texts into vectors, or images or sound with `modality`.

    Returns one vector for each input, in the order of the inputs.
    """
    return await _serve_embeddings(request)


async def _serve_embeddings(request: Request[InfinityEmbeddingsRequest]) -> HttpReply:
    served, reply = await request.serve(await decode_embeddings(request), EmbedReply | EncodeReply)
    return await _reply(request, served, "list", {"data": await embedding_items(reply, request.body)})


@endpoint(
    "/infinity/embeddings_image", reply=InfinityEmbeddingsResponse, description="One vector for each image"
)
async def embeddings_image(request: Request[InfinityEmbeddingsRequest]) -> HttpReply:
    """Turn images into vectors, at the older path.

    The same as `/infinity/embeddings` with `modality: image`.
    """
    request.body.modality = "image"
    return await _serve_embeddings(request)


@endpoint(
    "/infinity/embeddings_audio",
    reply=InfinityEmbeddingsResponse,
    description="One vector for each recording",
)
async def embeddings_audio(request: Request[InfinityEmbeddingsRequest]) -> HttpReply:
    """Turn recordings into vectors, at the older path.

    The same as `/infinity/embeddings` with `modality: audio`.
    """
    request.body.modality = "audio"
    return await _serve_embeddings(request)


@endpoint("/infinity/rerank", reply=InfinityRerankResponse, description="Documents, best first")
async def rerank(request: Request[InfinityRerankRequest]) -> HttpReply:
    """Rank documents by their relevance to a query.

    Returns the best `top_n` documents, best first.
    """
    served, reply = await request.serve(decode_rerank(request.body, request.api), RerankReply)
    return await _reply(request, served, "rerank", {"results": rank_items(reply, request.body)})


@endpoint("/infinity/classify", reply=InfinityClassifyResponse, description="The labels of each input")
async def classify(request: Request[InfinityClassifyRequest]) -> HttpReply:
    """Classify texts.

    Returns the labels of each input with their scores, best first.
    """
    served, reply = await request.serve(decode_classify(request.body, request.api), ClassifyReply)
    return await _reply(request, served, "classify", {"data": label_items(reply)})


# Infinity has names for these operations only.
CAPABILITY_NAMES = {
    Operation.EMBED: "embed",
    Operation.EMBED_IMAGE: "image_embed",
    Operation.EMBED_AUDIO: "audio_embed",
    Operation.RERANK: "rerank",
    Operation.CLASSIFY: "classify",
}


def model_item(name: str, api: InferenceApi) -> InfinityModelItem:
    """Return a model as Infinity lists it. Its queue is counted in inputs."""
    routes = api.gateway.routes
    upstream = api.gateway.view_of(name)
    operations = routes.operations(name)
    capabilities = [CAPABILITY_NAMES[each] for each in operations if each in CAPABILITY_NAMES]
    if is_late(upstream.capabilities):
        capabilities.insert(0, CAPABILITY_NAMES[Operation.EMBED])
    waiting = upstream.backlog().inputs
    stats = InfinityQueueStats(min(1.0, waiting / QUEUE_SIZE), waiting, 0, upstream.bounds.inputs)
    return InfinityModelItem(name, stats, upstream.settings.backend, capabilities)


@get("/infinity/models", responses=document_errors(INFINITY), tags=["Infinity"])
async def models(
    context: NamedDependency[RequestContext], api: NamedDependency[InferenceApi]
) -> InfinityModelList:
    """List the models that this key may use, with the length of their queues."""
    tenant = api.authenticator.authenticate(context)
    return InfinityModelList([model_item(name, api) for name in api.gateway.routes.names(tenant)])


@get("/infinity/health", tags=["Infinity"], opt=route_options(is_probe=True), security=NO_KEY)
async def health() -> InfinityHealth:
    """Check that the process responds.

    Needs no key.
    """
    return InfinityHealth(time.time())


EXAMPLES: dict[type[msgspec.Struct], Any] = {
    InfinityClassifyRequest: {"model": "emotions", "input": TEXTS},
    InfinityEmbeddingsRequest: {"model": "bge", "input": TEXTS},
    InfinityRerankRequest: {"model": "reranker", "query": QUERY, "documents": TEXTS},
}
MEANINGS = {
    "encoding_format": "`base64` packs the float32 values of a vector, little-endian, into one string.",
    "InfinityEmbeddingsRequest.dimensions": "Width to which vectors are cut; 0 is the model's own.",
    "InfinityEmbeddingsRequest.output_dimension": "The same as `dimensions`, as LiteLLM's client spells it.",
}
DIALECT = Dialect(
    handlers=[embeddings, embeddings_image, embeddings_audio, rerank, classify, models, health],
    tags={"Infinity": "The paths of Infinity, below `/infinity`."},
    examples=EXAMPLES,
    meanings=MEANINGS,
)
