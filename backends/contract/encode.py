"""Encode: several kinds of output per text, or one kind that is not dense."""

from collections.abc import Sequence
from typing import ClassVar, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from backends.contract.capabilities import Capabilities, Operation, Output, Truncate
from backends.contract.embed import PromptedWork
from backends.contract.vectors import Vectors
from backends.contract.work import (
    BaseReply,
    Chat,
    Item,
    chained,
    chained_reports,
    check_widths,
    joined_counts,
    selected,
)


class Encode(PromptedWork, frozen=True, tag="encode"):
    """Request for several kinds of output per input, or for one kind that is not dense.

    A request for dense vectors only is an `Embed`. normalize and dimensions apply to the dense vector. The
    other fields are those of `Embed`.
    """

    inputs: tuple[str, ...]
    outputs: frozenset[Output]
    normalize: bool = True
    dimensions: int | None = None
    prompt_name: str | None = None
    truncate: Truncate = Truncate.RIGHT
    prompt_characters: tuple[int, ...] = ()
    max_tokens: int | None = None
    chat: Chat | None = None
    special_tokens: bool = True

    kind: ClassVar[Operation] = Operation.ENCODE

    def is_offered_by(self, capabilities: Capabilities) -> bool:
        return Operation.ENCODE in capabilities.operations and self.outputs <= capabilities.outputs

    def outputs_of(self, model: Capabilities) -> frozenset[Output]:
        return self.outputs


class TermWeights(msgspec.Struct, frozen=True):
    """Term weights of one input.

    indices: (k,) int32, vocabulary ids in ascending order. values: (k,) float32, all different from 0.
    """

    indices: NDArray[np.int32]
    values: Vectors


class PatchGrid(msgspec.Struct, frozen=True):
    """Places of a picture's patches among the vectors of its input.

    first: index of the upper left patch; the others follow it row by row.
    """

    first: int
    rows: int
    columns: int


class EncodeReply(BaseReply, frozen=True, tag="encoded"):
    """Requested outputs of each input, in input order; outputs that were not requested are None.

    dense: (n_inputs, dim). multivector, token_vectors: one array (tokens of the input, dim) per input.
    grids: the patches of each input's picture, None for a text; None if the backend does not report them.
    The other fields are those of `EmbedReply`.
    """

    tokens: int
    dense: Vectors | None = None
    sparse: tuple[TermWeights, ...] | None = None
    multivector: tuple[Vectors, ...] | None = None
    token_vectors: tuple[Vectors, ...] | None = None
    truncated: tuple[int, ...] | None = ()
    input_tokens: tuple[int, ...] | None = None
    grids: tuple[PatchGrid | None, ...] | None = None

    @property
    def dense_vectors(self) -> Vectors | None:
        return self.dense

    @property
    def numbers(self) -> int:
        """Numbers of vectors of tokens, and of terms with their weights."""
        vectors = sum([rows.size for rows in (*(self.multivector or ()), *(self.token_vectors or ()))])
        return vectors + sum([2 * len(terms.indices) for terms in self.sparse or ()])

    @classmethod
    def join(cls, replies: Sequence[Self], starts: Sequence[int]) -> Self:
        """Return one reply from those to several parts. Raises: ReplicaFailed."""
        tokens, truncated = joined_counts(replies, starts)
        dense = [reply.dense for reply in replies if reply.dense is not None]
        check_widths(dense)
        return cls(
            tokens,
            np.concatenate(dense) if dense else None,
            _requested([reply.sparse for reply in replies]),
            _requested([reply.multivector for reply in replies]),
            _requested([reply.token_vectors for reply in replies]),
            truncated,
            chained_reports([reply.input_tokens for reply in replies]),
            chained_reports([reply.grids for reply in replies]),
        )

    def select(self, places: Sequence[int]) -> Self:
        return msgspec.structs.replace(
            self,
            dense=None if self.dense is None else self.dense[np.array(places, np.intp)],
            sparse=selected(self.sparse, places),
            multivector=selected(self.multivector, places),
            token_vectors=selected(self.token_vectors, places),
            truncated=self._selected_cuts(places),
            input_tokens=selected(self.input_tokens, places),
            grids=selected(self.grids, places),
        )


def _requested(parts: Sequence[tuple[Item, ...] | None]) -> tuple[Item, ...] | None:
    """Return the outputs of all parts one after the other, or None if the kind was not requested."""
    present = [part for part in parts if part is not None]
    return chained(present) if present else None
