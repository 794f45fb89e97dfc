"""One replica of an upstream: its state, the batches in flight to it, and all that was learned of it.

Who may send to it is decided by three things. Its state, which `health` moves and its pool sets. Its window,
which `window` learns from completed batches, for each kind of batch by itself: texts do not wait until
pictures are computed. And its own refusals: a pause that it asked for, permits that it lacked, a size that it
refused. The records of its recent batches say how long the work in flight may take before it is suspicious. A
replica writes its attributes itself; others report to its methods. Pure: time and chance are arguments.
"""

from collections import Counter, deque
from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

import msgspec

from backends.contract import (
    Backend,
    Capabilities,
    Embed,
    EmbedParts,
    Operation,
    Reply,
    Residence,
    ScoreParts,
    Work,
)
from backends.contract.errors import ReplicaFailed
from gateway.events import ReplicaState, UpstreamServer
from gateway.routing.choice import Pace
from gateway.routing.health import PROBATION_BATCHES, USABLE, State
from gateway.routing.window import Window
from gateway.vector_spaces.zero_vectors import gives_zeros

# model: it serves another model than its upstream. key: it refuses the gateway's key. credentials: the
# gateway has none for it. absent: it has no model or path of that name. proxy: the one in front of it refuses
# the gateway. output: it does not compute as it should.
KeptOut: TypeAlias = Literal["model", "key", "credentials", "absent", "proxy", "output"]
# What a batch has: texts only, or also pictures or recordings, which take far longer.
LoadKind = Literal["texts", "media"]
LOAD_KINDS: tuple[LoadKind, ...] = get_args(LoadKind)
# Inputs below which a batch is small: a server's own batch has room for more.
SMALL_INPUTS = 32
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
# A smaller request that is refused for its size shows no limit on size: no server has such a low one.
REFUSED_BYTES_MIN = 16_384
# A bound that was learned is tested again after this time: the server or its proxy may have a new limit.
LEARNED_FOR_S = 600.0
# Pause after a batch for which the replica had no permits; it doubles until a batch is computed.
PAUSE_MIN_S = 0.02
PAUSE_MAX_S = 0.5
PAUSE_DOUBLINGS_MAX = 5


class BatchLoad(msgspec.Struct, frozen=True):
    """Load that one batch puts on a replica, and the tenants whose inputs it contains.

    tokens_before: those in flight to the replica when the batch was sent. is_extra: it takes no slot of
    the window.
    """

    inputs: int
    tokens: int
    tenants: Sequence[str]
    kind: LoadKind = "texts"
    tokens_before: int = 0
    is_extra: bool = False


def kind_of(work: Work) -> LoadKind:
    """Return the kind of batch that a piece of work is."""
    return "media" if isinstance(work, EmbedParts | ScoreParts) else "texts"


class JoinedModel(msgspec.Struct, frozen=True):
    """Model that a replica joined with. scores: of a reranker, as `read_scores` returns them."""

    capabilities: Capabilities
    scores: tuple[float, ...] | None = None


class RequestLimits:
    """Limits that one replica's refusals show: of size, and of permits, which other clients may hold.

    learned_bytes: most bytes of inputs in one request, None if it refused no size. is_paused: it had no
    permits for a batch, and is given no batch for a while.
    """

    __slots__ = ("_learned_s", "is_paused", "learned_bytes", "pauses")

    def __init__(self) -> None:
        self.learned_bytes: int | None = None
        self.is_paused = False
        self.pauses = 0
        self._learned_s = 0.0

    def learn_size(self, refused_bytes: int, now_s: float) -> bool:
        """Lower the bound on bytes to half of a refused request; return whether that changed it."""
        learned, known = refused_bytes // 2, self.learned_bytes
        if refused_bytes < REFUSED_BYTES_MIN or (known is not None and known <= learned):
            return False
        self.learned_bytes, self._learned_s = learned, now_s
        return True

    def forget_old_size(self, now_s: float) -> None:
        """Forget a bound on bytes that was learned long ago."""
        if self.learned_bytes is not None and now_s - self._learned_s >= LEARNED_FOR_S:
            self.learned_bytes = None

    def pause(self, chance: float) -> float | None:
        """Begin a pause and return its length, or None if there is one already.

        chance: from 0 to 1, so that gateways that were refused together do not come back together.
        """
        if self.is_paused:
            return None
        pause_s = min(PAUSE_MAX_S, PAUSE_MIN_S * float(2**self.pauses))
        self.is_paused, self.pauses = True, min(self.pauses + 1, PAUSE_DOUBLINGS_MAX)
        return pause_s * (1 + chance) / 2

    def resume(self) -> None:
        """End a pause; the next one is longer."""
        self.is_paused = False

    def end_pauses(self) -> None:
        """End the pause: a batch was computed and gave back its permits."""
        self.is_paused, self.pauses = False, 0


class Replica:
    """One server or engine of an upstream.

    name: the label in logs and metrics. server: its address, None if it has none. small_batch_slots: slots of
    the window that a batch of fewer than `SMALL_INPUTS` takes. gets_work: it is usable, and no operator keeps
    work away. is_drained: one does; probes continue. kept_out: why it responds and is not used, except for
    its vectors. joined: the model that it last joined with. gives_zeros: its model gives zeros for a text
    without a known word; None if that is not known. held_until_s: when it may get work again after it asked
    for a pause. is_doubted: it refused work that its capabilities seem to allow, and has not described itself
    since. rejection: why its last description was not accepted. is_unloadable: its engine cannot use the
    files of its model, and no restart mends that. is_foreign: its vectors belong to a different space than
    its upstream's. width: dimensions of its vectors in the last space check. residence: its last report of
    whether the model is in memory; None if it always is. waiting_inputs: its own report of its queue, which
    other clients may fill as well. counts_alike: by operation, whether it counts tokens as the gateway does.
    answered_s: moment of its last complete answer. passed_over: batches that went to others since its last
    one.
    """

    state = State.JOINING
    gets_work = is_drained = is_held = is_doubted = is_unloadable = is_foreign = False
    held_until_s = 0.0
    passed_over = waiting_inputs = batches = inputs = tokens = 0
    capabilities: Capabilities | None = None
    kept_out: KeptOut | None = None
    joined: JoinedModel | None = None
    gives_zeros: bool | None = None
    rejection: str | None = None
    _foreign_reason = ""
    width: int | None = None
    residence: Residence | None = None
    answered_s: float | None = None
    _plain_s: float | None = None
    _count_warned = False
    _failures = _successes = 0
    _progress_s = _slowest_s = _largest_tokens = 0.0

    def __init__(
        self,
        name: str,
        backend: Backend,
        window: Window | None = None,
        small_batch_slots: int = 1,
        server: UpstreamServer | None = None,
    ) -> None:
        self.name = name
        self.server = server
        self.backend = backend
        self.window = window or Window()
        self.request_limits = RequestLimits()
        self.counts_alike: dict[Operation, bool] = {}
        self.slots_by_kind: dict[LoadKind, int] = dict.fromkeys(LOAD_KINDS, 0)
        self.batches_by_tenant: Counter[tuple[LoadKind, str]] = Counter()
        self.paces: dict[LoadKind, Pace] = {kind: Pace() for kind in LOAD_KINDS}
        self._small_batch_slots = small_batch_slots
        # When attempts began whose connections broke, and when these broke.
        self._losses: deque[tuple[float, float]] = deque(maxlen=LOSSES_KEPT)

    @property
    def shown_state(self) -> ReplicaState:
        """State for operators: a drained replica that could work is `drained`."""
        return "drained" if self.is_drained and self.state in USABLE else self.state.value

    def enter(self, state: State) -> None:
        """Enter another state of the table. One that rejoins is learned from scratch."""
        if state is State.PROBATION:
            self._reset_history()
        self.state = state
        self.rejection, self.is_unloadable = None, False
        self.gets_work = state in USABLE and not self.is_drained

    def note_foreign(self, reason: str) -> bool:
        """Note why its vectors are foreign, "" if they are not; return whether that is a new reason."""
        is_new = bool(reason) and reason != self._foreign_reason
        self._foreign_reason = reason
        return is_new

    def drain(self, *, is_drained: bool) -> None:
        """Let an operator keep work away from it, or give it work again."""
        self.is_drained = is_drained
        self.gets_work = self.state in USABLE and not is_drained

    def describe(self, capabilities: Capabilities) -> None:
        """Replace its capabilities."""
        self.capabilities = capabilities

    def reject_description(self, reason: str) -> bool:
        """Record why its last description is not accepted; return whether the reason is new."""
        changed, self.rejection = reason != self.rejection, reason
        return changed

    def accept_description(self) -> None:
        """Record that its last description is accepted."""
        self.rejection = None

    def doubt(self, *, is_doubted: bool = True) -> None:
        """Record that it refused work that its description allows, or that it has described itself again."""
        self.is_doubted = is_doubted

    def keep_out(self, reason: KeptOut | None) -> None:
        """Record why it responds and is not used; None if it is used or does not respond."""
        self.kept_out = reason

    def report_files(self, *, are_usable: bool) -> None:
        """Record whether its engine can use the files of its model."""
        self.is_unloadable = not are_usable

    def join_as(self, model: JoinedModel) -> None:
        """Record the model that it joins with."""
        self.joined = model

    def record_space(self, width: int | None, *, is_foreign: bool) -> None:
        """Record a check of its vectors. width: their dimensions, None if it was not checked."""
        self.width, self.is_foreign = width, is_foreign

    def record_residence(self, residence: Residence) -> None:
        """Record whether its model is in memory."""
        self.residence = residence

    def record_queue(self, waiting_inputs: int) -> None:
        """Record its own report of its queue."""
        self.waiting_inputs = waiting_inputs

    def record_choice(self, *, is_chosen: bool) -> None:
        """Count a batch that went to another replica, or to this one."""
        self.passed_over = 0 if is_chosen else self.passed_over + 1

    def warns_of_counts(self) -> bool:
        """Return True the first time, if its token counts are worth a line in the log."""
        was_warned, self._count_warned = self._count_warned, True
        return not was_warned

    @property
    def slots(self) -> int:
        """Number of slots that the batches of each kind may take now."""
        return 1 if self.state is State.PROBATION else self.window.size

    def free_slots(self, kind: LoadKind, inputs: int) -> int:
        """Return how many more batches of a kind and of this size the window allows."""
        each = 1 if inputs >= SMALL_INPUTS else self._small_batch_slots
        slots = 1 if self.state is State.PROBATION else self.window.size
        return max(0, -((self.slots_by_kind[kind] - slots) // each))

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
        slots = 1 if self.state is State.PROBATION else self.window.size
        if not is_only_tenant:
            own = self.batches_by_tenant.get((kind, tenant), 0)
            if kind == "media" and not own and self._tenants_of(kind) < slots:
                slots = self.slots_by_kind[kind] + 1
            elif own and slots > 1:
                slots -= 1 if inputs >= SMALL_INPUTS else self._small_batch_slots
        return self.has_room(inputs, slots, kind)

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
        if self.slots_by_kind[kind] >= slots or self.request_limits.is_paused or self.is_held:
            return False
        permits = self.capabilities.concurrent_inputs if self.capabilities else None
        # A batch larger than all permits was cut for other replicas. It may try alone, and is then cut again.
        return permits is None or self.inputs == 0 or self.inputs + inputs <= permits

    @property
    def is_waiting(self) -> bool:
        """True if it gets no work for a while, because it had no permits or asked for a pause."""
        return self.request_limits.is_paused or self.is_held

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
        """Check that vectors are as wide as its reference texts were, or as the work requested.

        Raises: ReplicaFailed.
        """
        vectors = reply.dense_vectors
        if self.width is None or vectors is None or not isinstance(work, Embed):
            return
        width, expected = vectors.shape[1], work.dimensions or self.width
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
            self.slots_by_kind[load.kind] += 1 if load.inputs >= SMALL_INPUTS else self._small_batch_slots
        for tenant in load.tenants:
            self.batches_by_tenant[load.kind, tenant] = self.batches_by_tenant.get((load.kind, tenant), 0) + 1
        self.inputs += load.inputs
        self.tokens += load.tokens

    def remove_batch(self, load: BatchLoad) -> None:
        """Stop counting a batch, whatever its outcome."""
        self.batches -= 1
        if not load.is_extra:
            self.slots_by_kind[load.kind] -= 1 if load.inputs >= SMALL_INPUTS else self._small_batch_slots
        for tenant in load.tenants:
            if self.batches_by_tenant[load.kind, tenant] == 1:
                del self.batches_by_tenant[load.kind, tenant]
            else:
                self.batches_by_tenant[load.kind, tenant] -= 1
        self.inputs -= load.inputs
        self.tokens -= load.tokens

    def record_success(self, load: BatchLoad, took_s: float, now_s: float, *, was_full: bool) -> None:
        """Learn from a completed batch; called before `remove_batch`.

        was_full: no more batches could have been in flight.
        """
        self.window.recover(now_s)
        if (load.inputs >= SMALL_INPUTS or self._small_batch_slots == 1) and not load.is_extra:
            self.window.record_batch(load.tokens, now_s, self.batches, was_full=was_full)
        if self.request_limits.pauses:
            self.request_limits.end_pauses()
        self._progress_s = self.answered_s = now_s
        self._failures = 0
        self._successes += 1
        self._slowest_s = max(took_s, self._slowest_s * EXTREMES_DECAY)
        self._largest_tokens = max(1.0, load.tokens, self._largest_tokens * EXTREMES_DECAY)

    def record_check(self, took_s: float, now_s: float) -> None:
        """Record that it has completed the plain text of a check."""
        self._plain_s = took_s
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

    def _reset_history(self) -> None:
        """Forget everything that was learned before the replica rejoined."""
        self._failures = self._successes = 0
        self._slowest_s = self._largest_tokens = 0.0
        self._plain_s = None
        self.paces = {kind: Pace() for kind in LOAD_KINDS}
        self.passed_over = 0
        self.request_limits = RequestLimits()
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
        elif self._plain_s is not None:
            expected_s = self._expected_s(self._plain_s, PLAIN_TOKENS)
        else:
            return timeout_s
        return min(timeout_s, max(BRIEF_MIN_S, expected_s))

    def _expected_s(self, took_s: float, tokens: float) -> float:
        """Return several times what the work in flight takes. took_s: the time for so many tokens."""
        return STALL_FACTOR * took_s * max(1.0, self.tokens / tokens)
