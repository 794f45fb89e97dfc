"""Replicas of one upstream: the only owner of their health and of the choice between them.

Every change of a replica passes through its pool: `transition` moves it along the table of states, and after
each change the pool combines what the usable replicas offer and calls its subscribers, the lanes, which may
then send or fail what waits. So the lanes find the list of usable replicas and the offer ready, and compute
neither per call.
"""

from collections.abc import Callable, Collection
from random import Random

from backends.contract import Capabilities, Work
from backends.contract.errors import BackendError, ReplicaOverloaded, UnsupportedWork, printable
from gateway.errors import NoReplica
from gateway.events import DescriptionRejected, Observe, ReplicaChanged
from gateway.routing.choice import (
    TRIAL_EVERY,
    BatchTimes,
    Policy,
    is_worth_waiting,
    rank_replicas,
    relative_slowness,
    slowdowns,
)
from gateway.routing.health import ReplicaEvent, State, event_of, next_state
from gateway.routing.offers import is_uniform, offers, union
from gateway.routing.replica import LOAD_KINDS, BatchLoad, KeptOut, LoadKind, Replica

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
    "credentials": "the gateway has no credentials for this model's upstream; an operator has to set them",
    "absent": "the upstream does not have this model; an operator has to correct its `model` or address",
    "proxy": "the proxy in front of this model's upstream refuses the gateway; an operator has to correct it",
    "output": "the reachable replicas of this model do not compute as they should and are not used",
}


class Pool:
    """Equal replicas of one upstream, behind its lanes.

    holds: work waits while no replica is usable, because one is expected to return. is_uniform: all usable
    replicas offer the same, so that no call has to be compared with each of them.
    """

    def __init__(
        self,
        upstream: str,
        replicas: list[Replica],
        policy: Policy,
        observe: Observe,
        seed: int | None = None,
        *,
        holds: bool = False,
    ) -> None:
        self.upstream = upstream
        self.replicas = replicas
        self.holds = holds
        self.is_uniform = True
        self._policy = policy
        self._observe = observe
        self._on_change: list[Callable[[], None]] = []
        self._on_stalled: list[Callable[[Replica], None]] = []
        self._undiscovered_urls: set[str] = set()
        self._turn = 0
        self._batch_times = {kind: BatchTimes() for kind in LOAD_KINDS}
        # Tokens of a typical batch.
        self._batch_tokens = 1.0
        self._random = Random(seed)  # noqa: S311 - it spreads load and protects no secret
        # Replicas that broke connections a moment ago and may be restarting: calls wait for them.
        self._returning: set[Replica] = set()
        self._usable: list[Replica] = []
        self._capabilities: Capabilities | None = None
        self._combine()

    def subscribe(self, on_change: Callable[[], None], on_stalled: Callable[[Replica], None]) -> None:
        """Add a lane.

        on_change: called after each change of a replica's state. on_stalled: called with a replica whose work
        in flight will not complete.
        """
        self._on_change.append(on_change)
        self._on_stalled.append(on_stalled)

    def report_change(self) -> None:
        """Report to the lanes that a replica has changed."""
        for on_change in self._on_change:
            on_change()

    def usable(self, avoid: Collection[Replica] = ()) -> Collection[Replica]:
        """Return the replicas that are given work, without those to avoid."""
        return [replica for replica in self._usable if replica not in avoid] if avoid else self._usable

    def is_mixed(self) -> bool:
        """Return whether a usable replica returns vectors of a different space."""
        for replica in self._usable:  # noqa: SIM110 - every call asks, and a generator costs more
            if replica.is_foreign:
                return True
        return False

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

    @property
    def is_expected(self) -> bool:
        """True if calls may wait for a replica: one is joining or returning, or one is expected back.

        A replica that is kept out because of its vectors, or whose model cannot be loaded, is not expected
        back.
        """
        is_held = self.holds and not self.has_rejected() and not self._is_unloadable()
        return self.is_joining() or self.is_returning or is_held

    def held_s(self, now_s: float) -> float | None:
        """Return the time until a usable replica may get work, None if one may or none is usable."""
        # Asked once for each slice, and nearly always of no use.
        for replica in self._usable:
            if not replica.is_held:
                return None
        return max(0.0, min(each.held_until_s for each in self._usable) - now_s) if self._usable else None

    def has_room(self, inputs: int, kind: LoadKind = "texts") -> bool:
        """Return whether any usable replica has room for a batch of this many inputs; picks none."""
        return any(replica.admits(inputs, "", is_only_tenant=True, kind=kind) for replica in self._usable)

    def lacking(self, work: Work) -> Collection[Replica]:
        """Return the usable replicas that do not offer the work's operation or outputs."""
        if self.is_uniform:
            return ()
        return [replica for replica in self._usable if not offers(replica.capabilities, work)]

    def no_replica_error(self) -> NoReplica:
        """Return the error for a call that no replica can serve."""
        down = [replica for replica in self.replicas if replica.state is State.DOWN]
        kept_out = next((replica.kept_out for replica in down if replica.kept_out is not None), None)
        if any(replica.is_foreign for replica in down):
            reason = (
                "the reachable replicas of this model return vectors of a different space and are not used"
            )
        elif kept_out is not None:
            reason = KEPT_OUT_REASONS[kept_out]
        elif any(replica.shown_state == "drained" for replica in self.replicas):
            reason = "the replicas of this model that can be reached are drained"
        elif self._is_unloadable():
            reason = "this model cannot be loaded; the gateway's log and `gateway status` have the reason"
        else:
            reason = "no replica of this model can be reached"
        return NoReplica(reason, retry_after_s=PROBED_WITHIN_S)

    def expect_return(self, replica: Replica) -> None:
        """Let calls wait for a replica that broke its connections, until `give_up`."""
        self._returning.add(replica)

    def give_up(self, replica: Replica) -> None:
        """End the wait for a replica, whether it has returned or not."""
        self._returning.discard(replica)
        self.report_change()

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
        usable = [replica for replica in self._usable if replica not in avoid] if avoid else self._usable
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
            for other in usable:
                other.record_choice(is_chosen=other is replica)
            return replica
        return None

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
            self.report_change()

    def add(self, replica: Replica) -> None:
        """Add a replica that has yet to join."""
        self.replicas.append(replica)

    def remove(self, replica: Replica) -> None:
        """Remove a replica that has nothing in flight any more."""
        self.replicas.remove(replica)
        self._combine()

    def slowness(self) -> dict[Replica, float]:
        """Return how many times slower each usable replica is than the fastest, by its slower kind."""
        usable = list(self._usable)
        by_kind = [relative_slowness([replica.paces[kind] for replica in usable]) for kind in LOAD_KINDS]
        return dict(zip(usable, map(max, *by_kind), strict=True))

    def capabilities(self) -> Capabilities | None:
        """Return what the model offers: the union over its replicas; None before one has joined."""
        return self._capabilities

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
            replica.doubt()
            return
        if isinstance(error, ReplicaOverloaded):
            replica.record_refusal(now_s, sent_s)
            return
        is_last = not self.usable([replica])
        event = event_of(error, replica.record_failure(), is_last=is_last)
        if event is not None:
            self.transition(replica, event, error.explanation)

    def reject_description(self, replica: Replica, reason: str) -> None:
        """Report a description that is not accepted; the replica's earlier one stays valid."""
        changed = replica.reject_description(reason)
        self._observe(DescriptionRejected(self.upstream, replica.name, reason, changed))

    def update_capabilities(self, replica: Replica, capabilities: Capabilities) -> None:
        """Replace the capabilities of a replica that serves the same model."""
        replica.describe(capabilities)
        self._combine()
        self.report_change()

    def transition(
        self,
        replica: Replica,
        event: ReplicaEvent,
        reason: str,
        capabilities: Capabilities | None = None,
    ) -> None:
        """Move a replica along the table of states and report the change."""
        if capabilities is not None:
            replica.describe(capabilities)
        state = next_state(replica.state, event)
        # A server that comes back with other vectors is down for another reason than before.
        has_new_reason = replica.note_foreign(reason if event is ReplicaEvent.FOREIGN else "")
        if state is replica.state and not (has_new_reason and state is State.DOWN):
            self._combine()
            return
        replica.enter(state)
        self._combine()
        self._observe(ReplicaChanged(self.upstream, replica.name, replica.shown_state, printable(reason)))
        if event is ReplicaEvent.STALLED:
            for on_stalled in self._on_stalled:
                on_stalled(replica)
        self.report_change()

    def apply_drains(self, drained: Collection[str]) -> None:
        """Keep work away from the named replicas, and from no others. Batches in flight are not affected."""
        for replica in self.replicas:
            before = replica.shown_state
            replica.drain(is_drained=replica.name in drained)
            if replica.shown_state != before:
                reason = DRAINED if replica.is_drained else "it is no longer drained"
                self._observe(ReplicaChanged(self.upstream, replica.name, replica.shown_state, reason))
        self._combine()
        self.report_change()

    def _is_unloadable(self) -> bool:
        return any(replica.is_unloadable for replica in self.replicas)

    def _combine(self) -> None:
        """Combine what the replicas offer, after one of them has changed.

        The capabilities of replicas that are down count too, so that calls wait or get a 503 instead of a
        400; not those of one with other vectors or another model.
        """
        self._usable = [replica for replica in self.replicas if replica.gets_work]
        usable = [replica.capabilities for replica in self._usable if replica.capabilities is not None]
        down = [
            replica.capabilities
            for replica in self.replicas
            if replica.capabilities is not None
            and not replica.gets_work
            and replica.state is not State.GONE
            and not (replica.state is State.DOWN and (replica.is_foreign or replica.kept_out == "model"))
        ]
        self.is_uniform = is_uniform(usable)
        combined = union([*usable, *down])
        # Work that was prepared with an equal object needs no refresh.
        if combined != self._capabilities:
            self._capabilities = combined


def _waiting_tokens(replica: Replica) -> int:
    """Estimate the tokens in a replica's own queue, from its report and the gateway's average input."""
    return replica.waiting_inputs * (replica.tokens // replica.inputs if replica.inputs else 1)
