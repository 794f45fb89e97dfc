"""TEI's /predict bodies, with their decoder and encoder: labels of texts, and scores of pairs.

Source: huggingface/text-embeddings-inference 1.9.3, router/src/http/types.rs.
Rule: a list of two texts is one pair; only a list of lists is a batch.
"""

from typing import Any, TypeAlias

import msgspec
import numpy as np

from backends.contract import Classify, ClassifyReply, Operation, Reply, RerankReply, Score
from gateway.api.server.body import ModelName
from gateway.api.server.encoding import json_bytes
from gateway.api.wire.inputs import InputReader
from gateway.api.wire.tei_truncation import Direction, side_of
from gateway.calls import Call
from gateway.errors import EmptyInput, InvalidInput

# transformers' name for the only class of a model that defines none.
NAMELESS_LABEL = "LABEL_0"
PredictInputs: TypeAlias = str | list[str | list[str]]
TextOrPair: TypeAlias = str | tuple[str, str]


class PredictRequest(msgspec.Struct):
    """Body of /predict. inputs: a text, a pair, or a list of lists of one text or two."""

    inputs: PredictInputs
    truncate: bool | None = None
    truncation_direction: Direction = "right"
    raw_scores: bool = False
    model: ModelName | None = None


class TeiPrediction(msgspec.Struct):
    """One label and its score."""

    score: float
    label: str


def decode_predict(data: PredictRequest, name: str | None, api: InputReader) -> Call:
    """Decode a body of /predict. name: the model in the path.

    Pairs for a reranker are scored, because it has no labels.
    Raises: EmptyInput, InvalidInput, OperationUnsupported.
    """
    if is_batch(data.inputs):
        api.check_count(len(data.inputs), "inputs")
    items = _items(data.inputs)
    model = name or data.model
    pairs = tuple(item for item in items if not isinstance(item, str))
    if len(pairs) == len(items) and _only_scores(model, api):
        work: Score | Classify = Score(pairs, raw_scores=data.raw_scores)
    else:
        work = Classify(tuple(items), raw_scores=data.raw_scores)
    return Call(work, model, data.truncate, side_of(data))


def is_batch(inputs: PredictInputs) -> bool:
    """Return whether the inputs are a batch, which gets a list of predictions for each input."""
    return isinstance(inputs, list) and bool(inputs) and all(isinstance(item, list) for item in inputs)


def _items(inputs: PredictInputs) -> list[TextOrPair]:
    """Return the texts and pairs of the inputs. Raises: EmptyInput, InvalidInput."""
    if isinstance(inputs, str):
        return [_text_or_pair([inputs])]
    lists = [item for item in inputs if isinstance(item, list)]
    if is_batch(inputs):
        return [_text_or_pair(item) for item in lists]
    if lists:
        raise InvalidInput("`inputs` mixes texts with lists", param="inputs")
    return [_text_or_pair([item for item in inputs if isinstance(item, str)])]


def _text_or_pair(texts: list[str]) -> TextOrPair:
    if not 1 <= len(texts) <= 2:
        raise InvalidInput("an input of `inputs` is one text, or two for a pair", param="inputs")
    if not any(texts):
        raise EmptyInput("`inputs` contains an empty string", param="inputs")
    return texts[0] if len(texts) == 1 else (texts[0], texts[1])


def _only_scores(model: str | None, api: InputReader) -> bool:
    """Return whether the named model scores pairs itself and has no labels."""
    if model is None:
        return False
    capabilities = api.capabilities_of(model, Operation.CLASSIFY)
    operations = capabilities.operations if capabilities else frozenset()
    return Operation.RERANK in operations and Operation.CLASSIFY not in operations


def encode_predictions(reply: Reply, *, batch: bool) -> bytes:
    """Encode the labels of each input, best first; without a batch, those of the only input."""
    predictions = predictions_of(reply)
    return json_bytes(predictions if batch else predictions[0])


def predictions_of(reply: Reply) -> list[list[dict[str, Any]]]:
    """Return the labels of each input with their scores, best first."""
    if isinstance(reply, RerankReply):
        return [[{"score": score, "label": NAMELESS_LABEL}] for score in reply.scores]
    assert isinstance(reply, ClassifyReply)
    orders = np.argsort(-reply.scores, axis=1, kind="stable")
    return [
        [{"score": row[i], "label": reply.labels[i]} for i in order]
        for row, order in zip(reply.scores, orders, strict=True)
    ]
