"""Fingerprint of a vector space: vectors of reference texts, and the cosine that equal spaces reach. Pure."""

import msgspec
import numpy as np

from backends.contract import BackendKind, Capabilities, Vectors
from backends.reference_texts import min_cosine, reference_digest

# Minimum cosine despite rounding, for the same server in the same precision and for a different one.
SAME_MIN_COSINE = 0.999
ACROSS_MIN_COSINE = 0.99
# int8 next to any other precision: only equal vectors.
QUANTIZED_MIN_COSINE = 1.0
QUANTIZED_DTYPE = "int8"


class Fingerprint(msgspec.Struct, frozen=True):
    """A vector space, by example.

    id: 16 hex digits, shown to callers. rows: the reference texts' vectors, (n, dimensions) little-endian
    float32. The other fields describe the replica they come from.
    """

    id: str
    kind: BackendKind
    model_id: str
    dtype: str | None
    dimensions: int
    rows: bytes

    @property
    def vectors(self) -> Vectors:
        """(n, dimensions) float32, read-only."""
        return np.frombuffer(self.rows, "<f4").reshape(-1, self.dimensions)


def fingerprint_of(vectors: Vectors, kind: BackendKind, capabilities: Capabilities) -> Fingerprint:
    """Build the fingerprint of a replica.

    vectors: of the reference texts, (n, dim) float32, from a replica with these capabilities.
    """
    rows = vectors.astype("<f4").tobytes()
    model_id, dtype = capabilities.model_id, capabilities.dtype
    return Fingerprint(reference_digest(vectors), kind, model_id, dtype, vectors.shape[1], rows)


def decode_fingerprint(stored: bytes) -> Fingerprint:
    """Decode a stored fingerprint. Raises: ValueError if this release cannot read it."""
    fingerprint = msgspec.msgpack.decode(stored, type=Fingerprint)
    row_bytes = 4 * fingerprint.dimensions
    if fingerprint.dimensions < 1 or not fingerprint.rows or len(fingerprint.rows) % row_bytes:
        raise ValueError("its rows and its dimensions do not fit")
    return fingerprint


def base_name(model_id: str) -> str:
    """Return the last part of a model id: servers name a model by hub id, by path, or as configured."""
    return model_id.rstrip("/").rpartition("/")[2].lower()


def needed_cosine(first: Fingerprint, second: Fingerprint, configured: float | None) -> float:
    """Return the cosine that two fingerprints have to reach: the configured one, or by kind and precision."""
    if configured is not None:
        return configured
    if (first.dtype == QUANTIZED_DTYPE) != (second.dtype == QUANTIZED_DTYPE):
        return QUANTIZED_MIN_COSINE
    same = (first.kind, first.dtype) == (second.kind, second.dtype)
    return SAME_MIN_COSINE if same else ACROSS_MIN_COSINE


def cosine_text(cosine: float, needed: float) -> str:
    """Return a cosine below the needed one with at least four digits, and as many as show the difference."""
    digits = next((digits for digits in range(4, 17) if f"{cosine:.{digits}f}" != f"{needed:.{digits}f}"), 17)
    return f"{cosine:.{digits}f}"


def matches(first: Fingerprint, second: Fingerprint, configured: float | None) -> bool:
    """Return True if two fingerprints are of one vector space."""
    return similarity(first, second) >= needed_cosine(first, second, configured)


def similarity(first: Fingerprint, second: Fingerprint) -> float:
    """Return the minimum cosine over the reference texts; 0 if the vectors differ in length."""
    return min_cosine(first.vectors, second.vectors)
