"""Proof that an encoder of transformers computes the same without padding, and its packed form.

Support of an architecture is not looked up in a list but tested once, when its model is loaded. The attention
is registered with transformers under `PACKED`. A model calls it with query, key and value of all tokens,
(1, heads, tokens, dim), and with `cu_seq_lens_q`, the start of each sequence and the end of the last, as in
FlashAttention. If some tokens are not attended to (a query's fillers), `attended` holds the indices of the
others, and `cu_seq_lens_k` the starts of the sequences among them.
"""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from backends.torch.networks.attention import AttentionOptions, compute
from backends.torch.networks.packing import PackedEncoder
from backends.torch.stock.rows import special_ids

logger = logging.getLogger(__name__)

PACKED = "packed"
# Three lengths with the longest in the middle, so that a mix-up of any two changes the result. Their sum is a
# number of tokens that is rounded up.
PROBE_LENGTHS = (5, 11, 3)
# Tokens of another probe beyond a window, and the most products that it may cost: a second on two cores.
BEYOND_WINDOW = 6
PROBE_PRODUCTS_MAX = 25_000_000_000
# Positions of a table that a usual batch exceeds.
SHORT_TABLE = 1024
# float32 noise stays below 1e-5 of a vector's length; a sequence that attends to its neighbor is far above.
PROBE_TOLERANCE = 1e-3

_seen: ContextVar["list[AttentionOptions] | None"] = ContextVar("_seen", default=None)
_masked: ContextVar["set[int] | None"] = ContextVar("_masked", default=None)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention for a model of transformers; options are `cu_seq_lens_q`, `max_length_q` and its own.

    Returns (1, tokens, heads, dim), and no weights. Raises: NotImplementedError for features that only some
    models use; such a model takes the padded path.
    """
    if attention_mask is not None or options.get("softcap") or options.get("position_bias") is not None:
        raise NotImplementedError("packed attention has no masks, soft caps or position biases")
    # Rotary embeddings return float32 queries and keys; values have the dtype of the matrix product.
    q, k, v = (tensor[0].transpose(0, 1).to(value.dtype) for tensor in (query, key, value))
    scale = options.get("scaling") or q.shape[-1] ** -0.5
    window = options.get("sliding_window") or 0
    starts, longest = options["cu_seq_lens_q"], options["max_length_q"]
    attended = options.get("attended")
    if attended is not None:
        k, v = k[attended], v[attended]
    key_starts = starts if attended is None else options["cu_seq_lens_k"]
    causal = _is_causal(module, options)
    seen = _seen.get()
    if seen is not None:
        seen.append(AttentionOptions(scale, causal, window))
    out = compute(q, k, v, starts, key_starts, longest, scale, causal, window)
    return out.unsqueeze(0), None


@contextmanager
def watched_attention() -> Iterator[list[AttentionOptions]]:
    """Collect the options of each packed attention that this thread computes in the block.

    A window that is longer than a text has no effect on its output.
    """
    seen: list[AttentionOptions] = []
    token = _seen.set(seen)
    try:
        yield seen
    finally:
        _seen.reset(token)


@contextmanager
def watched_masks() -> Iterator[set[int]]:
    """Collect the windows and chunks of the masks that a network asks for in the block, on this thread."""
    sizes: set[int] = set()
    token = _masked.set(sizes)
    try:
        yield sizes
    finally:
        _masked.reset(token)


def register() -> None:
    """Register the attention with transformers as `PACKED`, without any mask."""
    AttentionInterface.register(PACKED, packed_attention)
    AttentionMaskInterface.register(PACKED, _no_mask)


def _no_mask(*_: Any, local_size: int | None = None, **__: Any) -> None:
    """Return no mask. local_size: the window or chunk that it would have."""
    sizes = _masked.get()
    if sizes is not None and local_size:
        sizes.add(local_size)


def _is_causal(module: nn.Module, options: dict[str, Any]) -> bool:
    requested = options.get("is_causal")
    if requested is not None:
        return bool(requested)
    # A decoder trained with bidirectional attention is marked in its config, not in its layers.
    allowed = getattr(getattr(module, "config", None), "is_causal", True)
    return bool(getattr(module, "is_causal", False) and allowed)


@torch.inference_mode()
def pack(encoder: Any, padding_position: int | None) -> PackedEncoder | None:
    """Return the encoder without padding, or None if its vectors would differ from those with padding.

    encoder: a transformers model that computes in float32. padding_position: as `PackedEncoder` takes it.
    The comparison fails for models with attention of their own, for those that do not take positions as an
    input, and for those with a window or chunks in their masks alone.
    """
    stock = encoder.config._attn_implementation  # noqa: SLF001 - it has no public name
    register()
    lengths: tuple[int, ...] | None = PROBE_LENGTHS
    reason, windows = None, set[int]()
    while lengths is not None and reason is None:
        reason, found = _compared(encoder, padding_position, lengths, stock)
        windows |= found
        lengths = _lengths_beyond(encoder, windows, lengths)
    packed = PackedEncoder(encoder, padding_position)
    if reason is None:
        encoder.set_attn_implementation(PACKED)
        return packed
    logger.info("%s computes padding too: %s", type(encoder).__name__, reason)
    packed.restore()
    return None


def _compared(
    encoder: Any, padding_position: int | None, lengths: tuple[int, ...], stock: str
) -> tuple[str | None, set[int]]:
    """Compare a network without padding with itself; return the reason against it, and its windows.

    lengths: of the sequences. stock: name of the attention with padding, which is set at the end.
    """
    inputs = _probe(encoder, lengths)
    stock_output = encoder(**inputs)
    packed = PackedEncoder(encoder, padding_position)
    try:
        encoder.set_attn_implementation(PACKED)
        with watched_attention() as seen, watched_masks() as masked:
            output = packed(**inputs)
        repeats = _repeats(encoder.config, int(inputs["attention_mask"].sum()))
        if repeats and lengths == PROBE_LENGTHS:
            packed(**{name: value.repeat(repeats, 1) for name, value in inputs.items()})
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}", set()
    finally:
        packed.restore()
        encoder.set_attn_implementation(stock)
    windows = {options.window for options in seen if options.window}
    # A window of both directions counts the token itself in the layers only.
    missing = {size for size in masked if not {size, size + 1} & windows}
    if missing:
        return f"only its masks have a window or chunks of {max(missing)} tokens", windows
    mask = inputs["attention_mask"].unsqueeze(-1)
    worst = _difference(stock_output.last_hidden_state * mask, output.last_hidden_state * mask)
    if packed.pooler is not None:
        worst = max(worst, _difference(stock_output.pooler_output, output.pooler_output))
    # Written so that it also rejects NaN.
    return None if worst < PROBE_TOLERANCE else f"its vectors differ by {worst:.1e}", windows


def _lengths_beyond(encoder: Any, windows: set[int], probed: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return lengths of a probe beyond the windows of a network, None if there is none, or it costs too much.

    probed: lengths of the former probe. A network with the same windows at a small size is compared by the
    tests of all types.
    """
    beyond = {window for window in windows if window >= max(probed)}
    words, positions = encoder.config.vocab_size, getattr(encoder.config, "max_position_embeddings", None)
    weights = sum(weight.numel() for weight in encoder.parameters() if weight.shape[:1] != (words,))
    most = min(
        PROBE_PRODUCTS_MAX // max(1, weights), positions - 2 if isinstance(positions, int) else math.inf
    )
    longest = max((window + BEYOND_WINDOW for window in beyond if window + BEYOND_WINDOW <= most), default=0)
    if beyond and not longest:
        logger.info("%s: a window of %d tokens was not probed", type(encoder).__name__, max(beyond))
    return (5, longest, 3) if longest else None


def _repeats(config: Any, tokens: int) -> int:
    """Return how often the probe makes up more tokens than a short table has positions; 0 for a long table.

    Some code, CLIP's for one, compares the tokens of a whole batch with its table.
    """
    positions = getattr(config, "max_position_embeddings", None)
    if not isinstance(positions, int) or not 0 < positions <= SHORT_TABLE:
        return 0
    return positions // tokens + 1


def _difference(expected: Tensor, computed: Tensor) -> float:
    """Return the largest difference of two vectors, relative to the first; infinity if shapes differ."""
    if expected.shape != computed.shape:
        return math.inf
    return ((expected - computed).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-9)).max().item()


def _probe(encoder: Any, lengths: tuple[int, ...]) -> dict[str, Tensor]:
    """Return sequences of random ids, one of them with special tokens."""
    config = encoder.config
    device = next(encoder.parameters()).device
    pad_id = config.pad_token_id or 0
    mask = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, min(config.vocab_size, 1000) - 1, mask.shape, generator=generator)
    ids = torch.where(mask, ids + (ids >= pad_id), pad_id)
    named = special_ids(config)[: lengths[1] - 3]
    ids[1, 2 : 2 + len(named)] = torch.tensor(named, dtype=ids.dtype)
    return {"input_ids": ids.to(device), "attention_mask": mask.long().to(device)}
