"""Slices: cuts a call into parts that fit into one upstream request, and joins their replies. Pure.

Invariant: every input is in exactly one slice, slices are consecutive, and `join` returns each input's own
result in the caller's order.
"""

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from backends.contract import Capabilities, Reply, Work

# Bounds of one upstream request if neither the replica nor the configuration sets them.
DEFAULT_REQUEST_INPUTS = 32
DEFAULT_REQUEST_TOKENS = 16384


class Bounds(msgspec.Struct, frozen=True):
    """Bounds of one upstream request; bytes None is no limit."""

    inputs: int = DEFAULT_REQUEST_INPUTS
    tokens: int = DEFAULT_REQUEST_TOKENS
    bytes: int | None = None


class Slice(msgspec.Struct, frozen=True):
    """Consecutive inputs of one call. start: index of the first.

    tokens: an upper bound, or the model's own count if exact. bytes: an upper bound of the size in JSON; 0 if
    nothing bounds it. pixels_weight: of its pictures, in tokens.
    """

    start: int
    work: Work
    inputs: int
    tokens: int
    bytes: int = 0
    exact: bool = False
    pixels_weight: int = 0

    @property
    def cost(self) -> int:
        """Tokens that it counts for in queues, in a fair share and in the load of a replica."""
        return max(self.tokens, self.pixels_weight)


class ConfiguredBounds(msgspec.Struct, frozen=True):
    """Bounds of one upstream request in the configuration; None where it sets none."""

    inputs: int | None = None
    tokens: int | None = None
    bytes: int | None = None


NO_BOUNDS = ConfiguredBounds()


def bounds_of(
    capabilities: Capabilities,
    configured: ConfiguredBounds = NO_BOUNDS,
    learned_bytes: int | None = None,
) -> Bounds:
    """Return the bounds of a replica, or the defaults.

    Inputs and tokens are what it reports, tightened by the configuration. No server reports bytes: the
    configuration replaces what its adapter assumes, and a bound learned from refusals tightens both.
    """
    inputs = _smallest(capabilities.request_inputs, configured.inputs) or DEFAULT_REQUEST_INPUTS
    return Bounds(
        # A request with more inputs than the replica has permits would always be refused.
        min(inputs, capabilities.concurrent_inputs or inputs),
        _smallest(capabilities.request_tokens, configured.tokens) or DEFAULT_REQUEST_TOKENS,
        _smallest(configured.bytes or capabilities.request_bytes, learned_bytes),
    )


def tightest(bounds: Sequence[Bounds]) -> Bounds:
    """Return the bounds that each of several replicas accepts."""
    sizes = [bound.bytes for bound in bounds if bound.bytes is not None]
    return Bounds(
        min(bound.inputs for bound in bounds),
        min(bound.tokens for bound in bounds),
        min(sizes) if sizes else None,
    )


def cut(work: Work, tokens: Sequence[int], bounds: Bounds, *, exact: bool = False) -> list[Slice]:
    """Return consecutive slices within the bounds; an input that alone exceeds them is a slice of its own.

    tokens: count of each input against the bound. exact: the counts are the model's own. A conversation is a
    slice of its own.
    """
    # Texts that every part repeats are sent with each slice.
    room = None if bounds.bytes is None else bounds.bytes - work.shared_bytes
    sizes = work.wire_sizes(room)
    weights = work.pixel_weights()
    if len(tokens) == 1:
        starts = [0]
    else:
        costs = [max(pair) for pair in zip(tokens, weights, strict=True)] if weights else tokens
        most_inputs = 1 if work.conversation is not None else bounds.inputs
        starts = _starts(costs, sizes, Bounds(most_inputs, bounds.tokens, room))
    whole = Slice(0, work, len(tokens), 0, exact=exact)
    return _slices(whole, starts, (tokens, sizes, weights))


def _slices(
    whole: Slice, starts: Sequence[int], sizes: tuple[Sequence[int], Sequence[int], Sequence[int]]
) -> list[Slice]:
    """Return consecutive parts of a slice. sizes: tokens, bytes and weight of pixels of each input."""
    tokens, wire_sizes, weights = sizes
    return [
        Slice(
            whole.start + start,
            whole.work if len(starts) == 1 else whole.work.part(start, stop),
            stop - start,
            sum(tokens[start:stop]),
            sum(wire_sizes[start:stop]),
            whole.exact,
            sum(weights[start:stop]),
        )
        for start, stop in pairwise([*starts, whole.inputs])
    ]


def _starts(tokens: Sequence[int], sizes: Sequence[int], bounds: Bounds) -> list[int]:
    """Return the index of the first input of each slice within the bounds."""
    starts = [0]
    used_tokens = used_bytes = 0
    for index, (count, size) in enumerate(zip(tokens, sizes, strict=True)):
        full = (
            index - starts[-1] >= bounds.inputs
            or used_tokens + count > bounds.tokens
            or (bounds.bytes is not None and used_bytes + size > bounds.bytes)
        )
        if full and index > starts[-1]:
            starts.append(index)
            used_tokens = used_bytes = 0
        used_tokens += count
        used_bytes += size
    return starts


def cut_again(piece: Slice, tokens: Sequence[int], bounds: Bounds) -> list[Slice]:
    """Return the parts, two at least, of a slice of several inputs that a replica refused for its size.

    tokens: count of each of its inputs against the bound. bounds: of one upstream request, as known now.
    """
    parts = cut(piece.work, tokens, bounds, exact=piece.exact)
    if len(parts) == 1:
        # Nothing has been learned from the refusal.
        parts = cut(piece.work, tokens, Bounds((piece.inputs + 1) // 2), exact=piece.exact)
    return [msgspec.structs.replace(part, start=piece.start + part.start) for part in parts]


def halves(piece: Slice, tokens: Sequence[int]) -> list[Slice]:
    """Return both halves of a slice of several inputs. tokens: count of each of its inputs."""
    return separated(piece, tokens, (), [0, (piece.inputs + 1) // 2])


def parts_of(piece: Slice, tokens: Sequence[int], parts_max: int) -> list[Slice]:
    """Return at most so many parts of a slice, of like numbers of inputs. tokens: as of `halves`."""
    size = -(-piece.inputs // parts_max)
    return separated(piece, tokens, (), range(0, piece.inputs, size))


def separated(
    piece: Slice, tokens: Sequence[int], places: Sequence[int], starts: Sequence[int] = (0,)
) -> list[Slice]:
    """Return consecutive parts of a slice, in which the inputs at some places are by themselves.

    tokens: count of each of its inputs. starts: of parts, anyway.
    """
    cuts = sorted({*starts, *places, *(place + 1 for place in places)} - {piece.inputs})
    if len(cuts) == 1:
        return [piece]
    sizes = piece.work.wire_sizes(piece.bytes or None)
    return _slices(piece, cuts, (tokens, sizes, piece.work.pixel_weights()))


def join(slices: Sequence[Slice], replies: Sequence[Reply]) -> Reply:
    """Return one reply from the replies of all slices, in the caller's order.

    Raises: ReplicaFailed if replicas of one upstream return vectors of different widths, or other labels.
    """
    if len(replies) == 1:
        return replies[0]
    # All are of one kind, because the slices are parts of one work.
    joined: Reply = type(replies[0]).join(replies, [piece.start for piece in slices])  # type: ignore[arg-type]
    return joined


def _smallest(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)
