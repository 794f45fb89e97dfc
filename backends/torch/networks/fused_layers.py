"""Layers of BERT, of decoders, and of their descendants in fewer operations than in transformers.

One matrix product computes query, key and value, and the activation runs inside the product before it. Layers
with root-mean-square norms and rotary positions are those of Llama, Mistral, Qwen2, Qwen3 and their
bidirectional descendants; transformers computes each norm and each rotation in five to seven operations over
all numbers.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from backends.torch.networks.attention import AttentionOptions, compute, compute_joined
from backends.torch.networks.packing import PackedOutput
from backends.torch.networks.precision import ActivatedLinear, join_layers, multiplied


class FusedLayer(nn.Module):
    """Layer of BERT: attention, sum, norm; feed-forward, sum, norm. Sums between layers are float32."""

    def __init__(self, layer: Any, seen: AttentionOptions) -> None:
        """seen: options with which the layer computes its attention."""
        super().__init__()
        if seen.causal or seen.window:
            raise ValueError("a token sees only a part of its sequence")
        attention = layer.attention.self
        self.heads: int = attention.num_attention_heads
        self.scale = seen.scale
        self.qkv = join_layers((attention.query, attention.key, attention.value))
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
        hidden = normalize(self.attention_norm, self.output(context.flatten(1)) + hidden)
        return normalize(self.norm, self.down(self.up(hidden)) + hidden).unsqueeze(0)


class FusedEncoder(nn.Module):
    """Embeddings of BERT's family and its fused layers, without transformers' code around them.

    That code takes as long as a layer of a few tokens.
    """

    def __init__(self, embeddings: nn.Module, layers: nn.ModuleList) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.layers = layers

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, token_type_ids: Tensor | None = None, **options: Any
    ) -> PackedOutput:
        """Compute (1, tokens, dim) float32. options: of packed attention."""
        hidden = self.embeddings(
            input_ids=input_ids, token_type_ids=token_type_ids, position_ids=position_ids
        )
        for layer in self.layers:
            hidden = layer(hidden, **options)
        return PackedOutput(hidden)


class RootMeanSquareNorm(nn.Module):
    """Division by the root of the mean square, and a weight for each component; computes in float32."""

    def __init__(self, norm: Any, weight: Tensor | None = None) -> None:
        """norm: of transformers. weight: in place of its own."""
        super().__init__()
        weight = norm.weight if weight is None else weight
        self.weight = nn.Parameter(weight.detach().float(), requires_grad=False)
        self.epsilon: float = norm.variance_epsilon

    def forward(self, inputs: Tensor) -> Tensor:
        """Return float32 of the shape of the inputs, whose last dimension is divided."""
        inputs = inputs.float()
        if inputs.is_cuda:
            # One kernel in place of four; on a processor the operations below take less time.
            weight = self.weight if self.weight.ndim == 1 else None
            normed = torch.nn.functional.rms_norm(inputs, inputs.shape[-1:], weight, self.epsilon)
            return normed if weight is not None else normed.mul_(self.weight)
        length = torch.linalg.vector_norm(inputs, dim=-1, keepdim=True)
        scale = length.square_().div_(inputs.shape[-1]).add_(self.epsilon).rsqrt_()
        return (inputs * scale).mul_(self.weight)


class FusedDecoderLayer(nn.Module):
    """Norm, attention, sum; norm, gated feed-forward, sum. Sums between layers are float32.

    The two components that a position rotates are neighbors in queries and keys, so that a rotation is one
    product of complex numbers. The order of components has no effect on products of queries and keys.
    """

    def __init__(self, layer: Any, seen: AttentionOptions) -> None:
        """seen: options with which the layer computes its attention."""
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.head_dim: int = attention.head_dim
        self.heads = attention.q_proj.out_features // self.head_dim
        self.key_heads = attention.k_proj.out_features // self.head_dim
        self.seen = seen
        order = torch.arange(self.head_dim).view(2, -1).t().flatten()
        self.qkv = join_layers((attention.q_proj, attention.k_proj, attention.v_proj))
        self._reorder(order)
        self.rotated_norm = self._joined_norm(attention, order)
        self.output: nn.Module = attention.o_proj
        self.attention_norm = RootMeanSquareNorm(layer.input_layernorm)
        self.norm = RootMeanSquareNorm(layer.post_attention_layernorm)
        self.gate = ActivatedLinear(mlp.gate_proj, mlp.act_fn)
        self.up: nn.Module = mlp.up_proj
        self.down: nn.Module = mlp.down_proj

    def forward(self, hidden_states: Tensor, *_: Any, **options: Any) -> Tensor:
        """Compute (1, tokens, dim) float32 of the same shape. options: rotations, and of packed attention."""
        hidden = hidden_states[0]
        hidden = hidden + self.output(self._attend(self.attention_norm(hidden), options))
        normed = self.norm(hidden)
        return (hidden + self.down(multiplied(self.up, normed, self.gate(normed)))).unsqueeze(0)

    def _attend(self, hidden: Tensor, options: dict[str, Any]) -> Tensor:
        """Compute the context (tokens, heads · head_dim) of (tokens, dim)."""
        joined = self.qkv(hidden).unflatten(1, (-1, self.head_dim))
        rotated, v = joined.split((self.heads + self.key_heads, self.key_heads), dim=1)
        if self.rotated_norm is not None:
            rotated = self.rotated_norm(rotated)
        q, k = (
            _rotate(rotated, options["position_embeddings"])
            .to(v.dtype)
            .split((self.heads, self.key_heads), dim=1)
        )
        starts, longest = options["cu_seq_lens_q"], options["max_length_q"]
        key_starts, attended = starts, options.get("attended")
        if attended is not None:
            k, v, key_starts = k[attended], v[attended], options["cu_seq_lens_k"]
        return compute(q, k, v, starts, key_starts, longest, *self.seen).flatten(1)

    @torch.inference_mode()
    def _reorder(self, order: Tensor) -> None:
        """Bring the components of queries and keys into the order of rotations."""
        rows = torch.arange(self.qkv.out_features).view(-1, self.head_dim)
        rows[: self.heads + self.key_heads] = rows[: self.heads + self.key_heads, order]
        self.qkv.weight = nn.Parameter(self.qkv.weight[rows.flatten()], requires_grad=False)
        if self.qkv.bias is not None:
            self.qkv.bias = nn.Parameter(self.qkv.bias[rows.flatten()], requires_grad=False)

    def _joined_norm(self, attention: Any, order: Tensor) -> RootMeanSquareNorm | None:
        """Return the norm of queries and keys together, None if they have none."""
        if getattr(attention, "q_norm", None) is None:
            return None
        weights = (
            attention.q_norm.weight[order].expand(self.heads, -1),
            attention.k_norm.weight[order].expand(self.key_heads, -1),
        )
        return RootMeanSquareNorm(attention.q_norm, torch.cat(weights))


def _rotate(heads: Tensor, rotations: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate pairs of neighbors in (tokens, heads, head_dim); returns float32.

    rotations: cosines and sines as transformers computes them, (1, tokens, head_dim) with equal halves.
    """
    cos, sin = (table[0, :, : table.shape[-1] // 2].float() for table in rotations)
    if 2 * cos.shape[-1] != heads.shape[-1]:
        raise ValueError("only some components of a head are rotated")
    pairs = torch.view_as_complex(heads.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * torch.complex(cos, sin).unsqueeze(1)).flatten(-2)


def normalize(norm: nn.LayerNorm, hidden: Tensor) -> Tensor:
    """Compute a norm without the hooks of its module."""
    return layer_norm(hidden, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
