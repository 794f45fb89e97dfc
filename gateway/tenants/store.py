"""Keys and tenants that gateways share, in Redis: digests and settings, never a key itself.

Rule: every change writes a new version in the same step. By that one small read each gateway sees if
anything has changed, and if the store was emptied or restored from an older copy instead.
"""

import hashlib
import logging
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import msgspec

from gateway.audit.records import Actor, AuditRecord, ChangedField, changed_fields
from gateway.audit.redis_store import APPEND, AUDIT, AuditInRedis
from gateway.config import schema as config
from gateway.config.schema import AuditSettings, TenantConfig, end_user_limit_problems, limit_problems
from gateway.events import AuditRecorded
from gateway.store.errors import StoreUnavailable
from gateway.store.redis_client import RedisClient
from gateway.store.scripts import Script, load_script
from gateway.tenants.audited import (
    key_created,
    key_put,
    key_revoked,
    key_rotated,
    tenant_fields,
    tenant_put,
    tenant_removed,
)
from gateway.tenants.keyring import StoredKey

logger = logging.getLogger("gateway")

# Settings of a tenant, None before there is one, to its new settings. Raises: ValueError.
SettingsChange: TypeAlias = Callable[[TenantConfig | None], TenantConfig]
# Checks the settings of a tenant, None if there is none, before it is removed. Raises: as it likes.
SettingsCheck: TypeAlias = Callable[[TenantConfig | None], None]
# A stored key to the same key as it ends, and its successor. Raises: ValueError.
Succession: TypeAlias = Callable[[StoredKey], tuple[StoredKey, StoredKey]]
# Logs the record of a change that was made.
ObserveRecord: TypeAlias = Callable[[AuditRecorded], None]


class TenantChange(msgspec.Struct, frozen=True):
    """Outcome of a change. is_first: there was no tenant before."""

    before: TenantConfig | None
    after: TenantConfig
    is_first: bool

    @property
    def changes(self) -> list[ChangedField]:
        """Fields that differ, in the order of the settings."""
        return changed_fields(tenant_fields(self.before or TenantConfig()), tenant_fields(self.after))


class KeyRotation(msgspec.Struct, frozen=True):
    """Outcome of replacing a key. before, after: the key that ends. successor: as it is stored."""

    before: StoredKey
    after: StoredKey
    successor: StoredKey


def tag_of(settings: TenantConfig) -> str:
    """Return the strong entity tag of stored settings."""
    content = msgspec.json.encode(settings, order="deterministic")
    return f'"{hashlib.sha256(content).hexdigest()[:32]}"'


def merged(before: TenantConfig | None, patch: Mapping[str, Any]) -> TenantConfig:
    """Return settings with those of a patch, in which null removes a setting or a limit (RFC 7396).

    Raises: msgspec.ValidationError.
    """
    known = msgspec.to_builtins(before or TenantConfig())
    fields = _merged(known, patch)
    # A model without limits is not listed.
    fields["model_limits"] = {
        model: limits for model, limits in fields.get("model_limits", {}).items() if limits
    }
    return msgspec.convert(fields, TenantConfig)


def _merged(before: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    fields = dict(before)
    for name, value in patch.items():
        if value is None:
            fields.pop(name, None)
        elif isinstance(value, Mapping):
            inner = fields.get(name)
            fields[name] = _merged(inner if isinstance(inner, Mapping) else {}, value)
        else:
            fields[name] = value
    return fields


# Under one hash tag: a script changes them together.
KEYS = "gw:{store}:keys"
TENANTS = "gw:{store}:tenants"
VERSION = "gw:{store}:version"
# Digest of the first key, on which all gateways of this store agree.
FIRST_KEY = "gw:{store}:first_key"
# Keys and tenants that operators removed lately, by time.
REMOVALS = "gw:{store}:removals"
# Days on which keys were used last, by id.
KEY_DAYS = "gw:{store}:key_days"
# Of more keys the days are read together with those of all others.
DAYS_TOGETHER = 1_000
# No gateway keeps what it lost for longer.
REMOVALS_KEPT_S = 30 * 24 * 3600
CHANGE, CREATE_KEY, ROTATE_KEY, REMOVE_TENANT = (
    load_script("version", name, package="gateway.tenants", library=APPEND)
    for name in ("change", "create_key", "rotate_key", "remove_tenant")
)
NOTE_USES = load_script("note_uses", package="gateway.tenants")
LOOK = load_script("look", package="gateway.tenants")
# Others may change a tenant between reading and writing it.
CHANGE_ATTEMPTS = 20
# Replaces a tenant that cannot be read: without it, its keys would have no limits. They may use no model.
UNREADABLE = config.TenantConfig(models=())


class KeyCreation(msgspec.Struct, frozen=True, array_like=True):
    """Outcome of creating a key.

    is_created: False if there is a key of that id. has_tenant: its tenant is in the store.
    """

    is_created: bool
    has_tenant: bool


class StoreState(msgspec.Struct, frozen=True):
    """Version of the content, which every change replaces, and the clock of Redis in seconds since 1970.

    first_key: digest of the first key, empty if there is none. It belongs to no version. keys, tenants: their
    numbers, None where they are not counted.
    """

    version: bytes
    clock_s: float
    first_key: str
    keys: int | None = None
    tenants: int | None = None


class TenantStore:
    """Store of keys and tenants. All operations raise StoreUnavailable if Redis does not reply.

    Each change is recorded in the same step as it is made. audit: bounds of the records. observe: logs them.
    """

    def __init__(
        self,
        client: RedisClient,
        audit: AuditSettings = AuditSettings(),  # noqa: B008 - it is frozen
        observe: ObserveRecord = lambda _: None,
    ) -> None:
        self._client = client
        self._audit = AuditInRedis(client, audit)
        self._observe = observe

    async def create_key(self, key: StoredKey, *, by: Actor) -> KeyCreation:
        """Add a key, unless there is one of the same id."""
        records = key_created(key, by)
        argument = {
            "version": _new_version(),
            "id": key.id,
            "key": msgspec.json.encode(key).decode(),
            "tenant": key.tenant,
            "audit": self._audit.argument(records),
        }
        reply = await self._run(CREATE_KEY, (KEYS, TENANTS, VERSION, AUDIT), argument)
        creation = msgspec.msgpack.decode(reply, type=KeyCreation)
        self._log(records if creation.is_created else ())
        return creation

    async def put_key(self, key: StoredKey, before: StoredKey | None, *, by: Actor) -> bool:
        """Add a key, or replace the one of the same id; return False if that is not the one before."""
        value = msgspec.json.encode(key).decode()
        for _ in range(CHANGE_ATTEMPTS):
            stored = await self._client.execute("HGET", KEYS, key.id) or b""
            if (_read_key(key.id, stored) if stored else None) != before:
                return False
            records = key_put(before, key, by)
            removed, _ = await self._change(
                KEYS, key.id, removal_of_key(key.id), records, value=value, expected=stored
            )
            if removed >= 0:
                return True
        raise _contended(f"the key {key.id!r}")

    async def revoke(self, id_: str, *, by: Actor, is_kept: bool = False) -> bool:
        """Remove a key; return False if there is none of that id.

        A store that answers late removes it all the same: its record then lacks what the key was. is_kept:
        gateways accept the key although the store has lost it, which this ends.
        """
        for _ in range(CHANGE_ATTEMPTS):
            try:
                stored = await self._client.execute("HGET", KEYS, id_) or b""
            except StoreUnavailable:
                stored = None
            key = _read_key(id_, stored) if stored else None
            removed, _ = await self._change(
                KEYS, id_, removal_of_key(id_), key_revoked(id_, key, by), expected=stored, is_kept=is_kept
            )
            if removed >= 0:
                return removed > 0
        raise _contended(f"the key {id_!r}")

    async def rotate_key(self, id_: str, succession: Succession, *, by: Actor) -> KeyRotation | None:
        """Let a key end, and create its successor; return None if there is no key of that id.

        Raises: ValueError as the function, or if there is a key of the successor's id.
        """
        for _ in range(CHANGE_ATTEMPTS):
            stored = await self._client.execute("HGET", KEYS, id_)
            before = None if stored is None else _read_key(id_, stored)
            if before is None:
                return None
            after, successor = succession(before)
            records = key_rotated(before, after, successor, by)
            argument = {
                "version": _new_version(),
                "id": id_,
                "expected": stored.decode(),
                "value": msgspec.json.encode(after).decode(),
                "successor": successor.id,
                "key": msgspec.json.encode(successor).decode(),
                "audit": self._audit.argument(records),
            }
            reply = await self._run(ROTATE_KEY, (KEYS, VERSION, AUDIT), argument)
            outcome = msgspec.msgpack.decode(reply, type=int)
            if outcome == 0:
                raise KeyExists(successor.id)
            if outcome > 0:
                self._log(records)
                return KeyRotation(before, after, successor)
        raise _contended(f"the key {id_!r}")

    async def keys(self) -> list[StoredKey]:
        """Return every key, by id. A key that cannot be read is logged and left out."""
        fields = await self._client.execute("HGETALL", KEYS)
        keys = [_read_key(_text(id_), value) for id_, value in fields.items()]
        return sorted((key for key in keys if key is not None), key=lambda key: key.id)

    async def note_uses(self, days: Mapping[str, str]) -> None:
        """Note the days on which keys were used last, by id."""
        await self._run(NOTE_USES, (KEYS, KEY_DAYS), {"days": dict(days)})

    async def last_uses(self, ids: Sequence[str] | None = None) -> dict[str, str]:
        """Return the days on which keys were used last, by id. ids: of the wanted keys, None for all."""
        if ids is not None and len(ids) <= DAYS_TOGETHER:
            found = await self._client.execute("HMGET", KEY_DAYS, *ids) if ids else ()
            return {id_: _text(day) for id_, day in zip(ids, found, strict=True) if day is not None}
        days = await self._client.execute("HGETALL", KEY_DAYS)
        return {_text(id_): _text(day) for id_, day in days.items()}

    async def put_tenant(self, name: str, settings: config.TenantConfig, *, by: Actor) -> bool:
        """Add a tenant, or replace its settings. Return True if it is the first one."""
        return (await self.change_tenant(name, lambda _: settings, by=by)).is_first

    async def change_tenant(self, name: str, change: SettingsChange, *, by: Actor) -> TenantChange:
        """Replace the settings of a tenant by what a function makes of them. Raises: as the function.

        What another client stores meanwhile is not lost: the function is called again with it.
        """
        for _ in range(CHANGE_ATTEMPTS):
            stored = await self._client.execute("HGET", TENANTS, name)
            before = None if stored is None else _read_tenant(name, stored)
            changed = TenantChange(before, change(before), is_first=False)
            value = msgspec.json.encode(changed.after).decode()
            records = tenant_put(name, before, changed.changes, by)
            removed, is_first = await self._change(
                TENANTS, name, removal_of_tenant(name), records, value=value, expected=stored or b""
            )
            if removed >= 0:
                return msgspec.structs.replace(changed, is_first=is_first)
        raise _contended(f"the tenant {name!r}")

    async def remove_tenant(self, name: str, *, by: Actor, check: SettingsCheck | None = None) -> bool:
        """Remove a tenant with its keys, which would be refused without it. Raises: as the check.

        Return False if neither exists. A store that answers late removes them all the same: their record then
        lacks what they were. With a check it removes nothing.
        """
        for _ in range(CHANGE_ATTEMPTS):
            argument: dict[str, Any] = {"version": _new_version(), "tenant": name, "kept": REMOVALS_KEPT_S}
            argument["removal"] = removal_of_tenant(name)
            try:
                argument["expected"] = _text(await self._client.execute("GET", VERSION) or b"")
                stored = await self._client.execute("HGET", TENANTS, name)
                settings = None if stored is None else _read_tenant(name, stored)
                if check is not None:
                    check(settings)
                records = tenant_removed(name, settings, await self._ids_of(name), by)
            except StoreUnavailable:
                if check is not None:
                    raise
                argument.pop("expected", None)
                records = tenant_removed(name, None, (), by)
            argument["audit"] = self._audit.argument(records)
            keys = (KEYS, TENANTS, VERSION, REMOVALS, AUDIT, KEY_DAYS)
            removed = msgspec.msgpack.decode(await self._run(REMOVE_TENANT, keys, argument), type=int)
            if removed >= 0:
                self._log(records if removed else ())
                return removed > 0
        raise _contended("keys and tenants")

    async def tenants(self) -> dict[str, config.TenantConfig]:
        """Return every tenant, by name. A tenant that cannot be read may use no model."""
        fields = await self._client.execute("HGETALL", TENANTS)
        tenants = {_text(name): _read_tenant(_text(name), value) for name, value in fields.items()}
        return dict(sorted(tenants.items()))

    async def names(self) -> set[str]:
        """Return the names of all tenants and of those that keys belong to."""
        return {*await self.tenants(), *(key.tenant for key in await self.keys())}

    async def has_tenants(self) -> bool:
        """Return True if there is any tenant, readable or not."""
        return bool(await self._client.execute("HLEN", TENANTS))

    async def first_key_digest(self) -> str | None:
        """Return the digest of the first key, None if no gateway has created one."""
        digest = await self._client.execute("GET", FIRST_KEY)
        return None if digest is None else _text(digest)

    async def agree_on_first_key(self, digest: str) -> str:
        """Propose the digest of a first key and return that of the gateway which was the first to do so."""
        await self._client.execute("SET", FIRST_KEY, digest, "NX")
        return await self.first_key_digest() or digest

    async def look(self) -> StoreState:
        """Return the version, which is empty before the first change, the time, and the first key."""
        reply = await self._client.run_script(LOOK, (VERSION, FIRST_KEY, KEYS, TENANTS), b"")
        clock_us, keys, tenants, first_key, version = reply.split(b" ", 4)
        return StoreState(version, int(clock_us) / 1e6, _text(first_key), int(keys), int(tenants))

    async def removals(self, since_s: float) -> frozenset[str]:
        """Return what operators have removed since, as `removal_of_key` and `removal_of_tenant` name it.

        since_s: on the clock of Redis.
        """
        removed = await self._client.execute("ZRANGEBYSCORE", REMOVALS, int(since_s), "+inf")
        return frozenset(map(_text, removed))

    async def removed_tenants(self, since_s: float) -> frozenset[str]:
        """Return the tenants that operators have removed since, some of which may be there again.

        since_s: on the clock of Redis.
        """
        removed = await self._client.execute("ZRANGEBYSCORE", REMOVALS, f"{since_s:.6f}", "+inf")
        prefix = removal_of_tenant("")
        return frozenset(name.removeprefix(prefix) for name in map(_text, removed) if name.startswith(prefix))

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _change(
        self,
        hash_: str,
        field: str,
        removal: str,
        records: Sequence[AuditRecord],
        *,
        value: str | None = None,
        expected: bytes | None,
        is_kept: bool = False,
    ) -> tuple[int, bool]:
        """Set or remove a field, and record that.

        Return the number of removed fields, and if there was no tenant before. expected: the value that the
        field has, empty for none. If it has another, nothing is changed, and the number is -1. None is any.
        """
        argument: dict[str, Any] = {
            "version": _new_version(),
            "field": field,
            "removal": removal,
            "kept": REMOVALS_KEPT_S,
        }
        if records:
            argument |= {"audit": self._audit.argument(records), "kept_elsewhere": is_kept}
        if value is not None:
            argument["value"] = value
        if expected is not None:
            # Otherwise no release has written it.
            with suppress(UnicodeDecodeError):
                argument["expected"] = expected.decode()
        reply = await self._run(CHANGE, (hash_, VERSION, TENANTS, REMOVALS, AUDIT, KEY_DAYS), argument)
        removed, is_first = msgspec.msgpack.decode(reply, type=tuple[int, bool])
        if removed > 0 or (removed == 0 and (value is not None or is_kept)):
            self._log(records)
        return removed, is_first

    async def _ids_of(self, tenant: str) -> list[str]:
        """Return the ids of a tenant's keys, even of those that cannot be read otherwise."""
        fields = await self._client.execute("HGETALL", KEYS)
        return sorted(_text(id_) for id_, value in fields.items() if _tenant_of(value) == tenant)

    def _log(self, records: Sequence[AuditRecord]) -> None:
        for record in records:
            self._observe(record.event())

    async def _run(self, script: Script, keys: Sequence[str], argument: Mapping[str, Any]) -> bytes:
        return await self._client.run_script(script, keys, msgspec.msgpack.encode(argument))


class KeyExists(ValueError):
    """There is a key of an id that a new key should have."""

    def __init__(self, id_: str) -> None:
        super().__init__(f"there is a key {id_!r} already")


def _contended(what: str) -> StoreUnavailable:
    return StoreUnavailable(f"others change {what} all the time; try again")


class _Owned(msgspec.Struct):
    """The part of a stored key that names its tenant."""

    tenant: str = ""


def _tenant_of(value: bytes) -> str:
    try:
        return msgspec.json.decode(value, type=_Owned).tenant
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""


def removal_of_key(id_: str) -> str:
    """Return the name of a key's removal."""
    return f"key {id_}"


def removal_of_tenant(name: str) -> str:
    """Return the name of a tenant's removal, with its keys."""
    return f"tenant {name}"


def _new_version() -> str:
    return secrets.token_hex(8)


def _text(name: bytes) -> str:
    return name.decode(errors="replace")


def _read_key(id_: str, value: bytes) -> StoredKey | None:
    try:
        key = msgspec.json.decode(value, type=StoredKey)
        check_limits((key,), ())
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
        check_limits((), (tenant,))
    except ValueError as error:
        logger.warning("the tenant %r in Redis cannot be read and may use no model: %s", name, error)
        return UNREADABLE
    return tenant


def check_limits(keys: Iterable[StoredKey], tenants: Iterable[config.TenantConfig]) -> None:
    """Check the names and the amounts of stored limits. Raises: ValueError."""
    found = [key.limits for key in keys]
    for tenant in tenants:
        found += (tenant.limits, *tenant.model_limits.values())
        for name, problem in end_user_limit_problems(tenant.end_user_limits).items():
            raise ValueError(f"{name}: {problem}")
    for limits in found:
        for name, problem in limit_problems(limits).items():
            raise ValueError(f"{name}: {problem}")
