"""Keys and tenants that gateways share, in Redis: digests and settings, never a key itself.

Rule: every change writes a new version in the same step. By that one small read each gateway sees if
anything has changed, and if the store was emptied or restored from an older copy instead.
"""

import logging
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from gateway.config import schema as config
from gateway.config.schema import TenantConfig, end_user_limit_problems, limit_problems
from gateway.store.errors import StoreUnavailable
from gateway.store.redis_client import RedisClient
from gateway.store.scripts import Script, load_script
from gateway.tenants.keyring import StoredKey

logger = logging.getLogger("gateway")

# Settings of a tenant, None before there is one, to its new settings. Raises: ValueError.
SettingsChange: TypeAlias = Callable[[TenantConfig | None], TenantConfig]


class ChangedField(msgspec.Struct, frozen=True):
    """A field that was changed. field: with the names of limits, as in `limits.tokens_per_day`.

    was, is: None for a field that is not set.
    """

    field: str
    was: Any = None
    now: Any = msgspec.field(default=None, name="is")


class TenantChange(msgspec.Struct, frozen=True):
    """Outcome of a change. is_first: there was no tenant before."""

    before: TenantConfig | None
    after: TenantConfig
    is_first: bool

    @property
    def changes(self) -> list[ChangedField]:
        """Fields that differ, in the order of the settings."""
        was, now = _fields(self.before or TenantConfig()), _fields(self.after)
        names = dict.fromkeys((*was, *now))
        return [
            ChangedField(name, was.get(name), now.get(name))
            for name in names
            if was.get(name) != now.get(name)
        ]


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


def _fields(settings: TenantConfig) -> dict[str, Any]:
    """Return the settings by name, with each limit by its own; without keys, which are stored apart."""
    fields = msgspec.to_builtins(settings)
    fields.pop("keys")
    limits = {f"limits.{name}": amount for name, amount in fields.pop("limits").items()}
    of_models = {
        f"model_limits.{model}.{name}": amount
        for model, found in fields.pop("model_limits").items()
        for name, amount in found.items()
    }
    own = fields.pop("end_user_limits").items()
    of_users = {f"end_user_limits.{name}": amount for name, amount in own}
    return {"models": fields.pop("models"), **limits, **of_models, **of_users, **fields}


# Under one hash tag: a script changes them together.
KEYS = "gw:{store}:keys"
TENANTS = "gw:{store}:tenants"
VERSION = "gw:{store}:version"
# Digest of the first key, on which all gateways of this store agree.
FIRST_KEY = "gw:{store}:first_key"
# Keys and tenants that operators removed lately, by time.
REMOVALS = "gw:{store}:removals"
# No gateway keeps what it lost for longer.
REMOVALS_KEPT_S = 30 * 24 * 3600
CHANGE = load_script("version", "change", package="gateway.tenants")
CREATE_KEY = load_script("version", "create_key", package="gateway.tenants")
REMOVE_TENANT = load_script("version", "remove_tenant", package="gateway.tenants")
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
    """Store of keys and tenants. All operations raise StoreUnavailable if Redis does not reply."""

    def __init__(self, client: RedisClient) -> None:
        self._client = client

    async def create_key(self, key: StoredKey) -> KeyCreation:
        """Add a key, unless there is one of the same id."""
        argument = {
            "version": _new_version(),
            "id": key.id,
            "key": msgspec.json.encode(key).decode(),
            "tenant": key.tenant,
        }
        reply = await self._run(CREATE_KEY, (KEYS, TENANTS, VERSION), argument)
        return msgspec.msgpack.decode(reply, type=KeyCreation)

    async def revoke(self, id_: str) -> bool:
        """Remove a key; return False if there is none of that id."""
        removed, _ = await self._change(KEYS, id_, removal_of_key(id_))
        return removed > 0

    async def keys(self) -> list[StoredKey]:
        """Return every key, by id. A key that cannot be read is logged and left out."""
        fields = await self._client.execute("HGETALL", KEYS)
        keys = [_read_key(_text(id_), value) for id_, value in fields.items()]
        return sorted((key for key in keys if key is not None), key=lambda key: key.id)

    async def put_tenant(self, name: str, settings: config.TenantConfig) -> bool:
        """Add a tenant, or replace its settings. Return True if it is the first one."""
        return (await self.change_tenant(name, lambda _: settings)).is_first

    async def change_tenant(self, name: str, change: SettingsChange) -> TenantChange:
        """Replace the settings of a tenant by what a function makes of them. Raises: as the function.

        What another client stores meanwhile is not lost: the function is called again with it.
        """
        for _ in range(CHANGE_ATTEMPTS):
            stored = await self._client.execute("HGET", TENANTS, name)
            before = None if stored is None else _read_tenant(name, stored)
            after = change(before)
            value = msgspec.json.encode(after).decode()
            try:
                expected = (stored or b"").decode()
            except UnicodeDecodeError:
                # No release has written it.
                expected = None
            removed, is_first = await self._change(TENANTS, name, removal_of_tenant(name), value, expected)
            if removed >= 0:
                return TenantChange(before, after, is_first)
        raise StoreUnavailable(f"others change the tenant {name!r} all the time; try again")

    async def remove_tenant(self, name: str) -> bool:
        """Remove a tenant with its keys, which would be refused without it.

        Return False if neither exists.
        """
        argument: dict[str, str | int] = {
            "version": _new_version(),
            "tenant": name,
            "removal": removal_of_tenant(name),
            "kept": REMOVALS_KEPT_S,
        }
        removed = await self._run(REMOVE_TENANT, (KEYS, TENANTS, VERSION, REMOVALS), argument)
        return msgspec.msgpack.decode(removed, type=int) > 0

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

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _change(
        self, hash_: str, field: str, removal: str, value: str | None = None, expected: str | None = None
    ) -> tuple[int, bool]:
        """Set or remove a field. Return the number of removed fields, and if there was no tenant before.

        expected: the value that the field has, empty for none. If it has another, nothing is changed, and the
        number is -1.
        """
        argument: dict[str, str | int] = {
            "version": _new_version(),
            "field": field,
            "removal": removal,
            "kept": REMOVALS_KEPT_S,
        }
        if value is not None:
            argument["value"] = value
        if expected is not None:
            argument["expected"] = expected
        reply = await self._run(CHANGE, (hash_, VERSION, TENANTS, REMOVALS), argument)
        return msgspec.msgpack.decode(reply, type=tuple[int, bool])

    async def _run(self, script: Script, keys: Sequence[str], argument: Mapping[str, str | int]) -> bytes:
        return await self._client.run_script(script, keys, msgspec.msgpack.encode(argument))


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
