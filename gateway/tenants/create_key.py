"""Creation of API keys, and rules for the names of keys and tenants."""

import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime

import msgspec

from gateway.config.schema import LimitAmount, default_problems
from gateway.tenants.client_certificate import ID_PREFIX
from gateway.tenants.keyring import StoredKey, key_digest, unix_seconds

# Names appear in headers and paths, which have size limits of their own.
NAME_CHARACTERS_MAX = 1000


class NewKey(msgspec.Struct, frozen=True):
    """A new key in the clear, shown once, and the form in which it is stored."""

    text: str
    stored: StoredKey


class InvalidKeySettings(ValueError):
    """A setting that no key may have. field: its name."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


def make_key(
    tenant: str,
    id_: str | None = None,
    *,
    expires: datetime | None = None,
    scopes: Sequence[str] | None = None,
    models: Sequence[str] | None = None,
    limits: Mapping[str, LimitAmount],
    defaults: Mapping[str, str] = {},
    tenant_models: Collection[str] | None = None,
    created_by: str = "",
    configured_tenants: Collection[str] = (),
) -> NewKey:
    """Create a key; it is not stored yet.

    id_: random if None. expires: UTC if it has no time zone. scopes, models: None means all. limits: of the
    key, in addition to its tenant's. defaults: models of requests that name none. tenant_models: those that
    its tenant may use, as far as that is known. created_by: name of the actor. configured_tenants: tenants of
    router.yaml, whose names need not be segments of a path. Raises: InvalidKeySettings.
    """
    if problem := id_problem(id_):
        raise InvalidKeySettings("id", problem)
    if tenant not in configured_tenants and (problem := name_problem(tenant)):
        raise InvalidKeySettings("tenant", problem)
    now_s, expires_s = time.time(), unix_seconds(expires)
    if expires_s is not None and expires_s <= now_s:
        raise InvalidKeySettings("expires", "that is in the past")
    for operation, problem in default_problems(defaults, scopes, models, tenant_models):
        raise InvalidKeySettings("default", f"{operation}: {problem}")
    id_ = id_ or _random_id()
    text = random_key(id_)
    stored = StoredKey(
        id_,
        key_digest(text),
        tenant,
        expires_s=expires_s,
        scopes=None if scopes is None else tuple(scopes),
        models=None if models is None else tuple(models),
        limits=dict(limits),
        created_s=now_s,
        created_by=created_by,
        defaults=dict(defaults),
    )
    return NewKey(text, stored)


class CannotRotate(ValueError):
    """A key cannot have a successor; the message says why."""


def new_secret(id_: str | None) -> tuple[str, str]:
    """Return id and text of a key that takes its settings from another. Raises: InvalidKeySettings."""
    if problem := id_problem(id_):
        raise InvalidKeySettings("id", problem)
    id_ = id_ or _random_id()
    return id_, random_key(id_)


def succeed(
    key: StoredKey, secret: tuple[str, str], overlap_s: float, created_by: str
) -> tuple[StoredKey, StoredKey]:
    """Return a key as it ends after the overlap, and its successor, which may do the same.

    secret: id and text of the successor. created_by: name of the actor. A key that expires is succeeded by
    one that lives as long. Raises: CannotRotate.
    """
    now_s = time.time()
    if key.successor:
        raise CannotRotate(f"the key {key.id!r} was rotated already: rotate its successor {key.successor!r}")
    if key.expires_s is not None and key.expires_s <= now_s:
        raise CannotRotate(f"the key {key.id!r} has expired: create another one")
    id_, text = secret
    expires_s = key.expires_s
    if expires_s is not None and key.created_s:
        expires_s = now_s + expires_s - key.created_s
    successor = msgspec.structs.replace(
        key,
        id=id_,
        digest=key_digest(text),
        expires_s=expires_s,
        created_s=now_s,
        created_by=created_by,
    )
    ends_s = now_s + overlap_s if key.expires_s is None else min(now_s + overlap_s, key.expires_s)
    return msgspec.structs.replace(key, expires_s=ends_s, successor=id_), successor


def random_key(id_: str | None = None) -> str:
    """Generate the text of a key, gw_<id>_<secret>, with 160 random bits in the secret."""
    return f"gw_{id_ or _random_id()}_{secrets.token_hex(20)}"


def _random_id() -> str:
    return secrets.token_hex(4)


def name_problem(name: str | None) -> str | None:
    """Return why this is no name for a key or a tenant, or None. Over HTTP it is one segment of a path."""
    if name is None:
        return None
    if not name.isprintable() or name.strip() != name or name in ("", ".", ".."):
        return "a name must not be empty, surrounded by spaces, or contain unprintable characters"
    if len(name) > NAME_CHARACTERS_MAX:
        return f"a name has {NAME_CHARACTERS_MAX} characters at most"
    return "a name has no /" if "/" in name else None


def id_problem(id_: str | None) -> str | None:
    """Return why this is no key id, or None. The id is part of the key, and therefore of a header."""
    if problem := name_problem(id_):
        return problem
    if id_ is not None and not (id_.isascii() and " " not in id_):
        return "an id has only ASCII characters and no spaces, because it is part of the key"
    if id_ is not None and id_.startswith(ID_PREFIX):
        return f"ids of client certificates begin with {ID_PREFIX}"
    return None
