"""Slices that go alone, because one of them made a batch fail or failed before: their queues and bounds.

*Promises.* They share no batch. At most `ALONE_MAX` are in flight over the lane, `AT_REPLICA_MAX` at a
replica, and one at a replica of those that are known to fail. They take no slots of a window and wait in
queues of their own: what hangs or fails here keeps no other slice waiting.
"""

from collections.abc import Callable, Collection, Iterator
from typing import Any, Generic, Protocol, TypeVar

from backends.contract import Work
from gateway.lane.fair_queue import Entry, FairQueue
from gateway.lane.suspects import Isolation, Suspects
from gateway.routing.replica import Replica

# Slices in flight that go alone: over the lane, and at one replica.
ALONE_MAX = 8
AT_REPLICA_MAX = 4


class Isolatable(Protocol):
    """Ticket of a slice."""

    isolation: Isolation

    def enqueue(self, queue: FairQueue[Any], now_s: float, *, first: bool = False) -> None:
        """Wait in a queue."""


class InFlight(Protocol):
    """Attempt in flight."""

    isolation: Isolation
    replica: Replica


T = TypeVar("T", bound=Isolatable)


class IsolatedQueue(Generic[T]):
    """Queues of the slices of one lane that go alone. in_flight: returns the lane's attempts.

    is_used: a slice has gone alone. Nearly no lane ever has one, and each call would ask for their number.
    """

    def __init__(self, in_flight: Callable[[], Collection[InFlight]] = tuple) -> None:
        self.suspects = Suspects()
        self.is_used = False
        self._in_flight = in_flight
        self._alone: FairQueue[T] = FairQueue()
        self._known: FairQueue[T] = FairQueue()
        self.by_level = {Isolation.ALONE: self._alone, Isolation.KNOWN: self._known}

    def __len__(self) -> int:
        return len(self._alone) + len(self._known)

    @property
    def tokens(self) -> int:
        """Tokens that wait, as an upper bound."""
        return sum(queue.tokens for queue in self.by_level.values())

    def tokens_of(self, tenant: str) -> int:
        """Return the tokens of one tenant that wait."""
        return sum(queue.tokens_of(tenant) for queue in self.by_level.values())

    def items(self) -> Iterator[T]:
        """Yield all waiting tickets, in no particular order."""
        for queue in self.by_level.values():
            yield from queue.items()

    def enqueue(self, ticket: T, level: Isolation, now_s: float, *, first: bool = False) -> None:
        """Let a ticket wait until it can be sent alone; one that is known to fail stays known."""
        self.is_used = True
        ticket.isolation = max(level, ticket.isolation)
        ticket.enqueue(self.by_level[ticket.isolation], now_s, first=first)

    def remove(self, entry: Entry[T]) -> bool:
        """Remove an entry out of turn; return False if it is not in these queues."""
        return any(queue.remove(entry) for queue in self.by_level.values())

    def level_of(self, tenant: str, work: Work, now_s: float) -> Isolation:
        """Return the company in which a new slice may be sent."""
        suspects = self.suspects
        if suspects.breaks_servers(tenant, now_s):
            return Isolation.KNOWN
        if suspects and suspects.places_in(work, now_s):
            return Isolation.KNOWN
        return Isolation.SHARED

    @property
    def has_place(self) -> bool:
        """True if the lane allows one more slice in flight that goes alone."""
        return sum(attempt.isolation > 0 for attempt in self._in_flight()) < ALONE_MAX

    def full_replicas(self, level: Isolation) -> set[Replica]:
        """Return the replicas that allow no more slices of a level."""
        taken: dict[Replica, list[Isolation]] = {}
        for attempt in self._in_flight():
            if attempt.isolation:
                taken.setdefault(attempt.replica, []).append(attempt.isolation)
        return {
            replica
            for replica, levels in taken.items()
            if len(levels) >= AT_REPLICA_MAX or (level is Isolation.KNOWN and level in levels)
        }
