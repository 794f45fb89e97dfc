"""The queue in front of one upstream: the one owner of what waits for it, and of its attempts.

What arrives in one turn of the event loop is spread over the slots that are free, alone where there are
enough. When none is, slices wait in the tenant-fair queue, and when one is those at its head travel together
as one batch. While a second tenant is active, no tenant takes the last slot of a replica's window: whoever
comes next need not wait for a neighbour's batch.
Invariant: every ticket is resolved or left, whatever becomes of its attempts.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence

import msgspec

from backends.contract import Reply, Work
from backends.errors import (
    AttemptTimedOut,
    BackendError,
    ConnectionLost,
    ModelNotLoaded,
    ReplicaFailed,
    ReplicaUnavailable,
)
from backends.tracing import carrier
from gateway.batching.attempt_traces import begin_trace
from gateway.batching.batch_size import BatchSizer
from gateway.batching.drain_rate import DrainRate
from gateway.batching.fair_queue import Entry, FairQueue, Priority
from gateway.batching.joining import Load, alike, split_reply
from gateway.batching.slices import Bounds, Slice
from gateway.batching.ticket import GONE, Attempt, Owner, Ticket
from gateway.errors import (
    LOADING_RETRY_S,
    DeadlineExceeded,
    GatewayError,
    ModelLoading,
    NoReplica,
    Overloaded,
)
from gateway.events import AttemptFinished, LaneBacklog, Observe
from gateway.routing.latencies import Latencies
from gateway.routing.pool import Pool, explain_unavailable
from gateway.routing.replica import Replica
from gateway.routing.retry_budget import RetryBudget

# A slice that was being worked on at this many crashes may be their cause: it runs alone once more.
LOSSES_MAX = 2
# An attempt gets at least this, however little of the deadline is left.
ATTEMPT_MIN_S = 0.05
# A tenant counts as active for so long after its last call: one that calls, thinks and calls again too.
ACTIVE_S = 2.0
# Whose call spoilt a batch travels with nobody else's for so long: bad inputs cost the others once.
SUSPECT_S = 10.0
# How many that cannot go, or not in the same batch, are looked past for others that can.
LOOK_PAST = 8
# Replicas that are away are asked, and their names looked up, every so often at the latest.
AWAY_RETRY_S = 5
# A call that takes longer than this share of its like is tried elsewhere too.
HEDGE_QUANTILE = 0.95


class SliceReply(msgspec.Struct, frozen=True):
    """A slice's reply, and how long the slice waited for a replica."""

    reply: Reply
    queued_s: float


class Rules(msgspec.Struct, frozen=True):
    """What a lane goes by.

    holds: work waits while every replica is away, because it will be back. waits: and while a model is
    being loaded. retry_share, hedge_share: attempts that may be added to those that callers cause.
    """

    queue_tokens: int
    attempt_timeout_s: float
    holds: bool
    retry_share: float = 0.2
    hedge_share: float = 0.05
    waits: bool = True


class Lane:
    """Takes slices, gives replies; clock is the event loop's, in seconds.

    bounds: the most that one upstream request may hold, as the replicas tell it now.
    """

    def __init__(
        self,
        pool: Pool,
        rules: Rules,
        observe: Observe,
        clock: Callable[[], float],
        bounds: Callable[[], Bounds] = Bounds,
    ) -> None:
        self._pool = pool
        self._rules = rules
        self._observe = observe
        self._clock = clock
        self.bounds = bounds
        self._queue: FairQueue[Ticket] = FairQueue()
        # Who has called lately, the latest last; and whose inputs have spoilt a batch, until when.
        self._seen_s: OrderedDict[str, float] = OrderedDict()
        self._suspects: dict[str, float] = {}
        # Identical work of one tenant in flight, by what it is.
        self._shared: dict[tuple[str, Priority, Work], Ticket] = {}
        self._attempts: set[Attempt] = set()
        # Answers of joined batches on their way to who waits for them, by tenant.
        self._untold: OrderedDict[str, deque[tuple[Ticket, Reply]]] = OrderedDict()
        self._joining: list[asyncio.Future[None]] = []
        self._later: asyncio.TimerHandle | None = None
        self._soon = False
        self._drain = DrainRate(clock())
        self._retries = RetryBudget(rules.retry_share, clock())
        self._hedges = RetryBudget(rules.hedge_share, clock())
        self._singles = Latencies()
        self._portion = BatchSizer()
        pool.on_change = self.pump
        pool.on_stalled = self._give_up

    @property
    def queued_tokens(self) -> int:
        """Tokens that wait for a replica, as an upper bound.

        A call that waits for the very first replica counts as one: a scaler must see it to bring one.
        """
        return self._queue.tokens + len(self._joining)

    def waiting(self) -> LaneBacklog:
        """What is in the queue, for whoever watches; walks all of it."""
        inputs, since_s = len(self._joining), self._clock()
        now_s = since_s
        for ticket in self._queue.items():
            inputs += ticket.piece.inputs
            since_s = min(since_s, ticket.waiting_since_s)
        return LaneBacklog(self.queued_tokens, inputs, now_s - since_s)

    async def wait_joined(self, deadline_s: float) -> None:
        """Wait until some replica has told what it can do.

        Raises: ModelLoading, NoReplica.
        """
        if self._pool.capabilities() is not None:
            return
        told = asyncio.get_running_loop().create_future()
        self._joining.append(told)
        self.pump()
        try:
            async with asyncio.timeout_at(deadline_s):
                await told
        except TimeoutError as error:
            raise ModelLoading("the model is still loading", retry_after_s=LOADING_RETRY_S) from error
        finally:
            self._joining.remove(told)
        if self._pool.capabilities() is None:
            raise _nobody(self._pool)

    async def submit(
        self,
        piece: Slice,
        owner: Owner,
        deadline_s: float,
        unanswered: Callable[[Slice], None] = lambda _: None,
    ) -> SliceReply:
        """Have a slice done by some replica before the deadline, on the lane's clock.

        unanswered: told of a slice that a replica worked on, but whose reply nobody has taken.
        Raises: BackendError where the last replica tried refused or failed; NoReplica,
        DeadlineExceeded.
        """
        self._saw(owner.tenant)
        key = (owner.tenant, owner.priority, piece.work)
        ticket = self._shared.get(key)
        # One that is done has told its waiters, who have not left yet: nobody would tell another.
        if ticket is None or ticket.done:
            ticket = self._shared[key] = Ticket(piece, owner, deadline_s, self._clock())
            self._enqueue(ticket)
        if owner.trace is not None:
            ticket.traces.append(owner.trace)
        waiter = ticket.wait(deadline_s)
        self._pump_soon()
        # asyncio's own timeout costs several times as much, on every call.
        ends = asyncio.get_running_loop().call_at(deadline_s, _expire, waiter)
        taken = False
        try:
            reply = await waiter
            taken = True
            return SliceReply(reply, ticket.queued_s)
        except TimeoutError as error:
            raise self._late(ticket) from error
        finally:
            ends.cancel()
            if not taken and ticket.worked_on:
                unanswered(piece)
            if ticket.leave(waiter):
                self._forget(key, ticket)

    def check_room(self, tokens: int, owner: Owner) -> None:
        """Whether a whole call of so many tokens may join the queue: the lane's bound, and its tenant's.

        Raises: Overloaded.
        """
        # An empty queue takes any call, or one that is larger than the bound could never pass.
        if len(self._queue) and self._queue.tokens + tokens > self._rules.queue_tokens:
            raise self._overloaded("too much is waiting for this model", self._queue.tokens)
        own = self._queue.tokens_of(owner.tenant) if len(self._queue) else 0
        if owner.queue_tokens is not None and own and own + tokens > owner.queue_tokens:
            raise self._overloaded("too much of yours is waiting for this model", own)

    def _overloaded(self, message: str, waiting_tokens: int) -> Overloaded:
        wait_s = self._drain.retry_after_s(waiting_tokens, self._clock())
        return Overloaded(message, retry_after_s=wait_s)

    # Who goes next.

    def pump(self) -> None:
        """Send what can go, in order; called whenever something arrived, came back or changed."""
        self._wake_joining()
        barred: set[str] = set()
        aside: list[Entry[Ticket]] = []
        while (entry := self._queue.peek(barred)) is not None and self._goes(entry, barred, aside):
            pass
        for entry in reversed(aside):
            self._queue.push(entry, first=True)
        if barred and self._later is None:
            # The others may fall silent, and nothing else would come by to tell.
            self._later = asyncio.get_running_loop().call_later(ACTIVE_S, self._pump_later)

    def _pump_soon(self) -> None:
        """Once all that arrived in this turn of the event loop is there: it is looked at together."""
        if not self._soon:
            self._soon = True
            asyncio.get_running_loop().call_soon(self._pump_now)

    def _pump_now(self) -> None:
        self._soon = False
        self.pump()

    def _goes(self, entry: Entry[Ticket], barred: set[str], aside: list[Entry[Ticket]]) -> bool:
        """Send the next, or make way for others; False where no replica has room."""
        ticket = entry.item
        if ticket.done:
            self._queue.pop(entry)
        elif (verdict := self._hopeless(ticket)) is not None:
            self._queue.pop(entry)
            ticket.resolve(verdict)
        elif (replica := self._replica_for(ticket)) is not None:
            self._queue.pop(entry)
            self._send(self._filled(ticket, replica, barred), replica)
        elif self._pool.pick(ticket.piece.inputs, ()) is None:
            return False
        elif ticket.tried and len(aside) < LOOK_PAST:
            # There is a slot at a replica that this ticket has tried already: for its tenant's others.
            self._queue.remove(entry)
            aside.append(entry)
        else:
            # There is a slot, but the last one, for a tenant that has none yet.
            barred.add(entry.tenant)
        return True

    def _pump_later(self) -> None:
        self._later = None
        self.pump()

    def _replica_for(self, ticket: Ticket) -> Replica | None:
        tenant = ticket.owner.tenant
        alone = not self._others_active(tenant)
        return self._pool.pick(ticket.piece.inputs, ticket.tried, tenant, is_only_tenant=alone)

    def _filled(self, first: Ticket, replica: Replica, barred: set[str]) -> list[Ticket]:
        """The ticket, and those behind it in the queue's order that may share its batch."""
        tickets, load = [first], Load().plus(first.piece)
        if first.alone or not len(self._queue):
            return tickets
        bounds = self.bounds()
        # What waits is spread over the slots that are free: alone where there are enough, together where not.
        calls_most = -(-(len(self._queue) + 1) // max(1, _free_slots(self._pool)))
        if first.owner.priority == "interactive":
            most = max(self._portion.tokens, load.tokens)
            bounds = msgspec.structs.replace(bounds, tokens=min(bounds.tokens, most))
        passed = set(barred)
        most_passed = len(barred) + LOOK_PAST
        while len(tickets) < calls_most and len(passed) <= most_passed:
            entry = self._queue.peek(passed)
            if entry is None or entry.priority != first.entry.priority:
                break
            ticket = entry.item
            more = load.plus(ticket.piece)
            if ticket.done:
                self._queue.pop(entry)
            elif self._may_share(first, ticket, replica) and self._takes(replica, more, ticket, bounds):
                self._queue.pop(entry)
                tickets.append(ticket)
                load = more
            else:
                passed.add(entry.tenant)
        return tickets

    def _may_share(self, first: Ticket, other: Ticket, replica: Replica) -> bool:
        if other.alone or other.part is not first.part or replica in other.tried:
            return False
        return alike(first.piece, other.piece) and self._tenants_may_share(first, other, replica)

    def _tenants_may_share(self, first: Ticket, other: Ticket, replica: Replica) -> bool:
        """Only where each one's tokens are known, both allow it, and neither spoilt a batch lately."""
        one, two = first.owner, other.owner
        if one.tenant == two.tenant:
            return True
        told = replica.capabilities
        counted = (told is not None and told.reports_input_tokens) or (
            first.piece.exact and other.piece.exact
        )
        trusted = not (self._suspect(one.tenant) or self._suspect(two.tenant))
        return counted and one.join and two.join and trusted

    def _takes(self, replica: Replica, load: Load, ticket: Ticket, bounds: Bounds) -> bool:
        tenant = ticket.owner.tenant
        alone = not self._others_active(tenant)
        return load.within(bounds) and replica.admits(load.inputs, tenant, is_only_tenant=alone)

    def _saw(self, tenant: str) -> None:
        self._seen_s[tenant] = self._clock()
        self._seen_s.move_to_end(tenant)

    def _others_active(self, tenant: str) -> bool:
        """Whether somebody else waits, or has called within the last moments; forgets who has not."""
        since_s = self._clock() - ACTIVE_S
        while self._seen_s and next(iter(self._seen_s.values())) < since_s:
            self._seen_s.popitem(last=False)
        return len(self._seen_s) - (tenant in self._seen_s) > 0 or self._queue.others_than(tenant)

    def _suspect(self, tenant: str) -> bool:
        until_s = self._suspects.get(tenant)
        if until_s is not None and until_s < self._clock():
            del self._suspects[tenant]
            return False
        return until_s is not None

    def _wake_joining(self) -> None:
        if not self._joining:
            return
        if self._pool.capabilities() is not None or self._nobody_comes():
            for told in self._joining:
                if not told.done():
                    told.set_result(None)

    def _hopeless(self, ticket: Ticket) -> Exception | None:
        """Why waiting makes no sense for this ticket; None while it does."""
        if self._pool.usable(ticket.tried) or self._pool.is_joining():
            return None
        if ticket.tried and self._pool.usable():
            return ticket.last_error
        if self._nobody_comes():
            return ticket.last_error or _nobody(self._pool)
        return None

    def _nobody_comes(self) -> bool:
        """Whether no replica is about to come that calls could wait for; an engine that restarts is.

        Who is kept out because of its vectors is not.
        """
        return not self._pool.is_joining() and (not self._rules.holds or self._pool.has_rejected())

    # Attempts.

    def _send(self, tickets: Sequence[Ticket], replica: Replica, *, hedge: bool = False) -> None:
        now_s = self._clock()
        attempt = Attempt(tickets, replica, now_s, hedge=hedge)
        if not tickets[0].sent:
            self._retries.add_first_attempt(now_s)
            self._hedges.add_first_attempt(now_s)
        for ticket in tickets:
            ticket.sent = True
            ticket.running.add(attempt)
            if not hedge:
                ticket.queued_s += now_s - ticket.waiting_since_s
        if tickets[0].traces:
            begin_trace(attempt, self._pool.upstream)
        replica.add_batch(attempt.cargo, now_s)
        self._attempts.add(attempt)
        if not hedge:
            self._hedge_later(attempt)
        attempt.task = asyncio.create_task(self._try(attempt))
        # Not in the attempt's own `finally`: a task that is cancelled before its first step has none.
        attempt.task.add_done_callback(lambda task: self._came_back(attempt, task))

    async def _try(self, attempt: Attempt) -> None:
        if attempt.carrier is not None:
            carrier.set(attempt.carrier)
        try:
            reply = await attempt.replica.backend.run(attempt.piece.work, self._timeout_s(attempt))
            attempt.replica.check_width(attempt.piece.work, reply)
        except BackendError as error:
            attempt.ended(error.kind)
            self._failed(attempt, error)
        else:
            attempt.ended("ok")
            self._succeeded(attempt, reply)

    def _came_back(self, attempt: Attempt, task: asyncio.Task[None]) -> None:
        self._attempts.discard(attempt)
        for ticket in attempt.tickets:
            ticket.running.discard(attempt)
        attempt.replica.remove_batch(attempt.cargo)
        if attempt.hedging is not None:
            attempt.hedging.cancel()
        attempt.ended(attempt.outcome)
        took_s = self._clock() - attempt.started_s
        self._observe(
            AttemptFinished(
                self._pool.upstream,
                attempt.replica.name,
                attempt.outcome,
                took_s,
                attempt.cargo.inputs,
                len(attempt.tickets),
                attempt.hedge,
            )
        )
        _answer_for_bug(attempt, task)
        self.pump()

    def _succeeded(self, attempt: Attempt, reply: Reply) -> None:
        now_s = self._clock()
        took_s = now_s - attempt.started_s
        self._drain.finished(attempt.cargo.tokens, now_s)
        self._portion.finished(attempt.cargo.tokens, took_s)
        if attempt.cargo.inputs == 1:
            self._singles.add(took_s)
        full = attempt.replica.is_full or bool(len(self._queue))
        self._pool.record_success(attempt.replica, attempt.cargo, took_s, now_s, was_full=full)
        pieces = [ticket.piece for ticket in attempt.tickets]
        told = zip(attempt.tickets, split_reply(pieces, reply), strict=True)
        if len(pieces) > 1 and self._others_active(attempt.tickets[0].owner.tenant):
            self._tell_one_by_one(told)
        else:
            for ticket, own in told:
                self._settle(ticket, own)

    def _tell_one_by_one(self, told: Iterable[tuple[Ticket, Reply]]) -> None:
        """A turn of the event loop each, tenant by tenant: all at once they would hold up everybody else."""
        if not self._untold:
            asyncio.get_running_loop().call_soon(self._tell_next)
        for ticket, reply in told:
            self._untold.setdefault(ticket.owner.tenant, deque()).append((ticket, reply))

    def _tell_next(self) -> None:
        tenant, waiting = self._untold.popitem(last=False)
        ticket, reply = waiting.popleft()
        if waiting:
            self._untold[tenant] = waiting
        if self._untold:
            asyncio.get_running_loop().call_soon(self._tell_next)
        self._settle(ticket, reply)

    def _timeout_s(self, attempt: Attempt) -> float:
        """At most half of what is left while another replica could still be tried.

        Otherwise no deadline limits it: whoever's has come leaves, and the last to leave ends the attempt.
        """
        if len(self._pool.usable(attempt.tickets[0].tried)) < 2:
            return self._rules.attempt_timeout_s
        left_s = max(ticket.deadline_s for ticket in attempt.tickets) - self._clock()
        return max(ATTEMPT_MIN_S, min(left_s / 2, self._rules.attempt_timeout_s))

    def _failed(self, attempt: Attempt, error: BackendError) -> None:
        """Decide what an attempt's failure means for the replica and for its tickets."""
        if error.retryable and not self._hurried(attempt, error):
            self._pool.record_failure(attempt.replica, error, self._clock(), attempt.started_s)
        retry = error.retryable and self._may_retry(attempt, error)
        if len(attempt.tickets) > 1 and (not error.retryable or (retry and isinstance(error, ReplicaFailed))):
            self._halve(attempt, error)
            return
        self._hand_back(attempt, error, retry=retry)

    def _hurried(self, attempt: Attempt, error: BackendError) -> bool:
        """Whether it had less time than such work may take: short deadlines are no replica's fault."""
        took_s = self._clock() - attempt.started_s
        patience_s = attempt.replica.patience_s(self._rules.attempt_timeout_s)
        return isinstance(error, AttemptTimedOut) and took_s < patience_s

    def _hand_back(self, attempt: Attempt, error: BackendError, *, retry: bool) -> None:
        """Try each ticket again, or tell it the error."""
        error = _own_error(attempt, error)
        # The last first, so that all keep their order at the queue's head.
        for ticket in reversed(attempt.tickets):
            if attempt not in ticket.running:
                # It was handed back already, when its replica was given up.
                continue
            ticket.running.discard(attempt)
            if ticket.done:
                continue
            if not error.retryable and ticket.part is not None:
                self._suspects[ticket.owner.tenant] = self._clock() + SUSPECT_S
            ticket.last_error = error
            ticket.losses += isinstance(error, ConnectionLost)
            deadly = ticket.losses >= LOSSES_MAX and len(attempt.tickets) == 1
            if not self._comes_back(error):
                ticket.tried.add(attempt.replica)
            if ticket.running:
                # Another attempt still carries it: a hedge, or what was hedged.
                continue
            if not retry or deadly:
                self._settle(ticket, error)
                continue
            ticket.alone = ticket.losses >= LOSSES_MAX
            self._enqueue(ticket, first=True)

    def _halve(self, attempt: Attempt, error: BackendError) -> None:
        """Somebody's input spoils the batch: find out whose, without telling anybody another's error."""
        middle = len(attempt.tickets) // 2
        # A half is another batch: whoever failed the whole need not fail it, but another goes first.
        tried = (
            {attempt.replica} if isinstance(error, ReplicaFailed) and len(self._pool.usable()) > 1 else set()
        )
        # Whose input was refused is not known yet: whoever never learns it must not hear that it was theirs.
        last = _own_error(attempt, error) if error.retryable else None
        for half in (attempt.tickets[:middle], attempt.tickets[middle:]):
            part = object()
            for ticket in reversed(half):
                if attempt in ticket.running:
                    ticket.running.discard(attempt)
                    ticket.part, ticket.last_error, ticket.tried = part, last, set(tried)
                    if not ticket.done:
                        self._enqueue(ticket, first=True)

    def _comes_back(self, error: BackendError) -> bool:
        """An engine that died comes back on the same socket, and loads: what it held waits for it."""
        awaited = (
            ConnectionLost | ReplicaUnavailable | ModelNotLoaded
            if self._rules.waits
            else ConnectionLost | ReplicaUnavailable
        )
        return self._rules.holds and isinstance(error, awaited)

    def _may_retry(self, attempt: Attempt, error: BackendError) -> bool:
        return self._comes_back(error) or (attempt.wanted() and self._retries.try_spend(self._clock()))

    def _give_up(self, replica: Replica) -> None:
        """Nothing will come back from a replica that has stalled: what it holds goes elsewhere."""
        error = AttemptTimedOut("the replica holds work and answers nothing")
        for attempt in [one for one in self._attempts if one.replica is replica]:
            attempt.outcome = error.kind
            self._hand_back(attempt, error, retry=self._may_retry(attempt, error))
            _cancel(attempt)

    # A second attempt beside the first.

    def _hedge_later(self, attempt: Attempt) -> None:
        if len(attempt.tickets) > 1 or attempt.cargo.inputs > 1 or len(self._pool.usable()) < 2:
            return
        late_s = self._singles.quantile(HEDGE_QUANTILE)
        if late_s is not None:
            loop = asyncio.get_running_loop()
            attempt.hedging = loop.call_later(late_s, self._hedge, attempt)

    def _hedge(self, attempt: Attempt) -> None:
        """Try elsewhere too, where that costs nobody anything: nothing waits, and a replica has room."""
        ticket = attempt.tickets[0]
        if ticket.done or not attempt.wanted() or len(self._queue):
            return
        avoid = {attempt.replica, *ticket.tried}
        replica = self._pool.pick(1, avoid, ticket.owner.tenant, is_only_tenant=False)
        if replica is not None and self._hedges.try_spend(self._clock()):
            self._send([ticket], replica, hedge=True)

    # Ends.

    def _enqueue(self, ticket: Ticket, *, first: bool = False) -> None:
        ticket.waiting_since_s = self._clock()
        self._queue.push(ticket.entry, first=first)

    def _settle(self, ticket: Ticket, result: Reply | Exception) -> None:
        ticket.resolve(result)
        self._call_off(ticket)

    def _forget(self, key: tuple[str, Priority, Work], ticket: Ticket) -> None:
        """Nobody waits for it any more: nothing of it stays behind."""
        if self._shared.get(key) is ticket:
            del self._shared[key]
        ticket.done = True
        self._call_off(ticket)
        was_waiting = self._queue.remove(ticket.entry)
        ticket.entry = GONE
        if was_waiting:
            self.pump()

    def _call_off(self, ticket: Ticket) -> None:
        """End the attempts that were for this ticket and are for nobody now."""
        for attempt in ticket.running:
            # One that is over tells its tickets just now, and to ask it for each of them would take a square.
            if not attempt.over and not attempt.wanted():
                _cancel(attempt)

    def _late(self, ticket: Ticket) -> GatewayError:
        if not ticket.running and not self._pool.usable():
            return _nobody(self._pool)
        if any(
            replica.residence is not None and replica.residence.state == "loading"
            for replica in self._pool.replicas
        ):
            return ModelLoading("the model is still loading", retry_after_s=LOADING_RETRY_S)
        return DeadlineExceeded("the call's time ran out")


def _expire(waiter: asyncio.Future[Reply]) -> None:
    if not waiter.done():
        waiter.set_exception(TimeoutError())


def _free_slots(pool: Pool) -> int:
    return sum(max(0, replica.slots - replica.batches) for replica in pool.usable())


def _nobody(pool: Pool) -> NoReplica:
    return NoReplica(explain_unavailable(pool), retry_after_s=AWAY_RETRY_S)


def _own_error(attempt: Attempt, error: BackendError) -> BackendError:
    """The error as each caller may hear it: what is said of a joined batch may tell of another's input."""
    if len(attempt.tickets) == 1:
        return error
    return type(error)("a replica did not do the batch that this call was part of")


def _cancel(attempt: Attempt) -> None:
    """Unless it is the one that is telling its result just now."""
    task = attempt.task
    if task is not None and not task.done() and task is not asyncio.current_task():
        task.cancel()


def _answer_for_bug(attempt: Attempt, task: asyncio.Task[None]) -> None:
    """An attempt that ended in anything but a reply or a BackendError must not leave a caller waiting."""
    if task.cancelled():
        # One that was called off has an outcome, or nobody who waits for it.
        broken = None if attempt.outcome != "cancelled" else "CancelledError"
    else:
        error = task.exception()
        broken = None if error is None else type(error).__name__
    if broken is None:
        return
    for ticket in attempt.tickets:
        if not ticket.running:
            ticket.resolve(RuntimeError(f"an attempt broke: {broken}"))
