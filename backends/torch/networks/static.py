"""Networks of static models: a table with one vector per token, and the mean of a text's rows.

Sources: see `backends.checkpoints.static_models`.
"""

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag

from backends.checkpoints.static_models import StaticModel, unknown_token
from backends.contract import Output
from backends.contract.errors import ModelUnavailable
from backends.tokens.tokenizer import TextTokenizer
from backends.torch.inputs.sequences import InputSequence, Row
from backends.torch.networks.static_files import (
    FACTORS_NAME,
    MAPPING_NAME,
    check_vocabulary,
    read_table_file,
    refuse_table,
)
from backends.torch.networks.weight_files import read_file


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
