"""Adapters (LoRA): writing them as their libraries do, and computing them next to the weights, not merged."""

import json
import math
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from backends.torch.stock.architectures import XLM_ROBERTA_KEYS
from tests.engine.families.checkpoint import WEIGHT_SPREAD, randomize

RANK, ALPHA = 4, 3
TASKS = ("retrieval.query", "retrieval.passage", "separation", "classification", "text-matching")
# Names of Jina's own code and of transformers.
V3_NAMES = {
    "emb_ln": "embeddings.LayerNorm",
    "encoder.": "",
    "mixer.out_proj": "self_attn.o_proj",
    "norm1": "post_attention_layernorm",
    "norm2": "post_mlp_layernorm",
}


def random(*shape: int) -> Tensor:
    return torch.randn(*shape) * WEIGHT_SPREAD


def unadapted(folder: Path) -> Any:
    """Return the network of Jina's third model with random weights."""
    config = json.loads((folder / "config.json").read_text())
    kept = {key: config[key] for key in XLM_ROBERTA_KEYS}
    rotation = {"rope_type": "default", "rope_theta": 20000.0}
    native = transformers.JinaEmbeddingsV3Config(**kept, rope_parameters=rotation)
    return transformers.JinaEmbeddingsV3Model(native).eval()


def write_stacked(folder: Path) -> None:
    """Write a network with the tensors of all adapters, under the names of Jina's own code."""
    network = unadapted(folder)
    randomize(network)
    # transformers writes the names of Jina's code, without what its adapters add to them.
    network.save_pretrained(folder / "unadapted")
    tensors = load_file(folder / "unadapted" / "model.safetensors")
    assert "encoder.layers.0.mixer.Wqkv.weight" in tensors
    shutil.rmtree(folder / "unadapted")
    published: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() == 1:
            published[f"roberta.{name}"] = tensor
            continue
        weight = f"roberta.{name.removesuffix('.weight')}.parametrizations.weight"
        left, right = tensor.shape
        # Embeddings multiply the other way round.
        first, second = (
            ((left, RANK), (RANK, right)) if "embeddings" in name else ((RANK, right), (left, RANK))
        )
        published[f"{weight}.original"] = tensor
        published[f"{weight}.0.lora_A"] = random(len(TASKS), *first)
        published[f"{weight}.0.lora_B"] = random(len(TASKS), *second)
    save_file(published, folder / "model.safetensors", {"format": "pt"})


def write_folder(network: type[Any], name: str, layers: Sequence[str], folder: Path) -> None:
    """Write an adapter for some linear layers as the library peft writes it. name: of its folder."""
    tensors: dict[str, Tensor] = {}
    for layer, module in built(network, folder).named_modules():
        if layer.endswith(tuple(layers)):
            tensors[f"base_model.model.{layer}.lora_A.weight"] = random(RANK, module.in_features)
            tensors[f"base_model.model.{layer}.lora_B.weight"] = random(module.out_features, RANK)
    path = folder / name
    path.mkdir(parents=True)
    save_file(tensors, path / "adapter_model.safetensors", {"format": "pt"})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "use_rslora": True, "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(config | {"target_modules": list(layers)}))


def built(network: type[Any], folder: Path) -> Any:
    """Return a checkpoint's network without an adapter."""
    config = network.config_class.from_pretrained(folder)
    return network.from_pretrained(folder, config=config, dtype=torch.float32).eval()


def add_product(layer: torch.nn.Module, compute: Callable[[Tensor], Tensor]) -> None:
    """Add a product of the inputs to a layer's outputs, as an adapter that is not merged does."""
    layer.register_forward_hook(lambda _layer, inputs, outputs: outputs + compute(inputs[0]))


def native_names(name: str) -> list[str]:
    """Return transformers' names for a name of Jina's own code; queries, keys and values are one there."""
    plain = name.removeprefix("roberta.").replace(".parametrizations.weight.original", ".weight")
    for own, native in V3_NAMES.items():
        plain = plain.replace(own, native)
    if "mixer.Wqkv" not in plain:
        return [plain]
    return [plain.replace("mixer.Wqkv", f"self_attn.{part}_proj") for part in "qkv"]


def stacked_network(folder: Path) -> torch.nn.Module:
    """Return the network of Jina's third model with the adapter of queries, computed next to the weights."""
    tensors = load_file(folder / "model.safetensors")
    network = unadapted(folder)
    state = {}
    for name, tensor in tensors.items():
        if not name.endswith((".lora_A", ".lora_B")):
            names = native_names(name)
            state |= dict(zip(names, tensor.chunk(len(names)), strict=True))
    network.load_state_dict(state)
    for name in [name for name in tensors if name.endswith(".lora_A")]:
        layer = name.removesuffix(".parametrizations.weight.0.lora_A")
        add_stacked(network, native_names(layer), tensors[name][0], tensors[f"{name[:-1]}B"][0])
    return network


def add_stacked(network: torch.nn.Module, layers: Sequence[str], first: Tensor, second: Tensor) -> None:
    """Add the product of one adapter's tensors to the layers among which its rows are divided."""
    scale = ALPHA / RANK
    if "embeddings" in layers[0]:
        add_product(network.get_submodule(layers[0]), lambda ids: scale * first[ids] @ second)
        return
    for layer, rows in zip(layers, second.chunk(len(layers)), strict=True):
        product = partial(lambda inputs, b: scale * inputs @ first.T @ b.T, b=rows)
        add_product(network.get_submodule(layer), product)


def folder_network(network: type[Any], adapter: str, folder: Path) -> torch.nn.Module:
    """Return a network with an adapter of peft's layout, computed next to the weights."""
    adapted = built(network, folder)
    tensors = load_file(folder / adapter / "adapter_model.safetensors")
    scale = ALPHA / math.sqrt(RANK)
    for name in [name for name in tensors if ".lora_A." in name]:
        layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        first, second = tensors[name], tensors[name.replace(".lora_A.", ".lora_B.")]
        product = partial(lambda inputs, a, b: scale * inputs @ a.T @ b.T, a=first, b=second)
        add_product(adapted.get_submodule(layer), product)
    return adapted
