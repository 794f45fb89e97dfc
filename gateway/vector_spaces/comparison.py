"""Whether several servers give the same vectors for the same texts, as a matrix and as judgments. Pure."""

from collections.abc import Mapping, Sequence
from itertools import combinations

import msgspec
import numpy as np

from backends.canaries import min_cosine
from backends.contract import Vectors
from backends.registry import BackendKind
from gateway.vector_spaces.fingerprint import Fingerprint, likeness, needed_cosine


class ReplicaVectors(msgspec.Struct, frozen=True):
    """What one replica gave. vectors: (n, dim) float32 of the canaries and the texts beside, in order.

    min_cosine: as its upstream's `vector_space` says.
    """

    name: str
    upstream: str
    fingerprint: Fingerprint
    vectors: Vectors
    tokens: int
    min_cosine: float | None = None


class StoredMatch(msgspec.Struct, frozen=True):
    """What a replica gives beside the fingerprint that stands of its upstream."""

    id: str
    cosine: float
    needed: float
    fits: bool


class ReplicaReport(msgspec.Struct, frozen=True):
    """One replica in a report. tokens: of all texts, as it counts. stored: None where none stands."""

    name: str
    upstream: str
    backend: BackendKind
    model_id: str
    dtype: str | None
    dimensions: int
    tokens: int
    least_norm: float
    greatest_norm: float
    fingerprint: str
    stored: StoredMatch | None


class Pair(msgspec.Struct, frozen=True):
    """Two replicas. cosine: the least of all texts; None where their vectors differ in length.

    needed: None where nobody says that they should agree.
    """

    one: str
    other: str
    cosine: float | None
    needed: float | None
    fits: bool
    same_tokens: bool


class Report(msgspec.Struct, frozen=True):
    """All of it. texts: how many were compared, canaries included."""

    texts: int
    members: tuple[ReplicaReport, ...]
    pairs: tuple[Pair, ...]

    @property
    def agrees(self) -> bool:
        """Whether all that should agree does."""
        stored = [one.stored.fits for one in self.members if one.stored is not None]
        return all([*stored, *(pair.fits for pair in self.pairs)])


def report_on(
    given: Sequence[ReplicaVectors], stored: Mapping[str, Fingerprint], asked_cosine: float | None = None
) -> Report:
    """stored: fingerprints by upstream. asked_cosine: what every two must reach, whatever their models."""
    members = tuple([_member(one, stored.get(one.upstream)) for one in given])
    pairs = tuple([_pair(one, other, asked_cosine) for one, other in combinations(given, 2)])
    return Report(len(given[0].vectors) if given else 0, members, pairs)


def _member(given: ReplicaVectors, stored: Fingerprint | None) -> ReplicaReport:
    made = given.fingerprint
    norms = np.linalg.norm(given.vectors.astype(np.float64), axis=1)
    return ReplicaReport(
        given.name,
        given.upstream,
        made.kind,
        made.model_id,
        made.dtype,
        made.dimensions,
        given.tokens,
        float(norms.min()),
        float(norms.max()),
        made.id,
        None if stored is None else _beside(stored, given),
    )


def _beside(stored: Fingerprint, given: ReplicaVectors) -> StoredMatch:
    cosine = likeness(stored, given.fingerprint)
    needed = needed_cosine(stored, given.fingerprint, given.min_cosine)
    return StoredMatch(stored.id, cosine, needed, cosine >= needed)


def _pair(one: ReplicaVectors, other: ReplicaVectors, asked_cosine: float | None) -> Pair:
    comparable = one.vectors.shape == other.vectors.shape
    cosine = min_cosine(one.vectors, other.vectors) if comparable else None
    needed = asked_cosine if asked_cosine is not None else _needed(one, other)
    fits = needed is None or (cosine is not None and cosine >= needed)
    return Pair(one.name, other.name, cosine, needed, fits, one.tokens == other.tokens)


def _needed(one: ReplicaVectors, other: ReplicaVectors) -> float | None:
    """What two must reach that serve one upstream, or models of one name."""
    if one.upstream == other.upstream:
        return needed_cosine(one.fingerprint, other.fingerprint, one.min_cosine)
    if _base_name(one.fingerprint.model_id) == _base_name(other.fingerprint.model_id):
        return needed_cosine(one.fingerprint, other.fingerprint, None)
    return None


def _base_name(model_id: str) -> str:
    """Servers name a model by its hub id, by a path, or as they were told."""
    return model_id.rstrip("/").rpartition("/")[2].lower()
