"""Lookup of the tenant that owns an API key. Stores digests; a key in the clear is never stored.

Keys and tenants come from router.yaml, and also from Redis if quotas are stored there
(`tenants/store.py`). If a tenant is defined in both, the settings of router.yaml apply as a whole, and the
keys of both are valid.
"""

import hashlib
import hmac
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Literal

import msgspec

from backends.contract import Operation
from gateway.config import schema as config
from gateway.errors import QuotaUnavailable, ScopeForbidden, Unauthenticated
from gateway.quotas.limits import Limit, parse_limit

# Tenant of the first key, which is generated or taken from GATEWAY_API_KEY if no tenant is configured.
FIRST_TENANT = "default"
# Owner of the keys in `admin.keys`: no tenant that calls models.
OPERATORS = "operators"
OPERATOR_SCOPES = ("admin", "metrics")
# Operations that the scope of another one includes: the same texts at the same cost.
COVERED_BY = {Operation.ENCODE: Operation.EMBED, Operation.DETOKENIZE: Operation.TOKENIZE}
OPERATIONS: frozenset[str] = frozenset(
    operation.value for operation in Operation if operation not in COVERED_BY
)


class FirstKey(msgspec.Struct, frozen=True):
    """The key that is valid while no tenant is configured.

    is_pending: it becomes valid only when the store turns out to contain no other keys or tenants.
    """

    digest: str
    is_pending: bool = False


class StoredKey(msgspec.Struct, frozen=True):
    """A key as it is stored, never in the clear.

    id: the name under which it is listed and revoked. expires_s: seconds since 1970; None is never. scopes:
    operations, `metrics`, `admin`; None is all operations. models, limits: narrower than the tenant's.
    """

    id: str
    digest: str
    tenant: str
    expires_s: float | None = None
    scopes: tuple[str, ...] | None = None
    models: tuple[str, ...] | None = None
    limits: dict[str, config.LimitAmount] = {}
    created_s: float = 0.0


class Tenant(msgspec.Struct, frozen=True):
    """Owner of a request: its permissions and limits, narrowed to those of the key that was sent.

    models: None means all. model_limits: by model, in place of the model's own limits.
    """

    name: str
    models: frozenset[str] | None = None
    limits: tuple[Limit, ...] = ()
    model_limits: Mapping[str, tuple[Limit, ...]] = {}
    weight: int = 1
    priority: Literal["interactive", "bulk"] = "interactive"
    queue_tokens: int | None = None
    join: bool = True
    key_id: str = ""
    scopes: frozenset[str] = OPERATIONS
    expires_s: float | None = None

    def may_use(self, model: str) -> bool:
        """Return True if this tenant may call the model of that name."""
        return self.models is None or model in self.models

    def require_operation(self, operation: Operation) -> None:
        """Check that the key's scopes include an operation. Raises: ScopeForbidden."""
        self.require(COVERED_BY.get(operation, operation).value)

    def require(self, scope: str) -> None:
        """Check that the key has a scope. Raises: ScopeForbidden."""
        if scope not in self.scopes:
            raise ScopeForbidden(f"this key is not for {scope}")


class Keyring:
    """All keys that are valid now, by digest. now_s: the wall clock.

    has_store: keys are stored in Redis too. Until they have been read, an unknown key may still be valid.
    """

    def __init__(
        self,
        tenants: Mapping[str, config.TenantConfig],
        first_key: FirstKey | None,
        now_s: Callable[[], float] = time.time,
        *,
        operators: Iterable[str | config.Key] = (),
        has_store: bool = False,
    ) -> None:
        self._now_s = now_s
        self._store_unread = has_store
        self._stored_keys: tuple[StoredKey, ...] = ()
        self._stored_tenants: Mapping[str, config.TenantConfig] = {}
        scopes = (*sorted(OPERATIONS), "metrics", "admin")
        self._first = first_key and StoredKey("first", first_key.digest, FIRST_TENANT, scopes=scopes)
        self._first_key_pending = first_key is not None and first_key.is_pending
        self.replace_configured(tenants, operators)

    def replace_configured(
        self, tenants: Mapping[str, config.TenantConfig], operators: Iterable[str | config.Key] = ()
    ) -> None:
        """Replace the tenants and keys of router.yaml.

        The first key is valid only while router.yaml has no tenant.
        """
        self._tenants = tenants
        self._keys = [
            _configured_key(name, key, index)
            for name, tenant in tenants.items()
            for index, key in enumerate(tenant.keys)
        ]
        operator_keys = [_configured_key(OPERATORS, key, index) for index, key in enumerate(operators)]
        self._keys += [
            msgspec.structs.replace(key, scopes=key.scopes or OPERATOR_SCOPES) for key in operator_keys
        ]
        self._rebuild()

    @property
    def first_key_pending(self) -> bool:
        """True until the store has shown if the first key is valid."""
        return self._first_key_pending

    def resolve_first_key(self, *, is_active: bool) -> None:
        """Decide a pending first key: it is active if the store contains no keys and no tenants."""
        if not is_active:
            self._first = None
        self._first_key_pending = False
        self._rebuild()

    def replace_stored(
        self, keys: Iterable[StoredKey], tenants: Mapping[str, config.TenantConfig] | None = None
    ) -> None:
        """Replace the stored keys and tenants; those of router.yaml stay and take precedence."""
        self._store_unread = False
        self._stored_keys, self._stored_tenants = tuple(keys), tenants or {}
        self._rebuild()

    def forget_stored(self) -> None:
        """Drop all stored keys, because the store has been down for too long to trust them."""
        self._stored_keys, self._stored_tenants = (), {}
        self._store_unread = True
        self._rebuild()

    def identify(self, api_key: str | None) -> Tenant:
        """Return the owner of a key.

        Raises: Unauthenticated; QuotaUnavailable if the key may be in the store, which is down. The message
        never repeats the key.
        """
        if not api_key:
            raise Unauthenticated("no API key: send the header `Authorization: Bearer <key>`")
        digest = key_digest(api_key)
        # The time of a lookup by SHA-256 reveals nothing about a nearly right key, and the comparison with
        # the found digest takes constant time.
        found, tenant = self._owners.get(digest, ("", None))
        if not hmac.compare_digest(found, digest) or tenant is None:
            if self._store_unread:
                raise QuotaUnavailable(
                    "the key store is unavailable, and this key is not known", retry_after_s=1
                )
            raise Unauthenticated("this API key is not known here")
        if tenant.expires_s is not None and tenant.expires_s <= self._now_s():
            raise Unauthenticated("this API key has expired")
        return tenant

    def _rebuild(self) -> None:
        """Rebuild the owners by digest; keys of router.yaml take precedence."""
        configured = list(self._keys)
        if self._first and not self._first_key_pending and not self._tenants:
            configured.insert(0, self._first)
        tenants = {**self._stored_tenants, **self._tenants}
        self._owners = {
            **_owners_of(self._stored_keys, tenants),
            **_owners_of(configured, self._tenants),
        }


def key_digest(api_key: str) -> str:
    """Return the digest under which a key is configured: sha256: and 64 hex digits of the whole key."""
    return "sha256:" + hashlib.sha256(api_key.encode("utf-8", "surrogateescape")).hexdigest()


def model_scope(model: str) -> str:
    """Return the prefix for the name of a limit that counts one model only."""
    return f"model {model} "


def unix_seconds(moment: datetime | None) -> float | None:
    """Return seconds since 1970 of a moment, which is UTC if it has no time zone."""
    if moment is None:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _owners_of(
    keys: Iterable[StoredKey], tenants: Mapping[str, config.TenantConfig]
) -> dict[str, tuple[str, Tenant]]:
    return {
        key.digest: (key.digest, _owner(tenants.get(key.tenant, config.TenantConfig()), key)) for key in keys
    }


def _configured_key(tenant: str, key: str | config.Key, index: int) -> StoredKey:
    if isinstance(key, str):
        return StoredKey(f"{tenant}-{index}", key, tenant)
    return StoredKey(
        key.id or f"{tenant}-{index}",
        key.digest,
        tenant,
        expires_s=unix_seconds(key.expires),
        scopes=key.scopes,
        models=key.models,
        limits=key.limits,
    )


def _owner(settings: config.TenantConfig, key: StoredKey) -> Tenant:
    limits = [parse_limit(name, amount) for name, amount in settings.limits.items()]
    # A key's own limits are counted in addition to the tenant's, under names with the key's id.
    limits += [parse_limit(name, amount, f"key {key.id} ") for name, amount in key.limits.items()]
    return Tenant(
        key.tenant,
        models=_intersection(settings.models, key.models),
        limits=tuple(limits),
        model_limits={
            model: tuple(parse_limit(name, amount, model_scope(model)) for name, amount in own.items())
            for model, own in settings.model_limits.items()
        },
        weight=settings.weight,
        priority=settings.priority,
        queue_tokens=settings.queue_tokens,
        join=settings.join,
        key_id=key.id,
        scopes=OPERATIONS if key.scopes is None else frozenset(key.scopes),
        expires_s=key.expires_s,
    )


def _intersection(first: Iterable[str] | None, second: Iterable[str] | None) -> frozenset[str] | None:
    """Return the names in both lists, where None stands for all names."""
    if first is None or second is None:
        names = first if first is not None else second
        return None if names is None else frozenset(names)
    return frozenset(first) & frozenset(second)
