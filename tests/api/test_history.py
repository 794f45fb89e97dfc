"""/admin/history, those below it, and /usage/history: content, access and errors."""

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
        model = await gateway.client.get("/admin/history?range=1h&model=bge", headers=HERE)
        tenant = await gateway.client.get("/admin/history?range=24h&tenant=acme", headers=HERE)
        own = await gateway.client.get("/usage/history?range=7d")
        top = await gateway.client.get("/admin/history/top?by=tenant&metric=cost", headers=HERE)
        replicas = await gateway.client.get("/admin/history/replicas", headers=HERE)

    assert chart.status_code == 200, chart.text
    shown = chart.json()
    assert (shown["kept"], shown["step_s"], shown["currency"], len(shown["points"])) == ("memory", 60, "EUR", 15)
    assert shown["until_s"] - shown["from_s"] == 900
    point = shown["points"][-1]
    assert (point["calls"], point["failed"], point["failures"]) == (2, 1, {"model_not_found": 1})
    assert (point["tokens"], point["cost"]) == (tokens, tokens * 0.01)
    assert 0 < point["p50_s"] <= point["p95_s"] <= point["p99_s"]
    assert shown["points"][0] == {"at_s": shown["from_s"]} | dict.fromkeys(point.keys() - {"at_s"})
    assert [found.json()["points"][-1]["calls"] for found in (model, tenant, own)] == [1, 2, 2]
    (row,) = top.json()["data"]
    assert (row["name"], row["calls"], row["cost"]) == ("acme", 2, tokens * 0.01)
    assert row["points"][-1] == row["cost"]
    assert replicas.json()["data"][0]["spans"][-1]["state"] == "up", replicas.text
