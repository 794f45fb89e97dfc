"""Memory of the shared Redis and its bound, read at a slow pace."""

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

from gateway.store.errors import StoreUnavailable
from gateway.store.redis_client import RedisClient

READ_EVERY_S = 30.0


class StoreMemory:
    """Memory of a store as it was last read.

    use: bytes in use and `maxmemory` of the server that is nearest to its bound; 0 for what is not known.
    Some hosted servers refuse to report it.
    """

    def __init__(self, client: RedisClient) -> None:
        self.use = 0, 0
        self._client = client

    async def follow(self) -> None:
        """Read it every `READ_EVERY_S`, until cancelled."""
        while True:
            try:
                self.use = fullest(await self._client.memory())
            except StoreUnavailable:
                self.use = 0, 0
            await asyncio.sleep(READ_EVERY_S)


def fullest(reports: Iterable[Mapping[str, Any]]) -> tuple[int, int]:
    """Return the memory of the server that is nearest to its bound. reports: of INFO, one for each server."""
    uses = [(int(report.get("used_memory", 0)), int(report.get("maxmemory", 0))) for report in reports]
    return max(uses, key=lambda use: (use[0] / use[1] if use[1] else 0.0, use[0]), default=(0, 0))
