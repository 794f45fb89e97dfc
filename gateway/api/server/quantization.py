"""Quantization of vectors to 8 bits and to 1 bit. Pure.

Two scales: one for all vectors of a width, so that dot products of the integers compare between calls; and
one for each vector, as SIE computes it. docs/decisions/045-one-int8-scale-for-a-width.md has the reasons.
"""

from math import sqrt
from typing import Any, Literal, TypeAlias

import numpy as np

from backends.contract import Vectors

QuantizedType = Literal["int8", "uint8", "binary", "ubinary"]
Quantized: TypeAlias = np.typing.NDArray[Any]
# The components of a vector of length 1 and width d have a root mean square of 1 / sqrt(d). The range is this
# many times that: a larger component has more than 256 / d of the vector's energy.
RANGE_IN_MEANS = 16.0


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
