"""Memory that a decoded body takes.

One character outside the Basic Multilingual Plane makes Python store four bytes for each character of its
string, and a token id of two digits takes forty bytes.
"""

import sys
from collections.abc import Sequence

import msgspec

INT_BYTES = 32
SCALARS = frozenset({str, bytes, int, float, bool, type(None), msgspec.UnsetType})


def decoded_bytes(data: object) -> int:
    """Return the bytes that a decoded body takes, with everything in it."""
    size, containers = sys.getsizeof(data), [data]
    while containers:
        items = _items_of(containers.pop())
        kinds = set(map(type, items))
        # In C as far as possible: there may be a million values.
        size += INT_BYTES * len(items) if kinds == {int} else sum(map(sys.getsizeof, items))
        if not kinds <= SCALARS:
            containers += [item for item in items if type(item) not in SCALARS]
    return size


def _items_of(container: object) -> Sequence[object]:
    """Return what a container refers to."""
    if isinstance(container, list | tuple):
        return container
    if isinstance(container, dict):
        return (*container, *container.values())
    if isinstance(container, msgspec.Struct):
        return [getattr(container, field) for field in container.__struct_fields__]
    return ()
