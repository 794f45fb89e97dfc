"""Choice of an adapter (LoRA) of a checkpoint, from small files only.

Pure. One adapter is merged when a model is loaded: an upstream is one vector space.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from backends.checkpoints.small_files import read_json_object
from backends.contract.errors import ModelUnavailable
from backends.recipe.files import CheckpointFiles
from backends.recipe.native_forms import native_form

ADAPTER_CONFIG = "adapter_config.json"
# Keys that change nothing but the training, or that the tensors show as well. Any other one must be unset.
PLAIN_KEYS = frozenset(
    {
        "alpha_pattern",
        "auto_mapping",
        "base_model_name_or_path",
        "bias",
        "ensure_weight_tying",
        "exclude_modules",
        "inference_mode",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "lora_dropout",
        "megatron_core",
        "parent_library",
        "peft_type",
        "peft_version",
        "qalora_group_size",
        "r",
        "rank_pattern",
        "revision",
        "target_modules",
        "task_type",
        "use_rslora",
    }
)
# Other starts than these, as PiSSA, change the weights of the network as well.
PLAIN_VALUES: dict[str, tuple[bool | str, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian"),
}
# Folders of a checkpoint that hold one folder per adapter.
PARENTS = ("", "adapters/")
# Name of an adapter whose files are next to those of its network.
TOP = "."
ADAPTER_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*")


class AdapterConfig(msgspec.Struct, frozen=True):
    """Part of adapter_config.json that decides by how much an adapter changes a weight."""

    lora_alpha: float
    peft_type: str = "LORA"
    use_rslora: bool = False
    alpha_pattern: dict[str, float] = {}
    bias: str = "none"
    init_lora_weights: bool | str = True


class Adapter(msgspec.Struct, frozen=True):
    """Chosen adapter. folder: of peft's layout; None if it is one of those stacked in the network's files.

    index: its place among the stacked ones.
    """

    name: str
    config: AdapterConfig
    folder: Path | None = None
    index: int = 0


def adapter_names(files: CheckpointFiles) -> list[str]:
    """Return the names of the adapters that come with a checkpoint."""
    folders = {
        path.parent.name
        for parent in PARENTS
        for path in files.checkpoint.glob(f"{parent}*/{ADAPTER_CONFIG}")
    }
    return [*_stacked(files), *([TOP] if files.has(ADAPTER_CONFIG) else []), *sorted(folders)]


def choose_adapter(files: CheckpointFiles, name: str | None) -> Adapter | None:
    """Return the adapter of a name; None for the network without any.

    Raises: ModelUnavailable if there is no such adapter, or the engine cannot merge it.
    """
    if name is None:
        _require_none(files)
        return None
    stacked = _stacked(files)
    if name in stacked:
        return Adapter(name, AdapterConfig(float(files.config["lora_alpha"])), index=stacked.index(name))
    folder = next((folder for folder in _folders(files, name) if (folder / ADAPTER_CONFIG).is_file()), None)
    if folder is None:
        has = ", ".join(adapter_names(files)) or "none"
        raise ModelUnavailable(f"{files.checkpoint} has no adapter {name!r}; it has: {has}")
    return Adapter(name, _read_config(folder), folder)


def _require_none(files: CheckpointFiles) -> None:
    """Raise if the network without an adapter is not the model that was published."""
    form = native_form(files.config)
    if files.has(ADAPTER_CONFIG) or (form is not None and form.needs_adapter):
        raise ModelUnavailable(
            f"{files.checkpoint} has adapters, of which none is chosen; set `adapter` to one of: "
            f"{', '.join(adapter_names(files))}"
        )


def _stacked(files: CheckpointFiles) -> list[str]:
    form = native_form(files.config)
    return list(files.config.get("lora_adaptations") or []) if form is not None and form.adapters else []


def _folders(files: CheckpointFiles, name: str) -> Iterator[Path]:
    # An adapter is part of its checkpoint: no name leads out of the folder.
    if name == TOP:
        yield files.checkpoint
    if not ADAPTER_NAME.fullmatch(name):
        return
    # Folders cannot always have the name of their task: retrieval.query is in retrieval_query.
    plain = name.replace(".", "_").replace("-", "_")
    for parent in PARENTS:
        yield files.checkpoint / parent / name
        yield files.checkpoint / parent / plain


def _read_config(folder: Path) -> AdapterConfig:
    keys = read_json_object(folder / ADAPTER_CONFIG)
    try:
        config = msgspec.convert(keys, AdapterConfig)
    except msgspec.ValidationError as error:
        raise ModelUnavailable(f"{folder / ADAPTER_CONFIG} could not be read: {error}") from error
    unsupported = [key for key, value in keys.items() if value and key not in PLAIN_KEYS]
    unsupported += [key for key in PLAIN_VALUES if getattr(config, key) not in PLAIN_VALUES[key]]
    if unsupported:
        settings = ", ".join(f"`{key}: {keys[key]}`" for key in unsupported)
        raise ModelUnavailable(f"{folder} is an adapter that the engine cannot merge: {settings}")
    return config
