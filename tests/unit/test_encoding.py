"""Encodings of vectors in replies."""

import base64

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from gateway.api.server.encoding import json_bytes, msgpack_bytes, vector_items

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


def test_encodes_a_msgpack_array_in_the_format_of_msgpack_numpy() -> None:
    fields = msgspec.msgpack.decode(
        msgpack_bytes(np.array([[1, 2]], np.float32)), type=dict[bytes, msgspec.Raw]
    )

    assert {b"nd", b"type", b"kind", b"shape", b"data"} == fields.keys()
    assert "<f4" == msgspec.msgpack.decode(fields[b"type"])
    assert [1, 2] == msgspec.msgpack.decode(fields[b"shape"])
    assert np.array([1, 2], "<f4").tobytes() == msgspec.msgpack.decode(fields[b"data"])
