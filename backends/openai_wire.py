"""OpenAI's embeddings reply and model list, which many servers implement.

Source: OpenAI OpenAPI document 2.3.0. Decoding is strict if a vector could be assigned to the wrong input. It
is lenient about harmless differences between servers: numbers or base64, with or without usage.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
import pybase64

from backends.contract import Vectors
from backends.errors import ReplicaFailed
from backends.http import UpstreamResponse
from backends.openai_envelope import ApiMeta, TokenUsage
from backends.replies import check_vectors, float32, translate_decode_errors

# Most model names in an error message; a hosted server lists hundreds.
NAMES_SHOWN = 5


class UnequalWidths(ReplicaFailed):
    """Rows of different widths, as a model with one vector per token returns them."""


class UpstreamEmbedding(msgspec.Struct, frozen=True):
    """One vector, as numbers or as base64 of little-endian float32."""

    index: int
    embedding: str | list[float]


class UpstreamEmbeddings(msgspec.Struct, frozen=True):
    """Body of POST /v1/embeddings."""

    data: list[UpstreamEmbedding]
    usage: TokenUsage | None = None


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
    with translate_decode_errors():
        reply = msgspec.json.decode(body, type=UpstreamEmbeddings)
        items = sorted(reply.data, key=lambda item: item.index)
        if [item.index for item in items] != list(range(len(items))):
            raise ReplicaFailed("the upstream's indices are not 0 to n - 1")
        vectors = _rows([item.embedding for item in items])
    check_vectors(vectors, expected)
    return vectors, reply.usage.tokens if reply.usage else None


def decode_typed_embeddings(body: bytes, expected: int) -> tuple[Vectors, int | None]:
    """Decode Cohere's reply, which has the vectors in input order; the rest is as in `decode_embeddings`.

    Raises: ReplicaFailed, if the body does not contain `expected` vectors.
    """
    with translate_decode_errors():
        reply = msgspec.json.decode(body, type=CohereEmbeddings)
        vectors = _rows(reply.embeddings.vectors)
    check_vectors(vectors, expected)
    return vectors, reply.meta.token_count if reply.meta else None


def _rows(embeddings: Sequence[str | list[float]]) -> Vectors:
    rows = [_row(embedding) for embedding in embeddings]
    # Checked here, because numpy would convert unequal rows to an array of objects.
    if len({row.shape for row in rows}) > 1:
        raise UnequalWidths("the upstream's vectors differ in width")
    return np.array(rows, dtype=np.float32)


def _row(embedding: str | list[float]) -> Vectors:
    if isinstance(embedding, str):
        return np.frombuffer(pybase64.b64decode(embedding, validate=True), dtype="<f4")
    return float32(embedding)


def decode_models(response: UpstreamResponse) -> list[UpstreamModel]:
    """Decode a list of models.

    Raises: ReplicaFailed.
    """
    try:
        return msgspec.json.decode(response.body, type=UpstreamModels).data
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ReplicaFailed("the upstream's list of models could not be read") from error


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
