"""Attention over sequences that lie end to end, without padding: the one function every packed model runs.

Registered with transformers under `PACKED`; a model calls it with query, key and value of all tokens at once,
(1, heads, tokens, dim), and `cu_seq_lens_q`, where each sequence starts and the last one ends, as in
FlashAttention. Where none looks at some tokens (a query's fillers), `seen` are the indices of the others, and
`cu_seq_lens_k` tells where each sequence starts among them. Rule: a sequence is computed alike whatever lies
beside it, so that its vector does not depend on its batch.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

PACKED = "packed"
HALF = (torch.float16, torch.bfloat16)
CAPABLE = torch.cpu.get_capabilities()
# The numbers that this processor's matrix units multiply.
IN_UNITS = {
    torch.bfloat16: CAPABLE.get("amx_bf16") or CAPABLE.get("sve_bf16"),
    torch.float16: CAPABLE.get("amx_fp16"),
}


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
    out = compute(q, k, v, starts, key_starts, longest, scale, _is_causal(module, options), window)
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
    own = runs(starts.tolist(), key_starts.tolist())
    tokens = [run.sequences * run.length for run in own]
    keys = [run.sequences * run.key_length for run in own]
    pieces = zip(own, q.split(tokens), k.split(keys), v.split(keys), strict=True)
    each = (tuple(one.view(run.sequences, -1, *one.shape[1:]) for one in three) for run, *three in pieces)
    return _computed(q.new_empty(q.shape), tokens, each, scale, causal, window)


def attend_joined(joined: Tensor, starts: Tensor, longest: int, scale: float) -> Tensor:
    """`attend` where all look at all of their sequence, and query, key and value lie beside each other.

    joined: (tokens, 3, heads, dim). Returns (tokens, heads, dim).
    """
    if joined.device.type != "cpu":
        q, k, v = joined.unbind(1)
        return attend(q, k, v, starts, starts, longest, scale, causal=False, window=0)
    places = starts.tolist()
    own = runs(places, places)
    tokens = [run.sequences * run.length for run in own]
    number = _number(joined)
    pieces = zip(own, joined.split(tokens), strict=True)
    each = (one.to(number).view(run.sequences, -1, *one.shape[1:]).unbind(2) for run, one in pieces)
    return _computed(joined.new_empty(joined.shape[0], *joined.shape[2:]), tokens, each, scale)


def _computed(
    out: Tensor,
    tokens: Sequence[int],
    each: Iterable[tuple[Tensor, ...]],
    scale: float,
    causal: bool = False,  # noqa: FBT001, FBT002
    window: int = 0,
) -> Tensor:
    """Fill `out` run by run: what a run needs stays in the processor's caches."""
    number = _number(out)
    for place, three in zip(out.split(tokens), each, strict=True):
        q, k, v = (one.to(number) for one in three)
        place.copy_(_attend_run(q, k, v, scale, causal, window))
    return out


def _number(tensor: Tensor) -> torch.dtype:
    """In which numbers attention is computed fastest: bfloat16 gains nothing in products as small as those of
    a short sequence, except by matrix units.
    """
    return tensor.dtype if tensor.device.type != "cpu" or IN_UNITS.get(tensor.dtype) else torch.float32


class Run(NamedTuple):
    """Neighbors of equal lengths, which one call computes."""

    length: int
    key_length: int
    sequences: int


def runs(starts: list[int], key_starts: list[int]) -> list[Run]:
    """In the order of the sequences. starts, key_starts: as `attend` is told them."""
    pairs = zip(pairwise(starts), pairwise(key_starts), strict=True)
    lengths = ((end - start, key_end - key_start) for (start, end), (key_start, key_end) in pairs)
    return [Run(*both, sum(1 for _ in equals)) for both, equals in groupby(lengths)]


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


def _opaque(name: str, function: Callable[..., Tensor], fake: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """To torch.compile the split by sequence is one operator: no lengths are baked into its graph."""
    operator = torch.library.custom_op(f"gateway::{name}", function, mutates_args=())
    operator.register_fake(fake)

    def run(*arguments: Any) -> Tensor:
        return operator(*arguments) if torch.compiler.is_compiling() else function(*arguments)

    return run


compute = _opaque("packed_attention", attend, lambda q, *_: q.new_empty(q.shape))
compute_joined = _opaque(
    "joined_attention", attend_joined, lambda joined, *_: joined.new_empty(joined.shape[0], *joined.shape[2:])
)
