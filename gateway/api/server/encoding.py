"""Encoding of vectors and scores. The only module of the API that imports orjson and pybase64.

Rule: a reply's vectors are never converted to Python floats.
"""

from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
import orjson
import pybase64

from backends.contract import Vectors
from gateway.api.server.quantization import quantize

EncodingFormat = Literal["float", "base64"]
EmbeddingType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]
# vLLM's. Replies in bytes are no JSON.
VectorFormat: TypeAlias = Literal["float", "base64", "bytes", "bytes_only"]
BYTES: frozenset[VectorFormat] = frozenset({"bytes", "bytes_only"})
EmbedDtype: TypeAlias = Literal["float32", "float16", "bfloat16"]
Endianness: TypeAlias = Literal["native", "little", "big"]


class NumberFormat(msgspec.Struct, frozen=True):
    """Format of packed numbers: vLLM's `embed_dtype` and `endianness`. native is little-endian."""

    dtype: EmbedDtype = "float32"
    endianness: Endianness = "native"

    def pack(self, array: Vectors) -> bytes:
        """Return the bytes of an array of any shape, its numbers rounded to the nearest ones."""
        order = ">" if self.endianness == "big" else "<"
        if self.dtype == "bfloat16":
            packed: bytes = _bfloat16_bits(array).astype(f"{order}u2").tobytes()
            return packed
        return array.astype(f"{order}f{2 if self.dtype == 'float16' else 4}").tobytes()


def _bfloat16_bits(array: Vectors) -> Any:
    """Return the upper 16 bits of each float32, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(array).view(np.uint32)
    return (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)


FLOAT32 = NumberFormat()


class Encoding(msgspec.Struct, frozen=True):
    """Format of the vectors in a reply.

    kinds: one type, or several, by which the vectors of an input are listed then. packed: quantized vectors
    are the bytes of their numbers in base64. numbers: the format of floats in base64.
    """

    kinds: tuple[EmbeddingType, ...]
    packed: bool = False
    numbers: NumberFormat = FLOAT32


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
    if encoding.numbers != FLOAT32 and encoding.kinds == ("base64",):
        return [base64_numbers(row, encoding.numbers) for row in vectors]
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


def base64_numbers(array: Vectors, numbers: NumberFormat = FLOAT32) -> str:
    """Return the bytes of an array of any shape, in base64."""
    encoded: str = pybase64.b64encode_as_string(numbers.pack(array))
    return encoded
