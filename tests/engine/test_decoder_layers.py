"""Fused layers of decoders: which networks have them, and that their outputs stay the same."""

import pytest
import torch
import transformers
from torch import nn

from backends.torch.networks.fused_layers import FusedDecoderLayer, RootMeanSquareNorm
from backends.torch.networks.precision import (
    CastLinear,
    WideLinear,
    fastest_linear,
    multiplied,
    replace_linears,
)
from backends.torch.stock.fusing import fuse
from tests.engine.test_fusing import inputs_of, pack_model

SIZES = {
    "vocab_size": 1000,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
CONFIGS = {
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=16),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "qwen2 with windows": lambda: transformers.Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=4, max_window_layers=1
    ),
    "llama": lambda: transformers.LlamaConfig(**SIZES, attention_bias=True),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=3),
    "eurobert": lambda: transformers.EuroBertConfig(**SIZES),
    # The weights of its norms count from 1, and it has more norms.
    "gemma3": lambda: transformers.Gemma3TextConfig(**SIZES, head_dim=16),
    # Only a part of its components is rotated.
    "phi": lambda: transformers.PhiConfig(**SIZES, partial_rotary_factor=0.5),
}
UNFUSED = {"gemma3", "phi"}


def fused_layers(network: nn.Module) -> int:
    return sum(isinstance(module, FusedDecoderLayer) for module in network.modules())


@pytest.mark.parametrize("name", CONFIGS)
@torch.inference_mode()
def test_fused_layers_of_decoders_give_the_same_vectors(name: str) -> None:
    packed = pack_model(CONFIGS[name]())
    # Fresh norms have weights of 1, which say nothing.
    for parameter in packed.parameters():
        if parameter.dim() == 1:
            nn.init.uniform_(parameter, 0.5, 1.5)
    expected = [packed(**inputs_of(filled)).last_hidden_state for filled in (0, 1)]

    fuse(packed)

    assert fused_layers(packed) == (0 if name in UNFUSED else 3)
    found = [packed(**inputs_of(filled)).last_hidden_state for filled in (0, 1)]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_a_window_longer_than_the_probe_is_kept() -> None:
    packed = pack_model(transformers.MistralConfig(**SIZES, sliding_window=40))
    ids = torch.randint(5, 900, (1, 90), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    expected = packed(**inputs).last_hidden_state

    fuse(packed)

    assert fused_layers(packed) == 3
    torch.testing.assert_close(packed(**inputs).last_hidden_state, expected, atol=1e-4, rtol=1e-4)


def linear_kinds(dtype: torch.dtype) -> list[type[nn.Module]]:
    """Return the types of linear layer of this processor: without AVX-512, none has prepacked bfloat16."""
    return list({CastLinear: None, fastest_linear(torch.device("cpu"), dtype): None})


@pytest.mark.parametrize("kind", linear_kinds(torch.bfloat16))
@torch.inference_mode()
def test_fused_layers_of_decoders_keep_their_vectors_in_bfloat16(kind: type[nn.Module]) -> None:
    packed = pack_model(CONFIGS["qwen3"]())
    expected = packed(**inputs_of()).last_hidden_state

    fuse(packed)
    replace_linears(packed, kind, torch.bfloat16)

    found = packed(**inputs_of()).last_hidden_state
    # The second sequence has no padding.
    assert torch.cosine_similarity(found, expected, dim=-1)[1].min() > 0.999


@torch.inference_mode()
def test_a_norm_of_large_and_small_numbers_equals_that_of_the_library() -> None:
    norm = transformers.models.qwen3.modeling_qwen3.Qwen3RMSNorm(32, eps=1e-6)
    nn.init.normal_(norm.weight)
    rows = torch.randn(5, 32) * torch.tensor([1e-4, 1e-2, 1, 1e2, 1e4])[:, None]

    torch.testing.assert_close(RootMeanSquareNorm(norm)(rows), norm(rows), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_a_product_of_outputs_is_the_same_inside_and_after_the_layer(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = WideLinear(24, 40)
    rows, factor = torch.randn(7, 24), torch.randn(7, 40).to(dtype)
    expected = layer(rows) * factor.float()

    for kind in linear_kinds(dtype):
        found = multiplied(kind(layer, dtype), rows, factor.clone())
        assert dtype == found.dtype
        tolerance = 1e-5 if dtype == torch.float32 else 0.05
        torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=tolerance)
