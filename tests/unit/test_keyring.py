"""Keyring: from an API key to its tenant, without repeating the key."""

import hashlib
import logging
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.config import schema as config
from gateway.config.schema import KEY_DIGEST
from gateway.errors import TenantUnknown, Unauthenticated
from gateway.quotas.limits import Limit
from gateway.tenants.create_key import random_key
from gateway.tenants.keyring import (
    FIRST_KEY_ENDED_NOTE,
    FIRST_TENANT,
    FirstKey,
    Keyring,
    StoredKey,
    Tenant,
    key_digest,
)

TENANTS = {
    "acme": config.TenantConfig(
        keys=(key_digest("one"), config.Key(key_digest("two"), "ci")),
        models=("bge", "cross"),
        limits={"tokens_per_minute": 5, "requests_in_flight": 2},
        weight=3,
        priority="bulk",
    ),
    "globex": config.TenantConfig(keys=(key_digest("three"),)),
    "keyless": config.TenantConfig(),
}


@pytest.mark.parametrize(("key", "tenant"), [("one", "acme"), ("two", "acme"), ("three", "globex")])
def test_identifies_the_tenant_of_a_key(key: str, tenant: str) -> None:
    assert tenant == Keyring(TENANTS, FirstKey(key_digest("first"))).identify(key).name


def test_tenant_has_its_configured_settings() -> None:
    limits = (Limit("tokens", "minute", 5), Limit("requests", "in_flight", 2))
    expected = Tenant(
        "acme",
        frozenset({"bge", "cross"}),
        limits,
        weight=3,
        priority="bulk",
        key_id="acme-0",
        key_mark=key_digest("one")[-16:],
    )

    assert expected == Keyring(TENANTS, None).identify("one")


@pytest.mark.parametrize("key", [None, ""])
def test_missing_key_error_explains_the_header(key: str | None) -> None:
    with pytest.raises(Unauthenticated, match="Authorization: Bearer"):
        Keyring(TENANTS, None).identify(key)


@pytest.mark.parametrize(
    "key", ["four", "One", "one ", " one", key_digest("one"), "\udcff", "first", "one\x00"]
)
def test_rejects_unknown_keys_without_repeating_them(key: str) -> None:
    with pytest.raises(Unauthenticated) as caught:
        Keyring(TENANTS, None).identify(key)

    assert "Incorrect API key provided: this gateway does not know it" == caught.value.message


def test_rejects_every_key_without_tenants_and_first_key() -> None:
    for key in (FIRST_TENANT, "", "one"):
        with pytest.raises(Unauthenticated):
            Keyring({}, None).identify(key)


def test_keyring_holds_digests_only() -> None:
    keyring = Keyring(TENANTS, None)

    assert all(KEY_DIGEST.fullmatch(digest) for digest in keyring._owners)


@given(st.text(st.characters(codec="utf-8"), min_size=1))
@settings(max_examples=200, deadline=None)
def test_any_string_can_be_a_key(key: str) -> None:
    digest = key_digest(key)

    assert "sha256:" + hashlib.sha256(key.encode()).hexdigest() == digest
    assert "default" == Keyring({}, FirstKey(digest)).identify(key).name


@pytest.mark.parametrize(
    ("models", "name", "allowed"),
    [
        (None, "bge", True),
        (frozenset({"bge"}), "bge", True),
        (frozenset({"bge"}), "org/bge", False),
        (frozenset(), "bge", False),
    ],
)
def test_tenant_without_models_may_use_all(
    models: frozenset[str] | None, name: str, *, allowed: bool
) -> None:
    assert allowed == Tenant("acme", models).may_use(name)


def test_random_keys_have_a_fixed_form_and_are_unique() -> None:
    keys = {random_key() for _ in range(200)}

    assert 200 == len(keys)
    assert all(re.fullmatch(r"gw_[0-9a-f]{8}_[0-9a-f]{40}", key) for key in keys)


def test_first_key_is_valid_only_without_tenants() -> None:
    keyring = Keyring({}, FirstKey(key_digest("first")))
    assert FIRST_TENANT == keyring.identify("first").name

    keyring.replace_configured(TENANTS)
    assert "acme" == keyring.identify("one").name
    with pytest.raises(Unauthenticated):
        keyring.identify("first")

    keyring.replace_configured({})
    assert FIRST_TENANT == keyring.identify("first").name
    with pytest.raises(Unauthenticated):
        keyring.identify("one")


def test_stored_keys_take_the_settings_of_a_new_file() -> None:
    keyring = Keyring({}, None)
    keyring.replace_stored(
        [StoredKey("s", key_digest("stored"), "acme")], {"acme": config.TenantConfig(weight=7)}
    )
    assert 7 == keyring.identify("stored").weight

    keyring.replace_configured(TENANTS)
    assert 3 == keyring.identify("stored").weight

    keyring.replace_configured({})
    assert 7 == keyring.identify("stored").weight


def stored(count: int) -> list[StoredKey]:
    return [StoredKey(f"k{number}", key_digest(f"key {number}"), "acme") for number in range(count)]


SETTINGS = config.TenantConfig(limits={"requests_per_hour": 5})


def test_stored_key_is_refused_whenever_its_tenant_is_defined_nowhere() -> None:
    keyring = Keyring({}, None, has_store=True)
    steps = [
        (lambda: keyring.replace_stored(stored(1)), False),
        (lambda: keyring.replace_configured({"acme": SETTINGS}), True),
        (lambda: keyring.replace_configured({}), False),
        (lambda: keyring.replace_stored(stored(1), {"acme": SETTINGS}), True),
        (lambda: keyring.replace_configured({"acme": SETTINGS}), True),
        (lambda: keyring.replace_stored(stored(1), {}), True),
        (lambda: keyring.replace_configured({"globex": SETTINGS}), False),
        (lambda: keyring.replace_stored(stored(1), {"acme": SETTINGS}), True),
        (lambda: keyring.replace_stored(stored(1), {}), False),
    ]
    for change, is_valid in steps:
        change()
        if is_valid:
            assert 1 == len(keyring.identify("key 0").limits)
        else:
            with pytest.raises(TenantUnknown, match="the tenant of this key, 'acme', is not defined"):
                keyring.identify("key 0")


def test_logs_the_keys_that_lose_their_tenant_once(caplog: pytest.LogCaptureFixture) -> None:
    keyring = Keyring({"acme": SETTINGS}, None)
    keyring.replace_stored(stored(7))
    assert [] == caplog.messages

    keyring.replace_configured({})
    keyring.replace_configured({"globex": SETTINGS})

    line = (
        "tenant 'acme' is in neither router.yaml nor Redis, and its keys are refused: "
        "'k0', 'k1', 'k2', 'k3', 'k4' and 2 more"
    )
    assert [("gateway", logging.WARNING, line)] == caplog.record_tuples


def test_reload_that_ends_the_first_key_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    keyring = Keyring({}, FirstKey(key_digest("first")))
    keyring.replace_configured(TENANTS)
    keyring.replace_configured(TENANTS)
    Keyring(TENANTS, None).replace_configured(TENANTS)

    assert [FIRST_KEY_ENDED_NOTE] == caplog.messages


def test_first_key_and_operators_need_no_tenant() -> None:
    keyring = Keyring({}, FirstKey(key_digest("first")), operators=[key_digest("operator")])

    assert [FIRST_TENANT, "operators"] == [keyring.identify(key).name for key in ("first", "operator")]


def test_keys_expire_by_the_clock_of_the_store() -> None:
    keyring = Keyring({"acme": SETTINGS}, None, now_s=lambda: 1000.0)
    keyring.replace_stored([StoredKey("k", key_digest("secret"), "acme", expires_s=1050.0)])
    assert "acme" == keyring.identify("secret").name

    keyring.follow_clock(90.0)
    with pytest.raises(Unauthenticated, match="expired"):
        keyring.identify("secret")
