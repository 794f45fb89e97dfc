"""OpenAI's embeddings reply and model list, which many servers implement.

Source: OpenAI OpenAPI document 2.3.0. Decoding is strict if a vector could be assigned to the wrong input. It
is lenient about harmless differences between servers: numbers or base64, with or without usage.
"""

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pybase64

from backends.contract import Vectors
from backends.contract.errors import ReplicaFailed
from backends.http.answers import decode_json, in_order, unreadable_value
from backends.http.client import UpstreamResponse
from backends.http.openai_envelope import ApiMeta, TokenCounts, error_of
from backends.http.replies import check_vectors, float32

# Most model names in an error message; a hosted server lists hundreds.
NAMES_SHOWN = 5
# Error texts for an input that is too long: OpenAI and vLLM, llama.cpp, Ollama, Cohere.
TOO_LONG = (
    "maximum context length",
    "maximum model length",
    "too large to process",
    "context size",
    "context length",
    "too long",
    "too many tokens",
)
# Statuses of a server that does not know an encoding.
UNKNOWN_ENCODING = frozenset({400, 415, 422})
# A list without a vector is shorter, with all other fields of a reply.
EMPTY_BYTES_MAX = 4096
EMPTY_LIST = re.compile(rb"\[\s*\]")


class UnequalWidths(ReplicaFailed):
    """Rows of different widths, as a model with one vector per token returns them."""


class UpstreamEmbedding(msgspec.Struct, frozen=True):
    """One vector, as numbers or as base64 of little-endian float32."""

    embedding: str | list[float]
    index: int | None = None


class UpstreamEmbeddings(msgspec.Struct, frozen=True):
    """Body of POST /v1/embeddings."""

    data: list[UpstreamEmbedding]
    usage: TokenCounts | None = None


class NumbersByType(msgspec.Struct, frozen=True, rename={"vectors": "float"}):
    """Cohere's vectors of each requested type; only numbers are requested."""

    vectors: list[list[float]]


class CohereEmbeddings(msgspec.Struct, frozen=True):
    """Body of Cohere's POST /v2/embed."""

    embeddings: NumbersByType
    meta: ApiMeta | None = None


class UpstreamModel(msgspec.Struct, frozen=True):
    """One entry of GET /v1/models; max_model_len is an extension of vLLM and SGLang."""

    id: str
    max_model_len: int | None = None


class UpstreamModels(msgspec.Struct, frozen=True):
    """Body of GET /v1/models."""

    data: list[UpstreamModel]


def decode_embeddings(body: bytes, expected: int) -> tuple[Vectors, int | None]:
    """Decode the vectors in input order, (expected, dim) float32, and the tokens, or None if not reported.

    Raises: ReplicaFailed, if the body does not contain `expected` vectors.
    """
    reply = decode_json(body, UpstreamEmbeddings)
    if len(reply.data) != expected:
        raise ReplicaFailed(f"asked for {expected} vectors, got {len(reply.data)}")
    places = in_order([item.index for item in reply.data], "data", listed=True)
    vectors = _rows([reply.data[place].embedding for place in places], [f"data[{place}]" for place in places])
    check_vectors(vectors, expected)
    return vectors, reply.usage.tokens if reply.usage else None


def may_refuse_base64(response: UpstreamResponse) -> bool:
    """Return whether a reply to a request for base64 may be that of a server without it.

    Servers refuse it in many ways, or reply with no vector. Only the refusal of a long input is known.
    """
    if response.status == 200:
        return is_without_vectors(response.body)
    if response.status not in UNKNOWN_ENCODING:
        return False
    message = error_of(response).message.lower()
    return not any(phrase in message for phrase in TOO_LONG)


def as_numbers(body: dict[str, Any]) -> dict[str, Any]:
    """Return the body of a request that asks for numbers instead of base64."""
    fields = {name: value for name, value in body.items() if name != "endianness"}
    return fields | {"encoding_format": "float"}


def is_without_vectors(body: bytes) -> bool:
    """Return whether a body is a list without any vector, as of a server that does not know base64."""
    if len(body) > EMPTY_BYTES_MAX or EMPTY_LIST.search(body) is None:
        return False
    try:
        return not msgspec.json.decode(body, type=UpstreamEmbeddings).data
    except (msgspec.DecodeError, ValueError, RecursionError):
        return False


def decode_typed_embeddings(body: bytes, expected: int) -> tuple[Vectors, int | None]:
    """Decode Cohere's reply, which has the vectors in input order; the rest is as in `decode_embeddings`.

    Raises: ReplicaFailed, if the body does not contain `expected` vectors.
    """
    reply = decode_json(body, CohereEmbeddings)
    vectors = _rows(reply.embeddings.vectors, [])
    check_vectors(vectors, expected)
    return vectors, reply.meta.token_count if reply.meta else None


def _rows(embeddings: Sequence[str | list[float]], paths: Sequence[str]) -> Vectors:
    """Return the rows as one array. paths: of those that may be base64."""
    rows = [
        _row(embedding) if isinstance(embedding, list) else _unpacked(embedding, index, paths)
        for index, embedding in enumerate(embeddings)
    ]
    # Checked here, because numpy would convert unequal rows to an array of objects.
    if len({row.shape for row in rows}) > 1:
        index = next(index for index, row in enumerate(rows) if row.shape != rows[0].shape)
        raise UnequalWidths("the upstream's vectors differ in width").with_facts(
            detail=f"vector 0 has {rows[0].size} numbers, vector {index} has {rows[index].size}"
        )
    return np.array(rows, dtype=np.float32)


def _row(embedding: list[float]) -> Vectors:
    return float32(embedding)


def _unpacked(embedding: str, index: int, paths: Sequence[str]) -> Vectors:
    try:
        return np.frombuffer(pybase64.b64decode(embedding, validate=True), dtype="<f4")
    except ValueError as error:
        raise unreadable_value(f"{paths[index]}.embedding", embedding, index) from error


def decode_models(response: UpstreamResponse) -> list[UpstreamModel]:
    """Decode a list of models.

    Raises: ReplicaFailed.
    """
    try:
        return decode_json(response.body, UpstreamModels).data
    except ReplicaFailed as error:
        raise ReplicaFailed("the upstream's list of models could not be read").with_facts(
            detail=error.detail
        ) from error


def choose_model(models: Sequence[str], configured: str | None) -> str:
    """Return the configured model name, or the only model that the server lists.

    Raises: ReplicaFailed.
    """
    names = ", ".join(models[:NAMES_SHOWN]) or "nothing"
    if configured is not None:
        if configured not in models:
            raise ReplicaFailed(f"the server serves {names}, and not {configured!r}")
        return configured
    if len(models) != 1:
        raise ReplicaFailed(f"the server serves {names}: select one with `model`")
    return models[0]


class Base64Switch:
    """Requests for embeddings in base64, and in numbers once the server has refused base64."""

    def __init__(self) -> None:
        self._is_on = True

    async def send(
        self, body: dict[str, Any], post: Callable[[dict[str, Any]], Awaitable[UpstreamResponse]]
    ) -> UpstreamResponse:
        """Send a body that asks for base64, and again without if need be. Raises: BackendError."""
        if not self._is_on:
            return await post(as_numbers(body))
        response = await post(body)
        if may_refuse_base64(response):
            second = await post(as_numbers(body))
            if second.status == 200:
                response, self._is_on = second, False
        return response
