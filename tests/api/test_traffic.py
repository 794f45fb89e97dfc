"""/admin/traffic, /admin/calls and /usage: content and access."""

import pytest

from gateway.tenants.keyring import key_digest
from tests.conftest import CONFIG, KEY, Boots
from tests.fakes.tei import FakeTei

OPENAI = "/v1/embeddings"
HERE = {"host": "127.0.0.1:8080", "authorization": ""}
SECRET = "the text that no page may show"
LIMITS = "limits: {tokens_per_day: 1000}, model_limits: {bge: {requests_per_day: 9}}"
TENANT = f'tenants: {{acme: {{keys: [{{digest: "{key_digest(KEY)}", id: laptop}}], {LIMITS}}}}}\n'


async def test_calls_are_listed_with_their_key_and_without_content(boot: Boots) -> None:
    async with boot({"tei-0": FakeTei()}, f"{TENANT}{CONFIG}") as gateway:
        answered = await gateway.post(OPENAI, {"input": SECRET, "model": "bge"})
        await gateway.post(OPENAI, {"input": SECRET, "model": "nowhere"})
        everything = await gateway.client.get("/admin/calls", headers=HERE)
        failed = await gateway.client.get("/admin/calls?failed=true&tenant=acme", headers=HERE)
        other = await gateway.client.get("/admin/calls?key=desktop", headers=HERE)

    assert everything.status_code == 200, everything.text
    assert SECRET not in everything.text
    unknown, good = everything.json()["calls"]
    assert good["request_id"] == answered.headers["x-request-id"]
    assert (good["tenant"], good["key_id"], good["model"], good["outcome"]) == ("acme", "laptop", "bge", "ok")
    assert good["tokens"] == answered.json()["usage"]["total_tokens"]
    assert {"quota", "upstream"} <= good["stages"].keys()
    assert unknown["outcome"] == "model_not_found"
    assert failed.json()["calls"] == [unknown]
    assert other.json()["calls"] == []


async def test_traffic_is_for_operators_and_empty_at_the_start(boot: Boots) -> None:
    async with boot({"tei-0": FakeTei()}, f"listen: 0.0.0.0:8080\n{TENANT}{CONFIG}") as gateway:
        for path in ("/admin/traffic", "/admin/calls"):
            assert (await gateway.client.get(path)).status_code == 403, path
            assert (await gateway.client.get(path, headers=HERE)).status_code == 401, path
    async with boot({"tei-0": FakeTei()}) as gateway:
        traffic = await gateway.client.get("/admin/traffic?after=12.5", headers=HERE)
    assert traffic.json() == {"interval_s": 10.0, "points": []}


async def test_a_key_sees_its_own_limits_and_usage(boot: Boots) -> None:
    async with boot({"tei-0": FakeTei()}, f"{TENANT}{CONFIG}") as gateway:
        await gateway.post(OPENAI, {"input": ["one two", "three"], "model": "bge"})
        own = await gateway.client.get("/usage")
        by_key = await gateway.client.get("/usage?by=key")
        without = await gateway.client.get("/usage", headers=HERE)
        long = await gateway.client.get("/usage?since=2026-01-01&until=2026-03-01")

    assert own.status_code == 200, own.text
    shown = own.json()
    assert (shown["tenant"], shown["key"], shown["models"]) == ("acme", "laptop", None)
    assert shown["limits"] == {"tokens_per_day": 1000}
    assert shown["model_limits"] == {"bge": {"model bge requests_per_day": 9}}
    (row,) = shown["data"]
    assert (row["tenant"], row["model"], row["requests"], row["inputs"]) == ("acme", "bge", 1, 2)
    assert "key" not in row
    assert [(found["key"], found["requests"]) for found in by_key.json()["data"]] == [("laptop", 1)]
    assert without.status_code == 401
    assert (long.status_code, "31 days" in long.text) == (422, True)


async def test_operators_see_the_limits_of_all_tenants_and_what_is_left(boot: Boots) -> None:
    keys = f'keys: ["{key_digest(KEY)}"], models: [bge], weight: 2'
    limits = "limits: {tokens_per_day: 1000, budget_per_month: 5}, model_limits: {bge: {requests_per_day: 9}}"
    tenants = f"tenants: {{acme: {{{keys}, {limits}}}, beta: {{priority: bulk}}}}\n"
    priced = CONFIG.replace("bge: {", "bge: {price_per_million_tokens: 10000, ")
    async with boot({"tei-0": FakeTei()}, f"currency: EUR\n{tenants}{priced}") as gateway:
        tokens = (await gateway.post(OPENAI, {"input": "x", "model": "bge"})).json()["usage"]["total_tokens"]
        refused = await gateway.client.get("/admin/limits")
        shown = (await gateway.client.get("/admin/limits", headers=HERE)).json()

    acme, beta = shown
    assert refused.status_code == 403
    assert (acme["name"], acme["in_file"], acme["models"], acme["weight"]) == ("acme", True, ["bge"], 2)
    assert acme["limits"] == {"tokens_per_day": 1000, "budget_per_month": 5}
    assert acme["model_limits"] == {"bge": {"requests_per_day": 9}}
    assert tokens > 0
    assert acme["remaining"] == {"budget_per_month": pytest.approx(5 - tokens * 0.01)}
    assert (beta["name"], beta["priority"], beta["limits"], beta["remaining"]) == ("beta", "bulk", {}, {})
