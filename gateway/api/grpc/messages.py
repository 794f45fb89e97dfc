"""Protobuf on bytes: packed vectors, which take no Python float per number, and a bound on fields. Pure.

Source: protobuf's encoding, https://protobuf.dev/programming-guides/encoding/.
"""

from collections.abc import Iterator
from typing import NamedTuple, TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message

from backends.contract import Vectors
from gateway.errors import InvalidInput, MalformedBody

M = TypeVar("M", bound=Message)

# A message up to this size is decoded within a few milliseconds, whatever it contains.
UNCOUNTED_BYTES = 64 * 1024
# Fields of a message besides its texts: a client may send fields several times, or those of later versions.
OTHER_FIELDS_MAX = 1024
# Wire types of a field: varint, eight bytes, length and bytes, four bytes. Groups are not in proto3.
VARINT, EIGHT, BYTES, FOUR = 0, 1, 2, 5
VARINT_BYTES_MAX = 10


def field(number: int, content: bytes) -> bytes:
    """Return a field of bytes, text or a message. number: below 16."""
    return bytes((number << 3 | BYTES,)) + varint(len(content)) + content


def vector_field(number: int, vector: Vectors) -> bytes:
    """Return a packed `repeated float`, which is absent if the vector is empty. vector: (dim,) float32."""
    return field(number, np.ascontiguousarray(vector, "<f4").tobytes()) if len(vector) else b""


def varint(number: int) -> bytes:
    """Return a number that is not negative in groups of seven bits, the lowest first."""
    groups = bytearray()
    while number > 0x7F:
        groups.append(number & 0x7F | 0x80)
        number >>= 7
    groups.append(number)
    return bytes(groups)


def parse(kind: type[M], message: bytes, fields_max: int) -> M:
    """Return a decoded message.

    fields_max: most fields of a large message, each element of a list of texts included.
    Raises: InvalidInput, MalformedBody.
    """
    if len(message) > UNCOUNTED_BYTES:
        check_fields(message, fields_max)
    try:
        return kind.FromString(message)
    except DecodeError as error:
        raise _malformed(kind.__name__) from error


class Envelope(NamedTuple):
    """Message with a target and a request, both still encoded. None for an absent one."""

    target: bytes | None
    request: bytes | None


def open_envelope(message: bytes, fields_max: int) -> Envelope:
    """Return the fields 1 and 2 of a message, which hold messages. Others are skipped, as unknown ones are.

    Several occurrences of a message are merged, which for protobuf means that their bytes follow each other.
    Raises: InvalidInput, MalformedBody.
    """
    found: dict[int, list[bytes]] = {}
    for number, (start, end) in _fields(message, fields_max):
        found.setdefault(number, []).append(message[start:end])
    return Envelope(*[b"".join(found[number]) if number in found else None for number in (1, 2)])


def _fields(message: bytes, fields_max: int) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield the number of each field of bytes, and the places of its content.

    Raises: InvalidInput, MalformedBody.
    """
    check_fields(message, fields_max)
    at = 0
    while at < len(message):
        key, at = _read_varint(message, at)
        end = _skip(message, key & 7, at)
        if key & 7 == BYTES:
            length, start = _read_varint(message, at)
            yield key >> 3, (start, start + length)
        at = end


def check_fields(message: bytes, fields_max: int) -> None:
    """Refuse a message of more fields than `fields_max`: each takes many times its bytes once decoded.

    Raises: InvalidInput, MalformedBody.
    """
    at, count = 0, 0
    while at < len(message):
        count += 1
        if count > fields_max:
            raise InvalidInput(f"the message has more than {fields_max} fields; send fewer inputs")
        key, at = _read_varint(message, at)
        at = _skip(message, key & 7, at)
    if at > len(message):
        raise _malformed("message")


def _skip(message: bytes, wire_type: int, at: int) -> int:
    """Return the place after the value of a field."""
    if wire_type == BYTES:
        length, at = _read_varint(message, at)
        return at + length
    if wire_type == VARINT:
        return _read_varint(message, at)[1]
    if wire_type in (FOUR, EIGHT):
        return at + (4 if wire_type == FOUR else 8)
    raise _malformed("message")


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    """Return a number and the place after it."""
    number = 0
    for index, byte in enumerate(message[at : at + VARINT_BYTES_MAX]):
        number |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return number, at + index + 1
    raise _malformed("message")


def _malformed(name: str) -> MalformedBody:
    return MalformedBody(f"the message is no valid protobuf {name}; use the stubs of tei.proto")
