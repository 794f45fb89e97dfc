"""Vectors in protobuf messages are those that protobuf itself reads."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.tei.protobuf_vectors import read_matrix, read_vector
from backends.tei_protos import tei_pb2 as pb

floats = st.floats(width=32, allow_nan=False)
rows = st.lists(floats, max_size=300)


@given(rows, st.integers(0, 2**32 - 1))
def test_vector_is_the_one_that_protobuf_reads(row: list[float], tokens: int) -> None:
    content = pb.EmbedResponse(
        embeddings=row, metadata=pb.Metadata(compute_tokens=tokens)
    ).SerializeToString()

    vector, message = read_vector(content, pb.EmbedResponse)

    np.testing.assert_array_equal(np.array(pb.EmbedResponse.FromString(content).embeddings, "<f4"), vector)
    assert tokens == message.metadata.compute_tokens


@given(st.lists(rows, max_size=5))
def test_matrix_is_the_one_that_protobuf_reads(matrix: list[list[float]]) -> None:
    tokens = [pb.TokenEmbedding(embeddings=row) for row in matrix]
    content = pb.EmbedAllResponse(
        token_embeddings=tokens, metadata=pb.Metadata(compute_tokens=7)
    ).SerializeToString()

    read, rest = read_matrix(content, pb.TokenEmbedding, 5)

    assert [np.array(row, np.float32).tolist() for row in matrix] == [vector.tolist() for vector in read]
    assert 7 == pb.EmbedAllResponse.FromString(rest).metadata.compute_tokens


# Numbers one by one, in two packed fields, and after the metadata.
@pytest.mark.parametrize(
    "content",
    [
        b"\x0d\x00\x00\x80\x3f\x0d\x00\x00\x00\x40",
        b"\x0a\x04\x00\x00\x80\x3f\x0a\x04\x00\x00\x00\x40",
        b"\x12\x02\x10\x03\x0a\x08\x00\x00\x80\x3f\x00\x00\x00\x40",
        b"\x0a\x88\x00\x00\x00\x80\x3f\x00\x00\x00\x40",
    ],
)
def test_reads_every_encoding_that_protobuf_allows(content: bytes) -> None:
    vector, _ = read_vector(content, pb.EmbedResponse)

    assert [1.0, 2.0] == vector.tolist() == list(pb.EmbedResponse.FromString(content).embeddings)


def test_refuses_more_rows_than_asked_for() -> None:
    with pytest.raises(ValueError, match="more than 2 vectors"):
        read_matrix(b"\x0a\x00" * 3, pb.TokenEmbedding, 2)
