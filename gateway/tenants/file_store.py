"""Keys and tenants of a gateway without Redis, in one file of `state_dir`: digests, never a key itself.

Rule: every change replaces the file in one step, under a lock, so that the workers of the gateway see the
file before or after it. They notice a change by the file's number and time. The same step writes the records
of the change into the file, from which they are appended to the file of records: if the process is killed in
between, by the next change or the next look at the records.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from gateway.audit.file import FILE_NAME as AUDIT_NAME
from gateway.audit.file import AuditFile
from gateway.audit.records import Actor, AuditRecord
from gateway.config import schema as config
from gateway.config.schema import AuditSettings
from gateway.config.state_folder import lock_private, make_private_folder, replace_private
from gateway.store.errors import StoreUnavailable
from gateway.tenants.audited import (
    key_created,
    key_put,
    key_revoked,
    key_rotated,
    tenant_put,
    tenant_removed,
)
from gateway.tenants.keyring import StoredKey
from gateway.tenants.store import (
    KeyCreation,
    KeyExists,
    KeyRotation,
    ObserveRecord,
    SettingsChange,
    SettingsCheck,
    StoreState,
    Succession,
    TenantChange,
    check_limits,
)

logger = logging.getLogger("gateway")

FILE_NAME = "tenants.json"
# Days on which keys were used last, by id: apart from the keys, whose file every worker reads after a change.
DAYS_NAME = "key-days.json"
# Some 50,000 keys.
FILE_BYTES_MAX = 16 * 1024 * 1024
# Workers read a change within a second.
REMOVED_KEPT_S = 60.0
Result = TypeVar("Result")


class _Content(msgspec.Struct):
    """Content of the file: keys by id, tenants by name, and the records of the last change.

    removed: when tenants were removed lately, in seconds since 1970.
    """

    keys: dict[str, StoredKey] = {}
    tenants: dict[str, config.TenantConfig] = {}
    records: tuple[AuditRecord, ...] = ()
    removed: dict[str, float] = {}


def _given(settings: config.TenantConfig) -> dict[str, Any]:
    """Return the settings that are not the defaults.

    A release refuses a file with settings that it does not know: one that knows fewer reads the file of a
    later release, after a step back, if no tenant uses the new ones.
    """
    defaults = msgspec.to_builtins(config.TenantConfig())
    fields = msgspec.to_builtins(settings)
    return {name: value for name, value in fields.items() if value != defaults[name]}


class FileTenantStore:
    """Store of keys and tenants in a file, with a lock next to it.

    Its operations raise StoreUnavailable if the file cannot be used. audit: bounds of the records of changes.
    observe: logs them.
    """

    def __init__(
        self,
        path: Path,
        audit: AuditSettings = AuditSettings(),  # noqa: B008 - it is frozen
        observe: ObserveRecord = lambda _: None,
    ) -> None:
        self._path = path
        self._days = path.with_name(DAYS_NAME)
        self._audit = AuditFile(path.with_name(AUDIT_NAME), audit)
        self._observe = observe
        self._logged = ""

    def make_folder(self) -> None:
        """Make the folder of the file at a gateway's start, so that commands find it."""
        try:
            make_private_folder(self._path.parent)
        except OSError as error:
            raise self._unusable(error) from error

    async def create_key(self, key: StoredKey, *, by: Actor) -> KeyCreation:
        """Add a key, unless there is one of the same id."""

        def add(content: _Content) -> tuple[KeyCreation, Sequence[AuditRecord]]:
            is_new = key.id not in content.keys
            content.keys.setdefault(key.id, key)
            creation = KeyCreation(is_new, key.tenant in content.tenants)
            return creation, key_created(key, by) if is_new else ()

        return await self._change(add)

    async def put_key(self, key: StoredKey, before: StoredKey | None, *, by: Actor) -> bool:
        """Add a key, or replace the one of the same id; return False if that is not the one before."""

        def put(content: _Content) -> tuple[bool, Sequence[AuditRecord]]:
            if content.keys.get(key.id) != before:
                return False, ()
            content.keys[key.id] = key
            return True, key_put(before, key, by)

        return await self._change(put)

    async def revoke(self, id_: str, *, by: Actor, is_kept: bool = False) -> bool:
        """Remove a key; return False if there is none of that id. A file is not lost: no key is kept."""
        del is_kept

        def remove(content: _Content) -> tuple[bool, Sequence[AuditRecord]]:
            key = content.keys.pop(id_, None)
            return key is not None, () if key is None else key_revoked(id_, key, by)

        return await self._change(remove)

    async def rotate_key(self, id_: str, succession: Succession, *, by: Actor) -> KeyRotation | None:
        """Let a key end, and create its successor; return None if there is no key of that id.

        Raises: ValueError as the function, or if there is a key of the successor's id.
        """

        def rotate(content: _Content) -> tuple[KeyRotation | None, Sequence[AuditRecord]]:
            before = content.keys.get(id_)
            if before is None:
                return None, ()
            after, successor = succession(before)
            if successor.id in content.keys:
                raise KeyExists(successor.id)
            content.keys |= {id_: after, successor.id: successor}
            return KeyRotation(before, after, successor), key_rotated(before, after, successor, by)

        return await self._change(rotate)

    async def keys(self) -> list[StoredKey]:
        """Return every key, by id."""
        return sorted(self._read().keys.values(), key=lambda key: key.id)

    async def note_uses(self, days: Mapping[str, str]) -> None:
        """Note the days on which keys were used last, by id."""

        def run() -> None:
            with self._locked():
                known, present = self._read_days(), self._read().keys
                noted = {id_: day for id_, day in {**known, **days}.items() if id_ in present}
                replace_private(self._days, msgspec.json.encode(noted))

        await asyncio.to_thread(run)

    async def last_uses(self, ids: Sequence[str] | None = None) -> dict[str, str]:
        """Return the days on which keys were used last, by id. ids: all are returned."""
        del ids
        return self._read_days()

    async def put_tenant(self, name: str, settings: config.TenantConfig, *, by: Actor) -> bool:
        """Add a tenant, or replace its settings. Return True if it is the first one."""
        return (await self.change_tenant(name, lambda _: settings, by=by)).is_first

    async def change_tenant(self, name: str, change: SettingsChange, *, by: Actor) -> TenantChange:
        """Replace the settings of a tenant by what a function makes of them. Raises: as the function."""

        def put(content: _Content) -> tuple[TenantChange, Sequence[AuditRecord]]:
            is_first, before = not content.tenants, content.tenants.get(name)
            content.tenants[name] = after = change(before)
            changed = TenantChange(before, after, is_first)
            return changed, tenant_put(name, before, changed.changes, by)

        return await self._change(put)

    async def remove_tenant(self, name: str, *, by: Actor, check: SettingsCheck | None = None) -> bool:
        """Remove a tenant with its keys. Return False if neither exists. Raises: as the check."""

        def remove(content: _Content) -> tuple[bool, Sequence[AuditRecord]]:
            if check is not None:
                check(content.tenants.get(name))
            owned = sorted(id_ for id_, key in content.keys.items() if key.tenant == name)
            for id_ in owned:
                del content.keys[id_]
            settings = content.tenants.pop(name, None)
            is_removed = settings is not None or bool(owned)
            if is_removed:
                now_s = time.time()
                lately = {
                    known: at_s for known, at_s in content.removed.items() if at_s > now_s - REMOVED_KEPT_S
                }
                content.removed = lately | {name: now_s}
            return is_removed, tenant_removed(name, settings, owned, by) if is_removed else ()

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

    async def removed_tenants(self, since_s: float) -> frozenset[str]:
        """Return the tenants that operators have removed since, some of which may be there again."""
        return frozenset(name for name, at_s in self._read().removed.items() if at_s >= since_s)

    async def aclose(self) -> None:
        """Do nothing: no file stays open."""

    async def settle(self) -> None:
        """Append the records of the last change, if the process that made it was killed before it could."""

        def run() -> None:
            if self._path.exists():
                with self._locked():
                    self._settle(self._read())

        await asyncio.to_thread(run)

    def _settle(self, content: _Content) -> None:
        missing = [record for record in content.records if not self._audit.has(record)]
        if missing:
            self._audit.append(missing)

    async def _change(self, change: Callable[[_Content], tuple[Result, Sequence[AuditRecord]]]) -> Result:
        """Replace the content by what a function makes of it, with its records; return its result."""

        def run() -> tuple[Result, Sequence[AuditRecord]]:
            with self._locked():
                content = self._read()
                self._settle(content)
                result, records = change(content)
                content.records = tuple(records)
                self._write(content)
                if records:
                    self._append(records)
            return result, records

        # Another worker may hold the lock for as long as a write takes.
        result, records = await asyncio.to_thread(run)
        for record in records:
            self._observe(record.event())
        return result

    def _append(self, records: Sequence[AuditRecord]) -> None:
        """Append records whose change was made. If that fails, no other change is made before it succeeds."""
        try:
            self._audit.append(records)
        except OSError as error:
            logger.error("%s cannot be written: %s", self._audit.path, error.strerror)  # noqa: TRY400

    def _read_days(self) -> dict[str, str]:
        try:
            return msgspec.json.decode(self._days.read_bytes(), type=dict[str, str])
        except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError, UnicodeDecodeError):
            # They are noted again with the next uses.
            return {}
        except OSError as error:
            raise self._unusable(error) from error

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
        try:
            with lock_private(self._path.with_suffix(".lock")):
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
        tenants = {name: _given(settings) for name, settings in content.tenants.items()}
        encoded = msgspec.json.encode({**msgspec.structs.asdict(content), "tenants": tenants})
        if len(encoded) > FILE_BYTES_MAX:
            raise StoreUnavailable(
                f"{self._path} would exceed {FILE_BYTES_MAX} bytes; use Redis for so many keys"
            )
        replace_private(self._path, encoded)

    def _unusable(self, error: OSError) -> StoreUnavailable:
        return StoreUnavailable(f"{self._path} cannot be used: {error.strerror}; set `state_dir`")
