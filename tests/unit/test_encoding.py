"""Encodings of vectors in replies."""

import base64

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from gateway.api.server.encoding import EmbeddingType, json_bytes, msgpack_bytes, quantize, vector_items

many = settings(max_examples=100, deadline=None)
VECTORS = arrays(
    np.float32,
    array_shapes(min_dims=2, max_dims=2, max_side=20),
    elements=st.floats(-1, 1, width=32, allow_subnormal=False),
)


@many
@given(VECTORS)
def test_floats_and_base64_decode_to_the_same_vectors(vectors: np.ndarray) -> None:
    floats = np.array(msgspec.json.decode(json_bytes(vector_items(vectors, "float"))), np.float32)
    decoded = [np.frombuffer(base64.b64decode(item), "<f4") for item in vector_items(vectors, "base64")]

    np.testing.assert_array_equal(vectors, floats)
    np.testing.assert_array_equal(vectors, decoded)


@many
@given(VECTORS)
def test_8_bit_quantization_errs_by_at_most_half_a_step(vectors: np.ndarray) -> None:
    signed = quantize(vectors, "int8").astype(np.float32) / 127
    unsigned = quantize(vectors, "uint8").astype(np.float32) / 127.5 - 1

    np.testing.assert_allclose(vectors, signed, atol=0.5 / 127 + 1e-6)
    np.testing.assert_allclose(vectors, unsigned, atol=0.5 / 127.5 + 1e-6)


@many
@given(VECTORS)
def test_binary_quantization_keeps_the_sign_of_each_component(vectors: np.ndarray) -> None:
    bits = np.unpackbits(quantize(vectors, "ubinary"), axis=1)
    signed = quantize(vectors, "binary")

    np.testing.assert_array_equal(vectors > 0, bits[:, : vectors.shape[1]])
    assert not bits[:, vectors.shape[1] :].any()
    np.testing.assert_array_equal(quantize(vectors, "ubinary").astype(int) - 128, signed.astype(int))
    assert (np.int8, np.uint8) == (signed.dtype, quantize(vectors, "ubinary").dtype)


@pytest.mark.parametrize(("kind", "expected"), [("int8", [-127, 127, 127]), ("uint8", [0, 255, 255])])
def test_clips_components_outside_the_range(kind: EmbeddingType, expected: list[int]) -> None:
    vector = np.array([[-1.0, 1.0, 7.0]], np.float32)

    assert [expected] == quantize(vector, kind).tolist()


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("ubinary", [0b10100000, 0b10000000]), ("binary", [0b10100000 - 128, 0])],
)
def test_packs_bits_from_the_highest_and_pads_the_last_byte_with_zeros(
    kind: EmbeddingType, expected: list[int]
) -> None:
    vector = np.array([[0.1, -0.1, 0.1, 0.0, -1, -1, -1, -1, 0.5]], np.float32)

    assert [expected] == quantize(vector, kind).tolist()


def test_encodes_a_msgpack_array_in_the_format_of_msgpack_numpy() -> None:
    fields = msgspec.msgpack.decode(
        msgpack_bytes(np.array([[1, 2]], np.float32)), type=dict[bytes, msgspec.Raw]
    )

    assert {b"nd", b"type", b"kind", b"shape", b"data"} == fields.keys()
    assert "<f4" == msgspec.msgpack.decode(fields[b"type"])
    assert [1, 2] == msgspec.msgpack.decode(fields[b"shape"])
    assert np.array([1, 2], "<f4").tobytes() == msgspec.msgpack.decode(fields[b"data"])
