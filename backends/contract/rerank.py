"""Rerank and score: one score per pair of a query and a document."""

from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal, Self

import msgspec
import numpy as np

from backends.contract.capabilities import Capabilities, Operation, Truncate
from backends.contract.embed import LENGTH, Embed
from backends.contract.texts import normalized_bytes, token_upper_bound, token_upper_bounds
from backends.contract.vectors import Vectors
from backends.contract.work import (
    BaseReply,
    BaseWork,
    Change,
    Choose,
    Lengths,
    Places,
    VectorScores,
    joined_counts,
    least,
    text_bytes,
)


class PairWork(BaseWork, frozen=True):
    """Request for one score per pair of a query and a document."""

    kind: ClassVar[Operation] = Operation.RERANK
    instruction_place: ClassVar[Literal["pair", "text"] | None] = "pair"
    row_fault: ClassVar[str] = "the reply has not one score for each pair"

    @property
    def model_inputs(self) -> Sequence[tuple[str, str]]:
        raise NotImplementedError

    @property
    def reply_rows(self) -> int:
        return len(self.inputs)

    def token_bounds(self, lengths: Lengths) -> list[int]:
        extra = normalized_bytes(lengths.prompt) + normalized_bytes(self.instruction or "")
        bounds = self._pair_bounds()
        return [least(bound + extra, lengths.most) + lengths.pair_overhead for bound in bounds]

    def _pair_bounds(self) -> list[int]:
        raise NotImplementedError

    def is_offered_by(self, capabilities: Capabilities) -> bool:
        return Operation.RERANK in capabilities.operations and (
            self.instruction is None or capabilities.takes_instruction
        )

    def is_countable(self, capabilities: Capabilities) -> bool:
        """Return whether the model reads pairs as they are: others are put into a template."""
        return not (capabilities.overhead_tokens or self.instruction)

    def by_vectors(self, capabilities: Capabilities | None) -> VectorScores | None:
        operations = capabilities.operations if capabilities else frozenset()
        is_needed = Operation.RERANK not in operations and Operation.EMBED in operations
        return self._by_cosine() if is_needed else None

    def _by_cosine(self) -> VectorScores:
        raise NotImplementedError

    def is_cacheable(self, width: int, *, is_cut_plainly: bool = True) -> bool:
        """Return True: each pair has a score of its own."""
        return True

    def item_keys(self) -> Iterator[bytes]:
        """Yield the texts of each pair; the length says where the query ends."""
        for query, document in self.model_inputs:
            start = text_bytes(query)
            yield LENGTH.pack(len(start)) + start + text_bytes(document)

    def rows_of(self, reply: BaseReply) -> Vectors | None:
        return np.stack([reply.scores, reply.order], axis=1) if isinstance(reply, RerankReply) else None

    def reply_of_rows(
        self,
        rows: Vectors,
        tokens: int,
        truncated: Places | None,
        input_tokens: Places | None,
    ) -> "RerankReply":
        """Return the reply; a row has the score, and the number to sort it by."""
        scores, order = np.ascontiguousarray(rows.T)
        return RerankReply(scores, tokens, truncated, order)


class Rerank(PairWork, frozen=True, tag="rerank"):
    """Request for one score per document against the query; `ScoreKind` defines raw scores.

    instruction: the task for the model, in its template; None selects the template's own. Only a model that
    reports `takes_instruction` accepts one. max_tokens: as in `Embed`, of each pair.
    """

    query: str
    documents: tuple[str, ...]
    raw_scores: bool = False
    truncate: Truncate = Truncate.RIGHT
    instruction: str | None = None
    max_tokens: int | None = None

    @property
    def inputs(self) -> tuple[str, ...]:
        return self.documents

    @property
    def model_inputs(self) -> Sequence[tuple[str, str]]:
        return [(self.query, document) for document in self.documents]

    @property
    def characters(self) -> int:
        """Characters of all documents; the query counts with each, as it does in the model."""
        return sum([len(self.query) + len(document) for document in self.documents])

    @property
    def shared_texts(self) -> tuple[str, ...]:
        return (self.query,) if self.instruction is None else (self.query, self.instruction)

    def _choose(self, choose: Choose) -> Self:
        return msgspec.structs.replace(self, documents=choose(self.documents))

    def options(self) -> Self:
        return msgspec.structs.replace(self, query="", documents=())

    def _pair_bounds(self) -> list[int]:
        query = normalized_bytes(self.query)
        return [bound + query for bound in token_upper_bounds(self.documents)]

    def map_texts(self, change: Change, change_query: Change | None = None) -> Self:
        query, documents = (change_query or change)(self.query), tuple(map(change, self.documents))
        return msgspec.structs.replace(self, query=query, documents=documents)

    def _by_cosine(self) -> VectorScores:
        """Return the scores of the first text, the query, with each other."""
        count = len(self.documents)
        places = [(0, index + 1) for index in range(count)]
        return VectorScores(Embed((self.query, *self.documents)), places, (True, *[False] * count))


class Score(PairWork, frozen=True, tag="score"):
    """Request for one score per pair of a query and a document, answered by a `RerankReply`.

    instruction, max_tokens: as in `Rerank`.
    """

    pairs: tuple[tuple[str, str], ...]
    raw_scores: bool = False
    truncate: Truncate = Truncate.RIGHT
    instruction: str | None = None
    max_tokens: int | None = None

    @property
    def inputs(self) -> tuple[tuple[str, str], ...]:
        return self.pairs

    @property
    def model_inputs(self) -> tuple[tuple[str, str], ...]:
        return self.pairs

    @property
    def shared_texts(self) -> tuple[str, ...]:
        return () if self.instruction is None else (self.instruction,)

    def _choose(self, choose: Choose) -> Self:
        return msgspec.structs.replace(self, pairs=choose(self.pairs))

    def _pair_bounds(self) -> list[int]:
        return [token_upper_bound(query) + token_upper_bound(document) for query, document in self.pairs]

    def by_query(self) -> list[tuple[list[int], Rerank]]:
        """Return one rerank per query, each with the indices of its pairs, for wires that have no pairs."""
        indices_by_query: dict[str, list[int]] = {}
        for index, (query, _) in enumerate(self.pairs):
            indices_by_query.setdefault(query, []).append(index)
        return [
            (
                indices,
                Rerank(query, tuple([self.pairs[i][1] for i in indices]), self.raw_scores, self.truncate),
            )
            for query, indices in indices_by_query.items()
        ]

    def map_texts(self, change: Change, change_query: Change | None = None) -> Self:
        first = change_query or change
        pairs = tuple([(first(query), change(document)) for query, document in self.pairs])
        return msgspec.structs.replace(self, pairs=pairs)

    def _by_cosine(self) -> VectorScores:
        """Return the scores of each text with another, of which each is embedded once."""
        place_of = {text: i for i, text in enumerate(dict.fromkeys(t for pair in self.pairs for t in pair))}
        places = [(place_of[query], place_of[document]) for query, document in self.pairs]
        return VectorScores(Embed(tuple(place_of)), places, has_query=False)


class RerankReply(BaseReply, frozen=True, tag="reranked"):
    """Scores in document order, (n_documents,) float32; the other fields are those of `EmbedReply`.

    logits: of which the scores are the sigmoid, (n_documents,), None if they are not known or are the scores.
    """

    scores: Vectors
    tokens: int
    truncated: tuple[int, ...] | None = ()
    logits: Vectors | None = None

    @property
    def order(self) -> Vectors:
        """Numbers to sort documents by: above 16.6 the sigmoid of every logit is 1."""
        return self.scores if self.logits is None else self.logits

    @classmethod
    def join(cls, replies: Sequence[Self], starts: Sequence[int]) -> Self:
        known = [reply.logits for reply in replies if reply.logits is not None]
        logits = np.concatenate(known) if len(known) == len(replies) else None
        scores = np.concatenate([reply.scores for reply in replies])
        return cls(scores, *joined_counts(replies, starts), logits)

    def select(self, places: Sequence[int]) -> Self:
        rows = np.array(places, np.intp)
        return msgspec.structs.replace(
            self,
            scores=self.scores[rows],
            truncated=self._selected_cuts(places),
            logits=None if self.logits is None else self.logits[rows],
        )
