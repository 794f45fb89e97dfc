"""What a model holds in memory, how that goes back to the system, and how running out of it is told.

Rule: what a model leaves is given back. What one forward pass frees is kept for the next, save
large pieces.
"""

import ctypes
import gc
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

# The processor's allocator raises a plain RuntimeError.
EXHAUSTED = ("can't allocate memory", "not enough memory")
# A tokenizer that cuts either side is held three times; measured with all-MiniLM's 30,522 words.
TOKENIZER_BYTES_A_WORD = 620
WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")

# glibc's names for what is set with `mallopt`, and how much is kept free at the heap's top. By itself it
# gives what lies there back at once, and has it anew from the system, page by page, in every pass.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
KEPT_BYTES = 256 * 1024 * 1024
# Larger pieces come from the system and go back to it: the most that glibc takes for this.
LARGE_BYTES = 32 * 1024 * 1024


def held_bytes(root: Any) -> int:
    """The bytes of all tensors that a network holds, each storage once, weights in oneDNN's order too."""
    storages: dict[int, int] = {}
    for tensor in _tensors(root, set()):
        if tensor.is_mkldnn:
            storages[id(tensor)] = tensor.numel() * tensor.element_size()
        else:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def files_bytes(checkpoint: Path) -> int:
    """What the files of a checkpoint's weights hold: as much as loading them takes, before it is known."""
    for pattern in WEIGHT_FILES:
        found = sum(path.stat().st_size for path in checkpoint.glob(pattern))
        if found:
            return found
    return 0


def keep_freed() -> None:
    """Have what a forward pass frees stay with the process until `give_back`. For the whole process,
    and best before it computes: arenas that threads have already stay.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        # A thread's own arena consists of heaps of 64 MiB, which are given back whatever is set here.
        set_option(M_ARENA_MAX, 1)
        set_option(M_MMAP_THRESHOLD, LARGE_BYTES)
        set_option(M_TRIM_THRESHOLD, KEPT_BYTES)


def give_back() -> None:
    """Have everything that nobody refers to returned to the system."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def is_exhausted(error: BaseException) -> bool:
    """Whether memory ran out, of the device or of the machine."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(one in str(error) for one in EXHAUSTED)


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
        return
    for inner in _inside(value):
        yield from _tensors(inner, seen)


def _inside(value: Any) -> Iterator[Any]:
    """What may hold tensors: containers, modules, and this engine's own objects around them."""
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        yield from value
    elif isinstance(value, nn.Module) or type(value).__module__.startswith("backends."):
        yield from getattr(value, "__dict__", {}).values()
