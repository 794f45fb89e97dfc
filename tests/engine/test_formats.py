"""Number formats of a network's weights: equal in result, held as read, and independent of the files."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from backends.contract import Embed, EmbedReply, Encode, EncodeReply, Output, Rerank, RerankReply, Vectors
from backends.recipe.options import DTypeName, TaskSettings
from backends.torch.memory import held_bytes
from backends.torch.networks import bert
from backends.torch.passes.loaded_model import LoadedModel
from backends.torch.stock import construction
from tests.engine.checkpoints import DECODERS, ENCODERS, make_classifier, make_encoder, make_language_model
from tests.engine.engines import TEXTS, cosines, dense_of, engine_on, load_tiny, run_work

NETWORKS = {name: config for name, (config, _) in ENCODERS.items()} | DECODERS
DTYPES: tuple[DTypeName, ...] = ("float32", "bfloat16")
HALF_PRECISION = (torch.bfloat16, torch.float16)


def store_as(stored: torch.dtype, folder: Path) -> None:
    """Rewrite the weights in a number format."""
    state = load_file(folder / "model.safetensors")
    narrow = {name: tensor.to(stored) for name, tensor in state.items()}
    save_file(narrow, folder / "model.safetensors", {"format": "pt"})


async def vectors_of(model: LoadedModel) -> Vectors:
    return (await run_work(engine_on(model), Embed(tuple(TEXTS)), EmbedReply)).vectors


@pytest.mark.parametrize("name", NETWORKS)
async def test_a_checkpoint_in_half_precision_gives_its_vectors_in_every_format(
    name: str, minilm: Path, tmp_path: Path
) -> None:
    folder = make_encoder(NETWORKS[name](), minilm, tmp_path)
    store_as(torch.bfloat16, folder)
    narrow = [load_tiny(folder, dtype) for dtype in DTYPES]
    # The same numbers, without a narrow token embedding.
    store_as(torch.float32, folder)
    wide = [load_tiny(folder, dtype) for dtype in DTYPES]

    for model, expected in zip(narrow, wide, strict=True):
        assert expected.packed == model.packed
        assert cosines(await vectors_of(model), await vectors_of(expected)).min() > 0.99999


@pytest.mark.parametrize("stored", HALF_PRECISION)
async def test_classifiers_and_sparse_models_give_their_scores_in_every_format(
    stored: torch.dtype, minilm: Path, tmp_path: Path
) -> None:
    config = ENCODERS["bert"][0]()
    classifier = make_classifier(config, minilm, tmp_path / "classifier")
    splade = make_language_model(config, minilm, tmp_path / "splade", transformers.AutoModelForMaskedLM)
    settings = TaskSettings(pooling="splade")
    pairs = Rerank(TEXTS[0], tuple(TEXTS[1:8]), raw_scores=True)
    terms = Encode(tuple(TEXTS[:4]), frozenset({Output.SPARSE}))
    results = []
    for dtype in (stored, torch.float32):
        for folder in (classifier, splade):
            store_as(dtype, folder)
        scores = await run_work(engine_on(load_tiny(classifier)), pairs, RerankReply)
        weights = await run_work(engine_on(load_tiny(splade, settings=settings)), terms, EncodeReply)
        results.append((scores.scores, [dense_of(row, 30522) for row in weights.sparse or ()]))

    np.testing.assert_allclose(results[0][0], results[1][0], atol=1e-5)
    np.testing.assert_allclose(results[0][1], results[1][1], atol=1e-4)


@pytest.mark.parametrize("name", ["qwen3", "bert"])
def test_weights_are_held_in_their_final_format(name: str, minilm: Path, tmp_path: Path) -> None:
    folder = make_encoder(NETWORKS[name](), minilm, tmp_path)
    numbers = sum(
        tensor.numel()
        for key, tensor in load_file(folder / "model.safetensors").items()
        if "pooler" not in key
    )

    wide = held_bytes(load_tiny(folder, "bfloat16").head)
    store_as(torch.bfloat16, folder)
    narrow = held_bytes(load_tiny(folder, "bfloat16").head)

    # The token embedding is nearly all of so small a network. It keeps the format of the files.
    assert 3.9 < wide / numbers < 4.05
    assert 2 < narrow / numbers < 2.1


@pytest.mark.parametrize("name", ["bert", "electra"])
def test_norms_and_heads_are_read_without_rounding(
    name: str, minilm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_classifier(ENCODERS[name][0](), minilm, tmp_path)
    stored = load_file(folder / "model.safetensors")
    opened: list[nn.Module] = []

    def keep(model: nn.Module, *_: object) -> None:
        opened.append(model)
        raise ValueError("enough")

    monkeypatch.setitem(bert.OPENERS, "classifier", keep)
    monkeypatch.setitem(construction.OPENERS, "classifier", keep)
    with pytest.raises(Exception, match="enough"):
        load_tiny(folder, "bfloat16")

    weights = opened[0].state_dict()
    assert weights[f"{name}.encoder.layer.0.output.dense.weight"].dtype == torch.bfloat16
    wide = [key for key in weights if key.startswith((f"{name}.pooler", "classifier")) or "LayerNorm" in key]
    assert len(wide) > 3
    for key in wide:
        assert torch.equal(weights[key], stored[key])
    assert type(opened[0]) in {bert.BertClassifier, transformers.ElectraForSequenceClassification}


@pytest.mark.parametrize("name", ["bert", "qwen3", "mpnet", "modernbert"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_a_loaded_model_does_not_depend_on_its_files(
    name: str, dtype: DTypeName, stored: torch.dtype, minilm: Path, tmp_path: Path
) -> None:
    folder = make_encoder(NETWORKS[name](), minilm, tmp_path)
    store_as(stored, folder)

    model = load_tiny(folder, dtype)

    assert str(folder) not in Path("/proc/self/maps").read_text(encoding="utf-8")
    assert model.packed == (name != "mpnet")


def test_a_pickled_checkpoint_does_not_stay_mapped(minilm: Path, tmp_path: Path) -> None:
    folder = make_encoder(NETWORKS["bert"](), minilm, tmp_path)
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save({name: tensor.half() for name, tensor in state.items()}, folder / "pytorch_model.bin")

    model = load_tiny(folder)

    words = 30522 * 32
    assert held_bytes(model.head) < 3 * words, "the token embedding is not held in float16"
    assert str(folder / "pytorch_model.bin") not in Path("/proc/self/maps").read_text(encoding="utf-8")
