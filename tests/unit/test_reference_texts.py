"""Reference texts that identify a vector space, and fingerprints of their vectors."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.contract import Capabilities, Embed, EmbedReply, Operation, TokenizeReply, Vectors, Work
from backends.contract.errors import InvalidWork, ReplicaFailed
from backends.reference_texts import (
    REFERENCE_TEXTS,
    embed_in_batches,
    embed_reference_texts,
    max_inputs_per_request,
    min_cosine,
    reference_digest,
    row_cosines,
)
from gateway.vector_spaces.fingerprint import (
    ACROSS_MIN_COSINE,
    SAME_MIN_COSINE,
    cosine_text,
    decode_fingerprint,
    fingerprint_of,
    matches,
    needed_cosine,
    similarity,
)
from tests.fakes.tei import vector_of

CAPABILITIES = Capabilities("org/model", frozenset({Operation.EMBED}), dtype="float32")


def random_rows(seed: int, dimensions: int = 384) -> Vectors:
    """Return normalized vectors of the reference texts for a random model."""
    rows = np.random.default_rng(seed).standard_normal((len(REFERENCE_TEXTS), dimensions))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def test_computes_cosines_row_by_row() -> None:
    first = np.array([[1, 0], [0, 2], [0, 0], [0, 0]], np.float32)
    second = np.array([[3, 0], [1, 1], [0, 0], [1, 0]], np.float32)

    np.testing.assert_allclose([1, 0.5**0.5, 1, 0], row_cosines(first, second), rtol=1e-6)
    assert 0 == min_cosine(first, second)


def test_vectors_of_different_widths_have_cosine_zero() -> None:
    assert 0 == min_cosine(random_rows(0, 8), random_rows(0, 16))


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 10**6), dimensions=st.sampled_from([8, 384, 1024]))
def test_digest_identifies_the_space_and_ignores_rounding(seed: int, dimensions: int) -> None:
    rows = random_rows(seed, dimensions)
    noise = np.random.default_rng(seed + 1).standard_normal(rows.shape) * 1e-7

    assert reference_digest(rows) == reference_digest((rows * 1.5).astype(np.float32))
    steps = np.sort(np.abs(rows - np.roll(rows, 1, axis=0)), axis=1)
    if (steps[:, -1] - steps[:, -2] > 1e-5).all():
        assert reference_digest(rows) == reference_digest((rows + noise).astype(np.float32))
    assert reference_digest(rows) != reference_digest(random_rows(seed + 10**7, dimensions))


def test_digest_ignores_a_component_that_is_large_in_every_text() -> None:
    heavy = np.zeros((1, 384), np.float32)
    heavy[0, 7] = 50

    assert reference_digest(random_rows(1) + heavy) != reference_digest(random_rows(2) + heavy)
    assert reference_digest(random_rows(1) + heavy) == reference_digest(random_rows(1))


def test_decodes_an_encoded_fingerprint() -> None:
    fingerprint = fingerprint_of(random_rows(3), "tei", CAPABILITIES)
    read = decode_fingerprint(msgspec.msgpack.encode(fingerprint))

    assert fingerprint == read
    np.testing.assert_array_equal(random_rows(3), read.vectors)
    assert pytest.approx(1.0) == similarity(fingerprint, read)


@pytest.mark.parametrize(
    "stored",
    [
        b"",
        b"\x80",
        b"nothing",
        msgspec.msgpack.encode(fingerprint_of(random_rows(1), "tei", CAPABILITIES))[:-3],
    ],
)
def test_rejects_data_that_is_not_a_fingerprint(stored: bytes) -> None:
    with pytest.raises(ValueError, match=r".*"):
        decode_fingerprint(stored)


def test_rejects_rows_that_do_not_match_the_dimensions() -> None:
    fingerprint = fingerprint_of(random_rows(1, 8), "tei", CAPABILITIES)
    for dimensions in (0, -1, 5):
        with pytest.raises(ValueError, match="do not fit"):
            decode_fingerprint(
                msgspec.msgpack.encode(
                    type(fingerprint)(fingerprint.id, "tei", "m", None, dimensions, fingerprint.rows)
                )
            )


def test_needed_cosine_depends_on_kind_precision_and_configuration() -> None:
    rows = random_rows(1, 8)
    fingerprint = fingerprint_of(rows, "tei", CAPABILITIES)
    other_kind = fingerprint_of(rows, "vllm", CAPABILITIES)
    other_dtype = fingerprint_of(rows, "tei", Capabilities("m", frozenset(), dtype="bfloat16"))

    assert SAME_MIN_COSINE == needed_cosine(fingerprint, fingerprint, None)
    assert (
        ACROSS_MIN_COSINE
        == needed_cosine(fingerprint, other_kind, None)
        == needed_cosine(fingerprint, other_dtype, None)
    )
    assert 0.5 == needed_cosine(fingerprint, other_kind, 0.5)


def test_quantized_replicas_share_no_vector_space_with_others() -> None:
    rows = random_rows(6, 8)
    # A cosine of about 0.9998.
    near = rows + np.float32(0.02) * np.roll(rows, 1, axis=1)
    int8, float32, none = (
        fingerprint_of(vectors, "torch", Capabilities("m", frozenset(), dtype=dtype))
        for vectors, dtype in ((rows, "int8"), (near, "float32"), (near, None))
    )
    int8_too = fingerprint_of(near, "torch", Capabilities("m", frozenset(), dtype="int8"))

    assert not matches(int8, float32, None)
    assert not matches(none, int8, None)
    assert matches(int8, int8_too, None)
    assert matches(int8, float32, 0.995)


class RecordingReplica:
    """Replica that records the sizes of its requests. wrong: the reply to send instead of vectors."""

    def __init__(self, *, wrong: object = None) -> None:
        self.requests: list[int] = []
        self.wrong = wrong

    async def run(self, work: Work, timeout_s: float) -> object:  # noqa: ARG002
        assert isinstance(work, Embed)
        self.requests.append(len(work.inputs))
        if self.wrong is not None:
            return self.wrong
        return EmbedReply(np.stack([vector_of(text) for text in work.inputs]), len(work.inputs))


@pytest.mark.parametrize(("request_inputs", "requests"), [(1, [1] * 6), (4, [4, 2]), (6, [6]), (None, [6])])
async def test_embeds_reference_texts_in_batches_the_replica_accepts(
    request_inputs: int | None, requests: list[int]
) -> None:
    replica = RecordingReplica()
    reply = await embed_in_batches(replica, REFERENCE_TEXTS, request_inputs, 1)  # type: ignore[arg-type]

    assert requests == replica.requests
    assert 6 == reply.tokens
    np.testing.assert_array_equal([vector_of(text) for text in REFERENCE_TEXTS], reply.vectors)


@pytest.mark.parametrize(
    ("reported", "configured", "expected"),
    [(None, None, None), (4, None, 4), (None, 8, 8), (4, 8, 4), (8, 4, 4)],
)
def test_request_size_is_the_lower_of_replica_and_operator_bound(
    reported: int | None, configured: int | None, expected: int | None
) -> None:
    assert expected == max_inputs_per_request(
        Capabilities("m", frozenset(), request_inputs=reported), configured
    )


class PartlyRefusingReplica(RecordingReplica):
    """Replica that refuses texts of more characters than `most`, and with each the batch that it is in."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    async def run(self, work: Work, timeout_s: float) -> object:
        assert isinstance(work, Embed)
        for index, text in enumerate(work.inputs):
            if len(text) > self.most:
                raise InvalidWork("it is too long", input_index=index)
        return await super().run(work, timeout_s)


async def test_a_refused_reference_text_has_no_numbers() -> None:
    reply, failure = await embed_reference_texts(PartlyRefusingReplica(50), None, 1)  # type: ignore[arg-type]

    refused = {index for index, text in enumerate(REFERENCE_TEXTS) if len(text) > 50}
    assert refused
    assert refused < set(range(len(REFERENCE_TEXTS)))
    assert isinstance(failure, InvalidWork)
    assert refused == {index for index, row in enumerate(reply.vectors) if np.isnan(row).all()}


async def test_a_replica_that_refuses_all_reference_texts_raises_its_reason() -> None:
    with pytest.raises(InvalidWork, match="too long"):
        await embed_reference_texts(PartlyRefusingReplica(0), 2, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [TokenizeReply(()), EmbedReply(np.ones((1, 3), np.float32), 1)])
async def test_refuses_replies_without_one_vector_per_text(wrong: object) -> None:
    with pytest.raises(ReplicaFailed):
        await embed_in_batches(RecordingReplica(wrong=wrong), REFERENCE_TEXTS, None, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("cosine", "needed", "shown"),
    [
        (0.41237, 0.999, "0.4124"),
        (0.99896, 0.999, "0.99896"),
        (0.99999994, 1.0, "0.9999999"),
        (1 - 2**-53, 1, "0.9999999999999999"),
        (0.0, 0.999, "0.0000"),
    ],
)
def test_a_cosine_has_the_digits_that_tell_it_from_the_needed_one(
    cosine: float, needed: float, shown: str
) -> None:
    assert shown == cosine_text(cosine, needed)
