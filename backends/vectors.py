"""What is done to finished vectors and scores, the same for every backend. Pure numpy."""

import numpy as np

from backends.contract import Vectors


def shape_vectors(vectors: Vectors, *, dimensions: int | None, normalize: bool) -> Vectors:
    """Keep the first `dimensions` components of each row, then scale rows to length 1 if asked.

    vectors: (n, dim) float32. Returns (n, dimensions or dim) float32, C-contiguous. A row of zeros
    stays zeros.
    """
    kept = vectors if dimensions is None else vectors[:, :dimensions]
    if normalize:
        # Summed in float64: a row of 4,096 float32 squares loses its last digits otherwise.
        lengths = np.sqrt(np.square(kept, dtype=np.float64).sum(axis=1, keepdims=True))
        kept = kept / np.maximum(lengths, 1e-12)
    return np.ascontiguousarray(kept, dtype=np.float32)


def pair_cosines(ones: Vectors, others: Vectors) -> Vectors:
    """Cosine of each row with the row beside it, (n, dim) each: (n,) float32; 0 for a zero vector."""
    first = shape_vectors(ones, dimensions=None, normalize=True)
    second = shape_vectors(others, dimensions=None, normalize=True)
    scores: Vectors = np.clip(np.einsum("nd,nd->n", first, second), -1.0, 1.0)
    return scores


def sigmoid(logits: Vectors) -> Vectors:
    """1 / (1 + e⁻ˣ) in float64, returned as float32, without overflow at either end."""
    scores: Vectors = (0.5 * (1.0 + np.tanh(0.5 * logits.astype(np.float64)))).astype(np.float32)
    return scores


def softmax(logits: Vectors) -> Vectors:
    """Each row of (n, labels) as shares of 1, in float64, returned as float32."""
    powers = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    shares: Vectors = (powers / powers.sum(axis=1, keepdims=True)).astype(np.float32)
    return shares
