"""Counts of the values in a body that is not decoded yet, and the bounds on them."""

import asyncio
import json
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.server.body_bounds import (
    DIGITS,
    PAUSE_BYTES,
    UNCOUNTED_BYTES,
    VALUES_MAX,
    Counts,
    check_count_of_inputs,
    check_values,
    count_json,
    count_msgpack,
    has_few_values,
    has_long_number,
)
from gateway.errors import InvalidInput, MalformedBody

TEXTS = st.text(st.sampled_from('a"\\[]{},:\n\té😀\u2028')) | st.text()
# Integers that msgpack can encode.
SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | TEXTS
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner), max_leaves=60)
LONG = st.sampled_from([0, 31, 32, 255, 256, 65535, 65536]).map(lambda length: "x" * length)


def counted(value: Any) -> Counts:
    """Count the values of a decoded body. Names are no values."""
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    parts = [counted(item) for item in inner]
    is_container = isinstance(value, dict | list)
    return Counts(
        sum(part.containers for part in parts) + is_container,
        sum(part.names for part in parts) + (len(value) if isinstance(value, dict) else 0),
        sum(part.values for part in parts) + 1,
    )


def last(pieces: Any) -> Counts:
    *_, counts = pieces
    result: Counts = counts
    return result


@given(VALUES, st.integers(2, 40), st.booleans())
def test_the_count_of_json_is_exact_wherever_it_is_cut(value: Any, piece: int, escaped: bool) -> None:
    body = json.dumps(value, ensure_ascii=escaped, indent=1).encode("utf-8", "surrogatepass")
    expected, found = counted(value), last(count_json(body, piece))

    assert (expected.containers, expected.names) == (found.containers, found.names)
    # An empty array or object counts as if it had one value.
    assert expected.values <= found.values <= expected.values + expected.containers + 1


@given(VALUES | LONG | st.lists(LONG), st.integers(1, 5))
def test_the_count_of_msgpack_is_exact(value: Any, piece: int) -> None:
    expected, found = counted(value), last(count_msgpack(msgspec.msgpack.encode(value), piece))

    assert (expected.containers, expected.names) == (found.containers, found.names)
    assert expected.values + expected.names == found.values


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16, 17, 255, 256, 65536])
def test_the_count_of_msgpack_passes_over_binary_and_extensions(size: int) -> None:
    items = [bytes(size), msgspec.msgpack.Ext(5, b"\x90" * size), 1.5, -7, 2**40]

    assert Counts(containers=1, values=6) == last(count_msgpack(msgspec.msgpack.encode(items)))


@given(st.binary(max_size=200), st.integers(1, 9))
def test_malformed_bodies_are_counted_to_their_end(body: bytes, piece: int) -> None:
    list(count_json(body, piece))
    list(count_msgpack(body, piece))


NUMBER = b"9" * 2 * DIGITS


WIDE, LONG_NUMBER = "the body has more than", "a number of 32 or more digits"
REFUSED = {
    "arrays": (b'{"input":[' + b"[]," * 100_000, WIDE),
    "objects": (b'{"input":[' + b"{}," * 100_000, WIDE),
    "names": (b"{" + b'"a":1,' * 100_000, WIDE),
    "numbers": (b'{"input":[' + b"9," * (VALUES_MAX + 9), WIDE),
    "texts": (b'{"input":[' + b'"",' * (VALUES_MAX + 9), WIDE),
    "quotes": (b'{"input":[' + b'"' * (2 * VALUES_MAX + 9) + b":" * 100_000, WIDE),
    "msgpack objects": (b"\x81\xa5items\xdd\x00\x01\x86\xa0" + b"\x80" * 100_000, WIDE),
    "msgpack deep": (b"\x90" * 100_000, WIDE),
    "msgpack names": (b"\xdf\x00\x01\x86\xa0" + b"\xa0\xc0" * 100_000, WIDE),
    "msgpack numbers": (b"\xdd\x00\x20\x00\x00" + b"\x01" * 2_000_000, WIDE),
    "many long numbers": (b'{"messages":[' + (NUMBER + b",") * 2000 + b"1]}", LONG_NUMBER),
    "one long number": (b'{"messages":{"a":' + b" " * UNCOUNTED_BYTES + NUMBER + b"}}", LONG_NUMBER),
    "negative": (b'{"messages":"' + b"a" * UNCOUNTED_BYTES + b'","x":-' + NUMBER + b"}", LONG_NUMBER),
    "across pieces": (
        b'{"messages":"' + b"a" * (2 * UNCOUNTED_BYTES - 40) + b'","x":' + b"9" * 4300,
        LONG_NUMBER,
    ),
    "fraction": (b'{"messages":0.' + NUMBER + b" " * UNCOUNTED_BYTES + b"}", LONG_NUMBER),
}


@pytest.mark.parametrize("kind", REFUSED)
async def test_a_body_that_takes_long_to_decode_is_refused(kind: str) -> None:
    body, reason = REFUSED[kind]
    with pytest.raises(InvalidInput, match=reason):
        await check_values(body, 2048, is_msgpack=kind.startswith("msgpack"))


@pytest.mark.parametrize(
    "body",
    [
        {"input": ["9" * 100_000]},
        {"input": ['"' + "9" * 100, "\\"] * 1000},
        {"input": "a", "metadata": [-(2**63), 2**64 - 1, 1.7976931348623157e308, 5e-324] * 2000},
        {"input": [[49408] * 20_000]},
        {"input": [[7] * 1000] * 1000},
        {"input": ["a, b: [c] {d}; " * 100_000] * 2},
        {"input": ['\\"[' * 300_000] * 2},
        {"input": ["\\" * 999_999] * 2},
        {"input": ['{"a": [1, 2]}\n' * 50_000] * 2},
    ],
    ids=[
        "digits",
        "quoted digits",
        "ordinary numbers",
        "token ids",
        "a million token ids",
        "punctuation",
        "escaped quotes",
        "backslashes",
        "JSON in a text",
    ],
)
async def test_long_texts_and_ordinary_numbers_pass(body: Any) -> None:
    encoded = msgspec.json.encode(body)

    assert len(encoded) > UNCOUNTED_BYTES
    await check_values(encoded, 2048, is_msgpack=False)


@given(st.integers(1, 3 * DIGITS), st.integers(0, 2 * DIGITS), st.sampled_from([",", "-", "/", ":", " "]))
def test_finds_every_long_number_and_no_short_one(length: int, place: int, other: str) -> None:
    text = (other * place + "9" * length + other * 2 * DIGITS).encode()
    found = has_long_number(np.frombuffer(text, np.uint8))

    assert found or length < 2 * DIGITS
    assert not found or length >= DIGITS


async def test_deep_json_is_malformed() -> None:
    with pytest.raises(MalformedBody, match="nested too deeply"):
        await check_values(b'{"x":' * 100_000, 2048, is_msgpack=False)


def test_ordinary_bodies_are_not_counted_exactly() -> None:
    body = msgspec.json.encode({"input": ["some words, and more of them. " * 20] * 2048})
    assert asyncio.run(has_few_values(body, 66_560))


async def test_other_callbacks_run_while_a_large_body_is_counted() -> None:
    body = msgspec.json.encode({"input": "x" * 20_000_000})
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    turning = asyncio.create_task(turn())
    await check_values(body, 2048, is_msgpack=False)
    turning.cancel()

    assert turns >= len(body) // PAUSE_BYTES


@pytest.mark.parametrize(
    ("inputs", "is_refused"),
    [
        pytest.param([[1, 2]] * 2049, True, id="token-ids"),
        pytest.param(["x", *[{"a": 1}] * 2048], True, id="objects"),
        pytest.param([[1, 2]] * 2048, False, id="as-many-as-allowed"),
        pytest.param([1] * 5000, False, id="one-input-of-token-ids"),
        pytest.param([[[1]] * 5000], False, id="one-nested-input"),
        pytest.param("[{" * 5000, False, id="brackets-in-a-text"),
        pytest.param({"a": [[]] * 5000}, False, id="an-object"),
    ],
)
@pytest.mark.parametrize("is_msgpack", [False, True])
async def test_a_list_of_too_many_inputs_is_refused(inputs: Any, is_refused: bool, is_msgpack: bool) -> None:
    encode = msgspec.msgpack.encode if is_msgpack else msgspec.json.encode
    body = encode({"model": "m", "input": inputs, "ignored": [[]] * 3000})
    checked = check_count_of_inputs(body, frozenset({"input", "texts"}), 2048, is_msgpack=is_msgpack)
    if not is_refused:
        await checked
        return
    with pytest.raises(InvalidInput, match="2049 inputs; this gateway takes 2048 in a call") as refused:
        await checked
    assert "input" == refused.value.param


@pytest.mark.parametrize("body", [b'{"input":[' + b"[1]," * 3000, b"[" * 3000, b'{"input":[' + b"[" * 60_000])
async def test_the_decoder_reports_malformed_inputs(body: bytes) -> None:
    await check_count_of_inputs(body, frozenset({"input"}), 2048, is_msgpack=False)


def test_a_refusal_comes_before_the_end_of_a_body() -> None:
    pieces = count_json(b'{"input":[' + b"[]," * 10_000_000)
    seen = next(pieces)

    # One piece of 64 KiB is enough to count a third of what a request may have.
    assert seen.containers > 20_000
