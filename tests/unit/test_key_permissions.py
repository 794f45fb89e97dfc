"""Keys expire, are for something, and never widen what their tenant may."""

from datetime import UTC, datetime

import pytest

from gateway.config.schema import Key, TenantConfig
from gateway.errors import ScopeForbidden, Unauthenticated
from gateway.quotas.limits import Limit
from gateway.tenants.create_key import random_key
from gateway.tenants.keyring import Keyring, StoredKey, key_digest

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
def test_a_key_is_valid_until_the_moment_it_expires(expires: datetime, valid: bool) -> None:
    held = keyring(expires=expires)
    if valid:
        assert "acme" == held.identify("secret").name
    else:
        with pytest.raises(Unauthenticated, match="expired"):
            held.identify("secret")


def test_without_scopes_a_key_is_for_all_operations_and_nothing_else() -> None:
    tenant = keyring().identify("secret")

    for scope in ("embed", "rerank", "tokenize"):
        tenant.require(scope)
    for scope in ("metrics", "admin"):
        with pytest.raises(ScopeForbidden):
            tenant.require(scope)


def test_scopes_are_all_that_a_key_is_for() -> None:
    tenant = keyring(scopes=("rerank",)).identify("secret")

    tenant.require("rerank")
    with pytest.raises(ScopeForbidden, match="not for embed"):
        tenant.require("embed")


def test_a_keys_models_are_narrower_than_its_tenants_and_never_wider() -> None:
    assert frozenset({"bge"}) == keyring(models=("bge", "other")).identify("secret").models


def test_a_keys_limits_are_counted_beside_its_tenants_under_a_name_of_their_own() -> None:
    limits = keyring(limits={"requests_per_day": 3}).identify("secret").limits

    assert (
        Limit("requests", "day", 10),
        Limit("requests", "day", 3, "key k1 "),
    ) == limits
    assert "key k1 requests_per_day" == limits[1].name


def test_what_router_yaml_lists_wins_over_what_is_stored_and_stays_when_that_goes() -> None:
    held = keyring()
    stored = StoredKey("k2", key_digest("second"), "acme")
    held.replace_stored([stored, StoredKey("thief", key_digest("secret"), "other")])

    assert {"requests_per_day": 10} == {one.name: one.amount for one in held.identify("second").limits}
    assert "acme" == held.identify("secret").name
    held.replace_stored([])
    with pytest.raises(Unauthenticated):
        held.identify("second")
    assert "acme" == held.identify("secret").name


def test_keys_that_are_made_carry_their_id_and_are_all_different() -> None:
    keys = {random_key("abc") for _ in range(100)}

    assert 100 == len(keys)
    assert all(key.startswith("gw_abc_") and len(key) > 40 for key in keys)
