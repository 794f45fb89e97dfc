"""Layers of BERT and its descendants in fewer operations.

One matrix product computes query, key and value, and the activation runs inside the product before it. A
layer is recognized by its parts, and replaced only if the new one gives the same.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from backends.torch.attention import compute, compute_joined
from backends.torch.memory import is_exhausted
from backends.torch.precision import ActivatedLinear, WideLinear

# float32 noise of one layer, whose outputs are normalized, stays below 1e-5.
TOLERANCE = 1e-4
# Two sequences of different lengths: if one attends to its neighbor, the outputs differ.
PROBE_STARTS = (0, 5, 16)


class FusedLayer(nn.Module):
    """Attention, sum, norm; feed-forward, sum, norm. Sums between layers are float32."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        attention = layer.attention.self
        self.heads: int = attention.num_attention_heads
        self.scale: float = attention.attention_head_size**-0.5
        self.qkv = _join_layers((attention.query, attention.key, attention.value))
        self.output: nn.Module = layer.attention.output.dense
        self.attention_norm: nn.LayerNorm = layer.attention.output.LayerNorm
        self.up = ActivatedLinear(layer.intermediate.dense, layer.intermediate.intermediate_act_fn)
        self.down: nn.Module = layer.output.dense
        self.norm: nn.LayerNorm = layer.output.LayerNorm

    def forward(self, hidden_states: Tensor, *_: Any, **options: Any) -> Tensor:
        """Compute (1, tokens, dim) float32 of the same shape. options: of packed attention."""
        hidden = hidden_states[0]
        joined = self.qkv(hidden).view(len(hidden), 3, self.heads, -1)
        starts, longest = options.get("cu_seq_lens_q"), options.get("max_length_q")
        attended = options.get("attended")
        if attended is None:
            context = compute_joined(joined, starts, longest, self.scale)
        else:
            q, k, v = joined.unbind(1)
            key_starts = options["cu_seq_lens_k"]
            k, v = k[attended], v[attended]
            context = compute(q, k, v, starts, key_starts, longest, self.scale, False, 0)  # noqa: FBT003
        hidden = _normalize(self.attention_norm, self.output(context.flatten(1)) + hidden)
        return _normalize(self.norm, self.down(self.up(hidden)) + hidden).unsqueeze(0)


def fuse(encoder: nn.Module) -> None:
    """Replace all layers that can be fused. encoder: it has packed attention and computes in float32."""
    # Only lists are collected: a reference to a replaced layer would keep its weights in memory.
    for layers in [module for module in encoder.modules() if isinstance(module, nn.ModuleList)]:
        for place in range(len(layers)):
            fused = _fused_layer(layers[place])
            if fused is not None:
                layers[place] = fused


@torch.inference_mode()
def _fused_layer(layer: Any) -> FusedLayer | None:
    """Return the fused form of a layer, None unless it gives the same."""
    try:
        fused = FusedLayer(layer)
        computed = fused(**_probe(layer))
        expected = layer(**_probe(layer))
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if is_exhausted(error):
            raise
        return None
    same_shape = isinstance(expected, Tensor) and expected.shape == computed.shape
    return fused if same_shape and bool((expected - computed).abs().max() < TOLERANCE) else None


def _probe(layer: nn.Module) -> dict[str, Any]:
    weight = next(layer.parameters())
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, PROBE_STARTS[-1], weight.shape[-1], generator=generator)
    starts = torch.tensor(PROBE_STARTS, dtype=torch.int32, device=weight.device)
    longest = max(PROBE_STARTS[1], PROBE_STARTS[2] - PROBE_STARTS[1])
    return {
        "hidden_states": hidden.to(weight.device),
        "cu_seq_lens_q": starts,
        "max_length_q": longest,
    }


def _join_layers(layers: Sequence[nn.Linear]) -> nn.Linear:
    """Join several layers of the same input into one; their outputs are concatenated."""
    first = layers[0]
    joined = WideLinear(first.in_features, sum(layer.out_features for layer in layers), device="meta")
    joined.weight = nn.Parameter(torch.cat([layer.weight for layer in layers]), requires_grad=False)
    joined.bias = nn.Parameter(torch.cat([layer.bias for layer in layers]), requires_grad=False)
    return joined


def _normalize(norm: nn.LayerNorm, hidden: Tensor) -> Tensor:
    return layer_norm(hidden, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
