"""Parts of replies that several dialects share: vectors, ranks, labels, widths of multi-vectors. Pure."""

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from backends.contract import ClassifyReply, EncodeReply, RerankReply, Vectors
from backends.contract.vectors import shape_vectors
from gateway.api.server.encoding import VECTORS_AT_ONCE, Encoding, encoded_rows
from gateway.errors import InvalidInput


class RerankUsage(msgspec.Struct):
    """Tokens after truncation, with special tokens. The query counts with each document.

    completion_tokens: 0, which clients of chat APIs require.
    """

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


def usage_of_ranks(reply: RerankReply) -> dict[str, int]:
    """Return the usage of a reply with scores."""
    return {"prompt_tokens": reply.tokens, "total_tokens": reply.tokens, "completion_tokens": 0}


def encoded_vectors(vectors: Vectors, encoding: Encoding) -> Iterator[Any]:
    """Yield the rows of (n, dim) float32 as `json_bytes` takes them. Few are made at once."""
    for first in range(0, len(vectors), VECTORS_AT_ONCE):
        yield from encoded_rows(vectors[first : first + VECTORS_AT_ONCE], encoding)


def best_first(reply: RerankReply) -> list[int]:
    """Return the indices of the documents, best first.

    Equal scores stay in the request's order, unless their logits differ.
    """
    order: list[int] = np.argsort(-reply.order, kind="stable").tolist()
    return order


def rank_documents(reply: RerankReply, count: int | None) -> list[dict[str, Any]]:
    """Return at most `count` results in the order of `best_first`; 0 and None: all."""
    order = best_first(reply)[: count or None]
    return [{"index": index, "relevance_score": reply.scores[index]} for index in order]


def label_items(reply: ClassifyReply) -> list[list[dict[str, Any]]]:
    """Return the labels of each input with their scores, best first."""
    orders = np.argsort(-reply.scores, axis=1, kind="stable")
    return [
        [{"score": row[i], "label": reply.labels[i]} for i in order]
        for row, order in zip(reply.scores, orders, strict=True)
    ]


def with_dimensions(reply: EncodeReply, dimensions: int) -> EncodeReply:
    """Return a reply whose multi-vectors have their first `dimensions` components, at length 1.

    Raises: InvalidInput if the model's vectors have fewer.
    """
    matrices = reply.multivector or ()
    width = min((rows.shape[1] for rows in matrices), default=dimensions)
    if dimensions > width:
        raise InvalidInput(
            f"`dimensions` is {dimensions}, the model's vectors have {width}", param="dimensions"
        )
    cut = tuple(shape_vectors(rows, dimensions=dimensions, normalize=True) for rows in matrices)
    return msgspec.structs.replace(reply, multivector=cut)
