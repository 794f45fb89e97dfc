"""Inputs on their way through the network: token sequences in, rows of outputs out.

Does not need torch.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from backends.contract import ChunkRange, Output, PatchGrid, TermWeights, Vectors

# Output requested from a reranker or a classifier: its logits, which travel as the dense row.
LOGITS = frozenset({Output.DENSE})


class Features(msgspec.Struct, frozen=True):
    """A picture or recording as the network takes it.

    arrays: by the names of the network's inputs, each (1, ...). tokens: patches that it computes for them.
    grid: the patches of a page among its vectors.
    """

    arrays: Mapping[str, NDArray[Any]]
    tokens: int
    grid: PatchGrid | None = None

    @property
    def bytes(self) -> int:
        """Memory of all arrays."""
        return sum(array.nbytes for array in self.arrays.values())


class InputSequence(msgspec.Struct, frozen=True):
    """Token ids as the network takes them.

    skip: leading prompt tokens that pooling leaves out. attended_tokens: number of tokens, from the first,
    that others attend to, None for all; the rest are a query's fillers. is_query: True for the query of a
    model that treats queries and documents differently. table: route of an input whose terms are looked up,
    None for the network. chunks: for late chunking, the first token of each chunk and the one after its last;
    empty for any other sequence. features: of an input that is no text, None for a text.
    """

    ids: list[int]
    type_ids: list[int]
    skip: int = 0
    attended_tokens: int | None = None
    is_query: bool = False
    table: str | None = None
    chunks: tuple[tuple[int, int], ...] = ()
    features: Features | None = None

    @property
    def tokens(self) -> int:
        """Number of tokens and patches that the network computes."""
        return len(self.ids) + (0 if self.features is None else self.features.tokens)

    @property
    def attention_length(self) -> int:
        """Number of tokens that others attend to."""
        return len(self.ids) if self.attended_tokens is None else self.attended_tokens


class ReadPart(NamedTuple):
    """Features of a picture or recording. is_cut: it was longer than the model."""

    sequence: InputSequence
    is_cut: bool = False


class PreparedSequences(msgspec.Struct, frozen=True):
    """Sequences of one piece of work, and the outputs requested of each.

    lengths: tokens of each input as callers count them, without fillers. truncated: indices of inputs that
    were cut. compared: for late interaction, the two sequences that each score compares. ranges: of
    chunks that were made here.
    """

    sequences: Sequence[InputSequence]
    outputs: frozenset[Output]
    truncated: tuple[int, ...]
    lengths: tuple[int, ...]
    compared: tuple[tuple[int, int], ...] = ()
    ranges: tuple[ChunkRange, ...] | None = None

    def input_of(self, place: int) -> int | None:
        """Return the input that a sequence was made of, None if it was made of all of them."""
        if not self.compared:
            return place
        own = [index for index, pair in enumerate(self.compared) if place in pair]
        return None if len(own) == len(self.compared) > 1 else own[0]


class Row(msgspec.Struct, frozen=True):
    """Outputs of one sequence; None for an output that was not requested.

    dense: (dim,) float32, the pooled vector, or (labels,), the logits; for late chunking (chunks, dim).
    multivector, token_vectors: (tokens, dim) float32.
    """

    dense: Vectors | None = None
    terms: TermWeights | None = None
    multivector: Vectors | None = None
    token_vectors: Vectors | None = None

    def is_finite(self) -> bool:
        """Return True if no number is infinite or NaN."""
        return all(bool(np.isfinite(array).all()) for array in self._arrays())

    def _arrays(self) -> Iterator[Vectors]:
        for array in (self.dense, self.multivector, self.token_vectors):
            if array is not None:
                yield array
        if self.terms is not None:
            yield self.terms.values


class Head(Protocol):
    """Loaded network that computes one row per sequence."""

    def run(self, sequences: Sequence[InputSequence], outputs: frozenset[Output]) -> list[Row]:
        """Compute the rows of some sequences, each with exactly these outputs. Logits count as dense."""
