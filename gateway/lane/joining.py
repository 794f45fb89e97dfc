"""Slices that share one upstream request: the rules for joining them, and the division of the reply. Pure.

Invariant: `split_reply` gives each slice the results of its own inputs, in order, and the tokens of the parts
add up to those of the reply.
"""

from collections.abc import Sequence

import msgspec

from backends.contract import Reply
from gateway.lane.slices import Bounds, Slice


class BatchTotals(msgspec.Struct, frozen=True):
    """Sums over the slices of one batch. bytes: an upper bound of their size in JSON."""

    inputs: int = 0
    tokens: int = 0
    bytes: int = 0

    def plus(self, piece: Slice) -> "BatchTotals":
        """Return the totals with one slice more."""
        return BatchTotals(self.inputs + piece.inputs, self.tokens + piece.tokens, self.bytes + piece.bytes)

    def is_within(self, bounds: Bounds) -> bool:
        """Return whether the batch fits into one upstream request."""
        fits = bounds.bytes is None or self.bytes <= bounds.bytes
        return self.inputs <= bounds.inputs and self.tokens <= bounds.tokens and fits


def join_slices(pieces: Sequence[Slice]) -> Slice:
    """Return joinable slices as one, with their inputs one after the other."""
    if len(pieces) == 1:
        return pieces[0]
    work = pieces[0].work.joined([piece.work for piece in pieces[1:]])
    is_exact = all(piece.exact for piece in pieces)
    return Slice(0, work, len(work.inputs), sum(piece.tokens for piece in pieces), exact=is_exact)


def split_reply(pieces: Sequence[Slice], reply: Reply) -> list[Reply]:
    """Return each slice's own reply."""
    if len(pieces) == 1:
        # The tokens of one input are all that its batch has.
        is_known = pieces[0].inputs > 1 or reply.input_tokens is not None
        return [reply if is_known else reply.with_input_tokens((reply.tokens,))]
    replies: list[Reply] = []
    shares = _token_shares(pieces, reply)
    start = 0
    for piece, tokens in zip(pieces, shares, strict=True):
        end = start + piece.inputs
        replies.append(reply.part(start, end, tokens))
        start = end
    return replies


def has_own_counts(pieces: Sequence[Slice], reply: Reply) -> bool:
    """Return whether the tokens of each slice are known; otherwise their sum is divided by size."""
    return len(pieces) == 1 or reply.input_tokens is not None or are_counted_here(pieces, reply)


def are_counted_here(pieces: Sequence[Slice], reply: Reply) -> bool:
    """Return whether the gateway counted the slices as the replica counted their batch."""
    return all(piece.exact for piece in pieces) and reply.tokens == sum(piece.tokens for piece in pieces)


def _token_shares(pieces: Sequence[Slice], reply: Reply) -> list[int]:
    """Return each slice's tokens: as the replica reports them per input, as counted here, or in proportion.

    In proportion only if all slices belong to one tenant, whose sum is right however the parts are divided.
    """
    if reply.input_tokens is not None:
        counts = iter(reply.input_tokens)
        return [sum(next(counts) for _ in range(piece.inputs)) for piece in pieces]
    if are_counted_here(pieces, reply):
        return [piece.tokens for piece in pieces]
    # At least one each, so that slices without tokens can share the replica's count.
    weights = [max(1, piece.tokens) for piece in pieces]
    total, shares, weight_so_far, tokens_so_far = sum(weights), [], 0, 0
    for weight in weights:
        weight_so_far += weight
        tokens_up_to_here = reply.tokens * weight_so_far // total
        shares.append(tokens_up_to_here - tokens_so_far)
        tokens_so_far = tokens_up_to_here
    return shares
