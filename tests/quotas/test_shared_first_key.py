"""The first key that running gateways share: after a loss of data, an outage, and with stray keys."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gateway.cli.first_key import create_first_key_later, key_sources
from gateway.config.load import parse_config
from gateway.config.schema import TenantConfig
from gateway.errors import QuotaUnavailable, Unauthenticated
from gateway.store.redis_client import RedisClient
from gateway.tenants.follower import KeyFollower
from gateway.tenants.keyring import FirstKey, Keyring, StoredKey, key_digest
from gateway.tenants.store import FIRST_KEY, TENANTS, TenantStore
from tests.actors import TESTER
from tests.processes.conftest import KEY, Served, wait_until
from tests.quotas.redis_server import RedisServer
from tests.quotas.test_first_key import start
from tests.quotas.test_keys_command import CONFIG, accepted

OWN, OTHER = key_digest("own"), key_digest("other")
STRAY = StoredKey("k", key_digest("stray"), "nowhere")


@asynccontextmanager
async def following(redis: RedisServer, keyring: Keyring, grace_s: float = 60) -> AsyncIterator[KeyFollower]:
    """Let a keyring follow the store, as a worker does."""
    store = TenantStore(RedisClient(redis.url, 1))
    follower = KeyFollower(keyring, store, grace_s, lambda: None)
    task = asyncio.create_task(follower.run())
    try:
        yield follower
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def stored_digest(redis: RedisServer) -> str:
    """Return the digest in the store, empty if there is none."""
    length, *text = redis.command("GET", FIRST_KEY).splitlines()
    return "" if length == "$-1" else text[0]


def served(tmp_path: Path, name: str, redis: RedisServer, key: str = "") -> Served:
    """Start a gateway with a state_dir of its own, by default without GATEWAY_API_KEY."""
    path = tmp_path / name / "router.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(CONFIG.format(store=redis.url))
    return Served(path, {"GATEWAY_API_KEY": key})


def key_file(tmp_path: Path, name: str) -> Path:
    return tmp_path / name / "state" / "embedding-gateway" / "first-key"


async def test_running_gateway_stores_its_key_again(own_redis: RedisServer) -> None:
    async with following(own_redis, Keyring({}, FirstKey(OWN, is_kept=True))) as follower:
        await follower.refresh()
        own_redis.command("FLUSHALL")
        await follower.refresh()

        assert OWN == stored_digest(own_redis)


async def test_key_of_another_gateway_that_was_faster_wins(
    own_redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    keyring = Keyring({}, FirstKey(OWN, is_kept=True))
    async with following(own_redis, keyring) as follower:
        await follower.refresh()
        assert "default" == keyring.identify("own").name
        own_redis.command("SET", FIRST_KEY, OTHER)
        await follower.refresh()
        await follower.refresh()

    assert "default" == keyring.identify("other").name
    with pytest.raises(Unauthenticated):
        keyring.identify("own")
    [line] = caplog.messages
    assert "the first key of this gateway is refused from now on" in line
    assert f"remove {FIRST_KEY} from Redis" in line
    assert OTHER == stored_digest(own_redis)


async def test_gateways_that_store_their_keys_at_once_agree(own_redis: RedisServer) -> None:
    keyrings = [Keyring({}, FirstKey(digest, is_kept=True)) for digest in (OWN, OTHER)]
    async with following(own_redis, keyrings[0]) as first, following(own_redis, keyrings[1]) as second:
        await asyncio.gather(first.refresh(), second.refresh())

    winner = "own" if stored_digest(own_redis) == OWN else "other"
    assert ["default", "default"] == [keyring.identify(winner).name for keyring in keyrings]


async def test_key_that_is_not_kept_is_neither_stored_nor_replaced(own_redis: RedisServer) -> None:
    keyring = Keyring({}, FirstKey(OWN))
    async with following(own_redis, keyring) as follower:
        await follower.refresh()
        assert not stored_digest(own_redis)
        own_redis.command("SET", FIRST_KEY, OTHER)
        await follower.refresh()

    assert "default" == keyring.identify("own").name


async def test_key_that_a_tenant_of_the_file_has_ended_is_not_shared(own_redis: RedisServer) -> None:
    keyring = Keyring({"acme": TenantConfig()}, FirstKey(OWN, is_kept=True))
    async with following(own_redis, keyring) as follower:
        await follower.refresh()
        assert not stored_digest(own_redis)


async def test_key_that_a_tenant_in_redis_ends_is_not_stored_but_follows_the_store(
    own_redis: RedisServer,
) -> None:
    own_redis.command("HSET", TENANTS, "acme", "{}")
    keyring = Keyring({}, FirstKey(OWN, is_kept=True))
    async with following(own_redis, keyring) as follower:
        await follower.refresh()
        assert not stored_digest(own_redis)
        assert "default" == keyring.identify("own").name
        # A restarted worker begins with the key of the start, which another gateway's has replaced since.
        own_redis.command("SET", FIRST_KEY, OTHER)
        await follower.refresh()

    assert "default" == keyring.identify("other").name
    assert not keyring.knows(OWN)


@pytest.mark.parametrize("kept", ["", OWN], ids=["no key", "a key"])
@pytest.mark.parametrize("agreed", ["", OTHER], ids=["empty store", "another key"])
async def test_pending_key_follows_the_store(own_redis: RedisServer, kept: str, agreed: str) -> None:
    if agreed:
        own_redis.command("SET", FIRST_KEY, agreed)
    keyring = Keyring({}, FirstKey(kept, is_pending=True, is_kept=True))
    async with following(own_redis, keyring) as follower:
        await follower.refresh()

    assert (agreed or kept) == stored_digest(own_redis)
    for key, digest in (("own", OWN), ("other", OTHER)):
        if digest == (agreed or kept):
            assert "default" == keyring.identify(key).name
        else:
            with pytest.raises(Unauthenticated):
                keyring.identify(key)


async def test_store_that_cannot_be_written_is_still_followed(own_redis: RedisServer) -> None:
    own_redis.command("REPLICAOF", "127.0.0.1", "1")
    keyring = Keyring({}, FirstKey(OWN, is_kept=True), has_store=True)
    with pytest.raises(QuotaUnavailable):
        keyring.identify("unknown")
    async with following(own_redis, keyring, grace_s=0) as follower:
        for _ in range(3):
            await follower.refresh()

    assert not stored_digest(own_redis)
    with pytest.raises(Unauthenticated):
        keyring.identify("unknown")


async def test_key_of_an_undefined_tenant_does_not_end_the_first_key(
    own_redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    keyrings = [Keyring({}, FirstKey(OWN, is_pending=is_pending)) for is_pending in (False, True)]
    async with following(own_redis, keyrings[0]) as first, following(own_redis, keyrings[1]) as second:
        await first.store.create_key(STRAY, by=TESTER)
        await asyncio.gather(first.refresh(), second.refresh())

    assert ["default", "default"] == [keyring.identify("own").name for keyring in keyrings]
    assert "first key" not in caplog.text


def test_start_with_keys_of_undefined_tenants_has_a_first_key(tmp_path: Path, own_redis: RedisServer) -> None:
    own_redis.command("HSET", "gw:{store}:keys", "k", '{"id":"k","digest":"sha256:0","tenant":"nowhere"}')
    key = start(tmp_path, own_redis.url)

    assert key is not None
    assert key.digest == stored_digest(own_redis)


@pytest.mark.parametrize("content", ["key", "tenant", "nothing"])
async def test_key_is_created_after_an_outage_unless_another_exists(
    tmp_path: Path, own_redis: RedisServer, caplog: pytest.LogCaptureFixture, content: str
) -> None:
    caplog.set_level(logging.INFO)
    text = CONFIG.format(store=own_redis.url) + f"state_dir: {tmp_path}/state\n"
    sources = key_sources(parse_config(text, {}, tmp_path), {}, is_terminal=True)
    own_redis.kill()
    task = asyncio.create_task(create_first_key_later(own_redis.url, sources))
    await asyncio.sleep(0)
    own_redis.restart()
    if content == "key":
        own_redis.command("SET", FIRST_KEY, OTHER)
    if content == "tenant":
        own_redis.command("HSET", TENANTS, "acme", "{}")
    await asyncio.wait_for(task, 20)

    file = tmp_path / "state" / "first-key"
    lines = {
        "key": "the first key of this store, which another gateway keeps in its state_dir",
        "tenant": "not needed: there are tenants in Redis",
        "nothing": f"in {file}",
    }
    [line] = caplog.messages
    assert f"Redis is available; the first key is {lines[content]}" in line
    assert file.exists() == (content == "nothing")
    if content == "nothing":
        kept = file.read_text().strip()
        assert key_digest(kept) == stored_digest(own_redis)
        assert kept not in line


async def test_key_that_cannot_be_kept_after_an_outage_is_reported(
    tmp_path: Path, own_redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    text = CONFIG.format(store=own_redis.url) + f"state_dir: {tmp_path}/file/state\n"
    sources = key_sources(parse_config(text, {}, tmp_path), {}, is_terminal=False)
    await asyncio.wait_for(create_first_key_later(own_redis.url, sources), 20)

    [line] = caplog.messages
    assert line.startswith("there is no first key: ")
    assert line.endswith("set `state_dir`, or set GATEWAY_API_KEY; then restart the gateway")
    assert not stored_digest(own_redis)


@pytest.mark.slow
def test_gateway_that_starts_after_a_loss_of_data_accepts_the_same_key(
    tmp_path: Path, own_redis: RedisServer
) -> None:
    running = [served(tmp_path, "d", own_redis).wait_until_up()]
    try:
        key = key_file(tmp_path, "d").read_text().strip()
        own_redis.command("FLUSHALL")
        assert wait_until(lambda: stored_digest(own_redis) == key_digest(key))
        running.append(served(tmp_path, "e", own_redis).wait_until_up())
        assert [True, True] == [accepted(gateway.url, key) for gateway in running]
        running[0].stop()
        running[0] = served(tmp_path, "d", own_redis).wait_until_up()
        assert [True, True] == [accepted(gateway.url, key) for gateway in running]
    finally:
        for gateway in running:
            gateway.stop()


@pytest.mark.slow
def test_first_start_in_an_outage_creates_the_key_when_redis_returns(
    tmp_path: Path, own_redis: RedisServer
) -> None:
    own_redis.kill()
    gateway = served(tmp_path, "d", own_redis).wait_until_up()
    file = key_file(tmp_path, "d")
    try:
        assert f"to be created in {file}, once Redis is available" in gateway.banner
        assert not file.exists()
        own_redis.restart()
        assert wait_until(file.exists)
        key = file.read_text().strip()
        assert wait_until(lambda: accepted(gateway.url, key))
    finally:
        gateway.stop()
    messages = [json.loads(line).get("message", "") for line in gateway.log]
    assert 1 == sum("no first key is created until it returns" in message for message in messages)
    assert 1 == sum(f"the first key is in {file}" in message for message in messages)
    assert key not in gateway.banner + "".join(gateway.log)


@pytest.mark.slow
def test_key_of_the_environment_waits_for_redis_and_is_not_stored(
    tmp_path: Path, own_redis: RedisServer
) -> None:
    own_redis.kill()
    gateway = served(tmp_path, "d", own_redis, KEY).wait_until_up()
    try:
        own_redis.restart()
        assert wait_until(lambda: accepted(gateway.url, KEY))
        assert not stored_digest(own_redis)
    finally:
        gateway.stop()
    assert all(json.loads(line) for line in gateway.log)
