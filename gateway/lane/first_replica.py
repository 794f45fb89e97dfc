"""Calls that wait for the first replica of an upstream to join."""

import asyncio

from gateway.errors import LOADING_RETRY_S, ModelLoading
from gateway.routing.pool import Pool, is_replica_expected, no_replica_error


class FirstReplicaWait:
    """Waiters for the upstream's capabilities. holds: as in `LaneSettings`."""

    def __init__(self, pool: Pool, *, holds: bool) -> None:
        self._pool = pool
        self._holds = holds
        self._waiters: list[asyncio.Future[None]] = []

    def __len__(self) -> int:
        return len(self._waiters)

    async def wait(self, deadline_s: float) -> None:
        """Wait until a replica has reported its capabilities.

        Raises: ModelLoading, NoReplica.
        """
        if self._pool.capabilities() is not None:
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        self.wake()
        try:
            async with asyncio.timeout_at(deadline_s):
                await waiter
        except TimeoutError as error:
            raise ModelLoading("the model is still loading", retry_after_s=LOADING_RETRY_S) from error
        finally:
            self._waiters.remove(waiter)
        if self._pool.capabilities() is None:
            raise no_replica_error(self._pool)

    def wake(self) -> None:
        """Wake all waiters if a replica has joined, or if none is expected any more."""
        if not self._waiters:
            return
        if self._pool.capabilities() is None and is_replica_expected(self._pool, holds=self._holds):
            return
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
