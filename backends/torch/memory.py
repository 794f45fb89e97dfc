"""Memory of models: how much each holds, how it returns to the system, and how exhaustion is recognised.

Rule: memory of an unloaded model returns to the system.
"""

import ctypes
import gc
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from backends.needed_files import WEIGHT_PATTERNS

# The processor's allocator raises a plain RuntimeError.
EXHAUSTED = ("can't allocate memory", "not enough memory")
# A tokenizer that can cut either side is held three times; measured with all-MiniLM's 30,522 words.
TOKENIZER_BYTES_PER_WORD = 620
# The last pattern is of a static model, whose table lies in a folder of its own.
WEIGHT_FILES = (*WEIGHT_PATTERNS, "*/*.safetensors")


def held_bytes(root: Any) -> int:
    """Return the bytes of all tensors of a network, each storage once, and those of its copies elsewhere.

    oneDNN's weights are included, and what objects report as `copied_bytes`.
    """
    storages: dict[int, int] = {}
    for holder in _holders(root, set()):
        if not isinstance(holder, Tensor):
            storages[id(holder)] = holder.copied_bytes
        elif holder.is_mkldnn:
            storages[id(holder)] = holder.numel() * holder.element_size()
        else:
            storage = holder.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def files_bytes(checkpoint: Path) -> int:
    """Return the size of a checkpoint's weight files: an estimate of the memory that a load takes."""
    for pattern in WEIGHT_FILES:
        size = sum(path.stat().st_size for path in checkpoint.glob(pattern))
        if size:
            return size
    return 0


def release_to_system() -> None:
    """Return all unreferenced memory to the system."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def is_exhausted(error: BaseException) -> bool:
    """Return whether the device or the machine ran out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in EXHAUSTED)


def _holders(value: Any, seen: set[int]) -> Iterator[Any]:
    """Yield tensors, and objects with `copied_bytes`."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
        return
    if _is_own(value) and hasattr(value, "copied_bytes"):
        yield value
    for inner in _children(value):
        yield from _holders(inner, seen)


def _is_own(value: Any) -> bool:
    return type(value).__module__.startswith("backends.")


def _children(value: Any) -> Iterator[Any]:
    """Yield what may hold tensors: contents of containers, modules, and this engine's own objects."""
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        yield from value
    elif isinstance(value, nn.Module) or _is_own(value):
        yield from getattr(value, "__dict__", {}).values()
