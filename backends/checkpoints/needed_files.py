"""Names of files of weights: which of a repository are needed, and which a copy lacks. Reads no weights.

Names of models: ids of a hub's repositories, and paths on this machine.
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec


def is_path(model: str) -> bool:
    """Return True if a model name can only be a path on this machine."""
    return model in (".", "..") or model.startswith(("/", "./", "../", "~"))


# Files that transformers and sentence-transformers load; a repository may hold further precisions of them.
WEIGHT_FILE = re.compile(
    r"(?P<stem>model|pytorch_model|adapter_model)(-\d+-of-\d+)?\.(?P<kind>safetensors|bin)"
)
WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")
# Modules of sentence-transformers that consist of weights in a folder of their own.
WEIGHTED_MODULES = ("Dense", "LayerNorm", "WeightedLayerPooling")
WHOLE_FILES = ("model.safetensors", "pytorch_model.bin")


def needed_weights(names: Iterable[str]) -> list[str]:
    """Return the files to download: safetensors, and `.bin` in folders without safetensors.

    names: paths of all files of a repository.
    """
    found: dict[tuple[str, bool], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in names:
        path = PurePosixPath(name)
        if match := WEIGHT_FILE.fullmatch(path.name):
            is_adapter = match["stem"] == "adapter_model"
            found[str(path.parent), is_adapter][match["kind"]].append(name)
    return [name for kinds in found.values() for name in kinds.get("safetensors") or kinds["bin"]]


def has_weights(folder: Path) -> bool:
    """Return True if a folder holds files of weights."""
    return any(any(folder.glob(pattern)) for pattern in WEIGHT_PATTERNS)


def missing_weights(checkpoint: Path) -> list[str]:
    """Return the files of weights that a checkpoint's small files list and its folder lacks."""
    folders = (
        str(entry.get("path", ""))
        for entry in _read(checkpoint / "modules.json", list[dict[str, Any]]) or ()
        if str(entry.get("type", "")).endswith(WEIGHTED_MODULES)
    )
    modules = [f"{folder}/model.safetensors" for folder in folders if not has_weights(checkpoint / folder)]
    return _missing_shards(checkpoint) + modules


def _missing_shards(checkpoint: Path) -> list[str]:
    """Return the missing shards of the format that lacks the fewest; none if one file holds all weights."""
    if any((checkpoint / name).is_file() for name in WHOLE_FILES):
        return []
    indexes = (_read(checkpoint / f"{name}.index.json", dict[str, Any]) or {} for name in WHOLE_FILES)
    formats = [sorted(set(index["weight_map"].values())) for index in indexes if index.get("weight_map")]
    missing = [[name for name in names if not (checkpoint / name).is_file()] for names in formats]
    return min(missing, key=len, default=[])


def _read(path: Path, kind: Any) -> Any:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError):
        # A file that is not valid JSON is reported where it is read for its content.
        return None
