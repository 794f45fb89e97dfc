"""Load of one batch on a replica. Pure."""

from collections.abc import Sequence
from typing import Literal, get_args

import msgspec

from backends.contract import EmbedParts, Work

# Inputs below which a batch is small: a server's own batch has room for more.
SMALL_INPUTS = 32
# What a batch has: texts only, or also pictures or recordings, which take far longer.
LoadKind = Literal["texts", "media"]
LOAD_KINDS: tuple[LoadKind, ...] = get_args(LoadKind)


class BatchLoad(msgspec.Struct, frozen=True):
    """Load that one batch puts on a replica, and the tenants whose inputs it contains.

    tokens_before: those in flight to the replica when the batch was sent. is_extra: it takes no slot of
    the window.
    """

    inputs: int
    tokens: int
    tenants: Sequence[str]
    kind: LoadKind = "texts"
    tokens_before: int = 0
    is_extra: bool = False


def kind_of(work: Work) -> LoadKind:
    """Return the kind of batch that a piece of work is."""
    return "media" if isinstance(work, EmbedParts) else "texts"


def slots_of(inputs: int, small_batch_slots: int) -> int:
    """Return how many slots of a window a batch takes, with those that a small one takes."""
    return 1 if inputs >= SMALL_INPUTS else small_batch_slots
