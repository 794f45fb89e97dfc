"""Permits for concurrent work, of one worker and of each tenant in it."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Permits:
    """Bounded number of holders, of whom each tenant is only some. Tenants that hold none take no memory."""

    def __init__(self, total: int, per_tenant: int) -> None:
        self._total = asyncio.Semaphore(total)
        self._per_tenant = per_tenant
        self._tenants: dict[str, asyncio.Semaphore] = {}
        self._users: Counter[str] = Counter()

    @asynccontextmanager
    async def hold(self, tenant: str) -> AsyncIterator[None]:
        """Wait for a permit and hold it; the caller bounds the wait."""
        own = self._tenants.setdefault(tenant, asyncio.Semaphore(self._per_tenant))
        self._users[tenant] += 1
        try:
            # The tenant's permit first: its waiting requests take no permits from others.
            async with own, self._total:
                yield
        finally:
            self._users[tenant] -= 1
            if not self._users[tenant]:
                del self._users[tenant], self._tenants[tenant]

    def __len__(self) -> int:
        """Return the number of tenants that hold or wait."""
        return len(self._tenants)
