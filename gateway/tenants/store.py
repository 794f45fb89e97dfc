"""Keys that gateways share, in Redis: digests and what they are for, never a key itself.

Rule: every change raises the version, so that each gateway can tell by one small read whether to look.
"""

import asyncio
import time

import msgspec

from gateway.quotas.redis_door import RedisDoor, StoreAway
from gateway.tenants.keyring import Keyring, StoredKey

KEYS = "gw:keys"
VERSION = "gw:keys:version"
# A revoked key is dead everywhere within a second: two looks.
LOOK_EVERY_S = 0.4


class KeyStore:
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

    async def all(self) -> list[StoredKey]:
        """Every key, by id."""
        told = await self._door.ask("HGETALL", KEYS)
        keys = [msgspec.json.decode(value, type=StoredKey) for value in told.values()]
        return sorted(keys, key=lambda key: key.id)

    async def version(self) -> int:
        """A number that every change raises; 0 where there never was one."""
        return int(await self._door.ask("GET", VERSION) or 0)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._door.aclose()


async def keep_up_to_date(keyring: Keyring, store: KeyStore, grace_s: float) -> None:
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
                keyring.replace_stored(await store.all())
                seen = version
            last_s = time.monotonic()
        except StoreAway:
            if seen is not None and time.monotonic() - last_s > grace_s:
                keyring.replace_stored(())
                seen = None
        await asyncio.sleep(LOOK_EVERY_S)
