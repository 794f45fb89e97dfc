"""The queue in front of one upstream: the one owner of what waits for it.

While a replica has room a slice goes at once, alone; when none has, slices wait in the tenant-fair queue.
While a second tenant is active, no tenant takes the last slot of a replica's window: whoever comes next need
not wait for a neighbour's batch. Joining of small calls belongs here.
Invariant: every ticket's future is resolved, whatever becomes of its attempts.
"""

import asyncio
from collections.abc import Callable

import msgspec

from backends.contract import Reply
from backends.errors import BackendError, Lost, Unavailable
from gateway.batching.drain import DrainRate
from gateway.batching.fair_queue import Entry, FairQueue, Priority
from gateway.batching.slices import Slice
from gateway.errors import DeadlineExceeded, GatewayError, ModelLoading, NoReplica, Overloaded
from gateway.events import AttemptFinished, Observe
from gateway.routing.health import lesson
from gateway.routing.pool import Pool, Replica

# A slice that was being worked on at this many crashes is likely their cause.
LOSSES_MAX = 2
# An attempt gets at least this, however little of the deadline is left.
ATTEMPT_MIN_S = 0.05
# A tenant counts as active for so long after its last call: one that calls, thinks and calls again too.
ACTIVE_S = 2.0


class Carried(msgspec.Struct, frozen=True):
    """A slice's reply, and how long the slice waited for a replica."""

    reply: Reply
    queued_s: float


class Rules(msgspec.Struct, frozen=True):
    """What a lane goes by. holds: work waits while every replica is away, because it will be back."""

    queue_tokens: int
    attempt_timeout_s: float
    holds: bool


class Passenger(msgspec.Struct, frozen=True):
    """Whose slice it is. flow: the call it is part of. queue_tokens: its tenant's own bound."""

    tenant: str
    flow: int = 0
    weight: int = 1
    priority: Priority = "interactive"
    queue_tokens: int | None = None


class Ticket:
    """A slice's place in the lane, from arrival to answer."""

    def __init__(self, piece: Slice, passenger: Passenger, deadline_s: float, now_s: float) -> None:
        self.piece = piece
        self.passenger = passenger
        self.entry: Entry[Ticket] = Entry(
            self, passenger.tenant, piece.tokens, passenger.flow, passenger.weight, passenger.priority
        )
        self.deadline_s = deadline_s
        self.waiting_since_s = now_s
        self.queued_s = 0.0
        self.future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self.attempt: asyncio.Task[None] | None = None
        self.tried: set[Replica] = set()
        self.losses = 0
        self.last_error: BackendError | None = None


class Lane:
    """Takes slices, gives replies; clock is the event loop's, in seconds."""

    def __init__(self, pool: Pool, rules: Rules, observe: Observe, clock: Callable[[], float]) -> None:
        self._pool = pool
        self._rules = rules
        self._observe = observe
        self._clock = clock
        self._queue: FairQueue[Ticket] = FairQueue()
        self._seen_s: dict[str, float] = {}
        self._joining: list[asyncio.Future[None]] = []
        self._later: asyncio.TimerHandle | None = None
        self._drain = DrainRate(clock())
        pool.changed = self.pump

    @property
    def queued_tokens(self) -> int:
        """Tokens that wait for a replica, as an upper bound."""
        return self._queue.tokens

    async def joined(self, deadline_s: float) -> None:
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
            raise ModelLoading("the model is still loading", retry_after_s=5) from error
        finally:
            self._joining.remove(told)
        if self._pool.capabilities() is None:
            raise NoReplica("no replica of this model can be reached")

    async def submit(self, piece: Slice, passenger: Passenger, deadline_s: float) -> Carried:
        """Have a slice done by some replica before the deadline, on the lane's clock.

        Raises: BackendError where the last replica tried refused or failed; NoReplica,
        DeadlineExceeded.
        """
        ticket = Ticket(piece, passenger, deadline_s, self._clock())
        self._seen_s[passenger.tenant] = self._clock()
        self._enqueue(ticket)
        self.pump()
        try:
            async with asyncio.timeout_at(deadline_s):
                reply = await ticket.future
            return Carried(reply, ticket.queued_s)
        except TimeoutError as error:
            raise self._late(ticket) from error
        finally:
            self._leave(ticket)

    def pump(self) -> None:
        """Send what can go, in order; called whenever something arrived, came back or changed."""
        self._wake_joining()
        barred: set[str] = set()
        while (entry := self._queue.peek(barred)) is not None:
            ticket = entry.item
            if ticket.future.done():
                # Its caller has gone and not yet said so: an attempt would be for nobody.
                self._queue.pop(barred)
            elif (verdict := self._hopeless(ticket)) is not None:
                self._queue.pop(barred)
                _resolve(ticket, verdict)
            elif (replica := self._replica_for(ticket)) is not None:
                self._queue.pop(barred)
                self._send(ticket, replica)
            elif ticket.tried or self._pool.pick(ticket.piece.inputs, ticket.tried) is not None:
                # There is a slot, but the last one, for a tenant that has none yet; or one at a replica
                # that this ticket has tried already.
                barred.add(entry.tenant)
            else:
                return
        if barred and self._later is None:
            # The others may fall silent, and nothing else would come by to tell.
            self._later = asyncio.get_running_loop().call_later(ACTIVE_S, self._pump_later)

    def _pump_later(self) -> None:
        self._later = None
        self.pump()

    def _replica_for(self, ticket: Ticket) -> Replica | None:
        alone = not self._others_active(ticket.passenger.tenant)
        return self._pool.pick(ticket.piece.inputs, ticket.tried, ticket.passenger.tenant, alone=alone)

    def _others_active(self, tenant: str) -> bool:
        """Whether somebody else has called within the last moments; forgets who has not."""
        since_s = self._clock() - ACTIVE_S
        self._seen_s = {name: seen_s for name, seen_s in self._seen_s.items() if seen_s >= since_s}
        return any(name != tenant for name in self._seen_s.keys() | self._queue.tenants())

    def _wake_joining(self) -> None:
        unreachable = not self._pool.joining() and not self._rules.holds
        if self._pool.capabilities() is not None or unreachable:
            for told in self._joining:
                if not told.done():
                    told.set_result(None)

    def check_room(self, tokens: int, passenger: Passenger) -> None:
        """Whether a whole call of so many tokens may join the queue: the lane's bound, and its tenant's.

        Raises: Overloaded.
        """
        # An empty queue takes any call, or one that is larger than the bound could never pass.
        if len(self._queue) and self._queue.tokens + tokens > self._rules.queue_tokens:
            raise self._overloaded("too much is waiting for this model", self._queue.tokens)
        own = self._queue.tokens_of(passenger.tenant)
        if passenger.queue_tokens is not None and own and own + tokens > passenger.queue_tokens:
            raise self._overloaded("too much of yours is waiting for this model", own)

    def _overloaded(self, message: str, waiting_tokens: int) -> Overloaded:
        wait_s = self._drain.retry_after_s(waiting_tokens, self._clock())
        return Overloaded(message, retry_after_s=wait_s)

    def _hopeless(self, ticket: Ticket) -> Exception | None:
        """Why waiting makes no sense for this ticket; None while it does."""
        if self._pool.usable(ticket.tried) or self._pool.joining():
            return None
        if ticket.tried and self._pool.usable():
            return ticket.last_error
        if not self._rules.holds:
            return ticket.last_error or NoReplica("no replica of this model can be reached")
        return None

    def _send(self, ticket: Ticket, replica: Replica) -> None:
        ticket.queued_s += self._clock() - ticket.waiting_since_s
        replica.started(ticket.piece.inputs, ticket.piece.tokens, ticket.passenger.tenant)
        ticket.attempt = asyncio.create_task(self._attempt(ticket, replica))
        # Not in the attempt's own `finally`: a task that is cancelled before its first step has none.
        ticket.attempt.add_done_callback(lambda task: self._came_back(ticket, replica, task))

    def _came_back(self, ticket: Ticket, replica: Replica, task: asyncio.Task[None]) -> None:
        replica.finished(ticket.piece.inputs, ticket.piece.tokens, ticket.passenger.tenant)
        _answer_for_bug(ticket, task)
        self.pump()

    async def _attempt(self, ticket: Ticket, replica: Replica) -> None:
        started_s = self._clock()
        outcome = "cancelled"
        try:
            reply = await replica.backend.run(ticket.piece.work, self._timeout_s(ticket))
            outcome = "ok"
            self._drain.finished(ticket.piece.tokens, self._clock())
            _resolve(ticket, reply)
        except BackendError as error:
            outcome = error.kind
            self._failed(ticket, replica, error)
        finally:
            took_s = self._clock() - started_s
            self._observe(AttemptFinished(self._pool.upstream, replica.name, outcome, took_s))

    def _timeout_s(self, ticket: Ticket) -> float:
        """At most half of what is left while another replica could still be tried."""
        left_s = ticket.deadline_s - self._clock()
        if len(self._pool.usable(ticket.tried)) > 1:
            left_s /= 2
        return max(ATTEMPT_MIN_S, min(left_s, self._rules.attempt_timeout_s))

    def _failed(self, ticket: Ticket, replica: Replica, error: BackendError) -> None:
        """Decide what an attempt's failure means for the replica and for the slice."""
        ticket.last_error = error
        ticket.losses += isinstance(error, Lost)
        final = not error.retryable or ticket.losses >= LOSSES_MAX
        if final:
            _resolve(ticket, error)
        else:
            self._retry(ticket, replica, error)
        if (happened := lesson(error)) is not None:
            self._pool.learn(replica, happened, error.message)

    def _retry(self, ticket: Ticket, replica: Replica, error: BackendError) -> None:
        # An engine that died comes back on the same socket: it may be tried again, others may not.
        comes_back = self._rules.holds and isinstance(error, Lost | Unavailable)
        if not comes_back:
            ticket.tried.add(replica)
        if not ticket.future.done():
            self._enqueue(ticket, first=True)

    def _enqueue(self, ticket: Ticket, *, first: bool = False) -> None:
        ticket.waiting_since_s = self._clock()
        self._queue.push(ticket.entry, first=first)

    def _leave(self, ticket: Ticket) -> None:
        """The caller has its answer or has gone: nothing of it stays behind."""
        self._queue.remove(ticket.entry)
        if ticket.attempt is not None and not ticket.attempt.done():
            ticket.attempt.cancel()
        self.pump()

    def _late(self, ticket: Ticket) -> GatewayError:
        waiting = ticket.attempt is None or ticket.attempt.done()
        if waiting and not self._pool.usable():
            return NoReplica("no replica of this model can be reached")
        return DeadlineExceeded("the call's time ran out")


def _resolve(ticket: Ticket, result: Reply | Exception) -> None:
    if ticket.future.done():
        return
    if isinstance(result, Exception):
        ticket.future.set_exception(result)
    else:
        ticket.future.set_result(result)


def _answer_for_bug(ticket: Ticket, task: asyncio.Task[None]) -> None:
    """An attempt that ended in anything but a reply or a BackendError must not leave a caller waiting."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _resolve(ticket, RuntimeError(f"an attempt broke: {type(error).__name__}"))
