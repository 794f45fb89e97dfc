"""Lookup of the tenant that owns an API key. Stores digests; a key in the clear is never stored.

Keys and tenants come from router.yaml, and also from Redis if quotas are stored there
(`tenants/store.py`). If a tenant is defined in both, the settings of router.yaml apply as a whole, and the
keys of both are valid. A stored key is refused while its tenant is defined in neither.
"""

import hashlib
import hmac
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from ipaddress import IPv4Address, IPv6Address, ip_network
from typing import Literal

import msgspec

from backends.contract import Operation
from gateway.config import schema as config
from gateway.config.certificate_entries import canonical_entry
from gateway.errors import GatewayError, QuotaUnavailable, ScopeForbidden, TenantUnknown, Unauthenticated
from gateway.quotas.limits import Limit, is_batch_limit, parse_limit
from gateway.tenants.client_certificate import ClientCertificate, digest_of_entry, id_of

FIRST_TENANT = config.FIRST_TENANT
OPERATORS = config.OPERATORS
OPERATOR_SCOPES = ("admin", "metrics")
SCOPE_OF = config.SCOPE_OF
# Defaults of a key that count for an operation, the narrowest first.
DEFAULTS_FOR: Mapping[Operation, tuple[str, ...]] = {
    Operation.EMBED: ("embed",),
    Operation.EMBED_IMAGE: ("embed_image", "embed"),
    Operation.EMBED_AUDIO: ("embed_audio", "embed"),
    Operation.ENCODE: ("encode", "embed"),
    Operation.RERANK: ("rerank",),
    Operation.RERANK_IMAGE: ("rerank_image", "rerank"),
    Operation.CLASSIFY: ("classify",),
    Operation.TOKENIZE: ("tokenize", "embed"),
    Operation.DETOKENIZE: ("tokenize", "embed"),
}
OPERATIONS: frozenset[str] = frozenset(SCOPE_OF.values())
FIRST_KEY_SCOPES = (*sorted(OPERATIONS), "metrics", "admin")
# Begin the ids under which callers without a key appear. No stored key's id has a /.
LISTENER_PREFIX = "listener/"
NETWORK_PREFIX = "network/"
# A log line names this many keys of a tenant.
NAMED_KEYS_MAX = 5
# Hex digits of a digest: too few to find a key by, and enough to tell two keys apart.
MARK_LENGTH = 16
# Digests of former keys that are remembered; each is about 200 bytes.
FORMER_KEYS_MAX = 50_000
NO_KEY = "no API key: send the header `Authorization: Bearer <key>`"
# For an operator who creates the first tenant in the store.
FIRST_KEY_NOTE = (
    "this is the first tenant in Redis: the first key is refused after the next start of a gateway; "
    "for /admin create a key with the scope admin, or list one in `admin.keys`"
)
# For an operator whose file has its first tenant after a reload.
FIRST_KEY_ENDED_NOTE = (
    "there are tenants in router.yaml: the first key is refused from now on; "
    "for /admin create a key with the scope admin, or list one in `admin.keys`"
)

# For an operator who gives a budget to a key or a tenant.
NO_PRICE_NOTE = (
    "no model here has a price, so that nothing is spent from the budget; set `currency` and "
    "`models.<name>.price_per_million_tokens`"
)

logger = logging.getLogger("gateway")


class FirstKey(msgspec.Struct, frozen=True):
    """The key that is valid while no tenant is configured.

    digest: empty until a gateway has created the key. is_pending: it becomes valid only when the store turns
    out to contain no tenants. is_kept: all gateways of the store agree on it, and the store's digest wins.
    outlives_tenants: stored tenants do not end it.
    """

    digest: str
    is_pending: bool = False
    is_kept: bool = False
    outlives_tenants: bool = False


class StoredKey(msgspec.Struct, frozen=True):
    """A key as it is stored, never in the clear.

    id: the name under which it is listed and revoked. expires_s: seconds since 1970; None is never. scopes:
    operations, `metrics`, `admin:read`, `admin`; None is all operations. models, limits: narrower than the
    tenant's. defaults: models of requests that name none. created_by: actor of its record. successor: id of
    the key that replaces it, empty for none.
    """

    id: str
    digest: str
    tenant: str
    expires_s: float | None = None
    scopes: tuple[str, ...] | None = None
    models: tuple[str, ...] | None = None
    limits: dict[str, config.LimitAmount] = {}
    created_s: float = 0.0
    created_by: str = ""
    successor: str = ""
    defaults: dict[str, str] = {}


class Tenant(msgspec.Struct, frozen=True):
    """Owner of a request: its permissions and limits, narrowed to those of the key that was sent.

    models: None means all. model_limits: by model, in place of the model's own limits. batch_limits: count
    only lines of jobs, in addition to `limits`. end_user_limits: of each of its end users. key_mark: part of
    the key's digest, which another key of the same id lacks. is_narrowed: the key may do less than its
    tenant, or is the token of one of its users. is_keyless: no key was sent, and the caller's listener or
    network stands for one.
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
    batch_limits: tuple[Limit, ...] = ()
    key_mark: str = ""
    is_narrowed: bool = False
    end_user_limits: tuple[Limit, ...] = ()
    is_keyless: bool = False
    defaults: Mapping[str, str] = {}

    def for_batches(self) -> "Tenant":
        """Return the tenant with the limits that count for lines of its jobs."""
        if not self.batch_limits:
            return self
        return msgspec.structs.replace(self, limits=self.limits + self.batch_limits)

    @property
    def has_limits(self) -> bool:
        """True if any limit of its own may count a call."""
        return bool(self.limits or self.model_limits or self.end_user_limits)

    def may_use(self, model: str) -> bool:
        """Return True if this tenant may call the model of that name."""
        return self.models is None or model in self.models

    def default_model(self, operation: Operation) -> str | None:
        """Return the key's own model of a request that names none, None if it has none."""
        names = DEFAULTS_FOR[operation]
        return next((self.defaults[name] for name in names if name in self.defaults), None)

    def require_operation(self, operation: Operation) -> None:
        """Check that the key's scopes include an operation. Raises: ScopeForbidden."""
        self.require(SCOPE_OF[operation])

    def require(self, scope: str) -> None:
        """Check that the key has a scope. Raises: ScopeForbidden."""
        if scope not in self.scopes:
            raise ScopeForbidden(f"this key is not for {scope}")

    def require_key(self) -> None:
        """Check that the caller has sent a key. Raises: Unauthenticated."""
        if self.is_keyless:
            raise Unauthenticated(NO_KEY)


class Keyring:
    """All keys that are valid now, by digest. now_s: the wall clock.

    has_store: keys are stored too. Until they have been read, an unknown key may still be valid. The same
    holds while the store is away, unless it was valid before. budgets: of tenants and keys, by their tenant.
    version: grows with each change of keys and tenants. tenant_settings: of all tenants, by name; those of
    router.yaml take precedence over stored ones.
    """

    def __init__(
        self,
        tenants: Mapping[str, config.TenantConfig],
        first_key: FirstKey | None,
        now_s: Callable[[], float] = time.time,
        *,
        operators: Iterable[str | config.Key] = (),
        operator_certificates: Sequence[str] = (),
        networks: Mapping[str, str] = {},
        has_store: bool = False,
    ) -> None:
        self._now_s = now_s
        # How far the clock of Redis is ahead, so that a key expires on all gateways at once.
        self._clock_offset_s = 0.0
        self.version = 0
        self.has_store = has_store
        self._store_unread = has_store
        self._store_is_away = False
        self._without_tenant: Mapping[str, StoredKey] = {}
        # Owners of calls without a key, by their ids.
        self._keyless: dict[str, Tenant] = {}
        self._owners: dict[str, tuple[str, Tenant]] = {}
        # Digests of keys that are valid no more, the latest last.
        self._former: dict[str, None] = {}
        # Digests of keys that were used on a day; uses of stored keys that are not noted yet, by id.
        self._used: set[str] = set()
        self._uses: dict[str, str] = {}
        self._use_day = ""
        self._stored_ids: Mapping[str, str] = {}
        self._has_warned_of_end = False
        # Entries of client certificates that several stored tenants list.
        self._shared_entries: Collection[str] = frozenset()
        self._stored_keys: tuple[StoredKey, ...] = ()
        self._stored_tenants: Mapping[str, config.TenantConfig] = {}
        self._first = first_key
        self._tenants = tenants
        self.replace_configured(tenants, operators, operator_certificates, networks)

    def replace_configured(
        self,
        tenants: Mapping[str, config.TenantConfig],
        operators: Iterable[str | config.Key] = (),
        operator_certificates: Sequence[str] = (),
        networks: Mapping[str, str] = {},
    ) -> None:
        """Replace the tenants, keys, certificates and networks of router.yaml.

        networks: → tenant of router.yaml. The first key is valid only while router.yaml has no tenant.
        """
        if tenants and self._valid_first_key is not None:
            logger.warning("%s", FIRST_KEY_ENDED_NOTE)
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
        self._operator_certificates = operator_certificates
        parsed = [(ip_network(network), network, tenant) for network, tenant in networks.items()]
        # The smallest network that has an address decides.
        self._networks = sorted(parsed, key=lambda entry: -entry[0].prefixlen)
        self._rebuild()

    @property
    def operator_ids(self) -> frozenset[str]:
        """Ids of the keys of router.yaml with the scope admin: no other key may act under them."""
        return frozenset(key.id for key in self._keys if "admin" in (key.scopes or ()))

    @property
    def first_key_pending(self) -> bool:
        """True until the store has shown if the first key is valid."""
        return self._first is not None and self._first.is_pending

    @property
    def shared_first_key(self) -> str | None:
        """Digest of a valid first key on which the gateways of the store agree, empty if none is created.

        None if there is no such key.
        """
        first = self._valid_first_key
        return first.digest if first is not None and first.is_kept else None

    @property
    def first_key_is_ending(self) -> bool:
        """True if the first key is valid only until the next start, because the store has tenants."""
        first = self._valid_first_key
        return first is not None and not first.outlives_tenants and bool(self._stored_tenants)

    @property
    def _valid_first_key(self) -> FirstKey | None:
        return None if self.first_key_pending or self._tenants else self._first

    @property
    def configured_keys(self) -> list[StoredKey]:
        """Keys of router.yaml, of tenants and of operators, after the first key if that is valid."""
        first = self._valid_first_key
        if first is None or not first.digest:
            return list(self._keys)
        return [StoredKey("first", first.digest, FIRST_TENANT, scopes=FIRST_KEY_SCOPES), *self._keys]

    @property
    def file_tenants(self) -> Mapping[str, config.TenantConfig]:
        """Tenants of router.yaml."""
        return self._tenants

    def resolve_first_key(self, *, is_active: bool, has_lost_tenants: bool = False) -> None:
        """Decide a pending first key: it is active if the store contains no tenants, and has lost none."""
        if self._first is None:
            return
        if not is_active and self._first.digest:
            reason = "Redis has lost its tenants" if has_lost_tenants else "there are tenants in Redis"
            logger.info("the first key is ignored: %s", reason)
        self._first = msgspec.structs.replace(self._first, is_pending=False) if is_active else None
        self._rebuild()

    def adopt_first_key(self, digest: str) -> None:
        """Accept the first key of the store in place of this gateway's own."""
        self._first = FirstKey(digest, is_kept=True)
        self._rebuild()

    def replace_stored(
        self,
        keys: Iterable[StoredKey],
        tenants: Mapping[str, config.TenantConfig] | None = None,
        *,
        is_current: bool = True,
    ) -> None:
        """Replace the stored keys and tenants; those of router.yaml stay and take precedence.

        is_current: they are all that the store has now, so that another key is wrong.
        """
        self._store_unread = not is_current
        self._stored_keys, self._stored_tenants = tuple(keys), tenants or {}
        self._rebuild()
        if self.first_key_is_ending and not self._has_warned_of_end:
            logger.warning("%s", FIRST_KEY_NOTE)
        self._has_warned_of_end = self.first_key_is_ending

    def forget_stored(self) -> None:
        """Drop all stored keys, because the store has been down for too long to trust them."""
        self._stored_keys, self._stored_tenants = (), {}
        self._store_unread = True
        self._rebuild()

    def follow_clock(self, offset_s: float) -> None:
        """Let stored keys expire by the clock of the store, which is so far ahead."""
        self._clock_offset_s = offset_s

    def record_store(self, *, is_away: bool) -> None:
        """Record if the store can be read: while it cannot, an unknown key may be in it."""
        self._store_is_away = is_away

    def identify(self, api_key: str | None) -> Tenant:
        """Return the owner of a key.

        Raises: Unauthenticated; TenantUnknown; QuotaUnavailable if the key may be in the store, which is
        down. The message never repeats the key.
        """
        if not api_key:
            raise Unauthenticated(NO_KEY)
        digest = key_digest(api_key)
        # The time of a lookup by SHA-256 reveals nothing about a nearly right key, and the comparison with
        # the found digest takes constant time.
        found, tenant = self._owners.get(digest, ("", None))
        if not hmac.compare_digest(found, digest) or tenant is None:
            may_be_stored = self._store_unread or (self._store_is_away and digest not in self._former)
            raise _refusal(self._without_tenant.get(digest), may_be_stored=may_be_stored)
        if tenant.expires_s is not None and tenant.expires_s <= self._now_s() + self._clock_offset_s:
            raise Unauthenticated("this API key has expired")
        if digest not in self._used:
            self._note_use(digest)
        return tenant

    def identify_certificate(self, certificate: ClientCertificate) -> Tenant:
        """Return the owner of a verified client certificate: the tenant that lists one of its entries.

        Raises: Unauthenticated; QuotaUnavailable if its tenant may be in the store, which is down.
        """
        found = [self._certificates[entry] for entry in certificate.entries if entry in self._certificates]
        names = {owner.name for owner in found}
        if len(names) > 1:
            raise Unauthenticated("several tenants list this client certificate; ask the operator")
        if not found and (self._store_unread or self._store_is_away):
            message = "the store of tenants is unavailable, and this client certificate is not known"
            raise QuotaUnavailable(message, retry_after_s=1)
        if not found:
            raise Unauthenticated(
                f"no API key, and no tenant lists this client certificate, {certificate.fingerprint}: "
                "send the header `Authorization: Bearer <key>`"
            )
        # A connection may outlive its certificate.
        if certificate.expires_s <= self._now_s():
            raise Unauthenticated("this client certificate has expired: connect with a new one")
        return found[0]

    @property
    def has_networks(self) -> bool:
        """True if callers of some networks need no key."""
        return bool(self._networks)

    def identify_network(self, address: IPv4Address | IPv6Address) -> Tenant | None:
        """Return the tenant of a caller without a key by its own address, None if it is of no network."""
        for network, written, tenant in self._networks:
            if address in network:
                return self._keyless_owner(NETWORK_PREFIX + written, tenant)
        return None

    def identify_listener(self, listener: config.ListenerSettings) -> Tenant:
        """Return the tenant of a caller without a key, by the listener that it reached.

        Raises: TenantUnknown; QuotaUnavailable if the tenant may be in the store, which is down.
        """
        return self._keyless_owner(LISTENER_PREFIX + listener.address, listener.tenant, listener.defaults)

    def _keyless_owner(self, id_: str, tenant: str, defaults: Mapping[str, str] = {}) -> Tenant:
        owner = self._keyless.get(id_)
        if owner is not None:
            return owner
        settings = self.tenant_settings.get(tenant)
        if settings is None and tenant == FIRST_TENANT and self._valid_first_key is not None:
            settings = config.TenantConfig()
        if settings is None and (self._store_unread or self._store_is_away):
            message = "the store of tenants is unavailable, and the tenant of this listener is not known"
            raise QuotaUnavailable(message, retry_after_s=1)
        if settings is None:
            raise TenantUnknown(f"the tenant of this listener, {tenant!r}, is not defined; ask the operator")
        key = StoredKey(id_, "", tenant, defaults=dict(defaults))
        owner = msgspec.structs.replace(_owner(settings, key), is_keyless=True)
        self._keyless[id_] = owner
        return owner

    def take_uses(self) -> dict[str, str]:
        """Return the stored keys that were used for the first time on a day, by id, and forget them."""
        day = self._today()
        if day != self._use_day:
            self._use_day = day
            self._used.clear()
        uses, self._uses = self._uses, {}
        return uses

    def return_uses(self, uses: Mapping[str, str]) -> None:
        """Take back uses that could not be noted."""
        self._uses = {**uses, **self._uses}

    def _note_use(self, digest: str) -> None:
        self._used.add(digest)
        if (id_ := self._stored_ids.get(digest)) is not None:
            self._uses[id_] = self._today()

    def _today(self) -> str:
        return f"{datetime.fromtimestamp(self._now_s(), UTC):%Y-%m-%d}"

    def owner_of(self, key: StoredKey) -> Tenant:
        """Return the owner of a key that is not in the keyring: of the user of a verified token.

        Raises: TenantUnknown; QuotaUnavailable if the tenant may be in the store, which is down.
        """
        settings = self.tenant_settings.get(key.tenant)
        if settings is not None:
            return _owner(settings, key)
        if key.tenant == OPERATORS:
            # They need no tenant, and without one there are no limits: they call no models.
            scopes = tuple(scope for scope in key.scopes or () if scope not in OPERATIONS)
            return _owner(config.TenantConfig(), msgspec.structs.replace(key, scopes=scopes))
        if self._store_unread or self._store_is_away:
            raise QuotaUnavailable("the store of tenants is unavailable, and this one is not known")
        raise TenantUnknown(f"the tenant of this token, {key.tenant!r}, is not defined; ask the operator")

    def owner_by_id(self, tenant: str, key_id: str, mark: str = "") -> Tenant:
        """Return the owner of a key whose job runs, with the permissions that it has now.

        mark: of the key, if known: another key of the same id is not this one.
        Raises: Unauthenticated; QuotaUnavailable if the key may be in the store, which is down.
        """
        owner = self._by_id.get((tenant, key_id))
        if owner is None or (mark and owner.key_mark != mark):
            if self._store_unread or self._store_is_away:
                raise QuotaUnavailable("the key store is unavailable", retry_after_s=1)
            raise Unauthenticated("the key that created this batch, or its tenant, no longer exists")
        if owner.expires_s is not None and owner.expires_s <= self._now_s() + self._clock_offset_s:
            raise Unauthenticated("the key that created this batch has expired")
        return owner

    def knows(self, digest: str) -> bool:
        """Return True if the key of this digest exists, even if its tenant does not."""
        return digest in self._owners or digest in self._without_tenant

    def has_known(self, digest: str) -> bool:
        """Return True if the key of this digest exists, or existed before, so that it is no guess."""
        return self.knows(digest) or digest in self._former

    def _rebuild(self) -> None:
        """Rebuild the owners by digest; keys of router.yaml take precedence."""
        configured = self.configured_keys
        self.version += 1
        self.tenant_settings = tenants = {**self._stored_tenants, **self._tenants}
        known = (*self._owners, *self._without_tenant)
        self._owners = {
            key.digest: (key.digest, _owner(tenants[key.tenant], key))
            for key in self._stored_keys
            if key.tenant in tenants
        }
        # Neither the first key nor the operators' keys need a tenant.
        unlimited = config.TenantConfig()
        for key in configured:
            self._owners[key.digest] = key.digest, _owner(self._tenants.get(key.tenant, unlimited), key)
        self._keyless = {}
        self._certificates = self._owners_by_entry(tenants)
        limits = [(owner.name, limit) for _, owner in self._owners.values() for limit in owner.limits]
        # The users of a tenant may have tokens only, and no key.
        limits += [
            (name, parse_limit(*limit)) for name, each in tenants.items() for limit in each.limits.items()
        ]
        self.budgets = frozenset((name, limit) for name, limit in limits if limit.unit == "budget")
        owners = [owner for _, owner in self._owners.values()]
        self._by_id = {(owner.name, owner.key_id): owner for owner in (*self._certificates.values(), *owners)}
        before = _ids_by_tenant(self._without_tenant.values())
        self._without_tenant = {key.digest: key for key in self._stored_keys if key.tenant not in tenants}
        for digest in known:
            if not self.knows(digest):
                self._former.pop(digest, None)
                self._former[digest] = None
        self._stored_ids = {key.digest: key.id for key in self._stored_keys}
        self._used &= self._owners.keys()
        while len(self._former) > FORMER_KEYS_MAX:
            del self._former[next(iter(self._former))]
        for tenant, ids in _ids_by_tenant(self._without_tenant.values()).items():
            if ids != before.get(tenant):
                _warn_of_missing_tenant(tenant, ids)

    def _owners_by_entry(self, tenants: Mapping[str, config.TenantConfig]) -> dict[str, Tenant]:
        """Return the owners by the entries of client certificates; those of router.yaml take precedence.

        An entry of several stored tenants identifies none of them.
        """
        of_file = {name: settings.certificates for name, settings in self._tenants.items()}
        stored = {name: each.certificates for name, each in tenants.items() if name not in of_file}
        names = _names_by_entry(stored) | _names_by_entry(of_file)
        shared = {entry for entry, listing in names.items() if len(listing) > 1}
        for entry in sorted(shared.difference(self._shared_entries)):
            logger.warning(
                "several tenants list %s, which identifies none: %s", entry, ", ".join(names[entry])
            )
        self._shared_entries = shared
        owners = {
            entry: _owner(tenants[listing[0]], _key_of_entry(entry, listing[0]))
            for entry, listing in names.items()
            if entry not in shared
        }
        for entry in map(canonical_entry, self._operator_certificates):
            key = _key_of_entry(entry, OPERATORS, OPERATOR_SCOPES)
            owners[entry] = _owner(config.TenantConfig(), key)
        return owners


def _refusal(key: StoredKey | None, *, may_be_stored: bool) -> GatewayError:
    """Return the error for a key that has no owner.

    key: as stored, if it is known. may_be_stored: the store, which may have it, cannot be read.
    """
    if key is not None:
        return TenantUnknown(
            f"the tenant of this key, {key.tenant!r}, is not defined; ask the operator to define it"
        )
    if may_be_stored:
        return QuotaUnavailable("the key store is unavailable, and this key is not known", retry_after_s=1)
    return Unauthenticated("Incorrect API key provided: this gateway does not know it")


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


def _ids_by_tenant(keys: Iterable[StoredKey]) -> dict[str, list[str]]:
    ids: dict[str, list[str]] = {}
    for key in keys:
        ids.setdefault(key.tenant, []).append(key.id)
    return ids


def _warn_of_missing_tenant(tenant: str, ids: Sequence[str]) -> None:
    names = ", ".join(map(repr, ids[:NAMED_KEYS_MAX]))
    more = f" and {len(ids) - NAMED_KEYS_MAX} more" if len(ids) > NAMED_KEYS_MAX else ""
    logger.warning(
        "tenant %r is in neither router.yaml nor Redis, and its keys are refused: %s", tenant, names + more
    )


def _names_by_entry(lists: Mapping[str, Iterable[str]]) -> dict[str, list[str]]:
    """Return the tenants that list each entry of client certificates, from their lists."""
    names: dict[str, list[str]] = {}
    for name, entries in lists.items():
        for entry in dict.fromkeys(map(canonical_entry, entries)):
            names.setdefault(entry, []).append(name)
    return names


def _key_of_entry(entry: str, tenant: str, scopes: tuple[str, ...] | None = None) -> StoredKey:
    """Return what an entry of client certificates stands for, as if it were a key."""
    return StoredKey(id_of(entry), digest_of_entry(entry), tenant, scopes=scopes)


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
        defaults=key.defaults,
    )


def _owner(settings: config.TenantConfig, key: StoredKey) -> Tenant:
    limits = [(parse_limit(name, amount), name) for name, amount in settings.limits.items()]
    # A key's own limits are counted in addition to the tenant's, under names with the key's id.
    limits += [(parse_limit(name, amount, f"key {key.id} "), name) for name, amount in key.limits.items()]
    return Tenant(
        key.tenant,
        models=_intersection(settings.models, key.models),
        limits=tuple(limit for limit, name in limits if not is_batch_limit(name)),
        batch_limits=tuple(limit for limit, name in limits if is_batch_limit(name)),
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
        key_mark=key.digest[-MARK_LENGTH:],
        is_narrowed=_is_narrowed(key),
        end_user_limits=tuple([parse_limit(*limit) for limit in settings.end_user_limits.items()]),
        defaults=key.defaults,
    )


def _is_narrowed(key: StoredKey) -> bool:
    """Return whether a key may do less than its tenant. Tokens, which have no digest, are of single users."""
    lacks_scopes = key.scopes is not None and not OPERATIONS.issubset(key.scopes)
    return lacks_scopes or key.models is not None or not key.digest


def _intersection(first: Iterable[str] | None, second: Iterable[str] | None) -> frozenset[str] | None:
    """Return the names in both lists, where None stands for all names."""
    if first is None or second is None:
        names = first if first is not None else second
        return None if names is None else frozenset(names)
    return frozenset(first) & frozenset(second)


def unknown_tenant_note(tenant: str) -> str:
    """Return the note for an operator whose key belongs to a tenant that is defined nowhere."""
    problem = f"tenant {tenant} is in neither router.yaml nor Redis"
    return f"{problem}: the key is refused until that tenant is defined"
