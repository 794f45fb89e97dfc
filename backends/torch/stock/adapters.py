"""Adapters of a checkpoint (LoRA): the one that an operator chose is merged into the weights at load.

A weight W (out, in) becomes W + scale · B·A, with A (rank, in) and B (out, rank). Two layouts: a folder as
the library peft writes it, and tensors of all adapters stacked in the network's own files, as Jina's third
model has them. Sources: peft 0.18, `LoraConfig` and `Linear`; jinaai's xlm-roberta-flash-implementation.
"""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from backends.contract.errors import ModelUnavailable
from backends.recipe.adapter_choice import Adapter, AdapterConfig
from backends.torch.networks.weight_files import read_file, read_tensor, stored_tensors

PEFT_PREFIX = "base_model.model."
# Ends of the names of A and B: of linear layers, and of embeddings.
LINEAR_ENDS = (".lora_A.weight", ".lora_B.weight")
EMBEDDING_ENDS = (".lora_embedding_A", ".lora_embedding_B")
# A layer of Jina's own code, and the layers of transformers among which its rows are divided.
STACKED_LAYERS = {
    "mixer.Wqkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mixer.out_proj": ("self_attn.o_proj",),
    "mlp.fc1": ("mlp.fc1",),
    "mlp.fc2": ("mlp.fc2",),
}
STACKED_PREFIX, STACKED_END = "roberta.", ".parametrizations.weight.0.lora_A"


class Update(NamedTuple):
    """Product by which a layer's weight changes: scale · left·right, (out, rank)·(rank, in)."""

    layer: str
    left: Tensor
    right: Tensor
    scale: float


def merge_adapter(network: Any, checkpoint: Path, adapter: Adapter) -> None:
    """Merge an adapter into a network's weights.

    Raises: ModelUnavailable if one of its tensors fits no layer, or it changes none.
    """
    updates = list(
        _stacked_updates(checkpoint, adapter) if adapter.folder is None else _updates(adapter, adapter.folder)
    )
    if not updates:
        raise ModelUnavailable(f"the adapter {adapter.name!r} of {checkpoint} has no tensors")
    layers = dict(network.named_modules())
    for update in updates:
        layer = _layer_of(layers, update.layer, network.base_model_prefix)
        if not isinstance(layer, nn.Linear | nn.Embedding):
            raise ModelUnavailable(
                f"the adapter {adapter.name!r} changes {update.layer}, which is no layer of "
                f"{type(network).__name__}"
            )
        _apply(layer, update, adapter)


def _apply(layer: nn.Linear | nn.Embedding, update: Update, adapter: Adapter) -> None:
    change = update.scale * (update.left.float() @ update.right.float())
    if change.shape != layer.weight.shape:
        raise ModelUnavailable(
            f"the adapter {adapter.name!r} changes {update.layer} by {list(change.shape)}, and its weight is "
            f"{list(layer.weight.shape)}"
        )
    merged = layer.weight.detach().float() + change.to(layer.weight.device)
    # A token embedding may be held as its file has it; the sum needs more digits.
    dtype = torch.float32 if isinstance(layer, nn.Embedding) else layer.weight.dtype
    layer.weight = nn.Parameter(merged.to(dtype), requires_grad=False)


def _layer_of(layers: Mapping[str, nn.Module], name: str, prefix: str) -> nn.Module | None:
    """Return the layer of a name, which may be of a model around the network, or of one inside of it."""
    names = (name, name.removeprefix("model."), f"{prefix}.{name}", name.removeprefix(f"{prefix}."))
    return next((layers[found] for found in names if found in layers), None)


def _updates(adapter: Adapter, folder: Path) -> Iterator[Update]:
    """Read a folder of peft. Raises: ModelUnavailable."""
    path = folder / "adapter_model.safetensors"
    tensors = read_file(path if path.is_file() else folder / "adapter_model.bin")
    read = 0
    for first, second in (LINEAR_ENDS, EMBEDDING_ENDS):
        for name in [name for name in tensors if name.endswith(first)]:
            layer = name.removesuffix(first).removeprefix(PEFT_PREFIX)
            other = tensors.get(name.removesuffix(first) + second)
            if other is None:
                raise ModelUnavailable(f"{folder} lacks the tensor {name.removesuffix(first) + second}")
            read += 2
            rank = len(tensors[name])
            pair = (other, tensors[name]) if first in LINEAR_ENDS else (tensors[name].T, other.T)
            yield Update(layer, *pair, _scale(adapter.config, layer, rank))
    if read != len(tensors):
        known = (*LINEAR_ENDS, *EMBEDDING_ENDS)
        unknown = sorted(name for name in tensors if not name.endswith(known)) or sorted(tensors)
        raise ModelUnavailable(f"{folder} has tensors that the engine cannot merge: {', '.join(unknown[:2])}")


def _scale(config: AdapterConfig, layer: str, rank: int) -> float:
    alphas = (value for key, value in config.alpha_pattern.items() if re.fullmatch(rf"(.*\.)?({key})", layer))
    alpha = next(alphas, config.lora_alpha)
    return alpha / (math.sqrt(rank) if config.use_rslora else rank)


def _stacked_updates(checkpoint: Path, adapter: Adapter) -> Iterator[Update]:
    for name in _stacked_names(checkpoint):
        first = _slice(checkpoint, name, adapter.index)
        second = _slice(checkpoint, name.removesuffix("A") + "B", adapter.index)
        layer = name.removeprefix(STACKED_PREFIX).removesuffix(STACKED_END)
        if "embeddings." in layer:
            yield Update(layer, first, second, adapter.config.lora_alpha / first.shape[1])
            continue
        scale = adapter.config.lora_alpha / len(first)
        for target, rows in _divided(layer, second):
            yield Update(target, rows, first, scale)


def _divided(layer: str, rows: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Return the layers of transformers for a layer of Jina's code, with the rows of each."""
    end = next((end for end in STACKED_LAYERS if layer.endswith(f".{end}")), None)
    if end is None:
        yield layer, rows
        return
    start = layer.removesuffix(end).removeprefix("encoder.")
    targets = STACKED_LAYERS[end]
    for target, part in zip(targets, rows.chunk(len(targets)), strict=True):
        yield start + target, part


def _stacked_names(checkpoint: Path) -> list[str]:
    names = stored_tensors(checkpoint)
    if names is None:
        raise ModelUnavailable(f"{checkpoint} has adapters, but no file of safetensors; convert its weights")
    # The pooler has no part in a mean of token vectors.
    return [name for name in names if name.endswith(STACKED_END) and ".pooler." not in name]


def _slice(checkpoint: Path, name: str, index: int) -> Tensor:
    stacked = read_tensor(checkpoint, name)
    if stacked is None or index >= len(stacked):
        raise ModelUnavailable(f"{checkpoint} lacks the tensor {name} of its adapters")
    return stacked[index]
