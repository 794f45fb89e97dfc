"""Text Embeddings Inference: POST / and /invocations, which predict, rerank or embed as the model does.

Source: huggingface/text-embeddings-inference 1.9.3, router/src/http/server.rs. huggingface_hub's client posts
to the base URL of a model, Amazon SageMaker to /invocations.
"""

from typing import Any

import msgspec
from litestar.openapi.datastructures import ResponseSpec

from gateway.api.server.endpoints import inference
from gateway.api.server.error_bodies import TEI
from gateway.api.server.inference_api import InferenceApi, respond
from gateway.api.server.request_context import RequestContext
from gateway.api.server.responses import HttpReply
from gateway.api.wire.tei_bodies import TeiRank, TeiWeight, compute_headers
from gateway.api.wire.tei_operations import DefaultRequest, operation_of
from gateway.api.wire.tei_predictions import TeiPrediction

ANY_RESPONSE: Any = (
    list[list[float]]
    | list[list[TeiWeight]]
    | list[TeiRank]
    | list[TeiPrediction]
    | list[list[TeiPrediction]]
    | list[float]
)


async def _serve(
    data: DefaultRequest, context: RequestContext, api: InferenceApi, name: str | None
) -> HttpReply:
    model = name or data.model or api.gateway.routes.root_model()
    operation, body = operation_of(data, model, api), msgspec.to_builtins(data)
    call = await operation.decode(body, model, context, api)
    served = await api.serve(context, call)
    encoded = operation.encode(body, served.reply)
    return respond(context, served, encoded, compute_headers(context, served.reply, call))


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
    return await _serve(data, context, api, name)


@inference(
    "/invocations",
    dialect=TEI,
    reply=ResponseSpec(ANY_RESPONSE, description="Reply of the model's default operation"),
    tags=["TEI"],
    below_models=False,
)
async def invocations(
    data: DefaultRequest,
    context: RequestContext,
    api: InferenceApi,
    name: str | None,
) -> HttpReply:
    """Run the default operation of the model at the path that Amazon SageMaker calls.

    The body and the reply are those of `POST /`.
    """
    return await _serve(data, context, api, name)


HANDLERS = [default, invocations]
