"""Creation of API keys, and rules for the names of keys and tenants."""

import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime

import msgspec

from gateway.config.schema import LimitAmount
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
    configured_tenants: Collection[str] = (),
) -> NewKey:
    """Create a key; it is not stored yet.

    id_: random if None. expires: UTC if it has no time zone. scopes, models: None means all. limits: of the
    key, in addition to its tenant's. configured_tenants: tenants of router.yaml, whose names need not be
    segments of a path. Raises: InvalidKeySettings.
    """
    if problem := id_problem(id_):
        raise InvalidKeySettings("id", problem)
    if tenant not in configured_tenants and (problem := name_problem(tenant)):
        raise InvalidKeySettings("tenant", problem)
    now_s, expires_s = time.time(), unix_seconds(expires)
    if expires_s is not None and expires_s <= now_s:
        raise InvalidKeySettings("expires", "that is in the past")
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
    )
    return NewKey(text, stored)


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
    return None
