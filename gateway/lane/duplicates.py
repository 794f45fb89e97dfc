"""Equal inputs of one call, which are computed once. Pure.

Only inputs with pictures or sound are compared: an equal text costs less than the comparison saves. Python's
hash of the bytes finds candidates, and their comparison decides.
"""

from collections.abc import Sequence
from typing import TypeAlias, TypeVar

import msgspec
import numpy as np

from backends.contract import EmbedParts, EmbedReply, EncodeReply, Reply
from backends.contract import Work as BackendWork

# For each input of a call, its index among the different ones.
Places: TypeAlias = tuple[int, ...]
Output = TypeVar("Output")


def without_duplicates(work: BackendWork) -> tuple[BackendWork, Places | None]:
    """Return the work with each different input once, and their places; None if all are different."""
    if not isinstance(work, EmbedParts) or len(work.inputs) == 1:
        return work, None
    index_of = {parts: index for index, parts in enumerate(dict.fromkeys(work.inputs))}
    if len(index_of) == len(work.inputs):
        return work, None
    places = tuple([index_of[parts] for parts in work.inputs])
    return msgspec.structs.replace(work, inputs=tuple(index_of)), places


def with_duplicates(reply: Reply, places: Places) -> Reply:
    """Return the reply to all inputs of a call. Its tokens stay those that were computed."""
    assert isinstance(reply, EmbedReply | EncodeReply)
    truncated = reply.truncated
    if truncated:
        cut = set(truncated)
        truncated = tuple(index for index, place in enumerate(places) if place in cut)
    counts = None if reply.input_tokens is None else _repeated(reply.input_tokens, places)
    if isinstance(reply, EmbedReply):
        return EmbedReply(reply.vectors[np.array(places)], reply.tokens, truncated, counts)
    return EncodeReply(
        reply.tokens,
        None if reply.dense is None else reply.dense[np.array(places)],
        None if reply.sparse is None else _repeated(reply.sparse, places),
        None if reply.multivector is None else _repeated(reply.multivector, places),
        None if reply.token_vectors is None else _repeated(reply.token_vectors, places),
        truncated,
        counts,
        None if reply.grids is None else _repeated(reply.grids, places),
    )


def _repeated(outputs: Sequence[Output], places: Places) -> tuple[Output, ...]:
    return tuple([outputs[place] for place in places])
