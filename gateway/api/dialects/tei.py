"""Text Embeddings Inference: /embed /similarity /info /health, at the root and below /models/{name}/.

Its other routes are in `tei_outputs.py`, `predict.py`, `tokens.py` and `tei_default.py`; /rerank is in
`rerank.py`, because Cohere's and Jina's clients have it too.

Source: huggingface/text-embeddings-inference 1.9.3, router/src/http/types.rs and server.rs.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Protocol

import msgspec
from litestar import Request, Response, get, post
from litestar.di import NamedDependency
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import FromPath, JSONBody

from backends.contract import (
    Capabilities,
    Embed,
    EmbedReply,
    ModelState,
    Operation,
    Output,
    Rerank,
    RerankReply,
    Truncate,
)
from gateway import __version__
from gateway.api.wire.inputs import Inputs, read_texts
from gateway.api.server.body import ModelName
from gateway.api.server.encoding import json_bytes
from gateway.api.server.error_bodies import documented
from gateway.api.server.paths import model_name
from gateway.api.server.request_context import RequestContext, context_of
from gateway.api.server.responses import DIRECT, EMPTY, Api, HttpReply, empty, expect_reply, respond
from gateway.calls import Call, Similarity, characters_of
from gateway.errors import EmptyInput, ModelLoading, NoReplica
from gateway.serve import Served

FAILURES = documented("tei")
# No vector is longer; a number past 32 bits is one that TEI itself cannot read.
Dimensions = Annotated[int, msgspec.Meta(ge=1, le=65536)]
Direction = Literal["left", "Left", "right", "Right"]
# TEI's own default; a client that splits by it is served in one request's worth here.
MAX_CONCURRENT_REQUESTS = 512
# transformers' name of a class that has none.
NAMELESS_LABEL = "LABEL_0"


class EmbedRequest(msgspec.Struct):
    """Fields that are not `| None` refuse null, as TEI's do."""

    inputs: Inputs
    truncate: bool | None = None
    truncation_direction: Direction = "right"
    prompt_name: str | None = None
    normalize: bool = True
    dimensions: Dimensions | None = None
    model: ModelName | None = None


class RerankRequest(msgspec.Struct):
    """texts are scored against the query."""

    query: str
    texts: list[str]
    truncate: bool | None = None
    truncation_direction: Direction = "right"
    raw_scores: bool = False
    return_text: bool = False
    model: ModelName | None = None


class Rank(msgspec.Struct, omit_defaults=True):
    """index: the text's place in the request. text: only when asked for."""

    index: int
    score: float
    text: str | None = None


class SimilarityInputs(msgspec.Struct):
    """One text and those to compare it with."""

    source_sentence: str
    sentences: list[str]


class SimilarityParameters(msgspec.Struct):
    """Options of a similarity call."""

    truncate: bool | None = None
    truncation_direction: Direction = "right"
    prompt_name: str | None = None


class SimilarityRequest(msgspec.Struct):
    """Cosine of one text with each of many."""

    inputs: SimilarityInputs
    parameters: SimilarityParameters | None = None
    model: ModelName | None = None


class InfoResponse(msgspec.Struct):
    """What TEI's clients read before they send, and whether an engine has the model in memory."""

    model_id: str
    model_sha: str | None
    model_dtype: str
    served_model_name: str
    model_type: dict[str, Any]
    max_concurrent_requests: int
    max_input_length: int
    max_batch_tokens: int
    max_batch_requests: int | None
    max_client_batch_size: int
    auto_truncate: bool
    tokenization_workers: int
    version: str
    sha: str | None
    docker_label: str | None
    residence: ModelState | None = None
    last_error: str | None = None


async def decode_embed(data: EmbedRequest, name: str | None, context: RequestContext, api: Api) -> Call:
    """Raises: EmptyInput, InvalidInput, and what reading token ids raises."""
    model = name or data.model
    work = Embed(
        await read_texts(data.inputs, "inputs", model, context, api, Operation.EMBED),
        normalize=data.normalize,
        dimensions=data.dimensions,
        prompt_name=data.prompt_name,
    )
    return Call(work, model, data.truncate, side_of(data))


def decode_rerank(data: RerankRequest, name: str | None, api: Api) -> Call:
    """An empty text is scored like any other; an empty query asks nothing.

    Raises: EmptyInput, InvalidInput.
    """
    if not data.query:
        raise EmptyInput("`query` is an empty string", param="query")
    work = Rerank(data.query, api.texts(data.texts, "texts"), raw_scores=data.raw_scores)
    return Call(work, name or data.model, data.truncate, side_of(data))


def decode_similarity(data: SimilarityRequest, name: str | None, api: Api) -> Call:
    """Raises: EmptyInput, InvalidInput."""
    if not data.inputs.source_sentence:
        raise EmptyInput("`source_sentence` is an empty string", param="inputs")
    options = data.parameters or SimilarityParameters()
    sentences = api.whole_texts(data.inputs.sentences, "sentences")
    work = Similarity(data.inputs.source_sentence, sentences, options.prompt_name)
    return Call(work, name or data.model, options.truncate, side_of(options))


class Sided(Protocol):
    """What says how TEI cuts."""

    truncate: bool | None
    truncation_direction: Direction


def side_of(data: Sided) -> Truncate | None:
    """The end that is cut. "right" is also what is not said, unless truncation is asked for."""
    side = Truncate(data.truncation_direction.lower())
    return side if data.truncate or side is Truncate.LEFT else None


def encode_rerank(reply: RerankReply, texts: list[str] | None) -> bytes:
    """Sorted by score, best first; on ties the higher index first, as TEI does."""
    scores = reply.scores.tolist()
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], -i))
    ranks = [{"index": i, "score": reply.scores[i]} for i in order]
    if texts is not None:
        ranks = [rank | {"text": texts[i]} for rank, i in zip(ranks, order, strict=True)]
    return json_bytes(ranks)


def compute_headers(context: RequestContext, served: Served, call: Call) -> dict[str, str]:
    """TEI's x-compute-* and x-*-time; milliseconds are whole, as TEI's are."""
    timeline = context.timeline
    total = str(round(timeline.total_s() * 1000))
    return {
        "x-compute-type": "gateway",
        "x-compute-time": total,
        "x-compute-characters": str(characters_of(call.work)),
        "x-compute-tokens": str(served.reply.tokens),
        "x-total-time": total,
        "x-tokenization-time": "0",
        "x-queue-time": str(timeline.milliseconds("queue")),
        "x-inference-time": str(timeline.milliseconds("upstream")),
    }


@post(
    ["/embed", "/models/{name:str}/embed"],
    status_code=200,
    opt=DIRECT,
    responses={200: ResponseSpec(list[list[float]], description="One vector for each input")} | FAILURES,
    tags=["TEI"],
)
async def embed(
    data: JSONBody[EmbedRequest],
    context: NamedDependency[RequestContext],
    api: NamedDependency[Api],
    name: FromPath[str | None] = None,
) -> HttpReply:
    """Turn texts into vectors."""
    call = await decode_embed(data, name, context, api)
    served = await api.serve(context, call)
    body = json_bytes(list(expect_reply(served.reply, EmbedReply).vectors))
    return respond(context, served, body, compute_headers(context, served, call))


@post(
    ["/similarity", "/models/{name:str}/similarity"],
    status_code=200,
    opt=DIRECT,
    responses={200: ResponseSpec(list[float], description="A cosine for each sentence, in order")} | FAILURES,
    tags=["TEI"],
)
async def similarity(
    data: JSONBody[SimilarityRequest],
    context: NamedDependency[RequestContext],
    api: NamedDependency[Api],
    name: FromPath[str | None] = None,
) -> HttpReply:
    """Compare one text with others."""
    call = decode_similarity(data, name, api)
    served = await api.serve(context, call)
    body = json_bytes(expect_reply(served.reply, RerankReply).scores)
    return respond(context, served, body, compute_headers(context, served, call))


@get(["/info", "/models/{name:str}/info"], responses=FAILURES, tags=["TEI"])
async def info(
    request: Request[Any, Any, Any], api: NamedDependency[Api], name: FromPath[str | None] = None
) -> InfoResponse:
    """What a model is and takes."""
    gateway = api.gateway
    tenant = api.authenticator.authenticate(context_of(request.scope))
    asked = model_name(name) or gateway.routes.root_model()
    route = gateway.routes.resolve(tenant, asked, Operation.TOKENIZE)
    upstream = gateway.upstreams[route.upstream]
    if upstream.capabilities is None:
        raise ModelLoading("the model has not told what it is yet")
    answer = described(route.model, upstream.capabilities, api.inputs_max, route.truncate != "error")
    if upstream.residence is not None:
        answer.residence, answer.last_error = upstream.residence.state, upstream.residence.error
    return answer


def described(
    model: str,
    told: Capabilities,
    inputs_max: int,
    auto_truncate: bool,  # noqa: FBT001 - a fact, not a switch
) -> InfoResponse:
    """A model as TEI's /info shows it; what a call may hold is this gateway's bound, not a replica's."""
    return InfoResponse(
        model_id=told.model_id,
        model_sha=told.revision,
        model_dtype=told.dtype or "unknown",
        served_model_name=model,
        model_type=model_type(told),
        max_concurrent_requests=MAX_CONCURRENT_REQUESTS,
        max_input_length=told.max_input_tokens or 0,
        max_batch_tokens=told.batch_tokens or 16384,
        max_batch_requests=None,
        max_client_batch_size=inputs_max,
        auto_truncate=auto_truncate,
        tokenization_workers=1,
        version=__version__,
        sha=None,
        docker_label=None,
    )


def model_type(told: Capabilities) -> dict[str, Any]:
    """What kind of model it is, as TEI tags it: a classifier of one label is a reranker."""
    if Operation.RERANK in told.operations:
        return {"reranker": _labels(told.labels or (NAMELESS_LABEL,))}
    if Operation.CLASSIFY in told.operations:
        return {"classifier": _labels(told.labels)}
    sparse = Output.SPARSE in told.outputs and Output.DENSE not in told.outputs
    return {"embedding": {"pooling": told.pooling or ("splade" if sparse else None)}}


def _labels(labels: Sequence[str]) -> dict[str, Any]:
    id2label = {str(index): label for index, label in enumerate(labels)}
    return {"id2label": id2label, "label2id": {label: int(index) for index, label in id2label.items()}}


@get(["/health", "/models/{name:str}/health"], responses={200: EMPTY} | FAILURES, tags=["TEI"])
async def health(api: NamedDependency[Api], name: FromPath[str | None] = None) -> Response[bytes]:
    """200 if the model has a usable replica; needs no key."""
    routes = api.gateway.routes
    model = model_name(name) or routes.root_model()
    if not api.gateway.upstreams[routes.upstream_of(model)].pool.usable():
        raise NoReplica("unhealthy")
    return empty()


HANDLERS = [embed, similarity, info, health]
