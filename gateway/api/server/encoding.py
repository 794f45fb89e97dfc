"""Encoding of vectors and scores. The only module of the API that imports orjson and pybase64.

Rule: a reply's vectors are never converted to Python floats.
"""

from typing import Any, Literal

import msgspec
import numpy as np
import orjson
import pybase64

from backends.contract import Vectors
from gateway.api.server.quantization import quantize

EncodingFormat = Literal["float", "base64"]
EmbeddingType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]


class Encoding(msgspec.Struct, frozen=True):
    """Format of the vectors in a reply.

    kinds: one type, or several, by which the vectors of an input are listed then. packed: quantized vectors
    are the bytes of their numbers in base64.
    """

    kinds: tuple[EmbeddingType, ...]
    packed: bool = False


def json_bytes(value: Any) -> bytes:
    """Encode plain values and numpy arrays as JSON, with the fewest digits that keep each float32."""
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)


def msgpack_bytes(value: Any) -> bytes:
    """Encode plain values and numpy arrays as msgpack.

    Source: msgpack-numpy 0.4: an array is a map of its dtype, shape and bytes under keys that are bytes.
    """
    return msgspec.msgpack.encode(value, enc_hook=_array_map)


def _array_map(array: Any) -> dict[bytes, Any]:
    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return {
        b"nd": True,
        b"type": little.dtype.str,
        b"kind": b"",
        b"shape": little.shape,
        b"data": little.tobytes(),
    }


def vector_items(vectors: Vectors, encoding_format: EmbeddingType) -> list[Any]:
    """Return each row as `json_bytes` takes it: an array, or its little-endian bytes in base64."""
    if encoding_format == "base64":
        return [pybase64.b64encode_as_string(row.data) for row in vectors.astype("<f4", copy=False)]
    return list(vectors if encoding_format == "float" else quantize(vectors, encoding_format))


def encoded_rows(vectors: Vectors, encoding: Encoding) -> list[Any]:
    """Return each row in the one type of an encoding, or as an object with each of its types."""
    encode = packed_items if encoding.packed else vector_items
    columns = {kind: encode(vectors, kind) for kind in encoding.kinds}
    if len(columns) == 1:
        return columns[encoding.kinds[0]]
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def packed_items(vectors: Vectors, kind: EmbeddingType) -> list[str]:
    """Return the bytes of each row's numbers in base64, after quantization."""
    if kind in {"float", "base64"}:
        return vector_items(vectors, "base64")
    return [pybase64.b64encode_as_string(row.tobytes()) for row in vector_items(vectors, kind)]


def base64_float32(array: Vectors) -> str:
    """Return the little-endian float32 bytes of an array of any shape, in base64."""
    encoded: str = pybase64.b64encode_as_string(np.ascontiguousarray(array, dtype="<f4").tobytes())
    return encoded
