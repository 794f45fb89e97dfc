"""Outcomes of attempts: what a reply, a failure or a refusal means for the replica, tickets and queue.

A reply is divided among the tickets of its batch, and the lane learns from it. An error that no input causes
(`OutcomeHandler`) is recorded at the replica, and the batch is retried, split or failed. Where one input of
the batch may be the cause, it is found out first who is at fault, the input or the replica. Every limit and
verdict is that of `retries`; this file finds out what they need, and carries them out.

Rule: what an input may have caused is never repeated with the same neighbours, and costs no retry budget as
long as the replica works for others. A plain text shows whether it does.

Failures: an error, a broken connection, no answer in time, 401, 403, 503 as an answer to
work.

- A batch of several slices is divided: in halves after an error, into single slices after a broken connection
  or a timeout. A slice of several inputs fails with `SliceFailed`, and the stage `dispatch` cuts it.
- One input that fails alone is tried once more, at a different replica if there is one. If it fails again,
  and the replica completes plain work, the error is the input's.
- The parts of what timed out get a shorter timeout, by the recent times of the replica. One that passes is
  tried once more with a longer one. Without evidence that the replica works, the usual timeout holds again.
- If the replica fails plain work, too, the failure counts against the replica, and retries cost budget.
- An input whose attempt broke the server is not judged before a replica works again.

Overload: 429, and 503 with a pause.

- A refusal counts for the whole replica only if it refuses or fails a plain text too. A replica whose
  requests cost money is sent no plain text: there a second refusal, of other inputs within a while, counts.
- If it counts, the window shrinks, and the replica gets no work during the pause that it asked for.
- If not, a batch of several slices is halved, free of charge. One slice is tried once more, at a different
  replica or after a short pause. Then its caller gets the refusal, with the pause.
"""

import asyncio
import logging
import math
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from random import Random
from weakref import WeakKeyDictionary

from backends.contract import Reply
from backends.contract.errors import (
    AttemptTimedOut,
    BackendError,
    ConnectionLost,
    InvalidWork,
    ModelNotLoaded,
    PermitsTaken,
    ReplicaFailed,
    ReplicaUnavailable,
    RequestTooLarge,
    UnsupportedWork,
)
from gateway.lane.fair_queue import FairQueue
from gateway.lane.isolation import IsolatedQueue, Isolation, TenantActivity
from gateway.lane.joining import has_own_counts, split_reply
from gateway.lane.measures import LaneMeasures
from gateway.lane.retries import (
    BREAKING,
    LOOK_EVERY_S,
    RETURN_S,
    Fail,
    Retry,
    RetryPolicy,
    Split,
    blames_replica,
    counts_for_replica,
    division,
    effect_of,
    has_lost_too_many,
    hold_s,
    input_error,
    is_final,
    is_held_past,
    is_last_failure,
    is_overload_of_all,
    lacks_permits,
    masked,
    proof_since_s,
    replica_error,
    return_ends_s,
    second_try,
    timed_out_early,
    verdict_on_slice,
    were_unready_too_often,
)
from gateway.lane.ticket import Attempt, FailedBatch, Ticket
from gateway.lane.upstream_limits import LimitReached
from gateway.routing.checks import WorkChecks
from gateway.routing.health import State
from gateway.routing.pool import Pool
from gateway.routing.replica import Replica

# Lines about inputs that make servers fail are at least this far apart.
WARN_EVERY_S = 10.0

logger = logging.getLogger("gateway")


class SliceFailed(Exception):
    """Failure of a slice of several inputs, one of which may be at fault: the replica works for others."""

    def __init__(self, error: BackendError) -> None:
        super().__init__(error.message)
        self.error = error


class StaggeredCalls:
    """Queue of functions, of which one runs per turn of the event loop.

    Tenants take turns, and a tenant's functions keep their order.
    A lane delivers the replies of a joined batch this way. Delivered all at once, one tenant's replies would
    delay the calls of every other tenant.
    """

    def __init__(self) -> None:
        self._pending: OrderedDict[str, deque[Callable[[], None]]] = OrderedDict()

    def add(self, tenant: str, function: Callable[[], None]) -> None:
        """Run a function in a later turn."""
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._run_next)
        self._pending.setdefault(tenant, deque()).append(function)

    def _run_next(self) -> None:
        tenant, functions = self._pending.popitem(last=False)
        function = functions.popleft()
        if functions:
            self._pending[tenant] = functions
        if self._pending:
            asyncio.get_running_loop().call_soon(self._run_next)
        function()


class OutcomeHandler:
    """Handles the outcome of every attempt of one lane. clock: the event loop's."""

    def __init__(
        self,
        pool: Pool,
        queue: FairQueue[Ticket],
        isolated: IsolatedQueue[Ticket],
        activity: TenantActivity,
        policy: RetryPolicy,
        measures: LaneMeasures,
        clock: Callable[[], float],
    ) -> None:
        self._pool = pool
        self._queue = queue
        self._isolated = isolated
        self._activity = activity
        self._policy = policy
        self._measures = measures
        self._clock = clock
        self._checks = WorkChecks(clock, policy.attempt_timeout_s)
        # When the wait for a replica ends.
        self._returns: WeakKeyDictionary[Replica, asyncio.TimerHandle] = WeakKeyDictionary()
        # Of replicas whose requests cost money: hash of the first input refused last, and the moment.
        self._last_overloads: WeakKeyDictionary[Replica, tuple[int, float]] = WeakKeyDictionary()
        self._deliveries = StaggeredCalls()
        # Moment of the last warning, and those that were left out since.
        self._warned_s: float | None = None
        self._unlogged = 0
        self._random = Random()  # noqa: S311 - it spreads retries and protects no secret

    def handle_reply(self, attempt: Attempt, reply: Reply, now_s: float) -> None:
        """Learn from a completed batch and give each ticket its own reply."""
        load, tickets, took_s = attempt.load, attempt.tickets, now_s - attempt.started_s
        self._measures.record_batch(load.inputs, load.tokens, took_s, now_s)
        was_full = self._queue.size > 0 or not attempt.replica.free_slots(load.kind, load.inputs)
        self._pool.record_success(attempt.replica, load, took_s, now_s, was_full=was_full)
        for ticket in tickets:
            if ticket.isolation or ticket.failed_batch is not None:
                self._clear(ticket, attempt.replica, now_s)
        if len(tickets) == 1:
            tickets[0].settle(split_reply((tickets[0].piece,), reply)[0])
            return
        pieces = [ticket.piece for ticket in tickets]
        replies = split_reply(pieces, reply)
        if not has_own_counts(pieces, reply):
            for record in [record for ticket in tickets for record in ticket.records]:
                record.share_tokens()
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
            self._hold(replica, error.retry_after_s, now_s)
        if counts_for_replica(error):
            self._pool.record_failure(replica, error, now_s, attempt.started_s)
        if isinstance(error, InvalidWork) and error.input_index is not None and len(attempt.tickets) > 1:
            self._single_out(attempt, error, now_s)
        else:
            self._apply(attempt, error, now_s)

    def abandon(self, attempt: Attempt, now_s: float) -> None:
        """Abandon an attempt at a stalled replica, and retry its work on a different one."""
        error = AttemptTimedOut("the replica has work and does not respond")
        attempt.stall(error)
        if len(attempt.tickets) > 1:
            # One of its inputs may be the cause.
            self._split(attempt, Split(error, avoid_replica=True), now_s)
        else:
            self._apply(attempt, error, now_s)
        attempt.cancel()

    def _refuse(self, ticket: Ticket, replica: Replica, error: BackendError, now_s: float) -> InvalidWork:
        """Return the error of an input that failed alone, last at a replica.

        If it failed a batch before, its tenant shares no batch with others for a while.
        """
        self._warn(ticket, replica, error, now_s)
        self._remember(ticket, now_s, has_hung=isinstance(error, AttemptTimedOut))
        return input_error(error, has_index=ticket.piece.inputs == 1)

    def _warn(self, ticket: Ticket, replica: Replica, error: BackendError, now_s: float) -> None:
        """Log an input that makes servers fail, once, and without its text."""
        known = self._isolated.suspects.recall(ticket.piece.work) if ticket.piece.inputs == 1 else None
        if known is not None and known.is_blamed:
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
            self._isolated.suspects.add(ticket.piece.work, now_s, is_blamed=True, has_hung=has_hung)
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
        if replica.request_limits.learn_size(refused_bytes, now_s):
            logger.info(
                "upstream %s: %s refused %d bytes; its requests have at most %d now",
                self._pool.upstream,
                replica.name,
                refused_bytes,
                replica.request_limits.learned_bytes,
            )

    def _pause(self, replica: Replica) -> None:
        pause_s = replica.request_limits.pause(self._random.random())
        if pause_s is not None:
            asyncio.get_running_loop().call_later(pause_s, self._resume, replica)

    def _hold(self, replica: Replica, pause_s: float, now_s: float) -> None:
        """Give a replica no work for as long as it asked for."""
        until_s = now_s + hold_s(pause_s)
        if replica.hold(until_s):
            asyncio.get_running_loop().call_at(until_s, self._release, replica, until_s)

    def _release(self, replica: Replica, until_s: float) -> None:
        # The timer of the event loop may be early by its resolution.
        replica.release(until_s)
        self._pool.report_change()

    def _resume(self, replica: Replica) -> None:
        replica.request_limits.resume()
        self._pool.report_change()

    def _apply(self, attempt: Attempt, error: BackendError, now_s: float) -> None:
        """Carry out the policy's decision about a failed batch."""
        decision = self._policy.decide(
            error,
            slices=len(attempt.tickets),
            is_wanted=attempt.is_wanted(),
            has_other_replica=len(self._pool.usable()) > 1,
            now_s=now_s,
            has_untried_replica=isinstance(error, UnsupportedWork) and self._has_untried(attempt),
        )
        if isinstance(decision, Split):
            self._split(attempt, decision, now_s)
        else:
            self._hand_back(attempt, decision, now_s)

    def _has_untried(self, attempt: Attempt) -> bool:
        tried = {replica for ticket in attempt.tickets for replica in ticket.tried}
        avoid = {attempt.replica, *tried, *self._pool.lacking(attempt.piece.work)}
        return bool(self._pool.usable(avoid))

    def _hand_back(self, attempt: Attempt, decision: Retry | Fail, now_s: float) -> None:
        """Queue each ticket again, or settle it with the error."""
        # The last first, so that all keep their order at the head of the queue.
        for ticket in reversed(attempt.tickets):
            # It may have been handed back already, when its replica stalled.
            if not ticket.hand_back(attempt) or ticket.is_done:
                continue
            is_tried = isinstance(decision, Fail) or not decision.same_replica
            if isinstance(decision, Fail) and decision.blames_input:
                self._remember(ticket, now_s)
            ticket.fail(decision.error, attempt.replica if is_tried else None)
            if ticket.running:
                # Another attempt still carries it: a hedge, or the attempt that was hedged.
                continue
            lacked = lacks_permits(ticket.permit_refusals, ticket.piece.inputs)
            fails = is_final(decision, len(attempt.tickets), lacked_permits=lacked)
            if fails or is_held_past(self._pool.held_s(now_s), ticket.deadline_s, now_s):
                ticket.settle(decision.error)
            elif ticket.isolation:
                self._isolated.enqueue(ticket, Isolation.ALONE, now_s, first=True)
            else:
                ticket.enqueue(self._queue, now_s, first=True)

    def _single_out(self, attempt: Attempt, error: InvalidWork, now_s: float) -> None:
        """Fail the slice whose input the replica names, and queue the others of its batch again."""
        assert error.input_index is not None
        end, culprit, index = 0, attempt.tickets[-1], 0
        for ticket in attempt.tickets:
            if end <= error.input_index < end + ticket.piece.inputs:
                culprit, index = ticket, error.input_index - end
            end += ticket.piece.inputs
        for ticket in reversed(attempt.tickets):
            if not ticket.hand_back(attempt):
                continue
            if ticket is culprit:
                ticket.blame(attempt)
                self._remember(ticket, now_s)
                ticket.settle(InvalidWork(error.message, empty=error.empty, input_index=index))
            elif not ticket.is_done:
                ticket.enqueue(self._queue, now_s, first=True)

    def _split(self, attempt: Attempt, decision: Split, now_s: float) -> None:
        """Queue each half of a batch as a batch of its own, to find the input that causes the failure."""
        middle = len(attempt.tickets) // 2
        failed_last = attempt.replica if decision.avoid_replica else None
        for tickets in (attempt.tickets[:middle], attempt.tickets[middle:]):
            half = object()
            for ticket in reversed(tickets):
                if ticket.hand_back(attempt):
                    ticket.start_over(failed_last, half, decision.error)
                    if not ticket.is_done:
                        ticket.enqueue(self._queue, now_s, first=True)

    async def handle_failure(self, attempt: Attempt, error: BackendError) -> None:
        """Find out whether the replica works, then divide, retry, refuse or fail the batch."""
        now_s, replica = self._clock(), attempt.replica
        if isinstance(error, ConnectionLost):
            replica.record_loss(attempt.started_s, now_s)
        if attempt.was_handed_back:
            return
        patience_s = replica.patience_s(self._policy.attempt_timeout_s)
        is_early = attempt.brief_s is None and timed_out_early(error, now_s - attempt.started_s, patience_s)
        if len(attempt.tickets) > 1:
            await self._divide(attempt, error, is_early=is_early)
        elif is_early:
            self._apply(attempt, error, now_s)
        else:
            await self._judge(attempt, error, now_s)

    async def _divide(self, attempt: Attempt, error: BackendError, *, is_early: bool) -> None:
        """Divide a batch of several slices, so that none of them meets the same neighbours again."""
        if isinstance(error, AttemptTimedOut):
            for ticket in attempt.tickets:
                ticket.record_hang(has_hung=not is_early)
            self._isolate(attempt, error)
            if not is_early and await self._check(attempt, error, self._clock()) is not None:
                for ticket in attempt.tickets:
                    ticket.record_hang(has_hung=False)
            return
        fault = await self._check(attempt, error, attempt.started_s)
        course = division(error, fault)
        if course == "alone":
            self._isolate(attempt, error)
        elif course == "halves":
            split = Split(masked(error, len(attempt.tickets)), avoid_replica=len(self._pool.usable()) > 1)
            batch = FailedBatch(attempt.replica, len(attempt.tickets))
            for ticket in attempt.tickets:
                ticket.leave_batch(batch)
            self._split(attempt, split, self._clock())
        else:
            self._apply(attempt, error, self._clock())

    def _isolate(self, attempt: Attempt, error: BackendError) -> None:
        """Queue each slice of a batch to go alone, at a different replica if there is one."""
        now_s, replica = self._clock(), attempt.replica
        for ticket in reversed(attempt.tickets):
            if not ticket.hand_back(attempt):
                continue
            ticket.start_over(replica, attempt, masked(error, len(attempt.tickets)))
            if isinstance(error, BREAKING):
                ticket.count_loss()
            if not ticket.is_done:
                self._isolated.enqueue(ticket, Isolation.ALONE, now_s, first=True)
        self._pool.report_change()

    async def _judge(self, attempt: Attempt, error: BackendError, failed_s: float) -> None:
        """Decide about a slice that failed alone."""
        ticket, replica = attempt.tickets[0], attempt.replica
        avoid = {replica, *ticket.tried, *self._pool.lacking(ticket.piece.work)}
        is_last = is_last_failure(
            error,
            ticket.faults,
            is_indivisible=ticket.is_indivisible,
            has_other_replica=bool(self._pool.usable(avoid)),
            is_brief=attempt.brief_s is not None,
        )
        since_s = proof_since_s(error, attempt.started_s, failed_s, is_last=is_last)
        fault = await self._check(attempt, error, since_s)
        if fault is not None and isinstance(error, ReplicaUnavailable) and self._is_spent(ticket, attempt):
            ticket.settle(error)
            return
        verdict = verdict_on_slice(
            error,
            fault,
            is_indivisible=ticket.is_indivisible,
            is_last=is_last,
            broke_with_others=replica.lost_several(attempt.started_s, failed_s),
        )
        if ticket.is_done or ticket.running != {attempt} or verdict == "replica":
            self._blame_replica(attempt, error)
            return
        ticket.hand_back(attempt)
        ticket.fail(error, lost_connection=isinstance(error, ConnectionLost))
        if verdict == "again":
            self._try_again(ticket, replica, Isolation.ALONE if ticket.losses == 1 else Isolation.KNOWN)
        elif verdict == "cut":
            ticket.settle(SliceFailed(error))
        else:
            # Past "replica", a fault is that of a broken connection.
            self._count_fault(attempt, error, is_broken=fault is not None)
            if verdict == "once_more":
                self._try_again(ticket, replica, Isolation.KNOWN)
            elif fault is not None and not await self._works_again(replica, ticket):
                ticket.settle(error)
            else:
                ticket.settle(self._refuse(ticket, replica, error, self._clock()))

    def _blame_replica(self, attempt: Attempt, error: BackendError) -> None:
        """Carry out the policy's decision about a slice that failed alone, and not by its inputs' fault."""
        ticket = attempt.tickets[0]
        is_only = not ticket.is_done and ticket.running == {attempt}
        if is_only and attempt.brief_s is not None and isinstance(error, AttemptTimedOut):
            # All work is slow there, and only the shorter timeout has passed.
            ticket.hand_back(attempt)
            ticket.fail(error)
            ticket.record_hang(has_hung=False)
            self._try_again(ticket, attempt.replica, Isolation.ALONE)
        else:
            self._apply(attempt, error, self._clock())

    def _is_spent(self, ticket: Ticket, attempt: Attempt) -> bool:
        """Count a server that is unready since it had a slice; return whether no other one may have it."""
        ticket.count_loss()
        is_over = were_unready_too_often(ticket.losses, holds=self._pool.holds)
        if not is_over or ticket.is_done or ticket.running != {attempt}:
            return False
        if ticket.piece.inputs == 1:
            self._isolated.suspects.add(ticket.piece.work, self._clock(), is_blamed=False)
        return True

    def _count_fault(self, attempt: Attempt, error: BackendError, *, is_broken: bool) -> None:
        """Count a failure alone against an input. is_broken: the replica does not work since."""
        ticket, now_s, suspects = attempt.tickets[0], self._clock(), self._isolated.suspects
        has_hung = isinstance(error, AttemptTimedOut)
        is_replicas = blames_replica(error, is_brief=attempt.brief_s is not None)
        ticket.count_fault(error, attempt.replica if is_replicas else None)
        if ticket.piece.inputs == 1:
            suspects.add(ticket.piece.work, now_s, is_blamed=False, has_hung=has_hung)
        if is_broken:
            suspects.add_crash(ticket.owner.tenant, now_s)

    async def _works_again(self, replica: Replica, ticket: Ticket) -> bool:
        """Return whether a replica that an input may have broken completes plain work, within a while."""
        ends_s = return_ends_s(ticket.deadline_s, self._clock(), holds=self._pool.holds)
        while not ticket.is_done and self._clock() < ends_s:
            if await self._checks.fault_of(replica, self._clock()) is None:
                return True
            await asyncio.sleep(LOOK_EVERY_S)
        return False

    def _try_again(self, ticket: Ticket, replica: Replica, level: Isolation) -> None:
        if has_lost_too_many(ticket.losses):
            assert ticket.last_error is not None
            ticket.settle(ticket.last_error)
            return
        ticket.start_over(replica)
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
        fault = await self._checks.fault_of(replica, since_s)
        if fault is None:
            return None
        recorded = replica_error(error, fault)
        self._pool.record_failure(replica, recorded, self._clock(), attempt.started_s)
        if isinstance(recorded, ConnectionLost) and replica.state is State.DOWN:
            self._expect_return(replica)
        return fault

    def handle_limit(self, attempt: Attempt, reached: LimitReached, now_s: float) -> None:
        """Let a batch for which the upstream's account has no room wait, or give its callers the refusal.

        A call that another upstream can serve, or whose deadline comes first, does not wait. The replicas did
        nothing, and get no work until the account has room.
        """
        wait_s = reached.wait_s
        if wait_s is not None:
            for replica in self._pool.usable():
                self._hold(replica, wait_s, now_s)
        for ticket in reversed(attempt.tickets):
            if not ticket.withdraw(attempt):
                continue
            owner = ticket.owner
            goes_on = owner.may_move or owner.copy is not None
            if wait_s is None or goes_on or now_s + wait_s > ticket.deadline_s:
                ticket.settle(reached.error)
            elif ticket.isolation:
                self._isolated.enqueue(ticket, Isolation.ALONE, now_s, first=True)
            else:
                ticket.enqueue(self._queue, now_s, first=True)

    async def handle_overload(self, attempt: Attempt, error: BackendError) -> None:
        """Find out whether the replica refuses all work, then hold it, or divide or answer the batch."""
        replica = attempt.replica
        if attempt.was_handed_back:
            return
        fault = await self._overload_fault(attempt, error)
        now_s = self._clock()
        if fault is not None:
            if error.retry_after_s:
                self._hold(replica, error.retry_after_s, now_s)
            self._pool.record_failure(replica, fault, now_s, attempt.started_s)
            self._apply(attempt, error, now_s)
        elif len(attempt.tickets) > 1:
            split = Split(masked(error, len(attempt.tickets)), avoid_replica=len(self._pool.usable()) > 1)
            self._split(attempt, split, now_s)
            self._pool.report_change()
        else:
            self._answer(attempt, error, now_s)

    async def _overload_fault(self, attempt: Attempt, error: BackendError) -> BackendError | None:
        """Return why a replica refuses all work; None if only the inputs of an attempt may be the cause."""
        capabilities = attempt.replica.capabilities
        if capabilities is None or not capabilities.metered:
            # What it answered lately shows nothing of a limit that was reached since.
            return await self._checks.fault_of(attempt.replica, math.inf)
        now_s, first = self._clock(), next(iter(attempt.piece.work.inputs))
        last_key, last_s = self._last_overloads.get(attempt.replica, (hash(first), now_s))
        self._last_overloads[attempt.replica] = hash(first), now_s
        is_of_all = is_overload_of_all(now_s - last_s, is_same_input=last_key == hash(first))
        return error if is_of_all else None

    def _answer(self, attempt: Attempt, error: BackendError, now_s: float) -> None:
        """Try a slice that was refused alone once more, or give its caller the refusal."""
        ticket, pause_s = attempt.tickets[0], error.retry_after_s
        if ticket.half is not None and ticket.piece.inputs == 1:
            # It made a batch fail.
            self._isolated.suspects.add(ticket.piece.work, now_s, is_blamed=False)
        if ticket.is_done or ticket.running != {attempt} or pause_s is None:
            self._apply(attempt, error, now_s)
            return
        ticket.hand_back(attempt)
        ticket.count_pause(error)
        avoid = {attempt.replica, *ticket.tried, *self._pool.lacking(ticket.piece.work)}
        has_other = bool(self._pool.usable(avoid))
        course = second_try(ticket.pauses, pause_s, ticket.deadline_s - now_s, has_other_replica=has_other)
        if course == "elsewhere":
            ticket.avoid(attempt.replica)
            self._isolated.enqueue(ticket, Isolation.ALONE, now_s, first=True)
        elif course == "wait":
            asyncio.get_running_loop().call_later(pause_s, self._send_again, ticket)
        else:
            ticket.settle(error)

    def _send_again(self, ticket: Ticket) -> None:
        if not ticket.is_done:
            self._isolated.enqueue(ticket, Isolation.ALONE, self._clock(), first=True)
            self._pool.report_change()
