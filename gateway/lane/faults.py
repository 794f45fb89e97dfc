"""Failures that one input of a batch may cause: an error, a broken connection, or no answer in time.

Rule: what an input may have caused is never repeated with the same neighbours, and costs no retry budget as
long as the replica works for others.

- A batch of several slices is divided: in halves after an error, into single slices after a broken connection
  or a timeout. A slice of several inputs fails with `SliceFailed`, and the stage `dispatch` cuts it.
- One input that fails alone is tried once more, at a different replica if there is one. If it fails again,
  and the replica completes plain work, the error is the input's.
- 503 as an answer to work, 401 and 403 are such errors too; `refused` judges 429, and 503 with a pause.
- The parts of what timed out get a shorter timeout, by the recent times of the replica. One that passes is
  tried once more with a longer one. Without evidence that the replica works, the usual timeout holds again.
- If the replica fails plain work, too, the failure counts against the replica, and retries cost budget.
- An input whose attempt broke the server is not judged before a replica works again.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol
from weakref import WeakKeyDictionary

from backends.contract.errors import (
    AttemptTimedOut,
    BackendError,
    ConnectionLost,
    CredentialRefused,
    InvalidWork,
    ReplicaFailed,
    ReplicaUnavailable,
)
from gateway.lane.isolation import IsolatedQueue
from gateway.lane.retries import RetryPolicy, Split, masked, timed_out_early
from gateway.lane.suspects import Isolation
from gateway.lane.ticket import Attempt, FailedBatch, Ticket
from gateway.routing.health import State
from gateway.routing.pool import Pool, lacking
from gateway.routing.replica import Replica
from gateway.routing.work_check import WorkChecks

# Failures alone after which an input is refused.
FAULTS_MAX = 2
# Servers that broke under a slice while they broke under others too; the slice fails then.
LOSSES_MAX = 5
# Servers that were unready since they had a slice, after which no other one gets it.
UNREADY_MAX = 2
# How long calls wait for a replica that broke its connections, and how often it is checked meanwhile.
RETURN_S = 3.0
LOOK_EVERY_S = 0.25
# Failures after which a server may have to restart.
BREAKING = (ConnectionLost, ReplicaUnavailable)
# Failures of a check that leave open whether there is a server at all.
UNANSWERED = (ConnectionLost, ReplicaUnavailable, AttemptTimedOut)


class SliceFailed(Exception):
    """Failure of a slice of several inputs, one of which may be at fault: the replica works for others."""

    def __init__(self, error: BackendError) -> None:
        super().__init__(error.message)
        self.error = error


class Outcomes(Protocol):
    """Consequences for tickets and queue."""

    def apply(self, attempt: Attempt, error: BackendError, now_s: float) -> None:
        """Carry out the policy's decision about a failed batch."""

    def split(self, attempt: Attempt, decision: Split, now_s: float) -> None:
        """Queue each half of a batch as a batch of its own."""

    def refuse(self, ticket: Ticket, replica: Replica, error: BackendError, now_s: float) -> InvalidWork:
        """Return the error of an input that failed alone."""


class FaultHandler:
    """Judge of these failures for one lane. clock: the event loop's. checks: of the lane's replicas."""

    def __init__(
        self,
        pool: Pool,
        isolated: IsolatedQueue[Ticket],
        policy: RetryPolicy,
        outcomes: Outcomes,
        clock: Callable[[], float],
    ) -> None:
        self._pool = pool
        self._isolated = isolated
        self._policy = policy
        self._outcomes = outcomes
        self._clock = clock
        # When the wait for a replica ends.
        self._returns: WeakKeyDictionary[Replica, asyncio.TimerHandle] = WeakKeyDictionary()
        self.checks = WorkChecks(clock, policy.attempt_timeout_s)

    async def handle(self, attempt: Attempt, error: BackendError) -> None:
        """Find out whether the replica works, then divide, retry, refuse or fail the batch."""
        now_s, replica = self._clock(), attempt.replica
        if isinstance(error, ConnectionLost):
            replica.record_loss(attempt.started_s, now_s)
        if not any(attempt in ticket.running for ticket in attempt.tickets):
            # It was handed back already, when its replica stalled.
            return
        patience_s = replica.patience_s(self._policy.attempt_timeout_s)
        is_early = attempt.brief_s is None and timed_out_early(error, now_s - attempt.started_s, patience_s)
        if len(attempt.tickets) > 1:
            await self._divide(attempt, error, is_early=is_early)
        elif is_early:
            self._outcomes.apply(attempt, error, now_s)
        else:
            await self._judge(attempt, error, now_s)

    async def _divide(self, attempt: Attempt, error: BackendError, *, is_early: bool) -> None:
        """Divide a batch of several slices, so that none of them meets the same neighbours again."""
        if isinstance(error, AttemptTimedOut):
            for ticket in attempt.tickets:
                ticket.has_hung = not is_early
            self._isolate(attempt, error)
            if not is_early and await self._check(attempt, error, self._clock()) is not None:
                for ticket in attempt.tickets:
                    ticket.has_hung = False
            return
        fault = await self._check(attempt, error, attempt.started_s)
        if isinstance(error, ConnectionLost) or (fault and isinstance(error, ReplicaUnavailable)):
            self._isolate(attempt, error)
        elif fault is None:
            split = Split(masked(error, len(attempt.tickets)), avoid_replica=len(self._pool.usable()) > 1)
            batch = FailedBatch(attempt.replica, len(attempt.tickets))
            for ticket in attempt.tickets:
                ticket.failed_batch = batch
            self._outcomes.split(attempt, split, self._clock())
        else:
            self._outcomes.apply(attempt, error, self._clock())

    def _isolate(self, attempt: Attempt, error: BackendError) -> None:
        """Queue each slice of a batch to go alone, at a different replica if there is one."""
        now_s, replica = self._clock(), attempt.replica
        for ticket in reversed(attempt.tickets):
            if attempt not in ticket.running:
                continue
            ticket.running.discard(attempt)
            ticket.half, ticket.tried, ticket.failed_last = attempt, set(), replica
            ticket.last_error = masked(error, len(attempt.tickets))
            ticket.losses += isinstance(error, BREAKING)
            if not ticket.is_done:
                self._isolated.enqueue(ticket, Isolation.ALONE, now_s, first=True)
        self._pool.subscribers.report_change()

    async def _judge(self, attempt: Attempt, error: BackendError, failed_s: float) -> None:
        """Decide about a slice that failed alone."""
        ticket, replica = attempt.tickets[0], attempt.replica
        avoid = {replica, *ticket.tried, *lacking(self._pool, ticket.piece.work)}
        has_other = bool(self._pool.usable(avoid))
        has_timed_out = isinstance(error, AttemptTimedOut)
        is_last_try = has_timed_out and not has_other and attempt.brief_s is None
        is_final = ticket.is_indivisible and (ticket.faults + 1 >= FAULTS_MAX or is_last_try)
        # What it answered before it failed shows little of a replica that hangs now.
        is_strict = is_final or has_timed_out
        fault = await self._check(attempt, error, failed_s if is_strict else attempt.started_s)
        is_broken = fault is not None and isinstance(error, ConnectionLost)
        if fault is not None and isinstance(error, ReplicaUnavailable) and self._is_spent(ticket, attempt):
            ticket.settle(error)
            return
        if ticket.is_done or ticket.running != {attempt} or (fault is not None and not is_broken):
            self._blame_replica(attempt, error)
            return
        ticket.running.discard(attempt)
        ticket.last_error = error
        ticket.losses += isinstance(error, ConnectionLost)
        if is_broken and replica.lost_several(attempt.started_s, failed_s):
            # Any of the slices that were in flight there may have broken it.
            self._try_again(ticket, replica, Isolation.ALONE if ticket.losses == 1 else Isolation.KNOWN)
        elif not ticket.is_indivisible:
            ticket.settle(SliceFailed(error))
        else:
            self._count_fault(attempt, error, is_broken=is_broken)
            if not is_final:
                self._try_again(ticket, replica, Isolation.KNOWN)
            elif is_broken and not await self._works_again(replica, ticket):
                ticket.settle(error)
            else:
                ticket.settle(self._outcomes.refuse(ticket, replica, error, self._clock()))

    def _blame_replica(self, attempt: Attempt, error: BackendError) -> None:
        """Carry out the policy's decision about a slice that failed alone, and not by its inputs' fault."""
        ticket = attempt.tickets[0]
        is_only = not ticket.is_done and ticket.running == {attempt}
        if is_only and attempt.brief_s is not None and isinstance(error, AttemptTimedOut):
            # All work is slow there, and only the shorter timeout has passed.
            ticket.running.discard(attempt)
            ticket.last_error, ticket.has_hung = error, False
            self._try_again(ticket, attempt.replica, Isolation.ALONE)
        else:
            self._outcomes.apply(attempt, error, self._clock())

    def _is_spent(self, ticket: Ticket, attempt: Attempt) -> bool:
        """Count a server that is unready since it had a slice; return whether no other one may have it."""
        ticket.losses += 1
        losses_max = LOSSES_MAX if self._pool.holds else UNREADY_MAX
        if ticket.losses < losses_max or ticket.is_done or ticket.running != {attempt}:
            return False
        if ticket.piece.inputs == 1:
            self._isolated.suspects.add(ticket.piece.work, self._clock(), is_refused=False)
        return True

    def _count_fault(self, attempt: Attempt, error: BackendError, *, is_broken: bool) -> None:
        """Count a failure alone against an input. is_broken: the replica does not work since."""
        ticket, now_s, suspects = attempt.tickets[0], self._clock(), self._isolated.suspects
        ticket.faults += 1
        ticket.fault = error
        ticket.has_hung = isinstance(error, AttemptTimedOut)
        # A replica that had less time than usual is not at fault if another one computes the input.
        if isinstance(error, ReplicaFailed | ReplicaUnavailable) or (
            ticket.has_hung and attempt.brief_s is None
        ):
            ticket.failed_at = (*ticket.failed_at, attempt.replica)
        if ticket.piece.inputs == 1:
            suspects.add(ticket.piece.work, now_s, is_refused=False, has_hung=ticket.has_hung)
        if is_broken:
            suspects.add_crash(ticket.owner.tenant, now_s)

    async def _works_again(self, replica: Replica, ticket: Ticket) -> bool:
        """Return whether a replica that an input may have broken completes plain work, within a while."""
        ends_s = ticket.deadline_s if self._pool.holds else self._clock() + RETURN_S
        while not ticket.is_done and self._clock() < ends_s:
            if await self.checks.fault_of(replica, self._clock()) is None:
                return True
            await asyncio.sleep(LOOK_EVERY_S)
        return False

    def _try_again(self, ticket: Ticket, replica: Replica, level: Isolation) -> None:
        if ticket.losses >= LOSSES_MAX:
            assert ticket.last_error is not None
            ticket.settle(ticket.last_error)
            return
        ticket.tried, ticket.failed_last = set(), replica
        self._isolated.enqueue(ticket, level, self._clock(), first=True)

    def _expect_return(self, replica: Replica) -> None:
        """Let calls wait for a replica that may be restarting."""
        self._pool.expect_return(replica)
        if (timer := self._returns.pop(replica, None)) is not None:
            timer.cancel()
        loop = asyncio.get_running_loop()
        self._returns[replica] = loop.call_later(RETURN_S, self._pool.give_up, replica)

    async def _check(self, attempt: Attempt, error: BackendError, since_s: float) -> BackendError | None:
        """Return why a replica fails plain work, and count the failure against it; None if it works."""
        replica = attempt.replica
        fault = await self.checks.fault_of(replica, since_s)
        if fault is None:
            return None
        now_s = self._clock()
        if isinstance(error, ConnectionLost) and not isinstance(fault, UNANSWERED):
            error = ReplicaFailed(fault.message)
        elif isinstance(error, ReplicaUnavailable | CredentialRefused):
            error = fault
        self._pool.record_failure(replica, error, now_s, attempt.started_s)
        if isinstance(error, ConnectionLost) and replica.state is State.DOWN:
            self._expect_return(replica)
        return fault
