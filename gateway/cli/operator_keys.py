"""Warning about a gateway with tenants whose /admin no key can use."""

import asyncio
import logging
import time
from collections.abc import Collection, Iterator

from gateway.config.schema import Config, Key, host_and_port, is_loopback
from gateway.store.errors import StoreUnavailable
from gateway.store.redis_client import RedisClient
from gateway.tenants.keyring import StoredKey
from gateway.tenants.store import TenantStore

NO_OPERATOR_KEY = (
    "there are tenants and no key with the scope admin, therefore /admin refuses every request; "
    "run: gateway keys create TENANT --scope admin"
)
STORE_TIMEOUT_S = 5.0

logger = logging.getLogger("gateway")


def needs_operator_key(config: Config) -> bool:
    """Return True if /admin needs a key, and the file has no key and no users of an issuer for it."""
    if not config.admin.keys and all(
        is_loopback(host_and_port(address)[0]) for address in _addresses(config)
    ):
        return False
    has_own = any(isinstance(key, str) or "admin" in (key.scopes or ("admin",)) for key in config.admin.keys)
    tables = (issuer.claims.scopes for issuer in config.sign_on.values())
    has_users = any(
        "admin" in scopes for table in tables if table for scopes in (table.values or {}).values()
    )
    tenants_keys = (key for tenant in config.tenants.values() for key in tenant.keys)
    return not (has_own or has_users) and not any(
        isinstance(key, Key) and "admin" in (key.scopes or ()) for key in tenants_keys
    )


def warn_of_missing_operator_key(config: Config) -> None:
    """Log a warning if no key of the file or of Redis can use /admin. Called once the first key has ended."""
    if not needs_operator_key(config):
        return
    if config.quotas.store != "memory":
        try:
            if asyncio.run(_has_operator_key(config.quotas.store, config.tenants)):
                return
        except StoreUnavailable:
            # The start has reported it already, and the keys in Redis may include one.
            return
    logger.warning(NO_OPERATOR_KEY)


async def _has_operator_key(url: str, file_tenants: Collection[str]) -> bool:
    """Return True if Redis has a valid key with the scope admin. Raises: StoreUnavailable."""
    store = TenantStore(RedisClient(url, STORE_TIMEOUT_S))
    try:
        tenants = {*file_tenants, *await store.tenants()}
        return any(key.tenant in tenants and _is_operator_key(key) for key in await store.keys())
    finally:
        await store.aclose()


def _is_operator_key(key: StoredKey) -> bool:
    is_expired = key.expires_s is not None and key.expires_s <= time.time()
    return "admin" in (key.scopes or ()) and not is_expired


def _addresses(config: Config) -> Iterator[str]:
    """Yield the addresses that serve /admin."""
    yield config.admin.listen or config.listen
    if config.manager is not None:
        yield config.manager.listen
