"""Attention over sequences that lie end to end, without padding: the one function every packed model runs.

Registered with transformers under `PACKED`; a model calls it with query, key and value of all tokens at once,
(1, heads, tokens, dim), and `cu_seq_lens_q`, where each sequence starts and the last one ends, as in
FlashAttention. Where none looks at some tokens (a query's fillers), `seen` are the indices of the others, and
`cu_seq_lens_k` tells where each sequence starts among them. Rule: a sequence is computed alike whatever lies
beside it, so that its vector does not depend on its batch.
"""

from collections.abc import Iterator
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

PACKED = "packed"
HALF = (torch.float16, torch.bfloat16)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """What transformers' models call, with `cu_seq_lens_q`, `max_length_q` and options of their own.

    Returns (1, tokens, heads, dim), and no weights. Raises: NotImplementedError for what only some models ask
    of their attention; such a model takes the padded path.
    """
    if attention_mask is not None or options.get("softcap") or options.get("position_bias") is not None:
        raise NotImplementedError("packed attention has no masks, soft caps or position biases")
    # Rotary embeddings turn queries and keys in float32; values are still as the matrix product left them.
    q, k, v = (one[0].transpose(0, 1).to(value.dtype) for one in (query, key, value))
    scale = options.get("scaling") or q.shape[-1] ** -0.5
    window = options.get("sliding_window") or 0
    starts, longest = options["cu_seq_lens_q"], options["max_length_q"]
    seen = options.get("seen")
    if seen is not None:
        k, v = k[seen], v[seen]
    key_starts = starts if seen is None else options["cu_seq_lens_k"]
    out = _compute(q, k, v, starts, key_starts, longest, scale, _is_causal(module, options), window)
    return out.unsqueeze(0), None


def register() -> None:
    """Make `PACKED` a name that transformers knows, with no mask at all."""
    AttentionInterface.register(PACKED, packed_attention)
    AttentionMaskInterface.register(PACKED, lambda *_, **__: None)


def _is_causal(module: nn.Module, options: dict[str, Any]) -> bool:
    asked = options.get("is_causal")
    if asked is not None:
        return bool(asked)
    # A decoder that was trained to look both ways says so in its config, not in its layers.
    allowed = getattr(getattr(module, "config", None), "is_causal", True)
    return bool(getattr(module, "is_causal", False) and allowed)


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
    """q: (tokens, heads, dim); k, v: (seen tokens, key heads, dim). Returns the shape of q.

    starts, key_starts: where each sequence starts in q, and in k and v, whose tokens are its first ones.
    window: how near a key must be (distance < window); 0 is any distance.
    """
    if q.is_cuda and q.dtype in HALF:
        reach = window - 1
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
            enable_gqa=q.shape[1] != k.shape[1],
        )
        assert isinstance(out, Tensor)
        return out
    pieces = []
    for queries, keys, count in runs(starts.tolist(), key_starts.tolist()):
        run_q = q[queries].unflatten(0, (count, -1))
        run_k, run_v = (one[keys].unflatten(0, (count, -1)) for one in (k, v))
        pieces.append(_attend_run(run_q, run_k, run_v, scale, causal, window))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def runs(starts: list[int], key_starts: list[int]) -> Iterator[tuple[slice, slice, int]]:
    """Neighbors of equal lengths, which one call computes: their queries, their keys, how many they are."""
    at = key_at = 0
    pairs = zip(pairwise(starts), pairwise(key_starts), strict=True)
    for (length, key_length), equals in groupby((b - a, d - c) for (a, b), (c, d) in pairs):
        count = sum(1 for _ in equals)
        stop, key_stop = at + length * count, key_at + key_length * count
        yield slice(at, stop), slice(key_at, key_stop), count
        at, key_at = stop, key_stop


def _attend_run(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, window: int) -> Tensor:  # noqa: FBT001
    """q, k, v: (sequences, length, heads, dim). Returns (sequences · length of q, heads, dim)."""
    length = q.shape[1]
    mask = _band(length, k.shape[1], causal, window, q.device) if 0 < window < length else None
    out = scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=causal and mask is None,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2).flatten(0, 1)


def _band(length: int, keys: int, causal: bool, window: int, device: torch.device) -> Tensor:  # noqa: FBT001
    """(length, keys) bool, true where a token sees another."""
    ahead = torch.arange(keys, device=device) - torch.arange(length, device=device)[:, None]
    return (ahead.abs() < window) & (ahead <= 0 if causal else True)


# To torch.compile the split by sequence is one opaque operator: no lengths are baked into its graph.
_operator = torch.library.custom_op("gateway::packed_attention", attend, mutates_args=())
_operator.register_fake(lambda q, *_: q.new_empty(q.shape))


def _compute(*arguments: Any) -> Tensor:
    return _operator(*arguments) if torch.compiler.is_compiling() else attend(*arguments)
