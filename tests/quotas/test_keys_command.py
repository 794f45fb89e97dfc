"""`gateway keys` with running gateways: keys are created, used, revoked, and never stored in the clear."""

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from gateway.config.load import parse_config
from gateway.config.schema import Key, TenantConfig
from gateway.errors import QuotaUnavailable, Unauthenticated
from gateway.store.errors import StoreUnavailable
from gateway.store.redis_client import RedisClient
from gateway.tenants.follower import KeyFollower
from gateway.tenants.keyring import (
    FIRST_KEY_NOTE,
    FirstKey,
    Keyring,
    StoredKey,
    key_digest,
    unknown_tenant_note,
)
from gateway.tenants.store import TenantStore
from tests.actors import TESTER
from tests.processes.conftest import KEY, TLS_CONTEXT, Served, wait_until
from tests.quotas.conftest import Commands
from tests.quotas.redis_server import RedisServer
from tests.waiting import PATIENCE_S

CONFIG = """
listen: 127.0.0.1:0
quotas: {{store: "{store}"}}
upstreams: {{other: {{backend: tei, replicas: ["http://127.0.0.1:1"]}}}}
models: {{bge: {{upstream: other}}}}
"""


TENANTS = {"acme": TenantConfig()}


def follower(keyring: Keyring, store: TenantStore, grace_s: float) -> KeyFollower:
    return KeyFollower(keyring, store, grace_s, lambda: None)


@pytest.fixture
def config(own_redis: RedisServer, tmp_path: Path) -> Path:
    path = tmp_path / "router.yaml"
    path.write_text(CONFIG.format(store=own_redis.url))
    return path


def gateway(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gateway", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def accepted(url: str, key: str) -> bool:
    """Return True if a key is accepted; the model's upstream is not running, which does not matter here."""
    return (
        httpx.get(
            f"{url}/v1/models", headers={"authorization": f"Bearer {key}"}, verify=TLS_CONTEXT
        ).status_code
        == 200
    )


@pytest.mark.slow
def test_revoked_key_is_rejected_by_every_gateway(config: Path, own_redis: RedisServer) -> None:
    gateway("tenants", "set", "acme", "-c", str(config))
    key = gateway("keys", "create", "acme", "--new-tenant", "--id", "first", "-c", str(config)).stdout.strip()
    running = [Served(config).wait_until_up() for _ in range(2)]
    try:
        assert all(wait_until(lambda url=served.url: accepted(url, key)) for served in running)
        assert '"first"' in gateway("keys", "list", "--json", "-c", str(config)).stdout
        assert 0 == gateway("keys", "revoke", "first", "-c", str(config)).returncode
        assert all(wait_until(lambda url=served.url: not accepted(url, key)) for served in running)
        logs = "".join(line for served in running for line in (*served.log, served.banner))
        assert key not in logs
        assert key not in own_redis.command("HGETALL", "gw:{store}:keys")
        assert "process-test-key" not in logs
    finally:
        for served in running:
            served.stop()


def test_warns_that_the_first_tenant_ends_the_first_key(config: Path, command: Commands) -> None:
    first = command("tenants", "set", "acme", "-c", str(config))
    second = command("tenants", "set", "globex", "-c", str(config))

    assert [[FIRST_KEY_NOTE], []] == [first.err.splitlines(), second.err.splitlines()]


def test_a_key_without_a_tenant_is_refused_or_creates_it(config: Path, command: Commands) -> None:
    refused = command("keys", "create", "acme", "-c", str(config))
    assert (1, "") == (refused.status, refused.out)
    assert "there is no tenant acme" in refused.err
    assert "--new-tenant" in refused.err
    assert [] == json.loads(command("keys", "list", "--json", "-c", str(config)).out)

    command("tenants", "set", "globex", "--limit", "tokens_per_minute=10", "-c", str(config))
    for tenant in ("acme", "globex"):
        assert 0 == command("keys", "create", tenant, "--new-tenant", "-c", str(config)).status
    tenants = json.loads(command("tenants", "list", "--json", "-c", str(config)).out)
    # One that exists keeps its limits.
    assert {"acme": {}, "globex": {"tokens_per_minute": 10}} == {
        name: tenant.get("limits", {}) for name, tenant in tenants.items()
    }


def test_new_tenant_of_a_key_ends_the_first_key(config: Path, command: Commands) -> None:
    key = command("keys", "create", "acme", "--new-tenant", "-c", str(config))
    tenant = command("tenants", "set", "acme", "-c", str(config))

    assert ([FIRST_KEY_NOTE], []) == (key.err.splitlines(), tenant.err.splitlines())


def test_lists_keys_that_are_refused(config: Path, command: Commands) -> None:
    # Without the file it may have the tenant.
    [store] = re.findall(r"redis://[^\s\"'}]+", config.read_text())
    created = command("keys", "create", "acme", "--id", "k", "--store", store)
    table = command("keys", "list", "-c", str(config)).out
    command("tenants", "set", "acme", "-c", str(config))
    after = command("keys", "list", "-c", str(config)).out

    assert created.err.splitlines() == [unknown_tenant_note("acme")]
    assert "acme (not defined: refused)" in table
    assert "not defined" not in after


def test_prints_a_line_for_router_yaml_without_redis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "no state"))
    path = tmp_path / "router.yaml"
    path.write_text(CONFIG.format(store="memory"))
    created = gateway("keys", "create", "acme", "--new-tenant", "--id", "x", "-c", str(path)).stdout

    key = created.split()[0]
    found = re.search(r'digest: "(sha256:[0-9a-f]{64})", id: "x"', created)
    assert found is not None
    assert key_digest(key) == found[1]
    assert 1 == gateway("keys", "revoke", "x", "-c", str(path)).returncode


@pytest.mark.parametrize(
    "words",
    [("keys", "revoke", "nobody"), ("keys", "create", "acme", "--new-tenant", "--id", "same")],
    ids=["revoke", "create"],
)
def test_keys_command_reports_failures_in_one_line(config: Path, words: tuple[str, ...]) -> None:
    gateway("keys", "create", "acme", "--new-tenant", "--id", "same", "-c", str(config))
    ended = gateway(*words, "-c", str(config))

    assert 1 == ended.returncode
    assert 1 == len(ended.stderr.strip().splitlines())


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (("keys", "create", "acme", "--new-tenant", "--scope", "nonsense"), 2),
        (("keys", "create", "acme", "--new-tenant", "--scope", "embed", "--scope", "admin"), 0),
        (("keys", "create", "acme", "--new-tenant", "--limit", "tokens_per_minute"), 1),
        (("keys", "create", "acme", "--new-tenant", "--limit", "tokens_per_minute=0"), 1),
        (("keys", "create", "acme", "--new-tenant", "--limit", "bytes_per_minute=5"), 1),
        (("keys", "create", "acme", "--new-tenant", "--expires", "tomorrow"), 2),
        (("keys", "create", "acme", "--new-tenant", "--expires", "2127-01-31"), 0),
        (("keys", "create", "acme", "--new-tenant", "--expires", "2026-01-31"), 1),
        (("keys", "create", "a/b"), 1),
        (("keys", "create", ""), 1),
        (("keys", "create", "acme", "--new-tenant", "--id", "a/b"), 1),
        (("keys", "create", "acme", "--new-tenant", "--id", "équipe"), 1),
        (("keys", "create", "acme", "--new-tenant", "--id", "a team"), 1),
        (("keys", "create", "équipe bleue", "--new-tenant", "--id", "a-team.2_b"), 0),
        (("tenants", "set", "a/b"), 1),
    ],
)
def test_rejects_invalid_scopes_limits_and_names(
    config: Path, command: Commands, words: tuple[str, ...], status: int
) -> None:
    assert status == command(*words, "-c", str(config)).status


def test_stores_and_prints_limits_of_a_key(config: Path, own_redis: RedisServer, command: Commands) -> None:
    words = ("--id", "k", "--limit", "tokens_per_minute=1000", "--limit", "requests_in_flight=2")
    own = {"tokens_per_minute": 1000, "requests_in_flight": 2}
    created = command("keys", "create", "acme", "--new-tenant", *words, "-c", str(config))
    command("keys", "create", "acme", "--new-tenant", "--id", "plain", "-c", str(config))
    listed = json.loads(command("keys", "list", "--json", "-c", str(config)).out)
    table = command("keys", "list", "-c", str(config)).out
    config.write_text(CONFIG.format(store="memory"))
    line = command(
        "keys", "create", "acme", "--new-tenant", *words, "--yaml", "-c", str(config)
    ).out.splitlines()[-1]

    assert 0 == created.status
    assert [("k", own), ("plain", {})] == [(key["id"], key["limits"]) for key in listed]
    assert "tokens_per_minute=1000 requests_in_flight=2" in table
    text = CONFIG.format(store="memory") + f"tenants:\n  acme:\n    keys:\n      {line}\n"
    [key] = parse_config(text, {}, config.parent).tenants["acme"].keys
    assert isinstance(key, Key)
    assert own == key.limits


def test_stores_and_prints_default_models_of_a_key(
    config: Path, own_redis: RedisServer, command: Commands
) -> None:
    words = ("acme", "--id", "k", "--default", "embed=bge", "-c", str(config))
    created = command("keys", "create", *words, "--new-tenant")
    listed = json.loads(command("keys", "list", "--json", "-c", str(config)).out)
    table = command("keys", "list", "-c", str(config)).out
    line = command("keys", "create", *words, "--yaml").out.splitlines()[-1]
    refused = command("keys", "create", *words, "--model", "other")
    unknown = command("keys", "create", "acme", "--default", "embeds=bge", "-c", str(config))

    assert (0, [{"embed": "bge"}]) == (created.status, [key["defaults"] for key in listed])
    assert "embed=bge" in table
    text = CONFIG.format(store="memory") + f"tenants:\n  acme:\n    keys:\n      {line}\n"
    [key] = parse_config(text, {}, config.parent).tenants["acme"].keys
    assert isinstance(key, Key)
    assert {"embed": "bge"} == key.defaults
    assert (1, True) == (refused.status, "--default: embed: 'bge' is not among" in refused.err)
    assert (2, True) == (unknown.status, "'embeds=bge' is not OPERATION=MODEL" in unknown.err)


def test_a_key_can_carry_a_budget(config: Path, command: Commands) -> None:
    words = ("create", "acme", "--id", "k", "--new-tenant", "--limit", "budget_per_month=12.5")
    idle = command("keys", *words, "-c", str(config))
    [key] = json.loads(command("keys", "list", "--json", "-c", str(config)).out)
    config.write_text(f"{config.read_text()}currency: EUR\n")
    priced = command("keys", *words[:3], "other", *words[4:], "-c", str(config))

    assert {"budget_per_month": 12.5} == key["limits"]
    assert [True, False] == ["no model here has a price" in ended.err + ended.out for ended in (idle, priced)]
    assert (
        1
        == command(
            "keys", *words[:3], "no", "--limit", "budget_per_month=0.1234567891", "-c", str(config)
        ).status
    )


def test_keys_command_reports_an_outage_in_one_line(config: Path, own_redis: RedisServer) -> None:
    own_redis.kill()
    ended = gateway("keys", "list", "-c", str(config))

    assert 1 == ended.returncode
    assert "unavailable" in ended.stderr
    assert "Traceback" not in ended.stderr


async def known(keyring: Keyring, key: str, expected: bool) -> None:
    """Wait until a key is known, or unknown, as expected."""

    def is_known() -> bool:
        try:
            keyring.identify(key)
        except (Unauthenticated, QuotaUnavailable):
            return False
        return True

    await _until(lambda: is_known() is expected)


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - a keyring has no event
            await asyncio.sleep(0.02)


async def test_stored_keys_stay_valid_for_the_grace_time_of_an_outage(own_redis: RedisServer) -> None:
    store, keyring = TenantStore(RedisClient(own_redis.url, 1)), Keyring(TENANTS, None)
    await store.create_key(StoredKey("k", key_digest("secret"), "acme"), by=TESTER)
    keeper = asyncio.create_task(follower(keyring, store, grace_s=1.0).run())
    await known(keyring, "secret", expected=True)
    own_redis.kill()
    await asyncio.sleep(0.6)
    assert "acme" == keyring.identify("secret").name
    await known(keyring, "secret", expected=False)
    own_redis.restart()
    await store.create_key(StoredKey("k", key_digest("secret"), "acme"), by=TESTER)
    await known(keyring, "secret", expected=True)
    keeper.cancel()
    await asyncio.gather(keeper, return_exceptions=True)
    await store.aclose()


async def test_applies_a_revocation_that_timed_out(
    own_redis: RedisServer,
) -> None:
    store, keyring = TenantStore(RedisClient(own_redis.url, 1)), Keyring(TENANTS, None)
    await store.create_key(StoredKey("k", key_digest("secret"), "acme"), by=TESTER)
    keeper = asyncio.create_task(follower(keyring, store, grace_s=60).run())
    await known(keyring, "secret", expected=True)
    own_redis.freeze()
    # A client that times out and disconnects before the store replies.
    impatient = TenantStore(RedisClient(own_redis.url, 0.1))
    with pytest.raises(StoreUnavailable):
        await impatient.revoke("k", by=TESTER)
    with pytest.raises(StoreUnavailable):
        await impatient.create_key(StoredKey("l", key_digest("another"), "acme"), by=TESTER)
    own_redis.thaw()
    await known(keyring, "secret", expected=False)
    await known(keyring, "another", expected=True)
    keeper.cancel()
    await asyncio.gather(keeper, return_exceptions=True)
    for closing in (impatient, store):
        await closing.aclose()


async def test_notices_a_store_emptied_between_two_polls(own_redis: RedisServer) -> None:
    store, keyring = TenantStore(RedisClient(own_redis.url, 1)), Keyring(TENANTS, None)
    await store.create_key(StoredKey("old", key_digest("old"), "acme"), by=TESTER)
    keeper = asyncio.create_task(follower(keyring, store, grace_s=1).run())
    await known(keyring, "old", expected=True)
    own_redis.command("FLUSHALL")
    # The number of changes is the same as before.
    await store.create_key(StoredKey("new", key_digest("new"), "acme"), by=TESTER)
    await known(keyring, "new", expected=True)
    assert keyring.knows(key_digest("old"))
    # No operator has revoked it: it stays valid for the grace.
    await known(keyring, "old", expected=False)
    keeper.cancel()
    await asyncio.gather(keeper, return_exceptions=True)
    await store.aclose()


@pytest.mark.parametrize("holds", [False, True], ids=["empty", "with a key of its own"])
async def test_first_key_is_decided_by_the_content_of_the_store(
    own_redis: RedisServer, *, holds: bool
) -> None:
    store = TenantStore(RedisClient(own_redis.url, 1))
    if holds:
        await store.put_tenant("acme", TenantConfig(), by=TESTER)
        await store.create_key(StoredKey("k", key_digest("stored"), "acme"), by=TESTER)
    own_redis.freeze()
    keyring = Keyring({}, FirstKey(key_digest("first"), is_pending=True))
    keeper = asyncio.create_task(follower(keyring, store, grace_s=60).run())
    await known(keyring, "first", expected=False)
    own_redis.thaw()
    await known(keyring, "stored" if holds else "first", expected=True)
    await known(keyring, "first", expected=not holds)
    keeper.cancel()
    await asyncio.gather(keeper, return_exceptions=True)
    await store.aclose()


@pytest.mark.slow
def test_gateway_started_in_an_outage_accepts_its_first_key_afterwards(
    config: Path, own_redis: RedisServer
) -> None:
    own_redis.kill()
    gateway = Served(config).wait_until_up()
    try:
        assert not accepted(gateway.url, KEY)
        own_redis.restart()
        assert wait_until(lambda: accepted(gateway.url, KEY))
    finally:
        gateway.stop()
