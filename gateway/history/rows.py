"""Rows of a table of traffic: total, models, tenants, the tenants without a row of their own, kinds of error.

A row has a number in place of its name, so that a table of 1,000 tenants has the same size whatever their
names are. The number consists of the row's kind and 60 bits of a digest of the name. The names themselves are
stored once, next to the tables. Numbers are equal in all gateways, so that tables of several add up.
"""

from hashlib import blake2b
from typing import Literal, TypeAlias

KIND_BITS = 60
RowKind: TypeAlias = Literal["total", "model", "tenant", "rest", "error"]
KINDS: tuple[RowKind, ...] = ("total", "model", "tenant", "rest", "error")
TOTAL_ID = 0
TENANT_KIND = KINDS.index("tenant")
REST_ID = KINDS.index("rest") << KIND_BITS


def row_id(kind: RowKind, name: str) -> int:
    """Return the number of a row."""
    digest = blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return KINDS.index(kind) << KIND_BITS | int.from_bytes(digest) >> (64 - KIND_BITS)


def kind_of(number: int) -> RowKind:
    """Return the kind of the row with this number."""
    return KINDS[number >> KIND_BITS]
