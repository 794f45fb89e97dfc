"""Encoding for operate.lua: keys of a tenant in Redis."""

from redis.crc import key_slot

from gateway.quotas.operations import keys_of, usage_key

NAMES = ("acme", "a}b", "{x", "{}", "{}x", "}x", "}", "}}", "", ":", "odd")


def all_keys(tenant: str) -> list[str]:
    return [*keys_of(tenant), usage_key(tenant, "2026-11-22")]


def test_all_keys_of_a_tenant_share_a_slot() -> None:
    slots = {name: {key_slot(key.encode()) for key in all_keys(name)} for name in NAMES}

    assert dict.fromkeys(NAMES, 1) == {name: len(found) for name, found in slots.items()}


def test_tenants_share_no_key() -> None:
    keys = [key for name in NAMES for key in all_keys(name)]

    assert len(keys) == len(set(keys))


def test_keys_of_ordinary_names_stay_where_they_are_stored() -> None:
    assert ["gw:{a}b}:limits", "gw:{a}b}:open", "gw:{a}b}:ends"] == keys_of("a}b")
    assert "gw:{acme}:usage:2026-11-22" == usage_key("acme", "2026-11-22")
