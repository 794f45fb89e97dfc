"""From an API key to the tenant that owns it. Holds digests; a key in the clear is never kept.

Keys and tenants come from router.yaml and, where quotas are kept in Redis, from there too
(`tenants/store.py`). A tenant that stands in both is as router.yaml says, whole; its keys are those of both.
"""

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Literal

import msgspec

from backends.contract import Operation
from gateway.config import schema as config
from gateway.errors import QuotaUnavailable, ScopeForbidden, Unauthenticated
from gateway.quotas.limits import Limit, parse_limit

# The tenant of the key that is made, or taken from GATEWAY_API_KEY, where none is configured.
FIRST_TENANT = "default"
# Of what stands in headers and paths, which have bounds of their own.
NAME_CHARACTERS_MAX = 1000
# Whose keys `admin.keys` are: nobody who calls models.
OPERATORS = "operators"
OPERATOR_SCOPES = ("admin", "metrics")
# A key that may do the one may do the other: the same texts, the same cost.
COVERED_BY = {Operation.ENCODE: Operation.EMBED, Operation.DETOKENIZE: Operation.TOKENIZE}
OPERATIONS: frozenset[str] = frozenset(one.value for one in Operation if one not in COVERED_BY)


class StoredKey(msgspec.Struct, frozen=True):
    """A key as it is stored, never in the clear.

    id: what it is listed and revoked by. expires_s: seconds since 1970; None is never. scopes: operations,
    `metrics`, `admin`; None is all operations. models, limits: narrower than the tenant's.
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
    """Who pays and is limited, with the key that was shown; models None means all.

    model_limits: by model, what stands in for the model's own limits.
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
        """Whether this tenant may call the model of that name."""
        return self.models is None or model in self.models

    def require_operation(self, operation: Operation) -> None:
        """Raises: ScopeForbidden, unless the key is for this."""
        self.require(COVERED_BY.get(operation, operation).value)

    def require(self, scope: str) -> None:
        """Raises: ScopeForbidden, unless the key is for this."""
        if scope not in self.scopes:
            raise ScopeForbidden(f"this key is not for {scope}")


class Keyring:
    """All keys that are valid now, by digest. now_s: the wall clock.

    first_key_pending: the first key stands in only once the store has told that it holds no others.
    stored: there is a store of keys; until it has told them, one that is not known here may still be good.
    """

    def __init__(
        self,
        tenants: Mapping[str, config.TenantConfig],
        first_key_digest: str | None,
        now_s: Callable[[], float] = time.time,
        *,
        operators: Iterable[str | config.Key] = (),
        first_key_pending: bool = False,
        stored: bool = False,
    ) -> None:
        self._now_s = now_s
        self._untold = stored
        self._stored_keys: tuple[StoredKey, ...] = ()
        self._stored_tenants: Mapping[str, config.TenantConfig] = {}
        everything = (*sorted(OPERATIONS), "metrics", "admin")
        self._first = first_key_digest and StoredKey(
            "first", first_key_digest, FIRST_TENANT, scopes=everything
        )
        self._first_key_pending = first_key_pending and self._first is not None
        self.replace_configured(tenants, operators)

    def replace_configured(
        self, tenants: Mapping[str, config.TenantConfig], operators: Iterable[str | config.Key] = ()
    ) -> None:
        """From now on router.yaml lists these; the first key stands in only where it has no tenants."""
        self._tenants = tenants
        self._keys = [
            _listed(name, key, index) for name, one in tenants.items() for index, key in enumerate(one.keys)
        ]
        self._keys += [
            msgspec.structs.replace(key, scopes=key.scopes or OPERATOR_SCOPES)
            for key in (_listed(OPERATORS, one, index) for index, one in enumerate(operators))
        ]
        self._settle()

    @property
    def first_key_pending(self) -> bool:
        """Whether it is still undecided if the first key stands in."""
        return self._first_key_pending

    def resolve_first_key(self, *, is_active: bool) -> None:
        """The store has told whether it holds keys or tenants: without any the first key stands in."""
        if not is_active:
            self._first = None
        self._first_key_pending = False
        self._settle()

    def replace_stored(
        self, keys: Iterable[StoredKey], tenants: Mapping[str, config.TenantConfig] | None = None
    ) -> None:
        """From now on these are the stored keys and tenants; what router.yaml lists stays, and wins."""
        self._untold = False
        self._stored_keys, self._stored_tenants = tuple(keys), tenants or {}
        self._settle()

    def forget_stored(self) -> None:
        """The store has been away for too long: nobody knows any more what it holds."""
        self._stored_keys, self._stored_tenants = (), {}
        self._untold = True
        self._settle()

    def identify(self, api_key: str | None) -> Tenant:
        """The owner of a key.

        Raises: Unauthenticated; QuotaUnavailable where only the store, which is away, could tell. The message
        never repeats what was sent.
        """
        if not api_key:
            raise Unauthenticated("no API key: send the header `Authorization: Bearer <key>`")
        digest = key_digest(api_key)
        # A lookup by SHA-256 of what was sent tells by its time nothing of a key that is nearly right; the
        # comparison with what was found takes the same time whatever that is.
        found, tenant = self._owners.get(digest, ("", None))
        if not hmac.compare_digest(found, digest) or tenant is None:
            if self._untold:
                raise QuotaUnavailable(
                    "the store of keys is away, and this key is not known", retry_after_s=1
                )
            raise Unauthenticated("this API key is not known here")
        if tenant.expires_s is not None and tenant.expires_s <= self._now_s():
            raise Unauthenticated("this API key has expired")
        return tenant

    def _settle(self) -> None:
        """Whose each key is; those of router.yaml win."""
        listed = list(self._keys)
        if self._first and not self._first_key_pending and not self._tenants:
            listed.insert(0, self._first)
        tenants = {**self._stored_tenants, **self._tenants}
        self._owners = {
            **_owners_of(self._stored_keys, tenants),
            **_owners_of(listed, self._tenants),
        }


def _owners_of(
    keys: Iterable[StoredKey], tenants: Mapping[str, config.TenantConfig]
) -> dict[str, tuple[str, Tenant]]:
    return {
        key.digest: (key.digest, _owner(tenants.get(key.tenant, config.TenantConfig()), key)) for key in keys
    }


def key_digest(api_key: str) -> str:
    """The form in which keys are listed: sha256: and 64 hex digits of the whole key."""
    return "sha256:" + hashlib.sha256(api_key.encode("utf-8", "surrogateescape")).hexdigest()


def new_key(id_: str | None = None) -> str:
    """A key as this project makes them: gw_<id>_<secret>, 160 random bits in the secret."""
    return f"gw_{id_ or secrets.token_hex(4)}_{secrets.token_hex(20)}"


def _listed(tenant: str, key: str | config.Key, index: int) -> StoredKey:
    if isinstance(key, str):
        return StoredKey(f"{tenant}-{index}", key, tenant)
    return StoredKey(
        key.id or f"{tenant}-{index}",
        key.digest,
        tenant,
        expires_s=_seconds(key.expires),
        scopes=key.scopes,
        models=key.models,
        limits=key.limits,
    )


def _owner(settings: config.TenantConfig, key: StoredKey) -> Tenant:
    limits = [parse_limit(name, amount) for name, amount in settings.limits.items()]
    # A key's own limits are counted beside the tenant's, under a name of their own.
    limits += [parse_limit(name, amount, f"key {key.id} ") for name, amount in key.limits.items()]
    return Tenant(
        key.tenant,
        models=_both(settings.models, key.models),
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


def model_scope(model: str) -> str:
    """What stands before the name of a limit that counts one model only."""
    return f"model {model} "


def _both(one: Iterable[str] | None, other: Iterable[str] | None) -> frozenset[str] | None:
    if one is None or other is None:
        known = one if one is not None else other
        return None if known is None else frozenset(known)
    return frozenset(one) & frozenset(other)


def name_problem(name: str | None) -> str | None:
    """Why operators could not name a key, or a tenant in Redis, so: over HTTP it is one segment of a path."""
    if name is None:
        return None
    if not name.isprintable() or name.strip() != name or name in ("", ".", ".."):
        return "a name is not empty, and has no spaces around it and nothing that cannot be shown"
    if len(name) > NAME_CHARACTERS_MAX:
        return f"a name has {NAME_CHARACTERS_MAX} characters at most"
    return "a name has no /" if "/" in name else None


def id_problem(id_: str | None) -> str | None:
    """Why operators could not name a key so by its id, which stands in the key, and so in a header."""
    if problem := name_problem(id_):
        return problem
    if id_ is not None and not (id_.isascii() and " " not in id_):
        return "an id stands in the key itself: it has ASCII characters alone, and no spaces"
    return None


def unknown_tenant_note(tenant: str) -> str:
    """What operators are told whose key is of a tenant that was never set."""
    return f"tenant {tenant} is in neither router.yaml nor Redis: its calls have no limits but its keys' own"


def make_key(
    tenant: str,
    id_: str | None,
    expires: datetime | None,
    scopes: Iterable[str] | None,
    models: Iterable[str] | None,
    limits: Mapping[str, int],
) -> tuple[str, StoredKey]:
    """A new key in the clear, and what is stored of it. expires: without a time zone it is UTC."""
    chosen = id_ or secrets.token_hex(4)
    key = new_key(chosen)
    return key, StoredKey(
        chosen,
        key_digest(key),
        tenant,
        expires_s=_seconds(expires),
        scopes=None if scopes is None else tuple(scopes),
        models=None if models is None else tuple(models),
        limits=dict(limits),
        created_s=time.time(),
    )


def _seconds(moment: datetime | None) -> float | None:
    if moment is None:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
