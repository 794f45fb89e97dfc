"""Quantization of vectors, and its fidelity by width as docs/dialects.md lists it."""

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from backends.contract import Vectors
from gateway.api.server.encoding import QuantizedType, component_range, quantize, quantize_rows

DIALECTS = Path(__file__).parents[2] / "docs" / "dialects.md"
WIDTHS = (384, 768, 1024, 2048, 3072, 4096)
ROW = re.compile(r"^\| ([\d,]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", re.MULTILINE)
many = settings(max_examples=100, deadline=None)
VECTORS = arrays(
    np.float32,
    array_shapes(min_dims=2, max_dims=2, max_side=20),
    elements=st.floats(-1, 1, width=32, allow_subnormal=False),
)


def unit_vectors(width: int, count: int = 1000) -> Vectors:
    """Return random vectors of length 1."""
    vectors = np.random.default_rng(0).standard_normal((count, width), np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def decoded(vectors: Vectors, kind: QuantizedType, *, by_row: bool) -> Vectors:
    """Return vectors after quantization and decoding."""
    if not by_row:
        largest = component_range(vectors.shape[1])
        numbers = quantize(vectors, kind).astype(np.float32)
        return (numbers / 127 if kind == "int8" else numbers / 127.5 - 1) * largest
    numbers = quantize_rows(vectors, kind).astype(np.float32)
    if kind == "int8":
        return numbers * np.abs(vectors).max(axis=1, keepdims=True) / 127
    least, most = vectors.min(axis=1, keepdims=True), vectors.max(axis=1, keepdims=True)
    return numbers / 255 * (most - least) + least


def mean_cosine(vectors: Vectors, others: Vectors) -> float:
    """Return the mean cosine of each vector with its counterpart."""
    lengths = np.linalg.norm(vectors, axis=1) * np.linalg.norm(others, axis=1)
    return float(np.mean(np.sum(vectors * others, axis=1) / lengths))


def fidelity(width: int) -> list[str]:
    """Return a row of the table in docs/dialects.md."""
    vectors = unit_vectors(width)
    return [
        f"{mean_cosine(vectors, decoded(vectors, kind, by_row=by_row)):.5f}"
        for by_row in (False, True)
        for kind in ("int8", "uint8")
    ]


def test_the_documented_fidelity_holds_at_every_width() -> None:
    documented = {
        int(width.replace(",", "")): figures for width, *figures in ROW.findall(DIALECTS.read_text())
    }

    assert {width: fidelity(width) for width in WIDTHS} == documented


@many
@given(VECTORS)
def test_8_bits_err_by_at_most_half_a_step(vectors: Vectors) -> None:
    for kind, steps in (("int8", 254), ("uint8", 255)):
        np.testing.assert_allclose(vectors, decoded(vectors, kind, by_row=False), atol=1 / steps + 1e-6)
        np.testing.assert_allclose(vectors, decoded(vectors, kind, by_row=True), atol=1 / steps + 1e-6)


@many
@given(VECTORS)
def test_bits_are_the_signs_of_components(vectors: Vectors) -> None:
    packed = quantize(vectors, "ubinary")
    bits = np.unpackbits(packed, axis=1)

    np.testing.assert_array_equal(vectors > 0, bits[:, : vectors.shape[1]])
    assert not bits[:, vectors.shape[1] :].any()
    np.testing.assert_array_equal(packed.astype(int) - 128, quantize(vectors, "binary").astype(int))
    for kind in ("binary", "ubinary"):
        np.testing.assert_array_equal(packed, quantize_rows(vectors, kind))


def test_integers_of_different_vectors_have_one_scale() -> None:
    vectors = unit_vectors(1024, 2)
    products = quantize(vectors, "int8").astype(np.float32) @ unit_vectors(1024, 3)[2]

    scale = component_range(1024) / 127
    np.testing.assert_allclose(vectors @ unit_vectors(1024, 3)[2], products * scale, atol=2e-3)


@pytest.mark.parametrize(("kind", "expected"), [("int8", [-127, 127, 127, 0]), ("uint8", [0, 255, 255, 128])])
def test_clips_components_outside_the_range(kind: QuantizedType, expected: list[int]) -> None:
    vector = np.array([[-1.0, 1.0, 7.0, 0.0]], np.float32)

    assert [expected] == quantize(vector, kind).tolist()


def test_the_range_is_that_of_the_width() -> None:
    vector = np.zeros((1, 1024), np.float32)
    vector[0, :3] = 0.5, -0.25, 0.75

    assert [127, -64, 127, 0] == quantize(vector, "int8")[0, :4].tolist()
    assert [1.0, 1.0, 0.5, 0.25] == [component_range(width) for width in (8, 256, 1024, 4096)]


@pytest.mark.parametrize(
    ("kind", "row", "expected"),
    [
        ("int8", [0.1, -0.2, 0.0], [64, -127, 0]),
        ("uint8", [0.1, -0.1, 0.0], [255, 0, 128]),
        ("int8", [0.0, 0.0], [0, 0]),
        ("uint8", [0.5, 0.5], [0, 0]),
        ("binary", [0.5, 0.0], [0b10000000]),
    ],
)
def test_a_row_is_scaled_by_itself(kind: QuantizedType, row: list[float], expected: list[int]) -> None:
    assert [expected] == quantize_rows(np.array([row], np.float32), kind).tolist()


@pytest.mark.parametrize(
    ("kind", "expected"), [("ubinary", [0b10100000, 0b10000000]), ("binary", [0b10100000 - 128, 0])]
)
def test_packs_bits_from_the_highest_and_pads_the_last_byte_with_zeros(
    kind: QuantizedType, expected: list[int]
) -> None:
    vector = np.array([[0.1, -0.1, 0.1, 0.0, -1, -1, -1, -1, 0.5]], np.float32)

    assert [expected] == quantize(vector, kind).tolist()
    assert {"ubinary": np.uint8, "binary": np.int8}[kind] == quantize(vector, kind).dtype
