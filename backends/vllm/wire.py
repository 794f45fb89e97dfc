"""Wire of vLLM's pooling server: its structs, request bodies, decoding of replies, and errors, without I/O.

Source: vLLM 0.33.0 (entrypoints/pooling), run at 0.32.0, and the differences of 0.20, 0.11 and 0.8.5.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from backends.contract import Token, Vectors
from backends.contract.errors import (
    BackendError,
    ReplicaFailed,
    ReplicaOverloaded,
    input_too_long,
)
from backends.http.answers import decode_json, in_order, translate_decode_errors, with_answer
from backends.http.client import UpstreamResponse
from backends.http.openai_envelope import (
    REFUSAL_TYPES,
    TokenUsage,
    context_length_in,
    error_of,
    refused_input,
)
from backends.http.replies import order_scores, score_matrix, status_error, token_matrices

EMBEDDINGS, SCORE, POOLING, CLASSIFY = "/v1/embeddings", "/v1/score", "/pooling", "/classify"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
BASE64 = {"encoding_format": "base64", "endianness": "little"}

Body = dict[str, Any]


class PairScoreItem(msgspec.Struct, frozen=True):
    """One score; index is that of the document."""

    score: float
    index: int | None = None


class ScoreResponse(msgspec.Struct, frozen=True):
    """Body of POST /v1/score."""

    data: list[PairScoreItem]
    usage: TokenUsage = TokenUsage()


class ClassScoresItem(msgspec.Struct, frozen=True):
    """Class scores of one input by class id; the wire names only the most likely class."""

    probs: list[float]
    index: int | None = None


class ClassifyResponse(msgspec.Struct, frozen=True):
    """Body of POST /classify."""

    data: list[ClassScoresItem]
    usage: TokenUsage = TokenUsage()


class TokenEmbedItem(msgspec.Struct, frozen=True):
    """Token vectors of one input."""

    data: list[list[float]]
    index: int | None = None


class TokenEmbedResponse(msgspec.Struct, frozen=True):
    """Body of POST /pooling for the task token_embed."""

    data: list[TokenEmbedItem]
    usage: TokenUsage = TokenUsage()


class TokenizedText(msgspec.Struct, frozen=True):
    """Body of POST /tokenize for one text."""

    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizedText(msgspec.Struct, frozen=True):
    """Body of POST /detokenize for one list of ids."""

    prompt: str


class VersionResponse(msgspec.Struct, frozen=True):
    """Body of GET /version."""

    version: str


def restore_status(response: UpstreamResponse) -> UpstreamResponse:
    """Replace status 200 of an error with the status in its body; releases up to 0.11 send such errors."""
    if response.status != 200 or b'"error"' not in response.body[:64]:
        return response
    code = error_of(response).code
    status = code if isinstance(code, int) and 400 <= code <= 599 else 500
    return msgspec.structs.replace(response, status=status)


def is_own_error(response: UpstreamResponse) -> bool:
    """Return whether an error is in vLLM's or its web framework's form, and not that of a proxy in front."""
    try:
        body = msgspec.json.decode(response.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return isinstance(body, dict) and not body.keys().isdisjoint({"error", "detail", "message"})


def decode_scores(response: UpstreamResponse, expected: int) -> tuple[Vectors, int | None]:
    """Decode the scores in document order, (expected,) float32, and the tokens, or None if not reported.

    Raises: ReplicaFailed.
    """
    reply = decode_json(response.body, ScoreResponse)
    ranks = [(item.index, item.score) for item in reply.data]
    return order_scores(ranks, expected, "data"), reply.usage.tokens


def decode_classes(
    response: UpstreamResponse, expected: int, labels: int | None = None
) -> tuple[Vectors, int | None]:
    """Decode the class scores, (expected, n_labels) float32, and the tokens, or None if not reported.

    labels: the number of classes; None accepts any number.

    Raises: ReplicaFailed.
    """
    reply = decode_json(response.body, ClassifyResponse)
    rows = [item.probs for item in _in_order(reply.data)]
    count = labels if labels is not None else len(rows[0]) if rows else 0
    return score_matrix(rows, expected, count), reply.usage.tokens


def decode_token_vectors(
    response: UpstreamResponse, expected: int, max_tokens: int | None
) -> tuple[tuple[Vectors, ...], int | None]:
    """Decode the token vectors of each input, (its tokens, dim) float32, and the tokens, or None.

    Raises: ReplicaFailed.
    """
    reply = decode_json(response.body, TokenEmbedResponse)
    lists = [item.data for item in _in_order(reply.data)]
    with translate_decode_errors():
        return token_matrices(lists, expected, max_tokens), reply.usage.tokens


def _in_order(items: Sequence[Any]) -> list[Any]:
    """Sort the items of a reply by index and check that each input has one."""
    return [items[place] for place in in_order([item.index for item in items], "data", listed=True)]


def tokenize_body(text: str, *, special: bool) -> Body:
    """Return the body of POST /tokenize."""
    return {"prompt": text, "add_special_tokens": special, "return_token_strs": True}


def decode_tokenize(response: UpstreamResponse) -> TokenizedText:
    """Decode the reply to POST /tokenize.

    Raises: ReplicaFailed.
    """
    return decode_json(response.body, TokenizedText)


def decode_detokenize(response: UpstreamResponse) -> str:
    """Decode the text in the reply to POST /detokenize.

    Raises: ReplicaFailed.
    """
    return decode_json(response.body, DetokenizedText).prompt


def tokens_of(reply: TokenizedText, specials: tuple[int, int]) -> tuple[Token, ...]:
    """Convert the tokens of one text; this wire has no offsets, therefore start and stop are None.

    specials: the number of special tokens before and after the text.
    """
    texts = reply.token_strs or [""] * len(reply.tokens)
    if len(texts) != len(reply.tokens):
        raise ReplicaFailed("the upstream's tokens and their texts differ in number")
    before, after = specials
    last = len(texts) - after
    return tuple(
        Token(id_, text, special=not before <= index < last)
        for index, (id_, text) in enumerate(zip(reply.tokens, texts, strict=True))
    )


def failure(response: UpstreamResponse) -> BackendError:
    """Convert a response whose status is not 200 to an error."""
    return with_answer(_failure(response), response)


def _failure(response: UpstreamResponse) -> BackendError:
    error = error_of(response)
    match response.status:
        case 400 if "maximum context length" in error.message or "maximum model length" in error.message:
            return input_too_long(context_length_in(error.message))
        case 400 if error.type in REFUSAL_TYPES:
            return refused_input(error)
        case 404 | 501 if error.type is not None:
            return ReplicaFailed("the upstream does not offer this model or operation")
        case 503 if error.type is not None:
            # vLLM's own queue bound. A server that is starting, or a proxy, sends no error envelope.
            return ReplicaOverloaded("the upstream's queue is full")
    return status_error(response)
