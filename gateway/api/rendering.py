"""Vectors and scores as JSON; the one door to orjson and, for replies, to base64.

Rule: a vector is never turned into Python floats on its way out.
"""

from typing import Any, Literal

import orjson
import pybase64

from backends.contract import Vectors

EncodingFormat = Literal["float", "base64"]


def json_bytes(value: Any) -> bytes:
    """JSON of plain values and float32 arrays: shortest digits that read back as the same float32."""
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)


def vector_items(vectors: Vectors, encoding_format: EncodingFormat) -> list[Any]:
    """Each row as something that `json_bytes` writes: an array, or its little-endian bytes in base64."""
    if encoding_format == "float":
        return list(vectors)
    return [pybase64.b64encode_as_string(row.data) for row in vectors.astype("<f4", copy=False)]
