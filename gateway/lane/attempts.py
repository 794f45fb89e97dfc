"""Attempts: sends batches to replicas, hedges late ones, and traces them.

Knows nothing of the consequences of a reply or an error, which it reports to its lane by callbacks.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeGuard

import msgspec

from backends.contract import Reply
from backends.contract.errors import BackendError, RequestTooLarge
from backends.tracing import carrier
from gateway.events import AttemptStarted
from gateway.lane.joining import join_slices
from gateway.lane.measures import LaneMeasures
from gateway.lane.retries import RetryPolicy, is_input_possible, is_refusal
from gateway.lane.ticket import Attempt, Ticket
from gateway.lane.traces import RecordedTrace, SliceTrace
from gateway.lane.usage import believable, needs_examination
from gateway.routing.pool import Pool, lacking
from gateway.routing.refusals import REFUSED_BYTES_MIN
from gateway.routing.replica import Replica
from gateway.vector_spaces.zero_vectors import zero_row

# A single input whose attempt takes longer than this share of its like is tried at a second replica too.
HEDGE_QUANTILE = 0.95


class AttemptCallbacks(msgspec.Struct, frozen=True):
    """Functions of the lane that an attempt calls. The float is the current time.

    on_fault: after a failure that an input may cause; the attempt stays at its replica meanwhile. on_refusal:
    the same after a refusal for a while. on_end: after the attempt has left its replica, whatever its
    outcome. is_idle: whether the queue is empty.
    """

    on_reply: Callable[[Attempt, Reply, float], None]
    on_error: Callable[[Attempt, BackendError, float], None]
    on_fault: Callable[[Attempt, BackendError], Awaitable[None]]
    on_refusal: Callable[[Attempt, BackendError], Awaitable[None]]
    on_end: Callable[[Attempt], None]
    is_idle: Callable[[], bool]


class AttemptRunner:
    """Attempts of one lane. in_flight: those that have not finished."""

    def __init__(
        self,
        pool: Pool,
        policy: RetryPolicy,
        measures: LaneMeasures,
        clock: Callable[[], float],
        callbacks: AttemptCallbacks,
    ) -> None:
        self.in_flight: set[Attempt] = set()
        self._pool = pool
        self._policy = policy
        self._measures = measures
        self._clock = clock
        self._callbacks = callbacks

    def start(self, tickets: Sequence[Ticket], replica: Replica, *, is_hedge: bool = False) -> None:
        """Send tickets to a replica as one batch."""
        now_s = self._clock()
        piece = join_slices([ticket.piece for ticket in tickets])
        attempt = Attempt(tickets, piece, replica, now_s, is_hedge=is_hedge)
        if not tickets[0].was_sent:
            self._policy.add_first_attempt(now_s)
        for ticket in tickets:
            ticket.was_sent = True
            ticket.running.add(attempt)
            for record in ticket.records:
                record.add(replica.name)
            if not is_hedge:
                ticket.queued_s += now_s - ticket.waiting_since_s
        if tickets[0].traces:
            _begin_spans(attempt, self._pool.upstream)
        replica.add_batch(attempt.load, now_s)
        self.in_flight.add(attempt)
        if not is_hedge:
            self._schedule_hedge(attempt)
        attempt.task = asyncio.create_task(self._run(attempt))
        # Not in a `finally` of the coroutine: a task that is cancelled before its first step runs none of it.
        attempt.task.add_done_callback(partial(self._end, attempt))

    def hedge(self, attempt: Attempt) -> None:
        """Try a late attempt's slice at a second replica too.

        Only if that delays no other call: nothing waits in the queue, and a different replica has room.
        """
        ticket = attempt.tickets[0]
        if ticket.is_done or not attempt.is_wanted() or not self._callbacks.is_idle():
            return
        avoid = {attempt.replica, *ticket.tried, *lacking(self._pool, ticket.piece.work)}
        kind = attempt.load.kind
        replica = self._pool.pick(1, avoid, ticket.owner.tenant, is_only_tenant=False, kind=kind)
        if replica is not None and self._policy.try_hedge(self._clock()):
            self.start([ticket], replica, is_hedge=True)

    async def _run(self, attempt: Attempt) -> None:
        if attempt.carrier is not None:
            carrier.set(attempt.carrier)
        try:
            reply = await attempt.replica.backend.run(attempt.piece.work, self._timeout_s(attempt))
            attempt.replica.check_width(attempt.piece.work, reply)
            if (row := zero_row(attempt.piece.work, reply)) is not None:
                await attempt.replica.accept_zeros(row)
            if needs_examination(attempt.piece, reply, attempt.replica):
                reply = await believable(attempt.piece, reply, attempt.replica, self._pool)
        except BackendError as error:
            attempt.end_with(error)
            if is_refusal(error):
                await self._callbacks.on_refusal(attempt, error)
            elif is_input_possible(error) or _is_small(attempt, error):
                await self._callbacks.on_fault(attempt, error)
            else:
                self._callbacks.on_error(attempt, error, self._clock())
        else:
            attempt.end("ok")
            self._callbacks.on_reply(attempt, reply, self._clock())

    def _end(self, attempt: Attempt, task: asyncio.Task[None]) -> None:
        self.in_flight.discard(attempt)
        for ticket in attempt.tickets:
            ticket.running.discard(attempt)
        attempt.replica.remove_batch(attempt.load)
        if attempt.hedge_timer is not None:
            attempt.hedge_timer.cancel()
        attempt.end(attempt.outcome)
        _fail_on_bug(attempt, task)
        self._callbacks.on_end(attempt)

    def _timeout_s(self, attempt: Attempt) -> float:
        first = attempt.tickets[0]
        # Another upstream that can serve the call is one more place to try.
        avoid = first.tried if first.failed_last is None else {*first.tried, first.failed_last}
        untried_replicas = len(self._pool.usable(avoid)) + first.owner.may_move
        timeout_s = self._policy.timeout_s(untried_replicas, lambda: attempt.deadline_s - self._clock())
        # The recent times of a replica may be those of texts alone.
        if first.has_hung and attempt.load.kind == "texts":
            expected_s = attempt.replica.brief_s(self._policy.attempt_timeout_s)
            brief_s = self._policy.brief_timeout_s(expected_s, first.faults)
            if brief_s is not None and brief_s <= timeout_s:
                attempt.brief_s = brief_s
                return brief_s
        return timeout_s

    def _schedule_hedge(self, attempt: Attempt) -> None:
        if len(attempt.tickets) > 1 or attempt.load.inputs > 1 or len(self._pool.usable()) < 2:
            return
        if attempt.isolation:
            return
        late_s = self._measures.single_latencies.quantile(HEDGE_QUANTILE)
        if late_s is not None:
            loop = asyncio.get_running_loop()
            attempt.hedge_timer = loop.call_later(late_s, self.hedge, attempt)


def _is_small(attempt: Attempt, error: BackendError) -> bool:
    """Return whether a single input was refused as too large, and is not."""
    if not isinstance(error, RequestTooLarge) or attempt.load.inputs > 1:
        return False
    return attempt.piece.work.request_bytes < REFUSED_BYTES_MIN


def _fail_on_bug(attempt: Attempt, task: asyncio.Task[None]) -> None:
    """Resolve the tickets of an attempt that produced neither a reply nor a BackendError.

    Otherwise a bug in a backend would leave callers waiting.
    """
    if task.cancelled():
        # A cancelled attempt has an outcome, unless the backend itself raised the cancellation.
        bug = None if attempt.outcome != "cancelled" else "CancelledError"
    else:
        error = task.exception()
        bug = None if error is None else type(error).__name__
    if bug is None:
        return
    for ticket in attempt.tickets:
        if not ticket.running:
            ticket.resolve(RuntimeError(f"an attempt broke: {bug}"))


def _begin_spans(attempt: Attempt, upstream: str) -> None:
    """Set the context that is sent upstream, and begin a span in each recorded trace."""
    recorded: list[RecordedTrace] = []
    for ticket in attempt.tickets:
        for trace in filter(_is_recorded, ticket.traces):
            recorded.append(trace)
            if not attempt.is_hedge:
                trace.waited(attempt.started_s - ticket.waiting_since_s)
    if recorded:
        attempt.spans = recorded[0].begin_attempt(recorded[1:], _started_event(attempt, upstream))
        attempt.carrier = attempt.spans.carrier
    else:
        attempt.carrier = attempt.tickets[0].traces[0].carrier()
    for ticket in attempt.tickets:
        ticket.tries += 1


def _is_recorded(trace: SliceTrace) -> TypeGuard[RecordedTrace]:
    return trace.recorded


def _started_event(attempt: Attempt, upstream: str) -> AttemptStarted:
    first, capabilities = attempt.tickets[0], attempt.replica.capabilities
    return AttemptStarted(
        upstream,
        attempt.replica.name,
        capabilities.model_id if capabilities else "",
        attempt.piece.work.operation.value,
        attempt.load.inputs,
        sum(len(ticket.traces) for ticket in attempt.tickets),
        attempt.is_hedge,
        first.tries,
    )
