"""Company in which a slice may be sent: inputs and tenants under suspicion, and queues of what goes alone.

An input that failed alone is remembered by a keyed digest, for some minutes and in a bounded number. While it
is remembered it goes alone, so that an input that is sent again fails no other caller's batch. A tenant whose
input made a shared batch fail shares none with other tenants for a while, and one whose inputs break servers
has all its slices sent one at a time, with pauses.

*Promises.* Slices that go alone share no batch. At most `ALONE_MAX` are in flight over the lane,
`AT_REPLICA_MAX` at a replica, and one at a replica of those that are known to fail. They take no slots of a
window and wait in queues of their own: what hangs or fails here keeps no other slice waiting. Pure: time is
an argument.
"""

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from enum import IntEnum
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from backends.contract import Work
from gateway.lane.fair_queue import Entry, FairQueue

# Slices in flight that go alone: over the lane, and at one replica.
ALONE_MAX = 8
AT_REPLICA_MAX = 4
KEPT_S = 300.0
INPUTS_MAX = 4096
# A tenant whose inputs broke this many servers within `CRASHES_KEPT_S` has all its slices sent one at a time,
# with a pause after each that breaks one more.
CRASHES_MAX = 3
CRASHES_KEPT_S = 60.0
PAUSE_MIN_S = 0.5
PAUSE_MAX_S = 8.0
TENANTS_MAX = 1024
# Fields of a work that hold its inputs, or something of each.
PER_INPUT = frozenset({"inputs", "documents", "pairs", "prompt_characters", "turns"})

# A tenant counts as active for this long after its last call, which covers callers that pause between calls.
ACTIVE_S = 2.0
# A tenant whose input caused a batch to fail shares no batch with other tenants for this long, so that bad
# inputs cost the other tenants one failed batch.
SUSPECT_S = 10.0

_encode = msgspec.msgpack.Encoder().encode


class Isolation(IntEnum):
    """Company in which a slice may be sent.

    shared: batches with other slices. alone: by itself, because one of its batch made that fail. known: by
    itself and one at a time at a replica, because it failed alone, or its tenant's inputs break servers.
    """

    SHARED = 0
    ALONE = 1
    KNOWN = 2


class Suspicion(IntEnum):
    """Failure of a slice that was cut, because one of its inputs may be at fault. none: there was none.

    failed: an error or a broken connection. hung: no answer in time.
    """

    NONE = 0
    FAILED = 1
    HUNG = 2


class Remembered(NamedTuple):
    """Input that failed alone. has_hung: it got no answer. is_blamed: its caller got an error."""

    is_blamed: bool
    has_hung: bool
    until_s: float


class Suspects:
    """Table of inputs and tenants."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(16)
        # By digest, the oldest first.
        self._inputs: OrderedDict[bytes, Remembered] = OrderedDict()
        # By tenant: servers that its inputs broke in a row, and the moment of the last.
        self._crashes: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._inputs)

    @property
    def is_empty(self) -> bool:
        """True if no input and no tenant is remembered."""
        return not (self._inputs or self._crashes)

    def add(self, work: Work, now_s: float, *, is_blamed: bool, has_hung: bool = False) -> None:
        """Remember the only input of a work that failed alone; one that was refused stays so."""
        digest = next(self._digests(work))
        before = self._inputs.pop(digest, None)
        was_blamed = before is not None and before.is_blamed
        self._inputs[digest] = Remembered(is_blamed or was_blamed, has_hung, now_s + KEPT_S)
        while len(self._inputs) > INPUTS_MAX:
            self._inputs.popitem(last=False)

    def forget(self, work: Work) -> None:
        """Forget the only input of a work, which a replica has computed."""
        if self._inputs:
            self._inputs.pop(next(self._digests(work)), None)

    def places_in(self, work: Work, now_s: float) -> list[int]:
        """Return the places of the inputs of a work that are remembered."""
        while self._inputs and next(iter(self._inputs.values())).until_s <= now_s:
            self._inputs.popitem(last=False)
        if not self._inputs:
            return []
        return [place for place, digest in enumerate(self._digests(work)) if digest in self._inputs]

    def recall(self, work: Work) -> Remembered | None:
        """Return what is remembered of the only input of a work; None if it is not."""
        return self._inputs.get(next(self._digests(work))) if self._inputs else None

    def add_crash(self, tenant: str, now_s: float) -> None:
        """Record that a tenant's input broke a server."""
        crashes, last_s = self._crashes.pop(tenant, (0, now_s))
        crashes = crashes + 1 if now_s - last_s < CRASHES_KEPT_S else 1
        self._crashes[tenant] = (crashes, now_s)
        while len(self._crashes) > TENANTS_MAX:
            self._crashes.popitem(last=False)

    def paused_until_s(self, tenant: str) -> float:
        """Return until when a tenant's slices that go alone pause; 0 before its inputs break a second one."""
        crashes, last_s = self._crashes.get(tenant, (0, 0.0))
        if crashes < 2:
            return 0.0
        return last_s + min(PAUSE_MAX_S, PAUSE_MIN_S * 2.0 ** min(crashes - 2, 10))

    def breaks_servers(self, tenant: str, now_s: float) -> bool:
        """Return whether a tenant's inputs broke so many servers lately that all of them go one at a time."""
        if not self._crashes:
            return False
        crashes, last_s = self._crashes.get(tenant, (0, 0.0))
        if crashes and now_s - last_s >= CRASHES_KEPT_S:
            del self._crashes[tenant]
            return False
        return crashes >= CRASHES_MAX

    def _digests(self, work: Work) -> Iterator[bytes]:
        """Yield the digest of each input, together with the options of its work."""
        options = [getattr(work, name) for name in work.__struct_fields__ if name not in PER_INPUT]
        head = type(work).__name__.encode() + b"\0" + _encode(options)
        start = hashlib.blake2b(head, digest_size=16, key=self._key)
        for item in work.inputs:
            digest = start.copy()
            digest.update(_encode(item))
            yield digest.digest()


class TenantActivity:
    """Recent calls and recent faults, by tenant. Both expire. queue: waiting tenants are active too."""

    def __init__(self, queue: FairQueue[Any]) -> None:
        self._queue = queue
        # The most recent last.
        self._last_call_s: OrderedDict[str, float] = OrderedDict()
        self._suspect_until_s: dict[str, float] = {}

    def mark_active(self, tenant: str, now_s: float) -> None:
        """Record a tenant's call."""
        self._last_call_s[tenant] = now_s
        self._last_call_s.move_to_end(tenant)

    def has_others(self, tenant: str, now_s: float) -> bool:
        """Return whether another tenant waits or has called recently; forgets tenants that have not."""
        calls, since_s = self._last_call_s, now_s - ACTIVE_S
        while calls and next(iter(calls.values())) < since_s:
            calls.popitem(last=False)
        if len(calls) > (tenant in calls):
            return True
        return self._queue.size > 0 and self._queue.has_other_tenants(tenant)

    def mark_suspect(self, tenant: str, now_s: float) -> None:
        """Record that a tenant's input caused a batch to fail."""
        self._suspect_until_s[tenant] = now_s + SUSPECT_S

    def is_suspect(self, tenant: str, now_s: float) -> bool:
        """Return whether a tenant's input caused a batch to fail within `SUSPECT_S`."""
        until_s = self._suspect_until_s.get(tenant)
        if until_s is not None and until_s < now_s:
            del self._suspect_until_s[tenant]
            return False
        return until_s is not None


class Isolatable(Protocol):
    """Ticket of a slice."""

    isolation: Isolation

    def isolate(self, level: Isolation) -> None:
        """Keep to this company at most."""

    def enqueue(self, queue: FairQueue[Any], now_s: float, *, first: bool = False) -> None:
        """Wait in a queue."""


class InFlight(Protocol):
    """Attempt in flight."""

    @property
    def isolation(self) -> Isolation:
        """Company of its slices."""

    @property
    def replica(self) -> Any:
        """Replica that it is at."""


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
        return self._alone.size + self._known.size

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
        ticket.isolate(level)
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

    def full_replicas(self, level: Isolation) -> set[Any]:
        """Return the replicas that allow no more slices of a level."""
        taken: dict[Any, list[Isolation]] = {}
        for attempt in self._in_flight():
            if attempt.isolation:
                taken.setdefault(attempt.replica, []).append(attempt.isolation)
        return {
            replica
            for replica, levels in taken.items()
            if len(levels) >= AT_REPLICA_MAX or (level is Isolation.KNOWN and level in levels)
        }
