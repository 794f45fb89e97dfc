"""Keys and tenants that gateways share, in Redis: digests and what they are for, never a key itself.

Rule: every change gives a version that never was before, in the same step, so that each gateway can tell by
one small read whether to look; also where the store was emptied, or is an older copy of itself.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.config import schema as config
from gateway.config.schema import limit_problems
from gateway.store.errors import StoreUnavailable
from gateway.store.redis_client import RedisClient
from gateway.store.scripts import load_script
from gateway.tenants.keyring import Keyring, StoredKey

# Under one hash tag: a script changes them together.
KEYS = "gw:{store}:keys"
TENANTS = "gw:{store}:tenants"
VERSION = "gw:{store}:version"
CHANGE = load_script("change", package="gateway.tenants")
# Where change.lua is given each of them.
PLACES = {KEYS: 1, TENANTS: 2}
# A revoked key is dead everywhere within a second: two looks.
LOOK_EVERY_S = 0.4
# Stands for a tenant that cannot be read: its keys, which would have no limits then, may use no model.
UNREADABLE = config.TenantConfig(models=())

logger = logging.getLogger("gateway")


class TenantStore:
    """All operations raise StoreUnavailable where Redis does not answer."""

    def __init__(self, door: RedisClient) -> None:
        self._door = door

    async def put(self, key: StoredKey) -> None:
        """Add a key, or replace the one of the same id."""
        await self._change(put=(PLACES[KEYS], key.id, msgspec.json.encode(key).decode()))

    async def revoke(self, id_: str) -> bool:
        """Remove a key; False where there is none of that id."""
        return await self._change(remove=(PLACES[KEYS], id_)) > 0

    async def keys(self) -> list[StoredKey]:
        """Every key, by id; without those that cannot be read, which the log names."""
        told = await self._door.execute("HGETALL", KEYS)
        keys = [_key(_text(id_), value) for id_, value in told.items()]
        return sorted((key for key in keys if key is not None), key=lambda key: key.id)

    async def put_tenant(self, name: str, settings: config.TenantConfig) -> None:
        """Add a tenant, or replace what stands of it."""
        await self._change(put=(PLACES[TENANTS], name, msgspec.json.encode(settings).decode()))

    async def remove_tenant(self, name: str) -> bool:
        """Remove a tenant, and its keys, which would have no limits then; False where neither is there."""
        remove: list[int | str] = [PLACES[TENANTS], name]
        for key in await self.keys():
            if key.tenant == name:
                remove += (PLACES[KEYS], key.id)
        return await self._change(remove=remove) > 0

    async def tenants(self) -> dict[str, config.TenantConfig]:
        """Every tenant, by name; one that cannot be read may use no model."""
        told = await self._door.execute("HGETALL", TENANTS)
        tenants = {_text(name): _tenant(_text(name), value) for name, value in told.items()}
        return dict(sorted(tenants.items()))

    async def holds_any(self) -> bool:
        """Whether a tenant or a key stands here, readable or not."""
        return any([await self._door.execute("HLEN", name) for name in (KEYS, TENANTS)])

    async def version(self) -> bytes:
        """What every change changes; empty where there never was one."""
        return bytes(await self._door.execute("GET", VERSION) or b"")

    async def aclose(self) -> None:
        """Close the connections."""
        await self._door.aclose()

    async def _change(self, put: Sequence[int | str] = (), remove: Sequence[int | str] = ()) -> int:
        """How many fields were removed. put, remove: as change.lua reads them."""
        argument = {"version": secrets.token_hex(8), "put": put, "remove": remove}
        removed = await self._door.run_script(
            CHANGE, (KEYS, TENANTS, VERSION), msgspec.msgpack.encode(argument)
        )
        return msgspec.msgpack.decode(removed, type=int)


async def keep_up_to_date(keyring: Keyring, store: TenantStore, grace_s: float) -> None:
    """Follow the store's changes; runs until cancelled.

    While the store is away, what was known stays known for grace_s, and is forgotten then.
    """
    seen: bytes | None = None
    last_s = time.monotonic()
    while True:
        try:
            version = await store.version()
            if keyring.first_key_pending:
                keyring.resolve_first_key(is_active=not await store.holds_any())
            if version != seen:
                keyring.replace_stored(await store.keys(), await store.tenants())
                seen = version
            last_s = time.monotonic()
        except StoreUnavailable:
            if seen is not None and time.monotonic() - last_s > grace_s:
                keyring.forget_stored()
                seen = None
        await asyncio.sleep(LOOK_EVERY_S)


def _text(name: bytes) -> str:
    return name.decode(errors="replace")


def _key(id_: str, value: bytes) -> StoredKey | None:
    try:
        key = msgspec.json.decode(value, type=StoredKey)
        _check_limits(key.limits)
    except ValueError as error:
        logger.warning("the key %r in Redis cannot be read and is not known: %s", id_, error)
        return None
    return key


def _tenant(name: str, value: bytes) -> config.TenantConfig:
    try:
        told = msgspec.json.decode(value, type=dict[str, Any])
        # A newer release may have written more than this one knows.
        known = {field: told[field] for field in config.TenantConfig.__struct_fields__ if field in told}
        tenant = msgspec.convert(known, config.TenantConfig)
        for limits in (tenant.limits, *tenant.model_limits.values()):
            _check_limits(limits)
    except ValueError as error:
        logger.warning("the tenant %r in Redis cannot be read and may use no model: %s", name, error)
        return UNREADABLE
    return tenant


def _check_limits(limits: dict[str, int]) -> None:
    """Raises: ValueError where a limit has no name of one."""
    for name, problem in limit_problems(limits).items():
        raise ValueError(f"{name}: {problem}")
