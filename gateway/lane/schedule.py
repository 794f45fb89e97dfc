"""Scheduler of a lane: the next slices to send, and their replica. Pure: decides, and sends nothing.

It alone takes tickets out of the queues, because the turn of the next one depends on each that left. The
caller acts on each decision before it asks for the next, because a dispatch changes the pool's load.

- A slice goes to a replica that has room, offers its work and has not failed it before.
- While several tenants are active, a tenant with a batch at a replica leaves its last slot to the others, so
  that the next tenant's call need not wait for a different tenant's batch.
- Slices share a batch only if there are fewer free slots than waiting slices.
- Slices that go alone take no slots, and few are in flight; see `isolation`.
"""

from collections.abc import Callable, Collection

import msgspec

from backends.contract.errors import UnsupportedWork
from gateway.lane.fair_queue import Entry, FairQueue
from gateway.lane.isolation import IsolatedQueue, Isolation, TenantActivity
from gateway.lane.joining import BatchTotals
from gateway.lane.measures import BatchSizer
from gateway.lane.retries import lacks_permits
from gateway.lane.slices import Bounds
from gateway.lane.ticket import Ticket
from gateway.routing.offers import offers
from gateway.routing.pool import Pool
from gateway.routing.replica import LoadKind, Replica

# Tickets that cannot go, or not in the same batch, that are passed over in search of others that can.
LOOK_AHEAD = 8


class Dispatch(msgspec.Struct, frozen=True):
    """Send these tickets to this replica, as one batch."""

    tickets: list[Ticket]
    replica: Replica


class Rejection(msgspec.Struct, frozen=True):
    """Resolve a ticket with an error, because waiting longer would not help it."""

    ticket: Ticket
    error: Exception


class SchedulingPass:
    """One pass over the queue.

    skipped_tenants: tenants whose next ticket may not take the last slot. skipped_alone: the same of the
    queues of slices that go alone. deferred: entries out of the queue until the pass ends, because only a
    replica that has failed them has room. resumes_s: when the first tenant that pauses may go on; None if
    none does.
    """

    def __init__(self) -> None:
        self.skipped_tenants: set[str] = set()
        self.deferred: list[Entry[Ticket]] = []
        self.skipped_alone: dict[Isolation, set[str]] = {}
        self.resumes_s: float | None = None

    def pause_until(self, resumes_s: float) -> None:
        """Record when a tenant that pauses may go on."""
        self.resumes_s = resumes_s if self.resumes_s is None else min(resumes_s, self.resumes_s)


class Scheduler:
    """Decides which tickets leave a queue next, and where they go. kind: of the lane's batches."""

    def __init__(
        self,
        queue: FairQueue[Ticket],
        pool: Pool,
        activity: TenantActivity,
        sizer: BatchSizer,
        isolated: IsolatedQueue[Ticket],
        kind: LoadKind = "texts",
    ) -> None:
        self._queue = queue
        self._isolated = isolated
        self._pool = pool
        self._activity = activity
        self._sizer = sizer
        self._kind: LoadKind = kind

    def decide(
        self, scheduling_pass: SchedulingPass, now_s: float, bounds: Callable[[], Bounds]
    ) -> Dispatch | Rejection | None:
        """Take the next tickets out of the queue; None if no further ticket can go now.

        bounds: returns the bounds of one upstream request.
        """
        if self._isolated.is_used and (decision := self._decide_alone(scheduling_pass, now_s)) is not None:
            return decision
        queue, pool = self._queue, self._pool
        while (entry := queue.peek(scheduling_pass.skipped_tenants)) is not None:
            ticket = entry.item
            if ticket.is_done:
                queue.pop(entry)
                continue
            is_simple = pool.is_uniform and ticket.failed_last is None
            avoided = ticket.tried if is_simple else self._avoided(ticket)
            is_only = not self._activity.has_others(entry.tenant, now_s)
            replica = pool.pick(
                ticket.piece.inputs, avoided, entry.tenant, is_only_tenant=is_only, kind=self._kind
            )
            if replica is not None:
                queue.pop(entry)
                if not queue.size or lacks_permits(ticket.permit_refusals, ticket.piece.inputs):
                    return Dispatch([ticket], replica)
                return Dispatch(self._batch_from(ticket, replica, scheduling_pass, now_s, bounds), replica)
            if (error := self._reason_to_fail(ticket)) is not None:
                queue.pop(entry)
                return Rejection(ticket, error)
            if self._kind == "texts" and not pool.has_room(ticket.piece.inputs, self._kind):
                # Of pictures, another tenant's first may go beyond the window; it may wait behind this one.
                return None
            self._pass_over(entry, scheduling_pass, may_defer=bool(avoided))
        return None

    def _pass_over(self, entry: Entry[Ticket], scheduling_pass: SchedulingPass, *, may_defer: bool) -> None:
        """Look at other tickets in place of one that cannot go."""
        if may_defer and len(scheduling_pass.deferred) < LOOK_AHEAD:
            # A replica that has failed this ticket, or does not offer it, has a slot. The tenant's other
            # tickets can use it.
            self._queue.remove(entry)
            scheduling_pass.deferred.append(entry)
        else:
            # The last slot is free, and reserved for a tenant that has none yet.
            scheduling_pass.skipped_tenants.add(entry.tenant)

    def end_pass(self, scheduling_pass: SchedulingPass) -> None:
        """Put the deferred tickets back where they were."""
        for entry in reversed(scheduling_pass.deferred):
            self._queue.push(entry, first=True)

    def _decide_alone(self, scheduling_pass: SchedulingPass, now_s: float) -> Dispatch | Rejection | None:
        """Take the next ticket that goes alone out of its queue; None if none can go now."""
        isolated = self._isolated
        for level, queue in isolated.by_level.items():
            skipped = scheduling_pass.skipped_alone.setdefault(level, set())
            while (entry := queue.peek(skipped)) is not None:
                ticket = entry.item
                if ticket.is_done:
                    queue.pop(entry)
                elif (error := self._reason_to_fail(ticket)) is not None:
                    queue.pop(entry)
                    return Rejection(ticket, error)
                elif (resumes_s := isolated.suspects.paused_until_s(entry.tenant)) > now_s:
                    scheduling_pass.pause_until(resumes_s)
                    skipped.add(entry.tenant)
                elif (replica := self._replica_alone(ticket, level)) is not None:
                    queue.pop(entry)
                    return Dispatch([ticket], replica)
                else:
                    skipped.add(entry.tenant)
        return None

    def _replica_alone(self, ticket: Ticket, level: Isolation) -> Replica | None:
        if not self._isolated.has_place:
            return None
        avoid = {*self._avoided(ticket), *self._isolated.full_replicas(level)}
        return self._pool.pick_extra(ticket.piece.inputs, avoid, self._kind)

    def _reason_to_fail(self, ticket: Ticket) -> Exception | None:
        """Return the error of a ticket that no replica will serve, or None if waiting makes sense."""
        pool, may_wait = self._pool, not ticket.owner.may_move
        if pool.usable(self._avoided(ticket)) or (may_wait and pool.is_joining()):
            return None
        if ticket.tried and pool.usable():
            return ticket.last_error
        if not offers(pool.capabilities(), ticket.piece.work):
            # It did when the call was admitted: its last replica that offers it serves a different model now.
            return UnsupportedWork(f"this upstream's model does not {ticket.piece.work.operation}")
        if may_wait and pool.is_expected:
            return None
        return ticket.last_error or pool.no_replica_error()

    def _avoided(self, ticket: Ticket) -> Collection[Replica]:
        """Return the replicas that have failed a ticket, or do not offer its work."""
        failed_last = ticket.failed_last
        if self._pool.is_uniform and failed_last is None:
            return ticket.tried
        avoided = {*ticket.tried, *self._pool.lacking(ticket.piece.work)}
        if failed_last is not None and self._pool.usable({*avoided, failed_last}):
            avoided.add(failed_last)
        return avoided

    def _batch_from(
        self,
        first: Ticket,
        replica: Replica,
        scheduling_pass: SchedulingPass,
        now_s: float,
        bounds: Callable[[], Bounds],
    ) -> list[Ticket]:
        """Return the ticket and those behind it, in the queue's order, that may share its batch."""
        tickets = [first]
        totals, limits = BatchTotals().plus(first.piece), self._limits(first, bounds())
        # Waiting slices are spread over the free slots: one each if there are enough, several if not.
        free = sum(usable.free_slots(self._kind, first.piece.inputs) for usable in self._pool.usable())
        tickets_max = -(-(self._queue.size + 1) // max(1, free))
        passed = set(scheduling_pass.skipped_tenants)
        passed_max = len(passed) + LOOK_AHEAD
        while len(tickets) < tickets_max and len(passed) <= passed_max:
            entry = self._queue.peek(passed)
            if entry is None or entry.priority != first.entry.priority:
                break
            ticket = entry.item
            grown = totals.plus(ticket.piece)
            if ticket.is_done:
                self._queue.pop(entry)
            elif (
                self._may_share(first, ticket, replica, now_s)
                and grown.is_within(limits)
                and self._admits(replica, grown, ticket, now_s)
            ):
                self._queue.pop(entry)
                tickets.append(ticket)
                totals = grown
            else:
                passed.add(entry.tenant)
        return tickets

    def _limits(self, first: Ticket, bounds: Bounds) -> Bounds:
        """Return the bounds of a batch; an interactive one is also kept to a short duration."""
        if first.owner.priority != "interactive":
            return bounds
        tokens_max = max(self._sizer.tokens, first.piece.tokens)
        return msgspec.structs.replace(bounds, tokens=min(bounds.tokens, tokens_max))

    def _may_share(self, first: Ticket, other: Ticket, replica: Replica, now_s: float) -> bool:
        if other.half is not first.half or replica in other.tried or replica is other.failed_last:
            return False
        if lacks_permits(other.permit_refusals, other.piece.inputs):
            return False
        return first.piece.work.is_joinable(other.piece.work) and self._may_tenants_share(
            first, other, replica, now_s
        )

    def _may_tenants_share(self, first: Ticket, other: Ticket, replica: Replica, now_s: float) -> bool:
        """Return whether two tickets' tenants may share a batch.

        Only if the tokens of each are known, both tenants allow it, and neither has caused a batch to fail
        recently.
        """
        owner, other_owner = first.owner, other.owner
        if owner.tenant == other_owner.tenant:
            return True
        capabilities = replica.capabilities
        are_counted = (capabilities is not None and capabilities.reports_input_tokens) or (
            first.piece.exact and other.piece.exact
        )
        is_suspect = self._activity.is_suspect
        are_trusted = not (is_suspect(owner.tenant, now_s) or is_suspect(other_owner.tenant, now_s))
        return are_counted and owner.shares_batches and other_owner.shares_batches and are_trusted

    def _admits(self, replica: Replica, totals: BatchTotals, ticket: Ticket, now_s: float) -> bool:
        tenant = ticket.owner.tenant
        is_only_tenant = not self._activity.has_others(tenant, now_s)
        return replica.admits(totals.inputs, tenant, is_only_tenant=is_only_tenant, kind=self._kind)
