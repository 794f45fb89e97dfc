"""Place of a slice in a lane, from arrival to reply: its ticket, and the attempts that carry it.

A ticket waits in one queue, or is carried by one attempt, or by two while one of them is hedged. Its waiters
are the calls with equal work, and each of them gets one result. What a ticket has been through decides where
it may go next: replicas that failed it, half of a batch that it is in, failures alone, broken connections.
Only its own methods write that history.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard

import msgspec

from backends.contract import Reply
from backends.contract.errors import AttemptTimedOut, BackendError, PermitsTaken
from backends.tracing import Carrier
from gateway.events import AttemptStarted, CopyPurpose
from gateway.lane.fair_queue import Entry, FairQueue, Priority
from gateway.lane.isolation import Isolation
from gateway.lane.slices import Slice
from gateway.routing.replica import BatchLoad, Replica, kind_of
from gateway.telemetry.timeline import AttemptRecord, hide_inputs

if TYPE_CHECKING:
    # OpenTelemetry is loaded only where calls are traced.
    from gateway.telemetry.tracing import AttemptTrace, CallTrace, RecordedCall


def _is_recorded(trace: "CallTrace") -> "TypeGuard[RecordedCall]":
    return trace.recorded


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
    trace: "CallTrace | None" = None
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
    was in flight, and answers of 503 by servers that fail plain work too. permit_refusals: for want of
    permits. pauses: refusals alone with a pause. failed_at: replicas that failed it alone. failed_batch: the
    last that it was part of. fault: its last failure alone. has_hung: an attempt with it timed out, and
    nothing shows that the replica was at fault. tries: attempts that were traced. traces, records: of the
    waiting calls. waiters: in the order of arrival: of equal inputs of a call, the first is named in an
    error.
    """

    # Defaults of the class: few tickets fail, and every call makes one.
    isolation = Isolation.SHARED
    faults = losses = permit_refusals = pauses = tries = 0
    has_hung = is_done = was_sent = _was_answered = False
    queued_s = 0.0
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
        self.waiters: dict[asyncio.Future[Reply], None] = {}
        self.waiting_since_s = now_s
        self.tried: set[Replica] = set()
        self.running: set[Attempt] = set()
        self.traces: list[CallTrace] = []
        self.records: list[AttemptRecord] = []

    @property
    def is_indivisible(self) -> bool:
        """True if no smaller slices can be cut of it to find the input at fault."""
        return self.piece.inputs == 1

    @property
    def may_have_run(self) -> bool:
        """True if a replica may have computed the slice: it does, it has, or its attempt timed out."""
        return bool(self.running) or self._was_answered or isinstance(self.last_error, AttemptTimedOut)

    def wait(self, owner: Owner, deadline_s: float) -> asyncio.Future[Reply]:
        """Add a call that waits for the result until a moment on the lane's clock."""
        if owner.trace is not None:
            self.traces.append(owner.trace)
        if owner.record is not None:
            self.records.append(owner.record)
        self.deadline_s = max(self.deadline_s, deadline_s)
        waiter: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self.waiters[waiter] = None
        return waiter

    def leave(self, waiter: asyncio.Future[Reply]) -> bool:
        """Remove a call that has its result or has left; return True if none remains."""
        del self.waiters[waiter]
        return not self.waiters

    def enqueue(self, queue: "FairQueue[Ticket]", now_s: float, *, first: bool = False) -> None:
        """Wait in a queue; first: at its tenant's head, after an attempt that failed."""
        self.waiting_since_s = now_s
        queue.push(self.entry, first=first)

    def isolate(self, level: Isolation) -> None:
        """Keep to this company at most; a slice that is known to fail stays known."""
        self.isolation = max(level, self.isolation)

    def suspect(self, *, faults: int, has_hung: bool) -> None:
        """Record what is known of its input when it arrives."""
        self.faults, self.has_hung = faults, has_hung

    def send(self, attempt: "Attempt", now_s: float) -> bool:
        """Count an attempt that carries it; return True for the first one."""
        was_sent, self.was_sent = self.was_sent, True
        self.running.add(attempt)
        for record in self.records:
            record.add(attempt.replica.name)
        if not attempt.is_hedge:
            self.queued_s += now_s - self.waiting_since_s
        return not was_sent

    def hand_back(self, attempt: "Attempt") -> bool:
        """Take it from an attempt that failed; return False if it was handed back before."""
        if attempt not in self.running:
            return False
        self.running.discard(attempt)
        return True

    def withdraw(self, attempt: "Attempt") -> bool:
        """Take it from an attempt that sent nothing; return False if that is done, or another carries it."""
        if not self.hand_back(attempt):
            return False
        for record in self.records:
            record.withdraw()
        return not (self.is_done or self.running)

    def count_try(self) -> None:
        """Count an attempt that is traced."""
        self.tries += 1

    def fail(
        self, error: BackendError, tried: Replica | None = None, *, lost_connection: bool = False
    ) -> None:
        """Record the error of an attempt. tried: its replica, unless that may have the slice again."""
        self.last_error = error
        self.losses += lost_connection
        self.permit_refusals += isinstance(error, PermitsTaken)
        if tried is not None:
            self.tried.add(tried)

    def avoid(self, replica: Replica) -> None:
        """Do not go to a replica again."""
        self.tried.add(replica)

    def start_over(
        self, failed_last: Replica | None, half: object = None, error: BackendError | None = None
    ) -> None:
        """Forget the replicas that were tried: it goes in other company. half: of a batch that failed."""
        self.tried, self.failed_last = set(), failed_last
        if half is not None:
            self.half, self.last_error = half, error

    def blame(self, half: object) -> None:
        """Record that its input made a batch fail."""
        self.half = half

    def leave_batch(self, batch: FailedBatch) -> None:
        """Record a batch that a working replica failed."""
        self.failed_batch = batch

    def record_hang(self, *, has_hung: bool) -> None:
        """Record whether an attempt with it timed out, and nothing shows that the replica was at fault."""
        self.has_hung = has_hung

    def count_loss(self) -> None:
        """Count a server that broke, or became unready, while it had the slice."""
        self.losses += 1

    def count_pause(self, error: BackendError) -> None:
        """Count a refusal alone with a pause."""
        self.last_error = error
        self.pauses += 1

    def count_fault(self, error: BackendError, failed_at: Replica | None) -> None:
        """Count a failure alone. failed_at: the replica, if it is at fault where another one computes it."""
        self.faults += 1
        self.fault, self.has_hung = error, isinstance(error, AttemptTimedOut)
        if failed_at is not None:
            self.failed_at = (*self.failed_at, failed_at)

    def settle(self, result: Reply | Exception) -> None:
        """Give the result to all waiters, and cancel the attempts that are no longer needed.

        A second result changes nothing.
        """
        self.is_done = True
        self._was_answered = not isinstance(result, Exception)
        for waiter in self.waiters:
            if waiter.done():
                continue
            if isinstance(result, Exception):
                waiter.set_exception(result)
            else:
                waiter.set_result(result)
        for attempt in self.running:
            # One that is over settles its tickets right now. Checking it once per ticket would be quadratic.
            if not attempt.is_over:
                attempt.cancel_if_unwanted()

    def abandon(self) -> None:
        """End a ticket that no caller waits for any more."""
        self.is_done = True
        self.entry = EMPTY_ENTRY
        for attempt in self.running:
            if not attempt.is_over:
                attempt.cancel_if_unwanted()


class Attempt:
    """One try of a batch at one replica.

    piece: the slices of all tickets as one. tokens: of its reply. upstream_status: of an answer that was no
    success. brief_s: its timeout, if that is shorter than usual because the slice was part of a batch that
    timed out. trace_id: of the first recorded trace in it.
    """

    brief_s: float | None = None
    outcome = "cancelled"
    is_over = False
    tokens = 0
    upstream_status: str | None = None
    carrier: Carrier | None = None
    trace_id: str | None = None
    _task: asyncio.Task[Any] | None = None
    hedge_timer: asyncio.TimerHandle | None = None
    _spans: "AttemptTrace | None" = None

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
        first = tickets[0]
        self.isolation = first.isolation
        tenants = {ticket.owner.tenant for ticket in tickets} if len(tickets) > 1 else (first.owner.tenant,)
        self.load = BatchLoad(
            piece.inputs, piece.cost, tuple(tenants), kind_of(piece.work), replica.tokens, self.isolation > 0
        )

    @property
    def deadline_s(self) -> float:
        """Latest deadline of its tickets, on the lane's clock."""
        return max(ticket.deadline_s for ticket in self.tickets)

    @property
    def was_handed_back(self) -> bool:
        """True if it carries no slice any more, because its replica stalled."""
        return not any(self in ticket.running for ticket in self.tickets)

    def start(
        self, run: Coroutine[Any, Any, Any], on_end: "Callable[[Attempt, asyncio.Task[Any]], None]"
    ) -> None:
        """Run in a task of its own. on_end: called at its end, whatever its outcome."""
        self._task = asyncio.create_task(run)
        # Not in a `finally` of the coroutine: a task that is cancelled before its first step runs none of it.
        self._task.add_done_callback(partial(on_end, self))

    def restart(self, now_s: float) -> None:
        """Begin its time again: it has waited for its account until now."""
        self.started_s = now_s

    def hedge_after(self, late_s: float, hedge: "Callable[[Attempt], None]") -> None:
        """Let a function try a second replica, unless it ends sooner."""
        self.hedge_timer = asyncio.get_running_loop().call_later(late_s, hedge, self)

    def limit(self, brief_s: float) -> None:
        """Record a timeout that is shorter than usual."""
        self.brief_s = brief_s

    def begin_spans(self, upstream: str) -> None:
        """Set the context that is sent upstream, and begin a span in each recorded trace."""
        recorded: list[RecordedCall] = []
        for ticket in self.tickets:
            for trace in filter(_is_recorded, ticket.traces):
                recorded.append(trace)
                if not self.is_hedge:
                    trace.waited(self.started_s - ticket.waiting_since_s)
        if recorded:
            self._spans = recorded[0].begin_attempt(recorded[1:], self._started_event(upstream))
            self.carrier, self.trace_id = self._spans.carrier, recorded[0].trace_id
        else:
            self.carrier = self.tickets[0].traces[0].carrier()
        for ticket in self.tickets:
            ticket.count_try()

    def end(self, outcome: str) -> None:
        """Record the outcome before any ticket is settled, so that callers find it in the trace."""
        self.outcome, self.is_over = outcome, True
        if self._spans is not None:
            self._spans.end(outcome)

    def end_with_reply(self, reply: Reply) -> None:
        """Record a success, as `end`, with what the reply shows of the work."""
        self.tokens = 0 if reply.is_free else reply.tokens
        if self._spans is not None:
            self._spans.add_reply(self.tokens, reply.dense_vectors)
        self.end("ok")

    def end_with(self, error: BackendError) -> None:
        """Record a failure, as `end`, with the upstream's answer."""
        hide_inputs(error, self.piece.work)
        self.upstream_status = error.upstream_status
        for ticket in self.tickets:
            for record in ticket.records:
                record.add_failure(error)
        if self._spans is not None:
            self._spans.end(error.kind, error.upstream_status, error.detail)
        self.end(error.kind)

    def finish(self, task: asyncio.Task[Any]) -> None:
        """Leave the tickets at the end of its task.

        Tickets of an attempt that produced neither a reply nor a BackendError are settled: a bug in a backend
        would leave their callers waiting otherwise.
        """
        for ticket in self.tickets:
            ticket.running.discard(self)
        if self.hedge_timer is not None:
            self.hedge_timer.cancel()
        if not self.is_over:
            self.end(self.outcome)
        if task.cancelled():
            # A cancelled attempt has an outcome, unless the backend itself raised the cancellation.
            bug = None if self.outcome != "cancelled" else "CancelledError"
        else:
            error = task.exception()
            bug = None if error is None else type(error).__name__
        if bug is None:
            return
        for ticket in self.tickets:
            if not ticket.running:
                ticket.settle(RuntimeError(f"an attempt broke: {bug}"))

    def is_wanted(self) -> bool:
        """Return whether a caller still waits for its result."""
        return any(ticket.waiters and not ticket.is_done for ticket in self.tickets)

    def cancel_if_unwanted(self) -> None:
        """Cancel the attempt if it carries no slice that a caller waits for."""
        if not self.is_wanted():
            self.cancel()

    def stall(self, error: BackendError) -> None:
        """Record that its replica has stalled."""
        self.outcome = error.kind

    def cancel(self) -> None:
        """Cancel the attempt, unless it is the one that reports its result right now."""
        task = self._task
        if task is not None and not task.done() and task is not asyncio.current_task():
            task.cancel()

    def _started_event(self, upstream: str) -> AttemptStarted:
        first, capabilities = self.tickets[0], self.replica.capabilities
        return AttemptStarted(
            upstream,
            self.replica.name,
            self.replica.server,
            capabilities.model_id if capabilities else "",
            self.piece.work.operation.value,
            self.load.inputs,
            sum(len(ticket.traces) for ticket in self.tickets),
            self.is_hedge,
            first.tries,
        )
