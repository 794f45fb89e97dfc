"""Replies to embeddings requests: OpenAI's frame, with one vector or Jina's multi-vector for each input."""

from typing import Any

import msgspec

from backends.contract import EmbedReply, EncodeReply, PatchGrid
from gateway.api.server.encoding import Encoding, encoded_rows, json_bytes

Embedding = list[float] | str


class OpenAIEmbeddingItem(msgspec.Struct):
    """One vector.

    embedding: numbers; for binary types packed bits; for base64 the little-endian bytes of the numbers; for
    several types an object with one of these for each type.
    """

    index: int
    embedding: Embedding | dict[str, Embedding]
    object: str = "embedding"


class PatchPlaces(msgspec.Struct):
    """Vectors of a page's patches: the upper left one, the others behind it row by row."""

    first: int
    rows: int
    columns: int


class MultiVectorItem(msgspec.Struct):
    """One vector for each token of an input, each in a form of `OpenAIEmbeddingItem.embedding`."""

    index: int
    embeddings: list[Embedding | dict[str, Embedding]]
    object: str = "embeddings"
    patch_grid: PatchPlaces | msgspec.UnsetType = msgspec.UNSET


class CachedTokens(msgspec.Struct):
    """Tokens of the texts whose vectors were found in the cache; they are part of `prompt_tokens`."""

    cached_tokens: int


class OpenAIEmbeddingsUsage(msgspec.Struct):
    """Tokens after truncation, with special tokens and the prompt.

    prompt_tokens_details: only if the model has a cache.
    """

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens | msgspec.UnsetType = msgspec.UNSET


class OpenAIEmbeddingsResponse(msgspec.Struct):
    """Vectors of length 1, in the order of the inputs. With `return_multivector` as /v1/multi-vector."""

    data: list[OpenAIEmbeddingItem]
    model: str
    usage: OpenAIEmbeddingsUsage
    object: str = "list"


class MultiVectorResponse(msgspec.Struct):
    """One vector for each token of an input, in the order of the inputs."""

    data: list[MultiVectorItem]
    model: str
    usage: OpenAIEmbeddingsUsage
    object: str = "list"


def encode_embeddings(
    reply: EmbedReply | EncodeReply, model: str, encoding: Encoding, cached_tokens: int | None = None
) -> bytes:
    """Encode the reply. model: the name that the caller used. cached_tokens: None without a cache."""
    items = _vectors(reply, encoding) if isinstance(reply, EmbedReply) else _multi_vectors(reply, encoding)
    usage: dict[str, Any] = {"prompt_tokens": reply.tokens, "total_tokens": reply.tokens}
    if cached_tokens is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
    return json_bytes({"object": "list", "data": items, "model": model, "usage": usage})


def _vectors(reply: EmbedReply, encoding: Encoding) -> list[dict[str, Any]]:
    return [
        {"object": "embedding", "index": index, "embedding": item}
        for index, item in enumerate(encoded_rows(reply.vectors, encoding))
    ]


def _multi_vectors(reply: EncodeReply, encoding: Encoding) -> list[dict[str, Any]]:
    grids = reply.grids or (None,) * len(reply.multivector or ())
    return [
        {"object": "embeddings", "index": index, "embeddings": encoded_rows(rows, encoding)} | _patches(grid)
        for index, (rows, grid) in enumerate(zip(reply.multivector or (), grids, strict=True))
    ]


def _patches(grid: PatchGrid | None) -> dict[str, Any]:
    return {} if grid is None else {"patch_grid": msgspec.to_builtins(grid)}
