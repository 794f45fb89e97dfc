"""Networks of static models: a table with one vector per token, and the mean of a text's rows.

The names, shapes and number formats of the table's tensors are proven without reading their values. Sources:
see `backends.checkpoints.static_models`.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag

from backends.checkpoints.static_models import StaticModel, unknown_token
from backends.contract import Output
from backends.contract.errors import ModelUnavailable
from backends.tokens.tokenizer import TextTokenizer
from backends.torch.inputs.sequences import InputSequence, Row
from backends.torch.networks.weight_files import FORMATS, StoredTensor, read_file, read_headers

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


class TokenTable:
    """Vectors of tokens.

    rows: (rows, dim), in the number format of the file or a configured one. mapping: (vocabulary,) int64, row
    of each token; None if token ids are rows. factors: (vocabulary,) float32, factor of each token's vector.
    unknown_id: token that does not count, None if all do.
    """

    def __init__(
        self, rows: Tensor, mapping: Tensor | None, factors: Tensor | None, unknown_id: int | None
    ) -> None:
        self.rows = rows
        self.mapping = mapping
        self.factors = factors
        self.unknown_id = unknown_id

    def means(self, ids: Tensor, counts: Tensor) -> Tensor:
        """Return the mean vector of each text, zeros for a text without tokens: (texts, dim) float32.

        ids: (tokens,) int64, those of all texts. counts: (texts,) int64, tokens of each text.
        """
        places = ids if self.mapping is None else self.mapping[ids]
        rows = self.rows
        if rows.dtype != torch.float32:
            # PyTorch would round the sums to the table's number format.
            rows = rows.index_select(0, places).float()
            places = torch.arange(len(places), device=places.device)
        factors = None if self.factors is None else self.factors[ids]
        offsets = counts.cumsum(0) - counts
        sums = embedding_bag(places, rows, offsets, mode="sum", per_sample_weights=factors)
        return sums / counts.clamp(min=1).unsqueeze(1)


class StaticHead:
    """Head of a static model: the mean of a table's rows, projected."""

    def __init__(self, table: TokenTable, projections: nn.Module) -> None:
        self._table = table
        self._projections = projections.to(table.rows.device)

    @torch.inference_mode()
    def run(self, sequences: Sequence[InputSequence], outputs: frozenset[Output]) -> list[Row]:
        """Compute rows with a (dim,) dense vector."""
        del outputs
        unknown, device = self._table.unknown_id, self._table.rows.device
        texts = [[id_ for id_ in sequence.ids if id_ != unknown] for sequence in sequences]
        counts = torch.tensor([len(ids) for ids in texts], device=device)
        ids = torch.tensor([*chain.from_iterable(texts)], dtype=torch.long, device=device)
        return [Row(vector) for vector in self._projections(self._table.means(ids, counts)).cpu().numpy()]


def read_table(
    static: StaticModel, tokenizer: TextTokenizer, dtype: torch.dtype, device: torch.device
) -> TokenTable:
    """Load a model's table. Raises: ModelUnavailable if it does not fit its tokenizer, or is damaged."""
    file = read_table_file(static)
    if file is None:
        raise ModelUnavailable(f"there is no {static.weights}; fetch the model again")
    check_vocabulary(static, file, tokenizer.vocabulary_size)
    tensors = read_file(static.weights)
    rows, mapping, factors = (tensors.get(name) for name in (file.name, MAPPING_NAME, FACTORS_NAME))
    assert rows is not None
    if mapping is not None and not (mapping.min() >= 0 and mapping.max() < len(rows)):
        raise refuse_table(static.weights, f"a {MAPPING_NAME} to rows beyond the table's {len(rows)}")
    for name, tensor in tensors.items():
        if not all(extreme.isfinite() for extreme in torch.aminmax(tensor)):
            raise refuse_table(static.weights, f"a number in {name} that is not finite")
    return TokenTable(
        # A copy: the file may be changed or removed while the model serves.
        rows.to(device, dtype, copy=True),
        None if mapping is None else mapping.to(device, torch.int64, copy=True),
        None if factors is None else factors.to(device, torch.float32, copy=True),
        _unknown_id(static, tokenizer) if static.drops_unknown else None,
    )


def _unknown_id(static: StaticModel, tokenizer: TextTokenizer) -> int | None:
    token = unknown_token(static)
    return tokenizer.token_id(token) if isinstance(token, str) else token
