"""Truncation, normalization, cosines and activations of vectors and scores, in pure numpy."""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

# Invariant: C-contiguous float32, so that a row is a view and its bytes are its base64 payload.
Vectors: TypeAlias = NDArray[np.float32]
# Of torch's `layer_norm`.
NORM_EPSILON = 1e-5


def shape_vectors(
    vectors: Vectors, *, dimensions: int | None, normalize: bool, norm_before_cut: bool = False
) -> Vectors:
    """Keep the first `dimensions` components of each row, then scale the rows to length 1 if requested.

    vectors: (n, dim) float32. norm_before_cut: rows that become narrower pass a layer norm without weights
    first. Returns (n, dimensions or dim) float32, C-contiguous. A row of zeros remains zeros.
    """
    if norm_before_cut and dimensions is not None and dimensions < vectors.shape[1]:
        vectors = _layer_norm(vectors)
    rows = vectors if dimensions is None else vectors[:, :dimensions]
    if normalize:
        # Summed in float64, because a float32 sum of 4,096 squares loses its last digits.
        lengths = np.sqrt(np.square(rows, dtype=np.float64).sum(axis=1, keepdims=True))
        rows = rows / np.maximum(lengths, 1e-12)
    return np.ascontiguousarray(rows, dtype=np.float32)


def _layer_norm(vectors: Vectors) -> Vectors:
    wide = vectors.astype(np.float64)
    centered = wide - wide.mean(axis=1, keepdims=True)
    scales = np.sqrt(np.square(centered).mean(axis=1, keepdims=True) + NORM_EPSILON)
    normed: Vectors = (centered / scales).astype(np.float32)
    return normed


def pair_cosines(first: Vectors, second: Vectors) -> Vectors:
    """Return the cosine of each row of first with the same row of second, both (n, dim), as (n,) float32.

    The cosine of a row of zeros is 0.
    """
    a = shape_vectors(first, dimensions=None, normalize=True)
    b = shape_vectors(second, dimensions=None, normalize=True)
    scores: Vectors = np.clip(np.einsum("nd,nd->n", a, b), -1.0, 1.0)
    return scores


def max_similarity(query: Vectors, documents: Sequence[Vectors]) -> Vectors:
    """Return, for each document, the sum over the query's vectors of the best product with a document vector.

    query: (its tokens, dim), documents: each (its tokens, dim), at least one. Returns (n_documents,) float32.
    Source: ColBERT (Khattab and Zaharia, 2020), MaxSim.
    """
    products = query @ np.concatenate(documents).T
    starts = np.cumsum([0, *(len(vectors) for vectors in documents[:-1])])
    best: Vectors = np.maximum.reduceat(products, starts, axis=1).sum(axis=0, dtype=np.float32)
    return best


def sigmoid(logits: Vectors) -> Vectors:
    """Compute 1 / (1 + e⁻ˣ) in float64 without overflow, and return it as float32."""
    scores: Vectors = (0.5 * (1.0 + np.tanh(0.5 * logits.astype(np.float64)))).astype(np.float32)
    return scores


def softmax(logits: Vectors) -> Vectors:
    """Compute the softmax of each row of (n, labels) in float64, and return it as float32."""
    powers = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    shares: Vectors = (powers / powers.sum(axis=1, keepdims=True)).astype(np.float32)
    return shares
