"""File of a static model's table: names, shapes and number formats of its tensors, proven without values."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from backends.checkpoints.static_models import StaticModel
from backends.contract.errors import ModelUnavailable
from backends.torch.networks.weight_files import FORMATS, StoredTensor, read_headers

# Names of the table: sentence-transformers' and wordllama's, and model2vec's.
TABLE_NAMES = ("embedding.weight", "embeddings")
# model2vec's row of each token, where tokens share rows, and its factor of each token.
MAPPING_NAME, FACTORS_NAME = "mapping", "weights"
# Number formats of tables, by their names in safetensors.
TABLE_DTYPES = {**FORMATS, "I8": torch.int8}


class TableFile(NamedTuple):
    """Tensors of a static model's file.

    name: of the table. vocabulary: number of token ids that have a vector. width: components of a vector.
    """

    tensors: Mapping[str, StoredTensor]
    name: str
    vocabulary: int
    width: int
    dtype: torch.dtype


def read_table_file(static: StaticModel) -> TableFile | None:
    """Return the tensors of a model's file, None if its weights are not there.

    Raises: ModelUnavailable if they are not exactly those of a static model.
    """
    if not static.weights.is_file():
        return None
    tensors = read_headers(static.weights)
    name = next((name for name in TABLE_NAMES if name in tensors), None)
    if name is None:
        raise refuse_table(static.weights, f"no tensor {' or '.join(TABLE_NAMES)}")
    # sentence-transformers reads nothing next to its own table.
    read = {name} if name == TABLE_NAMES[0] else {name, MAPPING_NAME, FACTORS_NAME}
    unexpected = sorted(tensors.keys() - read)
    if unexpected:
        raise refuse_table(static.weights, f"unexpected tensors ({', '.join(unexpected[:3])})")
    return _prove_shapes(static.weights, tensors, name)


def table_dtype(static: StaticModel) -> torch.dtype:
    """Return the number format of a model's table, float32 if its weights are not there.

    Raises: ModelUnavailable.
    """
    file = read_table_file(static)
    return torch.float32 if file is None else file.dtype


def table_width(static: StaticModel) -> int | None:
    """Return the components of a token's vector, None if the weights are not there.

    Raises: ModelUnavailable.
    """
    file = read_table_file(static)
    return None if file is None else file.width


def check_vocabulary(static: StaticModel, file: TableFile, tokens: int) -> None:
    """Raise ModelUnavailable if a token of the tokenizer has no vector. tokens: size of its vocabulary."""
    if file.vocabulary < tokens:
        raise refuse_table(static.weights, f"{file.vocabulary} vectors for {tokens} tokens of the tokenizer")


def refuse_table(path: Path, fault: str) -> ModelUnavailable:
    """Return the error for a file that holds no whole table."""
    return ModelUnavailable(f"{path} is no whole static model: it has {fault}; fetch the file again")


def _prove_shapes(path: Path, tensors: Mapping[str, StoredTensor], name: str) -> TableFile:
    table, mapping, factors = (tensors.get(key) for key in (name, MAPPING_NAME, FACTORS_NAME))
    assert table is not None
    if len(table.shape) != 2 or table.dtype not in TABLE_DTYPES:
        raise refuse_table(path, f"{name} of shape {table.shape} and type {table.dtype}")
    vocabulary = (table if mapping is None else mapping).shape[0]
    for key, tensor in ((MAPPING_NAME, mapping), (FACTORS_NAME, factors)):
        if tensor is not None and tensor.shape != (vocabulary,):
            raise refuse_table(path, f"{key} of shape {tensor.shape} for {vocabulary} tokens")
    return TableFile(tensors, name, vocabulary, table.shape[1], TABLE_DTYPES[table.dtype])
