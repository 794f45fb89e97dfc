"""A fingerprint: what an upstream's first replica made of the canaries. Pure."""

import msgspec
import numpy as np

from backends.canaries import canary_digest, min_cosine
from backends.contract import Capabilities, Vectors
from backends.registry import BackendKind

# What rounding leaves of a cosine of 1: the same server in the same precision, and another.
SAME_MIN_COSINE = 0.999
ACROSS_MIN_COSINE = 0.99


class Fingerprint(msgspec.Struct, frozen=True):
    """One vector space, by example.

    id: 16 hex digits, what callers are told. rows: the canaries' vectors, (n, dimensions) little-endian
    float32. The rest tells whose they are.
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


def fingerprint_of(vectors: Vectors, kind: BackendKind, told: Capabilities) -> Fingerprint:
    """vectors: of the canaries, (n, dim) float32, as a replica that told this gives them."""
    rows = vectors.astype("<f4").tobytes()
    return Fingerprint(canary_digest(vectors), kind, told.model_id, told.dtype, vectors.shape[1], rows)


def encoded(fingerprint: Fingerprint) -> bytes:
    """As it is stored."""
    return msgspec.msgpack.encode(fingerprint)


def decoded(stored: bytes) -> Fingerprint:
    """Raises: ValueError where it is no fingerprint that this release can read."""
    read = msgspec.msgpack.decode(stored, type=Fingerprint)
    if read.dimensions < 1 or not read.rows or len(read.rows) % (4 * read.dimensions):
        raise ValueError("its rows and its dimensions do not fit")
    return read


def needed_cosine(one: Fingerprint, other: Fingerprint, configured: float | None) -> float:
    """How like each other two must be: as configured, or by whether one server made both."""
    if configured is not None:
        return configured
    same = (one.kind, one.dtype) == (other.kind, other.dtype)
    return SAME_MIN_COSINE if same else ACROSS_MIN_COSINE


def likeness(one: Fingerprint, other: Fingerprint) -> float:
    """The least cosine of the canaries; 0 where their lengths differ."""
    return min_cosine(one.vectors, other.vectors)
