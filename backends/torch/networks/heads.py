"""Loaded networks with readers at their end, and first passes through them: vectors, term weights, logits.

Works on tensors; knows nothing of queues or callers.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from backends.contract import Output, TermWeights, Truncate, Vectors
from backends.tokens.tokenizer import TextTokenizer
from backends.torch.inputs.sequences import LOGITS, Head, InputSequence, Row
from backends.torch.networks.readers import HiddenStates, Reader, nonzero_terms
from backends.torch.networks.transfers import to_device, to_host

# Outputs in the order of a row's fields.
COLUMNS = (Output.DENSE, Output.SPARSE, Output.MULTIVECTOR, Output.TOKENS)


class InputBuilder:
    """Builder of a batch's tensors as transformers models take them.

    device: of the tensors. passes_tokens: True if the model takes a mask of tokens that are not attended to,
    instead of padding.
    """

    def __init__(
        self, device: torch.device, pad_id: int, *, has_type_ids: bool, passes_tokens: bool = False
    ) -> None:
        self.has_type_ids = has_type_ids
        self._device = device
        self._pad_id = pad_id
        self._passes_tokens = passes_tokens

    def build(self, sequences: Sequence[InputSequence]) -> dict[str, Tensor]:
        """Return (batch, longest) int64 tensors, padded on the right."""
        longest = max(len(sequence.ids) for sequence in sequences)
        attended = [sequence.attention_length for sequence in sequences]
        tensors = {
            "input_ids": self._padded([sequence.ids for sequence in sequences], self._pad_id),
            "attention_mask": self._mask(attended, longest),
        }
        if self.has_type_ids:
            tensors["token_type_ids"] = self._padded([sequence.type_ids for sequence in sequences], 0)
        if self._passes_tokens and _has_fillers(sequences):
            tensors["tokens"] = self.token_mask(sequences)
        return tensors

    def token_mask(self, sequences: Sequence[InputSequence]) -> Tensor:
        """Return (batch, longest) int64: 1 for each token of a sequence."""
        lengths = [len(sequence.ids) for sequence in sequences]
        return self._mask(lengths, max(lengths))

    def _mask(self, lengths: Sequence[int], longest: int) -> Tensor:
        return self._placed(_inside(np.array(lengths), longest).astype(np.int64))

    def _padded(self, rows: Sequence[Sequence[int]], fill: int) -> Tensor:
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        is_inside = _inside(lengths, lengths.max())
        padded = np.full(is_inside.shape, fill, np.int64)
        # Faster than a list of padded rows, which torch would convert number by number.
        padded[is_inside] = np.fromiter(chain.from_iterable(rows), np.int64, lengths.sum())
        return self._placed(padded)

    def _placed(self, array: NDArray[np.int64]) -> Tensor:
        return to_device(torch.from_numpy(array), self._device)


class Encoder:
    """Network whose token vectors are read by one or several readers in one pass.

    projection: applied to each token's vector (…, dim) before it is read.
    """

    def __init__(
        self,
        network: nn.Module,
        inputs: InputBuilder,
        readers: Mapping[Output, Reader],
        projection: nn.Module | None = None,
    ) -> None:
        self._network = network
        self._inputs = inputs
        self._readers = readers
        self._projection = projection

    @torch.inference_mode()
    def run(self, sequences: Sequence[InputSequence], outputs: frozenset[Output]) -> list[Row]:
        """Compute a row per sequence; only late interaction's vectors are normalized."""
        inputs = self._inputs.build(sequences)
        vectors = self._network(**inputs).last_hidden_state
        if self._projection is not None:
            vectors = self._projection(vectors.float())
        has_fillers = _has_fillers(sequences)
        tokens = self._inputs.token_mask(sequences) if has_fillers else inputs["attention_mask"]
        hidden = HiddenStates(vectors, tokens, sequences)
        values = {output: self._readers[output](hidden) for output in outputs}
        absent = [None] * len(sequences)
        columns = (values.get(output, absent) for output in COLUMNS)
        return [Row(*fields) for fields in zip(*columns, strict=True)]


class TableHead:
    """Encoder of documents next to tables of weights, in which the terms of queries are looked up.

    tables: route → (vocabulary,) float32, the weight of each token. terms_max: as `Splade` has it.
    """

    def __init__(self, encoder: Head, tables: Mapping[str, Vectors], terms_max: int | None = None) -> None:
        self._encoder = encoder
        self._tables = tables
        self._terms_max = terms_max

    def run(self, sequences: Sequence[InputSequence], outputs: frozenset[Output]) -> list[Row]:
        """Compute a row per sequence; a looked-up one has the weight of each of its tokens once."""
        encoded = [sequence for sequence in sequences if sequence.table is None]
        rows = iter(self._encoder.run(encoded, outputs) if encoded else ())
        return [
            next(rows) if sequence.table is None else self._look_up(sequence.table, sequence.ids)
            for sequence in sequences
        ]

    def _look_up(self, table: str, ids: list[int]) -> Row:
        indices = np.unique(np.array(ids, dtype=np.int32))
        found = nonzero_terms(self._tables[table][indices], self._terms_max)
        return Row(terms=TermWeights(indices[found.indices], found.values))


class Classifier:
    """Sequence classifier: one logit per label for a text or a pair."""

    def __init__(self, classifier: nn.Module, inputs: InputBuilder) -> None:
        self._classifier = classifier
        self._inputs = inputs

    @torch.inference_mode()
    def run(self, sequences: Sequence[InputSequence], outputs: frozenset[Output]) -> list[Row]:
        """Compute rows of (labels,) logits."""
        del outputs
        logits = to_host(self._classifier(**self._inputs.build(sequences)).logits.float())
        return [Row(label_logits) for label_logits in logits]


def _inside(lengths: NDArray[np.int64], longest: int) -> NDArray[np.bool_]:
    """Return (rows, longest): True for the first places of each row, as many as its length."""
    is_inside: NDArray[np.bool_] = np.arange(longest) < lengths[:, None]
    return is_inside


def _has_fillers(sequences: Sequence[InputSequence]) -> bool:
    return any(sequence.attended_tokens is not None for sequence in sequences)


# Repetitions of a text in each sequence of a batch. The compiler treats a size as variable only after it has
# changed.
WORD = "ready"
SHAPES = ((1,), (2, 1, 1), (3, 2))
MEDIA_COUNTS = (1, 2)


def run_first_passes(
    head: Head, tokenizer: TextTokenizer, max_tokens: int, outputs: frozenset[Output], vocabulary: int = 0
) -> Iterator[list[Row]]:
    """Run batches of several shapes and yield the rows of each.

    outputs: those of the network, empty for logits. vocabulary: number of token ids that the network has, 0
    for all of the tokenizer's.
    """
    # Both texts of a pair may have a type of their own.
    encoded = tokenizer.encode([WORD, (WORD, WORD)], Truncate.RIGHT)
    text, pair = (
        InputSequence([min(id_, vocabulary - 1) for id_ in ids] if vocabulary else ids, type_ids)
        for ids, type_ids in zip(encoded.ids, encoded.type_ids, strict=True)
    )
    for repeats in SHAPES:
        yield head.run([_repeated(text, times, max_tokens) for times in repeats], outputs or LOGITS)
    if not outputs:
        yield head.run([pair], LOGITS)


def run_media_passes(head: Head, probe: InputSequence, outputs: frozenset[Output]) -> Iterator[list[Row]]:
    """Run batches of several sizes with a picture or recording and yield the rows of each."""
    for count in MEDIA_COUNTS:
        yield head.run([probe] * count, outputs)


def _repeated(text: InputSequence, times: int, max_tokens: int) -> InputSequence:
    return InputSequence((text.ids * times)[:max_tokens], (text.type_ids * times)[:max_tokens])
