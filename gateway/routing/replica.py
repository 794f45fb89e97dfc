"""One replica of an upstream: its state, the batches in flight to it, and its measurements."""

from collections import Counter, deque
from typing import Literal, TypeAlias

import msgspec

from backends.contract import (
    Backend,
    Capabilities,
    Embed,
    EmbedReply,
    Operation,
    Reply,
    Residence,
    Work,
)
from backends.contract.errors import ReplicaFailed
from gateway.events import ReplicaState
from gateway.routing.health import PROBATION_BATCHES, USABLE, State
from gateway.routing.load import LOAD_KINDS, BatchLoad, LoadKind, slots_of
from gateway.routing.pace import Pace
from gateway.routing.refusals import Refusals
from gateway.routing.window import Window
from gateway.vector_spaces.zero_vectors import gives_zeros

# model: it serves another model than its upstream. key: it refuses the gateway's key. output: it does not
# compute as it should.
KeptOut: TypeAlias = Literal["model", "key", "output"]
# A replica that has work and has returned nothing for this long, and for this many times the recent duration
# of that much work, is probed.
STALL_MIN_S = 3.0
STALL_FACTOR = 3
# The least time for work that was part of a batch that timed out.
BRIEF_MIN_S = 1.0
# Tokens of the plain text of a check, at least.
PLAIN_TOKENS = 10
# The records of the slowest and the largest recent batch decay by this factor with each batch.
EXTREMES_DECAY = 0.98
# Connections that break within this time break together.
TOGETHER_S = 0.2
LOSSES_KEPT = 64


class JoinedModel(msgspec.Struct, frozen=True):
    """Model that a replica joined with. scores: of a reranker, as `read_scores` returns them."""

    capabilities: Capabilities
    scores: tuple[float, ...] | None = None


class Replica:
    """One server or engine of an upstream. name: the label in logs and metrics.

    The window holds for each kind of batch by itself: texts do not wait until pictures are computed.
    small_batch_slots: slots of the window that a batch of fewer than `load.SMALL_INPUTS` takes.
    kept_out: why it responds and is not used, except for its vectors; None if it is used or does not respond.
    joined: the model that it last joined with. gives_zeros: its model gives zeros for a text without a known
    word; None if that is not known. held_until_s: when it may get work again after it asked for a pause.
    plain_s: the time that it took for its last check with a plain text.
    """

    # Batches that went to others since its last one.
    passed_over = 0
    is_held = False
    held_until_s = 0.0
    kept_out: KeptOut | None = None
    joined: JoinedModel | None = None
    gives_zeros: bool | None = None
    plain_s: float | None = None

    def __init__(
        self, name: str, backend: Backend, window: Window | None = None, small_batch_slots: int = 1
    ) -> None:
        self.name = name
        self.backend = backend
        self.window = window or Window()
        self._small_batch_slots = small_batch_slots
        self.state = State.JOINING
        # True while an operator keeps work away from it; probes continue.
        self.is_drained = False
        self.capabilities: Capabilities | None = None
        # True after it refused work that its capabilities seem to allow, until it has described itself again.
        self.is_doubted = False
        # Why its last description was not accepted; None after one that was.
        self.rejection: str | None = None
        # True while its engine cannot use the files of its model, which no restart of the engine mends.
        self.is_unloadable = False
        # True if its vectors belong to a different space than its upstream's.
        self.is_foreign = False
        # Dimensions of the vectors from its last space check; None if it was not checked.
        self.width: int | None = None
        # Its last report of whether the model is in memory; None if the model always is.
        self.residence: Residence | None = None
        # Its own report of its queue, which other clients may fill as well.
        self.waiting_inputs = 0
        self.refusals = Refusals()
        # By operation: whether it counts tokens as the gateway does. Examined where counts differ.
        self.counts_alike: dict[Operation, bool] = {}
        self.count_warned = False
        self.batches = 0
        self.slots_by_kind: Counter[LoadKind] = Counter()
        self.batches_by_tenant: Counter[tuple[LoadKind, str]] = Counter()
        self.inputs = 0
        self.tokens = 0
        self.paces: dict[LoadKind, Pace] = {kind: Pace() for kind in LOAD_KINDS}
        self._failures = 0
        self._successes = 0
        self._progress_s = 0.0
        self._slowest_s = 0.0
        self._largest_tokens = 0.0
        # Moment of its last complete answer; None before the first.
        self.answered_s: float | None = None
        # When attempts began whose connections broke, and when these broke.
        self._losses: deque[tuple[float, float]] = deque(maxlen=LOSSES_KEPT)

    @property
    def slots(self) -> int:
        """Number of slots that the batches of each kind may take now."""
        return 1 if self.state is State.PROBATION else self.window.size

    def free_slots(self, kind: LoadKind, inputs: int) -> int:
        """Return how many more batches of a kind and of this size the window allows."""
        return max(0, -((self.slots_by_kind[kind] - self.slots) // slots_of(inputs, self._small_batch_slots)))

    @property
    def is_proven(self) -> bool:
        """True once it has completed enough batches since it rejoined."""
        return self._successes >= PROBATION_BATCHES

    def admits(self, inputs: int, tenant: str, *, is_only_tenant: bool, kind: LoadKind = "texts") -> bool:
        """Return whether a tenant may have one more batch of this size in flight here.

        While other tenants are active, a tenant that has a batch here leaves the last slot to them. One
        without a batch of pictures or sound here need not wait for those of another, which take seconds and
        may have been sent while the window was larger: its first goes if fewer tenants than slots have one.
        """
        slots = self.slots
        own = self.batches_by_tenant[kind, tenant]
        if kind == "media" and not is_only_tenant and not own and self._tenants_of(kind) < slots:
            return self.has_room(inputs, self.slots_by_kind[kind] + 1, kind)
        has_last = not is_only_tenant and slots > 1 and own
        reserved = slots_of(inputs, self._small_batch_slots) if has_last else 0
        return self.has_room(inputs, slots - reserved, kind)

    def _tenants_of(self, kind: LoadKind) -> int:
        """Return the number of tenants with batches of a kind here."""
        return sum(1 for (own, _), batches in self.batches_by_tenant.items() if own == kind and batches > 0)

    def admits_extra(self, inputs: int, kind: LoadKind = "texts") -> bool:
        """Return whether one more batch may be in flight that takes no slot of the window."""
        if self.state is State.PROBATION and self.batches:
            return False
        return self.has_room(inputs, self.slots_by_kind[kind] + 1, kind)

    def has_room(self, inputs: int, slots: int, kind: LoadKind = "texts") -> bool:
        """Return whether the slots and the replica's own permits allow one more batch of this size."""
        permits = self.capabilities.concurrent_inputs if self.capabilities else None
        # A batch larger than all permits was cut for other replicas. It may try alone, and is then cut again.
        free = permits is None or self.inputs == 0 or self.inputs + inputs <= permits
        return self.slots_by_kind[kind] < slots and free and not self.is_waiting

    @property
    def is_waiting(self) -> bool:
        """True if it gets no work for a while, because it had no permits or asked for a pause."""
        return self.refusals.is_paused or self.is_held

    def hold(self, until_s: float) -> bool:
        """Give it no work until a moment; return False if it has none until a later one already."""
        if until_s <= self.held_until_s:
            return False
        self.is_held, self.held_until_s = True, until_s
        return True

    def release(self, now_s: float) -> None:
        """Let it have work again, if its pause is over."""
        self.is_held = now_s < self.held_until_s

    def check_width(self, work: Work, reply: Reply) -> None:
        """Check that vectors are as wide as its canaries were, or as the work requested.

        Raises: ReplicaFailed.
        """
        if self.width is None or not isinstance(work, Embed) or not isinstance(reply, EmbedReply):
            return
        width, expected = reply.vectors.shape[1], work.dimensions or self.width
        if width != expected:
            raise ReplicaFailed(f"its vectors have {width} dimensions, and had {self.width} when it joined")

    async def accept_zeros(self, row: int) -> None:
        """Check that its model is static, because it gave a vector of zeros; a probe shows it once.

        row: index of the input. Raises: ReplicaFailed.
        """
        if self.gives_zeros is None:
            self.gives_zeros = await gives_zeros(self.backend)
        if not self.gives_zeros:
            raise ReplicaFailed("the upstream gave a vector of zeros", input_index=row)

    def add_batch(self, load: BatchLoad, now_s: float) -> None:
        """Count a batch that is being sent."""
        if not self.batches:
            self._progress_s = now_s
        self.batches += 1
        if not load.is_extra:
            self.slots_by_kind[load.kind] += slots_of(load.inputs, self._small_batch_slots)
        self.batches_by_tenant.update((load.kind, tenant) for tenant in load.tenants)
        self.inputs += load.inputs
        self.tokens += load.tokens

    def remove_batch(self, load: BatchLoad) -> None:
        """Stop counting a batch, whatever its outcome."""
        self.batches -= 1
        if not load.is_extra:
            self.slots_by_kind[load.kind] -= slots_of(load.inputs, self._small_batch_slots)
        for tenant in load.tenants:
            self.batches_by_tenant[load.kind, tenant] -= 1
            if not self.batches_by_tenant[load.kind, tenant]:
                del self.batches_by_tenant[load.kind, tenant]
        self.inputs -= load.inputs
        self.tokens -= load.tokens

    def record_success(self, load: BatchLoad, took_s: float, now_s: float, *, was_full: bool) -> None:
        """Learn from a completed batch; called before `remove_batch`.

        was_full: no more batches could have been in flight.
        """
        self.window.recover(now_s)
        if slots_of(load.inputs, self._small_batch_slots) == 1 and not load.is_extra:
            self.window.record_batch(load.tokens, now_s, self.batches, was_full=was_full)
        if self.refusals.pauses:
            self.refusals.end_pauses()
        self.record_answer(now_s)
        self._failures = 0
        self._successes += 1
        self._slowest_s = max(took_s, self._slowest_s * EXTREMES_DECAY)
        self._largest_tokens = max(1.0, load.tokens, self._largest_tokens * EXTREMES_DECAY)

    def record_answer(self, now_s: float) -> None:
        """Record that it has completed work, of callers or of a check."""
        self._progress_s = self.answered_s = now_s

    def record_loss(self, started_s: float, lost_s: float) -> None:
        """Record that the connection of an attempt broke."""
        self._losses.append((started_s, lost_s))

    def lost_several(self, started_s: float, lost_s: float) -> bool:
        """Return whether other connections broke together with that of an attempt, as when a server dies."""
        together = [
            other_s
            for began_s, other_s in self._losses
            if abs(other_s - lost_s) <= TOGETHER_S and began_s <= lost_s and other_s >= started_s
        ]
        return len(together) > 1

    def record_refusal(self, now_s: float, sent_s: float) -> None:
        """Shrink the window: the replica answered a batch, sent at `sent_s`, that it is full."""
        self._progress_s = now_s
        self.window.record_refusal(now_s, sent_s)

    def record_failure(self) -> int:
        """Count a failed batch and return the number of failures in a row."""
        self._failures += 1
        return self._failures

    def reset_history(self) -> None:
        """Forget everything that was learned before the replica rejoined."""
        self._failures = self._successes = 0
        self._slowest_s = self._largest_tokens = 0.0
        self.plain_s = None
        self.paces = {kind: Pace() for kind in LOAD_KINDS}
        self.passed_over = 0
        self.refusals = Refusals()
        self.counts_alike = {}
        self.gives_zeros = None
        self.window.restart()

    def is_silent(self, now_s: float, timeout_s: float) -> bool:
        """Return whether work is in flight and nothing has come back for longer than `patience_s`."""
        return self.batches > 0 and now_s - self._progress_s > self.patience_s(timeout_s)

    def patience_s(self, timeout_s: float) -> float:
        """Return how long the work in flight may take: several times the slowest recent batch.

        More tokens in flight than in the largest recent batch may take that much longer. timeout_s: an
        attempt's timeout, which is the upper bound, and the result for a replica without any record.
        """
        if not self._largest_tokens:
            return timeout_s
        expected_s = self._expected_s(self._slowest_s, self._largest_tokens)
        return min(timeout_s, max(STALL_MIN_S, expected_s))

    def brief_s(self, timeout_s: float) -> float:
        """Return how long the work in flight takes at most if no input of it hangs, by its recent times.

        timeout_s: as of `patience_s`. Before it has completed a batch, the time of a check counts.
        """
        if self._largest_tokens:
            expected_s = self._expected_s(self._slowest_s, self._largest_tokens)
        elif self.plain_s is not None:
            expected_s = self._expected_s(self.plain_s, PLAIN_TOKENS)
        else:
            return timeout_s
        return min(timeout_s, max(BRIEF_MIN_S, expected_s))

    def _expected_s(self, took_s: float, tokens: float) -> float:
        """Return several times what the work in flight takes. took_s: the time for so many tokens."""
        return STALL_FACTOR * took_s * max(1.0, self.tokens / tokens)


def gets_work(replica: Replica) -> bool:
    """Return whether a replica is given work."""
    return replica.state in USABLE and not replica.is_drained


def shown_state(replica: Replica) -> ReplicaState:
    """Return a replica's state for operators: a drained one that could work is `drained`."""
    return "drained" if replica.is_drained and replica.state in USABLE else replica.state.value
