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


def base64_float32(array: Vectors) -> str:
    """Return the little-endian float32 bytes of an array of any shape, in base64."""
    encoded: str = pybase64.b64encode_as_string(np.ascontiguousarray(array, dtype="<f4").tobytes())
    return encoded
