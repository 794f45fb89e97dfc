"""OpenAI's embeddings reply, models list and error envelope, as many servers speak them. Pure.

Source: OpenAI OpenAPI document 2.3.0. Strict where a vector could be another's, lenient where servers differ
without harm: numbers or base64, usage with or without prompt_tokens, a code that is a number or a word.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pybase64

from backends.contract import Vectors
from backends.errors import ReplicaFailed
from backends.http import UpstreamResponse
from backends.replies import check_vectors, float32, translate_decode_errors

# Names in a message; a hosted server lists hundreds.
NAMES_SHOWN = 5


class Ragged(ReplicaFailed):
    """Rows of different widths, as of a model that gives a vector for each token."""


class Item(msgspec.Struct, frozen=True):
    """One vector: numbers, or the base64 of little-endian float32."""

    index: int
    embedding: str | list[float]


class Usage(msgspec.Struct, frozen=True):
    """Tokens, specials included; older rerank routes tell the total alone."""

    prompt_tokens: int | None = None
    total_tokens: int | None = None

    @property
    def tokens(self) -> int | None:
        """Whichever is told."""
        return self.total_tokens if self.prompt_tokens is None else self.prompt_tokens


class EmbeddingsReply(msgspec.Struct, frozen=True):
    """POST /v1/embeddings."""

    data: list[Item]
    usage: Usage | None = None


class Model(msgspec.Struct, frozen=True):
    """One entry of GET /v1/models; the length is vLLM's and SGLang's."""

    id: str
    max_model_len: int | None = None


class Models(msgspec.Struct, frozen=True):
    """GET /v1/models."""

    data: list[Model]


class Error(msgspec.Struct, frozen=True):
    """The inside of an error envelope. code: a word, a status, or nothing."""

    message: str = ""
    type: str | None = None
    code: int | str | None = None


def decode_embeddings(body: bytes, expected: int) -> tuple[Vectors, int | None]:
    """The rows in input order, (expected, dim) float32, and the tokens where they are told.

    Raises: ReplicaFailed where it is not an answer to `expected` inputs.
    """
    with translate_decode_errors():
        reply = msgspec.json.decode(body, type=EmbeddingsReply)
        items = sorted(reply.data, key=lambda item: item.index)
        if [item.index for item in items] != list(range(len(items))):
            raise ReplicaFailed("the upstream's indices are not 0 to n - 1")
        vectors = _rows([item.embedding for item in items])
    check_vectors(vectors, expected)
    return vectors, reply.usage.tokens if reply.usage else None


def _rows(embeddings: Sequence[str | list[float]]) -> Vectors:
    rows = [_row(one) for one in embeddings]
    # One row for each, or numpy would take unequal rows for an array of objects.
    if len({row.shape for row in rows}) > 1:
        raise Ragged("the upstream's vectors differ in width")
    return np.array(rows, dtype=np.float32)


def _row(embedding: str | list[float]) -> Vectors:
    if isinstance(embedding, str):
        return np.frombuffer(pybase64.b64decode(embedding, validate=True), dtype="<f4")
    return float32(embedding)


def decode_models(answer: UpstreamResponse) -> list[Model]:
    """Raises: ReplicaFailed where it is no list of models."""
    try:
        return msgspec.json.decode(answer.body, type=Models).data
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ReplicaFailed("the upstream's list of models could not be read") from error


def chosen_model(models: Sequence[str], asked: str | None) -> str:
    """The served name to send: the one asked for, else the only one.

    Raises: ReplicaFailed.
    """
    shown = ", ".join(models[:NAMES_SHOWN]) or "nothing"
    if asked is not None:
        if asked not in models:
            raise ReplicaFailed(f"the server serves {shown}, and not {asked!r}")
        return asked
    if len(models) != 1:
        raise ReplicaFailed(f"the server serves {shown}: say which as `model`")
    return models[0]


def error_of(answer: UpstreamResponse) -> Error:
    """What an answer says went wrong: nested in `error`, flat in `message`, or nothing to be read."""
    try:
        body = msgspec.json.decode(answer.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Error()
    inside: Any = body.get("error", body) if isinstance(body, dict) else None
    try:
        return msgspec.convert(inside, Error)
    except msgspec.ValidationError:
        return Error()
