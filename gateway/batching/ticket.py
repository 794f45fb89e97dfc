"""A slice's place in a lane, from arrival to answer: who waits for it, and what carries it."""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from backends.contract import Reply
from backends.errors import AttemptTimedOut, BackendError
from backends.tracing import Carrier
from gateway.batching.fair_queue import Entry, Priority
from gateway.batching.joining import joined
from gateway.batching.slices import Slice
from gateway.routing.replica import BatchLoad, Replica

if TYPE_CHECKING:
    # OpenTelemetry is loaded only where calls are traced.
    from gateway.telemetry.tracing import AttemptTrace, CallTrace


class Owner(msgspec.Struct, frozen=True):
    """Whose slice it is.

    flow: the call it is part of. queue_tokens: its tenant's own bound. join: whether it may share a batch
    with other tenants' slices. trace: the call's, where calls are traced.
    """

    tenant: str
    flow: int = 0
    weight: int = 1
    priority: Priority = "interactive"
    queue_tokens: int | None = None
    join: bool = True
    trace: "CallTrace | None" = None


# The entry of a ticket that nobody waits for any more: the two lead to each other while it is queued, and
# what is left of them would wait for the collector, whose looks hold up everybody.
GONE: Entry[Any] = Entry(None, "", 0)


class Ticket:
    """Invariant: every waiter is told once, whatever becomes of the attempts.

    alone: it may have crashed what it travelled in, and travels with nobody. part: of a batch that was
    refused and split; it travels with others of that part only. traces: of the calls that wait for it.
    """

    def __init__(self, piece: Slice, owner: Owner, deadline_s: float, now_s: float) -> None:
        self.piece = piece
        self.owner = owner
        self.deadline_s = deadline_s
        self.entry: Entry[Ticket] = Entry(
            self, owner.tenant, piece.tokens, owner.flow, owner.weight, owner.priority
        )
        self.waiters: set[asyncio.Future[Reply]] = set()
        self.done = False
        self.waiting_since_s = now_s
        self.queued_s = 0.0
        self.tried: set[Replica] = set()
        self.running: set[Attempt] = set()
        self.sent = False
        self.answered = False
        self.losses = 0
        self.alone = False
        self.part: object = None
        self.last_error: BackendError | None = None
        self.tries = 0
        self.traces: list[CallTrace] = []

    def wait(self, deadline_s: float) -> asyncio.Future[Reply]:
        """One more who wants the answer, until a moment on the lane's clock."""
        self.deadline_s = max(self.deadline_s, deadline_s)
        waiter: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self.waiters.add(waiter)
        return waiter

    def leave(self, waiter: asyncio.Future[Reply]) -> bool:
        """A waiter has its answer or has gone; True where nobody waits any more."""
        self.waiters.discard(waiter)
        return not self.waiters

    @property
    def worked_on(self) -> bool:
        """Whether a replica may have computed it: one does, one has, or one was not given the time to."""
        return bool(self.running) or self.answered or isinstance(self.last_error, AttemptTimedOut)

    def resolve(self, result: Reply | Exception) -> None:
        """Tell everybody; a second result changes nothing."""
        self.done = True
        self.answered = not isinstance(result, Exception)
        for waiter in self.waiters:
            if waiter.done():
                continue
            if isinstance(result, Exception):
                waiter.set_exception(result)
            else:
                waiter.set_result(result)


class Attempt:
    """One try of a batch at one replica."""

    def __init__(self, tickets: Sequence[Ticket], replica: Replica, started_s: float, *, hedge: bool) -> None:
        self.tickets = tickets
        self.replica = replica
        self.started_s = started_s
        self.hedge = hedge
        self.piece = joined([one.piece for one in tickets])
        tenants = tuple({one.owner.tenant for one in tickets})
        self.cargo = BatchLoad(self.piece.inputs, self.piece.tokens, tenants)
        self.task: asyncio.Task[None] | None = None
        self.hedging: asyncio.TimerHandle | None = None
        self.outcome = "cancelled"
        self.over = False
        self.trace: AttemptTrace | None = None
        self.carrier: Carrier | None = None

    def ended(self, outcome: str) -> None:
        """Its outcome is known; whoever hears of it next finds it in the trace."""
        self.outcome, self.over = outcome, True
        if self.trace is not None:
            self.trace.end(outcome)

    def wanted(self) -> bool:
        """Whether anybody still waits for what it brings."""
        return any(one.waiters and not one.done for one in self.tickets)
