"""Offer of a model: the union over its replicas, combined when one of them changes and not per call. Pure."""

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from backends.contract import Capabilities, Work

Value = TypeVar("Value")


class ModelOffer:
    """Offer of one model. capabilities: the union over its replicas; None before one has joined.

    is_uniform: all usable replicas offer the same, so that no call has to be compared with each of them.
    """

    def __init__(self) -> None:
        self.capabilities: Capabilities | None = None
        self.is_uniform = True

    def combine(self, usable: Sequence[Capabilities], down: Sequence[Capabilities]) -> None:
        """Combine the capabilities of all replicas, when one has changed.

        Those of replicas that are down count too, so that calls wait or get a 503 instead of a 400.
        """
        self.is_uniform = is_uniform(usable)
        combined = union([*usable, *down])
        # Work that was prepared with an equal object needs no refresh.
        if combined != self.capabilities:
            self.capabilities = combined


def offers(capabilities: Capabilities | None, work: Work) -> bool:
    """Return whether a replica with these capabilities offers the work: operation, outputs and options."""
    return capabilities is not None and work.is_offered_by(capabilities)


def union(reported: Sequence[Capabilities]) -> Capabilities | None:
    """Return the capabilities of a model, None without any replica; the first replica's take precedence."""
    if not reported:
        return None
    first, *others = reported
    if all(_is_covered(other, first) for other in others):
        return first
    return msgspec.structs.replace(
        first,
        operations=frozenset[str]().union(*(each.operations for each in reported)),
        outputs=frozenset[str]().union(*(each.outputs for each in reported)),
        max_input_tokens=min(_known([each.max_input_tokens for each in reported]), default=None),
        overhead_tokens=max(each.overhead_tokens for each in reported),
        takes_instruction=any(each.takes_instruction for each in reported),
        late_chunking=any(each.late_chunking for each in reported),
        dimensions=next(iter(_known([each.dimensions for each in reported])), None),
        score_kind=next(iter(_known([each.score_kind for each in reported])), None),
        labels=next((each.labels for each in reported if each.labels), ()),
    )


def is_uniform(reported: Sequence[Capabilities]) -> bool:
    """Return whether all replicas offer the same operations, outputs and options."""
    offered = {
        (each.operations, each.outputs, each.takes_instruction, each.late_chunking) for each in reported
    }
    return len(offered) < 2


def _is_covered(other: Capabilities, first: Capabilities) -> bool:
    if other.takes_instruction and not first.takes_instruction:
        return False
    if other.late_chunking and not first.late_chunking:
        return False
    return other.operations <= first.operations and other.outputs <= first.outputs


def _known(values: Sequence[Value | None]) -> list[Value]:
    return [value for value in values if value is not None]
