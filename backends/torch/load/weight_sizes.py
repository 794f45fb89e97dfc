"""Sizes of a checkpoint's weights: in their files, and in the number formats in which a load holds them.

Reads headers only.
"""

from collections.abc import Mapping
from typing import TypeAlias

import torch

from backends.recipe.files import CheckpointFiles
from backends.recipe.recipe import ModelKind
from backends.torch import wire
from backends.torch.memory import files_bytes
from backends.torch.networks.formats import WeightFormats
from backends.torch.networks.static import read_table_file
from backends.torch.networks.weight_files import FORMATS, StoredTensor, stored_tensors

# Parts of names of matrices that compute in float32: further tables, and heads.
FLOAT_PARTS = ("embed", "shared", "pooler", "lm_head", "predictions", "classifier", "score", "vocab")
Tensors: TypeAlias = Mapping[str, StoredTensor]


def tensors_of(files: CheckpointFiles) -> Tensors | None:
    """Return all tensors of a checkpoint, None if no file on this machine can show them.

    Those of modules have the folder before their names. Raises: ModelUnavailable.
    """
    if files.static is not None:
        table = read_table_file(files.static)
        return None if table is None else table.tensors
    return stored_tensors(files.checkpoint, [module.folder for module in files.modules if module.folder])


def sizes_of(
    files: CheckpointFiles, kind: ModelKind, dtype: torch.dtype, fetched_bytes: int | None = None
) -> wire.WeightSizes:
    """Return the sizes of a checkpoint's weights. Raises: ModelUnavailable.

    dtype: of the matrix products; of the table of a static model. fetched_bytes: size of files that are not
    on this machine.
    """
    tensors = tensors_of(files)
    if tensors is None:
        return _estimated_sizes(files, dtype, files_bytes(files.checkpoint) or fetched_bytes)
    elements = sum(tensor.elements for tensor in tensors.values())
    file_bytes = sum(tensor.bytes for tensor in tensors.values())
    if kind == "static":
        return wire.WeightSizes(file_bytes, elements, elements * dtype.itemsize)
    names = {tensor.dtype for tensor in tensors.values()}
    stored = frozenset(FORMATS[name] for name in names & FORMATS.keys())
    formats = WeightFormats.of(dtype, stored, kind)
    if dtype == torch.int8:
        formats = formats._replace(products=dtype)
    vocabulary = files.config.get("vocab_size")
    held = sum(
        tensor.elements * _format_of(name, tensor, formats, vocabulary).itemsize
        for name, tensor in tensors.items()
    )
    return wire.WeightSizes(file_bytes, elements, held)


def _format_of(
    name: str, tensor: StoredTensor, formats: WeightFormats, vocabulary: int | None
) -> torch.dtype:
    """Return the number format in which a tensor is held: norms, biases and positions are float32."""
    if len(tensor.shape) < 2:
        return torch.float32
    if tensor.shape[0] == vocabulary:
        return formats.embedding
    return torch.float32 if any(part in name for part in FLOAT_PARTS) else formats.products


def _estimated_sizes(files: CheckpointFiles, dtype: torch.dtype, size: int | None) -> wire.WeightSizes:
    """Return the sizes for files of one number format, that of config.json."""
    name = files.config.get("dtype") or files.config.get("torch_dtype") or "float32"
    stated = getattr(torch, str(name), None)
    if not size or not isinstance(stated, torch.dtype):
        return wire.WeightSizes(size or None)
    elements = size // stated.itemsize
    # Only names and shapes show which weights have 8 bits.
    return wire.WeightSizes(size, elements, None if dtype == torch.int8 else elements * dtype.itemsize)
