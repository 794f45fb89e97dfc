"""Text Embeddings Inference: /predict, for classifiers, and for pairs of texts for rerankers.

Source: huggingface/text-embeddings-inference 1.9.3, router/src/http/types.rs.
Rule: a list of two texts is one pair; only a list of lists is a batch.
"""

from typing import Any, TypeAlias

import msgspec
import numpy as np
from litestar import post
from litestar.di import NamedDependency
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import FromPath, JSONBody

from backends.contract import Classify, ClassifyReply, Operation, Reply, RerankReply, Score
from gateway.api.dialects.tei import NAMELESS_LABEL, Direction, compute_headers, side_of
from gateway.api.server.body import ModelName
from gateway.api.server.encoding import json_bytes
from gateway.api.server.error_bodies import documented
from gateway.api.server.request_context import RequestContext
from gateway.api.server.responses import DIRECT, Api, HttpReply, expect_reply, respond
from gateway.calls import Call
from gateway.errors import EmptyInput, InvalidInput

FAILURES = documented("tei")

Item: TypeAlias = str | tuple[str, str]


class PredictRequest(msgspec.Struct):
    """inputs: a text, a pair, or a list of lists of one text or two."""

    inputs: str | list[str | list[str]]
    truncate: bool | None = None
    truncation_direction: Direction = "right"
    raw_scores: bool = False
    model: ModelName | None = None


class Prediction(msgspec.Struct):
    """One label and how well it fits."""

    score: float
    label: str


PREDICTIONS: Any = list[Prediction] | list[list[Prediction]]


def items_of(inputs: str | list[str | list[str]]) -> tuple[list[Item], bool]:
    """The texts and pairs, and whether they came as a batch. Raises: EmptyInput, InvalidInput."""
    if isinstance(inputs, str):
        return [_item([inputs])], False
    lists = [one for one in inputs if isinstance(one, list)]
    if lists and len(lists) == len(inputs):
        return [_item(one) for one in lists], True
    texts = [one for one in inputs if isinstance(one, str)]
    if lists:
        raise InvalidInput("`inputs` mixes texts with lists", param="inputs")
    return [_item(texts)], False


def _item(texts: list[str]) -> Item:
    if not 1 <= len(texts) <= 2:
        raise InvalidInput("an input of `inputs` is one text, or two for a pair", param="inputs")
    if not any(texts):
        raise EmptyInput("`inputs` holds an empty string", param="inputs")
    return texts[0] if len(texts) == 1 else (texts[0], texts[1])


def decode_predict(items: list[Item], data: PredictRequest, name: str | None, api: Api) -> Call:
    """A reranker scores pairs, and has no other labels. Raises: InvalidInput, OperationUnsupported."""
    api.texts([""] * len(items), "inputs")
    model = name or data.model
    pairs = tuple(one for one in items if not isinstance(one, str))
    if len(pairs) == len(items) and _only_scores(model, api):
        work: Score | Classify = Score(pairs, raw_scores=data.raw_scores)
    else:
        work = Classify(tuple(items), raw_scores=data.raw_scores)
    return Call(work, model, data.truncate, side_of(data))


def _only_scores(model: str | None, api: Api) -> bool:
    """Whether a model that is named scores pairs itself, and tells no labels."""
    if model is None:
        return False
    told = api.capabilities_of(model, Operation.CLASSIFY)
    own = told.operations if told else frozenset()
    return Operation.RERANK in own and Operation.CLASSIFY not in own


def predictions_of(reply: Reply) -> list[list[dict[str, object]]]:
    """The labels of each input, best first."""
    if isinstance(reply, RerankReply):
        return [[{"score": score, "label": NAMELESS_LABEL}] for score in reply.scores]
    classified: ClassifyReply = expect_reply(reply, ClassifyReply)
    orders = np.argsort(-classified.scores, axis=1, kind="stable")
    return [
        [{"score": row[i], "label": classified.labels[i]} for i in order]
        for row, order in zip(classified.scores, orders, strict=True)
    ]


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
    """Tell how well each label fits."""
    items, batch = items_of(data.inputs)
    call = decode_predict(items, data, name, api)
    served = await api.serve(context, call)
    predictions = predictions_of(served.reply)
    body = json_bytes(predictions if batch else predictions[0])
    return respond(context, served, body, compute_headers(context, served, call))


HANDLERS = [predict]
