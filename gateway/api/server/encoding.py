"""Encoding of vectors and scores: JSON, base64, and integers of 8 bits and 1 bit.

The only module of the API that imports orjson and pybase64. Rule: a reply's vectors are never converted to
Python floats. Integers have two scales: one for all vectors of a width, so that dot products compare between
calls; and one for each vector, as SIE computes it. docs/decisions/045-one-int8-scale-for-a-width.md has the
reasons.
"""

import asyncio
from collections.abc import Iterable, Iterator
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


# Numbers that are written without a pause: within some milliseconds.
NUMBERS_AT_ONCE = 65_536
# As long as one number take so many characters, and as long as so many numbers one list or object.
CHARACTERS_OF_NUMBER = 16
NUMBERS_OF_OBJECT = 32
CONTAINERS = (dict, list, tuple)
NUMBERS = frozenset({int, float, np.float32})
# Fewer bytes are not worth a pause.
PAUSE_BYTES = 16_384


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


class LazyList:
    """List whose items are made while it is encoded, once.

    count: of its items. numbers: that they have together, besides a few fields of each.
    """

    def __init__(self, items: Iterable[Any], count: int, numbers: int = 0) -> None:
        self.items = items
        self._count = count
        self.size = NUMBERS_OF_OBJECT * (1 + count) + numbers

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)

    def __len__(self) -> int:
        return self._count


PLAIN_FLOATS = Encoding(("float",))


def json_bytes(value: Any) -> bytes:
    """Encode plain values, numpy arrays and lazy lists as JSON.

    Numbers have the fewest digits that keep each float32. Raises: the errors of the items of a lazy list.
    """
    try:
        return orjson.dumps(value, default=_listed, option=orjson.OPT_SERIALIZE_NUMPY)
    except orjson.JSONEncodeError as error:
        raise error.__cause__ or error from None


def _listed(value: Any) -> list[Any]:
    if isinstance(value, LazyList):
        return list(value.items)
    raise TypeError


async def encode_json(value: Any) -> bytes | memoryview:
    """Return the same as `json_bytes`; while a large value is encoded, the event loop runs on."""
    if size_of(value) <= NUMBERS_AT_ONCE:
        return json_bytes(value)
    whole, paused = bytearray(), 0
    for piece in json_pieces(value):
        whole += piece
        if len(whole) - paused >= PAUSE_BYTES:
            paused = len(whole)
            await asyncio.sleep(0)
    return memoryview(whole)


def size_of(value: Any) -> int:
    """Estimate how long a value takes to encode, in numbers; of a large value only that it is large."""
    if isinstance(value, LazyList):
        return value.size
    if isinstance(value, np.ndarray):
        return NUMBERS_OF_OBJECT + value.size
    if isinstance(value, str):
        return 1 + len(value) // CHARACTERS_OF_NUMBER
    if not isinstance(value, CONTAINERS):
        return 1
    size = NUMBERS_OF_OBJECT
    for item in value.values() if isinstance(value, dict) else value:
        # A call for each of many numbers would take longer than to encode them.
        size += 1 if type(item) in NUMBERS else size_of(item)
        if size > NUMBERS_AT_ONCE:
            break
    return size


def json_pieces(value: Any) -> Iterator[bytes]:
    """Yield the JSON of a value in pieces, each of which takes some milliseconds, except for a long text."""
    if isinstance(value, str) or size_of(value) <= NUMBERS_AT_ONCE:
        yield json_bytes(value)
    elif isinstance(value, dict):
        for index, (name, item) in enumerate(value.items()):
            yield (b"," if index else b"{") + json_bytes(name) + b":"
            yield from json_pieces(item)
        yield b"}"
    else:
        for index, group in enumerate(_groups(value)):
            yield b"," if index else b"["
            if len(group) == 1:
                yield from json_pieces(group[0])
            else:
                yield json_bytes(group)[1:-1]
        yield b"]"


def _groups(value: Any) -> Iterator[Any]:
    """Yield the items of a list or an array in order, those of one group being written at once."""
    if isinstance(value, np.ndarray) and value.ndim == 1:
        for first in range(0, len(value), NUMBERS_AT_ONCE):
            yield value[first : first + NUMBERS_AT_ONCE]
        return
    # To make an item may take longer than to write it.
    least = value.size // max(1, len(value)) if isinstance(value, LazyList) else 1
    group: list[Any] = []
    size = 0
    for item in value:
        own = max(least, size_of(item))
        size += own
        if group and size > NUMBERS_AT_ONCE:
            yield group
            group, size = [], own
        group.append(item)
    yield group


def msgpack_bytes(value: Any) -> bytes:
    """Encode plain values, numpy arrays and lazy lists as msgpack.

    Source: msgpack-numpy 0.4: an array is a map of its dtype, shape and bytes under keys that are bytes.
    """
    return msgspec.msgpack.encode(value, enc_hook=_plain)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, LazyList) else _array_map(value)


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
