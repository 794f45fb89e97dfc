"""The replicas of one upstream: the one owner of their health and of what is in flight at each."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from random import Random

import msgspec

from backends.contract import Backend, Capabilities, Embed, EmbedReply, Reply, Residence, Work
from backends.errors import BackendError, ReplicaFailed, ReplicaOverloaded
from gateway.config.schema import Policy
from gateway.events import Observe, ReplicaChanged
from gateway.routing.health import PROVEN_BY, USABLE, ReplicaEvent, State, after, event_of
from gateway.routing.policies import ranked
from gateway.routing.window import Window

# A replica with work in flight that nothing came back from for so long, and for three times as long as
# that much work took of late, is asked whether it is still there.
STALL_S = 3.0
STALL_TIMES = 3
# The slowest and the largest batch of late are forgotten by this much with each batch.
EXTREMES_KEPT = 0.98


class BatchLoad(msgspec.Struct, frozen=True):
    """What a batch puts on a replica, and whose it is."""

    inputs: int
    tokens: int
    tenants: Sequence[str]


class Replica:
    """One server or engine of an upstream. name: what logs and metrics call it."""

    def __init__(self, name: str, backend: Backend, window: Window | None = None) -> None:
        self.name = name
        self.backend = backend
        self.window = window or Window()
        self.state = State.JOINING
        self.capabilities: Capabilities | None = None
        # Whether it gives vectors of another space than its upstream's.
        self.is_foreign = False
        # Of the vectors that it gave when its space was looked at; None where it was not.
        self.width: int | None = None
        # Whether its model is in memory, as it said last; None where that is no question.
        self.residence: Residence | None = None
        # What waits inside it, as it tells itself; others than this gateway may send to it.
        self.waiting_inputs = 0
        self.batches = 0
        self.batches_of: Counter[str] = Counter()
        self.inputs = 0
        self.tokens = 0
        self._failures = 0
        self._successes = 0
        self._progress_s = 0.0
        self._slowest_s = 0.0
        self._largest_tokens = 0.0

    @property
    def slots(self) -> int:
        """How many batches may be in flight to it now."""
        return 1 if self.state is State.PROBATION else self.window.size

    @property
    def full(self) -> bool:
        """Whether no more batches may be in flight."""
        return self.batches >= self.slots

    def has_room(self, inputs: int, slots: int) -> bool:
        """Whether one more batch of so many inputs may go: its slots, and the replica's own permits."""
        permits = self.capabilities.concurrent_inputs if self.capabilities else None
        # A batch larger than all permits could never go; alone it may try.
        free = permits is None or self.inputs == 0 or self.inputs + inputs <= permits
        return self.batches < slots and free

    def check(self, work: Work, reply: Reply) -> None:
        """Whether vectors are as wide as its canaries were, or as was asked.

        Raises: ReplicaFailed.
        """
        if self.width is None or not isinstance(work, Embed) or not isinstance(reply, EmbedReply):
            return
        width, expected = reply.vectors.shape[1], work.dimensions or self.width
        if width != expected:
            raise ReplicaFailed(f"its vectors have {width} dimensions, and had {self.width} when it joined")

    def started(self, cargo: BatchLoad, now_s: float) -> None:
        """A batch is on its way."""
        if not self.batches:
            self._progress_s = now_s
        self.batches += 1
        self.batches_of.update(cargo.tenants)
        self.inputs += cargo.inputs
        self.tokens += cargo.tokens

    def ended(self, cargo: BatchLoad) -> None:
        """A batch is no longer in flight, whatever became of it."""
        self.batches -= 1
        self.batches_of.subtract(cargo.tenants)
        for tenant in cargo.tenants:
            if not self.batches_of[tenant]:
                del self.batches_of[tenant]
        self.inputs -= cargo.inputs
        self.tokens -= cargo.tokens

    def succeeded(self, cargo: BatchLoad, took_s: float, now_s: float, *, full: bool) -> None:
        """It answered a batch; called before `ended`. full: no more could have been in flight."""
        self.window.finished(cargo.tokens, now_s, self.batches, full=full)
        self._progress_s = now_s
        self._failures = 0
        self._successes += 1
        self._slowest_s = max(took_s, self._slowest_s * EXTREMES_KEPT)
        self._largest_tokens = max(1.0, cargo.tokens, self._largest_tokens * EXTREMES_KEPT)

    def refused(self, now_s: float, sent_s: float) -> None:
        """It said that it is full, to a batch sent at that time."""
        self._progress_s = now_s
        self.window.refused(now_s, sent_s)

    def failed(self) -> int:
        """It failed a batch; how many in a row that makes."""
        self._failures += 1
        return self._failures

    @property
    def proven(self) -> bool:
        """Whether it has done well since it came back."""
        return self._successes >= PROVEN_BY

    def came_back(self) -> None:
        """Nothing of its past counts any more."""
        self._failures = self._successes = 0
        self._slowest_s = self._largest_tokens = 0.0
        self.window.restart()

    def silent(self, now_s: float, longest_s: float) -> bool:
        """Whether work is in flight and nothing has come back for suspiciously long."""
        return self.batches > 0 and now_s - self._progress_s > self.patience_s(longest_s)

    def patience_s(self, longest_s: float) -> float:
        """How long nothing need come back of what is in flight: several times the slowest batch of late.

        More in flight than was in the largest batch may take that much longer. longest_s: an attempt's
        timeout, for a replica of which nothing is known yet.
        """
        if not self._largest_tokens:
            return longest_s
        expected_s = STALL_TIMES * self._slowest_s * max(1.0, self.tokens / self._largest_tokens)
        return min(longest_s, max(STALL_S, expected_s))


class Pool:
    """Equal replicas behind one lane.

    changed: called after any change of a replica's state. given_up: called for a replica whose work in
    flight nothing will become of.
    """

    def __init__(
        self,
        upstream: str,
        replicas: list[Replica],
        policy: Policy,
        observe: Observe,
        seed: int | None = None,
    ) -> None:
        self.upstream = upstream
        self.replicas = replicas
        self.changed: Callable[[], None] = lambda: None
        self.given_up: Callable[[Replica], None] = lambda _: None
        self._policy = policy
        self._observe = observe
        self._told: Capabilities | None = None
        self._awaited: set[str] = set()
        self._turn = 0
        self._random = Random(seed)  # noqa: S311 - it spreads load, it keeps no secret

    def usable(self, avoid: Collection[Replica] = ()) -> list[Replica]:
        """Replicas that are given work, without those to avoid."""
        return [one for one in self.replicas if one.state in USABLE and one not in avoid]

    def only_usable(self, replica: Replica) -> bool:
        """Whether no other replica that gives this upstream's vectors is given work."""
        return not any(not one.is_foreign for one in self.usable([replica]))

    def mixed(self) -> bool:
        """Whether a replica that is given work gives vectors of another space."""
        return any(one.is_foreign and one.state in USABLE for one in self.replicas)

    def refused(self) -> bool:
        """Whether one is kept out because of its vectors."""
        return any(one.is_foreign and one.state is State.DOWN for one in self.replicas)

    def loading(self) -> bool:
        """Whether a model of this upstream is on its way into memory."""
        told = [one.residence for one in self.replicas]
        return any(one is not None and one.state == "loading" for one in told)

    def pick(
        self, inputs: int, avoid: Collection[Replica], tenant: str = "", *, alone: bool = True
    ) -> Replica | None:
        """The best replica with room for so many inputs, or None."""
        usable = self.usable(avoid)
        if len(usable) == 1:
            return usable[0] if self.admits(usable[0], inputs, tenant, alone=alone) else None
        loads = [one.tokens + _waiting_tokens(one) for one in usable]
        for index in ranked(self._policy, loads, self._turn, self._random):
            if self.admits(usable[index], inputs, tenant, alone=alone):
                self._turn += 1
                return usable[index]
        return None

    def admits(self, replica: Replica, inputs: int, tenant: str, *, alone: bool) -> bool:
        """Whether a tenant may have one more batch of so many inputs at a replica.

        Not alone, a tenant that has a batch there leaves the last slot to the others.
        """
        slots = replica.slots
        spare = 0 if alone or slots == 1 or not replica.batches_of[tenant] else 1
        return replica.has_room(inputs, slots - spare)

    def free_slots(self) -> int:
        """How many more batches could be in flight now, by the windows alone."""
        return sum(max(0, one.slots - one.batches) for one in self.replicas if one.state in USABLE)

    def joining(self) -> bool:
        """Whether a replica has not yet had its first attempt to join, or is still being looked for."""
        return bool(self._awaited) or any(one.state is State.JOINING for one in self.replicas)

    def awaits(self, url: str) -> None:
        """Replicas behind this URL are yet to be discovered."""
        self._awaited.add(url)

    def discovered(self, url: str) -> None:
        """It has been looked for once, whatever was found."""
        if url in self._awaited:
            self._awaited.discard(url)
            self.changed()

    def add(self, replica: Replica) -> None:
        """One more replica, which has yet to join."""
        self.replicas.append(replica)

    def remove(self, replica: Replica) -> None:
        """A replica that has gone, and has nothing in flight any more."""
        self.replicas.remove(replica)
        self._told = None

    def capabilities(self) -> Capabilities | None:
        """What the upstream can do, as the replica that joined first tells it."""
        if self._told is None:
            self._told = next((one.capabilities for one in self.replicas if one.capabilities), None)
        return self._told

    def succeeded(
        self, replica: Replica, cargo: BatchLoad, took_s: float, now_s: float, *, full: bool
    ) -> None:
        """A replica answered a batch."""
        replica.succeeded(cargo, took_s, now_s, full=full)
        if replica.state is State.PROBATION and replica.proven:
            self.transition(replica, ReplicaEvent.PROVEN, "it does its work")

    def failed(self, replica: Replica, error: BackendError, now_s: float, sent_s: float) -> None:
        """A replica failed a batch, sent at that time, by no fault of the caller's."""
        if isinstance(error, ReplicaOverloaded):
            replica.refused(now_s, sent_s)
            return
        last = not self.usable([replica])
        if (happened := event_of(error, replica.failed(), last=last)) is not None:
            self.transition(replica, happened, error.message)

    def describe_anew(self, replica: Replica, told: Capabilities) -> None:
        """A replica was started again with something else, and nobody noticed that it was away."""
        replica.capabilities = told
        self._told = None

    def transition(
        self, replica: Replica, happened: ReplicaEvent, reason: str, told: Capabilities | None = None
    ) -> None:
        """Move a replica along the table, and tell those who wait for one."""
        replica.capabilities = told or replica.capabilities
        self._told = None
        state = after(replica.state, happened)
        if state is replica.state:
            return
        if state is State.PROBATION:
            replica.came_back()
        replica.state = state
        self._observe(ReplicaChanged(self.upstream, replica.name, state.value, reason))
        if happened is ReplicaEvent.STALLED:
            self.given_up(replica)
        self.changed()


def why_none(pool: Pool) -> str:
    """Why no replica does a call's work, for its caller."""
    if pool.refused():
        return "the replicas of this model that answer give vectors of another space, and are not used"
    return "no replica of this model can be reached"


def _waiting_tokens(replica: Replica) -> int:
    """What waits inside a replica by its own account, in tokens of our average input."""
    return replica.waiting_inputs * (replica.tokens // replica.inputs if replica.inputs else 1)
