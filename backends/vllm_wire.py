"""What vLLM's pooling server says: wire structs, and bodies and errors as values. Pure.

Source: vLLM 0.33.0 (entrypoints/pooling), run at 0.32.0; 0.20, 0.11 and 0.8.5 where they differ.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from backends.contract import Token, Vectors
from backends.errors import BackendError, InvalidWork, ReplicaFailed, ReplicaOverloaded, ReplicaUnavailable
from backends.http import UpstreamResponse
from backends.openai_wire import Usage, error_of
from backends.replies import checked_scores, order_scores, token_matrices, translate_decode_errors

EMBEDDINGS, SCORE, POOLING, CLASSIFY = "/v1/embeddings", "/v1/score", "/pooling", "/classify"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
BASE64 = {"encoding_format": "base64", "endianness": "little"}

Body = dict[str, Any]


class ScoreItem(msgspec.Struct, frozen=True):
    """One score; index is the document's."""

    index: int
    score: float


class ScoreResponse(msgspec.Struct, frozen=True):
    """POST /v1/score."""

    data: list[ScoreItem]
    usage: Usage = Usage()


class ClassItem(msgspec.Struct, frozen=True):
    """One input's classes, by their ids; of names only the likeliest class's is told."""

    index: int
    probs: list[float]


class ClassifyResponse(msgspec.Struct, frozen=True):
    """POST /classify."""

    data: list[ClassItem]
    usage: Usage = Usage()


class PoolingItem(msgspec.Struct, frozen=True):
    """One input's token vectors."""

    index: int
    data: list[list[float]]


class PoolingResponse(msgspec.Struct, frozen=True):
    """POST /pooling, for the task token_embed."""

    data: list[PoolingItem]
    usage: Usage = Usage()


class TokenizeResponse(msgspec.Struct, frozen=True):
    """POST /tokenize, for one text."""

    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(msgspec.Struct, frozen=True):
    """POST /detokenize, for one list of ids."""

    prompt: str


class Version(msgspec.Struct, frozen=True):
    """GET /version."""

    version: str


def unmasked(answer: UpstreamResponse) -> UpstreamResponse:
    """Up to 0.11 an error could come with status 200; it gets the status that it tells."""
    if answer.status != 200 or b'"error"' not in answer.body[:64]:
        return answer
    code = error_of(answer).code
    honest = code if isinstance(code, int) and 400 <= code <= 599 else 500
    return msgspec.structs.replace(answer, status=honest)


def scores(answer: UpstreamResponse, expected: int) -> tuple[Vectors, int | None]:
    """(expected,) float32 in document order, and the tokens where they are told. Raises: ReplicaFailed."""
    with translate_decode_errors():
        reply = msgspec.json.decode(answer.body, type=ScoreResponse)
    return order_scores([(one.index, one.score) for one in reply.data], expected), reply.usage.tokens


def classes(answer: UpstreamResponse, expected: int, labels: int | None = None) -> tuple[Vectors, int | None]:
    """(expected, labels) float32 by class id, and the tokens. labels: None is as many as there are.

    Raises: ReplicaFailed.
    """
    with translate_decode_errors():
        reply = msgspec.json.decode(answer.body, type=ClassifyResponse)
    rows = [one.probs for one in _in_order(reply.data)]
    many = labels if labels is not None else len(rows[0]) if rows else 0
    return checked_scores(rows, expected, many), reply.usage.tokens


def token_vectors(
    answer: UpstreamResponse, expected: int, max_tokens: int | None
) -> tuple[tuple[Vectors, ...], int | None]:
    """For each input (its tokens, dim) float32, and the tokens where they are told. Raises: ReplicaFailed."""
    with translate_decode_errors():
        reply = msgspec.json.decode(answer.body, type=PoolingResponse)
        lists = [one.data for one in _in_order(reply.data)]
        return token_matrices(lists, expected, max_tokens), reply.usage.tokens


def _in_order(items: Sequence[Any]) -> list[Any]:
    """By index, which must be that of an input each. Items of two structs, alike in this."""
    ordered = sorted(items, key=lambda item: item.index)
    if [item.index for item in ordered] != list(range(len(ordered))):
        raise ReplicaFailed("the upstream's indices are not 0 to n - 1")
    return ordered


def tokenize_body(text: str, *, special: bool) -> Body:
    """Of POST /tokenize."""
    return {"prompt": text, "add_special_tokens": special, "return_token_strs": True}


def token_list(answer: UpstreamResponse) -> TokenizeResponse:
    """Of POST /tokenize. Raises: ReplicaFailed."""
    with translate_decode_errors():
        return msgspec.json.decode(answer.body, type=TokenizeResponse)


def detokenized(answer: UpstreamResponse) -> str:
    """Of POST /detokenize. Raises: ReplicaFailed."""
    with translate_decode_errors():
        return msgspec.json.decode(answer.body, type=DetokenizeResponse).prompt


def as_tokens(reply: TokenizeResponse, specials: tuple[int, int]) -> tuple[Token, ...]:
    """Of one text; there are no offsets on this wire, so start and stop stay None."""
    texts = reply.token_strs or [""] * len(reply.tokens)
    if len(texts) != len(reply.tokens):
        raise ReplicaFailed("the upstream's tokens and their texts differ in number")
    before, after = specials
    last = len(texts) - after
    return tuple(
        Token(id_, text, special=not before <= place < last)
        for place, (id_, text) in enumerate(zip(reply.tokens, texts, strict=True))
    )


def failure(answer: UpstreamResponse) -> BackendError:
    """What an answer of another status than 200 means."""
    error = error_of(answer)
    match answer.status:
        case 400 if "maximum context length" in error.message or "maximum model length" in error.message:
            return InvalidWork("an input has more tokens than the model takes")
        case 400 if error.type == "BadRequestError":
            return InvalidWork("the upstream refused the input")
        case 401 | 403:
            return ReplicaFailed("the upstream refused the gateway's credential")
        case 404 | 501:
            return ReplicaFailed("the upstream does not offer this model or operation any more")
        case 429:
            return ReplicaOverloaded("the upstream is overloaded")
        case 503 if error.type is not None:
            # Its bounds on what waits. What is not up, or stands before it, has no envelope.
            return ReplicaOverloaded("the upstream's queue is full")
        case 503:
            return ReplicaUnavailable("the upstream says it is not ready")
    return ReplicaFailed(f"the upstream answered with status {answer.status}")
