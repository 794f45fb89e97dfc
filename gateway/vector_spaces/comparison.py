"""Report on the vectors that replicas return for the same texts: a matrix and verdicts."""

from collections.abc import Collection, Mapping, Sequence
from itertools import combinations

import msgspec
import numpy as np

from backends.contract import Backend, BackendKind, Operation, Vectors
from backends.reference_texts import REFERENCE_TEXTS, embed_in_batches, max_inputs_per_request, min_cosine
from gateway.config.schema import UpstreamSettings
from gateway.vector_spaces.fingerprint import (
    Fingerprint,
    base_name,
    cosine_text,
    fingerprint_of,
    needed_cosine,
    similarity,
)


class ReplicaVectors(msgspec.Struct, frozen=True):
    """Vectors from one replica.

    vectors: (n, dim) float32, of the reference texts followed by the other texts. min_cosine: from the
    `vector_space` settings of its upstream.
    """

    name: str
    upstream: str
    fingerprint: Fingerprint
    vectors: Vectors
    tokens: int
    min_cosine: float | None = None


class StoredMatch(msgspec.Struct, frozen=True):
    """A replica compared with the stored fingerprint of its upstream."""

    id: str
    cosine: float
    needed: float
    fits: bool


class ReplicaReport(msgspec.Struct, frozen=True):
    """One replica in a report. tokens: of all texts, by its own count. stored: None without a fingerprint."""

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
    """Two replicas compared.

    cosine: the minimum over all texts; None if the vectors differ in length. needed: None if the two are not
    expected to agree.
    """

    one: str
    other: str
    cosine: float | None
    needed: float | None
    fits: bool
    same_tokens: bool


class Report(msgspec.Struct, frozen=True):
    """Result of a comparison. texts: their number, reference texts included."""

    texts: int
    members: tuple[ReplicaReport, ...]
    pairs: tuple[Pair, ...]

    @property
    def agrees(self) -> bool:
        """True if all replicas that are expected to agree do."""
        stored = [member.stored.fits for member in self.members if member.stored is not None]
        return all([*stored, *(pair.fits for pair in self.pairs)])


async def read_vectors(
    name: str, upstream: str, backend: Backend, settings: UpstreamSettings, texts: Sequence[str]
) -> ReplicaVectors | None:
    """Return a replica's vectors, or None if it embeds nothing.

    texts: begin with the reference texts. Each request may take `attempt_timeout_s`. Raises: BackendError.
    """
    capabilities = await backend.describe(settings.attempt_timeout_s)
    if Operation.EMBED not in capabilities.operations:
        return None
    inputs_max = max_inputs_per_request(capabilities, settings.request_inputs)
    reply = await embed_in_batches(backend, texts, inputs_max, settings.attempt_timeout_s)
    fingerprint = fingerprint_of(reply.vectors[: len(REFERENCE_TEXTS)], settings.backend, capabilities)
    return ReplicaVectors(
        name, upstream, fingerprint, reply.vectors, reply.tokens, settings.vector_space.min_cosine
    )


def report_on(
    replicas: Sequence[ReplicaVectors],
    stored: Mapping[str, Fingerprint],
    groups: Collection[Collection[str]] = (),
    required_cosine: float | None = None,
) -> Report:
    """Compare every two replicas, and each with the stored fingerprint of its upstream.

    stored: fingerprints by upstream. groups: upstreams that serve one model, for each model.
    required_cosine: of every two replicas, whatever their models.
    """
    members = tuple([_replica_report(replica, stored.get(replica.upstream)) for replica in replicas])
    pairs = []
    for first, second in combinations(replicas, 2):
        needed = _needed_cosine(first, second, groups) if required_cosine is None else required_cosine
        pairs.append(_pair(first, second, needed))
    return Report(len(replicas[0].vectors) if replicas else 0, members, tuple(pairs))


def _replica_report(replica: ReplicaVectors, stored: Fingerprint | None) -> ReplicaReport:
    fingerprint = replica.fingerprint
    norms = np.linalg.norm(replica.vectors.astype(np.float64), axis=1)
    return ReplicaReport(
        replica.name,
        replica.upstream,
        fingerprint.kind,
        fingerprint.model_id,
        fingerprint.dtype,
        fingerprint.dimensions,
        replica.tokens,
        float(norms.min()),
        float(norms.max()),
        fingerprint.id,
        None if stored is None else _stored_match(stored, replica),
    )


def _stored_match(stored: Fingerprint, replica: ReplicaVectors) -> StoredMatch:
    cosine = similarity(stored, replica.fingerprint)
    needed = needed_cosine(stored, replica.fingerprint, replica.min_cosine)
    return StoredMatch(stored.id, cosine, needed, cosine >= needed)


def _pair(first: ReplicaVectors, second: ReplicaVectors, needed: float | None) -> Pair:
    comparable = first.vectors.shape == second.vectors.shape
    cosine = min_cosine(first.vectors, second.vectors) if comparable else None
    fits = needed is None or (cosine is not None and cosine >= needed)
    return Pair(first.name, second.name, cosine, needed, fits, first.tokens == second.tokens)


def _needed_cosine(
    first: ReplicaVectors, second: ReplicaVectors, groups: Collection[Collection[str]]
) -> float | None:
    """Return the cosine that two replicas have to reach, None if they may differ.

    They may not in one upstream, behind one model, or if their own models have the same name.
    """
    if first.upstream == second.upstream:
        return needed_cosine(first.fingerprint, second.fingerprint, first.min_cosine)
    serve_one_model = any(first.upstream in group and second.upstream in group for group in groups)
    if serve_one_model or base_name(first.fingerprint.model_id) == base_name(second.fingerprint.model_id):
        return needed_cosine(first.fingerprint, second.fingerprint, None)
    return None


def findings(report: Report) -> list[str]:
    """Return a sentence for each disagreement, or one that there is none."""
    lines = [
        _stored_difference(member.name, member.upstream, member.stored)
        for member in report.members
        if member.stored and not member.stored.fits
    ]
    lines += [_pair_difference(pair) for pair in report.pairs if not pair.fits]
    lines += [
        f"{pair.one} and {pair.other} count tokens differently"
        for pair in report.pairs
        if pair.needed is not None and not pair.same_tokens
    ]
    return lines or ["all that should agree does"]


def _stored_difference(name: str, upstream: str, stored: StoredMatch) -> str:
    reached = cosine_text(stored.cosine, stored.needed)
    return (
        f"{name} does not give the vectors of its stored fingerprint: {reached}, {stored.needed} needed; "
        f"`gateway verify {upstream} --accept` replaces it"
    )


def _pair_difference(pair: Pair) -> str:
    assert pair.needed is not None
    reached = "other dimensions" if pair.cosine is None else cosine_text(pair.cosine, pair.needed)
    return f"{pair.one} and {pair.other} differ: {reached}, {pair.needed} needed"
