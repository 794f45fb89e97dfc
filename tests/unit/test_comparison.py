"""Comparison of replicas: which ones have to agree, and if they do."""

import numpy as np
import pytest

from backends.contract import BackendKind, Capabilities, Vectors
from gateway.vector_spaces.comparison import ReplicaVectors, report_on
from gateway.vector_spaces.fingerprint import fingerprint_of

ROWS = np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32)
ROWS /= np.linalg.norm(ROWS, axis=1, keepdims=True)


def replica(
    name: str,
    vectors: Vectors = ROWS,
    *,
    upstream: str | None = None,
    model: str = "org/model",
    kind: BackendKind = "tei",
    tokens: int = 10,
    min_cosine: float | None = None,
) -> ReplicaVectors:
    """Return the vectors of a replica; the first six belong to the reference texts."""
    capabilities = Capabilities(model, frozenset(), dtype="float32")
    return ReplicaVectors(
        name, upstream or name, fingerprint_of(vectors[:6], kind, capabilities), vectors, tokens, min_cosine
    )


def turned(cosine: float) -> Vectors:
    """Return the same vectors, one of them turned to this cosine."""
    rows = ROWS.copy()
    orthogonal = ROWS[1] - (ROWS[1] @ ROWS[7]) * ROWS[7]
    orthogonal /= np.linalg.norm(orthogonal)
    rows[7] = cosine * ROWS[7] + (1 - cosine**2) ** 0.5 * orthogonal
    return rows


def test_equal_vectors_agree_and_are_described() -> None:
    report = report_on([replica("a"), replica("b", kind="vllm", model="/models/Model/", tokens=11)], {})
    [pair] = report.pairs

    assert (True, 8) == (report.agrees, report.texts)
    assert (0.99, True, False) == (pair.needed, pair.fits, pair.same_tokens)
    assert pytest.approx(1.0) == pair.cosine
    assert pytest.approx((1.0, 1.0)) == (report.members[0].least_norm, report.members[0].greatest_norm)
    assert report.members[0].fingerprint == report.members[1].fingerprint


@pytest.mark.parametrize(("cosine", "agrees"), [(0.9995, True), (0.998, False), (0.5, False)])
def test_replicas_of_one_upstream_have_to_agree(cosine: float, agrees: bool) -> None:
    report = report_on([replica("a 1", upstream="a"), replica("a 2", turned(cosine), upstream="a")], {})

    assert agrees is report.agrees
    assert pytest.approx(cosine, abs=1e-4) == report.pairs[0].cosine


def test_configured_bound_applies_between_replicas() -> None:
    bound = 0.9
    pair = [replica("a 1", upstream="a", min_cosine=bound), replica("a 2", turned(0.95), upstream="a")]

    assert report_on(pair, {}).agrees


def test_other_models_agree_only_on_demand() -> None:
    pair = [replica("a"), replica("b", turned(0.5), model="org/other")]

    assert report_on(pair, {}).agrees
    assert report_on(pair, {}).pairs[0].needed is None
    assert not report_on(pair, {}, required_cosine=0.6).agrees
    assert report_on(pair, {}, required_cosine=0.4).agrees


def test_vectors_of_other_lengths_have_no_cosine() -> None:
    pair = [replica("a"), replica("b", ROWS[:, :8])]
    report = report_on(pair, {})

    assert (None, False, False) == (report.pairs[0].cosine, report.pairs[0].fits, report.agrees)
    assert not report_on([pair[0], replica("b", ROWS[:, :8], model="x")], {}, required_cosine=0.1).agrees


def test_compares_each_replica_with_the_stored_fingerprint() -> None:
    stored = replica("a").fingerprint
    opposite = replica("a", -ROWS)
    report = report_on([opposite], {"a": stored})
    [member] = report.members

    assert not report.agrees
    assert member.stored is not None
    assert (stored.id, False, 0.999) == (member.stored.id, member.stored.fits, member.stored.needed)
    assert report_on([replica("a")], {"a": stored}).agrees
    assert report_on([opposite], {"b": stored}).agrees
