"""Keys expire, have scopes, and never widen the permissions of their tenant."""

from datetime import UTC, datetime
from typing import get_args

import pytest

from backends.contract import Operation
from gateway.config.schema import Key, Scope, TenantConfig
from gateway.errors import ScopeForbidden, Unauthenticated
from gateway.quotas.limits import Limit
from gateway.tenants.create_key import random_key
from gateway.tenants.keyring import OPERATIONS, SCOPE_OF, Keyring, StoredKey, key_digest

NOON_S = datetime(2026, 11, 21, 12, tzinfo=UTC).timestamp()


def keyring(now_s: float = NOON_S, **options: object) -> Keyring:
    key = Key(key_digest("secret"), id="k1", **options)  # type: ignore[arg-type]
    tenant = TenantConfig(keys=(key,), models=("bge", "cross"), limits={"requests_per_day": 10})
    return Keyring({"acme": tenant}, None, lambda: now_s)


@pytest.mark.parametrize(
    ("expires", "valid"),
    [
        (datetime(2026, 11, 21, 12, 0, 1, tzinfo=UTC), True),
        (datetime(2026, 11, 21, 12, tzinfo=UTC), False),
        (datetime(2026, 11, 22), True),  # noqa: DTZ001 - without a time zone it is UTC
        (datetime(2026, 11, 21), False),  # noqa: DTZ001
    ],
)
def test_key_is_valid_until_it_expires(expires: datetime, valid: bool) -> None:
    keys = keyring(expires=expires)
    if valid:
        assert "acme" == keys.identify("secret").name
    else:
        with pytest.raises(Unauthenticated, match="expired"):
            keys.identify("secret")


def test_every_operation_has_a_scope_that_a_key_may_name() -> None:
    assert set(Operation) == set(SCOPE_OF)
    assert OPERATIONS == set(get_args(Scope)) - {"metrics", "admin:read", "admin"}


def test_key_without_scopes_allows_operations_only() -> None:
    tenant = keyring().identify("secret")

    for scope in ("embed", "rerank", "tokenize"):
        tenant.require(scope)
    for scope in ("metrics", "admin:read", "admin"):
        with pytest.raises(ScopeForbidden):
            tenant.require(scope)


def test_key_allows_only_its_scopes() -> None:
    tenant = keyring(scopes=("rerank",)).identify("secret")

    tenant.require("rerank")
    with pytest.raises(ScopeForbidden, match="not for embed"):
        tenant.require("embed")


def test_key_models_never_widen_the_tenants() -> None:
    assert frozenset({"bge"}) == keyring(models=("bge", "other")).identify("secret").models


def test_operators_key_calls_models_only_with_their_scopes() -> None:
    keys = [Key(key_digest("master"), scopes=("embed", "admin")), key_digest("plain")]
    ring = Keyring({}, None, operators=keys)
    master, plain = ring.identify("master"), ring.identify("plain")

    master.require_operation(Operation.EMBED)
    master.require("admin")
    plain.require("admin")
    with pytest.raises(ScopeForbidden, match="not for embed"):
        plain.require_operation(Operation.EMBED)


def test_key_limits_count_separately_from_the_tenants() -> None:
    limits = keyring(limits={"requests_per_day": 3}).identify("secret").limits

    assert (
        Limit("requests", "day", 10),
        Limit("requests", "day", 3, "key k1 "),
    ) == limits
    assert "key k1 requests_per_day" == limits[1].name


def test_configured_keys_take_precedence_over_stored_keys() -> None:
    keys = keyring()
    stored = StoredKey("k2", key_digest("second"), "acme")
    keys.replace_stored([stored, StoredKey("thief", key_digest("secret"), "other")])

    assert {"requests_per_day": 10} == {limit.name: limit.amount for limit in keys.identify("second").limits}
    assert "acme" == keys.identify("secret").name
    keys.replace_stored([])
    with pytest.raises(Unauthenticated):
        keys.identify("second")
    assert "acme" == keys.identify("secret").name


def test_random_keys_contain_their_id_and_are_unique() -> None:
    keys = {random_key("abc") for _ in range(100)}

    assert 100 == len(keys)
    assert all(key.startswith("gw_abc_") and len(key) > 40 for key in keys)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, False),
        ({"scopes": tuple(OPERATIONS)}, False),
        ({"scopes": (*OPERATIONS, "metrics")}, False),
        ({"scopes": ("embed", "rerank")}, True),
        ({"models": ("bge", "cross")}, True),
    ],
)
def test_a_key_is_narrowed_by_models_and_by_missing_scopes(
    options: dict[str, object], expected: bool
) -> None:
    assert expected is keyring(**options).identify("secret").is_narrowed


def test_a_user_of_single_sign_on_is_narrowed() -> None:
    assert keyring().owner_of(StoredKey("okta:alice", "", "acme")).is_narrowed
