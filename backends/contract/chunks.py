"""Embed chunks: one vector for each chunk of documents, computed with its whole document in view.

Late chunking here, and contextualized chunk embeddings of hosted models.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate, chain, pairwise
from typing import ClassVar, Literal, Self

import msgspec
import numpy as np

from backends.contract.capabilities import Capabilities, Operation, Truncate
from backends.contract.texts import normalized_bytes, token_upper_bounds
from backends.contract.vectors import Vectors
from backends.contract.work import (
    BaseReply,
    BaseWork,
    Choose,
    Lengths,
    Places,
    chained,
    chained_reports,
    check_widths,
    joined_counts,
    least,
    selected,
)


class ChunkSize(msgspec.Struct, frozen=True):
    """Size of the chunks that a model's server cuts of a text.

    tokens: of each chunk, special ones included. overlap: tokens that a chunk shares with the one before it;
    less than `tokens`. joins_ends: tokens without text, at the ends of a text, make no chunk of their own;
    they join the next one to them.
    """

    tokens: int
    overlap: int = 0
    joins_ends: bool = False

    def spans(self, length: int) -> list[tuple[int, int]]:
        """Return the first token of each chunk of a text and the one after its last. length: of the text."""
        stops = range(self.tokens, length + self.tokens - self.overlap, self.tokens - self.overlap)
        return [(stop - self.tokens, min(stop, length)) for stop in stops] or [(0, length)]


class ChunkRange(msgspec.Struct, frozen=True):
    """Place of a chunk in its document: in tokens of the model, and in characters of the text.

    characters: None for a chunk of special tokens only.
    """

    tokens: tuple[int, int]
    characters: tuple[int, int] | None = None


class EmbedChunks(BaseWork, frozen=True, tag="embed_chunks"):
    """Request for one vector for each chunk of each document.

    inputs: the chunks of each document, in order. The model reads them as one text with one prompt, and the
    vector of a chunk is the mean over its own tokens. A document is never cut: a longer one is refused.
    size: each document is one text, from which chunks of this size are made; the reply has their ranges.
    prompt_characters: as in `Embed`, of each document. max_tokens: a longer document is refused, too. The
    other fields are those of `Embed`.
    """

    inputs: tuple[tuple[str, ...], ...]
    size: ChunkSize | None = None
    normalize: bool = True
    dimensions: int | None = None
    prompt_name: str | None = None
    prompt_characters: tuple[int, ...] = ()
    max_tokens: int | None = None

    kind: ClassVar[Operation] = Operation.EMBED
    has_prompt: ClassVar[bool] = True
    instruction_place: ClassVar[Literal["pair", "text"] | None] = "text"
    joins_chunks: ClassVar[bool] = True

    @property
    def counted_inputs(self) -> int:
        """Number of chunks that the caller sent."""
        return sum(map(len, self.inputs))

    @property
    def reply_rows(self) -> int | None:
        return None if self.size is not None else self.counted_inputs

    def with_lengths(self, truncate: Truncate, max_tokens: int | None) -> Self:
        """Return the work with the length of a document, which is refused if it is longer."""
        return msgspec.structs.replace(self, max_tokens=max_tokens)

    def token_bounds(self, lengths: Lengths) -> list[int]:
        """Return the bounds of the documents; that of a chunk includes special tokens."""
        extra, most = normalized_bytes(lengths.prompt), lengths.most
        return [least(sum(token_upper_bounds(chunks)) + extra, most) for chunks in self.inputs]

    def is_offered_by(self, capabilities: Capabilities) -> bool:
        return self.kind in capabilities.operations and capabilities.late_chunking

    def with_prompts(self, prompts: Iterable[str]) -> Self:
        """Return the work with the prompt of each document written before its first chunk."""
        pairs = zip(prompts, self.inputs, strict=True)
        inputs = tuple([(prompt + chunks[0], *chunks[1:]) for prompt, chunks in pairs])
        return msgspec.structs.replace(self, inputs=inputs, prompt_name="")

    def with_prompt_lengths(self, plain: BaseWork) -> Self:
        if not isinstance(plain, EmbedChunks) or self.inputs == plain.inputs:
            return self
        pairs = zip(self.inputs, plain.inputs, strict=True)
        lengths = tuple([len(prompted[0]) - len(chunks[0]) for prompted, chunks in pairs])
        return msgspec.structs.replace(self, prompt_characters=lengths)

    def _choose(self, choose: Choose) -> Self:
        lengths = choose(self.prompt_characters) if self.prompt_characters else ()
        return msgspec.structs.replace(self, inputs=choose(self.inputs), prompt_characters=lengths)


class EmbedChunksReply(BaseReply, frozen=True, tag="embedded_chunks"):
    """Reply to `EmbedChunks`.

    vectors: (chunks of all documents, dim) float32, in the order of the documents and their chunks. counts:
    number of chunks of each document. ranges: of all chunks, if the request states a size. input_tokens:
    of each document.
    """

    vectors: Vectors
    counts: tuple[int, ...]
    tokens: int
    ranges: tuple[ChunkRange, ...] | None = None
    truncated: tuple[int, ...] | None = ()
    input_tokens: tuple[int, ...] | None = None

    @property
    def dense_vectors(self) -> Vectors:
        return self.vectors

    def input_of(self, row: int) -> int:
        return next(place for place, span in enumerate(self.spans) if row < span.stop)

    @property
    def numbers(self) -> int:
        """Numbers of vectors whose number the request does not state."""
        return 0 if self.ranges is None else self.vectors.size

    @property
    def spans(self) -> list[slice]:
        """Rows of each document."""
        return [slice(*pair) for pair in pairwise([0, *accumulate(self.counts)])]

    @classmethod
    def join(cls, replies: Sequence[Self], starts: Sequence[int]) -> Self:
        """Return one reply from those to several parts. Raises: ReplicaFailed."""
        vectors = [reply.vectors for reply in replies]
        check_widths(vectors)
        tokens, truncated = joined_counts(replies, starts)
        return cls(
            np.concatenate(vectors),
            chained([reply.counts for reply in replies]),
            tokens,
            chained_reports([reply.ranges for reply in replies]),
            truncated,
            chained_reports([reply.input_tokens for reply in replies]),
        )

    def select(self, places: Sequence[int]) -> Self:
        spans = self.spans
        rows = list(chain.from_iterable(range(spans[place].start, spans[place].stop) for place in places))
        return msgspec.structs.replace(
            self,
            vectors=self.vectors[np.array(rows, np.intp)],
            counts=tuple([self.counts[place] for place in places]),
            ranges=selected(self.ranges, rows),
            truncated=self._selected_cuts(places),
            input_tokens=selected(self.input_tokens, places),
        )

    def with_input_tokens(self, counts: Places) -> Self:
        return msgspec.structs.replace(self, input_tokens=counts)
