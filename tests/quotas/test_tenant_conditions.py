"""Tags of stored tenants: of two operators who change one at a time, the second is refused."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.config.schema import TenantConfig
from gateway.tenants.file_store import FileTenantStore
from gateway.tenants.keyring import StoredKey, key_digest
from gateway.tenants.store import TENANTS, TenantStore, merged, tag_of
from tests.actors import TESTER
from tests.conftest import KEY, Boots, Running
from tests.fakes.tei import FakeTei
from tests.quotas.redis_server import RedisServer, opened

CONFIG = """
quotas: {{store: "{store}"}}
upstreams: {{one: {{backend: tei, replicas: ["http://tei-0"]}}}}
models: {{bge: {{upstream: one}}}}
tenants: {{ops: {{keys: [{{digest: "{ops}", scopes: [embed, admin]}}]}}}}
"""
ACME = "/admin/tenants/acme"


@pytest.fixture(params=["redis", "file"])
async def gateway(
    request: pytest.FixtureRequest, boot: Boots, own_redis: RedisServer, tmp_path: Path
) -> AsyncIterator[Running]:
    """Run a gateway with each of the stores."""
    store = own_redis.url if request.param == "redis" else "memory"
    text = CONFIG.format(store=store, ops=key_digest(KEY))
    file = tmp_path / "state" / "tenants.json" if request.param == "file" else None
    async with boot({"tei-0": FakeTei()}, text, tenants_file=file) as running:
        yield running


async def test_the_second_of_two_operators_is_refused(gateway: Running) -> None:
    client = gateway.client
    put = await client.put(ACME, json={"limits": {"tokens_per_day": 5, "inputs_per_day": 7}})
    read = await client.get(ACME)
    [listed] = (await client.get("/admin/tenants")).json()
    tag = read.headers["etag"]
    assert {tag} == {put.headers["etag"], put.json()["etag"], read.json()["etag"], listed["etag"]}
    first = await client.patch(
        ACME,
        json={"limits": {"tokens_per_day": None}},
        headers={"if-match": tag, "content-type": "application/merge-patch+json"},
    )
    assert {"inputs_per_day": 7} == first.json()["settings"]["limits"]
    seen = {"if-match": f"W/{first.headers['etag']}, {tag}"}
    refused = [
        await client.patch(ACME, json={"weight": 2}, headers=seen),
        await client.put(f"{ACME}?replace=true", json={}, headers=seen),
        await client.delete(ACME, headers=seen),
    ]
    assert [412] * 3 == [reply.status_code for reply in refused]
    assert first.headers["etag"] in refused[0].json()["error"]
    assert first.json()["settings"] == (await client.get(ACME)).json()["settings"]

    several = {"if-match": f'"other", {first.headers["etag"]}'}
    second = await client.patch(ACME, json={"weight": 2}, headers=several)
    same = await client.patch(ACME, json={"weight": 2}, headers={"if-match": "*"})
    assert (200, 200, second.headers["etag"]) == (second.status_code, same.status_code, same.headers["etag"])
    removed = await client.delete(ACME, headers={"if-match": same.headers["etag"]})
    assert (200, 404) == (removed.status_code, (await client.get(ACME)).status_code)


async def test_conditions_on_a_tenant_that_is_not_there(gateway: Running) -> None:
    client = gateway.client
    assert 404 == (await client.patch(ACME, json={}, headers={"if-match": "*"})).status_code
    assert 404 == (await client.delete(ACME, headers={"if-match": '"0"'})).status_code
    assert 412 == (await client.put(ACME, json={}, headers={"if-match": "*"})).status_code
    # A key of the name was created since.
    assert 200 == (await client.post("/admin/keys", json={"tenant": "acme", "id": "k"})).status_code
    assert 404 == (await client.delete(ACME, headers={"if-match": '"0"'})).status_code
    assert ["k"] == [key["id"] for key in (await client.get("/admin/keys")).json()]
    new = {"if-none-match": "*"}
    made = [(await client.put(ACME, json={"weight": 3}, headers=new)).status_code for _ in range(2)]
    assert [200, 412] == made
    wrong = [
        await client.put(ACME, json={}, headers={"if-match": "0123"}),
        await client.put(ACME, json={}, headers={"if-none-match": '"0"'}),
        await client.patch(ACME, json={}, headers=new),
    ]
    assert [422] * 3 == [reply.status_code for reply in wrong]
    assert 3 == (await client.get(ACME)).json()["settings"]["weight"]


async def test_a_condition_is_checked_in_the_step_of_the_change(
    own_redis: RedisServer, tmp_path: Path
) -> None:
    """Of changes that all know the same tag, one is made; a removal sees what was stored meanwhile."""

    class Changed(Exception):
        pass

    async with opened(own_redis) as redis, opened(own_redis) as other:
        file = FileTenantStore(tmp_path / "tenants.json")
        for first, second in ((redis, other), (file, file)):
            await first.put_tenant("acme", TenantConfig(), by=TESTER)
            await first.create_key(StoredKey("k", key_digest("sk"), "acme"), by=TESTER)
            tag = tag_of(TenantConfig())

            def check(settings: TenantConfig | None, tag: str = tag) -> None:
                if settings is None or tag_of(settings) != tag:
                    raise Changed

            async def change(store: TenantStore | FileTenantStore, weight: int) -> None:
                def step(before: TenantConfig | None) -> TenantConfig:
                    check(before)
                    return merged(before, {"weight": weight})

                await store.change_tenant("acme", step, by=TESTER)

            ended = await asyncio.gather(
                *(change((first, second)[number % 2], number + 2) for number in range(8)),
                return_exceptions=True,
            )
            assert 7 == sum(isinstance(error, Changed) for error in ended)
            with pytest.raises(Changed):
                await first.remove_tenant("acme", by=TESTER, check=check)
            assert ({"acme"}, ["k"]) == (await first.names(), [key.id for key in await first.keys()])


async def test_a_removal_checks_again_what_was_stored_since_it_looked(own_redis: RedisServer) -> None:
    seen: list[int] = []
    async with opened(own_redis) as store:
        await store.put_tenant("acme", TenantConfig(), by=TESTER)

        def check(settings: TenantConfig | None) -> None:
            seen.append(0 if settings is None else settings.weight)
            if len(seen) == 1:
                own_redis.command("HSET", TENANTS, "acme", '{"weight":9}')
                own_redis.command("SET", "gw:{store}:version", "a.9.b")

        assert await store.remove_tenant("acme", by=TESTER, check=check)
    assert [1, 9] == seen
