"""Asks replicas that are not up whether they are; the one place where a replica joins."""

import asyncio

import msgspec

from backends.errors import BackendError
from gateway.routing.health import Happened, State
from gateway.routing.pool import Pool, Replica

PROBE_TIMEOUT_S = 5.0


class Waits(msgspec.Struct, frozen=True):
    """How long between probes: first_s doubles with every miss up to longest_s.

    patient: a replica that was never there is still coming, as an engine that loads is.
    """

    first_s: float
    longest_s: float
    patient: bool = False


async def keep_joining(pool: Pool, replica: Replica, waits: Waits) -> None:
    """Try until the replica has joined, and again whenever it is down. Runs until cancelled."""
    wait_s = waits.first_s
    while True:
        if replica.state is not State.UP and await _joins(pool, replica, patient=waits.patient):
            wait_s = waits.first_s
        await asyncio.sleep(wait_s)
        if replica.state is not State.UP:
            wait_s = min(wait_s * 2, waits.longest_s)


async def _joins(pool: Pool, replica: Replica, *, patient: bool) -> bool:
    try:
        told = await replica.backend.describe(PROBE_TIMEOUT_S)
    except BackendError as error:
        # An engine that is still loading has not failed to join: it is not there yet.
        if not (patient and replica.state is State.JOINING):
            pool.learn(replica, Happened.JOIN_FAILED, error.message)
        return False
    pool.learn(replica, Happened.JOINED, f"{told.model_id} {told.dtype or ''}".strip(), told)
    return True
