"""Refusals for a while that one input may cause: 429, and 503 with a pause.

Rule: a refusal counts for the whole replica only if it refuses or fails a plain text too. A replica whose
requests cost money is sent no plain text: there a second refusal, of other inputs within a while, counts.

- If it counts, the window shrinks, and the replica gets no work during the pause that it asked for.
- If not, a batch of several slices is halved, free of charge. One slice is tried once more, at a different
  replica or after a short pause. Then its caller gets the refusal, with the pause.
"""

import asyncio
import math
from collections.abc import Callable
from typing import Protocol
from weakref import WeakKeyDictionary

import msgspec

from backends.contract.errors import BackendError
from gateway.lane.isolation import IsolatedQueue
from gateway.lane.retries import Split, masked
from gateway.lane.suspects import Isolation
from gateway.lane.ticket import Attempt, Ticket
from gateway.routing.pool import Pool, lacking
from gateway.routing.replica import Replica
from gateway.routing.work_check import WorkChecks

# Refusals with a pause, at replicas that work for others, after which a slice's caller gets the refusal.
PAUSES_MAX = 2
# A slice waits for the end of a pause up to this long, if no other replica is usable.
WAITED_S = 5.0
# Refusals of different inputs within this time are of all.
TOGETHER_S = 10.0


class Outcomes(Protocol):
    """Consequences for tickets, queue and replica."""

    def apply(self, attempt: Attempt, error: BackendError, now_s: float) -> None:
        """Carry out the policy's decision about a failed batch."""

    def hold(self, replica: Replica, pause_s: float, now_s: float) -> None:
        """Give a replica no work for as long as it asked for."""

    def split(self, attempt: Attempt, decision: Split, now_s: float) -> None:
        """Queue each half of a batch as a batch of its own."""


class LastRefusal(msgspec.Struct, frozen=True):
    """Last refusal by a replica whose requests cost money. key: hash of its first input."""

    key: int
    at_s: float


class RefusalHandler:
    """Judge of the refusals of one lane. clock: the event loop's."""

    def __init__(
        self,
        pool: Pool,
        isolated: IsolatedQueue[Ticket],
        outcomes: Outcomes,
        checks: WorkChecks,
        clock: Callable[[], float],
    ) -> None:
        self._pool = pool
        self._isolated = isolated
        self._outcomes = outcomes
        self._checks = checks
        self._clock = clock
        self._last: WeakKeyDictionary[Replica, LastRefusal] = WeakKeyDictionary()

    async def handle(self, attempt: Attempt, error: BackendError) -> None:
        """Find out whether the replica refuses all work, then hold it, or divide or answer the batch."""
        replica = attempt.replica
        if not any(attempt in ticket.running for ticket in attempt.tickets):
            # It was handed back already, when its replica stalled.
            return
        fault = await self._fault(attempt, error)
        now_s = self._clock()
        if fault is not None:
            if error.retry_after_s:
                self._outcomes.hold(replica, error.retry_after_s, now_s)
            self._pool.record_failure(replica, fault, now_s, attempt.started_s)
            self._outcomes.apply(attempt, error, now_s)
        elif len(attempt.tickets) > 1:
            split = Split(masked(error, len(attempt.tickets)), avoid_replica=len(self._pool.usable()) > 1)
            self._outcomes.split(attempt, split, now_s)
            self._pool.subscribers.report_change()
        else:
            self._answer(attempt, error, now_s)

    async def _fault(self, attempt: Attempt, error: BackendError) -> BackendError | None:
        """Return why a replica refuses all work; None if only the inputs of an attempt may be the cause."""
        capabilities = attempt.replica.capabilities
        if capabilities is None or not capabilities.metered:
            # What it answered lately shows nothing of a limit that was reached since.
            return await self._checks.fault_of(attempt.replica, math.inf)
        now_s, first = self._clock(), next(iter(attempt.piece.work.inputs))
        refusal, last = LastRefusal(hash(first), now_s), self._last.get(attempt.replica)
        self._last[attempt.replica] = refusal
        is_second = last is not None and last.key != refusal.key and now_s - last.at_s < TOGETHER_S
        return error if is_second else None

    def _answer(self, attempt: Attempt, error: BackendError, now_s: float) -> None:
        """Try a slice that was refused alone once more, or give its caller the refusal."""
        ticket, pause_s = attempt.tickets[0], error.retry_after_s
        if ticket.half is not None and ticket.piece.inputs == 1:
            # It made a batch fail.
            self._isolated.suspects.add(ticket.piece.work, now_s, is_refused=False)
        if ticket.is_done or ticket.running != {attempt} or pause_s is None:
            self._outcomes.apply(attempt, error, now_s)
            return
        ticket.running.discard(attempt)
        ticket.last_error = error
        ticket.pauses += 1
        avoid = {attempt.replica, *ticket.tried, *lacking(self._pool, ticket.piece.work)}
        if ticket.pauses >= PAUSES_MAX:
            ticket.settle(error)
        elif self._pool.usable(avoid):
            ticket.tried.add(attempt.replica)
            self._isolated.enqueue(ticket, Isolation.ALONE, now_s, first=True)
        elif pause_s <= WAITED_S and now_s + pause_s < ticket.deadline_s:
            asyncio.get_running_loop().call_later(pause_s, self._resume, ticket)
        else:
            ticket.settle(error)

    def _resume(self, ticket: Ticket) -> None:
        if not ticket.is_done:
            self._isolated.enqueue(ticket, Isolation.ALONE, self._clock(), first=True)
            self._pool.subscribers.report_change()
