"""vLLM's pooling server over HTTP: wire structs, pure encode and decode, then a few lines of I/O.

Source: vLLM 0.33.0 (entrypoints/pooling), run at 0.32.0; 0.20, 0.11 and 0.8.5 where they differ.
A release says little of what it can do and ignores fields that it does not know, so what it offers is
tried once, with two short texts, when it joins.
Rule: vectors are asked for raw where that can be had, then cut and normalized here: the switch has had
three names, and `dimensions` is refused by most models.
"""

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Literal, TypeAlias

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
    Token,
    Tokenize,
    Tokenized,
    Truncate,
    Vectors,
    Work,
    inputs_of,
)
from backends.counting import Counter, open_counter, prompted
from backends.errors import (
    BackendError,
    Failed,
    InvalidWork,
    Overloaded,
    TimedOut,
    Unavailable,
    UnsupportedWork,
)
from backends.http import SHORT_IDLE_S, Answer, HttpDoor, countdown
from backends.openai_wire import Usage, chosen_model, decode_embeddings, decode_models, error_of
from backends.replies import (
    check_dimensions,
    check_tokens,
    fitted,
    gauge,
    readable,
    scores_in_order,
    truncated,
)
from backends.texts import precut
from backends.vectors import sigmoid

EMBEDDINGS, SCORE, TOKENIZE = "/v1/embeddings", "/v1/score", "/tokenize"
PROBE = ("a", "b c")
# A route that is not there, or is there for another kind of model.
NOT_OFFERED = frozenset({400, 404, 405, 501})

# What a pair is found to be scored with may not be judged by one pair alone.
PROBE_PAIRS = ("how many people live in Berlin", ("Berlin has many people", "x", "a recipe for soup"))
BASE64 = {"encoding_format": "base64", "endianness": "little"}

Body = dict[str, Any]
Ask: TypeAlias = Callable[[str, Body], Awaitable[Answer]]
# What asks for vectors that are not normalized: since 0.20, and before.
Switch: TypeAlias = Literal["use_activation", "normalize"]
Scores: TypeAlias = Literal["on_request", "logits", "sigmoid"]
SWITCHES: tuple[Switch, ...] = ("use_activation", "normalize")


class Facing(msgspec.Struct, frozen=True):
    """What a replica was found to be when it joined.

    width: of its vectors; None where it has none. raw_vectors: the switch that gets them unnormalized.
    scores: what it gives for a pair: logits when asked, logits always, or sigmoid always; None is no scores.
    specials: how many special tokens stand before and after a text.
    """

    model: str
    max_tokens: int
    version: str = ""
    width: int | None = None
    raw_vectors: Switch | None = None
    scores: Scores | None = None
    specials: tuple[int, int] | None = None

    def same_server(self, other: "Facing") -> bool:
        """Whether what a server says of itself is the same."""
        mine = (self.model, self.max_tokens, self.version)
        return mine == (other.model, other.max_tokens, other.version)


class ScoreItem(msgspec.Struct, frozen=True):
    """One score; index is the document's."""

    index: int
    score: float


class ScoreReply(msgspec.Struct, frozen=True):
    """POST /v1/score."""

    data: list[ScoreItem]
    usage: Usage = Usage()


class TokenizeReply(msgspec.Struct, frozen=True):
    """POST /tokenize, for one text."""

    tokens: list[int]
    token_strs: list[str] | None = None


class Version(msgspec.Struct, frozen=True):
    """GET /version."""

    version: str


def capabilities(facing: Facing, counter: Counter | None) -> Capabilities:
    """What was learnt of a replica, in the contract's words."""
    own: set[Operation] = {Operation.TOKENIZE} if counter or facing.specials else set()
    own |= {Operation.EMBED} if facing.width is not None else set()
    own |= {Operation.RERANK} if facing.scores is not None else set()
    return Capabilities(
        model_id=facing.model,
        operations=frozenset(own),
        max_input_tokens=facing.max_tokens,
        dimensions=facing.width,
        prompts=counter.rules.prompts if counter else {},
        default_prompt=counter.rules.default_prompt if counter else None,
        version=f"vLLM {facing.version}".strip(),
        notes=_notes(facing),
    )


def _notes(facing: Facing) -> tuple[str, ...]:
    notes: list[str] = []
    if facing.width is not None:
        notes.append(f"raw vectors by {facing.raw_vectors}" if facing.raw_vectors else "no raw vectors")
    if facing.scores is not None:
        notes.append(f"scores: {facing.scores}")
    return tuple(notes)


def encode(work: Embed | Rerank, facing: Facing) -> tuple[str, Body]:
    """Path and body of one piece of work.

    Raises: UnsupportedWork where this release would do something else than what is asked.
    """
    cuts = work.truncate is Truncate.RIGHT

    def one(text: str) -> str:
        return precut(text, facing.max_tokens, work.truncate) if cuts else text

    # Not -1, which 0.8.5 refuses. And no `truncation_side`: it cuts off a special token with the rest, and
    # a model that reads its vector off that token would give another one.
    cut: Body = {"truncate_prompt_tokens": facing.max_tokens} if cuts else {}
    if isinstance(work, Embed):
        check_dimensions(work, facing.width)
        if facing.width is None:
            raise UnsupportedWork("this upstream gives no vectors")
        if not work.normalize and facing.raw_vectors is None:
            raise UnsupportedWork("this upstream always normalizes its vectors")
        return EMBEDDINGS, _embed_body(tuple(map(one, work.inputs)), facing) | cut
    if facing.scores is None:
        raise UnsupportedWork("this upstream gives no scores")
    if work.raw_scores and facing.scores == "sigmoid":
        raise UnsupportedWork("this upstream gives no raw scores")
    # An empty second half would be scored as no second half at all, a separator short.
    pairs = _pairs(one(work.query), tuple(one(text) or " " for text in work.documents))
    return SCORE, {"model": facing.model} | pairs | {"use_activation": False} | cut


def _embed_body(inputs: tuple[str, ...], facing: Facing) -> Body:
    switch: Body = {facing.raw_vectors: False} if facing.raw_vectors else {}
    return {"model": facing.model, "input": inputs} | BASE64 | switch


def _pairs(query: str, documents: tuple[str, ...]) -> Body:
    """In the one pair of names that every release knows."""
    return {"text_1": query, "text_2": documents}


def unmasked(answer: Answer) -> Answer:
    """Up to 0.11 an error could come with status 200; it gets the status that it tells."""
    if answer.status != 200 or b'"error"' not in answer.body[:64]:
        return answer
    code = error_of(answer).code
    honest = code if isinstance(code, int) and 400 <= code <= 599 else 500
    return msgspec.structs.replace(answer, status=honest)


def decode(work: Embed | Rerank, answer: Answer, facing: Facing) -> Reply:
    """The reply in an answer of status 200.

    Raises: Failed where it is not an answer to this work.
    """
    if isinstance(work, Embed):
        vectors, told = decode_embeddings(answer.body, len(work.inputs))
        tokens = _believed(told, work, facing)
        return Embedded(fitted(vectors, work), tokens, _truncated(work, tokens, facing))
    scores, told = _scores(answer, len(work.documents))
    tokens = _believed(told, work, facing)
    if not work.raw_scores and facing.scores != "sigmoid":
        scores = sigmoid(scores)
    return Reranked(scores, tokens, _truncated(work, tokens, facing))


def _truncated(work: Embed | Rerank, tokens: int, facing: Facing) -> tuple[int, ...] | None:
    cuts = work.truncate is Truncate.RIGHT
    return truncated(work, tokens, facing.max_tokens) if cuts else ()


def _scores(answer: Answer, expected: int) -> tuple[Vectors, int | None]:
    with readable():
        reply = msgspec.json.decode(answer.body, type=ScoreReply)
    return scores_in_order([(one.index, one.score) for one in reply.data], expected), reply.usage.tokens


def _believed(told: int | None, work: Embed | Rerank, facing: Facing) -> int:
    if told is None:
        raise Failed("the upstream told no usage")
    check_tokens(told, len(inputs_of(work)), facing.max_tokens)
    return told


def kind_of_scores(asked_raw: Vectors, asked_plain: Vectors) -> Scores | None:
    """What a server's scores are, from the same pairs scored without and with its activation.

    asked_raw, asked_plain: (n,) float32. Equal ones mean that the switch is not known or that the
    model's own activation is none; only a logit can lie outside of 0 to 1. None: neither logits nor
    sigmoid, as late interaction's.
    """
    if np.allclose(asked_raw, asked_plain, atol=1e-3):
        return "logits" if ((asked_raw < 0) | (asked_raw > 1)).any() else "sigmoid"
    return "on_request" if np.allclose(sigmoid(asked_raw), asked_plain, atol=0.02) else None


def specials_around(whole: list[int], bare: list[int]) -> tuple[int, int] | None:
    """How many tokens stand before and after a text's own; None where its own are not found."""
    for before in range(len(whole) - len(bare) + 1):
        if whole[before : before + len(bare)] == bare:
            return before, len(whole) - len(bare) - before
    return None


def as_tokens(reply: TokenizeReply, specials: tuple[int, int]) -> tuple[Token, ...]:
    """Of one text; there are no offsets on this wire, so start and stop stay None."""
    texts = reply.token_strs or [""] * len(reply.tokens)
    if len(texts) != len(reply.tokens):
        raise Failed("the upstream's tokens and their texts differ in number")
    before, after = specials
    last = len(texts) - after
    return tuple(
        Token(id_, text, special=not before <= place < last)
        for place, (id_, text) in enumerate(zip(reply.tokens, texts, strict=True))
    )


def _tokenize_body(text: str, *, special: bool) -> Body:
    return {"prompt": text, "add_special_tokens": special, "return_token_strs": True}


def _token_list(answer: Answer) -> TokenizeReply:
    with readable():
        return msgspec.json.decode(answer.body, type=TokenizeReply)


async def explored(facing: Facing, ask: Ask) -> Facing:
    """What a replica offers, tried with short texts.

    Raises: BackendError where it fails for another reason than not offering something.
    """
    specials = await _specials(ask)
    vectors = await _tried_vectors(ask, {})
    if vectors is None:
        return msgspec.structs.replace(facing, specials=specials, scores=await _tried_scores(ask))
    switch = None
    for one in SWITCHES:
        raw = await _tried_vectors(ask, {one: False})
        if raw is not None and not np.allclose(np.linalg.norm(raw, axis=1), 1.0, atol=0.01):
            switch = one
            break
    return msgspec.structs.replace(facing, specials=specials, width=vectors.shape[1], raw_vectors=switch)


async def _tried(ask: Ask, path: str, body: Body) -> Answer | None:
    """The answer, or None where that is not offered."""
    answer = await ask(path, body)
    if answer.status in NOT_OFFERED:
        return None
    if answer.status != 200:
        raise failure(answer)
    return answer


async def _tried_vectors(ask: Ask, switch: Body) -> Vectors | None:
    answer = await _tried(ask, EMBEDDINGS, {"input": PROBE} | BASE64 | switch)
    try:
        return decode_embeddings(answer.body, len(PROBE))[0] if answer else None
    except Failed:
        # A vector for each token is another operation.
        return None


async def _tried_scores(ask: Ask) -> Scores | None:
    body = _pairs(*PROBE_PAIRS)
    raw = await _tried(ask, SCORE, body | {"use_activation": False})
    plain = await _tried(ask, SCORE, body | {"use_activation": True})
    if raw is None or plain is None:
        return None
    expected = len(PROBE_PAIRS[1])
    return kind_of_scores(_scores(raw, expected)[0], _scores(plain, expected)[0])


async def _specials(ask: Ask) -> tuple[int, int] | None:
    whole = await _tried(ask, TOKENIZE, _tokenize_body("a", special=True))
    bare = await _tried(ask, TOKENIZE, _tokenize_body("a", special=False))
    if whole is None or bare is None:
        return None
    return specials_around(_token_list(whole).tokens, _token_list(bare).tokens)


def failure(answer: Answer) -> BackendError:
    """What an answer of another status than 200 means."""
    error = error_of(answer)
    match answer.status:
        case 400 if "maximum context length" in error.message or "maximum model length" in error.message:
            return InvalidWork("an input has more tokens than the model takes")
        case 400 if error.type == "BadRequestError":
            return InvalidWork("the upstream refused the input")
        case 401 | 403:
            return Failed("the upstream refused the gateway's credential")
        case 404 | 501:
            return Failed("the upstream does not offer this model or operation any more")
        case 429:
            return Overloaded("the upstream is overloaded")
        case 503 if error.type is not None:
            # Its bounds on what waits. What is not up, or stands before it, has no envelope.
            return Overloaded("the upstream's queue is full")
        case 503:
            return Unavailable("the upstream says it is not ready")
    return Failed(f"the upstream answered with status {answer.status}")


def refusal(work: Embed | Rerank, error: BackendError) -> BackendError:
    """The failure of this work: what is too long might have been cut at the left by another server."""
    if work.truncate is Truncate.LEFT and isinstance(error, InvalidWork):
        return UnsupportedWork(f"{error.message}, and this upstream cuts the right end only")
    return error


class VllmBackend:
    """One vLLM server."""

    def __init__(self, http: HttpDoor, model: str | None = None, tokenizer: str | None = None) -> None:
        self._http = http
        self._asked = model
        self._source = tokenizer
        self._facing: Facing | None = None
        self._counter: Counter | None = None

    async def describe(self, timeout_s: float) -> Capabilities:
        """Raises: BackendError."""
        left = countdown(timeout_s)
        if self._source is not None:
            self._counter = await open_counter(self._source, left())
        answer = await self._http.get("/v1/models", left())
        if answer.status != 200:
            raise failure(answer)
        lengths = {one.id: one.max_model_len for one in decode_models(answer)}
        model = chosen_model(list(lengths), self._asked)
        max_tokens = lengths[model]
        if max_tokens is None:
            raise Failed("GET /v1/models is not vLLM's: it tells no max_model_len")
        facing = Facing(model, max_tokens, await self._version(left()))

        async def ask(path: str, body: Body) -> Answer:
            return await self._post(path, {"model": model} | body, left())

        try:
            self._facing = await explored(facing, ask)
        except (TimedOut, Overloaded):
            # Busy, and known from before: it must not stay out for being busy.
            if self._facing is None or not facing.same_server(self._facing):
                raise
        return capabilities(self._facing, self._counter)

    async def _version(self, timeout_s: float) -> str:
        answer = await self._http.get("/version", timeout_s)
        with suppress(Failed), readable():
            return msgspec.json.decode(answer.body, type=Version).version if answer.status == 200 else ""
        return ""

    async def _post(self, path: str, body: Body, timeout_s: float) -> Answer:
        return unmasked(await self._http.post(path, msgspec.json.encode(body), timeout_s))

    async def run(self, work: Work, timeout_s: float) -> Reply:
        """Raises: BackendError."""
        if self._facing is None:
            raise Unavailable("the replica has not joined")
        left = countdown(timeout_s)
        ready = prompted(work, self._counter.rules if self._counter else None)
        if isinstance(ready, Tokenize):
            return await self._tokenize(ready, self._facing, left())
        if not isinstance(ready, Embed | Rerank):
            raise UnsupportedWork("this upstream's wire does not do that")
        path, body = encode(ready, self._facing)
        answer = await self._post(path, body, left())
        if answer.status != 200:
            raise refusal(ready, failure(answer))
        return decode(ready, answer, self._facing)

    async def _tokenize(self, work: Tokenize, facing: Facing, timeout_s: float) -> Tokenized:
        if self._counter is not None:
            return await self._counter.explain(work, timeout_s)
        if facing.specials is None:
            raise UnsupportedWork("this upstream shows no tokens")
        left = countdown(timeout_s)
        specials = facing.specials if work.add_special_tokens else (0, 0)
        shown = []
        # One text a request is all that the route takes; one after another, they hold up nobody.
        for text in work.inputs:
            body = _tokenize_body(text, special=work.add_special_tokens) | {"model": facing.model}
            answer = await self._post(TOKENIZE, body, left())
            if answer.status != 200:
                raise failure(answer)
            shown.append(as_tokens(_token_list(answer), specials))
        return Tokenized(tuple(shown))

    async def load(self, timeout_s: float) -> Load | None:
        """Each input is a request of the engine's. Raises: BackendError."""
        answer = await self._http.get("/metrics", timeout_s)
        waiting = gauge(answer.body, "vllm:num_requests_waiting") if answer.status == 200 else None
        return None if waiting is None else Load(round(waiting))

    async def aclose(self) -> None:
        """Close the connections to it."""
        await self._http.aclose()


def open_replica(spec: ReplicaSpec) -> VllmBackend:
    """The vLLM server at the spec's base URL."""
    door = HttpDoor(spec.address, spec.headers, tls=spec.tls, ip=spec.ip, idle_s=SHORT_IDLE_S)
    return VllmBackend(door, spec.model, spec.tokenizer)
