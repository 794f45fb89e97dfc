"""Load of one batch on a replica. Pure."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from backends.contract import EmbedParts, Work

# What a batch has: texts only, or also pictures or recordings, which take far longer.
LoadKind = Literal["texts", "media"]


class BatchLoad(msgspec.Struct, frozen=True):
    """Load that one batch puts on a replica, and the tenants whose inputs it contains."""

    inputs: int
    tokens: int
    tenants: Sequence[str]
    kind: LoadKind = "texts"


def kind_of(work: Work) -> LoadKind:
    """Return the kind of batch that a piece of work is."""
    return "media" if isinstance(work, EmbedParts) else "texts"
