"""Text Embeddings Inference: POST /, which predicts, reranks or embeds, whatever the model is for.

Source: huggingface/text-embeddings-inference 1.9.3, router/src/http/server.rs. huggingface_hub's client posts
to the base URL of a model.
"""

from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

import msgspec
from litestar.openapi.datastructures import ResponseSpec
from msgspec import UNSET, UnsetType

from backends.contract import EmbedReply, EncodeReply, Operation, Output, RerankReply
from gateway.api.server.body import Integer, ModelName
from gateway.api.server.encoding import json_bytes
from gateway.api.server.endpoints import inference
from gateway.api.server.error_bodies import TEI
from gateway.api.server.inference_api import InferenceApi, expect_reply, respond
from gateway.api.server.request_context import RequestContext
from gateway.api.server.responses import HttpReply
from gateway.api.wire.inputs import Dimensions
from gateway.api.wire.tei_bodies import (
    EmbedRequest,
    SimilarityInputs,
    SimilarityRequest,
    TeiEncodeRequest,
    TeiRank,
    TeiRerankRequest,
    TeiWeight,
    compute_headers,
    decode_embed,
    decode_rerank,
    decode_similarity,
    decode_sparse,
    encode_rerank,
    term_items,
)
from gateway.api.wire.tei_predictions import (
    PredictRequest,
    TeiPrediction,
    decode_predict,
    encode_predictions,
    is_batch,
)
from gateway.api.wire.tei_truncation import Direction

ANY_RESPONSE: Any = (
    list[list[float]]
    | list[list[TeiWeight]]
    | list[TeiRank]
    | list[TeiPrediction]
    | list[list[TeiPrediction]]
    | list[float]
)
# Body as plain values, model, context, api → the reply of one operation.
RunOperation: TypeAlias = Callable[[Any, str, RequestContext, InferenceApi], Coroutine[Any, Any, HttpReply]]


class DefaultRequest(msgspec.Struct, omit_defaults=True):
    """The body of any of the operations: `inputs`, or for a reranker `query` and `texts`.

    A source sentence with sentences can only ask for similarity, whatever the model's default operation.
    """

    inputs: str | list[str | Integer | list[str | Integer]] | SimilarityInputs | UnsetType = UNSET
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


async def _embed(body: Any, model: str, context: RequestContext, api: InferenceApi) -> HttpReply:
    call = await decode_embed(msgspec.convert(body, EmbedRequest), model, context, api)
    served = await api.serve(context, call)
    vectors = json_bytes(list(expect_reply(served.reply, EmbedReply).vectors))
    return respond(context, served, vectors, compute_headers(context, served, call))


async def _embed_sparse(body: Any, model: str, context: RequestContext, api: InferenceApi) -> HttpReply:
    call = await decode_sparse(msgspec.convert(body, TeiEncodeRequest), model, context, api)
    served = await api.serve(context, call)
    reply: EncodeReply = expect_reply(served.reply, EncodeReply)
    weights = json_bytes([term_items(terms) for terms in reply.sparse or ()])
    return respond(context, served, weights, compute_headers(context, served, call))


async def _predict(body: Any, model: str, context: RequestContext, api: InferenceApi) -> HttpReply:
    data = msgspec.convert(body, PredictRequest)
    call = decode_predict(data, model, api)
    served = await api.serve(context, call)
    predictions = encode_predictions(served.reply, batch=is_batch(data.inputs))
    return respond(context, served, predictions, compute_headers(context, served, call))


async def _similarity(body: Any, model: str, context: RequestContext, api: InferenceApi) -> HttpReply:
    call = decode_similarity(msgspec.convert(body, SimilarityRequest), model, api)
    served = await api.serve(context, call)
    cosines = json_bytes(expect_reply(served.reply, RerankReply).scores)
    return respond(context, served, cosines, compute_headers(context, served, call))


async def _rerank(body: Any, model: str, context: RequestContext, api: InferenceApi) -> HttpReply:
    data = msgspec.convert(body, TeiRerankRequest)
    call = decode_rerank(data, model, api)
    served = await api.serve(context, call)
    ranks = encode_rerank(expect_reply(served.reply, RerankReply), data.texts if data.return_text else None)
    return respond(context, served, ranks, compute_headers(context, served, call))


def default_of(operations: frozenset[Operation], outputs: frozenset[Output]) -> RunOperation:
    """Return the default operation of a model with these abilities.

    A classifier of one label is a reranker, as in TEI.
    """
    if Operation.RERANK in operations:
        return _rerank
    if Operation.CLASSIFY in operations:
        return _predict
    if Output.SPARSE in outputs and Operation.EMBED not in operations:
        return _embed_sparse
    return _embed


@inference(
    "/",
    dialect=TEI,
    reply=ResponseSpec(ANY_RESPONSE, description="Reply of the model's default operation"),
    tags=["TEI"],
)
async def default(
    data: DefaultRequest,
    context: RequestContext,
    api: InferenceApi,
    name: str | None,
) -> HttpReply:
    """Run the default operation of the model.

    An embedding model embeds `inputs`, a sparse model returns their weighted terms, a classifier their
    labels, and a reranker ranks `texts` by `query`. `inputs` with a source sentence and sentences always ask
    for similarity.
    """
    model = name or data.model or api.gateway.routes.root_model()
    capabilities = api.capabilities_of(model, Operation.EMBED)
    run = default_of(capabilities.operations, capabilities.outputs) if capabilities else _embed
    if isinstance(data.inputs, SimilarityInputs):
        run = _similarity
    return await run(msgspec.to_builtins(data), model, context, api)


HANDLERS = [default]
