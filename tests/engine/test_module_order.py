"""Modules of sentence-transformers around pooling: computed as their library does, or refused."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules

from backends.contract import Embed, EmbedReply, Output
from backends.contract.errors import ModelUnavailable
from backends.recipe.options import DTypeName
from backends.torch.load.loader import best_device
from tests.engine.checkpoints import SMALL, make_encoder, make_sentence_model
from tests.engine.engines import TEXTS, cosines, encode, engine_on, load_tiny, run_work

LEAST_COSINE: dict[DTypeName, float] = {"float32": 0.99999, "bfloat16": 0.9995}
Modules = Sequence[torch.nn.Module]


@pytest.fixture(autouse=True)
def seed() -> None:
    """Make the random weights of a test's modules the same in any order of tests."""
    torch.manual_seed(1)


def layer_norm(width: int = 32) -> modules.LayerNorm:
    module = modules.LayerNorm(width)
    with torch.no_grad():
        module.norm.weight.normal_()
        module.norm.bias.normal_()
    return module


def layer_mix() -> modules.WeightedLayerPooling:
    weights = torch.nn.Parameter(torch.tensor([0.2, 1.5, 0.7]))
    return modules.WeightedLayerPooling(32, num_hidden_layers=3, layer_start=1, layer_weights=weights)


def token_dense() -> modules.Dense:
    return modules.Dense(32, 24, module_input_name="token_embeddings")


def save_model(
    encoder: Path, folder: Path, before: Modules, width: int, after: Modules
) -> SentenceTransformer:
    """Write a checkpoint with modules before and behind mean pooling; return its model as the reference."""
    network = modules.Transformer(str(encoder), max_seq_length=64)
    parts = [network, *before, modules.Pooling(width, pooling_mode="mean"), *after]
    SentenceTransformer(modules=parts, device="cpu").save(str(folder), create_model_card=False)
    return SentenceTransformer(str(folder), device="cpu")


@pytest.fixture(scope="module")
def encoder(minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder")
    return make_encoder(transformers.BertConfig(**SMALL, output_hidden_states=True), minilm, folder)


@pytest.mark.parametrize("dtype", LEAST_COSINE)
@pytest.mark.parametrize(
    ("before", "width", "after"),
    [
        ([], 32, lambda: [layer_norm()]),
        ([], 32, lambda: [modules.Dropout(0.5), modules.Dense(32, 20), modules.Normalize(), layer_norm(20)]),
        ([token_dense], 24, lambda: [modules.Dense(24, 16)]),
        ([layer_mix], 32, list),
        ([layer_mix, token_dense], 24, lambda: [layer_norm(24)]),
    ],
    ids=["layer-norm", "dropout", "token-dense", "layer-mix", "layer-mix-and-dense"],
)
async def test_vectors_equal_those_of_sentence_transformers(
    before: list[Callable[[], torch.nn.Module]],
    width: int,
    after: Callable[[], Modules],
    dtype: DTypeName,
    encoder: Path,
    tmp_path: Path,
) -> None:
    reference = save_model(encoder, tmp_path, [make() for make in before], width, after())
    model = load_tiny(tmp_path, dtype)

    reply = await run_work(engine_on(model), Embed(tuple(TEXTS)), EmbedReply)

    assert cosines(reply.vectors, reference.encode(TEXTS)).min() >= LEAST_COSINE[dtype]
    assert model.capabilities.dimensions == reference.encode("a").shape[0]
    assert model.packed


async def test_token_vectors_are_those_behind_the_modules_before_pooling(
    encoder: Path, tmp_path: Path
) -> None:
    reference = save_model(encoder, tmp_path, [layer_mix(), token_dense()], 24, [])

    reply = await encode(engine_on(load_tiny(tmp_path)), TEXTS[:4], Output.TOKENS)

    expected = reference.encode(TEXTS[:4], output_value="token_embeddings")
    for found, other in zip(reply.token_vectors or (), expected, strict=True):
        np.testing.assert_allclose(found, other.numpy(), atol=1e-4)


def test_a_mix_of_layers_that_its_library_skips_is_refused(encoder: Path, tmp_path: Path) -> None:
    save_model(encoder, tmp_path, [layer_mix()], 32, [])
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"output_hidden_states": False}))

    with pytest.raises(ModelUnavailable, match="output_hidden_states: true"):
        load_tiny(tmp_path)


@pytest.mark.parametrize(
    ("order", "refusal"),
    [
        (["Transformer", "Normalize", "Pooling"], "Normalize before Pooling"),
        (["Transformer", "Dense", "Pooling"], "projects sentence_embedding, not token_embeddings"),
        (["Transformer", "Pooling", "WeightedLayerPooling"], "elsewhere than behind its network"),
        (["WordEmbeddings", "WordWeights", "Pooling"], "module WordEmbeddings, WordWeights"),
        (["BoW"], "module BoW"),
        (["Transformer", "CNN", "Pooling"], "module CNN"),
        (["Transformer", "LSTM", "Pooling"], "module LSTM"),
        (["Transformer", "Pooling", "SparseAutoEncoder"], "module SparseAutoEncoder"),
        (["CLIPModel"], "module CLIPModel"),
        (["Pooling", "Transformer"], "no other, has to be its network"),
        (["Transformer", "Transformer", "Pooling"], "no other, has to be its network"),
        (["Transformer", "Pooling", "Normalize", "Pooling"], "Normalize before Pooling"),
        (["Transformer", "WeightedLayerPooling", "WeightedLayerPooling", "Pooling"], "more than once"),
    ],
)
def test_modules_without_a_meaning_in_their_place_are_refused(
    order: list[str], refusal: str, encoder: Path, tmp_path: Path
) -> None:
    make_sentence_model(encoder, tmp_path, "mean")
    listed = [
        {"type": f"sentence_transformers.models.{kind}", "path": f"{i}_{kind}" if i else ""}
        for i, kind in enumerate(order)
    ]
    (tmp_path / "modules.json").write_text(json.dumps(listed))

    with pytest.raises(ModelUnavailable, match=refusal):
        load_tiny(tmp_path)


def edit_json(path: Path, edit: Callable[[Any], Any]) -> None:
    path.write_text(json.dumps(edit(json.loads(path.read_text()))))


async def test_the_last_of_several_poolings_counts(encoder: Path, tmp_path: Path) -> None:
    make_sentence_model(encoder, tmp_path, "cls", [modules.Pooling(32, pooling_mode="max")])
    reference = SentenceTransformer(str(tmp_path), device="cpu")
    model = load_tiny(tmp_path)

    reply = await run_work(engine_on(model), Embed(tuple(TEXTS)), EmbedReply)

    assert model.capabilities.pooling == "max"
    assert cosines(reply.vectors, reference.encode(TEXTS)).min() >= LEAST_COSINE["float32"]


@pytest.mark.parametrize(
    ("entry", "refusal"),
    [
        ({"path": "0_Transformer"}, "has its network in 0_Transformer; move the files"),
        ({"path": "../other"}, "names a folder outside of it: ../other"),
        ({"name": "1"}, "gives a name to several modules: 1"),
    ],
)
def test_entries_that_would_be_read_from_another_place_are_refused(
    entry: dict[str, str], refusal: str, encoder: Path, tmp_path: Path
) -> None:
    make_sentence_model(encoder, tmp_path, "mean")
    edit_json(tmp_path / "modules.json", lambda listed: [listed[0] | entry, *listed[1:]])

    with pytest.raises(ModelUnavailable, match=refusal):
        load_tiny(tmp_path)


@pytest.mark.parametrize("name", ["ReLU6", "Softmax", "PReLU", "RReLU", "Hardtanh", "Tanhshrink"])
async def test_activations_of_torch_equal_those_of_sentence_transformers(
    name: str, encoder: Path, tmp_path: Path
) -> None:
    dense = modules.Dense(32, 16, activation_function=getattr(torch.nn, name)())
    make_sentence_model(encoder, tmp_path, "mean", [dense])
    reference = SentenceTransformer(str(tmp_path), device="cpu")

    reply = await run_work(engine_on(load_tiny(tmp_path)), Embed(tuple(TEXTS)), EmbedReply)

    assert cosines(reply.vectors, reference.encode(TEXTS)).min() >= LEAST_COSINE["float32"]


def test_an_activation_across_the_tokens_of_a_batch_is_refused(encoder: Path, tmp_path: Path) -> None:
    save_model(encoder, tmp_path, [token_dense()], 24, [])
    softmax = {"activation_function": "torch.nn.modules.activation.Softmax"}
    edit_json(tmp_path / "1_Dense" / "config.json", lambda config: config | softmax)

    with pytest.raises(ModelUnavailable, match="Softmax to token vectors"):
        load_tiny(tmp_path)


@pytest.mark.parametrize(
    "config",
    [transformers.T5Config, transformers.MT5Config, transformers.UMT5Config],
    ids=["t5", "mt5", "umt5"],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
async def test_the_encoder_half_of_t5_is_served(
    config: type[transformers.PretrainedConfig], dtype: DTypeName, minilm: Path, tmp_path: Path
) -> None:
    sizes = {"vocab_size": 30522, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4}
    whole = make_encoder(config(**sizes, pad_token_id=0), minilm, tmp_path / "whole")
    reference = make_sentence_model(whole, tmp_path / "sentence", "mean")
    model = load_tiny(whole, dtype)

    reply = await run_work(engine_on(model), Embed(tuple(TEXTS[:8])), EmbedReply)

    kept = [i for i, tokens in enumerate(reply.input_tokens or ()) if tokens < 64]
    expected = reference.encode([TEXTS[i] for i in kept])
    assert cosines(reply.vectors[kept], expected).min() >= LEAST_COSINE.get(dtype, 0.9995)
    assert len(kept) > 4
    assert not model.packed


async def test_outputs_of_t5_beyond_float16_stay_finite(minilm: Path, tmp_path: Path) -> None:
    sizes = {"vocab_size": 30522, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    whole = make_encoder(transformers.T5Config(**sizes, pad_token_id=0), minilm, tmp_path)
    network = transformers.T5EncoderModel.from_pretrained(whole)
    with torch.no_grad():
        network.encoder.block[0].layer[1].DenseReluDense.wo.weight.mul_(1e5)
    network.save_pretrained(tmp_path)

    wide = await run_work(engine_on(load_tiny(tmp_path)), Embed(tuple(TEXTS[:4])), EmbedReply)
    half = await run_work(engine_on(load_tiny(tmp_path, "float16")), Embed(tuple(TEXTS[:4])), EmbedReply)

    assert cosines(wide.vectors, half.vectors).min() > 0.999


def test_apple_hardware_is_chosen_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert best_device(None).type == "mps"
    assert best_device("cpu").type == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert best_device(None).type == "cuda"
