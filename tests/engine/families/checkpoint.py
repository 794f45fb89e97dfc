"""Writing of a family's checkpoint: its published files, a made vocabulary and random weights."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from tests.engine.families.family import Family, Json
from tests.engine.families.vocabularies import tokenizer_json, vocabulary_size

# With the usual 0.02 a layer hardly changes its input, and a comparison would prove nothing.
WEIGHT_SPREAD = 0.2
# With it no network lies near a bound: rounding to bfloat16 leaves a cosine of 0.9997 or more to float32, and
# texts differ by more than 0.01. Other seeds make networks that amplify what is rounded.
SEED = 7


def write_checkpoint(family: Family, folder: Path) -> Path:
    """Write a family's checkpoint into a folder and return it."""
    folder.mkdir(parents=True)
    torch.manual_seed(SEED)
    config = family.config | {"vocab_size": vocabulary_size(family.vocabulary)}
    _write_json(folder / "config.json", config)
    if family.network:
        _write_weights(family, folder)
        # Written again: transformers writes keys of its own.
        _write_json(folder / "config.json", config)
    (folder / "tokenizer.json").write_text(tokenizer_json(family.vocabulary))
    roles = dict(family.vocabulary.roles)
    _write_json(folder / "tokenizer_config.json", roles | family.tokenizer_config)
    for name, content in family.files.items():
        _write_json(folder / name, content)
        if name.endswith("Dense/config.json"):
            _write_dense(folder / name)
    if family.write is not None:
        family.write(folder)
    return folder


def _write_json(path: Path, content: Json | list[Json]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))


def _write_weights(family: Family, folder: Path) -> None:
    kind: Any = getattr(transformers, family.network)
    model = kind(kind.config_class.from_pretrained(folder)).eval()
    randomize(model)
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors = {family.rename(name): tensor for name, tensor in load_file(path).items()}
    tensors.pop("", None)
    extra = {name: torch.randn(shape) * WEIGHT_SPREAD for name, shape in family.extra.items()}
    save_file(tensors | extra, path, {"format": "pt"})


def randomize(model: nn.Module) -> None:
    """Fill a network with random weights whose layers change their input noticeably."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=WEIGHT_SPREAD)
            else:
                parameter.add_(torch.randn_like(parameter) * WEIGHT_SPREAD / 2)


def _write_dense(config: Path) -> None:
    """Write the weights of a `Dense` module next to its config."""
    sizes = json.loads(config.read_text())
    layer = nn.Linear(sizes["in_features"], sizes["out_features"], sizes["bias"])
    save_file({f"linear.{name}": tensor for name, tensor in layer.state_dict().items()},
              config.parent / "model.safetensors")  # fmt: skip
