"""A layer as BERT and its descendants have it, in fewer operations: one product for query, key and value,
and the activation inside the product before it.

A layer is recognised by its parts, and replaced only where the new one gives the same.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from backends.torch.attention import compute, compute_joined
from backends.torch.memory import is_exhausted
from backends.torch.precision import ActivatedLinear

# float32 noise of one layer, whose outputs are normalized, stays below 1e-5.
TOLERANCE = 1e-4
# Two sequences of other lengths, so that one that sees its neighbour shows.
PROBE_STARTS = (0, 5, 16)


class FusedLayer(nn.Module):
    """Attention, sum, norm; products, sum, norm. Sums between layers are float32."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        attention = layer.attention.self
        self.heads: int = attention.num_attention_heads
        self.scale: float = attention.attention_head_size**-0.5
        self.qkv = _joined((attention.query, attention.key, attention.value))
        self.output: nn.Module = layer.attention.output.dense
        self.attention_norm: nn.LayerNorm = layer.attention.output.LayerNorm
        self.up = ActivatedLinear(layer.intermediate.dense, layer.intermediate.intermediate_act_fn)
        self.down: nn.Module = layer.output.dense
        self.norm: nn.LayerNorm = layer.output.LayerNorm

    def forward(self, hidden_states: Tensor, *_: Any, **options: Any) -> Tensor:
        """(1, tokens, dim) float32 → the same. options: of packed attention."""
        hidden = hidden_states[0]
        joined = self.qkv(hidden).view(len(hidden), 3, self.heads, -1)
        starts, longest, seen = (options.get(name) for name in ("cu_seq_lens_q", "max_length_q", "seen"))
        if seen is None:
            found = compute_joined(joined, starts, longest, self.scale)
        else:
            q, k, v = joined.unbind(1)
            key_starts = options["cu_seq_lens_k"]
            found = compute(q, k[seen], v[seen], starts, key_starts, longest, self.scale, False, 0)  # noqa: FBT003
        hidden = _normed(self.attention_norm, self.output(found.flatten(1)) + hidden)
        return _normed(self.norm, self.down(self.up(hidden)) + hidden).unsqueeze(0)


def fuse(encoder: nn.Module) -> None:
    """Replace what layers of that kind there are. encoder: a float32 model with packed attention."""
    # Whatever else is held here would be held twice until the end.
    for layers in [one for one in encoder.modules() if isinstance(one, nn.ModuleList)]:
        for place in range(len(layers)):
            fused = _fused(layers[place])
            if fused is not None:
                layers[place] = fused


@torch.inference_mode()
def _fused(layer: Any) -> FusedLayer | None:
    """What gives the same with fewer operations, if anything does."""
    try:
        fused = FusedLayer(layer)
        found = fused(**_probe(layer))
        expected = layer(**_probe(layer))
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if is_exhausted(error):
            raise
        return None
    alike = isinstance(expected, Tensor) and expected.shape == found.shape
    return fused if alike and bool((expected - found).abs().max() < TOLERANCE) else None


def _probe(layer: nn.Module) -> dict[str, Any]:
    weight = next(layer.parameters())
    seeded = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, PROBE_STARTS[-1], weight.shape[-1], generator=seeded)
    starts = torch.tensor(PROBE_STARTS, dtype=torch.int32, device=weight.device)
    longest = max(PROBE_STARTS[1], PROBE_STARTS[2] - PROBE_STARTS[1])
    return {
        "hidden_states": hidden.to(weight.device),
        "cu_seq_lens_q": starts,
        "max_length_q": longest,
    }


def _joined(layers: Sequence[nn.Linear]) -> nn.Linear:
    """Several layers of the same input as one, their outputs side by side."""
    first = layers[0]
    joined = nn.Linear(first.in_features, sum(one.out_features for one in layers), device="meta")
    joined.weight = nn.Parameter(torch.cat([one.weight for one in layers]), requires_grad=False)
    joined.bias = nn.Parameter(torch.cat([one.bias for one in layers]), requires_grad=False)
    return joined


def _normed(norm: nn.LayerNorm, hidden: Tensor) -> Tensor:
    return layer_norm(hidden, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
