"""Readers of a network's token vectors: one per kind of output, and one for a language model's next word.

Every reader takes `HiddenStates` and returns one value per sequence, in order. Rule: no Python loop over
tokens. A pooling takes hidden (batch, tokens, dim) of any float dtype on the model's device and a mask
(batch, tokens), 1 = counts, and returns (batch, dim) float32: a sum in half precision loses the tail of long
inputs.
Sources: `Pooling` of sentence-transformers 6; SPLADE (Formal et al., 2021) as sentence-transformers 6.2
pools it; BGE-M3 (Chen et al., 2024) as FlagEmbedding 1.3 reads its weights; ColBERT (Khattab and Zaharia,
2020).
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from backends.contract import TermWeights, Vectors
from backends.recipe.recipe import PoolingMode, Splade
from backends.torch.inputs.sequences import InputSequence
from backends.torch.networks.transfers import to_device, to_host


def cls_pool(hidden: Tensor, mask: Tensor) -> Tensor:
    """Return the first token that counts."""
    first = mask.long().argmax(dim=1)
    return hidden[torch.arange(hidden.shape[0], device=hidden.device), first].float()


def last_pool(hidden: Tensor, mask: Tensor) -> Tensor:
    """Return the last token that counts."""
    last = mask.shape[1] - 1 - mask.long().flip(1).argmax(dim=1)
    return hidden[torch.arange(hidden.shape[0], device=hidden.device), last].float()


def max_pool(hidden: Tensor, mask: Tensor) -> Tensor:
    """Return the largest value of each component."""
    return hidden.float().masked_fill(mask.unsqueeze(-1) == 0, -torch.inf).amax(dim=1)


def mean_pool(hidden: Tensor, mask: Tensor) -> Tensor:
    """Return the average token."""
    return _weighted_sum(hidden, mask.float()) / mask.float().sum(dim=1, keepdim=True).clamp(min=1e-9)


def mean_sqrt_len_pool(hidden: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of tokens divided by the square root of their number."""
    count = mask.float().sum(dim=1, keepdim=True).clamp(min=1e-9)
    return _weighted_sum(hidden, mask.float()) / count.sqrt()


def weighted_mean_pool(hidden: Tensor, mask: Tensor) -> Tensor:
    """Return the average token, each weighted by its position, counted from 1."""
    positions = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    weights = mask.float() * positions
    return _weighted_sum(hidden, weights) / weights.sum(dim=1, keepdim=True).clamp(min=1e-9)


POOLINGS: dict[PoolingMode, Callable[[Tensor, Tensor], Tensor]] = {
    "cls": cls_pool,
    "lasttoken": last_pool,
    "max": max_pool,
    "mean": mean_pool,
    "mean_sqrt_len_tokens": mean_sqrt_len_pool,
    "weightedmean": weighted_mean_pool,
}


def pool(hidden: Tensor, mask: Tensor, modes: tuple[PoolingMode, ...]) -> Tensor:
    """Return the vectors of every mode, concatenated: (batch, dim · len(modes)) float32."""
    return torch.cat([POOLINGS[mode](hidden, mask) for mode in modes], dim=1)


def _weighted_sum(hidden: Tensor, weights: Tensor) -> Tensor:
    return torch.einsum("btd,bt->bd", hidden.float(), weights)


# Logits of the whole vocabulary that are held at a time: those of a batch would take gigabytes.
CHUNK_BYTES = 64 * 1024 * 1024


class HiddenStates:
    """Last hidden states of a batch.

    vectors: (rows, longest, dim). tokens: (rows, longest), 1 = a token, on the host or where the vectors are.
    """

    def __init__(self, vectors: Tensor, tokens: Tensor, sequences: Sequence[InputSequence]) -> None:
        self.vectors = vectors
        self.tokens = tokens
        self.sequences = sequences

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        return [len(sequence.ids) for sequence in self.sequences]

    def flat(self) -> Tensor:
        """Return the vectors without padding: (all tokens, dim)."""
        index = self.tokens.flatten().nonzero().squeeze(1)
        return self.vectors.flatten(0, 1)[to_device(index, self.vectors.device)]

    def split(self, values: Tensor) -> list[Vectors]:
        """Split (all tokens, …) by sequence: each (its tokens, …) float32 on the CPU."""
        ends = np.cumsum(self.lengths)[:-1]
        return np.split(to_host(values.float()), ends)


Reader: TypeAlias = Callable[[HiddenStates], Any]


class PooledReader:
    """Reader of one vector per text, pooled and projected: (dim,) float32."""

    def __init__(self, modes: tuple[PoolingMode, ...], projections: nn.Module) -> None:
        self._modes = modes
        self._projections = projections

    def __call__(self, hidden: HiddenStates) -> Vectors | list[Vectors]:
        """Return (rows, dim); or one array per row, if a row is a text in chunks, which has (chunks, dim)."""
        mask = hidden.tokens
        if any(sequence.skip for sequence in hidden.sequences):
            mask = mask.clone()
            for row, sequence in enumerate(hidden.sequences):
                mask[row, : sequence.skip] = 0
        pooled = pool(hidden.vectors, to_device(mask, hidden.vectors.device), self._modes)
        vectors: Vectors = to_host(self._projections(pooled))
        if not any(sequence.chunks for sequence in hidden.sequences):
            return vectors
        return [
            self._read_chunks(hidden.vectors[row], sequence.chunks) if sequence.chunks else vectors[row]
            for row, sequence in enumerate(hidden.sequences)
        ]

    def _read_chunks(self, vectors: Tensor, chunks: Sequence[tuple[int, int]]) -> Vectors:
        """Return the mean of each chunk of a sequence, projected: (chunks, dim)."""
        means = torch.stack([vectors[start:stop].float().mean(dim=0) for start, stop in chunks])
        projected: Vectors = to_host(self._projections(means))
        return projected


def read_token_vectors(hidden: HiddenStates) -> list[Vectors]:
    """Return the last hidden state of each token."""
    return hidden.split(hidden.flat())


class SpladeReader:
    """Reader of term weights from a masked language model's logits: maximum or sum over a text's tokens."""

    def __init__(self, head: nn.Module, vocabulary: int, splade: Splade) -> None:
        self._head = head
        self._vocabulary = vocabulary
        self._splade = splade
        self._step = max(1, CHUNK_BYTES // (4 * vocabulary))

    def __call__(self, hidden: HiddenStates) -> list[TermWeights]:
        """Return the terms of each sequence."""
        flat = hidden.flat()
        ends = np.cumsum(hidden.lengths).tolist()
        bounds = list(zip([0, *ends], ends, strict=False))
        pooled = torch.zeros(len(bounds), self._vocabulary, device=flat.device)
        for start in range(0, len(flat), self._step):
            logits = self._head(flat[start : start + self._step])
            for row, (first, end) in enumerate(bounds):
                part = logits[max(first - start, 0) : max(end - start, 0)]
                if len(part):
                    self._add(pooled[row], part)
        if self._splade.strategy == "max":
            pooled = self._weigh(pooled)
        return [nonzero_terms(row, self._splade.terms_max) for row in to_host(pooled)]

    def _add(self, pooled: Tensor, logits: Tensor) -> None:
        if self._splade.strategy == "max":
            # Weights grow with their logits: only the maximum is weighed. The initial zeros act as relu.
            torch.maximum(pooled, logits.amax(dim=0).float(), out=pooled)
        else:
            pooled += self._weigh(logits.float()).sum(dim=0)

    def _weigh(self, logits: Tensor) -> Tensor:
        weights = logits.relu().log1p()
        return weights.log1p() if self._splade.twice else weights


class LexicalReader:
    """Reader of BGE-M3's term weights: one linear layer, maximum per token id, special tokens excluded."""

    def __init__(self, layer: nn.Module, special_ids: frozenset[int]) -> None:
        self._layer = layer
        self._special_ids = np.array(sorted(special_ids), dtype=np.int32)

    def __call__(self, hidden: HiddenStates) -> list[TermWeights]:
        """Return the terms of each sequence."""
        weights = hidden.split(self._layer(hidden.flat().float()).relu().squeeze(-1))
        return [
            self._max_per_id(sequence.ids, row)
            for sequence, row in zip(hidden.sequences, weights, strict=True)
        ]

    def _max_per_id(self, ids: list[int], weights: Vectors) -> TermWeights:
        indices, places = np.unique(np.array(ids, dtype=np.int32), return_inverse=True)
        values = np.zeros(len(indices), dtype=np.float32)
        np.maximum.at(values, places, weights)
        # Infinite and NaN weights pass, so that the engine reports them.
        included = (values > 0) & ~np.isin(indices, self._special_ids) | ~np.isfinite(values)
        return TermWeights(indices[included], values[included])


class LateReader:
    """Reader of one projected vector per token, as late interaction compares them.

    drop_first: True if the first token, which stands for the text, gets no vector (BGE-M3). skipped: ids that
    get no vector in a document. scaled: True if each vector is scaled to length 1.
    """

    def __init__(
        self, projection: nn.Module, *, drop_first: bool, skipped: frozenset[int], scaled: bool = True
    ) -> None:
        self._projection = projection
        self._drop_first = drop_first
        self._scaled = scaled
        self._skipped = np.array(sorted(skipped), dtype=np.int64)

    def __call__(self, hidden: HiddenStates) -> list[Vectors]:
        """Return for each sequence (its tokens that count, dim)."""
        projected = self._projection(hidden.flat().float())
        if self._scaled:
            projected = nn.functional.normalize(projected, dim=-1)
        pairs = zip(hidden.sequences, hidden.split(projected), strict=True)
        return [self._counted(sequence, vectors) for sequence, vectors in pairs]

    def _counted(self, sequence: InputSequence, vectors: Vectors) -> Vectors:
        if self._drop_first:
            return vectors[1:]
        if sequence.is_query or not len(self._skipped):
            return vectors
        return vectors[~np.isin(sequence.ids, self._skipped)]


class LastWordReader:
    """Reader of a classifier's logits at the last token that is not padding by its id: (labels,) float32.

    A text may end in the padding token, which its tokenizer may add. Source: transformers,
    `GenericForSequenceClassification`.
    """

    def __init__(self, score: nn.Module, pad_id: int) -> None:
        self._score = score
        self._pad_id = pad_id

    def __call__(self, hidden: HiddenStates) -> Vectors:
        """Return (rows, labels)."""
        last = torch.tensor([self._last(sequence.ids) for sequence in hidden.sequences])
        vectors = hidden.vectors[torch.arange(len(last)), to_device(last, hidden.vectors.device)]
        logits: Vectors = to_host(self._score(vectors.float()))
        return logits

    def _last(self, ids: list[int]) -> int:
        """Return the place of the last token, the first one if all are padding."""
        return next((place for place in range(len(ids) - 1, 0, -1) if ids[place] != self._pad_id), 0)


class NextTokenReader:
    """Reader of a language model's preference for the token that accepts a document: (1,) logits.

    false_id: the token that rejects it, whose logit is subtracted; None subtracts nothing.
    """

    def __init__(self, head: nn.Module, true_id: int, false_id: int | None) -> None:
        self._head = head
        self._true_id = true_id
        self._false_id = false_id

    def __call__(self, hidden: HiddenStates) -> Vectors:
        """Return (rows, 1)."""
        last = to_device(torch.tensor(hidden.lengths) - 1, hidden.vectors.device)
        rows = torch.arange(len(last), device=last.device)
        logits = self._head(hidden.vectors[rows, last].float())
        scores = logits[:, self._true_id]
        if self._false_id is not None:
            scores = scores - logits[:, self._false_id]
        column: Vectors = to_host(scores.float().unsqueeze(1))
        return column


def nonzero_terms(weights: Vectors, most: int | None = None) -> TermWeights:
    """Return the terms of (vocabulary,) weights, with the `most` largest amounts if there are more."""
    indices: NDArray[np.int32] = np.flatnonzero(weights).astype(np.int32)
    if most is not None and len(indices) > most:
        largest = np.argpartition(-np.abs(weights[indices]), most - 1)[:most]
        indices = np.sort(indices[largest])
    return TermWeights(indices, weights[indices])
