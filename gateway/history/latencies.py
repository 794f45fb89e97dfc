"""Histogram of latencies with logarithmic buckets, which adds up over time and over gateways. Pure.

Two buckets double a latency: each is wider than the one below it by the square root of 2. The first ends at
0.5 ms, and the last has everything from about 370 s. A quantile is interpolated inside its bucket, so that it
is wrong by at most a fifth, and usually by a twentieth.

Stored counts have four significant bits. A count below 16 is exact, and a larger one is wrong by at most 6 %,
which moves a quantile by less than its bucket does. It takes a third of the space of exact counts.
"""

from collections.abc import Sequence
from math import log2
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

BUCKETS = 40
FIRST_BOUND_S = 0.0005
PER_DOUBLING = 2
OFFSET = 1 - log2(FIRST_BOUND_S) * PER_DOUBLING
EXACT_BELOW = 16
MANTISSA_BITS = 3

Counts: TypeAlias = NDArray[np.uint64]


def bucket_of(seconds: float) -> int:
    """Return the number of the bucket of a latency."""
    if seconds <= FIRST_BOUND_S:
        return 0
    return min(BUCKETS - 1, int(log2(seconds) * PER_DOUBLING + OFFSET))


def bound_s(bucket: int) -> float:
    """Return the upper bound of a bucket; the last one ends at it for quantiles."""
    return float(FIRST_BOUND_S * 2.0 ** (bucket / PER_DOUBLING))


def quantiles(counts: Sequence[int] | NDArray[Any], shares: Sequence[float]) -> list[float | None]:
    """Return quantiles in seconds; None if nothing was counted."""
    sums = np.cumsum(np.asarray(counts, dtype=np.float64))
    total = float(sums[-1])
    if total <= 0:
        return [None] * len(shares)
    found: list[float | None] = []
    for share in shares:
        bucket = int(np.searchsorted(sums, share * total))
        bucket = min(bucket, BUCKETS - 1)
        below = float(sums[bucket - 1]) if bucket else 0.0
        inside = (share * total - below) / max(float(sums[bucket]) - below, 1e-9)
        # Inside a bucket latencies are taken as even on the logarithmic scale.
        lower_s = bound_s(bucket - 1)
        seconds = lower_s * (bound_s(bucket) / lower_s) ** min(1.0, max(0.0, inside))
        found.append(float(f"{seconds:.4g}"))
    return found


def coded(counts: Counts) -> NDArray[np.uint16]:
    """Return counts as codes of four significant bits."""
    bits = np.zeros(counts.shape, dtype=np.uint64)
    big = counts >= EXACT_BELOW
    # frexp returns the number of bits of a whole number below 2^53.
    _, exponents = np.frexp(counts[big].astype(np.float64))
    shifts = (exponents - (MANTISSA_BITS + 1)).astype(np.uint64)
    bits[big] = shifts
    codes = (counts >> bits) + bits * np.uint64(1 << MANTISSA_BITS)
    return codes.astype(np.uint16)


def decoded(codes: NDArray[Any]) -> Counts:
    """Return the counts of codes: the middle of what each code stands for."""
    wide = codes.astype(np.uint64)
    big = wide >= EXACT_BELOW
    shifts = np.zeros(wide.shape, dtype=np.uint64)
    shifts[big] = (wide[big] >> np.uint64(MANTISSA_BITS)) - np.uint64(1)
    counts = (wide - shifts * np.uint64(1 << MANTISSA_BITS)) << shifts
    half = np.zeros(wide.shape, dtype=np.uint64)
    half[big] = (np.uint64(1) << shifts[big]) >> np.uint64(1)
    return counts + half
