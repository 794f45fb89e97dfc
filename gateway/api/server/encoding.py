"""Encoding of vectors and scores: JSON, base64, and integers of 8 bits and 1 bit.

The only module of the API that imports orjson and pybase64. Rule: a reply's vectors are never converted to
Python floats. Integers have two scales: one for all vectors of a width, so that dot products compare between
calls; and one for each vector, as SIE computes it. docs/decisions/045-one-int8-scale-for-a-width.md has the
reasons.
"""

import asyncio
from collections.abc import Iterable
from math import sqrt
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
import orjson
import pybase64

from backends.contract import Vectors

EncodingFormat = Literal["float", "base64"]
EmbeddingType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]
# vLLM's. Replies in bytes are no JSON.
VectorFormat: TypeAlias = Literal["float", "base64", "bytes", "bytes_only"]
BYTES: frozenset[VectorFormat] = frozenset({"bytes", "bytes_only"})
EmbedDtype: TypeAlias = Literal["float32", "float16", "bfloat16"]
Endianness: TypeAlias = Literal["native", "little", "big"]


# Vectors that are written without a pause: within some milliseconds.
VECTORS_AT_ONCE = 256


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


async def joined(pieces: Iterable[bytes]) -> memoryview:
    """Join pieces as they are made; other callbacks of the event loop run between them."""
    whole = bytearray()
    for count, piece in enumerate(pieces, 1):
        whole += piece
        if count % VECTORS_AT_ONCE == 0:
            await asyncio.sleep(0)
    return memoryview(whole)


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


QuantizedType = Literal["int8", "uint8", "binary", "ubinary"]
Quantized: TypeAlias = np.typing.NDArray[Any]
# The components of a vector of length 1 and width d have a root mean square of 1 / sqrt(d). The range is this
# many times that: a larger component has more than 256 / d of the vector's energy.
RANGE_IN_MEANS = 16.0
# Perplexity's: the bytes of the quantized numbers in base64.
PackedFormat = Literal["base64_int8", "base64_binary"]
TYPE_OF_FORMAT: dict[str, QuantizedType] = {"base64_int8": "int8", "base64_binary": "ubinary"}


def packed_type(encoding_format: str | None) -> QuantizedType | None:
    """Return the type of the numbers of a format of Perplexity's, None for any other format."""
    return None if encoding_format is None else TYPE_OF_FORMAT.get(encoding_format)


def component_range(width: int) -> float:
    """Return the magnitude that the largest 8-bit number stands for, in vectors of this width."""
    return min(1.0, RANGE_IN_MEANS / sqrt(width))


def quantize(vectors: Vectors, kind: QuantizedType) -> Quantized:
    """Quantize vectors of length 1 with the scale of their width.

    vectors: (n, dim) float32 → (n, dim) int8 or uint8, or (n, ceil(dim / 8)) packed bits.

    With r = `component_range(dim)`: int8: [-r, r] is [-127, 127]; uint8: [-r, r] is [0, 255]; values outside
    are clipped. binary, ubinary: a bit for each component above 0, the first in the highest bit of its
    byte; binary is ubinary - 128.
    Source: Cohere's, Jina's and Voyage's documentation of their types; none of them states a scale.
    """
    if kind in {"binary", "ubinary"}:
        bits = np.packbits(vectors > 0, axis=1)
        # The top bit turned over is the same byte minus 128, read as signed.
        return bits if kind == "ubinary" else (bits ^ 0x80).view(np.int8)
    scaled = np.clip(vectors * (1 / component_range(vectors.shape[1])), -1, 1)
    if kind == "int8":
        return np.asarray(np.rint(scaled * 127), np.int8)
    return np.asarray(np.rint((scaled + 1) * 127.5), np.uint8)


def quantize_rows(vectors: Vectors, kind: QuantizedType) -> Quantized:
    """Quantize vectors, each with its own scale.

    vectors: (n, dim) float32 → (n, dim) int8 or uint8, or (n, ceil(dim / 8)) packed bits.

    int8: [-m, m] is [-127, 127], where m is the row's largest magnitude. uint8: the row's least component is
    0 and its largest is 255. binary and ubinary are the same unsigned bytes.
    Source: SIE 0.3.1, core/postprocessor.py.
    """
    if kind in {"binary", "ubinary"}:
        return np.packbits(vectors > 0, axis=-1)
    if kind == "int8":
        peak = np.abs(vectors).max(axis=-1, keepdims=True)
        return np.asarray(np.rint(vectors / np.where(peak == 0, 1, peak) * 127), np.int8)
    least = vectors.min(axis=-1, keepdims=True)
    spread = vectors.max(axis=-1, keepdims=True) - least
    return np.asarray(np.rint((vectors - least) / np.where(spread == 0, 1, spread) * 255), np.uint8)
