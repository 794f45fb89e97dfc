"""Place of a slice in a lane, from arrival to reply: its waiters, and the attempts that carry it."""

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from backends.contract import Reply
from backends.contract.errors import AttemptTimedOut, BackendError
from backends.tracing import Carrier
from gateway.events import CopyPurpose
from gateway.lane.fair_queue import Entry, FairQueue, Priority
from gateway.lane.slices import Slice
from gateway.lane.suspects import Isolation
from gateway.lane.traces import AttemptSpans, SliceTrace
from gateway.routing.load import BatchLoad, kind_of
from gateway.routing.replica import Replica
from gateway.telemetry.timeline import AttemptRecord, hide_inputs


class Owner(msgspec.Struct, frozen=True):
    """Tenant and call that a slice belongs to.

    flow: identifies the call. queue_tokens: the tenant's own bound. shares_batches: the slice may share a
    batch with other tenants' slices. trace: the call's, if calls are traced. may_move: another upstream can
    serve the call, so that it does not wait for a replica of this one. copy: why it is a copy, for which no
    caller waits; None for a call. A comparison is dropped unless it can be sent at once. record: of the
    attempts of the call.
    """

    tenant: str
    flow: int = 0
    weight: int = 1
    priority: Priority = "interactive"
    queue_tokens: int | None = None
    shares_batches: bool = True
    trace: SliceTrace | None = None
    may_move: bool = False
    copy: CopyPurpose | None = None
    record: AttemptRecord | None = None


class FailedBatch:
    """Batch that a working replica failed. uncleared: its slices that have not been computed since."""

    __slots__ = ("replica", "uncleared")

    def __init__(self, replica: Replica, uncleared: int) -> None:
        self.replica = replica
        self.uncleared = uncleared

    def clear_one(self) -> bool:
        """Count a slice that was computed; return True if all were, so that the replica was at fault."""
        self.uncleared -= 1
        return not self.uncleared


# Replaces the entry of a ticket without waiters. An entry and its ticket refer to each other while queued.
# Left as they are, they would have to wait for the cyclic garbage collector, whose runs delay every call.
EMPTY_ENTRY: Entry[Any] = Entry(None, "", 0)


class Ticket:
    """One slice in a lane. Invariant: every waiter gets one result, regardless of the attempts.

    half: identifies half of a batch that was split; the slice shares a batch only with slices of the same
    half. tried: replicas that do not get it again. failed_last: one that gets it again only if no other is
    usable. faults: failures alone, at a replica that worked for others. losses: broken connections while it
    was in flight, and answers of 503 by servers that fail plain work too. pauses: refusals alone with a
    pause. failed_at: replicas that failed it alone. failed_batch: the last that it was part of.
    fault: its last failure alone. has_hung: an attempt with it timed out, and nothing shows that the replica
    was at fault. traces: of the waiting calls.
    """

    # Defaults of the class: few tickets fail, and every call makes one.
    isolation = Isolation.SHARED
    faults = losses = refusals = pauses = 0
    has_hung = False
    half: object = None
    failed_at: tuple[Replica, ...] = ()
    failed_last: Replica | None = None
    failed_batch: FailedBatch | None = None
    fault: BackendError | None = None
    last_error: BackendError | None = None

    def __init__(self, piece: Slice, owner: Owner, deadline_s: float, now_s: float) -> None:
        self.piece = piece
        self.owner = owner
        self.deadline_s = deadline_s
        self.entry: Entry[Ticket] = Entry(
            self, owner.tenant, piece.cost, owner.flow, owner.weight, owner.priority
        )
        # In the order of arrival: of equal inputs of a call, the first is named in an error.
        self.waiters: dict[asyncio.Future[Reply], None] = {}
        self.is_done = False
        self.waiting_since_s = now_s
        self.queued_s = 0.0
        self.tried: set[Replica] = set()
        self.running: set[Attempt] = set()
        self.was_sent = False
        self.was_answered = False
        self.tries = 0
        self.traces: list[SliceTrace] = []
        # Of the waiting calls.
        self.records: list[AttemptRecord] = []

    def enqueue(self, queue: "FairQueue[Ticket]", now_s: float, *, first: bool = False) -> None:
        """Wait in a queue; first: at its tenant's head, after an attempt that failed."""
        self.waiting_since_s = now_s
        queue.push(self.entry, first=first)

    @property
    def is_indivisible(self) -> bool:
        """True if no smaller slices can be cut of it to find the input at fault."""
        return self.piece.inputs == 1 or self.piece.work.is_indivisible

    def wait(self, deadline_s: float) -> asyncio.Future[Reply]:
        """Add a waiter, which waits until a moment on the lane's clock."""
        self.deadline_s = max(self.deadline_s, deadline_s)
        waiter: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self.waiters[waiter] = None
        return waiter

    def remove_waiter(self, waiter: asyncio.Future[Reply]) -> bool:
        """Remove a waiter that has its result or has left; return True if none remains."""
        self.waiters.pop(waiter, None)
        return not self.waiters

    @property
    def may_have_run(self) -> bool:
        """True if a replica may have computed the slice: it does, it has, or its attempt timed out."""
        return bool(self.running) or self.was_answered or isinstance(self.last_error, AttemptTimedOut)

    def resolve(self, result: Reply | Exception) -> None:
        """Give the result to all waiters; a second result changes nothing."""
        self.is_done = True
        self.was_answered = not isinstance(result, Exception)
        for waiter in self.waiters:
            if waiter.done():
                continue
            if isinstance(result, Exception):
                waiter.set_exception(result)
            else:
                waiter.set_result(result)

    def settle(self, result: Reply | Exception) -> None:
        """Give the result to all waiters and cancel the attempts that are no longer needed."""
        self.resolve(result)
        self.cancel_unwanted()

    def cancel_unwanted(self) -> None:
        """Cancel the attempts that carried this slice and carry no other that a caller waits for."""
        for attempt in self.running:
            # An attempt that is over settles its tickets right now. Checking it once per ticket would be
            # quadratic.
            if not attempt.is_over and not attempt.is_wanted():
                attempt.cancel()


class Attempt:
    """One try of a batch at one replica.

    piece: the slices of all tickets as one. brief_s: its timeout, if that is shorter than usual because the
    slice was part of a batch that timed out.
    """

    brief_s: float | None = None

    def __init__(
        self,
        tickets: Sequence[Ticket],
        piece: Slice,
        replica: Replica,
        started_s: float,
        *,
        is_hedge: bool,
    ) -> None:
        self.tickets = tickets
        self.piece = piece
        self.replica = replica
        self.started_s = started_s
        self.is_hedge = is_hedge
        self.isolation = tickets[0].isolation
        tenants = tuple({ticket.owner.tenant for ticket in tickets})
        kind = kind_of(piece.work)
        self.load = BatchLoad(piece.inputs, piece.cost, tenants, kind, replica.tokens, self.isolation > 0)
        self.task: asyncio.Task[None] | None = None
        self.hedge_timer: asyncio.TimerHandle | None = None
        self.outcome = "cancelled"
        self.is_over = False
        self.spans: AttemptSpans | None = None
        self.carrier: Carrier | None = None

    @property
    def deadline_s(self) -> float:
        """Latest deadline of its tickets, on the lane's clock."""
        return max(ticket.deadline_s for ticket in self.tickets)

    def end(self, outcome: str) -> None:
        """Record the outcome before any ticket is settled, so that callers find it in the trace."""
        self.outcome, self.is_over = outcome, True
        if self.spans is not None:
            self.spans.end(outcome)

    def end_with(self, error: BackendError) -> None:
        """Record a failure, as `end`, with the upstream's answer."""
        hide_inputs(error, self.piece.work)
        for ticket in self.tickets:
            for record in ticket.records:
                record.add_failure(error)
        if self.spans is not None:
            self.spans.end(error.kind, error.upstream_status, error.detail)
        self.end(error.kind)

    def is_wanted(self) -> bool:
        """Return whether a caller still waits for its result."""
        return any(ticket.waiters and not ticket.is_done for ticket in self.tickets)

    def cancel(self) -> None:
        """Cancel the attempt, unless it is the one that reports its result right now."""
        task = self.task
        if task is not None and not task.done() and task is not asyncio.current_task():
            task.cancel()
