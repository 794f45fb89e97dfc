"""Asks replicas how they are; the one place where a replica joins.

Those that are not up are asked whether they are; those that are quiet, whether they are still there; those
that hold work and give nothing back, to do one token's worth of it. Who joins or comes back, or has become
another model, embeds the canaries.
"""

import asyncio
from collections.abc import Callable

import msgspec

from backends.contract import Capabilities, Embed, Operation, ReportsQueueDepth, Rerank, Work
from backends.errors import (
    AttemptTimedOut,
    BackendError,
    ConnectionLost,
    InvalidWork,
    ReplicaOverloaded,
    ReplicaUnavailable,
    UnsupportedWork,
)
from gateway.routing.health import USABLE, ReplicaEvent, State
from gateway.routing.pool import Pool, Replica
from gateway.vector_spaces.space import VectorSpace

PROBE_TIMEOUT_S = 5.0
# How often a replica that is up is looked at, and after how long without work it is asked.
LOOK_EVERY_S = 1.0
QUIET_S = 5.0
# Something short in every language's vocabulary.
WORD = "ok"


class Waits(msgspec.Struct, frozen=True):
    """How long between probes: first_s doubles with every miss up to longest_s.

    patient: a replica that was never there is still coming, as an engine that loads is. stalled_s: the
    longest that work may be out before a replica of which nothing is known is asked; None never asks.
    """

    first_s: float
    longest_s: float
    patient: bool = False
    stalled_s: float | None = None


async def keep_watching(
    pool: Pool, replica: Replica, waits: Waits, clock: Callable[[], float], space: VectorSpace | None = None
) -> None:
    """Try until the replica has joined, again whenever it is down, and look after it while it is up.

    space: what its vectors are held against.
    """
    wait_s = waits.first_s
    quiet_s = clock()
    while True:
        if replica.state in USABLE:
            wait_s = waits.first_s
            await asyncio.sleep(min(LOOK_EVERY_S, waits.longest_s))
            quiet_s = await _look_after(pool, replica, waits, quiet_s, clock, space)
            _leave_if_astray(pool, replica, space)
            continue
        if await _joins(pool, replica, space, patient=waits.patient):
            quiet_s = clock()
            continue
        await asyncio.sleep(wait_s)
        wait_s = min(wait_s * 2, waits.longest_s)


async def _joins(pool: Pool, replica: Replica, space: VectorSpace | None, *, patient: bool) -> bool:
    try:
        told = await replica.backend.describe(PROBE_TIMEOUT_S)
        # Work would load a model that nobody has asked for.
        if told.loaded:
            if replica.state is State.DOWN:
                # It has failed before: that it answers is not enough.
                await _work_a_little(replica, told)
            await _check_space(replica, told, space)
    except BackendError as error:
        # An engine that is still loading has not failed to join: it is not there yet.
        if not (patient and replica.state is State.JOINING):
            pool.transition(replica, ReplicaEvent.JOIN_FAILED, error.message)
        return False
    if space is not None and _stays_out(pool, replica, space):
        pool.transition(replica, ReplicaEvent.STRAYED, space.mismatch_reason(replica.name))
        return False
    pool.transition(replica, ReplicaEvent.JOINED, _told(told), told)
    return True


async def _check_space(replica: Replica, told: Capabilities, space: VectorSpace | None) -> None:
    """Raises: BackendError."""
    if space is not None:
        replica.is_foreign = not await space.check(replica.name, replica.backend, told)
        replica.width = space.dimensions_of(replica.name)


def _stays_out(pool: Pool, replica: Replica, space: VectorSpace) -> bool:
    """Whether it gives other vectors and is not needed: one that was in use stays, where it is the last."""
    if not (replica.is_foreign and space.refuses):
        return False
    return replica.capabilities is None or not pool.only_usable(replica)


def _leave_if_astray(pool: Pool, replica: Replica, space: VectorSpace | None) -> None:
    """What its vectors are held against may have changed too."""
    if space is None:
        return
    replica.is_foreign = space.is_foreign(replica.name)
    if replica.state in USABLE and _stays_out(pool, replica, space):
        pool.transition(replica, ReplicaEvent.STRAYED, space.mismatch_reason(replica.name))


def _told(told: Capabilities) -> str:
    """What it faces and what it learnt of it, on one line."""
    return ", ".join(filter(None, (told.model_id, told.dtype, told.version, *told.notes)))


async def _look_after(
    pool: Pool,
    replica: Replica,
    waits: Waits,
    quiet_since_s: float,
    clock: Callable[[], float],
    space: VectorSpace | None,
) -> float:
    """Probe a replica that is suspiciously silent, or has had nothing to do; since when it is quiet."""
    if waits.stalled_s is None:
        return quiet_since_s
    if len(pool.replicas) > 1:
        # It only helps to choose between several.
        await _ask_load(replica)
    now_s = clock()
    if replica.batches:
        if replica.silent(now_s, waits.stalled_s) and replica.capabilities is not None:
            await _question(pool, replica, replica.capabilities)
        return now_s
    if now_s - quiet_since_s < QUIET_S:
        return quiet_since_s
    await _ask_who_it_is(pool, replica, space)
    return now_s


async def _ask_who_it_is(pool: Pool, replica: Replica, space: VectorSpace | None) -> None:
    try:
        told = await replica.backend.describe(PROBE_TIMEOUT_S)
        if replica.capabilities is not None and _model_of(told) != _model_of(replica.capabilities):
            await _check_space(replica, told, space)
            pool.describe_anew(replica, told)
    except (ReplicaUnavailable, ConnectionLost, AttemptTimedOut) as error:
        pool.transition(replica, ReplicaEvent.UNREACHED, error.message)
    except BackendError:
        # It is there; what it cannot say of itself now, it has said when it joined.
        return


def _model_of(told: Capabilities) -> tuple[str | None, ...]:
    return told.model_id, told.revision, told.dtype, told.pooling, told.version


async def _ask_load(replica: Replica) -> None:
    """How much waits inside it, where it tells: others than this gateway may send to it."""
    if not isinstance(replica.backend, ReportsQueueDepth):
        return
    try:
        load = await replica.backend.queue_depth(PROBE_TIMEOUT_S)
    except BackendError:
        load = None
    replica.waiting_inputs = load.waiting_inputs if load else 0


async def _question(pool: Pool, replica: Replica, told: Capabilities) -> None:
    try:
        await _work_a_little(replica, told)
    except BackendError as error:
        pool.transition(replica, ReplicaEvent.STALLED, f"work is out and nothing comes back: {error.message}")


async def _work_a_little(replica: Replica, told: Capabilities) -> None:
    """Raises: BackendError, unless the replica can do one token's worth of work, or is busy with more."""
    work = _smallest(told)
    if work is None:
        return
    try:
        await replica.backend.run(work, PROBE_TIMEOUT_S)
    except (ReplicaOverloaded, InvalidWork, UnsupportedWork):
        # It answered: it is there.
        return


def _smallest(told: Capabilities) -> Work | None:
    if Operation.EMBED in told.operations:
        return Embed((WORD,))
    return Rerank(WORD, (WORD,)) if Operation.RERANK in told.operations else None
