"""Outcomes of attempts: applies replies and errors to the replica, the tickets and the queue.

`retries` decides the consequence of an error. This module carries it out. Failures that an input may cause go
through `faults` first, refusals for a while through `refused`.
"""

import asyncio
import logging
from functools import partial
from random import Random

from backends.contract import Reply
from backends.contract.errors import (
    AttemptTimedOut,
    BackendError,
    InvalidWork,
    ModelNotLoaded,
    PermitsTaken,
    ReplicaFailed,
    RequestTooLarge,
    UnsupportedWork,
)
from gateway.lane.fair_queue import FairQueue
from gateway.lane.isolation import IsolatedQueue
from gateway.lane.joining import has_own_counts, split_reply
from gateway.lane.measures import LaneMeasures
from gateway.lane.retries import (
    Fail,
    Retry,
    RetryPolicy,
    Split,
    effect_of,
    is_final,
    is_refused,
    refusal_of,
    try_elsewhere,
)
from gateway.lane.staggered_calls import StaggeredCalls
from gateway.lane.suspects import Isolation
from gateway.lane.tenant_activity import TenantActivity
from gateway.lane.ticket import Attempt, Ticket
from gateway.routing.pool import Pool, held_s, lacking
from gateway.routing.replica import Replica

# A server that asks for a shorter pause would be asked all the time.
HOLD_MIN_S = 0.1

# Lines about inputs that make servers fail are at least this far apart.
WARN_EVERY_S = 10.0

logger = logging.getLogger("gateway")


class OutcomeHandler:
    """Handles the outcome of every attempt of one lane."""

    def __init__(
        self,
        pool: Pool,
        queue: FairQueue[Ticket],
        isolated: IsolatedQueue[Ticket],
        activity: TenantActivity,
        policy: RetryPolicy,
        measures: LaneMeasures,
    ) -> None:
        self._pool = pool
        self._queue = queue
        self._isolated = isolated
        self._activity = activity
        self._policy = policy
        self._measures = measures
        self._deliveries = StaggeredCalls()
        # Moment of the last warning, and those that were left out since.
        self._warned_s: float | None = None
        self._unlogged = 0
        self._random = Random()  # noqa: S311 - it spreads retries and protects no secret

    def handle_reply(self, attempt: Attempt, reply: Reply, now_s: float) -> None:
        """Learn from a completed batch and give each ticket its own reply."""
        load, tickets, took_s = attempt.load, attempt.tickets, now_s - attempt.started_s
        self._measures.record_batch(load.inputs, load.tokens, took_s, now_s)
        was_full = not attempt.replica.free_slots(load.kind, load.inputs) or bool(len(self._queue))
        self._pool.record_success(attempt.replica, load, took_s, now_s, was_full=was_full)
        replies = split_reply([ticket.piece for ticket in tickets], reply)
        for ticket in tickets:
            if ticket.isolation or ticket.failed_batch is not None:
                self._clear(ticket, attempt.replica, now_s)
        if len(tickets) == 1:
            tickets[0].settle(replies[0])
            return
        if not has_own_counts([ticket.piece for ticket in tickets], reply):
            for record in [record for ticket in tickets for record in ticket.records]:
                record.shares_tokens = True
        is_staggered = self._activity.has_others(tickets[0].owner.tenant, now_s)
        for ticket, own_reply in zip(tickets, replies, strict=True):
            if is_staggered:
                self._deliveries.add(ticket.owner.tenant, partial(ticket.settle, own_reply))
            else:
                ticket.settle(own_reply)

    def handle_error(self, attempt: Attempt, error: BackendError, now_s: float) -> None:
        """Record a failure that no input causes at the replica, then retry, split or fail the batch."""
        replica = attempt.replica
        if isinstance(error, RequestTooLarge):
            self._learn_size(replica, attempt.piece.work.request_bytes, now_s)
        elif isinstance(error, PermitsTaken):
            self._pause(replica)
        if error.retry_after_s and isinstance(error, ModelNotLoaded):
            self.hold(replica, error.retry_after_s, now_s)
        if error.retryable or isinstance(error, UnsupportedWork):
            self._pool.record_failure(replica, error, now_s, attempt.started_s)
        if isinstance(error, InvalidWork) and error.input_index is not None and len(attempt.tickets) > 1:
            self._single_out(attempt, error, now_s)
        else:
            self.apply(attempt, error, now_s)

    def abandon(self, attempt: Attempt, now_s: float) -> None:
        """Abandon an attempt at a stalled replica, and retry its work on a different one."""
        error = AttemptTimedOut("the replica has work and does not respond")
        attempt.outcome = error.kind
        if len(attempt.tickets) > 1:
            # One of its inputs may be the cause.
            self.split(attempt, Split(error, avoid_replica=True), now_s)
        else:
            self.apply(attempt, error, now_s)
        attempt.cancel()

    def refuse(self, ticket: Ticket, replica: Replica, error: BackendError, now_s: float) -> InvalidWork:
        """Return the error of an input that failed alone, last at a replica.

        If it failed a batch before, its tenant shares no batch with others for a while.
        """
        self._warn(ticket, replica, error, now_s)
        self._remember(ticket, now_s, has_hung=isinstance(error, AttemptTimedOut))
        return refusal_of(error, has_index=ticket.piece.inputs == 1)

    def _warn(self, ticket: Ticket, replica: Replica, error: BackendError, now_s: float) -> None:
        """Log an input that makes servers fail, once, and without its text."""
        known = self._isolated.suspects.recall(ticket.piece.work) if ticket.piece.inputs == 1 else None
        if known is not None and known.is_refused:
            return
        if self._warned_s is not None and now_s - self._warned_s < WARN_EVERY_S:
            self._unlogged += 1
            return
        logger.warning(
            "upstream %s: %s %s for an input of tenant %s, and works for others; the input is refused; "
            "%d more since the last such line",
            self._pool.upstream,
            replica.name,
            effect_of(error),
            ticket.owner.tenant,
            self._unlogged,
        )
        self._warned_s, self._unlogged = now_s, 0

    def _remember(self, ticket: Ticket, now_s: float, *, has_hung: bool = False) -> None:
        """Remember an input at fault, and its tenant if it has failed a batch of several slices."""
        if ticket.piece.inputs == 1:
            self._isolated.suspects.add(ticket.piece.work, now_s, is_refused=True, has_hung=has_hung)
        if ticket.half is not None:
            self._activity.mark_suspect(ticket.owner.tenant, now_s)

    def _clear(self, ticket: Ticket, replica: Replica, now_s: float) -> None:
        """Clear an input that a replica has computed: where it failed before, the replica is at fault."""
        if ticket.isolation is Isolation.KNOWN:
            self._isolated.suspects.forget(ticket.piece.work)
        failed_at, batch = ticket.failed_at, ticket.failed_batch
        if batch is not None and batch.clear_one():
            failed_at = (*failed_at, batch.replica)
        for failed in failed_at:
            if failed is not replica:
                error = ReplicaFailed("it fails inputs that another replica computes")
                self._pool.record_failure(failed, error, now_s, now_s)

    def _learn_size(self, replica: Replica, refused_bytes: int, now_s: float) -> None:
        if replica.refusals.learn_size(refused_bytes, now_s):
            logger.info(
                "upstream %s: %s refused %d bytes; its requests have at most %d now",
                self._pool.upstream,
                replica.name,
                refused_bytes,
                replica.refusals.learned_bytes,
            )

    def _pause(self, replica: Replica) -> None:
        pause_s = replica.refusals.pause(self._random.random())
        if pause_s is not None:
            asyncio.get_running_loop().call_later(pause_s, self._resume, replica)

    def hold(self, replica: Replica, pause_s: float, now_s: float) -> None:
        """Give a replica no work for as long as it asked for."""
        until_s = now_s + max(HOLD_MIN_S, pause_s)
        if replica.hold(until_s):
            asyncio.get_running_loop().call_at(until_s, self._release, replica, until_s)

    def _release(self, replica: Replica, until_s: float) -> None:
        # The timer of the event loop may be early by its resolution.
        replica.release(until_s)
        self._pool.subscribers.report_change()

    def _resume(self, replica: Replica) -> None:
        replica.refusals.is_paused = False
        self._pool.subscribers.report_change()

    def apply(self, attempt: Attempt, error: BackendError, now_s: float) -> None:
        """Carry out the policy's decision about a failed batch."""
        if isinstance(error, UnsupportedWork) and attempt.is_wanted() and self._has_untried(attempt):
            self._hand_back(attempt, try_elsewhere(error, len(attempt.tickets)), now_s)
            return
        decision = self._policy.decide(
            error,
            slices=len(attempt.tickets),
            is_wanted=attempt.is_wanted(),
            has_other_replica=len(self._pool.usable()) > 1,
            now_s=now_s,
        )
        if isinstance(decision, Split):
            self.split(attempt, decision, now_s)
        else:
            self._hand_back(attempt, decision, now_s)

    def _has_untried(self, attempt: Attempt) -> bool:
        tried = {replica for ticket in attempt.tickets for replica in ticket.tried}
        avoid = {attempt.replica, *tried, *lacking(self._pool, attempt.piece.work)}
        return bool(self._pool.usable(avoid))

    def _hand_back(self, attempt: Attempt, decision: Retry | Fail, now_s: float) -> None:
        """Queue each ticket again, or settle it with the error."""
        # The last first, so that all keep their order at the head of the queue.
        for ticket in reversed(attempt.tickets):
            if attempt not in ticket.running:
                # It was handed back already, when its replica stalled.
                continue
            ticket.running.discard(attempt)
            if ticket.is_done:
                continue
            self._record_error(ticket, attempt.replica, decision, now_s)
            if ticket.running:
                # Another attempt still carries it: a hedge, or the attempt that was hedged.
                continue
            refused = is_refused(ticket.refusals, ticket.piece.inputs)
            fails = is_final(decision, len(attempt.tickets), is_refused=refused)
            if fails or self._is_held_past(ticket.deadline_s, now_s):
                ticket.settle(decision.error)
            elif ticket.isolation:
                self._isolated.enqueue(ticket, Isolation.ALONE, now_s, first=True)
            else:
                ticket.enqueue(self._queue, now_s, first=True)

    def _is_held_past(self, deadline_s: float, now_s: float) -> bool:
        """Return whether every replica that could be tried asked for a pause that ends after a deadline."""
        wait_s = held_s(self._pool, now_s)
        return wait_s is not None and now_s + wait_s > deadline_s

    def _record_error(self, ticket: Ticket, replica: Replica, decision: Retry | Fail, now_s: float) -> None:
        if isinstance(decision, Fail) and decision.blames_input:
            self._remember(ticket, now_s)
        ticket.last_error = decision.error
        ticket.refusals += isinstance(decision.error, PermitsTaken)
        if isinstance(decision, Fail) or not decision.same_replica:
            ticket.tried.add(replica)

    def _single_out(self, attempt: Attempt, error: InvalidWork, now_s: float) -> None:
        """Fail the slice whose input the replica names, and queue the others of its batch again."""
        assert error.input_index is not None
        end, culprit, index = 0, attempt.tickets[-1], 0
        for ticket in attempt.tickets:
            if end <= error.input_index < end + ticket.piece.inputs:
                culprit, index = ticket, error.input_index - end
            end += ticket.piece.inputs
        for ticket in reversed(attempt.tickets):
            if attempt not in ticket.running:
                continue
            ticket.running.discard(attempt)
            if ticket is culprit:
                ticket.half = attempt
                self._remember(ticket, now_s)
                ticket.settle(InvalidWork(error.message, empty=error.empty, input_index=index))
            elif not ticket.is_done:
                ticket.enqueue(self._queue, now_s, first=True)

    def split(self, attempt: Attempt, decision: Split, now_s: float) -> None:
        """Queue each half of a batch as a batch of its own, to find the input that causes the failure."""
        middle = len(attempt.tickets) // 2
        failed_last = attempt.replica if decision.avoid_replica else None
        for tickets in (attempt.tickets[:middle], attempt.tickets[middle:]):
            half = object()
            for ticket in reversed(tickets):
                if attempt in ticket.running:
                    ticket.running.discard(attempt)
                    ticket.half, ticket.last_error = half, decision.error
                    ticket.tried, ticket.failed_last = set(), failed_last
                    if not ticket.is_done:
                        ticket.enqueue(self._queue, now_s, first=True)
