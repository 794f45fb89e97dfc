"""TEI's request and reply bodies, with their decoders and encoders.

A list of two texts is one pair; only a list of lists is a batch of them.

Source: huggingface/text-embeddings-inference 1.9.3, router/src/http/types.rs and server.rs.
"""

from collections.abc import Sequence
from typing import Literal, Protocol, TypeAlias

import msgspec
import numpy as np

from backends.contract import (
    Capabilities,
    Classify,
    ClassifyReply,
    Embed,
    Encode,
    Operation,
    Output,
    Reply,
    Rerank,
    RerankReply,
    Score,
    TermWeights,
    Truncate,
)
from gateway.api.server.body import ModelName
from gateway.api.server.encoding import LazyList
from gateway.api.server.inference_api import InferenceApi
from gateway.api.server.request_context import RequestContext
from gateway.api.wire.inputs import (
    Dimensions,
    InputField,
    Inputs,
    PromptName,
    check_token_vectors,
    read_texts,
)
from gateway.api.wire.replies import label_items
from gateway.calls import Call, Similarity
from gateway.errors import EmptyInput, InvalidInput

Direction = Literal["left", "Left", "right", "Right"]
# transformers' name for the only class of a model that defines none.
NAMELESS_LABEL = "LABEL_0"
PredictInputs: TypeAlias = str | list[str | list[str]]
TextOrPair: TypeAlias = str | tuple[str, str]


class TruncationFields(Protocol):
    """A body with TEI's truncation fields."""

    truncate: bool | None
    truncation_direction: Direction


def side_of(data: TruncationFields) -> Truncate | None:
    """Return the end of the input to cut, or None for the model's default.

    "right" is also the value of a body without the field, so it counts only if the body asks for truncation.
    """
    side = Truncate(data.truncation_direction.lower())
    return side if data.truncate or side is Truncate.LEFT else None


class EmbedRequest(msgspec.Struct):
    """Body of /embed. Fields that are not `| None` reject null, as TEI's do."""

    inputs: Inputs
    truncate: bool | None = None
    truncation_direction: Direction = "right"
    prompt_name: PromptName | None = None
    normalize: bool = True
    dimensions: Dimensions | None = None
    model: ModelName | None = None


class TeiEncodeRequest(msgspec.Struct):
    """Body of /embed_all, and the fields of /embed_sparse that TEI has.

    Fields that are not `| None` reject null, as TEI's do.
    """

    inputs: Inputs
    truncate: bool | None = None
    truncation_direction: Direction = "right"
    prompt_name: PromptName | None = None
    model: ModelName | None = None


class TeiSparseRequest(TeiEncodeRequest, kw_only=True):
    """Body of /embed_sparse.

    return_tokens: each input is an object from token to weight, as OpenSearch reads it. TEI has no such
    field.
    """

    return_tokens: bool = False


class TeiWeight(msgspec.Struct):
    """One term of the vocabulary and its weight."""

    index: int
    value: float


class TeiRerankRequest(msgspec.Struct):
    """A query, and the texts to score against it."""

    query: str
    texts: list[str]
    truncate: bool | None = None
    truncation_direction: Direction = "right"
    raw_scores: bool = False
    return_text: bool = False
    model: ModelName | None = None


class TeiRank(msgspec.Struct, omit_defaults=True):
    """Score of one text. index: the text's place in the request. text: only with `return_text`."""

    index: int
    score: float
    text: str | None = None


class SimilarityInputs(msgspec.Struct):
    """One sentence, and the sentences to compare it with."""

    source_sentence: str
    sentences: list[str]


class SimilarityParameters(msgspec.Struct):
    """Options of a similarity request."""

    truncate: bool | None = None
    truncation_direction: Direction = "right"
    prompt_name: PromptName | None = None


class SimilarityRequest(msgspec.Struct):
    """Cosine of one sentence with each of many."""

    inputs: SimilarityInputs
    parameters: SimilarityParameters | None = None
    model: ModelName | None = None


async def decode_embed(
    data: EmbedRequest, name: str | None, context: RequestContext, api: InferenceApi
) -> Call:
    """Decode a body of /embed. name: the model in the path.

    Raises: EmptyInput, InvalidInput, and the errors of `read_texts`.
    """
    model = name or data.model
    work = Embed(
        await read_texts(data.inputs, InputField("inputs", model, Operation.EMBED), context, api),
        normalize=data.normalize,
        dimensions=data.dimensions,
        prompt_name=data.prompt_name,
    )
    return Call(work, model, data.truncate, side_of(data))


async def decode_sparse(
    data: TeiEncodeRequest, name: str | None, context: RequestContext, api: InferenceApi
) -> Call:
    """Decode a body of /embed_sparse. name: the model in the path.

    Raises: EmptyInput, InvalidInput, and the errors of `read_texts`.
    """
    model = name or data.model
    texts = await read_texts(data.inputs, InputField("inputs", model, Operation.ENCODE), context, api)
    return _encode_call(data, texts, Output.SPARSE, model)


async def decode_token_vectors(
    data: TeiEncodeRequest, name: str | None, context: RequestContext, api: InferenceApi
) -> Call:
    """Decode a body of /embed_all. name: the model in the path.

    Raises: EmptyInput, InvalidInput, and the errors of `read_texts`.
    """
    model = name or data.model
    texts = await read_texts(data.inputs, InputField("inputs", model, Operation.ENCODE), context, api)
    check_token_vectors(texts, "inputs", api.capabilities_of(model, Operation.ENCODE, context.tenant))
    return _encode_call(data, texts, Output.TOKENS, model)


def _encode_call(data: TeiEncodeRequest, texts: tuple[str, ...], output: Output, model: str | None) -> Call:
    work = Encode(texts, frozenset({output}), prompt_name=data.prompt_name)
    return Call(work, model, data.truncate, side_of(data))


async def decode_rerank(
    data: TeiRerankRequest, name: str | None, _: RequestContext, api: InferenceApi
) -> Call:
    """Decode a body of /rerank with `texts`. name: the model in the path.

    An empty text is scored like any other, and so is an empty query.
    Raises: EmptyInput, InvalidInput.
    """
    work = Rerank(data.query, api.texts(data.texts, "texts"), raw_scores=data.raw_scores)
    return Call(work, name or data.model, data.truncate, side_of(data))


async def decode_similarity(
    data: SimilarityRequest, name: str | None, _: RequestContext, api: InferenceApi
) -> Call:
    """Decode a body of /similarity. name: the model in the path. Raises: EmptyInput, InvalidInput."""
    if not data.inputs.source_sentence:
        raise EmptyInput("`source_sentence` is an empty string", param="inputs")
    options = data.parameters or SimilarityParameters()
    sentences = api.whole_texts(data.inputs.sentences, "sentences")
    work = Similarity(data.inputs.source_sentence, sentences, options.prompt_name)
    return Call(work, name or data.model, options.truncate, side_of(options))


def rank_items(reply: RerankReply, texts: list[str] | None) -> LazyList:
    """Return the ranks in the order of `rank_order`. texts: to return with their ranks, or None."""
    order = rank_order(reply)
    ranks = zip(order, reply.scores[order], strict=True)
    if texts is None:
        return LazyList(({"index": i, "score": score} for i, score in ranks), len(order))
    return LazyList(({"index": i, "score": score, "text": texts[i]} for i, score in ranks), len(order))


def rank_order(reply: RerankReply) -> list[int]:
    """Return the indices of the texts, best first. On ties the higher index comes first, as in TEI."""
    last = len(reply.order) - 1
    order: list[int] = (last - np.argsort(-reply.order[::-1], kind="stable")).tolist()
    return order


def term_lists(sparse: Sequence[TermWeights]) -> LazyList:
    """Return the weights of each input as TEI lists them."""
    lists = list(map(_terms_of, sparse))
    return LazyList(lists, len(lists), sum([each.size for each in lists]))


def _terms_of(weights: TermWeights) -> LazyList:
    pairs = zip(weights.indices.tolist(), weights.values, strict=True)
    return LazyList(({"index": index, "value": value} for index, value in pairs), len(weights.indices))


def compute_headers(context: RequestContext, reply: Reply, call: Call) -> dict[str, str]:
    """Return TEI's x-compute-* and x-*-time headers, in whole milliseconds as TEI's are."""
    timeline = context.timeline
    total = str(round(timeline.total_s() * 1000))
    return {
        "x-compute-type": "gateway",
        "x-compute-time": total,
        "x-compute-characters": str(call.work.characters),
        "x-compute-tokens": str(reply.tokens),
        "x-total-time": total,
        "x-tokenization-time": "0",
        "x-queue-time": str(timeline.milliseconds("queue")),
        "x-inference-time": str(timeline.milliseconds("upstream")),
    }


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


async def decode_predict(
    data: PredictRequest, name: str | None, context: RequestContext, api: InferenceApi
) -> Call:
    """Decode a body of /predict. name: the model in the path.

    Pairs for a reranker are scored, because it has no labels.
    Raises: EmptyInput, InvalidInput, and the errors of `InferenceApi.capabilities_of`.
    """
    if is_batch(data.inputs):
        api.check_count(len(data.inputs), "inputs")
    items = _items(data.inputs)
    model = name or data.model
    pairs = tuple(item for item in items if not isinstance(item, str))
    work: Score | Classify = Classify(tuple(items), raw_scores=data.raw_scores)
    if len(pairs) == len(items):
        # Scores have a default model of their own.
        model = api.named(model, Operation.CLASSIFY, context.tenant)
        if _only_scores(api.capabilities_of(model, Operation.CLASSIFY, context.tenant)):
            work = Score(pairs, raw_scores=data.raw_scores)
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


def _only_scores(capabilities: Capabilities | None) -> bool:
    """Return whether a model scores pairs itself and has no labels."""
    operations = capabilities.operations if capabilities else frozenset()
    return Operation.RERANK in operations and Operation.CLASSIFY not in operations


def predictions_of(reply: Reply) -> LazyList:
    """Return the labels of each input with their scores, best first."""
    if isinstance(reply, RerankReply):
        items = ([{"score": score, "label": NAMELESS_LABEL}] for score in reply.scores)
        return LazyList(items, len(reply.scores))
    assert isinstance(reply, ClassifyReply)
    return label_items(reply)
