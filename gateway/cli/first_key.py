"""The first key, which is valid while there is no tenant: from the environment, from its file, or created.

There is no open mode. Gateways on one Redis agree on one first key by its digest, which is stored there. Its
text is in the `state_dir` of the gateway that created it.
"""

import asyncio
import logging
import shlex
from collections.abc import Mapping
from pathlib import Path

import msgspec
from rich.console import Console
from rich.markup import escape

from gateway.config.schema import Config
from gateway.store.errors import StoreUnavailable
from gateway.store.redis_client import RedisClient
from gateway.tenants.create_key import random_key
from gateway.tenants.first_key_file import FILE_NAME, FirstKeyFileError, keep_first_key, read_first_key
from gateway.tenants.keyring import key_digest
from gateway.tenants.store import FIRST_KEY, TenantStore

VARIABLE = "GATEWAY_API_KEY"
SETS_YOUR_OWN = f"{VARIABLE} sets your own"
STORE_TIMEOUT_S = 5.0

logger = logging.getLogger("gateway")


class FirstKey(msgspec.Struct, frozen=True):
    """The first key as the banner shows it.

    shell_word: stands for the key in a shell command. note: where the key is. is_kept: its text is in a file.
    waits: it is not valid until Redis, which is unavailable, has reported that it contains no tenants.
    """

    digest: str
    shell_word: str
    note: str
    is_kept: bool = False
    waits: bool = False


class KeySources(msgspec.Struct, frozen=True):
    """Places of the first key. configured: from the environment. file: None if there is no folder for it.

    is_terminal: the banner is read by a person; otherwise it is part of a log, which shows no secret.
    """

    configured: str | None
    file: Path | None
    is_terminal: bool


def first_key(
    config: Config, environment: Mapping[str, str], errors: Console, *, is_terminal: bool
) -> FirstKey | None:
    """Return the key that is used while there are no tenants, or None if there are any.

    If Redis is unavailable, none is created, because it might bypass tenants in Redis. A key that exists then
    waits until Redis has reported that it contains none.
    """
    sources = KeySources(
        environment.get(VARIABLE) or None, _key_file(config.state_dir, environment), is_terminal
    )
    if config.tenants:
        _log_ignored(sources, "router.yaml")
        return None
    if config.quotas.store == "memory":
        return _configured(sources) or _read(sources) or _create(sources)
    try:
        return asyncio.run(_agree(config.quotas.store, sources))
    except StoreUnavailable as error:
        key = _configured(sources) or _read(sources)
        effect = "calls are refused for now" if key else "no key is created; calls are refused"
        errors.print(f"[yellow]Redis is unavailable[/] ({escape(str(error))}): {effect}")
        return key and msgspec.structs.replace(key, waits=True)


def _key_file(state_dir: str | None, environment: Mapping[str, str]) -> Path | None:
    """Return the path of the first key's file, None if no folder is known."""
    if state_dir is not None:
        # The banner's command must work in any folder.
        return Path(state_dir).absolute() / FILE_NAME
    # Set by systemd for a unit with StateDirectory=; it may list several.
    if listed := environment.get("STATE_DIRECTORY"):
        return Path(listed.partition(":")[0]) / FILE_NAME
    if state_home := environment.get("XDG_STATE_HOME"):
        return Path(state_home) / "embedding-gateway" / FILE_NAME
    if home := environment.get("HOME"):
        return Path(home) / ".local" / "state" / "embedding-gateway" / FILE_NAME
    return None


async def _agree(url: str, sources: KeySources) -> FirstKey | None:
    """Return the first key of all gateways on a store, None if it has tenants. Raises: StoreUnavailable."""
    store = TenantStore(RedisClient(url, STORE_TIMEOUT_S))
    try:
        if await store.holds_any():
            _log_ignored(sources, "Redis")
            return None
        if key := _configured(sources):
            return key
        agreed, key = await store.first_key_digest(), _read(sources)
        is_new = agreed is None and key is None
        if is_new:
            key = _create(sources)
        # A key whose text is lost at the exit must not be the key of later starts.
        if key is not None and key.is_kept:
            agreed = await store.agree_on_first_key(key.digest)
    finally:
        await store.aclose()
    if key is not None and agreed in (None, key.digest):
        return key
    if key is not None and sources.file is not None:
        _discard(sources.file, is_new=is_new)
    note = f"the first key of this store, which another gateway keeps in its state_dir   ({SETS_YOUR_OWN})"
    return FirstKey(agreed or "", "$KEY", note)


def _configured(sources: KeySources) -> FirstKey | None:
    if sources.configured is None:
        return None
    return FirstKey(key_digest(sources.configured), f"${VARIABLE}", f"the one in {VARIABLE}")


def _read(sources: KeySources) -> FirstKey | None:
    """Return the key of an earlier start, None if there is none that can be used."""
    if sources.file is None:
        return None
    try:
        text = read_first_key(sources.file)
    except FirstKeyFileError as error:
        logger.warning("the first key of an earlier start cannot be used: %s", error)
        return None
    if text is None:
        return None
    return FirstKey(key_digest(text), _shell_word(sources.file), f"in {sources.file}", is_kept=True)


def _create(sources: KeySources) -> FirstKey:
    """Create a key and keep it; if that is not possible, it ends with this process and is shown."""
    text, reason = random_key(), "no folder for it is known"
    try:
        if sources.file is not None:
            text = keep_first_key(sources.file, text)
            reason = ""
    except FirstKeyFileError as error:
        reason = str(error)
    if reason or sources.file is None:
        logger.warning(
            "the first key is not kept, and each start creates another: %s; set `state_dir` or %s",
            reason,
            VARIABLE,
        )
        return FirstKey(key_digest(text), text, f"{text}   (created now and shown once; {SETS_YOUR_OWN})")
    if sources.is_terminal:
        word, note = text, f"{text}   (created now, kept in {sources.file}; {SETS_YOUR_OWN})"
    else:
        word, note = _shell_word(sources.file), f"in {sources.file}   (created now; {SETS_YOUR_OWN})"
    return FirstKey(key_digest(text), word, note, is_kept=True)


def _shell_word(path: Path) -> str:
    return f"$(cat {shlex.quote(str(path))})"


def _discard(path: Path, *, is_new: bool) -> None:
    """Handle a key that is not the one of the store. is_new: it was created by this process."""
    if is_new:
        path.unlink(missing_ok=True)
        return
    logger.warning(
        "the key in %s is not the first key of this store, which another gateway created; to use it, "
        "remove the key %s from Redis and restart every gateway",
        path,
        FIRST_KEY,
    )


def _log_ignored(sources: KeySources, place: str) -> None:
    if sources.configured is not None:
        logger.info("GATEWAY_API_KEY is ignored: there are tenants or keys in %s", place)
