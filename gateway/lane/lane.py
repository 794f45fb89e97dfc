"""Lane in front of one upstream: the only owner of its waiting slices of a kind and of their attempts.

A slice that is submitted becomes a ticket in the tenant-fair queue; equal work of one tenant shares a ticket.
At the end of the turn of the event loop, when all slices of that turn have arrived, the lane pumps:
`schedule` decides which tickets leave the queue and where they go, and `attempts` sends them. They are spread
over the free slots, one each if there are enough; otherwise those at the head of the queue share one batch.
The lane pumps again after each attempt and each change of a replica. `outcomes` applies replies and errors to
tickets and queue, by the decisions of `retries`, and judges failures that an input may have caused: such
slices go alone, in queues and slots of their own (`isolation`).

Invariant: every ticket is settled, or abandoned by all of its waiters, regardless of what happens to its
attempts.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from itertools import chain

import msgspec

from backends.contract import Reply, Work
from backends.contract.errors import AttemptTimedOut, BackendError
from gateway.errors import LOADING_RETRY_S, GatewayError, ModelLoading, Overloaded
from gateway.events import AttemptFinished, CopyPurpose, LaneBacklog, Observe, UpstreamLimited
from gateway.lane.attempts import LIMITED, AttemptCallbacks, AttemptRunner
from gateway.lane.fair_queue import FairQueue, Priority
from gateway.lane.isolation import ACTIVE_S, IsolatedQueue, Isolation, Suspicion, TenantActivity
from gateway.lane.measures import LaneMeasures
from gateway.lane.outcomes import OutcomeHandler
from gateway.lane.retries import LaneSettings, RetryPolicy, input_error
from gateway.lane.schedule import Dispatch, Scheduler, SchedulingPass
from gateway.lane.slices import Bounds, Slice, separated
from gateway.lane.ticket import Attempt, Owner, Ticket
from gateway.lane.token_counts import CountTokens, count_nothing
from gateway.lane.upstream_limits import UpstreamLimits
from gateway.routing.pool import Pool
from gateway.routing.replica import Replica

# A tenant of weight 1 may have so many times the tokens in the queue that stay free.
SHARE_OF_FREE = 3
# Identifies equal work of one tenant, which is computed once.
WorkKey = tuple[str, Priority, bool, CopyPurpose | None, Work]


class SliceReply(msgspec.Struct, frozen=True):
    """Reply to a slice. queued_s: how long the slice waited for a replica."""

    reply: Reply
    queued_s: float


class Lane:
    """Queue and attempts of one upstream, for one kind of batch. clock: the event loop's, in seconds.

    bounds: returns the bounds of one upstream request, as the replicas report them now. count_tokens: the
    gateway's own counts, with which those of replies are compared. limits: of the upstream's account, None
    if it has none.
    """

    def __init__(
        self,
        pool: Pool,
        settings: LaneSettings,
        observe: Observe,
        clock: Callable[[], float],
        bounds: Callable[[], Bounds] = Bounds,
        count_tokens: CountTokens = count_nothing,
        limits: UpstreamLimits | None = None,
    ) -> None:
        self.bounds = bounds
        self._pool = pool
        self._queue_tokens = settings.queue_tokens
        self._observe = observe
        self._clock = clock
        self._queue: FairQueue[Ticket] = FairQueue()
        self._shared: dict[WorkKey, Ticket] = {}
        # Tickets of comparisons since the last pass: they are sent at once or dropped, to delay no caller.
        self._comparisons: list[Ticket] = []
        # Calls that wait until a replica has reported its capabilities.
        self._first_waiters: list[asyncio.Future[None]] = []
        self._activity = TenantActivity(self._queue)
        self._measures = LaneMeasures(clock())
        self._isolated: IsolatedQueue[Ticket] = IsolatedQueue(lambda: self._attempts.in_flight)
        self._scheduler = Scheduler(
            self._queue, pool, self._activity, self._measures.sizer, self._isolated, settings.kind
        )
        policy = RetryPolicy(settings, clock())
        self._outcomes = OutcomeHandler(
            pool, self._queue, self._isolated, self._activity, policy, self._measures, clock
        )
        callbacks = AttemptCallbacks(
            self._outcomes.handle_reply,
            self._outcomes.handle_error,
            self._outcomes.handle_failure,
            self._outcomes.handle_overload,
            self._outcomes.handle_limit,
            self._handle_end,
            lambda: not (self._queue.size or len(self._isolated)),
            count_tokens,
        )
        self._limits = limits
        self._attempts = AttemptRunner(pool, policy, self._measures, clock, callbacks, limits)
        self._recheck_timer: asyncio.TimerHandle | None = None
        self._is_pump_scheduled = False
        pool.subscribe(self.pump, self._handle_stalled)

    @property
    def queued_tokens(self) -> int:
        """Tokens that wait for a replica, as an upper bound.

        A call that waits for the first replica counts as one token: an autoscaler has to see it to start one.
        """
        return self._queue.tokens + self._isolated.tokens + len(self._first_waiters)

    def backlog(self) -> LaneBacklog:
        """Return the size and age of the queue, for metrics; walks all of it."""
        inputs, oldest_since_s = len(self._first_waiters), self._clock()
        now_s = oldest_since_s
        for ticket in chain(self._queue.items(), self._isolated.items()):
            inputs += ticket.piece.inputs
            oldest_since_s = min(oldest_since_s, ticket.waiting_since_s)
        return LaneBacklog(self.queued_tokens, inputs, now_s - oldest_since_s)

    async def wait_for_replica(self, deadline_s: float) -> None:
        """Wait until a replica has reported its capabilities.

        Raises: ModelLoading, NoReplica.
        """
        if self._pool.capabilities() is not None:
            return
        waiter = asyncio.get_running_loop().create_future()
        self._first_waiters.append(waiter)
        self._wake_first()
        try:
            async with asyncio.timeout_at(deadline_s):
                await waiter
        except TimeoutError as error:
            raise ModelLoading("the model is still loading", retry_after_s=LOADING_RETRY_S) from error
        finally:
            self._first_waiters.remove(waiter)
        if self._pool.capabilities() is None:
            raise self._pool.no_replica_error()

    def check_room(self, tokens: int, owner: Owner) -> None:
        """Check that a whole call of this many tokens fits the lane's bound and its tenant's share.

        Raises: Overloaded.
        """
        if not (self._queue.size or (self._isolated.is_used and len(self._isolated))):
            # An empty queue takes any call: one that is larger than the bound could never pass otherwise.
            return
        waiting_tokens = self._queue.tokens + self._isolated.tokens
        free_tokens = self._queue_tokens - waiting_tokens - tokens
        if free_tokens < 0:
            raise self._overloaded("too much is waiting for this model", waiting_tokens)
        own_tokens = self._queue.tokens_of(owner.tenant) + self._isolated.tokens_of(owner.tenant)
        share = free_tokens * SHARE_OF_FREE * owner.weight
        bound = share if owner.queue_tokens is None else min(share, owner.queue_tokens)
        # The first call of a tenant may be larger than its share.
        if own_tokens and own_tokens + tokens > bound:
            raise self._overloaded("too much of yours is waiting for this model", own_tokens)

    async def submit(
        self,
        piece: Slice,
        owner: Owner,
        deadline_s: float,
        on_unanswered: Callable[[Slice], None] = lambda _: None,
        suspicion: Suspicion = Suspicion.NONE,
    ) -> SliceReply:
        """Run a slice on a replica before the deadline, which is on the lane's clock.

        on_unanswered: called with a slice that a replica may have computed, but whose reply no caller
        received. suspicion: of a part of a slice that failed, which shares no batch. Raises: BackendError if
        the last replica tried refused or failed; SliceFailed if one of several inputs may be at fault;
        NoReplica, ModelLoading or TimeoutError at the deadline.
        """
        now_s, pool = self._clock(), self._pool
        held_s = pool.held_s(now_s)
        if held_s is not None:
            self._check_hold(owner, held_s, deadline_s, now_s)
        key = (owner.tenant, owner.priority, owner.may_move, owner.copy, piece.work)
        ticket = self._shared.get(key)
        # A ticket that is done has settled its waiters, which have not left yet. It would not settle a new
        # one.
        if ticket is None or ticket.is_done:
            ticket = self._shared[key] = Ticket(piece, owner, deadline_s, now_s)
            self._enqueue(ticket, now_s, suspicion)
        elif owner.copy is None:
            self._activity.mark_active(owner.tenant, now_s)
        waiter = ticket.wait(owner, deadline_s)
        # asyncio.timeout costs several times as much, on every call.
        timer = asyncio.get_running_loop().call_at(deadline_s, _expire, waiter)
        was_received = False
        try:
            reply = await waiter
            was_received = True
            return SliceReply(reply, ticket.queued_s)
        except TimeoutError as error:
            if (cause := _cause_of_wait(ticket, pool, self._clock())) is not None:
                raise cause from error
            raise
        finally:
            timer.cancel()
            if not was_received and ticket.may_have_run:
                on_unanswered(piece)
            if ticket.leave(waiter):
                self._forget(key, ticket)

    def _check_hold(self, owner: Owner, held_s: float, deadline_s: float, now_s: float) -> None:
        """Check that a slice may wait until a replica gets work again.

        A call does not wait for the upstream's account if another upstream can serve it. Raises: Overloaded.
        """
        reached = None if self._limits is None else self._limits.refusal(now_s)
        if reached is not None and owner.may_move:
            raise reached
        if now_s + held_s > deadline_s:
            raise reached or _held_error(held_s)

    def pump(self) -> None:
        """Send every slice that can be sent, in order.

        Runs after each arrival, finished attempt and replica change.
        """
        self._is_pump_scheduled = False
        if self._first_waiters:
            self._wake_first()
        if self._queue.size or (self._isolated.is_used and len(self._isolated)):
            self._send_waiting()

    def _send_waiting(self) -> None:
        """Pass over the queues once."""
        queue, isolated = self._queue, self._isolated
        scheduling_pass, now_s = SchedulingPass(), self._clock()
        while queue.size or isolated.is_used:
            decision = self._scheduler.decide(scheduling_pass, now_s, self.bounds)
            if decision is None:
                break
            if isinstance(decision, Dispatch):
                self._attempts.start(decision.tickets, decision.replica)
            else:
                decision.ticket.settle(decision.error)
        if scheduling_pass.deferred:
            self._scheduler.end_pass(scheduling_pass)
        if self._comparisons:
            self._drop_comparisons()
        if (scheduling_pass.skipped_tenants or scheduling_pass.skipped_alone) and self._recheck_timer is None:
            # The other tenants may become inactive, and no event would report that.
            pause_s = ACTIVE_S
            if scheduling_pass.resumes_s is not None:
                pause_s = min(pause_s, max(0.0, scheduling_pass.resumes_s - now_s))
            self._recheck_timer = asyncio.get_running_loop().call_later(pause_s, self._recheck)

    def separated(self, slices: Sequence[Slice], tokens: Sequence[int]) -> Sequence[Slice]:
        """Return slices in which inputs that failed alone lately are by themselves.

        tokens: count of each input of the call.
        """
        suspects = self._isolated.suspects
        if suspects.is_empty:
            return slices
        now_s = self._clock()
        parts: list[Slice] = []
        for piece in slices:
            own = tokens[piece.start : piece.start + piece.inputs]
            parts += separated(piece, own, suspects.places_in(piece.work, now_s))
        return parts

    def _enqueue(self, ticket: Ticket, now_s: float, suspicion: Suspicion) -> None:
        """Queue a new ticket, and pump once all slices of this turn of the event loop have arrived."""
        owner = ticket.owner
        if owner.copy is None:
            self._activity.mark_active(owner.tenant, now_s)
        elif owner.copy == "compare":
            self._comparisons.append(ticket)
        if not suspicion and self._isolated.suspects.is_empty:
            ticket.enqueue(self._queue, now_s)
        else:
            self._enqueue_suspect(ticket, now_s, suspicion)
        if not self._is_pump_scheduled:
            self._is_pump_scheduled = True
            asyncio.get_running_loop().call_soon(self.pump)

    def _enqueue_suspect(self, ticket: Ticket, now_s: float, suspicion: Suspicion) -> None:
        """Queue a slice in the company in which it may be sent, as far as that is known."""
        isolated, piece = self._isolated, ticket.piece
        level = Isolation.ALONE if suspicion else Isolation.SHARED
        level = max(level, isolated.level_of(ticket.owner.tenant, piece.work, now_s))
        if level is Isolation.SHARED:
            ticket.enqueue(self._queue, now_s)
            return
        known = isolated.suspects.recall(piece.work) if piece.inputs == 1 else None
        # Refused lately, it needs to fail only once more.
        ticket.suspect(
            faults=int(known is not None and known.is_blamed),
            has_hung=suspicion is Suspicion.HUNG or (known is not None and known.has_hung),
        )
        isolated.enqueue(ticket, level, now_s)

    def _wake_first(self) -> None:
        """Wake the calls that wait for a first replica, if one has joined or none is expected any more."""
        if self._pool.capabilities() is None and self._pool.is_expected:
            return
        for waiter in self._first_waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _drop_comparisons(self) -> None:
        """Drop the comparisons that the pass over the queue has not sent."""
        tickets, self._comparisons = self._comparisons, []
        for ticket in tickets:
            if self._queue.remove(ticket.entry):
                ticket.settle(Overloaded("the upstream is busy with callers' work"))

    def _recheck(self) -> None:
        self._recheck_timer = None
        self.pump()

    def _handle_end(self, attempt: Attempt) -> None:
        if attempt.outcome == LIMITED:
            self._observe(UpstreamLimited(self._pool.upstream))
            self.pump()
            return
        replica = attempt.replica
        self._observe(
            AttemptFinished(
                self._pool.upstream,
                replica.name,
                attempt.outcome,
                self._clock() - attempt.started_s,
                attempt.load.inputs,
                len(attempt.tickets),
                attempt.is_hedge,
                replica.server,
                replica.capabilities.model_id if replica.capabilities else "",
                attempt.piece.work.operation.value,
                attempt.tokens,
                attempt.upstream_status,
                attempt.trace_id,
            )
        )
        self.pump()

    def _handle_stalled(self, replica: Replica) -> None:
        now_s = self._clock()
        for attempt in [attempt for attempt in self._attempts.in_flight if attempt.replica is replica]:
            self._outcomes.abandon(attempt, now_s)

    def _forget(self, key: WorkKey, ticket: Ticket) -> None:
        """Remove every trace of a ticket that no caller waits for."""
        if self._shared.get(key) is ticket:
            del self._shared[key]
        was_queued = self._queue.size > 0 and self._queue.remove(ticket.entry)
        if not was_queued and self._isolated.is_used:
            was_queued = self._isolated.remove(ticket.entry)
        ticket.abandon()
        if was_queued:
            self.pump()

    def _overloaded(self, message: str, waiting_tokens: int) -> Overloaded:
        wait_s = self._measures.drain_rate.retry_after_s(waiting_tokens, self._clock())
        return Overloaded(message, retry_after_s=wait_s)


def _expire(waiter: asyncio.Future[Reply]) -> None:
    if not waiter.done():
        waiter.set_exception(TimeoutError())


def _held_error(wait_s: float) -> Overloaded:
    return Overloaded(
        "the upstream asks for no requests for a while", retry_after_s=max(1, math.ceil(wait_s))
    )


def _cause_of_wait(ticket: Ticket, pool: Pool, now_s: float) -> GatewayError | BackendError | None:
    """Return why a ticket was not done by its deadline, if the reason is known."""
    if isinstance(ticket.fault, AttemptTimedOut):
        return input_error(ticket.fault, has_index=ticket.piece.inputs == 1)
    if not ticket.running and not pool.usable():
        return pool.no_replica_error()
    if not ticket.running and (wait_s := pool.held_s(now_s)) is not None:
        return _held_error(wait_s)
    reports = [replica.residence for replica in pool.replicas]
    if any(report is not None and report.state == "loading" for report in reports):
        return ModelLoading("the model is still loading", retry_after_s=LOADING_RETRY_S)
    return None
