"""Lists of tenants and keys for operators: pages among ten thousand, in Redis and in files of `state_dir`."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gateway.tenants.keyring import key_digest
from tests.conftest import KEY, Running, running_gateway
from tests.fakes.tei import FakeTei
from tests.quotas.many_tenants import LIMITS, MANY, fill_folder, fill_redis, name_of
from tests.quotas.redis_server import RedisServer
from tests.waiting import PATIENCE_S

OPS = {"authorization": "Bearer ops"}
READER = {"authorization": "Bearer reader"}
NAMES = ["Ж" * 200, "שלום", "مرحبا", "<img src=x onerror=alert(1)>", "Éclair", "tenant with spaces", "%2e%2E"]


def config(store: str) -> str:
    reader = f'{{digest: "{key_digest("reader")}", id: reader, scopes: ["admin:read"]}}'
    return f"""
quotas: {{store: "{store}"}}
currency: EUR
admin: {{keys: [{{digest: "{key_digest("ops")}", id: ops}}, {reader}]}}
upstreams: {{one: {{backend: tei, replicas: ["http://tei-0"]}}}}
models:
  bge: {{upstream: one, price_per_million_tokens: 1, limits: {{tokens_per_hour: 100000}}}}
  other: {{upstream: one}}
tenants:
  filed:
    keys: [{{digest: "{key_digest(KEY)}", id: caller, limits: {{requests_per_day: 4}}}}]
    limits: {{tokens_per_day: 100, budget_per_month: 1, requests_in_flight: 8}}
    model_limits: {{other: {{tokens_per_minute: 500}}}}
"""


class Filled(NamedTuple):
    """A store with many tenants. store: of the configuration. file: of tenants, None with Redis."""

    store: str
    file: Path | None

    @asynccontextmanager
    async def boot(self) -> AsyncIterator[Running]:
        text = config(self.store)
        async with running_gateway({"tei-0": FakeTei()}, text, tenants_file=self.file) as gateway:
            # A gateway with tenants in its file is ready before it has read those of the store.
            async with asyncio.timeout(PATIENCE_S):
                while (  # noqa: ASYNC110 - each check is a request
                    await gateway.client.get("/admin/keys?limit=1", headers=OPS)
                ).status_code == 503:
                    await asyncio.sleep(0.1)
            yield gateway


@pytest.fixture(scope="module", params=["redis", "file"])
def many(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Filled]:
    folder = tmp_path_factory.mktemp("many")
    if request.param == "file":
        fill_folder(folder / "state")
        yield Filled("memory", folder / "state" / "tenants.json")
        return
    server = RedisServer(folder)
    try:
        fill_redis(server.url)
        yield Filled(server.url, None)
    finally:
        server.stop()


@pytest.fixture(params=["redis", "file"])
def empty(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Filled]:
    if request.param == "file":
        yield Filled("memory", tmp_path / "state" / "tenants.json")
        return
    server = RedisServer(tmp_path)
    try:
        yield Filled(server.url, None)
    finally:
        server.stop()


async def listed(gateway: Running, path: str = "/admin/tenants", **query: Any) -> Any:
    reply = await gateway.client.get(path, params=query, headers=OPS)
    assert 200 == reply.status_code, reply.text
    return reply.json()


def names(page: Any) -> list[str]:
    return [row["name"] for row in page["data"]]


async def test_pages_of_ten_thousand_tenants(many: Filled) -> None:
    async with many.boot() as gateway:
        first = await listed(gateway, limit=2)
        middle = await listed(gateway, sort="name", offset=5_000, limit=3)
        last = await listed(gateway, sort="name", order="desc", limit=1)
        beyond = await listed(gateway, offset=20_000)
        most = await listed(gateway, sort="tokens", limit=3)
        costly = await listed(gateway, sort="cost", order="asc", offset=MANY, limit=5)
        found = await listed(gateway, search="TENANT-0999")
        by_key = await listed(gateway, search="key-04711")
        in_file = await listed(gateway, source="file")
        stored = await listed(gateway, source="store", limit=1_000)

    assert ["filed", name_of(0)] == names(first)
    assert [name_of(at) for at in (4_999, 5_000, 5_001)] == names(middle)
    assert [name_of(MANY - 1)] == names(last)
    assert (MANY + 1, []) == (beyond["total"], names(beyond))
    assert [name_of(MANY - at) for at in (1, 2, 3)] == names(most)
    assert [name_of(MANY - 1)] == names(costly)
    assert (10, [name_of(at) for at in range(9_990, 10_000)]) == (found["total"], names(found))
    assert (1, [name_of(4_711)]) == (by_key["total"], names(by_key))
    assert (1, ["filed"]) == (in_file["total"], names(in_file))
    assert (MANY, 1_000) == (stored["total"], len(stored["data"]))

    row = by_key["data"][0]
    assert {"calls": 1, "tokens": 4_711, "cost": 4.711, "refused": 0} == row["today"]
    assert {"calls": 1, "tokens": 4_711, "cost": 4.711} == row["month"]
    assert (LIMITS, 1, False, []) == (row["limits"], row["keys"], row["in_file"], row["notes"])
    assert "2026-11-08" == row["last_used"]
    assert "EUR" == by_key["currency"]


async def test_the_etag_of_a_row_is_that_of_the_tenant(many: Filled) -> None:
    async with many.boot() as gateway:
        row = (await listed(gateway, search=name_of(7)))["data"][0]
        alone = await gateway.client.get(f"/admin/tenants/{name_of(7)}", headers=OPS)
        filed = (await listed(gateway, source="file"))["data"][0]
    assert row["etag"] == alone.headers["etag"]
    assert filed["etag"] is None


async def test_pages_of_ten_thousand_keys(many: Filled) -> None:
    async with many.boot() as gateway:
        first = await listed(gateway, "/admin/keys", limit=2)
        newest = await listed(gateway, "/admin/keys", sort="created", limit=1)
        oldest = await listed(gateway, "/admin/keys", sort="created", order="asc", limit=1)
        unused = await listed(gateway, "/admin/keys", sort="last_used", order="asc", offset=MANY - 1)
        own = await listed(gateway, "/admin/keys", tenant="filed")
        operators = await listed(gateway, "/admin/keys", tenant="operators")
        found = await listed(gateway, "/admin/keys", search="tenant-00042")
        no_one = await listed(gateway, "/admin/keys", tenant="Filed")

    assert (MANY + 3, ["caller", "key-00000"]) == (first["total"], [key["id"] for key in first["data"]])
    assert ["key-09999"] == [key["id"] for key in newest["data"]]
    assert ["key-00000"] == [key["id"] for key in oldest["data"]]
    # Those without a last use come last.
    assert ["caller", "ops", "reader"] == [key["id"] for key in unused["data"]][1:]
    assert [("caller", "file", None)] == [(key["id"], key["source"], key["created"]) for key in own["data"]]
    assert [("ops", "operators", True), ("reader", "operators", True)] == [
        (key["id"], key["source"], key["has_tenant"]) for key in operators["data"]
    ]
    [key] = found["data"]
    assert ("key-00042", "store", "2026-11-15", 43.0) == (
        key["id"],
        key["source"],
        key["last_used"],
        key["created"],
    )
    assert 0 == no_one["total"]
    assert "digest" not in json.dumps([first, own, operators])


@pytest.mark.parametrize(
    ("path", "query", "words"),
    [
        ("/admin/tenants", {"limit": 0}, "limit: from 1 to 1000, not 0"),
        ("/admin/tenants", {"limit": 1001}, "limit: from 1 to 1000"),
        ("/admin/tenants", {"limit": "ten"}, "`limit`"),
        ("/admin/tenants", {"offset": -1}, "offset: from 0"),
        (
            "/admin/tenants",
            {"sort": "size"},
            "sort: one of name, calls, tokens, cost, refused, keys, last_used",
        ),
        ("/admin/tenants", {"order": "up"}, "order: one of asc, desc"),
        ("/admin/tenants", {"source": "redis"}, "source: one of store, file"),
        ("/admin/keys", {"sort": "name"}, "sort: one of id, tenant, created, last_used, expires"),
        ("/admin/keys", {"limit": -5}, "limit: from 1 to 1000"),
        ("/admin/audit", {"limit": 1001}, "limit: from 1 to 1000"),
        ("/admin/calls", {"limit": 0}, "limit: from 1 to 1000"),
        ("/admin/calls", {"since": "soon"}, "since: 'soon' is neither"),
        ("/usage/calls", {"limit": 0}, "limit: from 1 to 1000"),
    ],
)
async def test_wrong_parameters_are_named(path: str, query: dict[str, Any], words: str) -> None:
    async with running_gateway({"tei-0": FakeTei()}, config("memory")) as gateway:
        headers = {} if path.startswith("/usage") else OPS
        reply = await gateway.client.get(path, params=query, headers=headers)
    # In TEI's form, which is that of operators, an invalid value is 422.
    assert 422 == reply.status_code
    assert words in reply.json()["error"]


async def test_odd_names_are_found_and_summarized(empty: Filled) -> None:
    async with empty.boot() as gateway:
        for name in NAMES:
            path = "/admin/tenants/" + "".join(f"%{byte:02X}" for byte in name.encode())
            added = await gateway.client.put(path, json={"limits": {"tokens_per_day": 5}}, headers=OPS)
            assert 200 == added.status_code, added.text
            summary = await gateway.client.get(f"{path}/summary", headers=OPS)
            assert (200, name) == (summary.status_code, summary.json()["name"])
            assert [name] == names(await listed(gateway, search=name))
        every = await listed(gateway, limit=50)
        decomposed = await listed(gateway, search="e\N{COMBINING ACUTE ACCENT}CLAIR")
        cyrillic = await listed(gateway, search="жжж")
    assert {*NAMES, "filed"} == set(names(every))
    assert ["Éclair"] == names(decomposed)
    assert [NAMES[0]] == names(cyrillic)


async def test_a_change_is_listed_at_once(empty: Filled) -> None:
    async with empty.boot() as gateway:
        for number in range(3):
            await gateway.client.put(f"/admin/tenants/t{number}", json={"weight": 1 + number}, headers=OPS)
            assert 1 + number == (await listed(gateway, search=f"t{number}"))["data"][0]["weight"]
            await gateway.client.post("/admin/keys", json={"tenant": f"t{number}"}, headers=OPS)
            assert 1 == (await listed(gateway, search=f"t{number}"))["data"][0]["keys"]
            await gateway.client.delete(f"/admin/tenants/t{number}", headers=OPS)
            assert [] == names(await listed(gateway, search=f"t{number}"))


async def test_a_name_in_both_places_has_the_settings_of_the_file(empty: Filled) -> None:
    async with empty.boot() as gateway:
        await gateway.client.put("/admin/tenants/filed", json={"weight": 9}, headers=OPS)
        row = (await listed(gateway, source="store"))["data"][0]
        same = (await listed(gateway, source="file"))["data"][0]
    assert row == same
    assert (1, True) == (row["weight"], row["in_file"])
    assert row["etag"]
    assert ["router.yaml defines this tenant too: its settings apply, and the stored ones do not"] == row[
        "notes"
    ]


async def test_the_states_of_all_limits(empty: Filled) -> None:
    async with empty.boot() as gateway:
        for _ in range(3):
            assert (
                200
                == (await gateway.post("/v1/embeddings", {"model": "bge", "input": "one two"})).status_code
            )
        row = (await listed(gateway, source="file"))["data"][0]
        summary = await listed(gateway, "/admin/tenants/filed/summary")
        again = await listed(gateway, "/admin/tenants/filed/summary")

    states = {state["limit"]: state for state in summary["limits"]}
    assert [
        "tokens_per_day",
        "budget_per_month",
        "requests_in_flight",
        "model other tokens_per_minute",
        "model bge tokens_per_hour",
        "key caller requests_per_day",
    ] == list(states)
    # Four tokens each.
    day = states["tokens_per_day"]
    assert (12, 100, 88, 0.12) == (day["used"], day["of"], day["remaining"], day["share"])
    assert (0.000012, 1.0) == (states["budget_per_month"]["used"], states["budget_per_month"]["of"])
    assert (0, 8) == (states["requests_in_flight"]["used"], states["requests_in_flight"]["of"])
    assert (3, 1) == tuple(states["key caller requests_per_day"][name] for name in ("used", "remaining"))
    assert 0.75 == row["most_used"]["share"]
    assert "key caller requests_per_day" == row["most_used"]["limit"]
    assert day["resets_at_s"] > 0
    # Looking at them takes nothing.
    assert {"used": day["used"]}.items() <= next(
        state for state in again["limits"] if state["limit"] == "tokens_per_day"
    ).items()
    assert {"calls": 3, "tokens": 12, "cost": 0.000012, "refused": 0} == summary["today"]
    assert [{"model": "bge", "calls": 3, "tokens": 12, "cost": 0.000012}] == summary["by_model"]
    assert ("EUR", 1) == (summary["currency"], summary["key_count"])
    assert summary["month"]["calls"] == 3
    assert ["caller"] == [key["id"] for key in summary["keys"]]


async def test_refused_calls_are_counted_by_day(empty: Filled) -> None:
    async with empty.boot() as gateway:
        statuses = [
            (await gateway.post("/v1/embeddings", {"model": "bge", "input": "a"})).status_code
            for _ in range(7)
        ]
        first = await listed(gateway, sort="refused", limit=1)
        again = await listed(gateway, sort="refused", limit=1)
    assert [200] * 4 + [429] * 3 == statuses
    assert [3, 3] == [page["data"][0]["today"]["refused"] for page in (first, again)]
    # They outlive the gateway.
    async with empty.boot() as gateway:
        assert 3 == (await listed(gateway, source="file"))["data"][0]["today"]["refused"]


async def test_unknown_tenants_have_no_summary(empty: Filled) -> None:
    async with empty.boot() as gateway:
        reply = await gateway.client.get("/admin/tenants/none/summary", headers=OPS)
    assert 404 == reply.status_code
    assert {"error": "there is no tenant 'none'", "error_type": "NotFound"} == reply.json()


@pytest.mark.parametrize(
    "path",
    [
        "/admin/tenants?limit=1",
        "/admin/keys?limit=1",
        "/admin/tenants/filed/summary",
        "/admin/audit?search=x",
        "/admin/calls?request_id=x",
    ],
)
async def test_readers_may_read_and_callers_may_not(empty: Filled, path: str) -> None:
    async with empty.boot() as gateway:
        reader = await gateway.client.get(path, headers=READER)
        caller = await gateway.client.get(path)
        nobody = await gateway.client.get(path, headers={"authorization": ""})
    assert [200, 403, 401] == [reply.status_code for reply in (reader, caller, nobody)]


async def test_without_parameters_the_forms_stay(empty: Filled) -> None:
    async with empty.boot() as gateway:
        await gateway.client.put("/admin/tenants/acme", json={}, headers=OPS)
        await gateway.client.post("/admin/keys", json={"tenant": "acme", "id": "k"}, headers=OPS)
        tenants = await listed(gateway)
        old_tenants = (await gateway.client.get("/admin/tenants", headers=OPS)).json()
        old_keys = (await gateway.client.get("/admin/keys", headers=OPS)).json()
    assert isinstance(tenants, list)
    assert [{"name", "settings", "in_file", "etag", "notes"}] == [set(row) for row in old_tenants]
    assert ["k"] == [key["id"] for key in old_keys]
    assert "source" not in old_keys[0]


async def test_the_tenant_of_the_first_key_is_listed() -> None:
    text = 'upstreams: {one: {backend: tei, replicas: ["http://tei-0"]}}\nmodels: {bge: {upstream: one}}\n'
    async with running_gateway({"tei-0": FakeTei()}, text) as gateway:
        page = (await gateway.client.get("/admin/tenants?limit=5")).json()
        summary = await gateway.client.get("/admin/tenants/default/summary")
        keys = (await gateway.client.get("/admin/keys?limit=5")).json()
    assert [("default", False, 1)] == [(row["name"], row["in_file"], row["keys"]) for row in page["data"]]
    assert ["this is the tenant of the first key, which has no settings"] == page["data"][0]["notes"]
    assert 200 == summary.status_code
    assert [("first", "default", "file")] == [
        (key["id"], key["tenant"], key["source"]) for key in keys["data"]
    ]


async def test_lists_answer_503_while_redis_is_away(own_redis: RedisServer) -> None:
    async with Filled(own_redis.url, None).boot() as gateway:
        await listed(gateway, limit=1)
        own_redis.kill()
        replies = await asyncio.gather(
            *(
                gateway.client.get(path, headers=OPS)
                for path in (
                    "/admin/tenants?limit=1",
                    "/admin/keys?limit=1",
                    "/admin/tenants/filed/summary",
                )
            )
        )
    assert [503] * 3 == [reply.status_code for reply in replies]
