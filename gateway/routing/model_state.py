"""Follows whether an engine's model is in memory, and checks the vectors of one that joined unloaded.

An engine describes a model before it has loaded it, from the checkpoint's small files. Once a caller's work
has loaded the model, its description is read again and its canaries are embedded.
"""

import asyncio
from collections.abc import Mapping

from backends.contract import ReportsResidence, Residence, UnloadReason
from backends.contract.errors import BackendError
from gateway.events import ModelStateReported, Observe
from gateway.routing.health import USABLE
from gateway.routing.pool import Pool
from gateway.routing.replica import Replica
from gateway.routing.space_check import SpaceCheck

POLL_EVERY_S = 1.0
TIMEOUT_S = 5.0


async def follow_model_state(
    pool: Pool, replica: Replica, backend: ReportsResidence, space: SpaceCheck, observe: Observe
) -> None:
    """Ask the engine every `POLL_EVERY_S`; runs until cancelled. backend: the replica's."""
    while True:
        try:
            residence = await backend.residence(TIMEOUT_S)
            observe(changes_since(pool.upstream, replica.residence, residence))
            replica.residence = residence
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


def _increments(
    before: Mapping[UnloadReason, int], now: Mapping[UnloadReason, int]
) -> dict[UnloadReason, int]:
    return {
        reason: count - before.get(reason, 0)
        for reason, count in now.items()
        if count > before.get(reason, 0)
    }


async def _check_loaded_model(pool: Pool, replica: Replica, space: SpaceCheck) -> None:
    """Describe a model again and check its vectors, the first time it is loaded. Raises: BackendError."""
    described = replica.capabilities
    if described is None or described.loaded or replica.state not in USABLE:
        return
    capabilities = await replica.backend.describe(TIMEOUT_S)
    if capabilities.loaded:
        await space.check(replica.name, replica.backend, capabilities)
        replica.width = space.dimensions_of(replica.name)
        pool.update_capabilities(replica, capabilities)
