"""Keys and tenants of a gateway without Redis, in one file of `state_dir`: digests, never a key itself.

Rule: every change replaces the file in one step, under a lock, so that the workers of the gateway see the
file before or after it. They notice a change by the file's number and time.
"""

import asyncio
import fcntl
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from gateway.config import schema as config
from gateway.config.state_folder import make_private_folder, open_private, replace_private
from gateway.store.errors import StoreUnavailable
from gateway.tenants.keyring import StoredKey
from gateway.tenants.store import KeyCreation, SettingsChange, StoreState, TenantChange, check_limits

logger = logging.getLogger("gateway")

FILE_NAME = "tenants.json"
# Some 50,000 keys.
FILE_BYTES_MAX = 16 * 1024 * 1024
Result = TypeVar("Result")


class _Content(msgspec.Struct):
    """Content of the file: keys by id, and tenants by name."""

    keys: dict[str, StoredKey] = {}
    tenants: dict[str, config.TenantConfig] = {}


class FileTenantStore:
    """Store of keys and tenants in a file, with a lock next to it.

    Its operations raise StoreUnavailable if the file cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._logged = ""

    def make_folder(self) -> None:
        """Make the folder of the file at a gateway's start, so that commands find it."""
        try:
            make_private_folder(self._path.parent)
        except OSError as error:
            raise self._unusable(error) from error

    async def create_key(self, key: StoredKey) -> KeyCreation:
        """Add a key, unless there is one of the same id."""

        def add(content: _Content) -> KeyCreation:
            is_new = key.id not in content.keys
            content.keys.setdefault(key.id, key)
            return KeyCreation(is_new, key.tenant in content.tenants)

        return await self._change(add)

    async def revoke(self, id_: str) -> bool:
        """Remove a key; return False if there is none of that id."""
        return await self._change(lambda content: content.keys.pop(id_, None) is not None)

    async def keys(self) -> list[StoredKey]:
        """Return every key, by id."""
        return sorted(self._read().keys.values(), key=lambda key: key.id)

    async def put_tenant(self, name: str, settings: config.TenantConfig) -> bool:
        """Add a tenant, or replace its settings. Return True if it is the first one."""
        return (await self.change_tenant(name, lambda _: settings)).is_first

    async def change_tenant(self, name: str, change: SettingsChange) -> TenantChange:
        """Replace the settings of a tenant by what a function makes of them. Raises: as the function."""

        def put(content: _Content) -> TenantChange:
            is_first, before = not content.tenants, content.tenants.get(name)
            content.tenants[name] = after = change(before)
            return TenantChange(before, after, is_first)

        return await self._change(put)

    async def remove_tenant(self, name: str) -> bool:
        """Remove a tenant with its keys. Return False if neither exists."""

        def remove(content: _Content) -> bool:
            owned = [id_ for id_, key in content.keys.items() if key.tenant == name]
            for id_ in owned:
                del content.keys[id_]
            return content.tenants.pop(name, None) is not None or bool(owned)

        return await self._change(remove)

    async def tenants(self) -> dict[str, config.TenantConfig]:
        """Return every tenant, by name."""
        return dict(sorted(self._read().tenants.items()))

    async def names(self) -> set[str]:
        """Return the names of all tenants and of those that keys belong to."""
        content = self._read()
        return {*content.tenants, *(key.tenant for key in content.keys.values())}

    async def has_tenants(self) -> bool:
        """Return True if there is any tenant."""
        return bool(self._read().tenants)

    async def has_admin_key(self) -> bool:
        """Return True if any key has the scope admin."""
        return any("admin" in (key.scopes or ()) for key in self._read().keys.values())

    async def agree_on_first_key(self, digest: str) -> str:
        """Return the digest: no other gateway uses this file."""
        return digest

    async def look(self) -> StoreState:
        """Return the version, which is empty without a file, and the time."""
        return StoreState(self._version(), time.time(), "")

    async def removals(self, since_s: float) -> frozenset[str]:
        """Return nothing: a gateway keeps nothing of a file that was removed."""
        del since_s
        return frozenset()

    async def aclose(self) -> None:
        """Do nothing: no file stays open."""

    async def _change(self, change: Callable[[_Content], Result]) -> Result:
        """Replace the content by what a function makes of it, and return the function's result."""

        def run() -> Result:
            with self._locked():
                content = self._read()
                result = change(content)
                self._write(content)
            return result

        # Another worker may hold the lock for as long as a write takes.
        return await asyncio.to_thread(run)

    def _version(self) -> bytes:
        """Return what changes with each change of the file; nothing if there is no file."""
        try:
            stat = self._path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return b""
        except OSError as error:
            raise self._unusable(error) from error
        return f"{stat.st_ino}-{stat.st_mtime_ns}".encode()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.make_folder()
        try:
            with open_private(self._path.with_suffix(".lock")) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield
        except OSError as error:
            raise self._unusable(error) from error

    def _read(self) -> _Content:
        """Return the content, which is empty without a file."""
        try:
            content = msgspec.json.decode(self._path.read_bytes(), type=_Content)
            check_limits(content.keys.values(), content.tenants.values())
        except (FileNotFoundError, NotADirectoryError):
            return _Content()
        except OSError as error:
            raise self._unusable(error) from error
        except ValueError as error:
            message = f"{self._path} has no keys and tenants: {error}; mend or remove it"
            if message != self._logged:
                # It is read several times a second.
                self._logged = message
                logger.warning("%s", message)
            raise StoreUnavailable(message) from error
        self._logged = ""
        return content

    def _write(self, content: _Content) -> None:
        encoded = msgspec.json.encode(content)
        if len(encoded) > FILE_BYTES_MAX:
            raise StoreUnavailable(
                f"{self._path} would exceed {FILE_BYTES_MAX} bytes; use Redis for so many keys"
            )
        replace_private(self._path, encoded)

    def _unusable(self, error: OSError) -> StoreUnavailable:
        return StoreUnavailable(f"{self._path} cannot be used: {error.strerror}; set `state_dir`")
