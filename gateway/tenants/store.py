"""Keys and tenants that gateways share, in Redis: digests and what they are for, never a key itself.

Rule: every change raises the version, so that each gateway can tell by one small read whether to look.
"""

import asyncio
import time

import msgspec

from gateway import config
from gateway.quotas.redis_door import RedisDoor, StoreAway
from gateway.tenants.keyring import Keyring, StoredKey

KEYS = "gw:keys"
TENANTS = "gw:tenants"
VERSION = "gw:tenants:version"
# A revoked key is dead everywhere within a second: two looks.
LOOK_EVERY_S = 0.4


class TenantStore:
    """All operations raise StoreAway where Redis does not answer."""

    def __init__(self, door: RedisDoor) -> None:
        self._door = door

    async def put(self, key: StoredKey) -> None:
        """Add a key, or replace the one of the same id."""
        await self._door.ask("HSET", KEYS, key.id, msgspec.json.encode(key))
        await self._door.ask("INCR", VERSION)

    async def revoke(self, id_: str) -> bool:
        """Remove a key; False where there is none of that id."""
        removed = int(await self._door.ask("HDEL", KEYS, id_))
        await self._door.ask("INCR", VERSION)
        return removed > 0

    async def keys(self) -> list[StoredKey]:
        """Every key, by id."""
        told = await self._door.ask("HGETALL", KEYS)
        keys = [msgspec.json.decode(value, type=StoredKey) for value in told.values()]
        return sorted(keys, key=lambda key: key.id)

    async def put_tenant(self, name: str, settings: config.Tenant) -> None:
        """Add a tenant, or replace what stands of it."""
        await self._door.ask("HSET", TENANTS, name, msgspec.json.encode(settings))
        await self._door.ask("INCR", VERSION)

    async def remove_tenant(self, name: str) -> bool:
        """Remove a tenant, and its keys, which would have no limits then; False where there is none."""
        for key in await self.keys():
            if key.tenant == name:
                await self._door.ask("HDEL", KEYS, key.id)
        removed = int(await self._door.ask("HDEL", TENANTS, name))
        await self._door.ask("INCR", VERSION)
        return removed > 0

    async def tenants(self) -> dict[str, config.Tenant]:
        """Every tenant, by name."""
        told = await self._door.ask("HGETALL", TENANTS)
        tenants = {
            _text(name): msgspec.json.decode(value, type=config.Tenant) for name, value in told.items()
        }
        return dict(sorted(tenants.items()))

    async def version(self) -> int:
        """A number that every change raises; 0 where there never was one."""
        return int(await self._door.ask("GET", VERSION) or 0)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._door.aclose()


async def keep_up_to_date(keyring: Keyring, store: TenantStore, grace_s: float) -> None:
    """Follow the store's changes; runs until cancelled.

    While the store is away, what was known stays known for grace_s, and is forgotten then.
    """
    seen: int | None = None
    last_s = time.monotonic()
    while True:
        try:
            version = await store.version()
            # A store that was emptied begins to count anew.
            if version != seen:
                keyring.replace_stored(await store.keys(), await store.tenants())
                seen = version
            last_s = time.monotonic()
        except StoreAway:
            if seen is not None and time.monotonic() - last_s > grace_s:
                keyring.replace_stored(())
                seen = None
        await asyncio.sleep(LOOK_EVERY_S)


def _text(name: bytes | str) -> str:
    return name.decode() if isinstance(name, bytes) else name
