"""Which slices may travel together in one upstream request, as one piece of work, and whose part of the
reply is whose. Pure.

Invariant: `split_reply` gives each slice the answers of its own inputs, in order, and the tokens of the parts
add up to those of the reply.
"""

from collections.abc import Sequence

import msgspec

from backends.contract import Embed, EmbedReply, Reply
from gateway.batching.slices import Bounds, Slice


class Load(msgspec.Struct, frozen=True):
    """How much some slices are together; bytes is an upper bound of their size in JSON."""

    inputs: int = 0
    tokens: int = 0
    bytes: int = 0

    def plus(self, piece: Slice) -> "Load":
        """With one slice more."""
        return Load(self.inputs + piece.inputs, self.tokens + piece.tokens, self.bytes + piece.bytes)

    def within(self, bounds: Bounds) -> bool:
        """Whether one upstream request may hold it."""
        fits = bounds.bytes is None or self.bytes <= bounds.bytes
        return self.inputs <= bounds.inputs and self.tokens <= bounds.tokens and fits


def alike(one: Slice, other: Slice) -> bool:
    """Whether two slices could be one piece of work: embeddings with equal options."""
    a, b = one.work, other.work
    return (
        isinstance(a, Embed)
        and isinstance(b, Embed)
        and a.normalize == b.normalize
        and a.truncate is b.truncate
        and a.dimensions == b.dimensions
        and a.prompt_name == b.prompt_name
    )


def joined(pieces: Sequence[Slice]) -> Slice:
    """Slices that are alike as one, their inputs one after the other."""
    if len(pieces) == 1:
        return pieces[0]
    inputs: list[str] = []
    for piece in pieces:
        assert isinstance(piece.work, Embed)
        inputs.extend(piece.work.inputs)
    work = msgspec.structs.replace(pieces[0].work, inputs=tuple(inputs))
    return Slice(0, work, len(inputs), sum(piece.tokens for piece in pieces))


def split_reply(pieces: Sequence[Slice], reply: Reply) -> list[Reply]:
    """Each slice's own reply."""
    if len(pieces) == 1:
        return [reply]
    assert isinstance(reply, EmbedReply)
    replies: list[Reply] = []
    shares = _token_shares(pieces, reply)
    start = 0
    for piece, tokens in zip(pieces, shares, strict=True):
        end = start + piece.inputs
        truncated = reply.truncated
        if truncated is not None:
            truncated = tuple(index - start for index in truncated if start <= index < end)
        each = None if reply.input_tokens is None else reply.input_tokens[start:end]
        # A view: rows of one array, which no caller changes.
        replies.append(EmbedReply(reply.vectors[start:end], tokens, truncated, each))
        start = end
    return replies


def _token_shares(pieces: Sequence[Slice], reply: EmbedReply) -> list[int]:
    """Tokens of each slice: as the replica told of each input, as counted here, or in proportion.

    In proportion only where all slices are one tenant's, so that its sum is right whatever the parts.
    """
    if reply.input_tokens is not None:
        counts = iter(reply.input_tokens)
        return [sum(next(counts) for _ in range(piece.inputs)) for piece in pieces]
    if all(piece.exact for piece in pieces) and reply.tokens == sum(piece.tokens for piece in pieces):
        return [piece.tokens for piece in pieces]
    # One at least, so that slices that count nothing can share what the replica counted.
    weights = [max(1, piece.tokens) for piece in pieces]
    total, shares, seen, given = sum(weights), [], 0, 0
    for weight in weights:
        seen += weight
        upto = reply.tokens * seen // total
        shares.append(upto - given)
        given = upto
    return shares
