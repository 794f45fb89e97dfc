"""Replicas of one upstream: the only owner of their health and of the choice between them."""

from collections.abc import Awaitable, Callable, Collection
from random import Random

from backends.contract import Capabilities, ModelWork, Work
from backends.contract.errors import BackendError, ReplicaOverloaded, UnsupportedWork, printable
from gateway.errors import NoReplica
from gateway.events import DescriptionRejected, Observe, ReplicaChanged
from gateway.routing.health import ReplicaEvent, State, event_of, next_state
from gateway.routing.load import LOAD_KINDS, BatchLoad, LoadKind
from gateway.routing.offers import ModelOffer, offers
from gateway.routing.pace import TRIAL_EVERY, BatchTimes, is_worth_waiting, slowdowns
from gateway.routing.policies import Policy, rank_replicas
from gateway.routing.replica import KeptOut, Replica, gets_work, shown_state

# Replicas that are down are probed, and names without an address resolved, at least this often.
PROBED_WITHIN_S = 5
# Weight of the newest batch in the tokens of a typical one.
TYPICAL_SHARE = 0.1
# A pool does not know whose list it is: those of the configuration and of operators are one.
DRAINED = "it is drained, by `drained` in the configuration or by an operator"


# What callers read; the log and the status have the details.
KEPT_OUT_REASONS: dict[KeptOut, str] = {
    "model": "the reachable replicas serve a different model than this one's upstream and are not used",
    "key": "the upstream of this model refuses the gateway's key; an operator has to correct its `api_key`",
    "output": "the reachable replicas of this model do not compute as they should and are not used",
}
CountTokens = Callable[[ModelWork, str, Capabilities], Awaitable[list[int] | None]]


async def _count_nothing(work: ModelWork, prompt: str, capabilities: Capabilities) -> None:  # noqa: ARG001
    return None


class Subscribers:
    """Lanes that act on changes of a pool."""

    def __init__(self) -> None:
        self._on_change: list[Callable[[], None]] = []
        self._on_stalled: list[Callable[[Replica], None]] = []

    def add(self, on_change: Callable[[], None], on_stalled: Callable[[Replica], None]) -> None:
        """Add a lane.

        on_change: called after each change of a replica's state. on_stalled: called with a replica whose work
        in flight will not complete.
        """
        self._on_change.append(on_change)
        self._on_stalled.append(on_stalled)

    def report_change(self) -> None:
        """Report that a replica has changed."""
        for on_change in self._on_change:
            on_change()

    def report_stalled(self, replica: Replica) -> None:
        """Report a replica whose work in flight will not complete."""
        for on_stalled in self._on_stalled:
            on_stalled(replica)


class Pool:
    """Equal replicas of one upstream, behind its lanes."""

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
        self.subscribers = Subscribers()
        # Whether work waits while no replica is usable, as in `LaneSettings`.
        self.holds = False
        # Own counts of a piece of work with its prompt, None without a tokenizer.
        self.count_tokens: CountTokens = _count_nothing
        self._policy = policy
        self.observe = observe
        self._undiscovered_urls: set[str] = set()
        self._turn = 0
        self._batch_times = {kind: BatchTimes() for kind in LOAD_KINDS}
        # Tokens of a typical batch.
        self._batch_tokens = 1.0
        self._random = Random(seed)  # noqa: S311 - it spreads load and protects no secret
        self.offer = ModelOffer()
        # Replicas that broke connections a moment ago and may be restarting: calls wait for them.
        self._returning: set[Replica] = set()

    def usable(self, avoid: Collection[Replica] = ()) -> list[Replica]:
        """Return the replicas that are given work, without those to avoid."""
        return [replica for replica in self.replicas if gets_work(replica) and replica not in avoid]

    def is_mixed(self) -> bool:
        """Return whether a usable replica returns vectors of a different space."""
        return any(replica.is_foreign and gets_work(replica) for replica in self.replicas)

    def has_rejected(self) -> bool:
        """Return whether a replica responds and is kept out: for its vectors, its model, or its output."""
        return any(
            replica.state is State.DOWN and (replica.is_foreign or replica.kept_out is not None)
            for replica in self.replicas
        )

    def is_joining(self) -> bool:
        """Return whether a replica is still being discovered, or has not had its first attempt to join."""
        return bool(self._undiscovered_urls) or any(
            replica.state is State.JOINING for replica in self.replicas
        )

    @property
    def is_returning(self) -> bool:
        """True while a replica that broke its connections a moment ago may be restarting."""
        return any(replica.state is State.DOWN for replica in self._returning)

    def expect_return(self, replica: Replica) -> None:
        """Let calls wait for a replica that broke its connections, until `give_up`."""
        self._returning.add(replica)

    def give_up(self, replica: Replica) -> None:
        """End the wait for a replica, whether it has returned or not."""
        self._returning.discard(replica)
        self.subscribers.report_change()

    def pick(
        self,
        inputs: int,
        avoid: Collection[Replica],
        tenant: str = "",
        *,
        is_only_tenant: bool = True,
        kind: LoadKind = "texts",
    ) -> Replica | None:
        """Return the best replica with room for a batch of this many inputs, or None."""
        usable = self.usable(avoid)
        if len(usable) == 1:
            only = usable[0]
            return only if only.admits(inputs, tenant, is_only_tenant=is_only_tenant, kind=kind) else None
        loads: list[float] = [replica.tokens + _waiting_tokens(replica) for replica in usable]
        slow = slowdowns([replica.paces[kind] for replica in usable])
        is_weighted = slow is not None and self._policy != "round_robin"
        if slow is not None and is_weighted:
            loads = [(load + self._batch_tokens) * factor for load, factor in zip(loads, slow, strict=True)]
        order = rank_replicas(self._policy, loads, self._turn, self._random)
        if slow is not None and is_weighted:
            order.sort(key=lambda i: slow[i] == 1 or usable[i].passed_over < TRIAL_EVERY)
        # One that asked for a pause has no room for longer than a batch takes.
        costs = [load for load, replica in zip(loads, usable, strict=True) if not replica.is_waiting]
        for index in order:
            replica = usable[index]
            if not replica.admits(inputs, tenant, is_only_tenant=is_only_tenant, kind=kind):
                continue
            is_trial = replica.passed_over >= TRIAL_EVERY
            if is_weighted and not is_trial and is_worth_waiting(loads[index], costs):
                # A slot of a faster one is free sooner than this one is done.
                continue
            self._turn += 1
            self._count_choice(replica, usable)
            return replica
        return None

    def _count_choice(self, chosen: Replica, usable: Collection[Replica]) -> None:
        for replica in usable:
            replica.passed_over += 1
        chosen.passed_over = 0

    def pick_extra(self, inputs: int, avoid: Collection[Replica], kind: LoadKind) -> Replica | None:
        """Return the replica with the least work for a batch that takes no slot of the window, or None."""
        admitting = [replica for replica in self.usable(avoid) if replica.admits_extra(inputs, kind)]
        return min(admitting, key=lambda replica: replica.tokens, default=None)

    def expect_discovery(self, url: str) -> None:
        """Count the replicas behind a URL as joining until it has been resolved once."""
        self._undiscovered_urls.add(url)

    def finish_discovery(self, url: str) -> None:
        """Record that a URL has been resolved once, with or without a result."""
        if url in self._undiscovered_urls:
            self._undiscovered_urls.discard(url)
            self.subscribers.report_change()

    def add(self, replica: Replica) -> None:
        """Add a replica that has yet to join."""
        self.replicas.append(replica)

    def remove(self, replica: Replica) -> None:
        """Remove a replica that has nothing in flight any more."""
        self.replicas.remove(replica)
        _combine_capabilities(self)

    def capabilities(self) -> Capabilities | None:
        """Return what the model offers: the union over its replicas; None before one has joined."""
        return self.offer.capabilities

    def record_success(
        self, replica: Replica, load: BatchLoad, took_s: float, now_s: float, *, was_full: bool
    ) -> None:
        """Record that a replica completed a batch."""
        replica.record_success(load, took_s, now_s, was_full=was_full)
        slowness = self._batch_times[load.kind].slowness(took_s, load.tokens_before + load.tokens)
        replica.paces[load.kind].add(slowness)
        self._batch_tokens += (load.tokens - self._batch_tokens) * TYPICAL_SHARE
        if replica.state is State.PROBATION and replica.is_proven:
            self.transition(replica, ReplicaEvent.PROVEN, "its requests succeed again")

    def record_failure(self, replica: Replica, error: BackendError, now_s: float, sent_s: float) -> None:
        """Record that a replica failed a batch, sent at `sent_s`, through no fault of the caller.

        A failure that an input may cause is recorded only if the replica fails plain work too.
        """
        if isinstance(error, UnsupportedWork):
            # Its description may have changed; the prober asks for it again.
            replica.is_doubted = True
            return
        if isinstance(error, ReplicaOverloaded):
            replica.record_refusal(now_s, sent_s)
            return
        is_last = not self.usable([replica])
        event = event_of(error, replica.record_failure(), is_last=is_last)
        if event is not None:
            self.transition(replica, event, error.explanation)

    def update_capabilities(self, replica: Replica, capabilities: Capabilities) -> None:
        """Replace the capabilities of a replica that serves the same model."""
        replica.capabilities = capabilities
        _combine_capabilities(self)
        self.subscribers.report_change()

    def transition(
        self,
        replica: Replica,
        event: ReplicaEvent,
        reason: str,
        capabilities: Capabilities | None = None,
    ) -> None:
        """Move a replica along the table of states and report the change."""
        replica.capabilities = capabilities or replica.capabilities
        state = next_state(replica.state, event)
        if state is replica.state:
            _combine_capabilities(self)
            return
        if state is State.PROBATION:
            replica.reset_history()
        replica.state = state
        replica.rejection, replica.is_unloadable = None, False
        _combine_capabilities(self)
        self.observe(ReplicaChanged(self.upstream, replica.name, shown_state(replica), printable(reason)))
        if event is ReplicaEvent.STALLED:
            self.subscribers.report_stalled(replica)
        self.subscribers.report_change()


def apply_drains(pool: Pool, drained: Collection[str]) -> None:
    """Keep work away from the named replicas, and from no others. Batches in flight are not affected."""
    for replica in pool.replicas:
        before = shown_state(replica)
        replica.is_drained = replica.name in drained
        if shown_state(replica) != before:
            reason = DRAINED if replica.is_drained else "it is no longer drained"
            pool.observe(ReplicaChanged(pool.upstream, replica.name, shown_state(replica), reason))
    _combine_capabilities(pool)
    pool.subscribers.report_change()


def has_room(pool: Pool, inputs: int, kind: LoadKind = "texts") -> bool:
    """Return whether any usable replica has room for a batch of this many inputs; picks none."""
    return any(replica.admits(inputs, "", is_only_tenant=True, kind=kind) for replica in pool.usable())


def held_s(pool: Pool, now_s: float) -> float | None:
    """Return the time until a usable replica may get work, None if one may or none is usable."""
    # Asked once for each slice, and nearly always of no use.
    for replica in pool.replicas:
        if replica.is_held:
            break
    else:
        return None
    usable = pool.usable()
    if not usable or not all(replica.is_held for replica in usable):
        return None
    return max(0.0, min(replica.held_until_s for replica in usable) - now_s)


def lacking(pool: Pool, work: Work) -> Collection[Replica]:
    """Return the usable replicas that do not offer the work's operation or outputs."""
    if pool.offer.is_uniform:
        return ()
    return [replica for replica in pool.usable() if not offers(replica.capabilities, work)]


def reject_description(pool: Pool, replica: Replica, reason: str) -> None:
    """Report a description that is not accepted; the replica's earlier one stays valid."""
    changed = reason != replica.rejection
    replica.rejection = reason
    pool.observe(DescriptionRejected(pool.upstream, replica.name, reason, changed))


def is_replica_expected(pool: Pool, *, holds: bool) -> bool:
    """Return whether calls may wait for a replica: one is joining or returning, or one is expected back.

    A replica that is kept out because of its vectors, or whose model cannot be loaded, is not expected back.
    holds: as in `LaneSettings`.
    """
    is_held = holds and not pool.has_rejected() and not _is_unloadable(pool)
    return pool.is_joining() or pool.is_returning or is_held


def _is_unloadable(pool: Pool) -> bool:
    return any(replica.is_unloadable for replica in pool.replicas)


def no_replica_error(pool: Pool) -> NoReplica:
    """Return the error for a call that no replica can serve."""
    down = [replica for replica in pool.replicas if replica.state is State.DOWN]
    kept_out = next((replica.kept_out for replica in down if replica.kept_out is not None), None)
    if any(replica.is_foreign for replica in down):
        reason = "the reachable replicas of this model return vectors of a different space and are not used"
    elif kept_out is not None:
        reason = KEPT_OUT_REASONS[kept_out]
    elif any(shown_state(replica) == "drained" for replica in pool.replicas):
        reason = "the replicas of this model that can be reached are drained"
    elif _is_unloadable(pool):
        reason = "this model cannot be loaded; the gateway's log and `gateway status` have the reason"
    else:
        reason = "no replica of this model can be reached"
    return NoReplica(reason, retry_after_s=PROBED_WITHIN_S)


def _combine_capabilities(pool: Pool) -> None:
    known = [replica for replica in pool.replicas if _counts(replica)]
    usable = [replica.capabilities for replica in known if gets_work(replica)]
    down = [replica.capabilities for replica in known if not gets_work(replica)]
    pool.offer.combine([each for each in usable if each], [each for each in down if each])


def _counts(replica: Replica) -> bool:
    """Return whether a replica's capabilities are part of the model's."""
    is_rejected = replica.state is State.DOWN and (replica.is_foreign or replica.kept_out == "model")
    return replica.capabilities is not None and replica.state is not State.GONE and not is_rejected


def _waiting_tokens(replica: Replica) -> int:
    """Estimate the tokens in a replica's own queue, from its report and the gateway's average input."""
    return replica.waiting_inputs * (replica.tokens // replica.inputs if replica.inputs else 1)
