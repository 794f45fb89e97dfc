"""Cutting a call into what one upstream request may hold, and joining the answers. Pure.

Invariant: every input is in exactly one slice, slices are consecutive, and `join` gives each input's own
answer back in the caller's order.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

import msgspec
import numpy as np

from backends.contract import (
    Capabilities,
    Classify,
    ClassifyReply,
    Detokenize,
    DetokenizeReply,
    Embed,
    EmbedReply,
    Encode,
    EncodeReply,
    Reply,
    Rerank,
    RerankReply,
    Score,
    Tokenize,
    TokenizeReply,
    Vectors,
    Work,
    WorkInput,
    inputs_of,
)
from backends.errors import ReplicaFailed
from backends.texts import token_upper_bound

Part = TypeVar("Part")

# What one upstream request may hold where neither the replica nor the config says so.
DEFAULT_BATCH_INPUTS = 32
DEFAULT_BATCH_TOKENS = 16384
# JSON writes some bytes of UTF-8 as six: \u0000.
JSON_BYTES_PER_BYTE = 6


class Bounds(msgspec.Struct, frozen=True):
    """The most that one upstream request may hold; bytes None is no limit."""

    inputs: int = DEFAULT_BATCH_INPUTS
    tokens: int = DEFAULT_BATCH_TOKENS
    bytes: int | None = None


class Slice(msgspec.Struct, frozen=True):
    """Some consecutive inputs of one call; start is the index of the first.

    tokens: an upper bound, or what the model will count where that is exact. bytes: at most, in JSON; 0
    where nothing bounds them.
    """

    start: int
    work: Work
    inputs: int
    tokens: int
    bytes: int = 0
    exact: bool = False


def bounds_of(told: Capabilities, batch_inputs: int | None = None, batch_tokens: int | None = None) -> Bounds:
    """What a replica says, made tighter by the config, or the defaults."""
    return Bounds(
        _tightest(told.batch_inputs, batch_inputs) or DEFAULT_BATCH_INPUTS,
        _tightest(told.batch_tokens, batch_tokens) or DEFAULT_BATCH_TOKENS,
        told.batch_bytes,
    )


def tightest(bounds: Sequence[Bounds]) -> Bounds:
    """What every one of several replicas takes."""
    sizes = [one.bytes for one in bounds if one.bytes is not None]
    return Bounds(
        min(one.inputs for one in bounds),
        min(one.tokens for one in bounds),
        min(sizes) if sizes else None,
    )


def token_bounds(
    work: Work, max_input_tokens: int | None, prompt: str = "", *, pair_overhead: int = 0
) -> list[int]:
    """The most tokens each input can be: no tokenizer makes more of a text than its UTF-8 bytes.

    pair_overhead: what a reranker adds to each pair.
    """
    extra = len(prompt.encode())
    if isinstance(work, Rerank):
        extra += len(work.query.encode())
    bounds = [_most(one) + extra for one in inputs_of(work)]
    if max_input_tokens is not None:
        bounds = [min(b, max_input_tokens) for b in bounds]
    if not isinstance(work, Rerank | Score):
        return bounds
    return [b + pair_overhead for b in bounds]


def _most(given: WorkInput) -> int:
    if isinstance(given, str):
        return token_upper_bound(given)
    # Ids are tokens already, and are turned back for nothing.
    return sum(token_upper_bound(part) for part in given if isinstance(part, str))


def cut(work: Work, tokens: Sequence[int], bounds: Bounds, *, exact: bool = False) -> list[Slice]:
    """Consecutive slices within the bounds; an input that alone exceeds them travels alone.

    tokens: what each input counts against the bound; exact: as the model will count it.
    """
    room = _bytes_for_inputs(work, bounds)
    sizes = _wire_sizes(work, room)
    if len(tokens) == 1:
        return [Slice(0, work, 1, tokens[0], sizes[0], exact)]
    starts = [0]
    used_tokens = used_bytes = 0
    for index, (count, size) in enumerate(zip(tokens, sizes, strict=True)):
        full = (
            index - starts[-1] >= bounds.inputs
            or used_tokens + count > bounds.tokens
            or (room is not None and used_bytes + size > room)
        )
        if full and index > starts[-1]:
            starts.append(index)
            used_tokens = used_bytes = 0
        used_tokens += count
        used_bytes += size
    ends = [*starts, len(tokens)]
    if len(starts) == 1:
        return [Slice(0, work, len(tokens), used_tokens, used_bytes, exact)]
    return [
        Slice(a, _part(work, a, b), b - a, sum(tokens[a:b]), sum(sizes[a:b]), exact)
        for a, b in pairwise(ends)
    ]


def join(slices: Sequence[Slice], replies: Sequence[Reply]) -> Reply:
    """One reply from the replies of all slices, in the caller's order.

    Raises: ReplicaFailed where replicas of one upstream gave vectors of different widths.
    """
    if len(replies) == 1:
        return replies[0]
    tokens = sum(reply.tokens for reply in replies)
    truncated = _joined_truncated(slices, replies)
    match replies[0]:
        case EmbedReply():
            parts = [one.vectors for one in replies if isinstance(one, EmbedReply)]
            return EmbedReply(_stacked(parts), tokens, truncated)
        case EncodeReply():
            return _joined_encoded(
                [one for one in replies if isinstance(one, EncodeReply)], tokens, truncated
            )
        case RerankReply() | ClassifyReply():
            return _joined_scores(replies, tokens, truncated)
        case TokenizeReply() | DetokenizeReply():
            return _joined_lists(replies)


def _stacked(parts: Sequence[Vectors]) -> Vectors:
    if len({part.shape[1] for part in parts}) > 1:
        raise ReplicaFailed("the replicas of this model give vectors of different widths")
    return np.concatenate(parts)


def _joined_scores(replies: Sequence[Reply], tokens: int, truncated: tuple[int, ...] | None) -> Reply:
    scores = np.concatenate([one.scores for one in replies if isinstance(one, RerankReply | ClassifyReply)])
    if isinstance(replies[0], RerankReply):
        return RerankReply(scores, tokens, truncated)
    labels = {one.labels for one in replies if isinstance(one, ClassifyReply)}
    if len(labels) > 1:
        raise ReplicaFailed("the replicas of this model give different labels")
    return ClassifyReply(labels.pop(), scores, tokens, truncated)


def _joined_lists(replies: Sequence[Reply]) -> Reply:
    if isinstance(replies[0], TokenizeReply):
        lists = [one.inputs for one in replies if isinstance(one, TokenizeReply)]
        return TokenizeReply(tuple(tokens for part in lists for tokens in part))
    texts = [one.texts for one in replies if isinstance(one, DetokenizeReply)]
    return DetokenizeReply(tuple(text for part in texts for text in part))


def _joined_encoded(
    replies: Sequence[EncodeReply], tokens: int, truncated: tuple[int, ...] | None
) -> EncodeReply:
    dense = [one.dense for one in replies if one.dense is not None]
    return EncodeReply(
        tokens,
        _stacked(dense) if dense else None,
        _chained([one.sparse for one in replies]),
        _chained([one.multivector for one in replies]),
        _chained([one.token_vectors for one in replies]),
        truncated,
    )


def _chained(parts: Sequence[tuple[Part, ...] | None]) -> tuple[Part, ...] | None:
    """What every slice gave, one after the other; None where it was not asked for."""
    given = [part for part in parts if part is not None]
    return tuple(one for part in given for one in part) if given else None


def _tightest(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


def _bytes_for_inputs(work: Work, bounds: Bounds) -> int | None:
    """What a body has left for inputs: a query travels with each slice."""
    if bounds.bytes is None or not isinstance(work, Rerank):
        return bounds.bytes
    return bounds.bytes - len(msgspec.json.encode(work.query))


def _wire_sizes(work: Work, room: int | None) -> Sequence[int]:
    """Most bytes of each input in a JSON body, with its comma; zeros where nothing bounds them.

    Counted exactly only where the bound could be reached.
    """
    texts = inputs_of(work)
    if room is None:
        return [0] * len(texts)
    most = [_most_bytes(one) for one in texts]
    if sum(most) <= room:
        return most
    return [len(msgspec.json.encode(text)) + 1 for text in texts]


def _most_bytes(given: WorkInput) -> int:
    if isinstance(given, str):
        return len(given.encode()) * JSON_BYTES_PER_BYTE + 3
    return len(msgspec.json.encode(given)) + 1


def _part(work: Work, start: int, end: int) -> Work:
    match work:
        case Rerank():
            return msgspec.structs.replace(work, documents=work.documents[start:end])
        case Score():
            return msgspec.structs.replace(work, pairs=work.pairs[start:end])
        case Embed() | Encode() | Classify() | Tokenize() | Detokenize():
            return msgspec.structs.replace(work, inputs=work.inputs[start:end])


def _joined_truncated(slices: Sequence[Slice], replies: Sequence[Reply]) -> tuple[int, ...] | None:
    joined: list[int] = []
    for piece, reply in zip(slices, replies, strict=True):
        if reply.truncated is None:
            return None
        joined.extend(piece.start + index for index in reply.truncated)
    return tuple(joined)
