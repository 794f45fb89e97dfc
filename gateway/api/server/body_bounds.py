"""Bounds on the values in a body, which are checked before it is decoded, and the memory that it takes after.

msgspec compares the length of an array with its bound when all of it is decoded, and holds the interpreter
lock until then: 11 million `[]`, which are 33 MB, took 6 s and 1 GB. It turns an integer of up to 4,300
digits into Python's where its type has no upper bound: 7,700 of them, which are 33 MB, took 0.7 s.
docs/decisions/037-values-counted-before-decoding.md has the reasons and figures.
"""

import asyncio
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from gateway.errors import InvalidInput, MalformedBody

# A body up to this size is decoded within a few milliseconds, whatever it contains.
UNCOUNTED_BYTES = 64 * 1024
# Bounds on arrays and objects, and on names of fields. An input of the most nested dialect, a pair of vLLM's
# contents, has six and eight. The rest is for fields that the gateway ignores, such as a document's metadata.
PARTS_PER_INPUT = 32
PARTS_ELSEWHERE = 1024
# Python's recursion stops the decoder at half of it.
DEPTH_MAX = 2000
# Of a whole body. Token ids are the only values of which a request needs many.
VALUES_MAX = 1_100_000
# Bytes of JSON, and values of msgpack, that are counted without a pause: within about two milliseconds.
PIECE_BYTES = 64 * 1024
# Bytes whose characters are counted without a pause: within about two milliseconds, too.
PAUSE_BYTES = 16 * PIECE_BYTES
PIECE_VALUES = 4096

Body = bytes | bytearray
# The size of a msgpack value by its first byte, without the bytes that its length announces.
HEADER_BYTES = [1 + first % 32 if 0xA0 <= first < 0xC0 else 1 for first in range(256)]
MORE_BYTES = {
    1: (0xCC, 0xD0),
    2: (0xCD, 0xD1, 0xD4, 0xDC, 0xDE),
    3: (0xD5,),
    4: (0xCA, 0xCE, 0xD2, 0xDD, 0xDF),
    5: (0xD6,),
    8: (0xCB, 0xCF, 0xD3),
    9: (0xD7,),
    17: (0xD8,),
}
for size, headers in MORE_BYTES.items():
    for header in headers:
        HEADER_BYTES[header] += size
# Binary, extensions and text: the number of bytes of their length, and of those between it and the content.
LENGTHS = {
    0xC4: (1, 0),
    0xC5: (2, 0),
    0xC6: (4, 0),
    0xC7: (1, 1),
    0xC8: (2, 1),
    0xC9: (4, 1),
    0xD9: (1, 0),
    0xDA: (2, 0),
    0xDB: (4, 0),
}
ARRAYS = frozenset((*range(0x90, 0xA0), 0xDC, 0xDD))
MAPS = frozenset((*range(0x80, 0x90), 0xDE, 0xDF))
CONTAINERS = ARRAYS | MAPS


class Counts(msgspec.Struct):
    """Contents of the part of a body that is counted.

    containers: arrays and objects. names: of fields. values: of all kinds, containers included. depth: arrays
    and objects of JSON that are open at the end of the part. long_number: one has too many digits.
    """

    containers: int = 0
    names: int = 0
    values: int = 0
    depth: int = 0
    long_number: bool = False

    def add_json(self, outside: bytes, strings: int) -> None:
        """Count a piece of JSON. outside: what is outside strings. strings: number of all so far."""
        containers = outside.count(b"[") + outside.count(b"{")
        self.containers += containers
        self.depth += containers - outside.count(b"]") - outside.count(b"}")
        self.names += outside.count(b":")
        self.long_number = self.long_number or has_long_number(np.frombuffer(outside, np.uint8))
        # Strings need commas between them, but malformed JSON may have none.
        self.values = max(self.values + containers + outside.count(b","), strings - self.names)

    def add_msgpack(self, body: Body, at: int, values: int) -> int:
        """Count a number of values from a place on, and return the place after them."""
        for _ in range(values):
            if at >= len(body):
                break
            first = body[at]
            self.values += 1
            if first in LENGTHS:
                length_bytes, more = LENGTHS[first]
                content = at + 1 + length_bytes
                at = content + more + int.from_bytes(body[at + 1 : content])
                continue
            if first in MAPS:
                self.containers += 1
                length = body[at + 1 : at + HEADER_BYTES[first]]
                self.names += int.from_bytes(length) if length else first & 15
            elif first in ARRAYS:
                self.containers += 1
            at += HEADER_BYTES[first]
        return at


async def check_values(body: Body, inputs_max: int, *, is_msgpack: bool) -> None:
    """Refuse a body with more values than a request of `inputs_max` inputs can have.

    Other callbacks of the event loop run between its pieces. Raises: InvalidInput, MalformedBody.
    """
    parts_max = PARTS_PER_INPUT * inputs_max + PARTS_ELSEWHERE
    if not is_msgpack and await has_few_values(body, parts_max):
        return
    for counts in count_msgpack(body) if is_msgpack else count_json(body):
        if counts.depth > DEPTH_MAX:
            raise MalformedBody("the body is nested too deeply")
        if max(counts.containers, counts.names) > parts_max:
            raise InvalidInput(
                f"the body has more than {parts_max} arrays, objects or names of fields; "
                f"this gateway takes {inputs_max} inputs in a call"
            )
        if counts.long_number:
            raise InvalidInput(f"the body has a number of {DIGITS} or more digits")
        if counts.values > VALUES_MAX:
            raise InvalidInput(f"the body has more than {VALUES_MAX} values; send several requests")
        await asyncio.sleep(0)


async def check_count_of_inputs(
    body: Body, fields: frozenset[str], inputs_max: int, *, is_msgpack: bool
) -> None:
    """Refuse a list of too many inputs that are arrays or objects, which take the longest to decode.

    fields: of the body that are lists of inputs. Raises: InvalidInput.
    """
    if not is_msgpack and not await _has_more_containers(body, inputs_max):
        return
    decode: Any = msgspec.msgpack.decode if is_msgpack else msgspec.json.decode
    try:
        parts = decode(body, type=dict[str, msgspec.Raw])
        for field in fields.intersection(parts):
            content = bytes(parts[field])
            if not is_msgpack and not await _has_more_containers(content, inputs_max):
                continue
            inputs = decode(content, type=list[msgspec.Raw])
            # A list of token ids is one input.
            if len(inputs) > inputs_max and not (is_msgpack and _are_scalars(inputs)):
                raise too_many_inputs(len(inputs), inputs_max, field)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        # The decoder of the whole body reports it.
        return


def _are_scalars(values: list[msgspec.Raw]) -> bool:
    """Return whether no value of msgpack is an array or a map."""
    return not any(memoryview(value)[0] in CONTAINERS for value in values)


def too_many_inputs(count: int, inputs_max: int, field: str) -> InvalidInput:
    """Return the error of a call with more inputs than the gateway takes."""
    return InvalidInput(f"{count} inputs; this gateway takes {inputs_max} in a call", param=field)


async def _has_more_containers(body: Body, containers_max: int) -> bool:
    """Return whether JSON might have more arrays and objects. Other callbacks run between its pieces."""
    characters, containers = np.frombuffer(body, np.uint8), 0
    for start in range(0, len(characters), PIECE_BYTES):
        if start and start % PAUSE_BYTES == 0:
            await asyncio.sleep(0)
        piece = characters[start : start + PIECE_BYTES]
        containers += _count_byte(piece, "[") + _count_byte(piece, "{")
        if containers > containers_max:
            return True
    return False


async def has_few_values(body: Body, parts_max: int) -> bool:
    """Return whether JSON is within the bounds even if all of its characters were outside strings.

    Other callbacks of the event loop run between its pieces.
    """
    characters = np.frombuffer(body, np.uint8)
    containers = names = commas = 0
    # Pieces that fit the processor's cache: twenty times as fast as `bytes.count`.
    for start in range(0, len(characters), PIECE_BYTES):
        if start % PAUSE_BYTES == 0:
            await asyncio.sleep(0)
        piece = characters[start : start + PIECE_BYTES]
        containers += _count_byte(piece, "[") + _count_byte(piece, "{")
        names += _count_byte(piece, ":")
        if len(body) > 2 * VALUES_MAX:
            commas += _count_byte(piece, ",")
        if max(containers, names) > parts_max or commas + containers >= VALUES_MAX or has_long_number(piece):
            return False
    return True


def _count_byte(piece: NDArray[np.uint8], character: str) -> int:
    return int(np.count_nonzero(piece == ord(character)))


def count_json(body: Body, piece_bytes: int = PIECE_BYTES) -> Iterator[Counts]:
    """Count the values of JSON, and yield the counts so far after each piece.

    Of malformed JSON it counts at least what a decoder reads before it finds the fault.
    """
    counts, quotes, at = Counts(values=1), 0, 0
    while at < len(body):
        piece = bytes(body[at : at + piece_bytes])
        backslashes = len(piece) - len(piece.rstrip(b"\\"))
        if backslashes % 2 and len(piece) > 1:
            # The character that it escapes is in the next piece.
            piece = piece[:-1]
        at += len(piece)
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        # Every other part is outside strings: the first one if an even number of quotes is before it.
        outside = b"".join(parts[quotes % 2 :: 2])
        quotes += len(parts) - 1
        counts.add_json(outside, quotes // 2)
        yield counts


def count_msgpack(body: Body, piece_values: int = PIECE_VALUES) -> Iterator[Counts]:
    """Count the values of msgpack, and yield the counts so far after each piece. Names are values too."""
    counts, at = Counts(), 0
    while at < len(body):
        at = counts.add_msgpack(body, at, piece_values)
        yield counts


# No number with fewer digits in a row is found, and every one with nearly twice as many.
DIGITS = 32
# Eight bytes at once, each of them true.
ALL_TRUE = np.uint64(0x0101010101010101)


def has_long_number(characters: NDArray[np.uint8]) -> bool:
    """Return whether one of the blocks of `DIGITS` characters contains digits only."""
    blocks = characters[: len(characters) // DIGITS * DIGITS]
    # Of most texts this is enough to see that there is none.
    if not (_are_digits(blocks[::DIGITS]) & _are_digits(blocks[DIGITS // 2 :: DIGITS])).any():
        return False
    eights = _are_digits(blocks).view(np.uint64) == ALL_TRUE
    return bool((eights[0::4] & eights[1::4] & eights[2::4] & eights[3::4]).any())


def _are_digits(characters: NDArray[np.uint8]) -> NDArray[np.bool_]:
    # Unsigned: characters before "0" become large.
    return (characters - np.uint8(ord("0"))) < 10


INT_BYTES = 32
SCALARS = frozenset({str, bytes, int, float, bool, type(None), msgspec.UnsetType})


def decoded_bytes(data: object) -> int:
    """Return the bytes that a decoded body takes, with everything in it."""
    size, level = sys.getsizeof(data), [data]
    # All containers of one depth and type at once, in C as far as possible: there may be 60,000 of them, and
    # a million values.
    while level:
        below: list[Any] = []
        for kind in set(map(type, level)):
            items = list(_items_of(kind, [container for container in level if type(container) is kind]))
            kinds = set(map(type, items))
            size += INT_BYTES * len(items) if kinds == {int} else sum(map(sys.getsizeof, items))
            if not kinds <= SCALARS:
                below += [item for item in items if type(item) not in SCALARS]
        level = below
    return size


def _items_of(kind: type, containers: list[Any]) -> Iterable[object]:
    """Return what containers of one type refer to."""
    if issubclass(kind, list | tuple):
        return chain.from_iterable(containers)
    if issubclass(kind, dict):
        return chain(chain.from_iterable(containers), chain.from_iterable(map(dict.values, containers)))
    if issubclass(kind, msgspec.Struct):
        return chain.from_iterable(map(msgspec.structs.astuple, containers))
    return ()
