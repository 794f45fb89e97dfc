"""/admin/history, those below it, and /usage/history: content, access and errors."""

import asyncio

import pytest

from gateway.api.operators.history import HistoryApi
from gateway.api.operators.reply_cache import WAITING_MAX
from gateway.errors import Overloaded
from gateway.history.keeper import HistoryKeeper
from gateway.history.ranges import RANGES_S, range_of
from gateway.history.sqlite_store import HistoryInSqlite
from gateway.tenants.keyring import key_digest
from tests.conftest import CONFIG, KEY, Boots
from tests.fakes.tei import FakeTei

OPENAI = "/v1/embeddings"
HERE = {"host": "127.0.0.1:8080", "authorization": ""}
TENANT = f'tenants: {{acme: {{keys: [{{digest: "{key_digest(KEY)}", id: laptop}}]}}}}\n'
PRICED = CONFIG.replace("bge: {", "bge: {price_per_million_tokens: 10000, ")
PATHS = ("/admin/history", "/admin/history/top", "/admin/history/replicas")


async def test_calls_of_the_running_minute_are_shown(boot: Boots) -> None:
    async with boot({"tei-0": FakeTei()}, f"currency: EUR\n{TENANT}{PRICED}") as gateway:
        tokens = (await gateway.post(OPENAI, {"input": "x", "model": "bge"})).json()["usage"]["total_tokens"]
        await gateway.post(OPENAI, {"input": "x", "model": "nowhere"})
        chart = await gateway.client.get("/admin/history?range=15m", headers=HERE)
        long = await gateway.client.get("/admin/history?range=90d", headers=HERE)
        model = await gateway.client.get("/admin/history?range=30d&model=bge", headers=HERE)
        tenant = await gateway.client.get("/admin/history?range=7d&tenant=acme", headers=HERE)
        own = await gateway.client.get("/usage/history?range=7d")
        top = await gateway.client.get("/admin/history/top?by=tenant&metric=cost&range=90d", headers=HERE)
        replicas = await gateway.client.get("/admin/history/replicas", headers=HERE)

    assert chart.status_code == 200, chart.text
    shown = chart.json()
    assert (shown["kept"], shown["step_s"], shown["currency"], len(shown["points"])) == (
        "memory",
        60,
        "EUR",
        15,
    )
    assert shown["until_s"] - shown["from_s"] == 900
    point = long.json()["points"][-1]
    assert (point["calls"], point["failed"], point["failures"]) == (2, 1, {"model_not_found": 1})
    assert (point["tokens"], point["cost"]) == (tokens, tokens * 0.01)
    assert 0 < point["p50_s"] <= point["p95_s"] <= point["p99_s"]
    assert shown["points"][0] == {"at_s": shown["from_s"]} | dict.fromkeys(point.keys() - {"at_s"})
    assert [found.json()["points"][-1]["calls"] for found in (model, tenant, own)] == [1, 2, 2]
    (row,) = top.json()["data"]
    assert (row["name"], row["calls"], row["cost"]) == ("acme", 2, tokens * 0.01)
    assert row["points"][-1] == row["cost"]
    assert replicas.json()["data"][0]["spans"][-1]["state"] == "up", replicas.text


async def test_calls_of_no_model_are_beside_the_list_of_models(boot: Boots) -> None:
    async with boot({"tei-0": FakeTei()}, f"{TENANT}{CONFIG}") as gateway:
        await gateway.post(OPENAI, {"input": "x", "model": "bge"})
        # Refused before its body is read.
        wrong = await gateway.post(OPENAI, {"input": "x", "model": "bge"}, authorization="Bearer wrong")
        tops = {
            (by, metric): (
                await gateway.client.get(f"/admin/history/top?by={by}&metric={metric}", headers=HERE)
            ).json()
            for by in ("model", "tenant")
            for metric in ("calls", "failed", "tokens", "cost", "p95")
        }
    assert 401 == wrong.status_code
    unnamed = {key: top["unnamed_total"] for key, top in tops.items()}
    assert {"model", "tenant"} == {
        by for (by, metric), found in unnamed.items() if (metric, found) == ("calls", 1)
    }
    assert {"model", "tenant"} == {
        by for (by, metric), found in unnamed.items() if (metric, found) == ("failed", 1)
    }
    assert {0} == {found for (_, metric), found in unnamed.items() if metric in {"tokens", "cost"}}
    assert {None} == {found for (_, metric), found in unnamed.items() if metric == "p95"}
    assert [("bge", 1)] == [(row["name"], row["calls"]) for row in tops["model", "calls"]["data"]]


async def test_what_cannot_be_shown_is_refused_in_the_callers_dialect(boot: Boots) -> None:
    wrong = {
        "/admin/history?range=2h": "none of 15m, 1h",
        "/admin/history?range=1h&from=5": "cannot be combined",
        "/admin/history?range=1h&until=5": "cannot be combined",
        "/admin/history?until=5": "needs `from`",
        "/admin/history?from=9&until=5": "before `until`",
        "/admin/history?from=nan": "before `until`",
        "/admin/history?from=-1": "before `until`",
        "/admin/history?from=1e300": "before `until`",
        "/admin/history?from=0&until=1e308": "until: expected seconds since 1970, before the year 10000",
        "/admin/history?from=1&until=1790000000000": "not milliseconds",
        "/admin/history/replicas?from=0&until=inf": "before the year 10000",
        "/admin/history?from=1&until=2": "90 days",
        "/admin/history?model=bge&tenant=acme": "cannot be combined",
        "/admin/history?model=": "from 1 to 256",
        "/admin/history/top?limit=0": "from 1 to 100",
        "/admin/history/top?range=x": "none of 15m, 1h",
        "/admin/history/replicas?range=x": "none of 15m, 1h",
    }
    async with boot({"tei-0": FakeTei()}, f"{TENANT}{CONFIG}") as gateway:
        for path, words in wrong.items():
            answered = await gateway.client.get(path, headers=HERE)
            assert (answered.status_code, words in answered.text) == (422, True), (path, answered.text)
            assert answered.json()["error_type"] == "Validation", path
        for path, status in {
            "/admin/history?model=nowhere": 404,
            "/admin/history?tenant=nobody": 404,
            "/admin/history?model=bge": 200,
            "/admin/history/top?by=key": 422,
            "/admin/history/top?metric=inputs": 422,
            "/admin/history?from=x": 422,
            "/usage/history?range=x": 422,
        }.items():
            headers = {} if path.startswith("/usage") else HERE
            answered = await gateway.client.get(path, headers=headers)
            assert answered.status_code == status, (path, answered.text)


async def test_a_tenant_sees_its_own_history_only(boot: Boots) -> None:
    other = key_digest("another-key-of-another-tenant")
    tenants = f'tenants: {{acme: {{keys: ["{key_digest(KEY)}"]}}, beta: {{keys: ["{other}"]}}}}\n'
    async with boot({"tei-0": FakeTei()}, f"listen: 0.0.0.0:8080\n{tenants}{CONFIG}") as gateway:
        await gateway.post(OPENAI, {"input": "x", "model": "bge"})
        bearer = {"authorization": "Bearer another-key-of-another-tenant"}
        theirs = await gateway.client.get("/usage/history?range=15m", headers=bearer)
        asked = await gateway.client.get("/usage/history?range=15m&tenant=acme", headers=bearer)
        for path in PATHS:
            assert (await gateway.client.get(path)).status_code == 403, path
            assert (await gateway.client.get(path, headers=HERE)).status_code == 401, path
        assert (await gateway.client.get("/usage/history", headers=HERE)).status_code == 401
        own = await gateway.client.get("/usage/history?range=15m")

    assert sum(point["calls"] or 0 for point in own.json()["points"]) == 1
    for shown in (theirs, asked):
        assert shown.status_code == 200, shown.text
        assert {point["calls"] for point in shown.json()["points"]} <= {0, None}
        # Kinds of error are of all tenants.
        assert all(not point["failures"] for point in shown.json()["points"])


@pytest.mark.parametrize(
    ("name", "step_s", "steps"),
    [
        ("15m", 60, 15),
        ("1h", 60, 60),
        ("6h", 60, 360),
        ("24h", 300, 288),
        ("7d", 3600, 168),
        ("30d", 7200, 360),
        ("90d", 21600, 360),
    ],
)
def test_each_range_has_at_most_400_points(name: str, step_s: int, steps: int) -> None:
    for with_current in (False, True):
        found = range_of(name, None, None, 1_800_000_123.5, with_current=with_current)
        assert (found.step_s, found.steps) == (step_s, steps)
        assert found.from_s % step_s == 0


def test_a_zoom_has_minutes_only_where_they_are_kept() -> None:
    now_s = 1_800_000_123.5
    recent = range_of(None, now_s - 7200, now_s - 3600, now_s, with_current=False)
    old = range_of(None, now_s - 7 * 86400, now_s - 7 * 86400 + 3600, now_s, with_current=False)
    long = range_of(None, 0, None, now_s, with_current=False)
    assert (recent.step_s, recent.resolution) == (60, "minute")
    assert (old.step_s, old.resolution) == (3600, "hour")
    assert (long.step_s, long.steps <= 402) == (21600, True)


async def test_a_tenant_that_reads_much_delays_no_other() -> None:
    keeper = HistoryKeeper(HistoryInSqlite(None), "p", lambda _: 0)
    api = HistoryApi(keeper, lambda: None, str, lambda _: True, is_alone=True)
    ranges = [range_of("1h", None, None, 1e9 + at * 3600, with_current=True) for at in range(WAITING_MAX)]
    async with keeper.lock:
        greedy = [asyncio.create_task(api.chart(each, "tenant", "greedy", "tenant")) for each in ranges]
        await asyncio.sleep(0)
        last = range_of("1h", None, None, 0.5e9, with_current=True)
        with pytest.raises(Overloaded):
            await api.chart(last, "tenant", "greedy", "tenant")
        other = asyncio.create_task(api.chart(ranges[0], "tenant", "other", "tenant"))
        operator = [asyncio.create_task(api.chart(api.range_of(name, None, None))) for name in RANGES_S]
        await asyncio.sleep(0)
    for chart in await asyncio.gather(other, *operator, *greedy):
        assert chart.points
    await keeper.store.aclose()
