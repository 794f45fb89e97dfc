"""Changes of stored keys and tenants, made at the same time, and how soon a gateway uses them."""

import asyncio
import json
import time
from datetime import UTC, datetime
from typing import Any

import pytest

from gateway.api.server.authentication import Authenticator
from gateway.config.schema import TenantConfig
from gateway.errors import TenantUnknown, Unauthenticated
from gateway.tenants.follower import KeyFollower
from gateway.tenants.guess_throttle import GUESSES_MAX
from gateway.tenants.keyring import (
    FIRST_KEY_NOTE,
    FirstKey,
    Keyring,
    StoredKey,
    key_digest,
    unknown_tenant_note,
)
from gateway.tenants.store import KEYS, TENANTS
from tests.actors import TESTER
from tests.conftest import KEY, Boots, request_with
from tests.fakes.tei import FakeTei
from tests.quotas.redis_server import RedisServer, opened
from tests.waiting import PATIENCE_S

CONFIG = """
listen: 0.0.0.0:8080
quotas: {{store: "{store}", timeout_ms: {timeout_ms}}}
upstreams: {{one: {{backend: tei, replicas: ["http://tei-0"]}}}}
models: {{bge: {{upstream: one}}}}
"""
OPS = f"tenants:\n  ops: {{keys: [{{digest: '{key_digest(KEY)}', scopes: [embed, admin]}}]}}\n"


def config(redis: RedisServer, more: str = OPS, timeout_ms: int = 2000) -> str:
    return CONFIG.format(store=redis.url, timeout_ms=timeout_ms) + more


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_one_of_eight_simultaneous_creations_of_an_id_succeeds(
    boot: Boots, own_redis: RedisServer
) -> None:
    async with boot({"tei-0": FakeTei()}, config(own_redis)) as gateway:
        key = {"tenant": "ops", "id": "same"}
        replies = await asyncio.gather(*(gateway.post("/admin/keys", key) for _ in range(8)))
        [created] = [reply.json()["key"] for reply in replies if reply.status_code == 200]
        called = await gateway.client.get("/v1/models", headers=bearer(created))

    assert [200] + [409] * 7 == sorted(reply.status_code for reply in replies)
    refused = next(reply.json() for reply in replies if reply.status_code == 409)
    assert "there is a key 'same' already" == refused["error"]
    assert 200 == called.status_code


async def test_key_that_cannot_be_read_is_not_replaced(own_redis: RedisServer) -> None:
    own_redis.command("HSET", KEYS, "k", "rubbish")
    async with opened(own_redis) as store:
        creation = await store.create_key(StoredKey("k", key_digest("secret"), "acme"), by=TESTER)

        assert not creation.is_created
        assert "rubbish" in own_redis.command("HGET", KEYS, "k")


async def test_new_key_works_at_once_where_it_was_created(boot: Boots, own_redis: RedisServer) -> None:
    async with boot({"tei-0": FakeTei()}, config(own_redis)) as gateway:
        await gateway.client.put("/admin/tenants/acme", json={})
        for _ in range(10):
            created = (await gateway.post("/admin/keys", {"tenant": "acme"})).json()
            assert 200 == (await gateway.client.get("/v1/models", headers=bearer(created["key"]))).status_code
            await gateway.client.delete(f"/admin/keys/{created['shown']['id']}")
            assert 401 == (await gateway.client.get("/v1/models", headers=bearer(created["key"]))).status_code


async def test_key_without_a_tenant_is_refused_in_every_dialect_and_as_operator(
    boot: Boots, own_redis: RedisServer
) -> None:
    replies = {}
    async with boot({"tei-0": FakeTei()}, config(own_redis)) as gateway:
        created = await gateway.post("/admin/keys", {"tenant": "acme", "scopes": ["embed", "admin"]})
        headers = bearer(created.json()["key"])
        for path in ("/v1/embeddings", "/embed", "/v2/embed", "/infinity/embeddings", "/admin/keys"):
            replies[path] = await gateway.client.post(path, json={"input": "a"}, headers=headers)

    assert {403} == {reply.status_code for reply in replies.values()}
    assert "tenant_unknown" == replies["/v1/embeddings"].json()["error"]["code"]
    assert "Forbidden" == replies["/embed"].json()["error_type"]
    for reply in replies.values():
        assert "the tenant of this key, 'acme', is not defined" in reply.text


async def test_key_follows_its_tenant_through_reloads_and_removal(
    boot: Boots, own_redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    acme = OPS + "  acme: {limits: {requests_per_hour: 1}}\n"
    statuses = []
    async with boot({"tei-0": FakeTei()}, config(own_redis, acme)) as gateway:
        key = (await gateway.post("/admin/keys", {"tenant": "acme", "id": "k"})).json()["key"]

        async def status() -> int:
            body = {"model": "bge", "input": "a"}
            return (await gateway.client.post("/v1/embeddings", json=body, headers=bearer(key))).status_code

        statuses += [await status(), await status()]
        gateway.follow(config(own_redis))
        statuses.append(await status())
        await gateway.client.put("/admin/tenants/acme", json={"limits": {"requests_per_hour": 2}})
        statuses.append(await status())
        await gateway.client.delete("/admin/tenants/acme")
        statuses.append(await status())

    assert [200, 429, 403, 200, 401] == statuses
    line = "tenant 'acme' is in neither router.yaml nor Redis, and its keys are refused: 'k'"
    assert line in caplog.messages


async def test_no_key_survives_the_removal_of_its_tenant(own_redis: RedisServer) -> None:
    async with opened(own_redis) as creator, opened(own_redis) as remover:
        for number in range(30):
            await creator.put_tenant("acme", TenantConfig(), by=TESTER)
            created = asyncio.gather(
                *(
                    creator.create_key(
                        StoredKey(f"{number}-{index}", key_digest(f"{number} {index}"), "acme"), by=TESTER
                    )
                    for index in range(8)
                )
            )
            await asyncio.gather(created, remover.remove_tenant("acme", by=TESTER))
        keyring = Keyring({}, None)
        keyring.replace_stored(await creator.keys(), await creator.tenants())

        for key in await creator.keys():
            number, _, index = key.id.partition("-")
            with pytest.raises(TenantUnknown):
                keyring.identify(f"{number} {index}")
        await remover.remove_tenant("acme", by=TESTER)
        assert [] == await creator.keys()


async def test_removal_leaves_the_keys_of_other_tenants(own_redis: RedisServer) -> None:
    names = ("acme", "acm\u00e9", 'ac"me', "globex")
    async with opened(own_redis) as store:
        for name in names:
            await store.put_tenant(name, TenantConfig(), by=TESTER)
            await store.create_key(StoredKey(f"of {name}", key_digest(name), name), by=TESTER)
        own_redis.command("HSET", KEYS, "unreadable", "[1,")
        for count, name in enumerate(names[:3], 1):
            assert await store.remove_tenant(name, by=TESTER)
            assert sorted(names[count:]) == sorted(key.tenant for key in await store.keys())
        assert {"globex"} == (await store.tenants()).keys()
        assert "[1," in own_redis.command("HGET", KEYS, "unreadable")


async def test_operators_wait_for_a_busy_store(boot: Boots, own_redis: RedisServer) -> None:
    async with boot({"tei-0": FakeTei()}, config(own_redis, timeout_ms=1)) as gateway:
        own_redis.freeze()
        creation = asyncio.create_task(gateway.post("/admin/keys", {"tenant": "ops", "id": "k"}))
        # Longer than `quotas.timeout_ms`, within which a caller's request gives up.
        await asyncio.wait([creation], timeout=0.3)
        own_redis.thaw()
        reply = await creation

    assert 200 == reply.status_code


async def test_requests_with_a_new_key_are_no_guesses(own_redis: RedisServer) -> None:
    keyring = Keyring({"acme": TenantConfig()}, None)
    authenticator = Authenticator(keyring)

    def status(key: str) -> str:
        try:
            authenticator.authenticate(request_with(b"authorization", f"Bearer {key}"))
        except Exception as error:  # noqa: BLE001 - the kind of error is compared
            return type(error).__name__
        return "ok"

    # The key is used before this worker has read it.
    before = [status("secret") for _ in range(GUESSES_MAX)]
    async with opened(own_redis) as store:
        await store.create_key(StoredKey("k", key_digest("secret"), "acme"), by=TESTER)
        follower = KeyFollower(keyring, store, 60, authenticator.forgive_known_keys)
        task = asyncio.create_task(follower.run())
        await follower.refresh()
        after = [status("secret"), *(status("wrong") for _ in range(GUESSES_MAX + 1))]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    assert ["Unauthenticated"] * GUESSES_MAX == before
    assert ["ok", *["Unauthenticated"] * GUESSES_MAX, "AuthThrottled"] == after


async def test_a_tenant_that_is_made_again_sees_no_calls_of_its_predecessor(
    boot: Boots, own_redis: RedisServer
) -> None:
    async def new_key(gateway: Any) -> dict[str, str]:
        await gateway.client.put("/admin/tenants/acme", json={})
        created = (await gateway.post("/admin/keys", {"tenant": "acme"})).json()
        return bearer(created["key"])

    async def calls(gateway: Any, key: dict[str, str], query: str = "") -> list[str]:
        reply = await gateway.client.get(f"/usage/calls{query}", headers=key)
        return [call["request_id"] for call in reply.json()["calls"]]

    body = {"model": "bge", "input": "x"}
    async with (
        boot({"tei-0": FakeTei()}, config(own_redis)) as first,
        boot({"tei-0": FakeTei()}, config(own_redis)) as second,
        opened(own_redis) as store,
    ):
        before = await new_key(first)
        await first.post("/v1/embeddings", body, x_request_id="old", **before)
        await first.post("/v1/embeddings", body, x_request_id="of-operator")
        assert ["old"] == await calls(first, before)
        # At the second gateway, so quickly that the first one never sees it gone.
        await store.remove_tenant("acme", by=TESTER)
        after = await new_key(second)
        async with asyncio.timeout(PATIENCE_S):
            while (await first.client.get("/usage/calls", headers=after)).status_code != 200:  # noqa: ASYNC110 - another task reads Redis
                await asyncio.sleep(0.02)
        assert [] == await calls(first, after)
        await first.post("/v1/embeddings", body, x_request_id="new", **after)
        assert ["new"] == await calls(first, after)
        assert "old" not in (await first.client.get("/admin/calls")).text


async def test_keys_expire_by_the_clock_of_redis(own_redis: RedisServer) -> None:
    # A gateway whose clock is an hour late, and one whose clock is right.
    now_s = time.time()
    late = Keyring({"acme": TenantConfig()}, None, now_s=lambda: now_s - 3600)
    async with opened(own_redis) as store:
        await store.create_key(StoredKey("k", key_digest("secret"), "acme", expires_s=now_s - 60), by=TESTER)
        follower = KeyFollower(late, store, 60, lambda: None, clock=lambda: now_s - 3600)
        task = asyncio.create_task(follower.run())
        await follower.refresh()
        with pytest.raises(Unauthenticated, match="expired"):
            late.identify("secret")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_warns_that_the_first_tenant_ends_the_first_key(boot: Boots, own_redis: RedisServer) -> None:
    async with boot({"tei-0": FakeTei()}, config(own_redis, "")) as gateway:
        alone = (await gateway.post("/admin/keys", {"tenant": "acme"})).json()
        first = (await gateway.client.put("/admin/tenants/acme", json={})).json()
        second = (await gateway.client.put("/admin/tenants/globex", json={})).json()
        key = (await gateway.post("/admin/keys", {"tenant": "acme"})).json()

    assert [unknown_tenant_note("acme")] == alone["notes"]
    assert [[FIRST_KEY_NOTE], [], []] == [first["notes"], second["notes"], key["notes"]]


async def test_gateway_logs_that_the_first_key_ends(
    own_redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    keyring = Keyring({}, FirstKey(key_digest("first")))
    async with opened(own_redis) as store:
        follower = KeyFollower(keyring, store, 60, lambda: None)
        task = asyncio.create_task(follower.run())
        await follower.refresh()
        assert [] == caplog.messages
        # By a command on another machine.
        await store.put_tenant("acme", TenantConfig(), by=TESTER)
        await follower.refresh()
        await store.put_tenant("globex", TenantConfig(), by=TESTER)
        await follower.refresh()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    [line] = caplog.messages
    assert "the first key is refused after the next start" in line
    assert "default" == keyring.identify("first").name


async def test_stored_settings_stay_json(own_redis: RedisServer) -> None:
    async with opened(own_redis) as store:
        await store.put_tenant("acme", TenantConfig(weight=3), by=TESTER)
        created_s = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
        await store.create_key(StoredKey("k", key_digest("secret"), "acme", created_s=created_s), by=TESTER)

    stored = own_redis.command("HGET", TENANTS, "acme").splitlines()[1]
    assert 3 == json.loads(stored)["weight"]
    assert created_s == json.loads(own_redis.command("HGET", KEYS, "k").splitlines()[1])["created_s"]
