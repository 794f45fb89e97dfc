"""Parts of replies that several dialects share: vectors, ranks, labels, widths of multi-vectors."""

import asyncio
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import msgspec
import numpy as np

from backends.contract import ClassifyReply, EncodeReply, RerankReply, Vectors
from backends.contract.vectors import shape_vectors
from gateway.api.server.encoding import (
    NUMBERS_AT_ONCE,
    NUMBERS_OF_OBJECT,
    PLAIN_FLOATS,
    Encoding,
    LazyList,
    encoded_rows,
)
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
    for few in _parts_of(vectors):
        yield from encoded_rows(few, encoding)


def _parts_of(rows: Vectors) -> Iterator[Vectors]:
    """Yield the rows of (n, width) in order, some at a time, for work that the event loop waits for."""
    at_once = max(1, NUMBERS_AT_ONCE // rows.shape[1])
    for first in range(0, len(rows), at_once):
        yield rows[first : first + at_once]


def vector_list(
    vectors: Vectors, encoding: Encoding, item: Callable[[int, Any], Any] = lambda _, row: row
) -> LazyList:
    """Return the rows of (n, dim) float32 as a list.

    item: takes the index of a row, and the row as `json_bytes` takes it; by default it is the row.
    """
    rows = vectors if encoding == PLAIN_FLOATS else encoded_vectors(vectors, encoding)
    return LazyList(map(item, count(), rows), len(vectors), vectors.size * len(encoding.kinds))


def rank_list(reply: RerankReply, most: int | None, item: Callable[[int, Any], Any]) -> LazyList:
    """Return the results of at most so many documents, best first; 0 and None: all.

    Equal scores stay in the request's order, unless their logits differ. item: takes the index of a document
    and its score, and returns its result.
    """
    order = np.argsort(-reply.order, kind="stable")[: most or None]
    return LazyList(map(item, order.tolist(), reply.scores[order]), len(order))


def label_items(reply: ClassifyReply) -> LazyList:
    """Return the labels of each input with their scores, best first."""
    items = (
        [{"score": row[i], "label": reply.labels[i]} for i in order]
        for scores in _parts_of(reply.scores)
        for row, order in zip(scores, np.argsort(-scores, axis=1, kind="stable").tolist(), strict=True)
    )
    return LazyList(items, len(reply.scores), reply.scores.size * NUMBERS_OF_OBJECT)


async def with_dimensions(reply: EncodeReply, dimensions: int) -> EncodeReply:
    """Return a reply whose multi-vectors have their first `dimensions` components, at length 1.

    The event loop runs on between two inputs. Raises: InvalidInput if the model's vectors have fewer.
    """
    matrices = reply.multivector or ()
    width = min((rows.shape[1] for rows in matrices), default=dimensions)
    if dimensions > width:
        raise InvalidInput(
            f"`dimensions` is {dimensions}, the model's vectors have {width}", param="dimensions"
        )
    cut = []
    for rows in matrices:
        cut.append(shape_vectors(rows, dimensions=dimensions, normalize=True))
        await asyncio.sleep(0)
    return msgspec.structs.replace(reply, multivector=tuple(cut))
