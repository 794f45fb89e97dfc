"""Requests and replies of OpenAI's embeddings API and its relatives: pure functions, then the I/O.

Source: OpenAI OpenAPI document 2.3.0, and the differences of llama.cpp, Ollama and others. `shapes.py`
has those of Cohere, Jina and Voyage.
Rule: only fields that every such server knows are sent. The vectors are truncated to `dimensions` and
normalized here, in the way that OpenAI's own models define.
"""

from collections.abc import Sequence
from typing import Any, Protocol
from urllib.parse import quote

import msgspec
import numpy as np

from backends.contract import (
    Embed,
    EmbedReply,
    ReplicaSpec,
    Rerank,
    RerankReply,
    ScoreKind,
    ScoreParts,
    Vectors,
)
from backends.contract.errors import (
    BackendError,
    ModelNotServed,
    ReplicaFailed,
    ReplicaUnavailable,
    RequestTooLarge,
    UnsupportedWork,
    input_too_long,
)
from backends.contract.refusals import check_no_instruction
from backends.contract.vectors import sigmoid
from backends.http.answers import decode_json
from backends.http.client import UpstreamClient, UpstreamResponse, countdown
from backends.http.openai_wire import (
    TOO_LONG,
    ApiMeta,
    Count,
    TokenCounts,
    context_length_in,
    decode_documents,
    decode_embeddings,
    decode_typed_embeddings,
    error_of,
    may_refuse_base64,
    refused_input,
    whole_number,
)
from backends.http.replies import check_dimensions, check_tokens, fit_vectors, order_scores, truncated_inputs
from backends.http.statuses import account_spent, status_error, with_answer
from backends.openai.settings import ApiSettings
from backends.openai.shapes import DEFAULT_TYPE, NO_FIELDS, OPENAI, ApiShape, Fields, path_of
from backends.openai.vendors import shape_of
from backends.tokens.tokenizer import TokenCount

# Status of a request whose reply is to be fetched later.
ACCEPTED = 202
NUMBERS_NOTE = "numbers, not base64"
Body = dict[str, Any]


class OpenAIProfile(msgspec.Struct, frozen=True):
    """Properties of a server, determined when it joins.

    model: None for a server that needs no model name. base64: the server accepts that encoding_format.
    embeds: it has embeddings. images: also of pictures. scores: the scale of its rerank scores, None if it
    does not rerank.
    """

    model: str | None = None
    max_tokens: int | None = None
    width: int | None = None
    base64: bool = True
    notes: tuple[str, ...] = ()
    embeds: bool = True
    images: bool = False
    scores: ScoreKind | None = None


def without_base64(profile: OpenAIProfile) -> OpenAIProfile:
    """Return the profile of a server that is asked for numbers."""
    notes = tuple(note for note in profile.notes if note != NUMBERS_NOTE)
    return msgspec.structs.replace(profile, base64=False, notes=(NUMBERS_NOTE, *notes))


def encode(work: Embed, profile: OpenAIProfile, shape: ApiShape = OPENAI, extra: Fields = NO_FIELDS) -> Body:
    """Return the body of a request for embeddings. extra: fields that the operator adds.

    Raises: UnsupportedWork, InvalidWork.
    """
    if not work.normalize:
        raise UnsupportedWork("this upstream's wire has no vectors that are not normalized")
    check_dimensions(work, profile.width)
    form = shape.base64 if profile.base64 and shape.base64 is not None else shape.numbers
    kind = shape.input_type.get(work.prompt_name or DEFAULT_TYPE)
    type_: Body = {} if kind is None else {shape.type_field: kind}
    cut = shape.truncation.get(work.truncate, {})
    return {**extra, **_named(profile), shape.inputs: _written(work, shape), **form, **type_, **cut}


def _written(work: Embed, shape: ApiShape) -> Sequence[Any]:
    """Return the texts as the API takes them."""
    if shape.chunks == "lists":
        return [[text] for text in work.inputs]
    if shape.media != "content":
        return work.inputs
    return [{"content": [{"type": "text", "text": text}]} for text in work.inputs]


def encode_rerank(
    work: Rerank, profile: OpenAIProfile, shape: ApiShape = OPENAI, extra: Fields = NO_FIELDS
) -> Body:
    """Return the body of a rerank. extra: fields that the operator adds.

    Raises: UnsupportedWork.
    """
    texts: Body = {"query": work.query, "documents": work.documents}
    if shape.rerank_form == "pairs":
        texts = {"queries": [work.query] * len(work.documents), "documents": work.documents}
    if shape.rerank_form == "ranking":
        texts = {"query": {"text": work.query}, "passages": [{"text": text} for text in work.documents]}
    return rerank_body(texts, work, profile, shape, extra)


def rerank_body(
    sides: Body, work: Rerank | ScoreParts, profile: OpenAIProfile, shape: ApiShape, extra: Fields
) -> Body:
    """Return the body of a rerank. sides: its query and documents. extra: as in `encode_rerank`.

    Raises: UnsupportedWork.
    """
    check_no_instruction(work)
    if work.raw_scores and profile.scores is not ScoreKind.LOGIT:
        raise UnsupportedWork("this upstream gives no raw scores")
    # DeepInfra has the model in the path.
    named = {} if shape.rerank_form == "pairs" else _named(profile)
    cut = shape.rerank_truncation.get(work.truncate, {})
    return {**extra, **named, **sides, **shape.rerank_fields, **cut}


def _named(profile: OpenAIProfile) -> Body:
    return {} if profile.model is None else {"model": profile.model}


def decode(
    work: Embed,
    response: UpstreamResponse,
    profile: OpenAIProfile,
    count: TokenCount | None,
    shape: ApiShape = OPENAI,
) -> EmbedReply:
    """Decode the reply in a response of status 200.

    count: from the model's tokenizer, if available here.

    Raises: ReplicaFailed if the response does not belong to this work.
    """
    vectors, tokens = decode_vectors(response.body, len(work.inputs), shape)
    if count is not None:
        return EmbedReply(fit_vectors(vectors, work), count.tokens, count.truncated)
    if tokens is None:
        raise ReplicaFailed("the upstream reported no usage")
    check_tokens(tokens, len(work.inputs), profile.max_tokens)
    cut = truncated_inputs(work, tokens, profile.max_tokens)
    return EmbedReply(fit_vectors(vectors, work), tokens, cut)


def decode_vectors(body: bytes, expected: int, shape: ApiShape) -> tuple[Vectors, int | None]:
    """Decode the vectors of a body in input order, (expected, dim) float32, and the tokens, if reported.

    Raises: ReplicaFailed, if the body does not contain `expected` vectors.
    """
    if shape.chunks == "lists":
        return decode_documents(body, [1] * expected, shape.dtype)
    if shape.typed_reply:
        return decode_typed_embeddings(body, expected)
    return decode_embeddings(body, expected, shape.dtype)


# --- rerank API of Cohere, Jina and Voyage. Every score is requested, because a call may be cut into several
# requests: no request has `top_n` or `top_k`.

# Several pairs, because one pair is not enough to determine the scale of the scores.
RERANK_PROBE = Rerank("how many people live in Berlin", ("Berlin has many people", "x", "a recipe for soup"))
# A cosine or a sigmoid of rounded numbers may be slightly above 1.
SCORE_MAX = 1.01


class UpstreamScore(msgspec.Struct, frozen=True):
    """Score of one document."""

    relevance_score: float
    index: int | None = None


class UpstreamRank(msgspec.Struct, frozen=True):
    """Logit of one passage of NIM's."""

    index: int
    logit: float


class UpstreamScores(msgspec.Struct, frozen=True):
    """Body of a rerank: `results` (Cohere), `data` (Voyage), `rankings` (NIM) or `scores` (DeepInfra)."""

    results: list[UpstreamScore] | None = None
    data: list[UpstreamScore] | None = None
    scores: list[float] | None = None
    rankings: list[UpstreamRank] | None = None
    input_tokens: Count = None
    usage: TokenCounts | None = None
    meta: ApiMeta | None = None

    @property
    def tokens(self) -> int | None:
        """Tokens of all pairs; None if they are not reported. Cohere's search units are no tokens."""
        counted = self.usage.tokens if self.usage else None
        if counted is None and self.meta is not None:
            counted = self.meta.token_count
        return whole_number(self.input_tokens, "input_tokens") if counted is None else counted


def decode_scores(response: UpstreamResponse, expected: int) -> tuple[Vectors, int | None]:
    """Decode the scores in document order, (expected,) float32, and the tokens, or None if not reported.

    Raises: ReplicaFailed, if the body does not contain `expected` scores.
    """
    reply = decode_json(response.body, UpstreamScores)
    if reply.scores is not None:
        return order_scores(list(enumerate(reply.scores)), expected, "scores"), reply.tokens
    if reply.rankings is not None:
        logits = [(rank.index, rank.logit) for rank in reply.rankings]
        return order_scores(logits, expected, "rankings"), reply.tokens
    path, entries = ("data", reply.data) if reply.results is None else ("results", reply.results)
    if entries is None:
        raise ReplicaFailed("the upstream's answer to a rerank has neither `results` nor `data`")
    ranks = [(entry.index, entry.relevance_score) for entry in entries]
    return order_scores(ranks, expected, path), reply.tokens


def scale_of(scores: Vectors) -> ScoreKind:
    """Return the scale of the scores of `RERANK_PROBE`, (3,) float32: only a logit can be outside −1 to 1."""
    if np.abs(scores).max() > SCORE_MAX:
        return ScoreKind.LOGIT
    return ScoreKind.COSINE if scores.min() < 0 else ScoreKind.SIGMOID


def scaled(scores: Vectors, scale: ScoreKind, *, raw: bool) -> tuple[Vectors, Vectors | None]:
    """Return the scores of a reply, and the logits of which they are the sigmoid, None if they are not.

    scale: of the server's scores. raw: logits are requested. Raises: ReplicaFailed.
    """
    if scale is not ScoreKind.LOGIT and np.abs(scores).max() > SCORE_MAX:
        raise ReplicaFailed("the upstream's scores have another scale than when it joined")
    return (sigmoid(scores), scores) if scale is ScoreKind.LOGIT and not raw else (scores, None)


def decode_rerank(
    work: Rerank,
    response: UpstreamResponse,
    scale: ScoreKind,
    count: TokenCount | None,
    max_tokens: int | None = None,
) -> RerankReply:
    """Decode the reply in a response of status 200.

    scale: of the server's scores; logits are converted to 0 to 1 unless the work requests raw scores. count:
    from the model's tokenizer, if available here. max_tokens: longest input of the model, if known.

    Raises: ReplicaFailed if the response does not belong to this work.
    """
    scores, tokens = decode_scores(response, len(work.documents))
    scores, logits = scaled(scores, scale, raw=work.raw_scores)
    if count is not None:
        return RerankReply(scores, count.tokens, count.truncated, logits)
    if tokens is None:
        raise ReplicaFailed("the upstream reported no usage")
    # A model that embeds the query and the document reads twice the length.
    check_tokens(tokens, len(work.documents), max_tokens and 2 * max_tokens)
    return RerankReply(scores, tokens, truncated_inputs(work, tokens, None), logits)


# --- errors, and the I/O


# Codes and types of the error that a model does not exist, of OpenAI, Azure, Mistral and Jina.
NO_MODEL = frozenset({"model_not_found", "DeploymentNotFound", "invalid_model", "INPUT_MODEL_NOT_FOUND"})
# Those of an account that is used up, of OpenAI and Jina.
SPENT = frozenset({"insufficient_quota", "AUTHZ_INSUFFICIENT_BALANCE", "AUTHZ_RESOURCE_LIMIT_EXCEEDED"})
# Of a request whose inputs together are too many: Mistral's words, and OpenAI's.
TOO_MANY = ("too many inputs in request", "tokens per request")


@with_answer
def failure(response: UpstreamResponse) -> BackendError:
    """Convert a response whose status is not 200 to an error."""
    error = error_of(response)
    message = error.message.lower()
    match response.status:
        case 400 | 413 | 422 | 500 if any(phrase in message for phrase in TOO_LONG):
            return input_too_long(context_length_in(message))
        case 400 | 404 if NO_MODEL.intersection((error.code, error.type)):
            return ModelNotServed("the upstream does not serve this model")
        case 400 if any(phrase in message for phrase in TOO_MANY):
            return RequestTooLarge("the upstream refused the size of the request")
        case 400 | 422:
            return refused_input(error)
        case 202:
            return ReplicaUnavailable("the upstream put the request into a queue, which is not followed here")
        case 403 | 429 if SPENT.intersection((error.code, error.type)):
            return account_spent()
    return status_error(response)


def settings_of(spec: ReplicaSpec) -> ApiSettings:
    """Return the settings of an upstream, by default those of OpenAI's own API."""
    return spec.settings if isinstance(spec.settings, ApiSettings) else ApiSettings()


class Follow(Protocol):
    """Reader of the reply to a request that was only accepted."""

    async def __call__(
        self, accepted: UpstreamResponse, rows: int, width: int | None, timeout_s: float
    ) -> UpstreamResponse:
        """Return the reply, or the response as it is. rows, width: of the reply. Raises: BackendError."""


class OpenAIApi:
    """Requests and replies of one server in the shape of its API.

    spec: with the configured base URL. follow: called with a response of status 202.
    """

    def __init__(self, http: UpstreamClient, spec: ReplicaSpec, follow: Follow | None = None) -> None:
        address, self.settings = spec.address, settings_of(spec)
        settings = self.settings
        self._http = http
        self._follow = follow
        self._extra = settings.extra_body
        self.shape = shape = shape_of(settings, spec.model, address)
        self._embeddings = path_of(address, shape.embeddings, shape.prefix)
        self._rerank = (
            None
            if shape.rerank is None
            else path_of(
                address, shape.rerank.replace("{model}", quote(spec.model or "", safe="/")), shape.prefix
            )
        )
        self._models = path_of(address, shape.models, shape.prefix)

    async def models(self, timeout_s: float) -> UpstreamResponse:
        """Return the response to a request for the models, which costs nothing. Raises: BackendError."""
        return await self._http.get(self._models, timeout_s)

    async def embed(self, work: Embed, profile: OpenAIProfile, timeout_s: float) -> UpstreamResponse:
        """Send texts to embed and return the response of any status. Raises: BackendError."""
        body = encode(work, profile, self.shape, self._extra)
        return await self._post(self._embeddings, body, work.reply_rows, timeout_s, profile.width)

    async def send(
        self, fields: Body, profile: OpenAIProfile, rows: int, timeout_s: float
    ) -> UpstreamResponse:
        """Send inputs to embed and return the response of any status. fields: with the inputs.

        Raises: BackendError.
        """
        shape = self.shape
        form = shape.base64 if profile.base64 and shape.base64 is not None else shape.numbers
        body = {**self._extra, **_named(profile), **form, **fields}
        return await self._post(self._embeddings, body, rows, timeout_s, profile.width)

    def may_refuse_base64(self, response: UpstreamResponse, profile: OpenAIProfile) -> bool:
        """Return whether a server was asked for base64 and may not have it."""
        return profile.base64 and self.shape.base64 is not None and may_refuse_base64(response)

    async def rerank(self, work: Rerank, profile: OpenAIProfile, timeout_s: float) -> UpstreamResponse:
        """Send documents to score and return the response of any status. Raises: BackendError."""
        if self._rerank is None:
            raise UnsupportedWork("this upstream does not rerank: set its `rerank` to the path")
        body = encode_rerank(work, profile, self.shape, self._extra)
        return await self._post(self._rerank, body, work.reply_rows, timeout_s)

    async def rank(
        self, sides: Body, work: ScoreParts, profile: OpenAIProfile, rows: int, timeout_s: float
    ) -> UpstreamResponse:
        """Send a query and its documents, some with images, and return the response of any status.

        sides: their fields. rows: the number of documents. Raises: BackendError.
        """
        assert self._rerank is not None
        body = rerank_body(sides, work, profile, self.shape, self._extra)
        return await self._post(self._rerank, body, rows, timeout_s)

    async def _post(
        self, path: str, body: Body, rows: int, timeout_s: float, width: int | None = None
    ) -> UpstreamResponse:
        remaining_s, encoded = countdown(timeout_s), msgspec.json.encode(body)
        response = await self._http.post(path, encoded, timeout_s, rows=rows, width=width)
        if response.status == ACCEPTED and self._follow is not None:
            return await self._follow(response, rows, width, remaining_s())
        return response
