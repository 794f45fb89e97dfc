"""Vectors in protobuf messages, read without a Python float per number. Pure.

Source: protobuf's encoding, https://protobuf.dev/programming-guides/encoding/. A packed `repeated float` is
one field of bytes, little-endian. Any other encoding that protobuf allows is read too, more slowly.
"""

from typing import TypeVar

import numpy as np

from backends.contract import Vectors
from backends.tei_protos import tei_pb2 as pb

# First byte of field 1 with a length: a packed `repeated float`, or a message.
FIRST_FIELD = 0x0A
VARINT_BYTES_MAX = 10


# Messages whose field 1 is `repeated float embeddings`.
M = TypeVar("M", pb.EmbedResponse, pb.TokenEmbedding)


def read_vector(content: bytes, kind: type[M]) -> tuple[Vectors, M]:
    """Return the vector in field 1 of a message, (dim,) float32, and the message without it.

    Raises: ValueError, google.protobuf.message.DecodeError.
    """
    if not content or content[0] != FIRST_FIELD:
        return _with_others(np.empty(0, "<f4"), kind.FromString(content))
    start, end = _span(content, 0)
    vector = np.frombuffer(content[start:end], "<f4")
    return _with_others(vector, kind.FromString(content[end:]))


def read_matrix(content: bytes, row_kind: type[M], rows_max: int) -> tuple[list[Vectors], bytes]:
    """Return the vectors of the messages in a leading field 1, and the bytes after them.

    row_kind: type of those messages. Raises: ValueError, if there are more than rows_max; DecodeError.
    """
    rows: list[Vectors] = []
    at = 0
    while at < len(content) and content[at] == FIRST_FIELD:
        start, at = _span(content, at)
        rows.append(read_vector(content[start:at], row_kind)[0])
        if len(rows) > rows_max:
            raise ValueError(f"the message has more than {rows_max} vectors")
    return rows, content[at:]


def _with_others(vector: Vectors, message: M) -> tuple[Vectors, M]:
    """Add the numbers of a second field 1, or of one that is not packed."""
    others = message.embeddings
    return (np.concatenate([vector, np.array(others, np.float32)]) if len(others) else vector), message


def _span(content: bytes, at: int) -> tuple[int, int]:
    """Return where the value of the field at a place begins and ends. Raises: ValueError."""
    length, start = 0, at + 1
    for index, byte in enumerate(content[start : start + VARINT_BYTES_MAX]):
        length |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            start += index + 1
            if start + length > len(content):
                break
            return start, start + length
    raise ValueError("the message is cut off")
