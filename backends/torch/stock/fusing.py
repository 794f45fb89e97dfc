"""Layers of transformers replaced by fused ones.

A layer is recognized by its parts, and replaced only if the new one gives the same.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from backends.torch.memory import is_exhausted
from backends.torch.networks.attention import AttentionOptions
from backends.torch.networks.fused_layers import FusedDecoderLayer, FusedEncoder, FusedLayer
from backends.torch.stock.packing import watched_attention

# float32 noise of one layer stays below 1e-5 of its largest output, and of 1.
TOLERANCE = 1e-4
# Two sequences of different lengths: if one attends to its neighbor, the outputs differ.
PROBE_STARTS = (0, 5, 16)
# Raised for a layer that has other parts, or takes other inputs.
EXPECTED_ERRORS = (AttributeError, LookupError, RuntimeError, TypeError, ValueError)
Form: TypeAlias = Callable[[Any, AttentionOptions], nn.Module]


@torch.inference_mode()
def shorten(encoder: Any) -> Any:
    """Return a fused encoder without transformers' code, or the encoder itself if it does more than that."""
    layers = getattr(getattr(encoder, "encoder", None), "layer", ())
    if not layers or not all(type(layer) is FusedLayer for layer in layers):
        return encoder
    short = FusedEncoder(encoder.embeddings, layers)
    try:
        inputs = _probe_ids(encoder)
        computed = short(**inputs).last_hidden_state
    except EXPECTED_ERRORS as error:
        if is_exhausted(error):
            raise
        return encoder
    expected = encoder(**inputs).last_hidden_state
    return short if _is_same(computed, expected) else encoder


def fuse(encoder: nn.Module) -> None:
    """Replace all layers that can be fused. encoder: it has packed attention and computes in float32."""
    # Only lists are collected: a reference to a replaced layer would keep its weights in memory.
    rotated = _rotated_components(encoder)
    for layers in [module for module in encoder.modules() if isinstance(module, nn.ModuleList)]:
        for place in range(len(layers)):
            fused = _fused_layer(layers[place], rotated)
            if fused is not None:
                layers[place] = fused


@torch.inference_mode()
def _fused_layer(layer: Any, rotated: int | None) -> nn.Module | None:
    """Return the fused form of a layer, None unless one gives the same. rotated: components of a head."""
    try:
        inputs = _probe(layer, rotated)
        with watched_attention() as seen:
            expected = layer(**inputs)
    except EXPECTED_ERRORS as error:
        if is_exhausted(error):
            raise
        return None
    if not isinstance(expected, Tensor) or len(seen) != 1:
        return None
    forms = (_fused_as(form, layer, seen[0], inputs, expected) for form in (FusedLayer, FusedDecoderLayer))
    return next((fused for fused in forms if fused is not None), None)


def _fused_as(
    form: Form, layer: Any, seen: AttentionOptions, inputs: dict[str, Any], expected: Tensor
) -> nn.Module | None:
    try:
        fused = form(layer, seen)
        computed = fused(**inputs)
    except EXPECTED_ERRORS as error:
        if is_exhausted(error):
            raise
        return None
    return fused if _is_same(computed, expected) else None


def _is_same(computed: Tensor, expected: Tensor) -> bool:
    tolerance = TOLERANCE * expected.abs().max().clamp(min=1)
    return expected.shape == computed.shape and bool((expected - computed).abs().max() < tolerance)


def _probe_ids(encoder: Any) -> dict[str, Any]:
    """Return the inputs of an encoder for two sequences with tokens of two types, where there are two."""
    generator = torch.Generator().manual_seed(0)
    tokens, config = PROBE_STARTS[-1], encoder.config
    device = next(encoder.parameters()).device
    ids = torch.randint(0, config.vocab_size, (1, tokens), generator=generator)
    types = torch.randint(0, max(1, config.type_vocab_size), (1, tokens), generator=generator)
    return _probe_options(device) | {
        "input_ids": ids.to(device),
        "position_ids": torch.arange(tokens, device=device).unsqueeze(0),
        "token_type_ids": types.to(device),
    }


def _probe_options(device: torch.device) -> dict[str, Any]:
    """Return the options of packed attention for two sequences."""
    return {
        "cu_seq_lens_q": torch.tensor(PROBE_STARTS, dtype=torch.int32, device=device),
        "max_length_q": max(end - start for start, end in pairwise(PROBE_STARTS)),
    }


def _rotated_components(encoder: nn.Module) -> int | None:
    """Return the components of a head that positions rotate, None for all; the fewest of several."""
    rotated = [2 * buffer.numel() for name, buffer in encoder.named_buffers() if name.endswith("inv_freq")]
    return min(rotated, default=None)


def _probe(layer: Any, rotated: int | None) -> dict[str, Any]:
    """Return the inputs of a layer for two sequences; a decoder's include rotations of any angle.

    rotated: components of a head, None for all.
    """
    weight = next(layer.parameters())
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, PROBE_STARTS[-1], weight.shape[-1], generator=generator)
    inputs = _probe_options(weight.device) | {"hidden_states": hidden.to(weight.device)}
    head_dim = getattr(getattr(layer, "self_attn", None), "head_dim", None)
    if head_dim is None:
        return inputs
    pairs = (rotated or head_dim) // 2
    angles = 10 * torch.randn(1, PROBE_STARTS[-1], pairs, generator=generator).to(weight.device)
    angles = torch.cat((angles, angles), dim=-1)
    return inputs | {"position_embeddings": (angles.cos(), angles.sin())}
