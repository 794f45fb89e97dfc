"""Fused layers: which layers are replaced, and that their outputs stay the same."""

import pytest
import torch
import transformers
from torch import nn
from transformers.activations import ACT2FN
from transformers.modeling_outputs import BaseModelOutput

from backends.torch.networks import precision
from backends.torch.networks.fused_layers import FusedEncoder, FusedLayer
from backends.torch.networks.packing import PackedEncoder, padding_position
from backends.torch.networks.precision import (
    ACTIVATIONS,
    FUSED_ACTIVATIONS,
    ActivatedLinear,
    CastLinear,
    PrepackedLinear,
    replace_linears,
)
from backends.torch.stock.fusing import fuse, shorten
from backends.torch.stock.packing import pack
from tests.engine.checkpoints import ENCODERS, SMALL

DESCENDANTS = {"bert", "roberta", "xlm-roberta", "electra"}
PLACES = tuple(f"encoder.encoder.layer.{number}" for number in range(3))


def pack_model(config: transformers.PretrainedConfig) -> PackedEncoder:
    torch.manual_seed(0)
    encoder = transformers.AutoModel.from_config(config, dtype=torch.float32).eval()
    encoder.pooler = None
    packed = pack(encoder, padding_position(config))
    assert packed is not None
    return packed


def fused_layers(network: nn.Module) -> int:
    return sum(isinstance(module, FusedLayer) for module in network.modules())


def inputs_of(filled: int = 0) -> dict[str, torch.Tensor]:
    """Build sequences of 4, 9 and 2 tokens; no token attends to the last `filled` of each."""
    lengths = torch.tensor([4, 9, 2])
    mask = (torch.arange(9) < lengths[:, None]).long()
    ids = torch.randint(5, 900, mask.shape, generator=torch.Generator().manual_seed(1)) * mask
    attended = (torch.arange(9) < (lengths - filled)[:, None]).long()
    inputs = {"input_ids": ids, "attention_mask": attended}
    return inputs | ({"tokens": mask} if filled else {})


@pytest.mark.parametrize("name", sorted(name for name, (_, is_packed) in ENCODERS.items() if is_packed))
@torch.inference_mode()
def test_fused_layers_of_the_bert_family_give_the_same_vectors(name: str) -> None:
    packed = pack_model(ENCODERS[name][0]())
    expected = [packed(**inputs_of(filled)).last_hidden_state for filled in (0, 1)]

    fuse(packed)

    assert fused_layers(packed) == (3 if name in DESCENDANTS else 0)
    found = [packed(**inputs_of(filled)).last_hidden_state for filled in (0, 1)]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


# ELECTRA projects its embeddings between them and the layers.
@pytest.mark.parametrize("name", sorted(DESCENDANTS - {"electra"}))
@torch.inference_mode()
def test_shortened_encoders_of_the_bert_family_give_the_same_vectors(name: str) -> None:
    packed = pack_model(ENCODERS[name][0]())
    fuse(packed)
    typed = inputs_of() | {"token_type_ids": inputs_of()["attention_mask"].cumsum(1) % 2}
    batches = [inputs_of(), inputs_of(1), *([typed] if packed.encoder.config.type_vocab_size > 1 else [])]
    expected = [packed(**batch).last_hidden_state for batch in batches]

    packed.encoder = shorten(packed.encoder)

    assert isinstance(packed.encoder, FusedEncoder)
    found = [packed(**batch).last_hidden_state for batch in batches]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_keeps_an_encoder_that_does_more_than_its_layers() -> None:
    packed = pack_model(ENCODERS["bert"][0]())
    fuse(packed)
    packed.encoder.register_forward_hook(lambda _, __, out: BaseModelOutput(out.last_hidden_state + 0.01))

    assert shorten(packed.encoder) is packed.encoder
    electra = pack_model(ENCODERS["electra"][0]())
    fuse(electra)
    assert shorten(electra.encoder) is electra.encoder


@torch.inference_mode()
def test_keeps_a_layer_that_does_more_than_its_parts() -> None:
    packed = pack_model(ENCODERS["bert"][0]())
    layer = packed.get_submodule(PLACES[1])
    stock = layer.forward
    layer.forward = lambda *inputs, **options: stock(*inputs, **options) + 0.01

    fuse(packed)

    assert [isinstance(packed.get_submodule(place), FusedLayer) for place in PLACES] == [True, False, True]


@torch.inference_mode()
def test_keeps_the_layers_of_a_causal_decoder() -> None:
    packed = pack_model(transformers.BertConfig(**SMALL, is_decoder=True))

    fuse(packed)

    assert fused_layers(packed) == 0


@pytest.mark.parametrize("kind", [CastLinear, PrepackedLinear])
@pytest.mark.parametrize(
    "name", ["gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "silu", "relu", "tanh", "mish"]
)
@torch.inference_mode()
def test_activation_inside_a_product_equals_a_separate_one(name: str, kind: type[CastLinear]) -> None:
    torch.manual_seed(0)
    linear, activation = nn.Linear(24, 40), ACT2FN[name]
    network = nn.Sequential(ActivatedLinear(linear, activation))
    rows = torch.randn(7, 24) * 3
    expected = activation(linear(rows))

    replace_linears(network, kind, torch.float32)

    assert type(network[0]) is kind
    torch.testing.assert_close(network(rows), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("is_inside", [True, False])
@pytest.mark.parametrize("name", ["gelu", "gelu_new", "relu"])
@torch.inference_mode()
def test_an_activation_is_the_same_inside_and_after_the_product(
    name: str, is_inside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "is_faster_inside", lambda _: is_inside)
    linear, activation = nn.Linear(24, 40), ACT2FN[name]
    rows = torch.randn(7, 24) * 3

    computed = PrepackedLinear(ActivatedLinear(linear, activation), torch.float32)

    assert (computed._activation is None) is is_inside
    torch.testing.assert_close(computed(rows), activation(linear(rows)), atol=1e-5, rtol=1e-5)


def test_an_activation_of_a_rounded_product_is_computed_before_rounding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(precision, "is_faster_inside", lambda _: False)

    assert precision.inner_activation(nn.Tanh(), torch.bfloat16) == ("tanh", "")
    assert precision.inner_activation(nn.Tanh(), torch.float32) == precision.NO_ACTIVATION


@pytest.mark.parametrize("form", sorted(ACTIVATIONS))
def test_each_activation_is_measured(form: tuple[str, str]) -> None:
    assert precision.is_faster_inside(form) in {True, False}


def test_every_fused_activation_is_covered() -> None:
    tried = {
        type(ACT2FN[name])
        for name in ("gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "silu", "relu", "tanh")
    }

    names = {f"{kind.__module__}.{kind.__name__}" for kind in tried | {nn.SiLU}}
    assert set(FUSED_ACTIVATIONS) <= names
    assert set(FUSED_ACTIVATIONS.values()) == set(ACTIVATIONS)
