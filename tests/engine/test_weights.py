"""Checkpoints whose weights are damaged, incomplete or another network's: each is refused by name."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from backends.contract.errors import ModelUnavailable
from backends.recipe.options import TaskSettings
from tests.engine.checkpoints import (
    DECODERS,
    ENCODERS,
    SMALL,
    make_classifier,
    make_encoder,
    make_language_model,
)
from tests.engine.engines import load_tiny

State = dict[str, Tensor]
Mutation = Callable[[State, str, str], object]
MAKERS: dict[str, Callable[[Path, Path], Path]] = {
    "bert": lambda minilm, folder: make_encoder(ENCODERS["bert"][0](), minilm, folder),
    "modernbert": lambda minilm, folder: make_encoder(ENCODERS["modernbert"][0](), minilm, folder),
    "qwen3": lambda minilm, folder: make_encoder(DECODERS["qwen3"](), minilm, folder),
    "classifier": lambda minilm, folder: make_classifier(ENCODERS["bert"][0](), minilm, folder),
}
# Two tensors of different shapes in a layer of each network.
TENSORS = {
    "bert": ("encoder.layer.1.attention.self.key.weight", "encoder.layer.1.intermediate.dense.weight"),
    "modernbert": ("layers.1.attn.Wqkv.weight", "layers.1.mlp.Wo.weight"),
    "qwen3": ("layers.1.self_attn.q_norm.weight", "layers.1.mlp.up_proj.weight"),
    "classifier": ("classifier.weight", "bert.encoder.layer.1.output.dense.weight"),
}


def delete(state: State, name: str, _: str) -> None:
    del state[name]


def rename(state: State, name: str, _: str) -> None:
    state[f"{name}_of_another"] = state.pop(name)


def reshape(state: State, name: str, _: str) -> None:
    state[name] = torch.cat([state[name], state[name]])


def swap(state: State, name: str, other: str) -> None:
    state[name], state[other] = state[other].clone(), state[name].clone()


def make_nan(state: State, name: str, _: str) -> None:
    state[name].view(-1)[-1] = torch.nan


def read_state(folder: Path) -> State:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def write_state(state: State, folder: Path, shards: int = 1) -> None:
    """Write the tensors to one file, or to several with an index."""
    for file in folder.glob("*.safetensors"):
        file.unlink()
    if shards == 1:
        save_file(state, folder / "model.safetensors", {"format": "pt"})
        return
    weight_map = {name: f"model-{place % shards}.safetensors" for place, name in enumerate(sorted(state))}
    for shard in set(weight_map.values()):
        part = {name: tensor for name, tensor in state.items() if weight_map[name] == shard}
        save_file(part, folder / shard, {"format": "pt"})
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("network", MAKERS)
def test_intact_weights_are_loaded(network: str, shards: int, minilm: Path, tmp_path: Path) -> None:
    folder = MAKERS[network](minilm, tmp_path)

    write_state(read_state(folder), folder, shards)

    load_tiny(folder)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("mutation", [delete, rename, reshape, swap, make_nan])
@pytest.mark.parametrize("network", MAKERS)
def test_a_changed_tensor_is_refused_by_name(
    mutation: Mutation, network: str, shards: int, minilm: Path, tmp_path: Path
) -> None:
    folder = MAKERS[network](minilm, tmp_path)
    state = read_state(folder)
    name, other = TENSORS[network]
    mutation(state, name, other)
    write_state(state, folder, shards)

    with pytest.raises(ModelUnavailable) as refusal:
        load_tiny(folder)

    assert name in refusal.value.message
    if mutation is swap:
        assert other in refusal.value.message
    assert "fetch its files again" in refusal.value.message
    assert ("the training diverged" in refusal.value.message) == (mutation is make_nan)


def test_every_missing_layer_is_counted(minilm: Path, tmp_path: Path) -> None:
    folder = MAKERS["bert"](minilm, tmp_path)
    state = {name: tensor for name, tensor in read_state(folder).items() if ".attention.self." not in name}
    write_state(state, folder)

    with pytest.raises(ModelUnavailable, match=r"missing: encoder\.layer\.0\..* and 16 more"):
        load_tiny(folder)


def test_a_pickled_state_without_a_tensor_is_refused_by_name(minilm: Path, tmp_path: Path) -> None:
    folder = MAKERS["bert"](minilm, tmp_path)
    state = read_state(folder)
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin")
    load_tiny(folder)

    del state["embeddings.word_embeddings.weight"]
    torch.save(state, folder / "pytorch_model.bin")

    with pytest.raises(ModelUnavailable, match=r"missing: embeddings\.word_embeddings\.weight"):
        load_tiny(folder)


def end_of(model: str) -> Any:
    return getattr(transformers, f"AutoModelFor{model}")


@pytest.mark.parametrize("end", ["MaskedLM", "SequenceClassification", "TokenClassification", "PreTraining"])
def test_heads_of_other_tasks_are_ignored_by_an_encoder(end: str, minilm: Path, tmp_path: Path) -> None:
    folder = make_language_model(transformers.BertConfig(**SMALL), minilm, tmp_path, end_of(end))

    assert load_tiny(folder, settings=TaskSettings("embed")).capabilities.dimensions == 32


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("distilbert", "MaskedLM"),
        ("electra", "MaskedLM"),
        ("electra", "PreTraining"),
        ("deberta", "MaskedLM"),
        ("mpnet", "MaskedLM"),
        ("modernbert", "MaskedLM"),
        ("modernbert", "SequenceClassification"),
        ("roberta", "SequenceClassification"),
        ("qwen3", "CausalLM"),
        ("qwen3", "SequenceClassification"),
    ],
)
def test_heads_of_other_architectures_are_ignored_by_an_encoder(
    name: str, end: str, minilm: Path, tmp_path: Path
) -> None:
    config = ENCODERS[name][0]() if name in ENCODERS else DECODERS[name]()
    folder = make_language_model(config, minilm, tmp_path, end_of(end))

    assert load_tiny(folder, settings=TaskSettings("embed")).capabilities.dimensions == 32


def test_a_head_that_the_model_needs_is_not_optional(minilm: Path, tmp_path: Path) -> None:
    folder = MAKERS["bert"](minilm, tmp_path)
    with pytest.raises(ModelUnavailable, match=r"missing: cls\.predictions\."):
        load_tiny(folder, settings=TaskSettings(pooling="splade"))

    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["BertForSequenceClassification"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelUnavailable, match=r"missing: classifier\.bias, classifier\.weight"):
        load_tiny(folder)


def test_a_file_that_was_cut_off_is_refused(minilm: Path, tmp_path: Path) -> None:
    weights = MAKERS["bert"](minilm, tmp_path) / "model.safetensors"
    whole = weights.read_bytes()

    for size in (0, 5, 1000, len(whole) - 1):
        weights.write_bytes(whole[:size])
        with pytest.raises(ModelUnavailable, match=r"model\.safetensors could not be read"):
            load_tiny(tmp_path)


def test_a_missing_file_of_an_index_is_refused(minilm: Path, tmp_path: Path) -> None:
    folder = MAKERS["bert"](minilm, tmp_path)
    write_state(read_state(folder), folder, shards=3)
    (folder / "model-1.safetensors").unlink()

    with pytest.raises(ModelUnavailable, match=r"1 of 3 files .* are missing: model-1\.safetensors"):
        load_tiny(folder)

    (folder / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ModelUnavailable, match="no valid index"):
        load_tiny(folder)


def test_a_file_of_the_hubs_cache_must_have_its_published_digest(minilm: Path, tmp_path: Path) -> None:
    folder = MAKERS["bert"](minilm, tmp_path / "snapshot")
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    blob = tmp_path / "blobs" / hashlib.sha256(content).hexdigest()
    blob.parent.mkdir()
    weights.rename(blob)
    weights.symlink_to(blob)
    load_tiny(folder)

    # Two weights of one shape are swapped: nothing in the file itself shows that.
    state = load_file(blob)
    swap(state, "encoder.layer.0.attention.self.key.weight", "encoder.layer.1.attention.self.key.weight")
    save_file(state, tmp_path / "swapped", {"format": "pt"})
    blob.write_bytes((tmp_path / "swapped").read_bytes())

    with pytest.raises(ModelUnavailable, match=r"model\.safetensors is damaged: its SHA-256"):
        load_tiny(folder)


def test_weights_of_64_bits_are_read(minilm: Path, tmp_path: Path) -> None:
    folder = make_encoder(ENCODERS["bert"][0](), minilm, tmp_path)
    path = folder / "model.safetensors"
    save_file({name: value.double() for name, value in load_file(path).items()}, path, {"format": "pt"})

    assert load_tiny(folder).capabilities.dimensions == 32
