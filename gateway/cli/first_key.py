"""The first key, which is valid while there is no tenant: from the environment, from its file, or created.

There is no open mode. Gateways on one Redis agree on one first key by its digest, which is stored there. Its
text is in the `state_dir` of the gateway that created it. Once there are tenants it ends, and a gateway warns
if no key can use /admin.
"""

import asyncio
import logging
import shlex
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from gateway.config.notes import NO_KEYS, lacks_keys
from gateway.config.schema import Config, Key, host_and_port, is_loopback
from gateway.config.state_folder import state_folder
from gateway.store.errors import StoreUnavailable
from gateway.store.redis_client import RedisClient
from gateway.tenants.create_key import random_key
from gateway.tenants.file_store import FILE_NAME as TENANTS_FILE
from gateway.tenants.file_store import FileTenantStore
from gateway.tenants.first_key_file import FILE_NAME, FirstKeyFileError, keep_first_key, read_first_key
from gateway.tenants.keyring import StoredKey, key_digest
from gateway.tenants.snapshot import FILE_NAME as SNAPSHOT_FILE
from gateway.tenants.snapshot import SnapshotFile, loss_between, tenants_end_first_key
from gateway.tenants.store import FIRST_KEY, TenantStore

VARIABLE = "GATEWAY_API_KEY"
SETS_YOUR_OWN = f"{VARIABLE} sets your own"
STORE_TIMEOUT_S = 5.0
# Pause between two attempts to reach a store that was unavailable at start.
RETRY_S = 1.0
# Names in a line of the log.
PEOPLE_SHOWN = 5
NO_OPERATOR_KEY = (
    "there are tenants and no key with the scope admin, therefore /admin refuses every request; "
    "run: gateway keys create TENANT --scope admin"
)

logger = logging.getLogger("gateway")


class FirstKey(msgspec.Struct, frozen=True):
    """The first key as the banner shows it.

    digest: empty if the key is created once Redis, which is unavailable, has returned. shell_word: stands for
    the key in a shell command. note: where the key is. is_kept: its text is in a file of this gateway or of
    another one, so that all gateways of a store can agree on it. waits: it is not valid until Redis has
    reported that it contains no tenants.
    """

    digest: str
    shell_word: str
    note: str
    is_kept: bool = False
    waits: bool = False


class KeySources(msgspec.Struct, frozen=True):
    """Places of the first key. configured: from the environment. file: None if there is no folder for it.

    is_terminal: the banner is read by a person; otherwise it is part of a log, which shows no secret.
    tenants_file: of tenants and keys without Redis, None if there is no folder for it.
    """

    configured: str | None
    file: Path | None
    is_terminal: bool
    tenants_file: Path | None = None


def configured_key(environment: Mapping[str, str]) -> str | None:
    """Return the key in the environment, None without one. Raises: ValueError, without the key."""
    key = environment.get(VARIABLE, "").strip()
    if any(ord(letter) < ord(" ") or letter == "\x7f" for letter in key):
        raise ValueError(f"{VARIABLE} has a line break or another control character inside")
    return key or None


def key_sources(config: Config, environment: Mapping[str, str], *, is_terminal: bool) -> KeySources:
    """Return the places of a gateway's first key. Raises: ValueError if no caller could send it."""
    folder = state_folder(config.state_dir, environment)
    configured = configured_key(environment)
    if folder is None:
        return KeySources(configured, None, is_terminal)
    return KeySources(configured, folder / FILE_NAME, is_terminal, folder / TENANTS_FILE)


def first_key(config: Config, sources: KeySources) -> FirstKey | None:
    """Return the key that is used while there are no tenants, or None if there are any.

    If Redis is unavailable, none is created, because it might bypass tenants in Redis. A key that exists then
    waits until Redis has reported that it contains none.
    """
    if config.tenants:
        _log_ignored(sources, "there are tenants in router.yaml")
        return None
    try:
        if config.quotas.store == "memory":
            if _has_admin_key(sources):
                return None
            return _configured(sources) or _read(sources) or _create(sources)
        return asyncio.run(_agree(config.quotas.store, sources))
    except FirstKeyFileError as error:
        return _create_unkept(error)
    except StoreUnavailable as error:
        key = _configured(sources) or _read_usable(sources)
        effect = "the first key is refused" if key else "no first key is created"
        logger.warning("Redis is unavailable (%s): %s until it returns", error, effect)
        return msgspec.structs.replace(key or _missing(sources), waits=True)


async def create_first_key_later(url: str, sources: KeySources) -> None:
    """Create the first key once Redis, which was unavailable at start, has returned.

    Workers read its digest from Redis. The log names the key's place and never shows the key.
    """
    quiet = msgspec.structs.replace(sources, is_terminal=False)
    while True:
        try:
            key = await _agree(url, quiet)
        except StoreUnavailable:
            await asyncio.sleep(RETRY_S)
        except FirstKeyFileError as error:
            logger.warning("there is no first key: %s, or set %s; then restart the gateway", error, VARIABLE)
            return
        else:
            place = (
                "not needed: there are tenants in Redis, or were until a loss" if key is None else key.note
            )
            logger.info("Redis is available; the first key is %s", place)
            return


def _has_admin_key(sources: KeySources) -> bool:
    """Return whether the file of tenants has a key for /admin; one that cannot be read may have one."""
    if sources.tenants_file is None:
        return False
    try:
        has_key = asyncio.run(FileTenantStore(sources.tenants_file).has_admin_key())
    except StoreUnavailable as error:
        logger.warning("%s; its keys and the first key are refused", error)
        return True
    if has_key:
        place = f"{sources.tenants_file}, with a key that has the scope admin"
        _log_ignored(sources, f"there are tenants in {place}")
    return has_key


async def _agree(url: str, sources: KeySources) -> FirstKey | None:
    """Return the first key of all gateways on a store, None if it has tenants.

    Raises: StoreUnavailable; FirstKeyFileError if a key is needed that cannot be kept. A key whose text is
    lost at the exit must not be the key of later starts.
    """
    store = TenantStore(RedisClient(url, STORE_TIMEOUT_S))
    try:
        if await store.has_tenants():
            _log_ignored(sources, "there are tenants in Redis")
            return None
        if await _has_lost_tenants(store, url, sources):
            _log_ignored(sources, "Redis has lost its tenants, and only their removal revives it")
            return None
        if key := _configured(sources):
            return key
        created, agreed = None, await store.first_key_digest()
        if agreed is None:
            key = _read(sources) or (created := _create(sources))
            agreed = await store.agree_on_first_key(key.digest)
        else:
            key = _read_usable(sources)
    finally:
        await store.aclose()
    if key is not None and key.digest == agreed:
        return key
    if key is not None and sources.file is not None:
        _discard(sources.file, is_new=created is not None)
    note = f"the first key of this store, which another gateway keeps in its state_dir   ({SETS_YOUR_OWN})"
    return FirstKey(agreed, "$KEY", note, is_kept=True)


async def _has_lost_tenants(store: TenantStore, url: str, sources: KeySources) -> bool:
    """Return whether this gateway's snapshot has tenants that an empty store has lost.

    Tenants that operators removed while the gateway was stopped are not lost. Raises: StoreUnavailable.
    """
    if sources.tenants_file is None:
        return False
    found = SnapshotFile(sources.tenants_file.with_name(SNAPSHOT_FILE), url).read()
    if found is None:
        return False
    snapshot, confirmed_s = found
    seen, now = snapshot.state(confirmed_s), await store.look()
    return tenants_end_first_key(seen, now, loss_between(seen, now), has_ended=snapshot.ends_first_key)


def _configured(sources: KeySources) -> FirstKey | None:
    if sources.configured is None:
        return None
    return FirstKey(key_digest(sources.configured), f"${VARIABLE}", f"the one in {VARIABLE}")


def _read(sources: KeySources) -> FirstKey | None:
    """Return the key in the file, None if there is no file. Raises: FirstKeyFileError."""
    if sources.file is None or (text := read_first_key(sources.file)) is None:
        return None
    return FirstKey(key_digest(text), _shell_word(sources.file), f"in {sources.file}", is_kept=True)


def _read_usable(sources: KeySources) -> FirstKey | None:
    """Return the key in the file, None if there is none that can be used."""
    try:
        return _read(sources)
    except FirstKeyFileError as error:
        logger.warning("%s, or set %s", error, VARIABLE)
        return None


def _create(sources: KeySources) -> FirstKey:
    """Create a key and keep it. Raises: FirstKeyFileError."""
    if sources.file is None:
        raise FirstKeyFileError("no folder for it is known; set `state_dir`")
    text = keep_first_key(sources.file, random_key())
    if sources.is_terminal:
        word, note = text, f"{text}   (created now, kept in {sources.file}; {SETS_YOUR_OWN})"
    else:
        word, note = _shell_word(sources.file), f"in {sources.file}   (created now; {SETS_YOUR_OWN})"
    return FirstKey(key_digest(text), word, note, is_kept=True)


def _create_unkept(error: FirstKeyFileError) -> FirstKey:
    """Create a key that ends with this process. It is shown, because it is nowhere else."""
    logger.warning(
        "the first key is not kept, and each start creates another: %s, or set %s", error, VARIABLE
    )
    text = random_key()
    return FirstKey(key_digest(text), text, f"{text}   (created now and shown once; {SETS_YOUR_OWN})")


def _missing(sources: KeySources) -> FirstKey:
    """Describe the key that is created, or taken from another gateway, once Redis has returned."""
    if sources.file is None:
        return FirstKey("", "$KEY", "that of another gateway", is_kept=True)
    return FirstKey("", _shell_word(sources.file), f"to be created in {sources.file}", is_kept=True)


def _shell_word(path: Path) -> str:
    return f"$(cat {shlex.quote(str(path))})"


def _discard(path: Path, *, is_new: bool) -> None:
    """Handle a key that is not the one of the store. is_new: it was created by this process."""
    if is_new:
        # A file that stays is reported by the next start.
        with suppress(OSError):
            path.unlink()
        return
    logger.warning(
        "the key in %s is not the first key of this store, which another gateway created; to use it, stop "
        "every gateway, remove the key %s from Redis, and start this gateway first",
        path,
        FIRST_KEY,
    )


def _log_ignored(sources: KeySources, reason: str) -> None:
    if sources.configured is not None:
        logger.info("GATEWAY_API_KEY is ignored: %s", reason)
    elif sources.file is not None and sources.file.exists():
        logger.info("the first key in %s is ignored: %s", sources.file, reason)


def is_admin_on_loopback(config: Config) -> bool:
    """Return whether all operators' listeners are on loopback, and the file lists no keys or certificates."""
    addresses = [config.admin.listen or config.listen]
    if config.manager is not None:
        addresses.append(config.manager.listen)
    has_own = config.admin.keys or config.admin.certificates
    return not has_own and all(is_loopback(host_and_port(address)[0]) for address in addresses)


def log_open_admin(config: Config, people: Sequence[str]) -> None:
    """Log whether programs of this machine can use /admin without a key. people: who can log in."""
    if not is_admin_on_loopback(config):
        return
    if len(people) > 1:
        names = ", ".join(people[:PEOPLE_SHOWN]) + (", …" if len(people) > PEOPLE_SHOWN else "")
        logger.info("/admin needs a key: several people can log in to this machine (%s)", names)
    else:
        logger.info("/admin needs no key from programs on this machine; `admin.keys` ends that")


def needs_operator_key(config: Config, people: Sequence[str] = ()) -> bool:
    """Return True if /admin needs a key, and the file has none, no certificate and no users of an issuer.

    people: who can log in to the gateway's machine.
    """
    if config.admin.certificates:
        return False
    if len(people) <= 1 and is_admin_on_loopback(config):
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


def warn_of_missing_operator_key(config: Config, people: Sequence[str] = ()) -> None:
    """Log a warning if no key of the file or of Redis can use /admin. Called once the first key has ended."""
    if not needs_operator_key(config, people):
        return
    if config.quotas.store != "memory":
        try:
            if asyncio.run(_has_operator_key(config.quotas.store, config.tenants)):
                return
        except StoreUnavailable:
            # The start has reported it already, and the keys in Redis may include one.
            return
    logger.warning(NO_OPERATOR_KEY)


def warn_of_missing_keys(config: Config, sources: KeySources) -> None:
    """Log a warning if tenants of the file have ended the first key, and no key is valid."""
    if not lacks_keys(config):
        return
    try:
        if asyncio.run(_has_stored_key(config, sources)):
            return
    except StoreUnavailable:
        # The start has reported it already, and there may be keys.
        return
    logger.warning("tenants: %s", NO_KEYS)


async def _has_stored_key(config: Config, sources: KeySources) -> bool:
    """Return whether the store has a key of a tenant of the file. Raises: StoreUnavailable."""
    if config.quotas.store == "memory":
        keys = [] if sources.tenants_file is None else await FileTenantStore(sources.tenants_file).keys()
    else:
        store = TenantStore(RedisClient(config.quotas.store, STORE_TIMEOUT_S))
        try:
            keys = await store.keys()
        finally:
            await store.aclose()
    return any(key.tenant in config.tenants for key in keys)


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
