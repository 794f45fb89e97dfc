"""Infinity over HTTP: wire structs, pure encode and decode, then a few lines of I/O.

Source: michaelfeil/infinity 0.0.77 (infinity_server.py, fastapi_schemas), run at 0.0.78.
Infinity tells characters instead of tokens, no maximum length, and cuts silently: what it does not tell is
counted here with the model's own tokenizer.
Rule: never send null, and never `dimensions`: it cuts without normalizing again.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from backends.contract import (
    Capabilities,
    Classify,
    ClassifyReply,
    Detokenize,
    Embed,
    EmbedReply,
    Encode,
    EncodeReply,
    Operation,
    Output,
    QueueDepth,
    ReplicaSpec,
    Reply,
    Rerank,
    RerankReply,
    Score,
    Tokenize,
    Truncate,
    Vectors,
    Work,
    operation_of,
)
from backends.counting import TokenCount, TokenCounter, apply_prompt, open_token_counter
from backends.errors import (
    AttemptTimedOut,
    BackendError,
    ReplicaFailed,
    ReplicaOverloaded,
    ReplicaUnavailable,
    UnsupportedWork,
)
from backends.http import SHORT_IDLE_S, UpstreamClient, UpstreamResponse, countdown
from backends.openai_wire import Ragged, chosen_model, decode_embeddings, error_of
from backends.outputs import check_outputs
from backends.replies import (
    check_dimensions,
    fit_vectors,
    label_scores,
    order_scores,
    token_matrices,
    translate_decode_errors,
)
from backends.texts import ModelWork, WorkT, clip_text, map_texts

# No text may be longer; what a model of 8,192 tokens would see of it is far less.
CHARACTERS_MAX = 122_880
# Two lengths: a model of one vector a token gives rows of different widths for them.
PROBE = ("a", "a b c")

Body = dict[str, Any]


class Stats(msgspec.Struct, frozen=True):
    """Of one model. queue_absolute: inputs that wait. batch_size: inputs of one forward pass."""

    queue_absolute: int = 0
    batch_size: int | None = None


class Model(msgspec.Struct, frozen=True):
    """One entry of GET /models."""

    id: str
    capabilities: list[str]
    stats: Stats = Stats()
    backend: str = ""


class Models(msgspec.Struct, frozen=True):
    """GET /models: one server may serve many."""

    data: list[Model]


class Rank(msgspec.Struct, frozen=True):
    """One entry of POST /rerank; sorted by score, index is the document's."""

    index: int
    relevance_score: float


class Ranks(msgspec.Struct, frozen=True):
    """POST /rerank."""

    results: list[Rank]


class Prediction(msgspec.Struct, frozen=True):
    """One label of one input of POST /classify; sorted by score."""

    score: float
    label: str


class Predictions(msgspec.Struct, frozen=True):
    """POST /classify."""

    data: list[list[Prediction]]


class TokenRows(msgspec.Struct, frozen=True):
    """One input's token vectors."""

    index: int
    embedding: list[list[float]]


class Matrices(msgspec.Struct, frozen=True):
    """POST /embeddings of a model that gives a vector for each token; in base64 no shape is told."""

    data: list[TokenRows]


class Found(msgspec.Struct, frozen=True):
    """What a model gave for short texts. width: of its dense vectors. labels: of a classifier."""

    width: int | None = None
    multivector: bool = False
    labels: tuple[str, ...] = ()


def decode_models(answer: UpstreamResponse) -> list[Model]:
    """Raises: ReplicaFailed where it is not Infinity's."""
    try:
        return msgspec.json.decode(answer.body, type=Models).data
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ReplicaFailed("GET /models is not Infinity's") from error


def capabilities(model: Model, counter: TokenCounter, found: Found) -> Capabilities:
    """What /models says, in the contract's words, what short texts told, and the tokenizer's files."""
    outputs = {Output.DENSE: found.width is not None, Output.MULTIVECTOR: found.multivector}
    return Capabilities(
        model_id=model.id,
        operations=_operations(model, found),
        max_input_tokens=counter.rules.max_tokens,
        batch_inputs=model.stats.batch_size,
        dimensions=found.width,
        prompts=counter.rules.prompts,
        default_prompt=counter.rules.default_prompt,
        version="Infinity",
        outputs=frozenset(kind for kind, given in outputs.items() if given),
        labels=found.labels,
        notes=("tokens are counted here",),
    )


def _operations(model: Model, found: Found) -> frozenset[Operation]:
    found_to_do = {
        # Infinity calls it embedding too where each token has a vector; those have no one width.
        Operation.EMBED: found.width is not None,
        Operation.ENCODE: found.multivector,
        Operation.RERANK: "rerank" in model.capabilities,
        Operation.CLASSIFY: bool(found.labels),
        Operation.TOKENIZE: True,
        Operation.DETOKENIZE: True,
    }
    return frozenset(operation for operation, there in found_to_do.items() if there)


def as_read(work: WorkT, max_tokens: int) -> WorkT:
    """The work as the server's tokenizer will get it: stripped, and no longer than may be sent."""

    def one(text: str) -> str:
        short = clip_text(text.strip(), max_tokens, work.truncate)
        return short if work.truncate is Truncate.ERROR else short[:CHARACTERS_MAX]

    return map_texts(work, one)


def check_expressible(work: ModelWork, told: Capabilities) -> None:
    """Raises: UnsupportedWork where Infinity would do something else than what is asked."""
    if operation_of(work) not in told.operations:
        raise UnsupportedWork("this upstream's model does not do that")
    match work:
        case Embed(normalize=False):
            raise UnsupportedWork("this upstream always normalizes its vectors")
        case Encode():
            check_outputs(work, told.outputs)
            if work.outputs != {Output.MULTIVECTOR}:
                raise UnsupportedWork("this upstream gives one kind of output")
        case Classify():
            _check_classified(work)


def _check_classified(work: Classify) -> None:
    if work.raw_scores:
        raise UnsupportedWork("this upstream gives no raw scores of labels")
    if not all(isinstance(one, str) for one in work.inputs):
        raise UnsupportedWork("this upstream's wire classifies single texts, not pairs")


def check_whole(work: ModelWork, counted: TokenCount) -> None:
    """Raises: UnsupportedWork where the left end would have to be cut."""
    if work.truncate is Truncate.LEFT and counted.truncated:
        raise UnsupportedWork(
            f"input {counted.truncated[0]} is too long, and this upstream cuts the right end only"
        )


def parts_of(work: Score) -> list[tuple[list[int], Rerank]]:
    """A rerank for each query of some pairs, with the places of its pairs."""
    places: dict[str, list[int]] = {}
    for place, (query, _) in enumerate(work.pairs):
        places.setdefault(query, []).append(place)
    return [
        (those, Rerank(query, tuple(work.pairs[i][1] for i in those), work.raw_scores, work.truncate))
        for query, those in places.items()
    ]


def encode(work: Embed | Encode | Rerank | Classify, model: str) -> tuple[str, Body]:
    """Path and body of one piece of work."""
    name: Body = {"model": model}
    match work:
        case Embed():
            return "/embeddings", name | {"input": work.inputs, "encoding_format": "base64"}
        case Encode():
            return "/embeddings", name | {"input": work.inputs, "encoding_format": "float"}
        case Rerank():
            documents: Body = {"query": work.query, "documents": work.documents}
            return "/rerank", name | documents | {"raw_scores": work.raw_scores}
        case Classify():
            return "/classify", name | {"input": work.inputs}


def decode(
    work: Embed | Encode | Rerank | Classify,
    answer: UpstreamResponse,
    counted: TokenCount,
    labels: tuple[str, ...] = (),
) -> Reply:
    """The reply in an answer of status 200. labels: of a classifier.

    Raises: ReplicaFailed where it is not an answer to this work.
    """
    match work:
        case Embed():
            vectors, _ = decode_embeddings(answer.body, len(work.inputs))
            return EmbedReply(fit_vectors(vectors, work), counted.tokens, counted.truncated)
        case Encode():
            matrices = decode_matrices(answer, len(work.inputs))
            return EncodeReply(counted.tokens, multivector=matrices, truncated=counted.truncated)
        case Rerank():
            return RerankReply(decode_scores(answer, len(work.documents)), counted.tokens, counted.truncated)
        case Classify():
            predictions = decode_predictions(answer)
            scores = label_scores(predictions, labels, len(work.inputs))
            return ClassifyReply(labels, scores, counted.tokens, counted.truncated)


def decode_scores(answer: UpstreamResponse, expected: int) -> Vectors:
    """(expected,) float32 in document order. Raises: ReplicaFailed."""
    with translate_decode_errors():
        ranks = msgspec.json.decode(answer.body, type=Ranks).results
    return order_scores([(one.index, one.relevance_score) for one in ranks], expected)


def decode_matrices(answer: UpstreamResponse, expected: int) -> tuple[Vectors, ...]:
    """For each input (its tokens, dim) float32. Raises: ReplicaFailed."""
    with translate_decode_errors():
        items = sorted(msgspec.json.decode(answer.body, type=Matrices).data, key=lambda item: item.index)
        if [item.index for item in items] != list(range(len(items))):
            raise ReplicaFailed("the upstream's indices are not 0 to n - 1")
        return token_matrices([item.embedding for item in items], expected, None)


def decode_predictions(answer: UpstreamResponse) -> list[list[tuple[str, float]]]:
    """(label, score) of every label of each input, as they come. Raises: ReplicaFailed."""
    with translate_decode_errors():
        lists = msgspec.json.decode(answer.body, type=Predictions).data
    return [[(one.label, one.score) for one in each] for each in lists]


def ordered_labels(
    predictions: Sequence[Sequence[tuple[str, float]]], named: tuple[str, ...]
) -> tuple[str, ...]:
    """A classifier's labels: in the order of its checkpoint where that names the same, else of the alphabet.

    Raises: ReplicaFailed.
    """
    told = [label for label, _ in predictions[0]] if predictions else []
    if not told or len(set(told)) < len(told):
        raise ReplicaFailed("the upstream's labels are not one each")
    return named if set(named) == set(told) else tuple(sorted(told))


def failure(answer: UpstreamResponse) -> BackendError:
    """What an answer of another status than 200 means."""
    match answer.status:
        case 401 | 403:
            return ReplicaFailed("the upstream refused the gateway's credential")
        case 413 | 422:
            # Inputs were made to fit before: more of them than it takes is a matter of the two configs.
            return ReplicaFailed(
                "the upstream refused the request's shape; `batch_inputs` may be more than it takes"
            )
        case 429:
            return ReplicaOverloaded("the upstream is overloaded")
        case 503:
            return ReplicaUnavailable("the upstream says it is not ready")
        case 400 if error_of(answer).message.startswith("ModelNotDeployedError"):
            return ReplicaFailed("the upstream serves another kind of model than it did")
    return ReplicaFailed(f"the upstream answered with status {answer.status}")


def found_vectors(answer: UpstreamResponse) -> Found:
    """What the vectors of the probe are. Raises: ReplicaFailed where they are quantized, or none."""
    try:
        vectors, _ = decode_embeddings(answer.body, len(PROBE))
    except Ragged:
        return Found(multivector=True)
    if not np.allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=0.02):
        raise ReplicaFailed("its vectors are not of length 1: start it with --embedding-dtype float32")
    return Found(int(vectors.shape[1]))


class InfinityBackend:
    """One model of one Infinity server."""

    def __init__(self, http: UpstreamClient, model: str | None, tokenizer: str | None) -> None:
        self._http = http
        self._asked = model
        self._source = tokenizer
        self._counter: TokenCounter | None = None
        self._model: str | None = None
        self._told: Capabilities | None = None

    async def describe(self, timeout_s: float) -> Capabilities:
        """Raises: BackendError."""
        if self._source is None:
            raise ReplicaFailed("Infinity counts characters: name the model's `tokenizer`")
        left = countdown(timeout_s)
        counter = await open_token_counter(self._source, left())
        models = {one.id: one for one in await self._models(left())}
        model = models[chosen_model(list(models), self._asked)]
        found = await self._found(model, counter, left())
        self._model, self._counter = model.id, counter
        self._told = capabilities(model, counter, found)
        return self._told

    async def _models(self, timeout_s: float) -> list[Model]:
        answer = await self._http.get("/models", timeout_s)
        if answer.status != 200:
            raise failure(answer)
        return decode_models(answer)

    async def _found(self, model: Model, counter: TokenCounter, timeout_s: float) -> Found:
        """Raises: ReplicaFailed where its vectors are quantized."""
        try:
            if "embed" in model.capabilities:
                return found_vectors(await self._post(Embed(PROBE), model.id, timeout_s))
            if "classify" in model.capabilities:
                answer = await self._post(Classify(PROBE), model.id, timeout_s)
                return Found(labels=ordered_labels(decode_predictions(answer), counter.labels))
        except (AttemptTimedOut, ReplicaOverloaded):
            # Busy, and known from before: it must not stay out for being busy.
            if self._told is None or self._told.model_id != model.id:
                raise
            told = self._told
            return Found(told.dimensions, Output.MULTIVECTOR in told.outputs, told.labels)
        return Found()

    async def run(self, work: Work, timeout_s: float) -> Reply:
        """Raises: BackendError."""
        if self._model is None or self._counter is None or self._told is None:
            raise ReplicaUnavailable("the replica has not joined")
        left = countdown(timeout_s)
        ready = apply_prompt(work, self._counter.rules)
        if isinstance(ready, Tokenize | Detokenize):
            return await self._counter.free(ready, left())
        check_expressible(ready, self._told)
        read = as_read(ready, self._counter.rules.max_tokens)
        counted = await self._counter.count(read, left())
        check_whole(read, counted)
        if isinstance(read, Embed):
            check_dimensions(read, self._told.dimensions)
        if isinstance(read, Score):
            return await self._score(read, self._model, counted, left())
        answer = await self._post(read, self._model, left())
        return decode(read, answer, counted, self._told.labels)

    async def _score(self, work: Score, model: str, counted: TokenCount, timeout_s: float) -> RerankReply:
        """Pairs, one query after another: the wire knows no pairs."""
        left = countdown(timeout_s)
        scores = np.empty(len(work.pairs), np.float32)
        for places, part in parts_of(work):
            answer = await self._post(part, model, left())
            scores[places] = decode_scores(answer, len(places))
        return RerankReply(scores, counted.tokens, counted.truncated)

    async def _post(
        self, work: Embed | Encode | Rerank | Classify, model: str, timeout_s: float
    ) -> UpstreamResponse:
        path, body = encode(work, model)
        answer = await self._http.post(path, msgspec.json.encode(body), timeout_s)
        if answer.status != 200:
            raise failure(answer)
        return answer

    async def queue_depth(self, timeout_s: float) -> QueueDepth | None:
        """queue_absolute counts inputs that wait. Raises: BackendError."""
        waiting = [one.stats.queue_absolute for one in await self._models(timeout_s) if one.id == self._model]
        return QueueDepth(waiting[0]) if waiting else None

    async def aclose(self) -> None:
        """Close the connections to it."""
        await self._http.aclose()


def open_replica(spec: ReplicaSpec) -> InfinityBackend:
    """The Infinity server at the spec's base URL, which ends in its url prefix."""
    door = UpstreamClient(spec.address, spec.headers, tls=spec.tls, ip=spec.ip, idle_s=SHORT_IDLE_S)
    return InfinityBackend(door, spec.model, spec.tokenizer)
