"""Operator endpoints: keys are created, listed and revoked, and usage is exact to the token."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime

import pytest

from gateway.tenants.keyring import key_digest
from tests.conftest import KEY, Boots, Running
from tests.fakes.tei import FakeTei
from tests.quotas.redis_server import RedisServer
from tests.waiting import PATIENCE_S


def config(store: str, listen: str = "127.0.0.1:8080", scopes: str = "[embed, admin]") -> str:
    return f"""
listen: {listen}
quotas: {{store: "{store}"}}
upstreams: {{one: {{backend: tei, replicas: ["http://tei-0"]}}}}
models: {{bge: {{upstream: one}}}}
tenants: {{ops: {{keys: [{{digest: "{key_digest(KEY)}", scopes: {scopes}}}]}}}}
"""


async def accepted(gateway: Running, key: str) -> bool:
    headers = {"authorization": f"Bearer {key}"}
    return (await gateway.client.get("/v1/models", headers=headers)).status_code == 200


async def until_accepted(gateway: Running, key: str, expected: bool) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await accepted(gateway, key) is not expected:  # noqa: ASYNC110 - each check is a request
            await asyncio.sleep(0.02)


async def test_creates_lists_uses_and_revokes_a_key(boot: Boots, own_redis: RedisServer) -> None:
    async with boot({"tei-0": FakeTei()}, config(own_redis.url)) as gateway:
        settings = {"tenant": "acme", "id": "k", "models": ["bge"], "limits": {"requests_per_hour": 5}}
        await gateway.client.put("/admin/tenants/acme", json={})
        created = (await gateway.post("/admin/keys", settings)).json()
        stray = (await gateway.post("/admin/keys", {"tenant": "nowhere", "id": "stray"})).json()
        assert await accepted(gateway, created["key"])
        listed = (await gateway.client.get("/admin/keys")).json()
        twice = await gateway.post("/admin/keys", {"tenant": "acme", "id": "k"})
        revoked = await gateway.client.delete("/admin/keys/k")
        await until_accepted(gateway, created["key"], expected=False)
        again = await gateway.client.delete("/admin/keys/k")

    assert [created["shown"], stray["shown"]] == listed
    assert [True, False] == [key["has_tenant"] for key in listed]
    assert settings.items() <= listed[0].items()
    assert "key" not in listed[0]
    assert [409, 200, 404] == [twice.status_code, revoked.status_code, again.status_code]


@pytest.mark.parametrize("shared", [True, False], ids=["redis", "memory"])
async def test_usage_is_the_settled_cost(boot: Boots, own_redis: RedisServer, shared: bool) -> None:
    store = own_redis.url if shared else "memory"
    async with boot({"tei-0": FakeTei()}, config(store)) as gateway:
        for text in ("one", "one two", "one two three"):
            await gateway.post("/embed", {"inputs": text})
        usage = (await gateway.client.get("/admin/usage", params={"tenant": "ops"})).json()
        sheet = (await gateway.client.get("/admin/usage", params={"tenant": "ops", "form": "csv"})).text

    day = datetime.now(UTC).date().isoformat()
    expected = {
        "tenant": "ops",
        "day": day,
        "model": "bge",
        "requests": 3,
        "tokens": 12,
        "inputs": 3,
        "images": 0,
        "cost": 0.0,
    }
    assert {"data": [expected], "currency": None} == usage
    header = "tenant,day,model,requests,tokens,inputs,images,cost,currency"
    assert [header, f"ops,{day},bge,3,12,3,0,0.00,"] == sheet.split()


@pytest.mark.parametrize(("scopes", "status"), [("[embed, admin]", 200), ("[embed]", 403)])
async def test_requires_the_admin_scope_beyond_loopback(boot: Boots, scopes: str, status: int) -> None:
    text = config("memory", "0.0.0.0:8080", scopes)
    async with boot({"tei-0": FakeTei()}, text) as gateway:
        with_key = await gateway.client.get("/admin/usage", params={"tenant": "ops"})
        gateway.client.headers.pop("authorization")
        without = await gateway.client.get("/admin/usage", params={"tenant": "ops"})

    assert [status, 401] == [with_key.status_code, without.status_code]


@pytest.mark.parametrize(
    ("query", "message"),
    [
        (
            {"tenant": "ops", "since": "yesterday"},
            "the query parameter `since`: expected a day such as 2027-01-31",
        ),
        ({"tenant": "ops", "form": "xml"}, "the query parameter `form`: Invalid enum value 'xml'"),
        (
            {"tenant": "ops", "since": "2026-01-02", "until": "2026-01-01"},
            "since (2026-01-02) is after until (2026-01-01)",
        ),
    ],
)
async def test_rejects_malformed_queries(boot: Boots, query: dict[str, str], message: str) -> None:
    async with boot({"tei-0": FakeTei()}, config("memory")) as gateway:
        reply = await gateway.client.get("/admin/usage", params=query)

    assert (422, message) == (reply.status_code, reply.json()["error"])


@pytest.mark.parametrize("shared", [False, True])
async def test_usage_without_a_tenant_is_that_of_all(
    boot: Boots, own_redis: RedisServer, shared: bool
) -> None:
    async with boot({"tei-0": FakeTei()}, config(own_redis.url if shared else "memory")) as gateway:
        await gateway.post("/v1/embeddings", {"input": "one two"})
        one = (await gateway.client.get("/admin/usage", params={"tenant": "ops"})).json()
        every = (await gateway.client.get("/admin/usage")).json()

    assert every["data"]
    assert one == every


async def test_refers_to_router_yaml_without_redis(boot: Boots) -> None:
    async with boot({"tei-0": FakeTei()}, config("memory")) as gateway:
        assert 404 == (await gateway.client.get("/admin/keys")).status_code


async def test_returns_503_while_the_store_is_down(boot: Boots, own_redis: RedisServer) -> None:
    async with boot({"tei-0": FakeTei()}, config(own_redis.url)) as gateway:
        own_redis.kill()
        replies = [
            await gateway.client.get("/admin/keys"),
            await gateway.client.get("/admin/usage", params={"tenant": "ops"}),
        ]

    assert [503, 503] == [reply.status_code for reply in replies]
    assert all("retry-after" in reply.headers for reply in replies)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/admin/keys"),
        ("POST", "/admin/keys"),
        ("DELETE", "/admin/keys/k"),
        ("GET", "/admin/tenants"),
        ("PUT", "/admin/tenants/acme"),
        ("DELETE", "/admin/tenants/acme"),
        ("GET", "/admin/usage"),
    ],
)
@pytest.mark.parametrize(("key", "status"), [("wrong", 401), (KEY, 403)])
async def test_does_not_read_the_body_of_unauthorized_requests(
    boot: Boots, method: str, path: str, key: str, status: int
) -> None:
    read: list[bool] = []

    async def body() -> AsyncIterator[bytes]:
        read.append(True)
        yield b"{}"

    text = config("memory", "0.0.0.0:8080", scopes="[embed]")
    async with boot({"tei-0": FakeTei()}, text) as gateway:
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        reply = await gateway.client.request(method, path, content=body(), headers=headers)

    assert status == reply.status_code
    assert not read


async def test_rejects_key_ids_unusable_in_paths_and_headers(boot: Boots, own_redis: RedisServer) -> None:
    ids = ("a/b", "", "équipe", "a b", "a" * 1001, "certificate:operator.example")
    async with boot({"tei-0": FakeTei()}, config(own_redis.url)) as gateway:
        replies = [await gateway.post("/admin/keys", {"tenant": "acme", "id": id_}) for id_ in ids]
        unicode = await gateway.post("/admin/keys", {"tenant": "équipe", "id": "a-b"})

    assert [422] * 6 == [reply.status_code for reply in replies]
    assert ["id"] * 6 == [reply.json()["error"].split(":")[0] for reply in replies]
    assert 200 == unicode.status_code
    assert unicode.json()["key"].startswith("gw_a-b_")


async def test_notes_unknown_tenants_and_models_of_a_key(boot: Boots, own_redis: RedisServer) -> None:
    requests = (
        {"tenant": "acme", "models": ["bge", "bgee"]},
        {"tenant": "ops", "models": ["bge"]},
        {"tenant": "set"},
    )
    async with boot({"tei-0": FakeTei()}, config(own_redis.url)) as gateway:
        await gateway.client.put("/admin/tenants/set", json={})
        replies = [(await gateway.post("/admin/keys", settings)).json() for settings in requests]

    nowhere = (
        "tenant acme is in neither router.yaml nor Redis: the key is refused until that tenant is defined"
    )
    assert [[nowhere, "model bgee is not served here"], [], []] == [created["notes"] for created in replies]
    assert all(created["key"].startswith("gw_") for created in replies)


@pytest.mark.parametrize(
    ("written", "moment"),
    [
        ("2127-01-31", datetime(2127, 1, 31, tzinfo=UTC)),
        ("2127-01-31T12:00:00", datetime(2127, 1, 31, 12, tzinfo=UTC)),
        ("2127-01-31T12:00:00Z", datetime(2127, 1, 31, 12, tzinfo=UTC)),
        ("2127-01-31T12:00:00+02:00", datetime(2127, 1, 31, 10, tzinfo=UTC)),
    ],
)
async def test_accepts_an_expiry_day_or_time(
    boot: Boots, own_redis: RedisServer, written: str, moment: datetime
) -> None:
    async with boot({"tei-0": FakeTei()}, config(own_redis.url)) as gateway:
        created = await gateway.post("/admin/keys", {"tenant": "acme", "expires": written})

    assert moment.timestamp() == created.json()["shown"]["expires"]


@pytest.mark.parametrize("written", ["", "tomorrow", "31.01.2127", "2127-13-01", 4_956_508_800])
async def test_rejects_malformed_expiry(boot: Boots, own_redis: RedisServer, written: object) -> None:
    async with boot({"tei-0": FakeTei()}, config(own_redis.url)) as gateway:
        reply = await gateway.post("/admin/keys", {"tenant": "acme", "expires": written})
        listed = (await gateway.client.get("/admin/keys")).json()

    assert (422, []) == (reply.status_code, listed)
    assert ("2027-01-31" if isinstance(written, str) else "expires") in reply.json()["error"]


async def test_rejects_an_expiry_in_the_past(boot: Boots, own_redis: RedisServer) -> None:
    async with boot({"tei-0": FakeTei()}, config(own_redis.url)) as gateway:
        reply = await gateway.post("/admin/keys", {"tenant": "acme", "expires": "2026-01-31"})
        listed = (await gateway.client.get("/admin/keys")).json()

    assert (422, []) == (reply.status_code, listed)
    assert "expires: that is in the past" == reply.json()["error"]


HERE = {"host": "localhost:8080", "authorization": ""}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"host": "127.0.0.1"}, 200),
        ({"host": "[::1]:8080"}, 200),
        ({"origin": "https://evil.example"}, 401),
        ({"host": "evil.example"}, 401),
        ({"x-forwarded-for": "8.8.8.8"}, 401),
        ({"x-forwarded-for": ""}, 401),
        ({"x-forwarded-proto": "https"}, 401),
        ({"via": "1.1 proxy"}, 401),
        ({"referer": "https://evil.example/"}, 401),
        ({"sec-fetch-site": "cross-site"}, 401),
        ({"host": "[::1].evil.example"}, 401),
        ({"host": "[127.0.0.1]evil.example"}, 401),
    ],
)
async def test_only_local_requests_on_loopback_need_no_key(
    boot: Boots, headers: dict[str, str], status: int
) -> None:
    async with boot({"tei-0": FakeTei()}, config("memory")) as gateway:
        reply = await gateway.client.get("/admin/usage", params={"tenant": "ops"}, headers=HERE | headers)

    assert status == reply.status_code


async def test_configured_operator_keys_are_required_on_loopback_too(boot: Boots) -> None:
    text = config("memory") + f'admin: {{keys: ["{key_digest("operator")}"]}}\n'
    async with boot({"tei-0": FakeTei()}, text) as gateway:
        query = {"url": "/admin/usage", "params": {"tenant": "ops"}}
        without = await gateway.client.get(**query, headers=HERE)
        with_key = await gateway.client.get(**query, headers=HERE | {"authorization": "Bearer operator"})

    assert [401, 200] == [without.status_code, with_key.status_code]


async def test_no_stored_key_takes_the_id_of_a_configured_operator(
    boot: Boots, own_redis: RedisServer
) -> None:
    text = config(own_redis.url)
    text += f'admin: {{keys: [{{digest: "{key_digest("operator")}", id: root}}]}}\n'
    async with boot({"tei-0": FakeTei()}, text) as gateway:
        gateway.client.headers["authorization"] = "Bearer operator"
        created = await gateway.post("/admin/keys", {"tenant": "acme", "id": "root"})
        assert 200 == (await gateway.post("/admin/keys", {"tenant": "acme", "id": "a"})).status_code
        rotated = await gateway.post("/admin/keys/a/rotate", {"id": "root"})

    assert [409, 409] == [created.status_code, rotated.status_code]


async def test_accepts_limits_of_a_key_and_rejects_unknown_fields(
    boot: Boots, own_redis: RedisServer
) -> None:
    async with boot({"tei-0": FakeTei()}, config(own_redis.url)) as gateway:
        await gateway.client.put("/admin/tenants/acme", json={})
        created = await gateway.post("/admin/keys", {"tenant": "acme", "limits": {"requests_per_hour": 1}})
        bearer = {"authorization": f"Bearer {created.json()['key']}"}
        calls = [await gateway.client.post("/embed", json={"inputs": "a"}, headers=bearer) for _ in range(2)]
        refused = [
            await gateway.post("/admin/keys", {"tenant": "acme"} | more)
            for more in (
                {"expire": 1},
                {"limits": {"words_per_hour": 1}},
                {"limits": {"requests_per_hour": 0}},
            )
        ]

    assert [200, 429] == [call.status_code for call in calls]
    assert [422] * 3 == [reply.status_code for reply in refused]


async def test_keys_and_tenants_can_carry_budgets(boot: Boots, own_redis: RedisServer) -> None:
    text = config(own_redis.url).replace("{upstream: one}", "{upstream: one, price_per_million_tokens: 1}")
    bodies = (
        {"tenant": "acme", "id": "k", "limits": {"budget_per_day": 0.00001}},
        {"limits": {"budget_per_month": 2.5}},
    )
    notes = []
    for written in (config(own_redis.url), f"{text}currency: EUR\n"):
        async with boot({"tei-0": FakeTei()}, written) as gateway:
            tenant = await gateway.client.put("/admin/tenants/acme", json=bodies[1])
            await gateway.client.delete("/admin/keys/k")
            created = await gateway.post("/admin/keys", bodies[0])
            listed = (await gateway.client.get("/admin/tenants")).json()
            bearer = {"authorization": f"Bearer {created.json()['key']}"}
            calls = [
                await gateway.client.post("/embed", json={"inputs": "a"}, headers=bearer) for _ in range(3)
            ]
            notes.append([*tenant.json()["notes"][-1:], *created.json()["notes"]])

    assert {"budget_per_month": 2.5} == listed[0]["settings"]["limits"]
    assert {"budget_per_day": 0.00001} == created.json()["shown"]["limits"]
    assert [2, 0] == [sum("no model here has a price" in note for note in found) for found in notes]
    assert [200, 200, 429] == [call.status_code for call in calls]


async def test_returns_503_for_unknown_keys_until_the_store_is_read(
    boot: Boots, own_redis: RedisServer
) -> None:
    own_redis.kill()
    async with boot({"tei-0": FakeTei()}, config(own_redis.url)) as gateway:
        stranger = {"authorization": "Bearer made-elsewhere"}
        reply = await gateway.client.post("/v1/embeddings", json={"input": "a"}, headers=stranger)
        listed = await gateway.client.get("/v1/models")

    assert (503, "quota_unavailable") == (reply.status_code, reply.json()["error"]["code"])
    assert "retry-after" in reply.headers
    assert 200 == listed.status_code
