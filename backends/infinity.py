"""Infinity over HTTP: wire structs, pure encode and decode, then a few lines of I/O.

Source: michaelfeil/infinity 0.0.77 (infinity_server.py, fastapi_schemas), run at 0.0.78.
Infinity tells characters instead of tokens, no maximum length, and cuts silently: what it does not tell is
counted here with the model's own tokenizer.
Rule: never send null, and never `dimensions`: it cuts without normalizing again.
"""

from typing import Any

import msgspec
import numpy as np

from backends.contract import (
    Capabilities,
    Embed,
    Embedded,
    Load,
    Operation,
    ReplicaSpec,
    Reply,
    Rerank,
    Reranked,
    Tokenize,
    Truncate,
    Work,
    operation_of,
)
from backends.counting import Counted, Counter, open_counter, prompted
from backends.errors import BackendError, Failed, Overloaded, TimedOut, Unavailable, UnsupportedWork
from backends.http import SHORT_IDLE_S, Answer, HttpDoor, countdown
from backends.openai_wire import Ragged, chosen_model, decode_embeddings, error_of
from backends.replies import check_dimensions, fitted, readable, scores_in_order
from backends.texts import precut

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


def decode_models(answer: Answer) -> list[Model]:
    """Raises: Failed where it is not Infinity's."""
    try:
        return msgspec.json.decode(answer.body, type=Models).data
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Failed("GET /models is not Infinity's") from error


def capabilities(model: Model, counter: Counter, dimensions: int | None) -> Capabilities:
    """What /models says, in the contract's words, and what the tokenizer's files add."""
    own: set[Operation] = {Operation.TOKENIZE}
    # Infinity calls it embedding too where each token has a vector; those have no one width.
    own |= set() if dimensions is None else {Operation.EMBED}
    own |= {Operation.RERANK} if "rerank" in model.capabilities else set()
    return Capabilities(
        model_id=model.id,
        operations=frozenset(own),
        max_input_tokens=counter.rules.max_tokens,
        batch_inputs=model.stats.batch_size,
        dimensions=dimensions,
        prompts=counter.rules.prompts,
        default_prompt=counter.rules.default_prompt,
        version="Infinity",
        notes=("tokens are counted here",),
    )


def as_read(work: Embed | Rerank, max_tokens: int) -> Embed | Rerank:
    """The work as the server's tokenizer will get it: stripped, and no longer than may be sent."""

    def one(text: str) -> str:
        short = precut(text.strip(), max_tokens, work.truncate)
        return short if work.truncate is Truncate.ERROR else short[:CHARACTERS_MAX]

    if isinstance(work, Rerank):
        return msgspec.structs.replace(work, query=one(work.query), documents=tuple(map(one, work.documents)))
    return msgspec.structs.replace(work, inputs=tuple(map(one, work.inputs)))


def check_expressible(work: Embed | Rerank, counted: Counted, operations: frozenset[Operation]) -> None:
    """Raises: UnsupportedWork where Infinity would do something else than what is asked."""
    if operation_of(work) not in operations:
        raise UnsupportedWork("this upstream's model does not do that")
    if isinstance(work, Embed) and not work.normalize:
        raise UnsupportedWork("this upstream always normalizes its vectors")
    if work.truncate is Truncate.LEFT and counted.truncated:
        raise UnsupportedWork(
            f"input {counted.truncated[0]} is too long, and this upstream cuts the right end only"
        )


def encode(work: Embed | Rerank, model: str) -> tuple[str, Body]:
    """Path and body of one piece of work."""
    if isinstance(work, Embed):
        return "/embeddings", {"model": model, "input": work.inputs, "encoding_format": "base64"}
    body = {"query": work.query, "documents": work.documents, "raw_scores": work.raw_scores}
    return "/rerank", {"model": model} | body


def decode(work: Embed | Rerank, answer: Answer, counted: Counted) -> Reply:
    """The reply in an answer of status 200.

    Raises: Failed where it is not an answer to this work.
    """
    if isinstance(work, Embed):
        vectors, _ = decode_embeddings(answer.body, len(work.inputs))
        return Embedded(fitted(vectors, work), counted.tokens, counted.truncated)
    with readable():
        ranks = msgspec.json.decode(answer.body, type=Ranks).results
    scores = scores_in_order([(one.index, one.relevance_score) for one in ranks], len(work.documents))
    return Reranked(scores, counted.tokens, counted.truncated)


def failure(answer: Answer) -> BackendError:
    """What an answer of another status than 200 means."""
    match answer.status:
        case 401 | 403:
            return Failed("the upstream refused the gateway's credential")
        case 413 | 422:
            # Inputs were made to fit before: more of them than it takes is a matter of the two configs.
            return Failed(
                "the upstream refused the request's shape; `batch_inputs` may be more than it takes"
            )
        case 429:
            return Overloaded("the upstream is overloaded")
        case 503:
            return Unavailable("the upstream says it is not ready")
        case 400 if error_of(answer).message.startswith("ModelNotDeployedError"):
            return Failed("the upstream serves another kind of model than it did")
    return Failed(f"the upstream answered with status {answer.status}")


class InfinityBackend:
    """One model of one Infinity server."""

    def __init__(self, http: HttpDoor, model: str | None, tokenizer: str | None) -> None:
        self._http = http
        self._asked = model
        self._source = tokenizer
        self._counter: Counter | None = None
        self._model: str | None = None
        self._told: Capabilities | None = None

    async def describe(self, timeout_s: float) -> Capabilities:
        """Raises: BackendError."""
        if self._source is None:
            raise Failed("Infinity counts characters: name the model's `tokenizer`")
        left = countdown(timeout_s)
        counter = await open_counter(self._source, left())
        models = {one.id: one for one in await self._models(left())}
        model = models[chosen_model(list(models), self._asked)]
        dimensions = await self._width(model, left()) if "embed" in model.capabilities else None
        self._model, self._counter = model.id, counter
        self._told = capabilities(model, counter, dimensions)
        return self._told

    async def _models(self, timeout_s: float) -> list[Model]:
        answer = await self._http.get("/models", timeout_s)
        if answer.status != 200:
            raise failure(answer)
        return decode_models(answer)

    async def _width(self, model: Model, timeout_s: float) -> int | None:
        """Of its vectors; None where it has no dense ones. Raises: Failed where they are quantized."""
        try:
            answer = await self._post(Embed(PROBE), model.id, timeout_s)
        except (TimedOut, Overloaded):
            # Busy, and known from before: it must not stay out for being busy.
            if self._told is not None and self._told.model_id == model.id:
                return self._told.dimensions
            raise
        try:
            vectors, _ = decode_embeddings(answer.body, len(PROBE))
        except Ragged:
            return None
        if not np.allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=0.02):
            raise Failed("its vectors are not of length 1: start it with --embedding-dtype float32")
        return int(vectors.shape[1])

    async def run(self, work: Work, timeout_s: float) -> Reply:
        """Raises: BackendError."""
        if self._model is None or self._counter is None or self._told is None:
            raise Unavailable("the replica has not joined")
        left = countdown(timeout_s)
        ready = prompted(work, self._counter.rules)
        if isinstance(ready, Tokenize):
            return await self._counter.explain(ready, left())
        if not isinstance(ready, Embed | Rerank):
            raise UnsupportedWork("this upstream's wire does not do that")
        read = as_read(ready, self._counter.rules.max_tokens)
        counted = await self._counter.count(read, left())
        check_expressible(read, counted, self._told.operations)
        if isinstance(read, Embed):
            check_dimensions(read, self._told.dimensions)
        return decode(read, await self._post(read, self._model, left()), counted)

    async def _post(self, work: Embed | Rerank, model: str, timeout_s: float) -> Answer:
        path, body = encode(work, model)
        answer = await self._http.post(path, msgspec.json.encode(body), timeout_s)
        if answer.status != 200:
            raise failure(answer)
        return answer

    async def load(self, timeout_s: float) -> Load | None:
        """queue_absolute counts inputs that wait. Raises: BackendError."""
        waiting = [one.stats.queue_absolute for one in await self._models(timeout_s) if one.id == self._model]
        return Load(waiting[0]) if waiting else None

    async def aclose(self) -> None:
        """Close the connections to it."""
        await self._http.aclose()


def open_replica(spec: ReplicaSpec) -> InfinityBackend:
    """The Infinity server at the spec's base URL, which ends in its url prefix."""
    door = HttpDoor(spec.address, spec.headers, tls=spec.tls, ip=spec.ip, idle_s=SHORT_IDLE_S)
    return InfinityBackend(door, spec.model, spec.tokenizer)
