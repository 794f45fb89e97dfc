"""Memory that a decoded body takes.

One character outside the Basic Multilingual Plane makes Python store four bytes for each character of its
string, and a token id of two digits takes forty bytes.
"""

import sys
from collections.abc import Iterable
from itertools import chain
from typing import Any

import msgspec

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
