"""Text Embeddings Inference: POST /, what a model does by default: predict, rerank, embed_sparse or embed.

Source: huggingface/text-embeddings-inference 1.9.3, router/src/http/server.rs. huggingface_hub's client posts
to the base URL of a model.
"""

from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

import msgspec
from litestar import post
from litestar.di import NamedDependency
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import FromPath, JSONBody
from msgspec import UNSET, UnsetType

from backends.contract import Operation, Output, RerankReply
from gateway.api.dialects.tei import (
    Dimensions,
    Direction,
    EmbedRequest,
    Rank,
    RerankRequest,
    SimilarityInputs,
    SimilarityRequest,
    compute_headers,
    decode_rerank,
    embed,
    encode_rerank,
    similarity,
)
from gateway.api.dialects.tei_outputs import EncodeRequest, Weight, embed_sparse
from gateway.api.dialects.tei_predict import Prediction, PredictRequest, predict
from gateway.api.server.body import ModelName
from gateway.api.server.error_bodies import documented
from gateway.api.server.request_context import RequestContext
from gateway.api.server.responses import DIRECT, Api, HttpReply, expect_reply, respond

FAILURES = documented("tei")
ANSWERS: Any = (
    list[list[float]]
    | list[list[Weight]]
    | list[Rank]
    | list[Prediction]
    | list[list[Prediction]]
    | list[float]
)
Answering: TypeAlias = Callable[[Any, RequestContext, Api, str | None], Coroutine[Any, Any, HttpReply]]


class DefaultRequest(msgspec.Struct, omit_defaults=True):
    """The body of whichever operation it is: `inputs`, or for a reranker `query` and `texts`. A sentence and
    others to compare it with can be nothing but similarity, whatever the model does by default.
    """

    inputs: str | list[str | int | list[str | int]] | SimilarityInputs | UnsetType = UNSET
    query: str | UnsetType = UNSET
    texts: list[str] | UnsetType = UNSET
    truncate: bool | None = None
    truncation_direction: Direction = "right"
    prompt_name: str | None = None
    normalize: bool = True
    dimensions: Dimensions | None = None
    raw_scores: bool = False
    return_text: bool = False
    parameters: dict[str, Any] | None = None
    model: ModelName | None = None


async def _embedded(body: Any, context: RequestContext, api: Api, name: str | None) -> HttpReply:
    data = msgspec.convert(body, EmbedRequest)
    return await embed.fn(data=data, context=context, api=api, name=name)  # type: ignore[no-any-return]


async def _sparse(body: Any, context: RequestContext, api: Api, name: str | None) -> HttpReply:
    data = msgspec.convert(body, EncodeRequest)
    return await embed_sparse.fn(data=data, context=context, api=api, name=name)  # type: ignore[no-any-return]


async def _predicted(body: Any, context: RequestContext, api: Api, name: str | None) -> HttpReply:
    data = msgspec.convert(body, PredictRequest)
    return await predict.fn(data=data, context=context, api=api, name=name)  # type: ignore[no-any-return]


async def _compared(body: Any, context: RequestContext, api: Api, name: str | None) -> HttpReply:
    data = msgspec.convert(body, SimilarityRequest)
    return await similarity.fn(data=data, context=context, api=api, name=name)  # type: ignore[no-any-return]


async def _reranked(body: Any, context: RequestContext, api: Api, name: str | None) -> HttpReply:
    data = msgspec.convert(body, RerankRequest)
    call = decode_rerank(data, name, api)
    served = await api.serve(context, call)
    shown = encode_rerank(expect_reply(served.reply, RerankReply), data.texts if data.return_text else None)
    return respond(context, served, shown, compute_headers(context, served, call))


def default_of(operations: frozenset[Operation], outputs: frozenset[Output]) -> Answering:
    """What a model of such abilities does unasked; a classifier of one label is a reranker, as at TEI."""
    if Operation.RERANK in operations:
        return _reranked
    if Operation.CLASSIFY in operations:
        return _predicted
    if Output.SPARSE in outputs and Operation.EMBED not in operations:
        return _sparse
    return _embedded


@post(
    ["/", "/models/{name:str}"],
    status_code=200,
    opt=DIRECT,
    responses={200: ResponseSpec(ANSWERS, description="What the model's default operation answers")}
    | FAILURES,
    tags=["TEI"],
)
async def default(
    data: JSONBody[DefaultRequest],
    context: NamedDependency[RequestContext],
    api: NamedDependency[Api],
    name: FromPath[str | None] = None,
) -> HttpReply:
    """Do what the model is for."""
    model = name or data.model or api.gateway.routes.root_model()
    told = api.capabilities_of(model, Operation.EMBED)
    answer = default_of(told.operations, told.outputs) if told else _embedded
    if isinstance(data.inputs, SimilarityInputs):
        answer = _compared
    return await answer(msgspec.to_builtins(data), context, api, model)


HANDLERS = [default]
