"""Memory of models: how much each holds, how it returns to the system, and how exhaustion is recognised.

Rule: memory of an unloaded model returns to the system. Memory that one forward pass frees is kept for the
next, except large pieces.
"""

import ctypes
import gc
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from backends.checkpoints.needed_files import WEIGHT_PATTERNS

# The processor's allocator raises a plain RuntimeError.
EXHAUSTED = ("can't allocate memory", "not enough memory")
# A tokenizer that can cut either side is held three times; measured with all-MiniLM's 30,522 words.
TOKENIZER_BYTES_PER_WORD = 620
# The last pattern is of a static model, whose table lies in a folder of its own.
WEIGHT_FILES = (*WEIGHT_PATTERNS, "*/*.safetensors")

# Parameters of glibc's `mallopt`, and the memory that stays free at the top of the heap. By default glibc
# returns it at once, and gets it again from the system, page by page, in every pass.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
KEPT_BYTES = 256 * 1024 * 1024
# Larger pieces come from the system and return to it; this is the greatest value that glibc accepts.
LARGE_BYTES = 32 * 1024 * 1024


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


def keep_freed() -> None:
    """Keep memory that a forward pass frees in the process, until `release_to_system`.

    Applies to the whole process. Call it before anything computes: arenas that threads already have stay.
    Tokenizers then start no threads: they allocate several times per token, and threads would wait for each
    other's turn in the one arena. A process that computes on a GPU must not call it.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        # The arena of a thread consists of heaps of 64 MiB, which are returned whatever is set here.
        set_option(M_ARENA_MAX, 1)
        set_option(M_MMAP_THRESHOLD, LARGE_BYTES)
        set_option(M_TRIM_THRESHOLD, KEPT_BYTES)


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
