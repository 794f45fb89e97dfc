"""Text Embeddings Inference: /predict, for classifiers and, with pairs of texts, for rerankers."""

from typing import Any

from litestar.openapi.datastructures import ResponseSpec

from gateway.api.server.endpoints import inference
from gateway.api.server.error_bodies import TEI
from gateway.api.server.inference_api import InferenceApi, respond
from gateway.api.server.request_context import RequestContext
from gateway.api.server.responses import HttpReply
from gateway.api.wire.tei_bodies import compute_headers
from gateway.api.wire.tei_predictions import (
    PredictRequest,
    TeiPrediction,
    decode_predict,
    encode_predictions,
    is_batch,
)

PREDICTIONS: Any = list[TeiPrediction] | list[list[TeiPrediction]]


@inference(
    "/predict",
    dialect=TEI,
    reply=ResponseSpec(PREDICTIONS, description="The labels of the input, or of each of a batch"),
    tags=["TEI"],
)
async def predict(
    data: PredictRequest,
    context: RequestContext,
    api: InferenceApi,
    name: str | None,
) -> HttpReply:
    """Classify texts or pairs of texts.

    Returns the labels of the input with their scores, best first; for a batch, a list of them for each input.
    A reranker scores pairs, under the label LABEL_0.
    """
    call = decode_predict(data, name, api)
    served = await api.serve(context, call)
    body = encode_predictions(served.reply, batch=is_batch(data.inputs))
    return respond(context, served, body, compute_headers(context, served.reply, call))


HANDLERS = [predict]
