"""Files of weights: which ones a network is read from, what is checked before, and single tensors of them.

Only this module imports safetensors. Rule: code in a file of weights is never run.
"""

import hashlib
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from backends.errors import ModelUnavailable
from backends.torch.refusals import first_line

# In the order in which transformers looks for them.
NETWORK_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
# Name of a large file in the cache of the hub: the SHA-256 of its content.
CONTENT_DIGEST = re.compile("[0-9a-f]{64}")
# Errors of reading a file that is damaged, or is no file of weights.
READ_ERRORS = (OSError, RuntimeError, KeyError, ValueError, EOFError, SafetensorError, UnpicklingError)


class ShardIndex(msgspec.Struct, frozen=True):
    """Content of `….index.json`. weight_map: tensor name → file name."""

    weight_map: dict[str, str]


def network_files(checkpoint: Path) -> list[Path]:
    """Return the files that hold a network's tensors, each of them whole.

    Raises: ModelUnavailable if one is missing, cut off, or not the file that was published.
    """
    name = next((name for name in NETWORK_FILES if (checkpoint / name).is_file()), None)
    if name is None:
        raise ModelUnavailable(f"{checkpoint} has no weights: it needs {' or '.join(NETWORK_FILES[::2])}")
    files = _shards(checkpoint / name) if name.endswith(".json") else [checkpoint / name]
    for file in files:
        check_file(file)
    return files


def check_file(path: Path) -> None:
    """Check that a file of weights is whole, and that it is the published file where its digest is known.

    Raises: ModelUnavailable.
    """
    try:
        if path.suffix == ".safetensors":
            # A header must account for every byte of the file.
            with safe_open(path, "pt"):
                pass
        published = path.resolve().name if path.is_symlink() else ""
        if not CONTENT_DIGEST.fullmatch(published):
            return
        status = path.stat()
        digest = _sha256(path.resolve(), status.st_size, status.st_mtime_ns)
    except READ_ERRORS as error:
        raise unreadable(path, error) from error
    if digest != published:
        raise ModelUnavailable(
            f"{path} is damaged: its SHA-256 is {digest}, and that of the published file is {published}; "
            "delete it and fetch the model again"
        )


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a small module's folder. Raises: ModelUnavailable."""
    path = folder / "model.safetensors"
    return read_file(path if path.is_file() else folder / "pytorch_model.bin")


def read_file(path: Path) -> dict[str, Tensor]:
    """Return all tensors of a file: safetensors, or a state dict of torch. Raises: ModelUnavailable."""
    check_file(path)
    try:
        return load_file(path) if path.suffix == ".safetensors" else _read_pickled(path)
    except READ_ERRORS as error:
        raise unreadable(path, error) from error


def read_tensor(checkpoint: Path, name: str) -> Tensor | None:
    """Return one tensor from a network's files, None if they have none of that name.

    Raises: ModelUnavailable.
    """
    for path in network_files(checkpoint):
        try:
            tensor = _tensor_of(path, name)
        except READ_ERRORS as error:
            raise unreadable(path, error) from error
        if tensor is not None:
            return tensor
    return None


def unreadable(path: Path, error: Exception) -> ModelUnavailable:
    """Return the error for a file of weights that could not be read."""
    return ModelUnavailable(
        f"the weights in {path} could not be read: {first_line(error)}; fetch the file again"
    )


def _shards(index: Path) -> list[Path]:
    try:
        names = msgspec.json.decode(index.read_bytes(), type=ShardIndex).weight_map.values()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelUnavailable(f"{index} is no valid index of weights: {error}") from error
    shards = [index.parent / name for name in sorted(set(names))]
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing:
        raise ModelUnavailable(
            f"{len(missing)} of {len(shards)} files that {index} names are missing: "
            f"{', '.join(missing[:3])}; fetch the model again"
        )
    return shards


def _tensor_of(path: Path, name: str) -> Tensor | None:
    if path.suffix != ".safetensors":
        return _read_pickled(path).get(name)
    with safe_open(path, "pt") as file:
        tensor: Tensor | None = file.get_tensor(name) if name in _names(file) else None
    return tensor


def _names(file: Any) -> Iterator[str]:
    yield from file.keys()


def _read_pickled(path: Path) -> dict[str, Tensor]:
    state: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    return state


@lru_cache(maxsize=1024)
def _sha256(path: Path, size: int, modified_ns: int) -> str:
    """Return the digest of a file, computed once for each size and time of its last change."""
    del size, modified_ns
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
