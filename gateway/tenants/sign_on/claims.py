"""Claims of a token: whether they admit it, and what they stand for. Pure."""

import hashlib
import re
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from gateway.config.schema import ClaimMapping, ClaimPath, ScopesClaim, TenantClaim
from gateway.errors import TenantUnknown, TokenRefused
from gateway.tenants.keyring import OPERATIONS, OPERATORS, StoredKey

# In a table: for tokens that have none of its other entries.
ANY = "*"
# Ids of users that stand in logs, headers and limits as they are. All others are hashed.
SAFE_ID = re.compile(r"(?!sha256-)[A-Za-z0-9._@+|-]{1,64}")
Claims = Mapping[str, Any]
Entry = TypeVar("Entry")


def check_claims(claims: Claims, audience: Collection[str], now_s: float, skew_s: float) -> None:
    """Check that a token is meant for an audience, and now. Raises: TokenRefused."""
    if "events" in claims:
        raise TokenRefused("type", "the token reports an event, such as a sign-out; it is no credential")
    expires_s = _moment(claims, "exp")
    if expires_s is None:
        raise TokenRefused("claims", "the token has no time at which it expires (exp)")
    if expires_s + skew_s <= now_s:
        raise TokenRefused("expired", "the token has expired")
    if (begins_s := _moment(claims, "nbf")) is not None and begins_s - skew_s > now_s:
        raise TokenRefused("not_yet_valid", "the token is not valid yet (nbf)")
    if (issued_s := _moment(claims, "iat")) is not None and issued_s - skew_s > now_s:
        raise TokenRefused("not_yet_valid", "the token was issued in the future (iat)")
    meant_for = claims.get("aud")
    named = [meant_for] if isinstance(meant_for, str) else meant_for
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise TokenRefused("claims", "the token has no audience (aud), which is a text or a list of texts")
    if not any(name in audience for name in named):
        raise TokenRefused("audience", "the token is meant for others (aud)")


def stored_key_of(claims: Claims, issuer: str, mapping: ClaimMapping) -> StoredKey:
    """Return what the claims of a verified token stand for, as if it were a key. issuer: its name here.

    Raises: TokenRefused, TenantUnknown.
    """
    models = mapping.models
    return StoredKey(
        f"{issuer}:{_user_id(claims, mapping.key)}",
        "",
        _tenant_of(claims, mapping.tenant),
        expires_s=_moment(claims, "exp"),
        scopes=None if mapping.scopes is None else _scopes_of(claims, mapping.scopes),
        models=None if models is None else tuple(_added(values_of(claims, models.claim), models.values)),
        limits=_limits_of(claims, mapping),
    )


def values_of(claims: Claims, path: ClaimPath) -> list[str]:
    """Return the texts of a claim, which is one or a list of them; none if it is missing or anything else."""
    value = _value_of(claims, path)
    if isinstance(value, str):
        return [value]
    return [entry for entry in value if isinstance(entry, str)] if isinstance(value, list) else []


def _value_of(claims: Claims, path: ClaimPath) -> Any:
    """Return a claim as it is, None if it is missing."""
    value: Any = claims
    for name in (path,) if isinstance(path, str) else path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _moment(claims: Claims, name: str) -> float | None:
    """Return seconds since 1970, None without the claim. Raises: TokenRefused."""
    value = claims.get(name)
    if value is None and name not in claims:
        return None
    # True is a number to Python. Whole numbers beyond the range of float are no times either.
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e15:
        raise TokenRefused("claims", f"the token has a time ({name}) that is not a number of seconds")
    return float(value)


def _user_id(claims: Claims, path: ClaimPath) -> str:
    values = values_of(claims, path)
    if len(values) != 1 or not values[0]:
        raise TokenRefused("claims", "the token has no claim that identifies its user")
    if SAFE_ID.fullmatch(values[0]):
        return values[0]
    return "sha256-" + hashlib.sha256(values[0].encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _tenant_of(claims: Claims, mapping: TenantClaim) -> str:
    values = values_of(claims, mapping.claim)
    if mapping.values is not None:
        if (tenant := _first(values, mapping.values)) is not None:
            return tenant
        raise TenantUnknown("no tenant is mapped to the claims of this token; ask the operator")
    # Operators are made by an entry of a table only, not by an issuer's words.
    if len(set(values)) != 1 or values[0] == OPERATORS:
        raise TenantUnknown("the claims of this token name no tenant, or several; ask the operator")
    return values[0]


def _scopes_of(claims: Claims, mapping: ScopesClaim) -> tuple[str, ...]:
    words = values_of(claims, mapping.claim)
    if isinstance(text := _value_of(claims, mapping.claim), str):
        # OAuth's `scope` is one text with spaces between its words (RFC 6749 §3.3). An entry of a list is one
        # name, which may contain the name of another group.
        words += [word for word in text.split(" ") if word]
    scopes = _added(words, mapping.values)
    return tuple(scopes if mapping.values is not None else (scope for scope in scopes if scope in OPERATIONS))


def _limits_of(claims: Claims, mapping: ClaimMapping) -> dict[str, int | float]:
    if mapping.limits is None:
        return {}
    limits = _first(values_of(claims, mapping.limits.claim), mapping.limits.values)
    if limits is None:
        raise TenantUnknown("no limits are mapped to the claims of this token; ask the operator")
    return limits


def _first(values: Collection[str], table: Mapping[str, Entry]) -> Entry | None:
    """Return the first entry of a table that is among the values."""
    return next((entry for value, entry in table.items() if value in values), table.get(ANY))


def _added(values: Collection[str], table: Mapping[str, tuple[str, ...]] | None) -> list[str]:
    """Return all that a table has for the values, or without a table the values themselves."""
    if table is None:
        return list(dict.fromkeys(values))
    found = [entry for value, entries in table.items() if value in values for entry in entries]
    matches = any(value in values for value in table)
    return list(dict.fromkeys(found if matches else table.get(ANY, ())))
