"""Attempts: sends batches to replicas, checks the replies, and decides when one is late and is hedged.

Each attempt runs in a task of its own, because the calls whose slices it carries may leave at any time. It
ends in one of three ways: a reply or a harmless error goes to `outcomes`, and a failure or refusal that an
input may have caused is judged there first. A single input whose attempt takes longer than nearly all of its
like is tried at a second replica too, if that delays no other call.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from backends.contract import Reply
from backends.contract.errors import BackendError, RequestTooLarge
from backends.tracing import carrier
from gateway.lane.joining import join_slices
from gateway.lane.measures import LaneMeasures
from gateway.lane.retries import RetryPolicy, is_input_possible, is_overload
from gateway.lane.ticket import Attempt, Ticket
from gateway.lane.token_counts import CountTokens, believable, needs_examination
from gateway.lane.upstream_limits import LimitReached, UpstreamLimits
from gateway.routing.pool import Pool
from gateway.routing.replica import REFUSED_BYTES_MIN, Replica
from gateway.vector_spaces.zero_vectors import zero_row

# A single input whose attempt takes longer than this share of its like is tried at a second replica too.
HEDGE_QUANTILE = 0.95
# Outcome of an attempt that sent nothing, because the upstream's account had no room.
LIMITED = "limited"


class AttemptCallbacks(msgspec.Struct, frozen=True):
    """Functions that an attempt calls. The float is the current time.

    on_fault: after a failure that an input may cause; the attempt stays at its replica meanwhile.
    on_overload: the same after a refusal for a while. on_limit: after the upstream's account had no room.
    on_end: after the attempt has left its replica, whatever its outcome. is_idle: whether no slice waits.
    count_tokens: the gateway's own counts of a work.
    """

    on_reply: Callable[[Attempt, Reply, float], None]
    on_error: Callable[[Attempt, BackendError, float], None]
    on_fault: Callable[[Attempt, BackendError], Awaitable[None]]
    on_overload: Callable[[Attempt, BackendError], Awaitable[None]]
    on_limit: Callable[[Attempt, LimitReached, float], None]
    on_end: Callable[[Attempt], None]
    is_idle: Callable[[], bool]
    count_tokens: CountTokens


class AttemptRunner:
    """Attempts of one lane. in_flight: those that have not finished."""

    def __init__(
        self,
        pool: Pool,
        policy: RetryPolicy,
        measures: LaneMeasures,
        clock: Callable[[], float],
        callbacks: AttemptCallbacks,
        limits: UpstreamLimits | None = None,
    ) -> None:
        self.in_flight: set[Attempt] = set()
        self._pool = pool
        self._policy = policy
        self._measures = measures
        self._clock = clock
        self._callbacks = callbacks
        self._limits = limits

    def start(self, tickets: Sequence[Ticket], replica: Replica, *, is_hedge: bool = False) -> None:
        """Send tickets to a replica as one batch."""
        now_s, pool = self._clock(), self._pool
        first = tickets[0]
        piece = join_slices([ticket.piece for ticket in tickets]) if len(tickets) > 1 else first.piece
        attempt = Attempt(tickets, piece, replica, now_s, is_hedge=is_hedge)
        if not first.was_sent:
            self._policy.add_first_attempt(now_s)
        for ticket in tickets:
            ticket.send(attempt, now_s)
        if first.traces:
            attempt.begin_spans(pool.upstream)
        replica.add_batch(attempt.load, now_s)
        self.in_flight.add(attempt)
        capabilities = replica.capabilities
        # A second request to a vendor would be paid twice.
        is_paid = capabilities is not None and capabilities.metered
        if not (is_hedge or attempt.isolation or is_paid) and piece.inputs == 1 and len(pool.usable()) > 1:
            late_s = self._measures.single_latencies.quantile(HEDGE_QUANTILE)
            if late_s is not None:
                attempt.hedge_after(late_s, self.hedge)
        limits = self._limits
        attempt.start(self._run(attempt) if limits is None else self._run_within(limits, attempt), self._end)

    def hedge(self, attempt: Attempt) -> None:
        """Try a late attempt's slice at a second replica too.

        Only if that delays no other call: nothing waits in the queue, and a different replica has room.
        """
        ticket = attempt.tickets[0]
        if ticket.is_done or not attempt.is_wanted() or not self._callbacks.is_idle():
            return
        avoid = {attempt.replica, *ticket.tried, *self._pool.lacking(ticket.piece.work)}
        kind = attempt.load.kind
        replica = self._pool.pick(1, avoid, ticket.owner.tenant, is_only_tenant=False, kind=kind)
        if replica is not None and self._policy.try_hedge(self._clock()):
            self.start([ticket], replica, is_hedge=True)

    async def _run_within(self, limits: UpstreamLimits, attempt: Attempt) -> None:
        """Run an attempt for which the upstream's account has room."""
        try:
            reservation = await limits.reserve(attempt.piece)
        except LimitReached as reached:
            attempt.end(LIMITED)
            if reached.wait_s is not None:
                limits.hold(self._clock() + reached.wait_s)
            self._callbacks.on_limit(attempt, reached, self._clock())
            return
        result: Reply | BackendError | None = None
        attempt.restart(self._clock())
        try:
            result = await self._run(attempt)
        finally:
            limits.settle(reservation, result)

    async def _run(self, attempt: Attempt) -> Reply | BackendError:
        """Return the result of an attempt, which has been handled."""
        if attempt.carrier is not None:
            carrier.set(attempt.carrier)
        work, replica = attempt.piece.work, attempt.replica
        try:
            reply: Reply = await replica.backend.run(work, self._timeout_s(attempt))
            replica.check_width(work, reply)
            if (row := zero_row(work, reply)) is not None:
                await replica.accept_zeros(row)
            if needs_examination(attempt.piece, reply, replica):
                reply = await believable(
                    attempt.piece, reply, replica, self._pool.upstream, self._callbacks.count_tokens
                )
        except BackendError as error:
            attempt.end_with(error)
            if is_overload(error):
                await self._callbacks.on_overload(attempt, error)
            elif is_input_possible(error) or _is_small(attempt, error):
                await self._callbacks.on_fault(attempt, error)
            else:
                self._callbacks.on_error(attempt, error, self._clock())
            return error
        attempt.end_with_reply(reply)
        self._callbacks.on_reply(attempt, reply, self._clock())
        return reply

    def _end(self, attempt: Attempt, task: asyncio.Task[Any]) -> None:
        self.in_flight.discard(attempt)
        attempt.replica.remove_batch(attempt.load)
        attempt.finish(task)
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
                attempt.limit(brief_s)
                return brief_s
        return timeout_s


def _is_small(attempt: Attempt, error: BackendError) -> bool:
    """Return whether a single input was refused as too large, and is not."""
    if not isinstance(error, RequestTooLarge) or attempt.load.inputs > 1:
        return False
    return attempt.piece.work.request_bytes < REFUSED_BYTES_MIN
