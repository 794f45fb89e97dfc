"""Keys and tenants that gateways share, in Redis: digests and their settings, never a key itself.

Rule: every change writes a new random version in the same step. By that one small read each gateway sees if
anything has changed, even if the store was emptied or restored from an older copy.
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
# Index of each hash in the KEYS of change.lua.
HASH_INDEX = {KEYS: 1, TENANTS: 2}
# A revoked key is refused everywhere within a second: two polls.
LOOK_EVERY_S = 0.4
# Replaces a tenant that cannot be read: without it, its keys would have no limits. They may use no model.
UNREADABLE = config.TenantConfig(models=())

logger = logging.getLogger("gateway")


class TenantStore:
    """Store of keys and tenants. All operations raise StoreUnavailable if Redis does not reply."""

    def __init__(self, client: RedisClient) -> None:
        self._client = client

    async def put(self, key: StoredKey) -> None:
        """Add a key, or replace the key of the same id."""
        await self._change(put=(HASH_INDEX[KEYS], key.id, msgspec.json.encode(key).decode()))

    async def revoke(self, id_: str) -> bool:
        """Remove a key; return False if there is none of that id."""
        return await self._change(remove=(HASH_INDEX[KEYS], id_)) > 0

    async def keys(self) -> list[StoredKey]:
        """Return every key, by id. A key that cannot be read is logged and left out."""
        fields = await self._client.execute("HGETALL", KEYS)
        keys = [_read_key(_text(id_), value) for id_, value in fields.items()]
        return sorted((key for key in keys if key is not None), key=lambda key: key.id)

    async def has_key(self, id_: str) -> bool:
        """Return True if a key of that id can be read."""
        return any(key.id == id_ for key in await self.keys())

    async def put_tenant(self, name: str, settings: config.TenantConfig) -> None:
        """Add a tenant, or replace its settings."""
        await self._change(put=(HASH_INDEX[TENANTS], name, msgspec.json.encode(settings).decode()))

    async def remove_tenant(self, name: str) -> bool:
        """Remove a tenant with its keys, which would have no limits without it.

        Return False if neither exists.
        """
        remove: list[int | str] = [HASH_INDEX[TENANTS], name]
        for key in await self.keys():
            if key.tenant == name:
                remove += (HASH_INDEX[KEYS], key.id)
        return await self._change(remove=remove) > 0

    async def tenants(self) -> dict[str, config.TenantConfig]:
        """Return every tenant, by name. A tenant that cannot be read may use no model."""
        fields = await self._client.execute("HGETALL", TENANTS)
        tenants = {_text(name): _read_tenant(_text(name), value) for name, value in fields.items()}
        return dict(sorted(tenants.items()))

    async def holds_any(self) -> bool:
        """Return True if there is any tenant or key, readable or not."""
        return any([await self._client.execute("HLEN", name) for name in (KEYS, TENANTS)])

    async def version(self) -> bytes:
        """Return the version, which every change replaces; empty before the first change."""
        return bytes(await self._client.execute("GET", VERSION) or b"")

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _change(self, put: Sequence[int | str] = (), remove: Sequence[int | str] = ()) -> int:
        """Apply a change and return the number of removed fields. put, remove: as change.lua reads them."""
        argument = {"version": secrets.token_hex(8), "put": put, "remove": remove}
        keys = (KEYS, TENANTS, VERSION)
        removed = await self._client.run_script(CHANGE, keys, msgspec.msgpack.encode(argument))
        return msgspec.msgpack.decode(removed, type=int)


async def keep_up_to_date(keyring: Keyring, store: TenantStore, grace_s: float) -> None:
    """Follow the store's changes until cancelled.

    While the store is down, the stored keys stay valid for grace_s, and are forgotten then.
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


def _read_key(id_: str, value: bytes) -> StoredKey | None:
    try:
        key = msgspec.json.decode(value, type=StoredKey)
        _check_limits(key.limits)
    except ValueError as error:
        logger.warning("the key %r in Redis cannot be read and is not known: %s", id_, error)
        return None
    return key


def _read_tenant(name: str, value: bytes) -> config.TenantConfig:
    try:
        fields = msgspec.json.decode(value, type=dict[str, Any])
        # A newer release may have written fields that this one does not know.
        supported = {
            field: fields[field] for field in config.TenantConfig.__struct_fields__ if field in fields
        }
        tenant = msgspec.convert(supported, config.TenantConfig)
        for limits in (tenant.limits, *tenant.model_limits.values()):
            _check_limits(limits)
    except ValueError as error:
        logger.warning("the tenant %r in Redis cannot be read and may use no model: %s", name, error)
        return UNREADABLE
    return tenant


def _check_limits(limits: dict[str, int]) -> None:
    """Check the names of limits. Raises: ValueError."""
    for name, problem in limit_problems(limits).items():
        raise ValueError(f"{name}: {problem}")
