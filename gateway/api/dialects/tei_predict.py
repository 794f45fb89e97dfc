"""Text Embeddings Inference: /predict, for classifiers and, with pairs of texts, for rerankers."""

from typing import Any

from litestar import post
from litestar.di import NamedDependency
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import FromPath, JSONBody

from gateway.api.server.error_bodies import documented
from gateway.api.server.request_context import RequestContext
from gateway.api.server.responses import DIRECT, Api, HttpReply, respond
from gateway.api.wire.tei_bodies import compute_headers
from gateway.api.wire.tei_predictions import (
    PredictRequest,
    TeiPrediction,
    decode_predict,
    encode_predictions,
    is_batch,
)

FAILURES = documented("tei")
PREDICTIONS: Any = list[TeiPrediction] | list[list[TeiPrediction]]


@post(
    ["/predict", "/models/{name:str}/predict"],
    status_code=200,
    opt=DIRECT,
    responses={200: ResponseSpec(PREDICTIONS, description="The labels of the input, or of each of a batch")}
    | FAILURES,
    tags=["TEI"],
)
async def predict(
    data: JSONBody[PredictRequest],
    context: NamedDependency[RequestContext],
    api: NamedDependency[Api],
    name: FromPath[str | None] = None,
) -> HttpReply:
    """Classify texts or pairs of texts.

    Returns the labels of the input with their scores, best first; for a batch, a list of them for each input.
    A reranker scores pairs, under the label LABEL_0.
    """
    call = decode_predict(data, name, api)
    served = await api.serve(context, call)
    body = encode_predictions(served.reply, batch=is_batch(data.inputs))
    return respond(context, served, body, compute_headers(context, served, call))


HANDLERS = [predict]
