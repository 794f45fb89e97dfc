"""Warning at start about tenants without a key for /admin, and the way back that it names."""

import asyncio
import logging
from pathlib import Path

import pytest

from gateway.cli.check import check
from gateway.cli.first_key import (
    NO_OPERATOR_KEY,
    KeySources,
    needs_operator_key,
    warn_of_missing_keys,
    warn_of_missing_operator_key,
)
from gateway.config.load import parse_config
from gateway.config.schema import Config, TenantConfig
from gateway.store.redis_client import RedisClient
from gateway.tenants.file_store import FILE_NAME, FileTenantStore
from gateway.tenants.keyring import StoredKey, key_digest
from gateway.tenants.store import TenantStore
from tests.actors import TESTER
from tests.quotas.redis_server import RedisServer
from tests.quotas.test_first_key import start

FILE = """
listen: {listen}
quotas: {{store: "{store}"}}
upstreams: {{other: {{backend: tei, replicas: ["http://127.0.0.1:1"]}}}}
models: {{bge: {{upstream: other}}}}
"""
ANYWHERE, LOOPBACK = "0.0.0.0:0", "127.0.0.1:0"
TENANT = "tenants: {acme: {}}\n"
ADMIN_OF_A_TENANT = (
    f"tenants: {{acme: {{keys: [{{digest: '{key_digest('a')}', scopes: [embed, admin]}}]}}}}\n"
)

USERS = (
    "sign_on: {{okta: {{issuer: 'https://login.example.org', audience: [a], claims: "
    "{{tenant: {{claim: org}}, scopes: {{claim: groups, values: {{ops: [{}]}}}}}}}}}}\n"
)


def config_of(more: str = "", listen: str = ANYWHERE, store: str = "memory") -> Config:
    return parse_config(FILE.format(listen=listen, store=store) + more, {}, Path.cwd())


@pytest.mark.parametrize(
    ("listen", "more", "expected"),
    [
        (ANYWHERE, TENANT, True),
        (LOOPBACK, TENANT, False),
        (ANYWHERE, f"{TENANT}admin: {{listen: '127.0.0.1:1'}}\n", False),
        (LOOPBACK, f"{TENANT}admin: {{listen: '0.0.0.0:1'}}\n", True),
        (LOOPBACK, f"{TENANT}manager: {{listen: '0.0.0.0:1'}}\n", True),
        (ANYWHERE, f"{TENANT}admin: {{keys: ['{key_digest('a')}']}}\n", False),
        (LOOPBACK, f"{TENANT}admin: {{keys: [{{digest: '{key_digest('a')}', scopes: [metrics]}}]}}\n", True),
        (ANYWHERE, ADMIN_OF_A_TENANT, False),
        (ANYWHERE, TENANT + USERS.format("admin"), False),
        (ANYWHERE, TENANT + USERS.format("embed"), True),
    ],
)
def test_operators_need_a_key_unless_admin_is_open(listen: str, more: str, expected: bool) -> None:
    assert expected == needs_operator_key(config_of(more, listen))


def test_start_warns_until_redis_has_a_key_for_admin(
    own_redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(store=own_redis.url)

    async def store(key: StoredKey) -> None:
        tenants = TenantStore(RedisClient(own_redis.url, 5))
        await tenants.put_tenant("acme", TenantConfig(), by=TESTER)
        await tenants.create_key(key, by=TESTER)
        await tenants.aclose()

    for key in (
        StoredKey("plain", key_digest("a"), "acme"),
        StoredKey("old", key_digest("b"), "acme", 1.0, ("admin",)),
        StoredKey("undefined", key_digest("c"), "globex", None, ("admin",)),
    ):
        asyncio.run(store(key))
        warn_of_missing_operator_key(config)
    assert [NO_OPERATOR_KEY] * 3 == caplog.messages

    asyncio.run(store(StoredKey("ops", key_digest("d"), "acme", None, ("admin",))))
    warn_of_missing_operator_key(config)
    assert 3 == len(caplog.messages)


def test_start_warns_if_tenants_of_the_file_end_the_first_key_and_none_has_a_key(
    tmp_path: Path, own_redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    def warnings(config: Config) -> int:
        caplog.clear()
        warn_of_missing_keys(config, sources)
        return len(caplog.messages)

    def store(tenant: str) -> None:
        key = StoredKey(tenant, key_digest(tenant), tenant)
        asyncio.run(FileTenantStore(sources.tenants_file or tmp_path).create_key(key, by=TESTER))

        async def into_redis() -> None:
            tenants = TenantStore(RedisClient(own_redis.url, 5))
            await tenants.create_key(key, by=TESTER)
            await tenants.aclose()

        asyncio.run(into_redis())

    sources = KeySources(None, None, False, tmp_path / FILE_NAME)
    configs = config_of(TENANT), config_of(TENANT, store=own_redis.url)
    store("of another tenant")
    assert [1, 1] == [warnings(config) for config in configs]
    assert 0 == warnings(config_of(ADMIN_OF_A_TENANT))
    assert 0 == warnings(config_of())
    store("acme")
    assert [0, 0] == [warnings(config) for config in configs]


def test_unavailable_redis_adds_no_warning(own_redis: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(TENANT, store=own_redis.url)
    own_redis.kill()
    warn_of_missing_operator_key(config)

    assert [] == caplog.messages


def test_start_with_tenants_logs_that_the_kept_key_is_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    start(tmp_path)
    assert start(tmp_path, more=TENANT) is None

    assert [
        f"the first key in {tmp_path}/first-key is ignored: there are tenants in router.yaml"
    ] == caplog.messages


def test_check_reports_that_no_key_opens_admin(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "router.yaml"
    path.write_text(FILE.format(listen=ANYWHERE, store="memory") + TENANT)

    assert 0 == check(path, {})
    assert f"admin.keys: {NO_OPERATOR_KEY}" in capsys.readouterr().out
