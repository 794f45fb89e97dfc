"""Classify: the score of every label for each text or pair."""

from collections.abc import Sequence
from typing import ClassVar, Self

import msgspec
import numpy as np

from backends.contract.capabilities import Operation, Truncate
from backends.contract.embed import TextWork
from backends.contract.errors import ReplicaFailed
from backends.contract.texts import token_upper_bound, token_upper_bounds
from backends.contract.vectors import Vectors
from backends.contract.work import BaseReply, Change, Chat, joined_counts


class Classify(TextWork, frozen=True, tag="classify"):
    """Request for the score of every label for each input, a text or a pair; raw scores are logits.

    max_tokens, chat, special_tokens: as in `Embed`.
    """

    inputs: tuple[str | tuple[str, str], ...]
    raw_scores: bool = False
    truncate: Truncate = Truncate.RIGHT
    max_tokens: int | None = None
    chat: Chat | None = None
    special_tokens: bool = True

    kind: ClassVar[Operation] = Operation.CLASSIFY

    @property
    def model_inputs(self) -> tuple[str | tuple[str, str], ...]:
        return self.inputs

    @property
    def single_texts(self) -> tuple[str, ...] | None:
        """All inputs if each is one text, else None."""
        texts = tuple([item for item in self.inputs if isinstance(item, str)])
        return texts if len(texts) == len(self.inputs) else None

    def _text_bounds(self) -> list[int]:
        if (texts := self.single_texts) is not None:
            return token_upper_bounds(texts)
        return [
            token_upper_bound(item) if isinstance(item, str) else sum(map(token_upper_bound, item))
            for item in self.inputs
        ]

    def map_texts(self, change: Change, change_query: Change | None = None) -> Self:
        first = change_query or change
        inputs = [i if isinstance(i, tuple) else change(i) for i in self.inputs]
        pairs = [(first(i[0]), change(i[1])) if isinstance(i, tuple) else i for i in inputs]
        return msgspec.structs.replace(self, inputs=tuple(pairs))


class ClassifyReply(BaseReply, frozen=True, tag="classified"):
    """Label scores, (n_inputs, n_labels) float32: inputs in order, labels in the model's order."""

    labels: tuple[str, ...]
    scores: Vectors
    tokens: int
    truncated: tuple[int, ...] | None = ()

    @classmethod
    def join(cls, replies: Sequence[Self], starts: Sequence[int]) -> Self:
        """Return one reply from those to several parts. Raises: ReplicaFailed."""
        labels = {reply.labels for reply in replies}
        if len(labels) > 1:
            raise ReplicaFailed("the replicas of this model give different labels")
        scores = np.concatenate([reply.scores for reply in replies])
        return cls(labels.pop(), scores, *joined_counts(replies, starts))

    def select(self, places: Sequence[int]) -> Self:
        scores = self.scores[np.array(places, np.intp)]
        return msgspec.structs.replace(self, scores=scores, truncated=self._selected_cuts(places))
