"""Memory of decoded bodies."""

import json
import sys

import msgspec
import pytest

from gateway.api.server.body_bounds import decoded_bytes

MILLION = 1_000_000


class Sent(msgspec.Struct):
    """Body with every kind of container."""

    input: list[str | list[int]]
    metadata: dict[str, object] = {}


@pytest.mark.parametrize(
    ("text", "width"),
    [("a" * MILLION, 1), ("a" * MILLION + "é", 1), ("a" * MILLION + "文", 2), ("a" * MILLION + "😀", 4)],
    ids=["ascii", "latin-1", "basic-plane", "emoji"],
)
@pytest.mark.parametrize("escaped", [False, True])
def test_counts_a_text_as_wide_as_its_widest_character(text: str, width: int, escaped: bool) -> None:
    sent = {"input": [text]}
    body = msgspec.json.encode(sent) if not escaped else json.dumps(sent).encode()
    size = decoded_bytes(msgspec.json.decode(body, type=Sent))

    assert width * MILLION < size < width * MILLION + 2000


def test_counts_everything_in_a_body() -> None:
    text = "😀" * 1000
    once = sys.getsizeof(text)
    nested = Sent([text, text], {text: [text, {"a": [1, text]}]})

    assert 5 * once < decoded_bytes(nested) < 5 * once + 2000


def test_counts_every_container_of_a_level() -> None:
    """Compare with the sum of the sizes of all values, each taken by itself."""
    tuples: object = ((1.5, ("x", None)),) * 3
    data = [Sent([["e"], "é"], {"k": [{"n": [True, [2.5]]}, tuples]}), [], {}, ["文", [["y"]]]] * 50

    assert decoded_bytes(data) == _size_of(data)


def _size_of(value: object) -> int:
    size = sys.getsizeof(value)
    if isinstance(value, Sent):
        return size + _size_of(value.input) + _size_of(value.metadata)
    if isinstance(value, dict):
        return size + sum(_size_of(key) + _size_of(item) for key, item in value.items())
    return size + sum(map(_size_of, value)) if isinstance(value, list | tuple) else size


def test_counts_token_ids_as_objects() -> None:
    data = msgspec.json.decode(b'{"input":[[' + b"1000," * 99_999 + b"1000]]}", type=Sent)

    assert 36 * 100_000 <= decoded_bytes(data) <= 42 * 100_000
