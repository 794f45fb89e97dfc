"""Check of a replica's description against its earlier ones, shared by all remote wires.

A description is built from several answers, and one odd answer, such as the 404 of an ingress while a pod
restarts, would make a server look as if it offered less. Rule: a server that reports the same model and
release as before loses nothing of its offer until it has repeated the smaller one for `CONFIRM_S`.
"""

import time
from collections.abc import Callable, Collection

import msgspec

from backends.contract import FREE_OPERATIONS, NUMBER_MAX, Capabilities
from backends.contract.errors import ReplicaFailed

# Longer than the restart of a pod behind an ingress, and than any single fault.
CONFIRM_S = 30.0
CONFIRMATIONS_MIN = 3

# Numbers of a description that are not known, or at least one.
COUNTS = (
    "max_input_tokens",
    "request_inputs",
    "request_tokens",
    "request_bytes",
    "concurrent_inputs",
    "dimensions",
)


class OfferLost(ReplicaFailed):
    """Description that offers less than an earlier one of the same model, and is not accepted yet."""


class Offer(msgspec.Struct, frozen=True):
    """Features of a replica, and the properties that change with its model or release."""

    identity: tuple[str | None, ...]
    features: frozenset[str]


class OfferHistory:
    """Last accepted offer of one replica. clock: monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._accepted: Offer | None = None
        self._smaller: Offer | None = None
        self._smaller_since_s = 0.0
        self._repeats = 0

    def accept(self, found: Capabilities, options: Collection[str] = ()) -> None:
        """Accept a description, or raise; the adapter keeps its earlier one then.

        options: features that capabilities do not contain, such as raw scores. Raises: ReplicaFailed.
        """
        check_numbers(found)
        if found.operations <= FREE_OPERATIONS:
            raise ReplicaFailed(f"none of the probes of {found.model_id} found an operation that it offers")
        offer = _offer_of(found, options)
        lost = self._lost_by(offer)
        if lost and not self._is_confirmed(offer):
            names = ", ".join(sorted(lost))
            raise OfferLost(f"its probes no longer find {names}; its earlier description is kept for now")
        self._accepted, self._smaller = offer, None

    def _lost_by(self, offer: Offer) -> frozenset[str]:
        accepted = self._accepted
        if accepted is None or accepted.identity != offer.identity:
            return frozenset()
        return accepted.features - offer.features

    def _is_confirmed(self, offer: Offer) -> bool:
        now_s = self._clock()
        if offer != self._smaller:
            self._smaller, self._smaller_since_s, self._repeats = offer, now_s, 0
        self._repeats += 1
        return self._repeats >= CONFIRMATIONS_MIN and now_s - self._smaller_since_s >= CONFIRM_S


def check_numbers(found: Capabilities) -> None:
    """Check the numbers of a description: a negative length would be a negative charge.

    Raises: ReplicaFailed.
    """
    for name in COUNTS:
        number = getattr(found, name)
        if number is not None:
            _check_range(name, number, 1)
    _check_range("overhead_tokens", found.overhead_tokens, 0)


def _check_range(name: str, number: int, least: int) -> None:
    if not least <= number <= NUMBER_MAX:
        raise ReplicaFailed(
            f"its description has {number} for `{name}`, which must be {least} to {NUMBER_MAX}"
        )


def _offer_of(found: Capabilities, options: Collection[str]) -> Offer:
    identity = (found.model_id, found.revision, found.dtype, found.pooling, found.version)
    return Offer(identity, frozenset({*found.operations, *found.outputs, *options}))
