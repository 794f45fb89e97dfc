"""What can be read off a network's token vectors: one way for each kind of output, and a next word.

Every reader takes `Hidden` and returns one value a sequence, in order. Rule: no Python loop over tokens.
Sources: SPLADE (Formal et al., 2021) as sentence-transformers 6.2 pools it; BGE-M3 (Chen et al., 2024) as
FlagEmbedding 1.3 reads its weights; ColBERT (Khattab and Zaharia, 2020).
"""

from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from backends.contract import TermWeights, Vectors
from backends.torch.checkpoint import PoolingMode, Splade
from backends.torch.pooling import pool
from backends.torch.sequences import Sequence

# Logits of the whole vocabulary that are held at a time: a batch's would take gigabytes.
CHUNK_BYTES = 64 * 1024 * 1024


class Hidden:
    """A batch's last hidden states. vectors: (rows, longest, dim). tokens: (rows, longest), 1 = a token."""

    def __init__(self, vectors: Tensor, tokens: Tensor, sequences: Many[Sequence]) -> None:
        self.vectors = vectors
        self.tokens = tokens
        self.sequences = sequences

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        return [len(one.ids) for one in self.sequences]

    def flat(self) -> Tensor:
        """(all tokens, dim), without padding."""
        return self.vectors[self.tokens.bool()]

    def split(self, values: Tensor) -> list[Vectors]:
        """(all tokens, …) → for each sequence (its tokens, …) float32 on the CPU."""
        ends = np.cumsum(self.lengths)[:-1]
        return np.split(values.float().cpu().numpy(), ends)


Reader: TypeAlias = Callable[[Hidden], Any]


class Pooled:
    """One vector a text, and what sentence-transformers does to it: (dim,) float32."""

    def __init__(self, modes: tuple[PoolingMode, ...], after: nn.Module) -> None:
        self._modes = modes
        self._after = after

    def __call__(self, hidden: Hidden) -> Vectors:
        """(rows, dim)."""
        mask = hidden.tokens
        if any(one.skip for one in hidden.sequences):
            mask = mask.clone()
            for row, one in enumerate(hidden.sequences):
                mask[row, : one.skip] = 0
        vectors: Vectors = self._after(pool(hidden.vectors, mask, self._modes)).cpu().numpy()
        return vectors


def token_vectors(hidden: Hidden) -> list[Vectors]:
    """The last hidden state of each token."""
    return hidden.split(hidden.flat())


class SpladeTerms:
    """A masked language model's logits as weights of terms: the largest, or the sum, over a text's tokens."""

    def __init__(self, head: nn.Module, vocabulary: int, splade: Splade) -> None:
        self._head = head
        self._vocabulary = vocabulary
        self._splade = splade
        self._step = max(1, CHUNK_BYTES // (4 * vocabulary))

    def __call__(self, hidden: Hidden) -> list[TermWeights]:
        """For each sequence its terms."""
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
            pooled = self._weight(pooled)
        return [_nonzero(row) for row in pooled.cpu().numpy()]

    def _add(self, pooled: Tensor, logits: Tensor) -> None:
        if self._splade.strategy == "max":
            # Weights rise with their logits, so one of each pair need be computed; zeros stand for the relu.
            torch.maximum(pooled, logits.amax(dim=0).float(), out=pooled)
        else:
            pooled += self._weight(logits.float()).sum(dim=0)

    def _weight(self, logits: Tensor) -> Tensor:
        once = logits.relu().log1p()
        return once.log1p() if self._splade.twice else once


class LexicalTerms:
    """A weight for each token by one linear layer: the largest of each id, specials left out (BGE-M3)."""

    def __init__(self, layer: nn.Module, unused: frozenset[int]) -> None:
        self._layer = layer
        self._unused = np.array(sorted(unused), dtype=np.int32)

    def __call__(self, hidden: Hidden) -> list[TermWeights]:
        """For each sequence its terms."""
        weights = hidden.split(self._layer(hidden.flat().float()).relu().squeeze(-1))
        return [self._largest(one.ids, row) for one, row in zip(hidden.sequences, weights, strict=True)]

    def _largest(self, ids: list[int], weights: Vectors) -> TermWeights:
        indices, places = np.unique(np.array(ids, dtype=np.int32), return_inverse=True)
        values = np.zeros(len(indices), dtype=np.float32)
        np.maximum.at(values, places, weights)
        kept = (values > 0) & ~np.isin(indices, self._unused) | ~np.isfinite(values)
        return TermWeights(indices[kept], values[kept])


class LateVectors:
    """A projected vector a token, of length 1, as late interaction compares them.

    drop_first: whether the first token, the text's own, gets none (BGE-M3). skipped: ids that get none in
    a document.
    """

    def __init__(self, projection: nn.Module, *, drop_first: bool, skipped: frozenset[int]) -> None:
        self._projection = projection
        self._drop_first = drop_first
        self._skipped = np.array(sorted(skipped), dtype=np.int64)

    def __call__(self, hidden: Hidden) -> list[Vectors]:
        """For each sequence (its tokens that count, dim)."""
        projected = nn.functional.normalize(self._projection(hidden.flat().float()), dim=-1)
        pairs = zip(hidden.sequences, hidden.split(projected), strict=True)
        return [self._counting(one, vectors) for one, vectors in pairs]

    def _counting(self, one: Sequence, vectors: Vectors) -> Vectors:
        if self._drop_first:
            return vectors[1:]
        if one.is_query or not len(self._skipped):
            return vectors
        return vectors[~np.isin(one.ids, self._skipped)]


class NextWord:
    """How much likelier a language model's next token is the one that speaks for a document: (1,) logits.

    false_id: the token that speaks against it; None compares with nothing.
    """

    def __init__(self, head: nn.Module, true_id: int, false_id: int | None) -> None:
        self._head = head
        self._true_id = true_id
        self._false_id = false_id

    def __call__(self, hidden: Hidden) -> Vectors:
        """(rows, 1)."""
        last = torch.tensor(hidden.lengths, device=hidden.vectors.device) - 1
        rows = torch.arange(len(last), device=last.device)
        logits = self._head(hidden.vectors[rows, last].float())
        scores = logits[:, self._true_id]
        if self._false_id is not None:
            scores = scores - logits[:, self._false_id]
        found: Vectors = scores.float().unsqueeze(1).cpu().numpy()
        return found


def _nonzero(weights: Vectors) -> TermWeights:
    """weights: (vocabulary,)."""
    indices: NDArray[np.int32] = np.flatnonzero(weights).astype(np.int32)
    return TermWeights(indices, weights[indices])
