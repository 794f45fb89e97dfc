"""Health probes of replicas; the only place where a replica joins.

A replica that is not up is asked to describe itself. An idle replica is asked whether it still responds. A
replica that has work and returns nothing is asked to do a single token's worth of work. A replica that joins,
rejoins or serves a different model embeds the reference texts. What failed work says about a replica is
decided by `checks`.

An engine describes a model before it has loaded it, from the checkpoint's small files. It is asked every
second whether the model is in memory. Once a caller's work has loaded the model, its description is read
again and its reference texts are embedded.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping

import msgspec

from backends.contract import (
    Capabilities,
    Operation,
    ReportsQueueDepth,
    ReportsResidence,
    Residence,
    UnloadReason,
)
from backends.contract.errors import (
    AttemptTimedOut,
    BackendError,
    ConnectionLost,
    CredentialMissing,
    CredentialRefused,
    InvalidWork,
    ModelNotServed,
    ModelUnavailable,
    ProxyRefused,
    ReplicaFailed,
    ReplicaOverloaded,
    ReplicaUnavailable,
    UnsupportedWork,
)
from gateway.events import ModelStateReported, Observe
from gateway.routing.checks import is_ordered, other_model, read_scores, smallest_work
from gateway.routing.health import USABLE, ReplicaEvent, State
from gateway.routing.pool import Pool
from gateway.routing.replica import JoinedModel, KeptOut, Replica
from gateway.vector_spaces.space import VectorSpace

PROBE_TIMEOUT_S = 5.0
# Interval between looks at a replica that is up, and the time without work after which it is probed.
CHECK_EVERY_S = 1.0
IDLE_PROBE_AFTER_S = 5.0
# A replica that refuses callers' work is asked for its description at most this often.
DESCRIBE_AGAIN_AFTER_S = 5.0
# Checks of a replica whose requests cost money, within a day: of one that joins, or seems to hang.
PAID_CHECKS_PER_DAY = 24
DAY_S = 86_400.0
# A short text in every language's vocabulary.
PROBE_TEXT = "ok"
# Interval between questions whether a model is in memory.
POLL_EVERY_S = 1.0


class ProbeIntervals(msgspec.Struct, frozen=True):
    """Times between probes: min_s doubles with each miss up to max_s.

    awaits_first_join: a replica that has never responded is still starting, as an engine that loads is.
    stall_timeout_s: how long a replica without any record may have work before it is probed; None disables
    all probes of replicas that are up.
    """

    min_s: float
    max_s: float
    awaits_first_join: bool = False
    stall_timeout_s: float | None = None


# An engine restarts on this machine and is cheap to probe; a remote server is not ours to load.
ENGINE_PROBES = ProbeIntervals(0.05, 0.25, awaits_first_join=True)
REMOTE_PROBES = ProbeIntervals(0.5, 5.0)


class Prober:
    """Probes of one replica. space: the vector space that its vectors are compared with."""

    def __init__(
        self,
        pool: Pool,
        replica: Replica,
        intervals: ProbeIntervals,
        clock: Callable[[], float],
        space: VectorSpace | None = None,
    ) -> None:
        self._pool = pool
        self._replica = replica
        self._intervals = intervals
        self._clock = clock
        self._space = space
        self._idle_since_s = clock()
        self._described_s = clock()
        # Times of checks that cost money, within the last day.
        self._paid_s: deque[float] = deque()
        # Until then the replica, which is not up, asked for no requests.
        self._paused_until_s = 0.0

    async def run(self) -> None:
        """Probe until the replica has joined, whenever it is down, and from time to time while it is up.

        Runs until cancelled.
        """
        wait_s = self._intervals.min_s
        self._idle_since_s = self._clock()
        while True:
            if self._replica.state in USABLE:
                wait_s = self._intervals.min_s
                await asyncio.sleep(min(CHECK_EVERY_S, self._intervals.max_s))
                await self._check_usable()
                self._eject_if_foreign()
                continue
            if await self._try_join():
                self._idle_since_s = self._clock()
                continue
            await asyncio.sleep(max(wait_s, self._paused_until_s - self._clock()))
            # One that is kept out has computed for the checks, and is asked again less often.
            max_s = REMOTE_PROBES.max_s if self._replica.kept_out else self._intervals.max_s
            # Calls wait for a replica that broke its connections a moment ago.
            wait_s = wait_s if self._pool.is_returning else min(wait_s * 2, max_s)

    async def _try_join(self) -> bool:
        """Return whether the replica has joined."""
        pool, replica = self._pool, self._replica
        try:
            capabilities = await replica.backend.describe(PROBE_TIMEOUT_S)
        except BackendError as error:
            # An engine that is still loading has not failed to join: it has not started yet.
            is_starting = self._intervals.awaits_first_join and replica.state is State.JOINING
            if not is_starting or isinstance(error, ReplicaFailed | ModelUnavailable):
                self._report_failed_join(error)
            return False
        # Work would load a model that no caller has asked for.
        if capabilities.loaded:
            if self._may_check(capabilities):
                if not await self._passes_checks(capabilities):
                    return False
            elif replica.joined is None:
                # It failed every check of the day, and its reason has been reported.
                return False
        if self._space is not None and self._is_rejected(self._space):
            pool.transition(replica, ReplicaEvent.FOREIGN, self._space.mismatch_reason(replica.name))
            return False
        replica.keep_out(None)
        pool.transition(replica, ReplicaEvent.JOINED, self._summary(capabilities), capabilities)
        return True

    def _may_check(self, capabilities: Capabilities) -> bool:
        """Return whether a replica is sent work of the gateway's own; count it if it costs money."""
        if not capabilities.metered:
            return True
        now_s = self._clock()
        while self._paid_s and now_s - self._paid_s[0] > DAY_S:
            self._paid_s.popleft()
        if len(self._paid_s) >= PAID_CHECKS_PER_DAY:
            return False
        self._paid_s.append(now_s)
        return True

    async def _passes_checks(self, capabilities: Capabilities) -> bool:
        """Return whether a replica computes, and serves its upstream's model; else keep it out."""
        replica = self._replica
        try:
            if replica.state is State.DOWN:
                # It has failed before, and a description alone does not show that it works.
                await _probe_work(replica, capabilities)
            await self._check_space(capabilities)
            found = await self._model_of(capabilities)
        except ReplicaFailed as error:
            self._report_failed_join(error, "output")
            return False
        except BackendError as error:
            # An engine may have died of the texts, or is busy.
            if not (self._intervals.awaits_first_join and replica.state is State.JOINING):
                self._report_failed_join(error)
            return False
        if (reason := self._reason_to_keep_out(found)) is not None:
            self._keep_out(reason)
            return False
        replica.join_as(found)
        return True

    async def _model_of(self, capabilities: Capabilities) -> JoinedModel:
        """Return the model of a replica, with the scores of a reranker. Raises: BackendError."""
        before = self._replica.joined
        if Operation.RERANK not in capabilities.operations:
            return JoinedModel(capabilities)
        if capabilities.metered and before is not None and before.capabilities == capabilities:
            return before
        scores = await read_scores(self._replica.backend, capabilities, PROBE_TIMEOUT_S)
        return JoinedModel(capabilities, scores or None)

    def _reason_to_keep_out(self, found: JoinedModel) -> str | None:
        """Return why a replica does not serve the model of its upstream, None if it does.

        The replica that is listed first decides. One that has changed its model is compared with all.
        """
        replicas, own = self._pool.replicas, self._replica
        has_changed = own.joined is not None and other_model(own.joined, found) is not None
        others = replicas if has_changed else replicas[: replicas.index(own)]
        references = [
            other.joined
            for other in others
            if other is not own
            and other.joined is not None
            and other.kept_out is None
            and other.state is not State.GONE
            and (not has_changed or other.state in USABLE)
        ]
        return next(filter(None, (other_model(reference, found) for reference in references)), None)

    def _keep_out(self, reason: str) -> None:
        replica = self._replica
        if replica.state is State.DOWN:
            self._pool.reject_description(replica, reason)
        replica.keep_out("model")
        self._pool.transition(replica, ReplicaEvent.FOREIGN, reason)

    def _summary(self, capabilities: Capabilities) -> str:
        """Describe the replica on one line, with the note of its check."""
        note = self._space.note_of(self._replica.name) if self._space is not None else None
        joined = self._replica.joined
        if joined is not None and joined.scores is not None and not is_ordered(joined.scores):
            note = "its scores put an unrelated text above the answer to a question"
        summary = _summary(capabilities)
        return f"{summary}; {note}" if note else summary

    def _report_failed_join(self, error: BackendError, kept_out: KeptOut | None = None) -> None:
        pool, replica = self._pool, self._replica
        if replica.state is State.DOWN and isinstance(error, ReplicaFailed):
            # It responds again, and the line of its ejection does not contain the present fault.
            pool.reject_description(replica, error.explanation)
        if isinstance(error, ReplicaOverloaded) and error.retry_after_s is not None:
            self._paused_until_s = self._clock() + error.retry_after_s
        replica.keep_out(_reason_of(error) or kept_out)
        pool.transition(replica, ReplicaEvent.JOIN_FAILED, error.explanation)
        replica.report_files(are_usable=not isinstance(error, ModelUnavailable))
        # Calls that wait for a replica learn that none is expected.
        pool.report_change()

    async def _check_usable(self) -> None:
        """Probe a usable replica that is suspiciously silent, or that has been idle."""
        pool, replica, stall_timeout_s = self._pool, self._replica, self._intervals.stall_timeout_s
        if stall_timeout_s is None:
            return
        if replica.is_held:
            # It asked for no requests for a while.
            return
        replica.request_limits.forget_old_size(self._clock())
        if len(pool.replicas) > 1:
            # The queue depth only helps to choose between several replicas.
            await _update_queue_depth(replica)
        now_s = self._clock()
        if replica.batches:
            if replica.is_silent(now_s, stall_timeout_s) and replica.capabilities is not None:
                await self._probe_stalled(replica.capabilities)
            self._idle_since_s = now_s
            if replica.is_doubted and now_s - self._described_s >= DESCRIBE_AGAIN_AFTER_S:
                await self._describe_again()
        elif now_s - max(self._idle_since_s, self._described_s) >= IDLE_PROBE_AFTER_S:
            await self._describe_again()

    async def _probe_stalled(self, capabilities: Capabilities) -> None:
        if not self._may_check(capabilities):
            return
        try:
            await _probe_work(self._replica, capabilities)
        except BackendError as error:
            reason = f"work is out and nothing comes back: {error.explanation}"
            self._pool.transition(self._replica, ReplicaEvent.STALLED, reason)

    async def _describe_again(self) -> None:
        """Compare a usable replica's description with that from when it joined."""
        pool, replica = self._pool, self._replica
        replica.doubt(is_doubted=False)
        self._described_s = self._clock()
        try:
            await self._update(await replica.backend.describe(PROBE_TIMEOUT_S))
        except (ReplicaUnavailable, ConnectionLost, AttemptTimedOut) as error:
            pool.transition(replica, ReplicaEvent.UNREACHED, error.explanation)
        except ReplicaOverloaded:
            # It is busy with other clients' work.
            return
        except BackendError as error:
            # It responds. Its description from when it joined is still valid.
            pool.reject_description(replica, error.explanation)

    async def _update(self, capabilities: Capabilities) -> None:
        """Use a new description of a usable replica; one of a different model joins from scratch.

        Raises: BackendError.
        """
        pool, replica, before = self._pool, self._replica, self._replica.capabilities
        replica.accept_description()
        if before is None or capabilities == before:
            return
        if _identity(capabilities) == _identity(before):
            pool.update_capabilities(replica, capabilities)
            return
        await self._check_space(capabilities)
        found = await self._model_of(capabilities)
        if self._space is not None and self._is_rejected(self._space):
            pool.transition(replica, ReplicaEvent.FOREIGN, self._space.mismatch_reason(replica.name))
            return
        if (reason := self._reason_to_keep_out(found)) is not None:
            self._keep_out(reason)
            return
        replica.join_as(found)
        pool.transition(replica, ReplicaEvent.CHANGED, f"now {_summary(capabilities)}", capabilities)

    async def _check_space(self, capabilities: Capabilities) -> None:
        """Compare the replica's vectors with the upstream's space. Raises: BackendError."""
        replica, space = self._replica, self._space
        if space is not None:
            belongs = await space.check(replica.name, replica.backend, capabilities)
            replica.record_space(space.dimensions_of(replica.name), is_foreign=not belongs)

    def _eject_if_foreign(self) -> None:
        """Eject a usable replica of another model, or with foreign vectors.

        The replicas and the space that it is compared with may change too.
        """
        replica, space = self._replica, self._space
        if replica.state in USABLE and replica.joined is not None:
            reason = self._reason_to_keep_out(replica.joined)
            if reason is not None:
                self._keep_out(reason)
                return
        if space is None:
            return
        replica.record_space(replica.width, is_foreign=space.is_foreign(replica.name))
        if replica.state in USABLE and self._is_rejected(space):
            self._pool.transition(replica, ReplicaEvent.FOREIGN, space.mismatch_reason(replica.name))

    def _is_rejected(self, space: VectorSpace) -> bool:
        """Return whether the replica has foreign vectors and is not needed.

        A replica that was already in use stays if no other replica with the upstream's vectors is usable.
        """
        replica = self._replica
        if not (replica.is_foreign and space.refuses):
            return False
        if replica.capabilities is None:
            return True
        return any(not other.is_foreign for other in self._pool.usable([replica]))


def _summary(capabilities: Capabilities) -> str:
    """Describe the model behind a replica on one line, for the log."""
    parts = (capabilities.model_id, capabilities.dtype, capabilities.version, *capabilities.notes)
    return ", ".join(filter(None, parts))


def _identity(capabilities: Capabilities) -> tuple[object, ...]:
    """Return the properties that change when a replica serves a different model."""
    return (
        capabilities.model_id,
        capabilities.revision,
        capabilities.dtype,
        capabilities.pooling,
        capabilities.version,
        capabilities.operations,
        capabilities.outputs,
    )


async def _update_queue_depth(replica: Replica) -> None:
    """Ask how much waits inside the replica, if its wire reports that; other clients may send to it too."""
    if not isinstance(replica.backend, ReportsQueueDepth):
        return
    try:
        depth = await replica.backend.queue_depth(PROBE_TIMEOUT_S)
    except BackendError:
        depth = None
    replica.record_queue(depth.waiting_inputs if depth else 0)


async def _probe_work(replica: Replica, capabilities: Capabilities) -> None:
    """Ask the replica for one token's worth of work.

    Raises: BackendError, unless the replica completes it or is busy with other work.
    """
    work = smallest_work(capabilities, PROBE_TEXT)
    if work is None:
        return
    try:
        await replica.backend.run(work, PROBE_TIMEOUT_S)
    except (ReplicaOverloaded, InvalidWork, UnsupportedWork):
        # A refusal is a response too.
        return


async def follow_model_state(
    pool: Pool, replica: Replica, backend: ReportsResidence, space: VectorSpace, observe: Observe
) -> None:
    """Ask the engine every `POLL_EVERY_S`; runs until cancelled. backend: the replica's."""
    while True:
        try:
            residence = await backend.residence(PROBE_TIMEOUT_S)
            observe(changes_since(pool.upstream, replica.residence, residence))
            replica.record_residence(residence)
            if residence.state == "loaded":
                await _check_loaded_model(pool, replica, space)
        except BackendError:
            # The prober detects an engine that does not respond. Its last report is valid until it responds
            # again.
            pass
        await asyncio.sleep(POLL_EVERY_S)


def changes_since(upstream: str, before: Residence | None, now: Residence) -> ModelStateReported:
    """Return the event for a report, with the counts since the one before. Pure.

    Without a report before it, nothing is known to have happened.
    """
    if before is None:
        return ModelStateReported(upstream, now.state == "loaded", now.memory_bytes)
    base = before
    if now.loads < before.loads or now.failed_loads < before.failed_loads:
        # Another process counts from zero.
        base = Residence("unloaded")
    return ModelStateReported(
        upstream,
        now.state == "loaded",
        now.memory_bytes,
        now.loads - base.loads,
        now.failed_loads - base.failed_loads,
        _increments(base.unloads, now.unloads),
        now.out_of_memory - base.out_of_memory,
    )


def _reason_of(error: BackendError) -> KeptOut | None:
    """Return why a replica that cannot join is kept out, None if the failure itself does not show it."""
    match error:
        case CredentialMissing():
            return "credentials"
        case CredentialRefused():
            return "key"
        case ProxyRefused():
            return "proxy"
        case ModelNotServed():
            return "absent"
        case ReplicaFailed() if error.upstream_status in {"404", "405"}:
            return "absent"
    return None


def _increments(
    before: Mapping[UnloadReason, int], now: Mapping[UnloadReason, int]
) -> dict[UnloadReason, int]:
    return {
        reason: count - before.get(reason, 0)
        for reason, count in now.items()
        if count > before.get(reason, 0)
    }


async def _check_loaded_model(pool: Pool, replica: Replica, space: VectorSpace) -> None:
    """Describe a model again and check its vectors, the first time it is loaded. Raises: BackendError."""
    described = replica.capabilities
    if described is None or described.loaded or replica.state not in USABLE:
        return
    capabilities = await replica.backend.describe(PROBE_TIMEOUT_S)
    if capabilities.loaded:
        await space.check(replica.name, replica.backend, capabilities)
        replica.record_space(space.dimensions_of(replica.name), is_foreign=replica.is_foreign)
        pool.update_capabilities(replica, capabilities)
