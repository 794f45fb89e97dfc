"""Score parts: one score per pair of a query and a document of which one has pictures."""

from collections.abc import Sequence
from typing import ClassVar, Literal, Self, TypeAlias

import msgspec

from backends.contract.capabilities import Capabilities, Operation, Output, Truncate
from backends.contract.media import (
    EmbedParts,
    distinct,
    media_in,
    parts_bound,
    parts_bytes,
    parts_weight,
)
from backends.contract.work import (
    Audio,
    BaseWork,
    Choose,
    Image,
    Lengths,
    Part,
    Places,
    VectorScores,
)

# Parts of a query, and of its document.
PartsPair: TypeAlias = tuple[tuple[Part, ...], tuple[Part, ...]]


class ScoreParts(BaseWork, frozen=True, tag="score_parts"):
    """Request for one score per pair, answered by a `RerankReply`; at least one part is a picture.

    A reranker that reads pictures scores the pairs; elsewhere the vectors of a model that embeds pictures do.
    pairs: the parts of each query and its document. raw_scores, instruction, max_tokens: as in `Rerank`.
    """

    pairs: tuple[PartsPair, ...]
    raw_scores: bool = False
    truncate: Truncate = Truncate.RIGHT
    instruction: str | None = None
    max_tokens: int | None = None

    kind: ClassVar[Operation] = Operation.RERANK_IMAGE
    instruction_place: ClassVar[Literal["pair", "text"] | None] = "pair"

    @property
    def inputs(self) -> tuple[PartsPair, ...]:
        return self.pairs

    @property
    def reply_rows(self) -> int:
        return len(self.pairs)

    @property
    def media(self) -> Sequence[Image | Audio]:
        """Pictures of each query once, and of the document of each pair."""
        queries = dict.fromkeys([query for query, _ in self.pairs])
        return media_in([*queries, *(document for _, document in self.pairs)])

    @property
    def characters(self) -> int:
        """Characters of the texts of all pairs."""
        return sum(
            [len(part) for pair in self.pairs for side in pair for part in side if isinstance(part, str)]
        )

    @property
    def shared_texts(self) -> tuple[str, ...]:
        return () if self.instruction is None else (self.instruction,)

    def _choose(self, choose: Choose) -> Self:
        return msgspec.structs.replace(self, pairs=choose(self.pairs))

    def without_duplicates(self) -> tuple[Self, Places | None]:
        """Return the work with each different pair once, and their places; None if all are different."""
        found = distinct(self.pairs)
        return (self, None) if found is None else (self.select(found[0]), found[1])

    def token_bounds(self, lengths: Lengths) -> list[int]:
        extra = lengths.pair_overhead + sum([parts_bound((text,), lengths) for text in self.shared_texts])
        return [sum([parts_bound(side, lengths) for side in pair]) + extra for pair in self.pairs]

    def pixel_weights(self) -> Sequence[int]:
        return [sum(map(parts_weight, pair)) for pair in self.pairs]

    def wire_sizes(self, room: int | None) -> Sequence[int]:
        """Return an upper bound of each pair's bytes in JSON, pictures in base64; zeros without a bound."""
        if room is None:
            return [0] * len(self.pairs)
        return [sum([parts_bytes(side, room) for side in pair]) for pair in self.pairs]

    def is_offered_by(self, capabilities: Capabilities) -> bool:
        return Operation.RERANK_IMAGE in capabilities.operations and (
            self.instruction is None or capabilities.takes_instruction
        )

    def outputs_of(self, model: Capabilities) -> frozenset[Output]:
        """Return all outputs of the model, which decide how it scores."""
        return model.outputs

    def by_vectors(self, capabilities: Capabilities | None) -> VectorScores | None:
        """Return the scores of each query with its document: of one vector for each side, or of many.

        Each query and each document is embedded once. None if replicas score the pairs.
        """
        output = Output.DENSE
        if capabilities is not None:
            if Operation.RERANK_IMAGE in capabilities.operations:
                return None
            is_late = Operation.EMBED not in capabilities.operations
            output = Output.MULTIVECTOR if is_late and Output.MULTIVECTOR in capabilities.outputs else output
        sides = [side for query, document in self.pairs for side in ((True, query), (False, document))]
        place_of = {side: index for index, side in enumerate(dict.fromkeys(sides))}
        return VectorScores(
            EmbedParts(tuple([parts for _, parts in place_of]), output),
            [(place_of[True, query], place_of[False, document]) for query, document in self.pairs],
            [is_query for is_query, _ in place_of],
            has_query=len({query for query, _ in self.pairs}) == 1,
            raw=self.raw_scores,
        )
