"""Requests and replies of OpenAI's embeddings API and its relatives: pure functions, then the I/O.

Source: OpenAI OpenAPI document 2.3.0, and the differences of llama.cpp, Ollama and others. `shapes.py`
has those of Cohere, Jina and Voyage, and `rerank_wire.py` the rerank API that all but OpenAI have.
Rule: only fields that every such server knows are sent. The vectors are truncated to `dimensions` and
normalized here, in the way that OpenAI's own models define.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from backends.contract import Embed, EmbedReply, ReplicaSpec, Rerank, ScoreKind, Work
from backends.contract.errors import BackendError, ReplicaFailed, UnsupportedWork, input_too_long
from backends.contract.refusals import check_no_instruction, check_no_late_chunking
from backends.http.answers import with_answer
from backends.http.client import UpstreamClient, UpstreamResponse
from backends.http.openai_envelope import context_length_in, error_of, refused_input
from backends.http.openai_wire import TOO_LONG, decode_embeddings, decode_typed_embeddings, may_refuse_base64
from backends.http.replies import (
    check_dimensions,
    check_tokens,
    fit_vectors,
    status_error,
    truncated_inputs,
)
from backends.openai.kind import ApiSettings
from backends.openai.shapes import DEFAULT_TYPE, NO_FIELDS, OPENAI, ApiShape, Fields, path_of, shape_of
from backends.tokens.tokenizer import TokenCount

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
    check_no_late_chunking(work)
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
    if shape.media != "content":
        return work.inputs
    return [{"content": [{"type": "text", "text": text}]} for text in work.inputs]


def encode_rerank(
    work: Rerank, profile: OpenAIProfile, shape: ApiShape = OPENAI, extra: Fields = NO_FIELDS
) -> Body:
    """Return the body of a rerank. extra: fields that the operator adds.

    Raises: UnsupportedWork.
    """
    check_no_instruction(work)
    if work.raw_scores and profile.scores is not ScoreKind.LOGIT:
        raise UnsupportedWork("this upstream gives no raw scores")
    texts: Body = {"query": work.query, "documents": work.documents}
    cut = shape.rerank_truncation.get(work.truncate, {})
    return {**extra, **_named(profile), **texts, **shape.rerank_fields, **cut}


def _named(profile: OpenAIProfile) -> Body:
    return {} if profile.model is None else {"model": profile.model}


def decode(
    work: Embed,
    response: UpstreamResponse,
    profile: OpenAIProfile,
    count: TokenCount | None,
    *,
    typed: bool = False,
) -> EmbedReply:
    """Decode the reply in a response of status 200.

    count: from the model's tokenizer, if available here. typed: as `ApiShape.typed_reply`.

    Raises: ReplicaFailed if the response does not belong to this work.
    """
    decode_body = decode_typed_embeddings if typed else decode_embeddings
    vectors, tokens = decode_body(response.body, len(work.inputs))
    if count is not None:
        return EmbedReply(fit_vectors(vectors, work), count.tokens, count.truncated)
    if tokens is None:
        raise ReplicaFailed("the upstream reported no usage")
    check_tokens(tokens, len(work.inputs), profile.max_tokens)
    cut = truncated_inputs(work, tokens, profile.max_tokens)
    return EmbedReply(fit_vectors(vectors, work), tokens, cut)


def failure(response: UpstreamResponse) -> BackendError:
    """Convert a response whose status is not 200 to an error."""
    return with_answer(_failure(response), response)


def _failure(response: UpstreamResponse) -> BackendError:
    error = error_of(response)
    message = error.message.lower()
    match response.status:
        case 400 | 413 | 422 | 500 if any(phrase in message for phrase in TOO_LONG):
            return input_too_long(context_length_in(message))
        case 400 | 404 if error.code == "model_not_found":
            return ReplicaFailed("the upstream does not serve this model")
        case 400 | 422:
            return refused_input(error)
        case 429 if "insufficient_quota" in (error.code, error.type):
            return ReplicaFailed("the quota of the gateway's account at the upstream is used up")
    return status_error(response)


def settings_of(spec: ReplicaSpec) -> ApiSettings:
    """Return the settings of an upstream, by default those of OpenAI's own API."""
    return spec.settings if isinstance(spec.settings, ApiSettings) else ApiSettings()


class OpenAIApi:
    """Requests and replies of one server in the shape of its API. spec: with the configured base URL."""

    def __init__(self, http: UpstreamClient, spec: ReplicaSpec) -> None:
        address, self.settings = spec.address, settings_of(spec)
        settings = self.settings
        self._http = http
        self._extra = settings.extra_body
        self.shape = shape = shape_of(settings, spec.model)
        self._embeddings = path_of(address, shape.embeddings, shape.prefix)
        self._rerank = None if shape.rerank is None else path_of(address, shape.rerank, shape.prefix)
        self._models = path_of(address, shape.models, shape.prefix)

    async def models(self, timeout_s: float) -> UpstreamResponse:
        """Return the response to a request for the models, which costs nothing. Raises: BackendError."""
        return await self._http.get(self._models, timeout_s)

    async def embed(self, work: Embed, profile: OpenAIProfile, timeout_s: float) -> UpstreamResponse:
        """Send texts to embed and return the response of any status. Raises: BackendError."""
        body = encode(work, profile, self.shape, self._extra)
        return await self._post(self._embeddings, body, work, timeout_s, profile.width)

    async def send(
        self, fields: Body, profile: OpenAIProfile, rows: int, timeout_s: float
    ) -> UpstreamResponse:
        """Send inputs to embed and return the response of any status. fields: with the inputs.

        Raises: BackendError.
        """
        shape = self.shape
        form = shape.base64 if profile.base64 and shape.base64 is not None else shape.numbers
        body = msgspec.json.encode({**self._extra, **_named(profile), **form, **fields})
        return await self._http.post(self._embeddings, body, timeout_s, rows=rows, width=profile.width)

    def may_refuse_base64(self, response: UpstreamResponse, profile: OpenAIProfile) -> bool:
        """Return whether a server was asked for base64 and may not have it."""
        return profile.base64 and self.shape.base64 is not None and may_refuse_base64(response)

    async def rerank(self, work: Rerank, profile: OpenAIProfile, timeout_s: float) -> UpstreamResponse:
        """Send documents to score and return the response of any status. Raises: BackendError."""
        if self._rerank is None:
            raise UnsupportedWork("this upstream does not rerank: set its `rerank` to the path")
        body = encode_rerank(work, profile, self.shape, self._extra)
        return await self._post(self._rerank, body, work, timeout_s)

    async def _post(
        self, path: str, body: Body, work: Work, timeout_s: float, width: int | None = None
    ) -> UpstreamResponse:
        encoded = msgspec.json.encode(body)
        return await self._http.post(path, encoded, timeout_s, rows=work.reply_rows, width=width)
