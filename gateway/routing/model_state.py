"""Follows whether an engine's model is in memory; where one that joined unloaded is held against its space.

An engine tells of a model before it has loaded it, from its small files. What is known of it is made true,
and its canaries are embedded, once it has been loaded because somebody asked for it.
"""

import asyncio
from collections.abc import Mapping

from backends.contract import ReportsResidence, Residence, UnloadReason
from backends.errors import BackendError
from gateway.events import ModelStateReported, Observe
from gateway.routing.health import USABLE
from gateway.routing.pool import Pool, Replica
from gateway.vector_spaces.space import VectorSpace

LOOK_EVERY_S = 1.0
TIMEOUT_S = 5.0


async def keep_following(
    pool: Pool, replica: Replica, backend: ReportsResidence, space: VectorSpace, observe: Observe
) -> None:
    """Ask every LOOK_EVERY_S; runs until cancelled. backend: the replica's."""
    while True:
        try:
            told = await backend.residence(TIMEOUT_S)
            observe(change(pool.upstream, replica.residence, told))
            replica.residence = told
            if told.state == "loaded":
                await _know(pool, replica, space)
        except BackendError:
            # The prober learns that an engine is away; what it said last stands until it is back.
            pass
        await asyncio.sleep(LOOK_EVERY_S)


def change(upstream: str, before: Residence | None, now: Residence) -> ModelStateReported:
    """What has happened since; nothing is known to have where there was nothing to compare with. Pure."""
    if before is None:
        return ModelStateReported(upstream, now.state == "loaded", now.memory_bytes)
    began = before
    if now.loads < before.loads or now.failed_loads < before.failed_loads:
        # Another process counts from the beginning.
        began = Residence("unloaded")
    return ModelStateReported(
        upstream,
        now.state == "loaded",
        now.memory_bytes,
        now.loads - began.loads,
        now.failed_loads - began.failed_loads,
        _more(began.unloads, now.unloads),
        now.out_of_memory - began.out_of_memory,
    )


def _more(before: Mapping[UnloadReason, int], now: Mapping[UnloadReason, int]) -> dict[UnloadReason, int]:
    return {why: count - before.get(why, 0) for why, count in now.items() if count > before.get(why, 0)}


async def _know(pool: Pool, replica: Replica, space: VectorSpace) -> None:
    """Make what is known of a model true, the first time it is there. Raises: BackendError."""
    known = replica.capabilities
    if known is None or known.loaded or replica.state not in USABLE:
        return
    told = await replica.backend.describe(TIMEOUT_S)
    if told.loaded:
        await space.check(replica.name, replica.backend, told)
        replica.width = space.dimensions_of(replica.name)
        pool.describe_anew(replica, told)
