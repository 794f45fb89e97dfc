"""Attention over concatenated sequences without padding: the one function that every packed model runs.

Rule: a sequence attends to no other, so that its vector does not depend on its batch, but for the rounding of
sums.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache, lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from backends.torch.networks.blocks import Piece, Visibility, cut_blocks, cutting_of_pass, group_runs, keys_of

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
