"""Cutting of concatenated sequences into pieces, each for one call of the attention kernel.

Neighbors of equal lengths are a run: a batch of the kernel. Short neighbors of different lengths are a block:
one long sequence for the kernel, with a mask in which each sequence sees only itself. That multiplies more,
in fewer calls.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache, partial
from itertools import groupby, pairwise
from threading import local
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from backends.torch.measuring import fastest

# Bounds of a block's tokens of which the fastest is found by measuring; 0 is without blocks.
BLOCK_TOKENS = (0, 64, 128)
# Sequences, heads and components with which blocks are measured: 0.1 s in all on a
# processor with AVX2.
PROBE_LENGTHS = (94, 71, 61, 45, 41, 36, 33, 21, 19, 16, 11, 10)
PROBE_HEADS, PROBE_DIM = 12, 32
# Cuts that are kept for the next layers and for like batches; each has 0.5 MB of masks for 1,024 tokens.
KEPT_CUTS = 16
# Of each thread that computes: whether the network of its pass has no blocks.
_own = local()


class Visibility(NamedTuple):
    """Keys of its sequence that a token sees: only earlier ones, only near ones; 0 is any distance."""

    causal: bool = False
    window: int = 0


class Piece(NamedTuple):
    """Neighboring sequences that one kernel call computes.

    mask: (length, length), added to the scores of a block; a block counts as one sequence.
    """

    length: int
    key_length: int
    sequences: int
    mask: Tensor | None = None


def group_runs(starts: Sequence[int], key_starts: Sequence[int]) -> list[Piece]:
    """Group neighbors of equal lengths, in order. starts, key_starts: start of each sequence, and the end."""
    pairs = zip(pairwise(starts), pairwise(key_starts), strict=True)
    lengths = ((end - start, key_end - key_start) for (start, end), (key_start, key_end) in pairs)
    return [Piece(*both, sum(1 for _ in equals)) for both, equals in groupby(lengths)]


@lru_cache(KEPT_CUTS)
def cut_blocks(
    starts: tuple[int, ...], block_tokens: int, dtype: torch.dtype, visibility: Visibility
) -> tuple[Piece, ...]:
    """Cut sequences into runs and blocks, in order. block_tokens: most tokens of a block.

    Each layer of a pass asks for the same cut.
    """
    groups = _groups(group_runs(starts, starts), block_tokens)
    return tuple(group[0] if len(group) == 1 else _block(group, dtype, visibility) for group in groups)


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
def _block(runs: Sequence[Piece], dtype: torch.dtype, visibility: Visibility) -> Piece:
    """Return one piece for all sequences of some runs."""
    lengths = torch.tensor([run.length for run in runs for _ in range(run.sequences)])
    owner = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    is_visible = owner == owner[:, None]
    ahead = torch.arange(len(owner)) - torch.arange(len(owner))[:, None]
    if visibility.causal:
        is_visible &= ahead <= 0
    if visibility.window:
        is_visible &= ahead.abs() < visibility.window
    mask = torch.zeros(is_visible.shape, dtype=dtype).masked_fill(~is_visible, -math.inf)
    return Piece(len(owner), len(owner), 1, mask)


def compute_without_blocks(network: nn.Module) -> None:
    """Have a network compute each sequence by itself.

    A block adds in another order. Layers that round activations to 8 bits make a difference of 0.0003 in the
    cosine of that.
    """
    network.register_forward_pre_hook(lambda *_: setattr(_own, "is_without_blocks", True))
    network.register_forward_hook(lambda *_: setattr(_own, "is_without_blocks", False), always_call=True)


def most_block_tokens(dtype: torch.dtype) -> int:
    """Return the most tokens of a block for the network that this thread runs; 0 is without blocks."""
    return 0 if getattr(_own, "is_without_blocks", False) else fastest_block(dtype)


@cache
def fastest_block(dtype: torch.dtype) -> int:
    """Return the bound of a block's tokens that is fastest on this processor, measured once per process."""
    starts = [0]
    for length in PROBE_LENGTHS:
        starts.append(starts[-1] + length)
    qkv = torch.randn(starts[-1], 3, PROBE_HEADS, PROBE_DIM).to(dtype)
    contenders: dict[int, Callable[[], object]] = {}
    for tokens in BLOCK_TOKENS:
        pieces = cut_blocks(tuple(starts), tokens, dtype, Visibility())
        contenders[tokens] = partial(_attend_all, qkv, pieces)
    return fastest(contenders)


def _attend_all(qkv: Tensor, pieces: Sequence[Piece]) -> None:
    parts = qkv.split([piece.sequences * piece.length for piece in pieces])
    for piece, part in zip(pieces, parts, strict=True):
        batch = part.view(piece.sequences, piece.length, *part.shape[1:])
        q, k, v = (tensor.transpose(1, 2) for tensor in batch.unbind(2))
        scaled_dot_product_attention(q, k, v, attn_mask=piece.mask)
