"""Cutting of concatenated sequences into pieces, each for one call of the attention kernel.

Neighbors of equal lengths are a run: a batch of the kernel. Short neighbors of different lengths are a block:
one long sequence for the kernel, with a mask in which each sequence sees only itself. That multiplies more,
in fewer calls.

The kernel computes the exponents of a row in vectors, and the rest one by one: 63 keys take twice as long as
64. Therefore a piece may have spare keys, those that follow it in memory, which its mask hides.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache, partial
from itertools import groupby, pairwise
from threading import local
from typing import NamedTuple

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
