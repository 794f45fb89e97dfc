"""Slices: cuts a call into parts that fit into one upstream request, and joins their replies. Pure.

Invariant: every input is in exactly one slice, slices are consecutive, and `join` returns each input's own
result in the caller's order.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

import msgspec
import numpy as np

from backends.contract import (
    Audio,
    Capabilities,
    Classify,
    ClassifyReply,
    Detokenize,
    DetokenizeReply,
    Embed,
    EmbedParts,
    EmbedReply,
    Encode,
    EncodeReply,
    Image,
    Part,
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
from backends.contract.errors import ReplicaFailed
from backends.contract.texts import chat_of, normalized_bytes, token_upper_bound, token_upper_bounds

Output = TypeVar("Output")

# Bounds of one upstream request if neither the replica nor the configuration sets them.
DEFAULT_BATCH_INPUTS = 32
DEFAULT_BATCH_TOKENS = 16384
# JSON escapes some one-byte characters as six bytes: \u0000.
JSON_BYTES_PER_BYTE = 6
# Of Qwen2-VL: 28 x 28. CLIP and SigLIP have a fixed number, usually below the least.
PIXELS_PER_TOKEN = 784
IMAGE_TOKENS_MIN = 256
BYTES_PER_AUDIO_TOKEN = 256
# Reading a picture costs time and memory by its pixels, whatever the network makes of it. So many weigh as
# much as a token in queues and batches: a batch of `DEFAULT_BATCH_TOKENS` has one of the largest pictures.
PIXELS_PER_WEIGHT = 4096
# JSON around a picture or recording.
MEDIA_ENVELOPE = 128


class Bounds(msgspec.Struct, frozen=True):
    """Bounds of one upstream request; bytes None is no limit."""

    inputs: int = DEFAULT_BATCH_INPUTS
    tokens: int = DEFAULT_BATCH_TOKENS
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
    inputs = _smallest(capabilities.batch_inputs, configured.inputs) or DEFAULT_BATCH_INPUTS
    return Bounds(
        # A request with more inputs than the replica has permits would always be refused.
        min(inputs, capabilities.concurrent_inputs or inputs),
        _smallest(capabilities.batch_tokens, configured.tokens) or DEFAULT_BATCH_TOKENS,
        _smallest(configured.bytes or capabilities.batch_bytes, learned_bytes),
    )


def tightest(bounds: Sequence[Bounds]) -> Bounds:
    """Return the bounds that each of several replicas accepts."""
    sizes = [bound.bytes for bound in bounds if bound.bytes is not None]
    return Bounds(
        min(bound.inputs for bound in bounds),
        min(bound.tokens for bound in bounds),
        min(sizes) if sizes else None,
    )


def token_bounds(
    work: Work,
    max_input_tokens: int | None,
    prompt: str = "",
    *,
    pair_overhead: int = 0,
    media_tokens: int | None = None,
) -> list[int]:
    """Return an upper bound of each input's tokens: a text has no more than bytes, however it is normalized.

    pair_overhead: tokens that a reranker adds to each pair. media_tokens: the most of a picture or recording.
    """
    if max_input_tokens is not None and chat_of(work) is not None:
        # How many tokens a template adds to a conversation is only known after it was rendered.
        return [max_input_tokens] * len(inputs_of(work))
    extra = normalized_bytes(prompt) + _instruction_bytes(work)
    if isinstance(work, Rerank):
        extra += normalized_bytes(work.query)
    if isinstance(work, EmbedParts) and media_tokens is not None:
        return [
            sum(_model_bound(part, max_input_tokens, media_tokens) for part in parts) for parts in work.inputs
        ]
    bounds = [bound + extra for bound in _token_bounds(inputs_of(work))]
    # Texts that are only tokenized are never cut.
    # The length of a model of images is that of its texts.
    if max_input_tokens is not None and not isinstance(work, Tokenize | EmbedParts):
        bounds = [min(bound, max_input_tokens) for bound in bounds]
    if not isinstance(work, Rerank | Score):
        return bounds
    return [bound + pair_overhead for bound in bounds]


def _instruction_bytes(work: Work) -> int:
    """Return the bytes of the instruction that each pair carries."""
    instruction = work.instruction if isinstance(work, Rerank | Score) else None
    return normalized_bytes(instruction) if instruction else 0


def _token_bounds(inputs: Sequence[WorkInput]) -> list[int]:
    texts = [work_input for work_input in inputs if isinstance(work_input, str)]
    if len(texts) == len(inputs):
        return token_upper_bounds(texts)
    # Token ids are converted back to text free of charge.
    return [
        token_upper_bound(work_input)
        if isinstance(work_input, str)
        else sum(_part_bound(part) for part in work_input)
        for work_input in inputs
    ]


def _model_bound(part: Part, max_input_tokens: int | None, media_tokens: int) -> int:
    """Return the bound of a part of an input by the lengths of the model."""
    most = max_input_tokens if isinstance(part, str) else media_tokens
    bound = _part_bound(part)
    return bound if most is None else most if isinstance(part, Audio) else min(bound, most)


def _part_bound(part: str | int | Image | Audio) -> int:
    if isinstance(part, str):
        return token_upper_bound(part)
    if isinstance(part, Image):
        # How a network divides a picture is not known here: networks of pages have a token for this square.
        return IMAGE_TOKENS_MIN + part.width * part.height // PIXELS_PER_TOKEN
    return 0 if isinstance(part, int) else len(part.data) // BYTES_PER_AUDIO_TOKEN + 1


def cut(work: Work, tokens: Sequence[int], bounds: Bounds, *, exact: bool = False) -> list[Slice]:
    """Return consecutive slices within the bounds; an input that alone exceeds them is a slice of its own.

    tokens: count of each input against the bound. exact: the counts are the model's own. Inputs that have to
    be computed together are one slice, whatever the bounds. A conversation is a slice of its own.
    """
    room = _bytes_for_inputs(work, bounds)
    sizes = _wire_sizes(work, room)
    if isinstance(work, EmbedParts):
        return _cut_media(work, tokens, bounds, (sizes, room))
    if len(tokens) == 1:
        return [Slice(0, work, 1, tokens[0], sizes[0], exact)]
    if is_indivisible(work):
        # The special tokens, which each count includes, are added once.
        return [Slice(0, work, len(tokens), sum(tokens), sum(sizes))]
    most_inputs = 1 if chat_of(work) is not None else bounds.inputs
    starts = _starts(tokens, sizes, msgspec.structs.replace(bounds, inputs=most_inputs, bytes=room))
    if len(starts) == 1:
        return [Slice(0, work, len(tokens), sum(tokens), sum(sizes), exact)]
    ends = [*starts, len(tokens)]
    return [
        Slice(
            start,
            _part(work, start, end),
            end - start,
            sum(tokens[start:end]),
            sum(sizes[start:end]),
            exact,
        )
        for start, end in pairwise(ends)
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


def _cut_media(
    work: EmbedParts, tokens: Sequence[int], bounds: Bounds, wire: tuple[Sequence[int], int | None]
) -> list[Slice]:
    """Return slices of inputs with pictures, which weigh by their tokens or their pixels, whichever is more.

    wire: bytes of each input, and those that a request has room for.
    """
    sizes, room = wire
    weights = [pixels_weight(parts) for parts in work.inputs]
    costs = [max(count, weight) for count, weight in zip(tokens, weights, strict=True)]
    most_inputs = 1 if chat_of(work) is not None else bounds.inputs
    starts = _starts(costs, sizes, msgspec.structs.replace(bounds, inputs=most_inputs, bytes=room))
    return [
        Slice(
            start,
            work if len(starts) == 1 else _part(work, start, end),
            end - start,
            sum(tokens[start:end]),
            sum(sizes[start:end]),
            pixels_weight=sum(weights[start:end]),
        )
        for start, end in pairwise([*starts, len(tokens)])
    ]


def pixels_weight(parts: Sequence[Part]) -> int:
    """Return the tokens that the pictures of an input weigh by their pixels."""
    return sum(part.width * part.height // PIXELS_PER_WEIGHT for part in parts if isinstance(part, Image))


def is_indivisible(work: Work) -> bool:
    """Return whether the inputs have to be computed together: those of late chunking are one text."""
    return isinstance(work, Embed) and work.late_chunking


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
    if len(cuts) == 1 or is_indivisible(piece.work):
        return [piece]
    sizes = _wire_sizes(piece.work, piece.bytes or None)
    return [
        Slice(
            piece.start + start,
            _part(piece.work, start, end),
            end - start,
            sum(tokens[start:end]),
            sum(sizes[start:end]),
            piece.exact,
        )
        for start, end in pairwise([*cuts, piece.inputs])
    ]


def request_bytes(work: Work) -> int:
    """Return the bytes of a request's inputs in JSON; the query of a rerank is one of them."""
    return _shared_bytes(work) + sum(
        len(msgspec.json.encode(work_input)) + 1 for work_input in inputs_of(work)
    )


def join(slices: Sequence[Slice], replies: Sequence[Reply]) -> Reply:
    """Return one reply from the replies of all slices, in the caller's order.

    Raises: ReplicaFailed if replicas of one upstream return vectors of different widths, or other labels.
    """
    if len(replies) == 1:
        return replies[0]
    tokens = sum(reply.tokens for reply in replies)
    truncated = _joined_truncated(slices, replies)
    match replies[0]:
        case EmbedReply():
            parts = [reply.vectors for reply in replies if isinstance(reply, EmbedReply)]
            counts = [reply.input_tokens for reply in replies if isinstance(reply, EmbedReply)]
            return EmbedReply(_stacked(parts), tokens, truncated, _chained_reports(counts))
        case EncodeReply():
            return _joined_encoded(
                [reply for reply in replies if isinstance(reply, EncodeReply)], tokens, truncated
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
    scores = np.concatenate(
        [reply.scores for reply in replies if isinstance(reply, RerankReply | ClassifyReply)]
    )
    if isinstance(replies[0], RerankReply):
        logits = [reply.logits for reply in replies if isinstance(reply, RerankReply)]
        known = [part for part in logits if part is not None]
        whole = np.concatenate(known) if len(known) == len(replies) else None
        return RerankReply(scores, tokens, truncated, whole)
    labels = {reply.labels for reply in replies if isinstance(reply, ClassifyReply)}
    if len(labels) > 1:
        raise ReplicaFailed("the replicas of this model give different labels")
    return ClassifyReply(labels.pop(), scores, tokens, truncated)


def _joined_lists(replies: Sequence[Reply]) -> Reply:
    if isinstance(replies[0], TokenizeReply):
        lists = [reply.inputs for reply in replies if isinstance(reply, TokenizeReply)]
        return TokenizeReply(tuple(tokens for part in lists for tokens in part))
    texts = [reply.texts for reply in replies if isinstance(reply, DetokenizeReply)]
    return DetokenizeReply(tuple(text for part in texts for text in part))


def _joined_encoded(
    replies: Sequence[EncodeReply], tokens: int, truncated: tuple[int, ...] | None
) -> EncodeReply:
    dense = [reply.dense for reply in replies if reply.dense is not None]
    return EncodeReply(
        tokens,
        _stacked(dense) if dense else None,
        _chained([reply.sparse for reply in replies]),
        _chained([reply.multivector for reply in replies]),
        _chained([reply.token_vectors for reply in replies]),
        truncated,
        grids=_chained_reports([reply.grids for reply in replies]),
    )


def _chained_reports(parts: Sequence[tuple[Output, ...] | None]) -> tuple[Output, ...] | None:
    """Return what all slices report of their inputs, or None if one of them does not report it."""
    return None if any(part is None for part in parts) else _chained(parts)


def _chained(parts: Sequence[tuple[Output, ...] | None]) -> tuple[Output, ...] | None:
    """Return the outputs of all slices one after the other, or None if the kind was not requested."""
    present = [part for part in parts if part is not None]
    return tuple(output for part in present for output in part) if present else None


def _smallest(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


def _bytes_for_inputs(work: Work, bounds: Bounds) -> int | None:
    """Return the bytes that a body has left for inputs; query and instruction are sent with each slice."""
    return None if bounds.bytes is None else bounds.bytes - _shared_bytes(work)


def _shared_bytes(work: Work) -> int:
    """Return the bytes in JSON of what each slice of a work repeats: its query and its instruction."""
    if not isinstance(work, Rerank | Score):
        return 0
    texts = [work.query] if isinstance(work, Rerank) else []
    if work.instruction is not None:
        texts.append(work.instruction)
    return sum(len(msgspec.json.encode(text)) for text in texts)


def _wire_sizes(work: Work, room: int | None) -> Sequence[int]:
    """Return an upper bound of each input's bytes in a JSON body, with its comma; zeros without a bound.

    The bytes are counted exactly only if the bound could be reached.
    """
    inputs = inputs_of(work)
    if room is None:
        return [0] * len(inputs)
    upper_bounds = [_byte_bound(work_input, room) for work_input in inputs]
    if sum(upper_bounds) <= room:
        return upper_bounds
    return upper_bounds if isinstance(work, EmbedParts) else [_json_bytes(item, room) for item in inputs]


def _json_bytes(work_input: WorkInput, room: int) -> int:
    if isinstance(work_input, str) and len(work_input) > room:
        # It has no room, whatever its bytes. Counting them takes 0.1 s for a text of 31 MB.
        return len(work_input)
    return len(msgspec.json.encode(work_input)) + 1


def _byte_bound(work_input: WorkInput, room: int) -> int:
    if isinstance(work_input, str):
        if len(work_input) > room:
            return len(work_input)
        return len(work_input.encode()) * JSON_BYTES_PER_BYTE + 3
    media = [part for part in work_input if isinstance(part, Image | Audio)]
    if media:
        texts = [part for part in work_input if isinstance(part, str)]
        return sum(len(part.data) * 4 // 3 + MEDIA_ENVELOPE for part in media) + sum(
            _byte_bound(text, room) for text in texts
        )
    return len(msgspec.json.encode(work_input)) + 1


def _part(work: Work, start: int, end: int) -> Work:
    match work:
        case Rerank():
            return msgspec.structs.replace(work, documents=work.documents[start:end])
        case Score():
            return msgspec.structs.replace(work, pairs=work.pairs[start:end])
        case Embed(prompt_characters=lengths) | Encode(prompt_characters=lengths) if lengths:
            part = work.inputs[start:end]
            return msgspec.structs.replace(work, inputs=part, prompt_characters=lengths[start:end])
        case EmbedParts():
            return msgspec.structs.replace(work, inputs=work.inputs[start:end])
        case Embed() | Encode() | Classify() | Tokenize() | Detokenize():
            return msgspec.structs.replace(work, inputs=work.inputs[start:end])


def _joined_truncated(slices: Sequence[Slice], replies: Sequence[Reply]) -> tuple[int, ...] | None:
    joined: list[int] = []
    for piece, reply in zip(slices, replies, strict=True):
        if reply.truncated is None:
            return None
        joined.extend(piece.start + index for index in reply.truncated)
    return tuple(joined)
