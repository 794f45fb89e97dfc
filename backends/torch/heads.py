"""A loaded network and what is read off its end: vectors, weights of terms, logits.

Knows tensors; knows nothing of queues, callers or text.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Many
from typing import Protocol

import torch
from torch import Tensor, nn

from backends.contract import Output
from backends.torch.readers import Hidden, Reader
from backends.torch.sequences import Row, Sequence


class Head(Protocol):
    """Sequences in, one row out for each."""

    def run(self, sequences: Many[Sequence], outputs: frozenset[Output]) -> list[Row]:
        """outputs: what to read off; every row has exactly these. Logits count as dense."""


class Rectangle:
    """A batch in the shape that transformers models take.

    tells_tokens: whether the model is told of tokens that are not attended to, instead of padding.
    """

    def __init__(
        self, device: torch.device, pad_id: int, *, has_type_ids: bool, tells_tokens: bool = False
    ) -> None:
        self._device = device
        self._pad_id = pad_id
        self._has_type_ids = has_type_ids
        self._tells_tokens = tells_tokens

    def inputs(self, sequences: Many[Sequence]) -> dict[str, Tensor]:
        """(batch, longest) int64 tensors on the model's device, padded on the right."""
        tensors = {
            "input_ids": self._rectangle([one.ids for one in sequences], self._pad_id),
            "attention_mask": self._rectangle([[1] * one.attended for one in sequences], 0),
        }
        longest = tensors["input_ids"].shape[1]
        short = longest - tensors["attention_mask"].shape[1]
        if short:
            tensors["attention_mask"] = nn.functional.pad(tensors["attention_mask"], (0, short))
        if self._has_type_ids:
            tensors["token_type_ids"] = self._rectangle([one.type_ids for one in sequences], 0)
        if self._tells_tokens and any(one.seen is not None for one in sequences):
            tensors["tokens"] = self.tokens(sequences)
        return tensors

    def tokens(self, sequences: Many[Sequence]) -> Tensor:
        """(batch, longest) int64: 1 where a sequence has a token."""
        return self._rectangle([[1] * len(one.ids) for one in sequences], 0)

    def _rectangle(self, rows: Many[list[int]], fill: int) -> Tensor:
        longest = max(len(row) for row in rows)
        padded = [row + [fill] * (longest - len(row)) for row in rows]
        return torch.tensor(padded, dtype=torch.long, device=self._device)


class Encoder:
    """A network whose token vectors are read in one way or several, in one pass."""

    def __init__(self, network: nn.Module, batch: Rectangle, readers: Mapping[Output, Reader]) -> None:
        self._network = network
        self._batch = batch
        self._readers = readers

    @torch.inference_mode()
    def run(self, sequences: Many[Sequence], outputs: frozenset[Output]) -> list[Row]:
        """A row for each sequence, its vectors not normalized but where late interaction wants them so."""
        inputs = self._batch.inputs(sequences)
        vectors = self._network(**inputs).last_hidden_state
        filled = any(one.seen is not None for one in sequences)
        tokens = self._batch.tokens(sequences) if filled else inputs["attention_mask"]
        hidden = Hidden(vectors, tokens, sequences)
        read = {output: self._readers[output](hidden) for output in outputs}
        nothing = [None] * len(sequences)
        columns = (read.get(output, nothing) for output in COLUMNS)
        return [Row(*values) for values in zip(*columns, strict=True)]


# The fields of a row, in order.
COLUMNS = (Output.DENSE, Output.SPARSE, Output.MULTIVECTOR, Output.TOKENS)


class Classifier:
    """A sequence classifier: a text or a pair in, one logit a label out."""

    def __init__(self, classifier: nn.Module, batch: Rectangle) -> None:
        self._classifier = classifier
        self._batch = batch

    @torch.inference_mode()
    def run(self, sequences: Many[Sequence], outputs: frozenset[Output]) -> list[Row]:
        """Rows of (labels,) logits."""
        del outputs
        logits = self._classifier(**self._batch.inputs(sequences)).logits.float().cpu().numpy()
        return [Row(one) for one in logits]
