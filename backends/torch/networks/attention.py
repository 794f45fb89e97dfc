"""Attention over concatenated sequences without padding: the one function that every packed model runs.

Rule: a sequence attends to no other, so that its vector does not depend on its batch, but for the rounding
of sums.

Sequences are cut into pieces, each for one call of the attention kernel. Neighbors of equal lengths are a
run: a batch of the kernel. Short neighbors of different lengths are a block: one long sequence for the
kernel, with a mask in which each sequence sees only itself. That multiplies more, in fewer calls. The kernel
computes the exponents of a row in vectors, and the rest one by one: 63 keys take twice as long as 64.
Therefore a piece may have spare keys, those that follow it in memory, which its mask hides.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, lru_cache, partial
from itertools import accumulate, groupby, pairwise
from threading import local
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from backends.torch.networks.measuring import fastest

# float32 numbers in a vector of AVX-512.
VECTOR = 16
# Above this length, adding the mask costs more than the rest of a vector; so does a rest of few keys.
SPARED_LENGTH_MAX = 512
REST_MIN = 3
# Sequences, heads and components with which blocks are measured: 0.1 s in all on a
# processor with AVX2.
PROBE_LENGTHS = (94, 71, 61, 45, 41, 36, 33, 21, 19, 16, 11, 10)
PROBE_HEADS, PROBE_DIM = 12, 32
# Cuts that are kept for the next layers and for like batches; each has 0.5 MB of masks for 1,024 tokens.
KEPT_CUTS = 16
# Of each thread that computes: whether the network of its pass has no blocks.
_own = local()


class Cutting(NamedTuple):
    """Bound of a block's tokens, 0 without blocks, and the multiple to which spare keys fill up."""

    block_tokens: int = 0
    key_multiple: int = 1

    def spare_keys(self, length: int) -> int:
        """Return the number of spare keys of so many keys."""
        rest = length % self.key_multiple
        return self.key_multiple - rest if rest >= REST_MIN and length < SPARED_LENGTH_MAX else 0


# The fastest is found by measuring.
CUTTINGS = (
    Cutting(),
    Cutting(0, VECTOR),
    *(Cutting(most, vector) for most in (64, 128) for vector in (1, VECTOR)),
)


class Visibility(NamedTuple):
    """Keys of its sequence that a token sees: only earlier ones, only near ones; 0 is any distance."""

    causal: bool = False
    window: int = 0


class Piece(NamedTuple):
    """Neighboring sequences that one kernel call computes.

    spare_keys: number of hidden keys behind those of each sequence. mask: (length, key_length + spare_keys)
    of a block, (1, key_length + spare_keys) of a run with hidden keys, none of a causal run; it is added to
    the scores. A block is one sequence.
    """

    length: int
    key_length: int
    sequences: int
    mask: Tensor | None = None
    spare_keys: int = 0

    @property
    def is_single(self) -> bool:
        """True for one sequence, whose tokens all see the same keys."""
        return self.sequences == 1 and (self.mask is None or len(self.mask) == 1)


def group_runs(starts: Sequence[int], key_starts: Sequence[int]) -> list[Piece]:
    """Group neighbors of equal lengths, in order. starts, key_starts: start of each sequence, and the end."""
    pairs = zip(pairwise(starts), pairwise(key_starts), strict=True)
    lengths = ((end - start, key_end - key_start) for (start, end), (key_start, key_end) in pairs)
    return [Piece(*both, sum(1 for _ in equals)) for both, equals in groupby(lengths)]


@lru_cache(KEPT_CUTS)
def cut_blocks(
    starts: tuple[int, ...], cutting: Cutting, dtype: torch.dtype, visibility: Visibility
) -> tuple[Piece, ...]:
    """Cut sequences into runs and blocks, in order.

    Each layer of a pass asks for the same cut.
    """
    groups = _groups(group_runs(starts, starts), cutting.block_tokens)
    return tuple(
        _run(group[0], cutting, dtype, visibility)
        if len(group) == 1
        else _block(group, cutting, dtype, visibility)
        for group in groups
    )


def _groups(runs: Sequence[Piece], block_tokens: int) -> Iterator[list[Piece]]:
    """Yield neighboring runs that share a kernel call."""
    group: list[Piece] = []
    tokens = 0
    for run in runs:
        run_tokens = run.length * run.sequences
        if group and tokens + run_tokens > block_tokens:
            yield group
            group, tokens = [], 0
        group.append(run)
        tokens += run_tokens
    yield group


@torch.inference_mode()
def _run(run: Piece, cutting: Cutting, dtype: torch.dtype, visibility: Visibility) -> Piece:
    """Return a run with spare keys, where it is faster and no window hides keys.

    Those of a causal run are hidden with all keys after a token, without a mask of its own.
    """
    spare = 0 if visibility.window else cutting.spare_keys(run.length)
    if not spare or visibility.causal:
        return run._replace(spare_keys=spare)
    row = torch.zeros(1, run.length + spare, dtype=dtype)
    row[:, run.length :] = -math.inf
    return run._replace(mask=row, spare_keys=spare)


@torch.inference_mode()
def _block(runs: Sequence[Piece], cutting: Cutting, dtype: torch.dtype, visibility: Visibility) -> Piece:
    """Return one piece for all sequences of some runs."""
    lengths = torch.tensor([run.length for run in runs for _ in range(run.sequences)])
    owner = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    is_visible = owner == owner[:, None]
    ahead = torch.arange(len(owner)) - torch.arange(len(owner))[:, None]
    if visibility.causal:
        is_visible &= ahead <= 0
    if visibility.window:
        is_visible &= ahead.abs() < visibility.window
    spare = cutting.spare_keys(len(owner))
    mask = torch.zeros(is_visible.shape, dtype=dtype).masked_fill(~is_visible, -math.inf)
    return Piece(len(owner), len(owner), 1, pad(mask, (0, spare), value=-math.inf), spare)


def keys_of(tensor: Tensor, piece: Piece, start: int) -> Tensor:
    """Return (sequences, key_length + spare_keys, ...) of a piece.

    tensor: (tokens, ...), of which the piece begins at `start`. Only the last pieces are copied.
    """
    own = piece.sequences * piece.key_length
    if start + own + piece.spare_keys <= len(tensor):
        windows = tensor[start : start + own + piece.spare_keys]
        return windows.unfold(0, piece.key_length + piece.spare_keys, piece.key_length).movedim(-1, 1)
    parts = tensor[start : start + own].unflatten(0, (piece.sequences, -1))
    return pad(parts, (0, 0) * (tensor.dim() - 1) + (0, piece.spare_keys))


def compute_without_blocks(network: nn.Module) -> None:
    """Have a network compute each sequence by itself.

    A block adds in another order. Layers that round activations to 8 bits make a difference of 0.0003 in the
    cosine of that.
    """
    network.register_forward_pre_hook(lambda *_: setattr(_own, "is_without_blocks", True))
    network.register_forward_hook(lambda *_: setattr(_own, "is_without_blocks", False), always_call=True)


def cutting_of_pass(dtype: torch.dtype) -> Cutting:
    """Return how the pass that this thread runs is cut."""
    found = fastest_cutting(dtype)
    return found._replace(block_tokens=0) if getattr(_own, "is_without_blocks", False) else found


@cache
def fastest_cutting(dtype: torch.dtype) -> Cutting:
    """Return the cutting that is fastest on this processor, measured once per process."""
    starts = [0]
    for length in PROBE_LENGTHS:
        starts.append(starts[-1] + length)
    qkv = torch.randn(starts[-1], 3, PROBE_HEADS, PROBE_DIM).to(dtype)
    contenders: dict[Cutting, Callable[[], object]] = {}
    for cutting in CUTTINGS:
        pieces = cut_blocks(tuple(starts), cutting, dtype, Visibility())
        contenders[cutting] = partial(_attend_all, qkv, pieces)
    return fastest(contenders)


def _attend_all(qkv: Tensor, pieces: Sequence[Piece]) -> None:
    start = 0
    for piece in pieces:
        q, k, v = (tensor.transpose(1, 2) for tensor in keys_of(qkv, piece, start).unbind(2))
        scaled_dot_product_attention(q[:, :, : piece.length], k, v, attn_mask=piece.mask)
        start += piece.sequences * piece.length


# Queries of a causal sequence that are computed together, and the length above which one call is faster.
PART, PARTED_LENGTH_MAX = 256, 1024
# Masks of causal sequences that are kept for the next layers, of 2 MB at most.
KEPT_MASKS = 16
HALF = (torch.float16, torch.bfloat16)
CPU_CAPABILITIES = torch.cpu.get_capabilities()
# Number formats that this processor's matrix units multiply.
HAS_MATRIX_UNIT = {
    torch.bfloat16: CPU_CAPABILITIES.get("amx_bf16") or CPU_CAPABILITIES.get("sve_bf16"),
    torch.float16: CPU_CAPABILITIES.get("amx_fp16"),
}


class AttentionOptions(NamedTuple):
    """Scale of the scores, causality, and the distance below which a key is visible; 0 is any distance."""

    scale: float
    causal: bool = False
    window: int = 0


# More than five parameters: an operator of torch takes tensors and scalars, no structs.
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    key_starts: Tensor,
    longest: int,
    scale: float,
    causal: bool,  # noqa: FBT001 - an operator of torch takes no keywords
    window: int,
) -> Tensor:
    """Compute attention of q (tokens, heads, dim) to k and v (attended tokens, key heads, dim).

    Returns the shape of q. starts, key_starts: start of each sequence in q, and in k and v, which hold the
    first tokens of each sequence. window: keys at a smaller distance are visible; 0 is any distance.
    """
    if q.is_cuda and q.dtype in HALF:
        reach = window - 1
        shared: dict[str, Any] = {}
        varlen_attn, takes_shared_keys = _attention_of_gpu()
        if q.shape[1] != k.shape[1]:
            if takes_shared_keys:
                shared["enable_gqa"] = True
            else:
                k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for part in (k, v))
        out = varlen_attn(
            q,
            k,
            v,
            starts,
            key_starts,
            longest,
            longest,
            scale=scale,
            window_size=(reach, 0 if causal else reach),
            **shared,
        )
        assert isinstance(out, Tensor)
        return out
    options = AttentionOptions(scale, causal, window)
    pieces = _pieces(q, starts.tolist(), key_starts.tolist(), options)
    tokens = _tokens(pieces)
    if len(pieces) == 1 and tokens[0] == len(q):
        # The copy into memory for several pieces would be a tenth of a short text's attention.
        parts = q.unflatten(0, (pieces[0].sequences, -1)), keys_of(k, pieces[0], 0), keys_of(v, pieces[0], 0)
        wide_q, wide_k, wide_v = (part.to(_fastest_dtype(q)) for part in parts)
        return _attend_piece(wide_q, wide_k, wide_v, pieces[0].mask, options).to(q.dtype)
    key_starts_of_pieces = accumulate((piece.sequences * piece.key_length for piece in pieces), initial=0)
    qkv_of_pieces = (
        (part.unflatten(0, (piece.sequences, -1)), keys_of(k, piece, start), keys_of(v, piece, start))
        for piece, part, start in zip(pieces, _split(q, tokens), key_starts_of_pieces, strict=False)
    )
    return _compute_pieces(q.new_empty(q.shape), pieces, qkv_of_pieces, options)


@cache
def _attention_of_gpu() -> tuple[Callable[..., Any], bool]:
    """Return the kernel, and True if its queries of several heads can share keys: since PyTorch 2.12.

    It is imported late, because its import takes as long as that of torch.
    """
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, "enable_gqa" in inspect.signature(varlen_attn).parameters


def attend_joined(joined: Tensor, starts: Tensor, longest: int, scale: float) -> Tensor:
    """Compute attention of all tokens to their whole sequence, with query, key and value in one tensor.

    joined: (tokens, 3, heads, dim). Returns (tokens, heads, dim).
    """
    if joined.device.type != "cpu":
        q, k, v = joined.unbind(1)
        return attend(q, k, v, starts, starts, longest, scale, causal=False, window=0)
    options, sequence_starts = AttentionOptions(scale), starts.tolist()
    pieces = _pieces(joined, sequence_starts, sequence_starts, options)
    dtype = _fastest_dtype(joined)
    if len(pieces) == 1 and pieces[0].is_single:
        return _attend_alone(joined.to(dtype), pieces[0], options).to(joined.dtype)
    starts_of_pieces = accumulate(_tokens(pieces), initial=0)
    qkv_of_pieces = (
        _query_key_value(keys_of(joined, piece, start).to(dtype), piece)
        for piece, start in zip(pieces, starts_of_pieces, strict=False)
    )
    return _compute_pieces(
        joined.new_empty(joined.shape[0], *joined.shape[2:]), pieces, qkv_of_pieces, options
    )


def _attend_alone(joined: Tensor, piece: Piece, options: AttentionOptions) -> Tensor:
    """Compute attention of a pass of one sequence without a copy of its output.

    Spare tokens behind it are queries too, which costs less than to leave them out.
    """
    keys = piece.key_length + piece.spare_keys
    q, missing = joined[:, 0], keys - len(joined)
    if missing > 0:
        joined = pad(joined, (0, 0, 0, 0, 0, 0, 0, missing))
    k, v = joined[:keys, 1], joined[:keys, 2]
    return _attend_piece(q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), piece.mask, options)


def _query_key_value(joined: Tensor, piece: Piece) -> tuple[Tensor, ...]:
    """Split (sequences, keys, 3, heads, dim) of a piece; spare keys have no queries."""
    q, k, v = joined.unbind(2)
    return q[:, : piece.length], k, v


def _pieces(
    tensor: Tensor, starts: list[int], key_starts: list[int], options: AttentionOptions
) -> Sequence[Piece]:
    """Cut the tokens into pieces, each for one kernel call. starts, key_starts: as in `attend`."""
    if tensor.device.type != "cpu" or starts != key_starts:
        return group_runs(starts, key_starts)
    dtype = _fastest_dtype(tensor)
    visibility = Visibility(options.causal, options.window)
    return cut_blocks(tuple(starts), cutting_of_pass(dtype), dtype, visibility)


def _tokens(pieces: Sequence[Piece]) -> list[int]:
    return [piece.sequences * piece.length for piece in pieces]


def _split(tensor: Tensor, tokens: Sequence[int]) -> Sequence[Tensor]:
    """Split tokens by piece; spare tokens behind all pieces are a part of their own."""
    return tensor.split([*tokens, len(tensor) - sum(tokens)])


def _compute_pieces(
    out: Tensor,
    pieces: Sequence[Piece],
    qkv_of_pieces: Iterable[tuple[Tensor, ...]],
    options: AttentionOptions,
) -> Tensor:
    """Fill `out` piece by piece: the tensors of one piece stay in the processor's caches.

    Spare tokens behind all pieces get zeros.
    """
    dtype = _fastest_dtype(out)
    *parts, spare = _split(out, _tokens(pieces))
    spare.zero_()
    for piece, part, qkv in zip(pieces, parts, qkv_of_pieces, strict=True):
        q, k, v = (tensor.to(dtype) for tensor in qkv)
        part.copy_(_attend_piece(q, k, v, piece.mask, options))
    return out


def _fastest_dtype(tensor: Tensor) -> torch.dtype:
    """Return the number format in which attention is fastest.

    Without matrix units, bfloat16 gains nothing in products as small as those of a short sequence.
    """
    is_fast = tensor.device.type != "cpu" or HAS_MATRIX_UNIT.get(tensor.dtype)
    return tensor.dtype if is_fast else torch.float32


def _attend_piece(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: AttentionOptions) -> Tensor:
    """Compute attention of one piece. q, k, v: (sequences, length, heads, dim).

    Returns (sequences · length of q, heads, dim).
    """
    length = q.shape[1]
    if mask is None and 0 < options.window < length:
        mask = _band(length, k.shape[1], options, q.device)
    if options.causal and mask is None and _in_parts(q, k):
        return _attend_in_parts(q, k, v, options)
    out = scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=options.causal and mask is None,
        scale=options.scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2).flatten(0, 1)


def _in_parts(q: Tensor, k: Tensor) -> bool:
    """Return whether a causal piece is computed in parts: if it has spare keys, or is faster so."""
    length, keys = q.shape[1], k.shape[1]
    return q.device.type == "cpu" and (
        keys > length or (keys == length and PART < length <= PARTED_LENGTH_MAX)
    )


def _attend_in_parts(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
    """Compute causal attention of one piece, with only those keys for a part of the queries that it sees.

    The kernel computes all keys and drops half of them.
    """
    length = q.shape[1]
    hidden = _hidden_keys(length, k.shape[1], q.dtype)
    out = q.new_empty(q.shape)
    for start in range(0, length, PART):
        end = min(start + PART, length)
        keys = end if end < length else k.shape[1]
        part = scaled_dot_product_attention(
            q[:, start:end].transpose(1, 2),
            k[:, :keys].transpose(1, 2),
            v[:, :keys].transpose(1, 2),
            attn_mask=hidden[start:end, :keys],
            scale=options.scale,
            enable_gqa=q.shape[2] != k.shape[2],
        )
        out[:, start:end] = part.transpose(1, 2)
    return out.flatten(0, 1)


@lru_cache(KEPT_MASKS)
@torch.inference_mode()
def _hidden_keys(length: int, keys: int, dtype: torch.dtype) -> Tensor:
    """Return (length, keys), added to scores: -inf for keys after a token."""
    return torch.full((length, keys), -math.inf, dtype=dtype).triu(1)


def _band(length: int, keys: int, options: AttentionOptions, device: torch.device) -> Tensor:
    """Return (length, keys) bool, True for each key that a token attends to."""
    ahead = torch.arange(keys, device=device) - torch.arange(length, device=device)[:, None]
    return (ahead.abs() < options.window) & (ahead <= 0 if options.causal else True)


def _opaque(name: str, function: Callable[..., Tensor], fake: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Register a function as one operator for torch.compile, so that its graph contains no lengths."""
    operator = torch.library.custom_op(f"gateway::{name}", function, mutates_args=())
    operator.register_fake(fake)

    def run(*arguments: Any) -> Tensor:
        return operator(*arguments) if torch.compiler.is_compiling() else function(*arguments)

    return run


compute = _opaque("packed_attention", attend, lambda q, *_: q.new_empty(q.shape))
compute_joined = _opaque(
    "joined_attention", attend_joined, lambda joined, *_: joined.new_empty(joined.shape[0], *joined.shape[2:])
)
