"""Limits of a model: per tenant and name, replaceable per tenant, in addition to other limits."""

from collections.abc import Callable, Sequence

import httpx
import pytest

from gateway.quotas.ledger import MemoryLedger
from gateway.tenants.keyring import key_digest
from tests.api.test_quotas import Clock
from tests.conftest import KEY, Boots, Running
from tests.fakes.tei import FakeTei
from tests.quotas.redis_server import RedisServer

OPENAI = "/v1/embeddings"
Store = Callable[[], str]


@pytest.fixture(params=["memory", "redis"])
def store(request: pytest.FixtureRequest) -> str:
    """Return the store of quotas. All limits here are per hour or day, and refill during no test."""
    if request.param == "memory":
        return "memory"
    server: RedisServer = request.getfixturevalue("own_redis")
    return server.url


def config(store: str, tenants: str, limits: str = "{requests_per_hour: 2}") -> str:
    """Return a config in which a model and its alias have their own limits; `free` has none."""
    return f"""
quotas: {{store: "{store}", timeout_ms: 2000}}
upstreams: {{one: {{backend: tei, replicas: ["http://tei-0"]}}}}
models:
  bge: {{upstream: one, limits: {limits}}}
  alias: {{upstream: one, limits: {{requests_per_hour: 3}}}}
  free: {{upstream: one}}
tenants:
  acme: {{keys: ["{key_digest(KEY)}"{tenants}}}
  globex: {{keys: ["{key_digest("globex")}"]}}
"""


async def calls(
    gateway: Running, model: str, count: int = 1, key: str = KEY, text: str | Sequence[str] = "a"
) -> list[httpx.Response]:
    headers = {"authorization": f"Bearer {key}"}
    body = {"model": model, "input": text}
    return [await gateway.client.post(OPENAI, json=body, headers=headers) for _ in range(count)]


async def statuses(gateway: Running, model: str, count: int, key: str = KEY) -> list[int]:
    return [reply.status_code for reply in await calls(gateway, model, count, key)]


async def test_model_limits_count_per_tenant_and_model_name(boot: Boots, store: str) -> None:
    async with boot({"tei-0": FakeTei()}, config(store, "]")) as gateway:
        assert [200, 200, 429] == await statuses(gateway, "bge", 3)
        assert [200, 200, 429] == await statuses(gateway, "bge", 3, "globex")
        assert [200] * 3 + [429] == await statuses(gateway, "alias", 4)
        assert [200] * 4 == await statuses(gateway, "free", 4)


async def test_tenant_model_limits_replace_the_models(boot: Boots, store: str) -> None:
    own = "], model_limits: {bge: {requests_per_hour: 4}, alias: {}}"
    async with boot({"tei-0": FakeTei()}, config(store, own)) as gateway:
        assert [200] * 4 + [429] == await statuses(gateway, "bge", 5)
        # An empty mapping means no limits, not the model's.
        assert [200] * 5 == await statuses(gateway, "alias", 5)
        assert [200, 200, 429] == await statuses(gateway, "bge", 3, "globex")


async def test_reserves_tenant_model_and_key_limits_together(boot: Boots, store: str) -> None:
    second = f', {{digest: "{key_digest("second")}", id: second, limits: {{requests_per_hour: 3}}}}'
    text = config(store, f"{second}], limits: {{requests_per_hour: 5}}")
    async with boot({"tei-0": FakeTei()}, text) as gateway:
        assert [200, 200, 429] == await statuses(gateway, "bge", 3)
        assert [200] * 3 + [429] == await statuses(gateway, "free", 4, "second")
        # Requests that the model's or the key's limit refused were not charged to the tenant's.
        refused = (await calls(gateway, "free"))[0]
        messages = [
            refused.json()["error"]["message"],
            (await calls(gateway, "free", 1, "second"))[0].json()["error"]["message"],
            (await calls(gateway, "bge", 1, "globex"))[0].headers["x-ratelimit-remaining-requests"],
        ]

    assert 429 == refused.status_code
    assert "limit requests_per_hour (5): " in messages[0]
    assert "limit key second requests_per_hour (3): " in messages[1]
    assert "1" == messages[2]


async def test_refusal_names_the_model_of_its_limit(boot: Boots, store: str) -> None:
    text = config(store, "], limits: {requests_per_hour: 100}")
    async with boot({"tei-0": FakeTei()}, text) as gateway:
        first, _, refused = await calls(gateway, "bge", 3)
        tei = await gateway.post("/models/bge/embed", {"inputs": "a"})

    shown = {name: first.headers[f"x-ratelimit-{name}-requests"] for name in ("limit", "remaining")}
    assert {"limit": "2", "remaining": "1"} == shown
    assert "0" == refused.headers["x-ratelimit-remaining-requests"]
    assert int(refused.headers["retry-after"]) == 60
    assert "limit model bge requests_per_hour (2): " in refused.json()["error"]["message"]
    assert (429, "Overloaded") == (tei.status_code, tei.json()["error_type"])
    assert "model bge" in tei.json()["error"]


async def test_reserves_and_settles_tokens_of_model_limits(boot: Boots, store: str) -> None:
    # FakeTei counts words and two special tokens: 3 per request; the bound reserved for one letter is higher.
    text = config(store, "]", "{tokens_per_day: 100, inputs_per_day: 3}")
    async with boot({"tei-0": FakeTei()}, text) as gateway:
        replies = await calls(gateway, "bge", 2)
        too_long = (await calls(gateway, "bge", 1, text=["w " * 20] * 30))[0]
        too_many = (await calls(gateway, "bge", 2, text=["a", "b"]))[0]

    assert ["97", "94"] == [reply.headers["x-ratelimit-remaining-tokens"] for reply in replies]
    assert (400, "request_exceeds_limit") == (too_long.status_code, too_long.json()["error"]["code"])
    assert "model bge" in too_long.json()["error"]["message"]
    assert (429, "insufficient_quota") == (too_many.status_code, too_many.json()["error"]["code"])


async def test_retry_after_is_the_longest_wait(boot: Boots) -> None:
    clock = Clock()
    text = config("memory", "], limits: {requests_per_second: 1}", "{requests_per_minute: 1}")
    async with boot({"tei-0": FakeTei()}, text, ledger=MemoryLedger(clock)) as gateway:
        assert [200] == await statuses(gateway, "bge", 1)
        of_model = (await calls(gateway, "bge"))[0]
        of_tenant = (await calls(gateway, "free"))[0]

    assert ["60", "1"] == [reply.headers["retry-after"] for reply in (of_model, of_tenant)]


async def test_calls_of_one_request_take_the_whole_of_a_limit_or_nothing(boot: Boots, store: str) -> None:
    users = "end_users: {from: [x-end-user], log: plain}\n"
    own = "], end_user_limits: {inputs_per_day: 5}, limits: {requests_per_day: 20}"

    async def infer(count: int, user: str) -> httpx.Response:
        inputs = [{"data": "a", "model": "bge", "options": {"dimensions": 1 + each}} for each in range(count)]
        return await gateway.post("/qdrant", {"inputs": inputs}, x_end_user=user)

    async with boot({"tei-0": FakeTei()}, users + config(store, own, "{requests_per_hour: 8}")) as gateway:
        replies = [await infer(count, user) for count, user in [(3, "a"), (3, "a"), (2, "a"), (4, "b")]]
        never, lone = await infer(6, "c"), await infer(1, "b")

    assert [200, 429, 200, 429] == [reply.status_code for reply in replies], [each.text for each in replies]
    assert "end user a inputs_per_day" in replies[1].json()["error"]
    assert "model bge requests_per_hour (8): 3 are left" in replies[3].json()["error"]
    assert (400, 200) == (never.status_code, lone.status_code)
    assert "costs 6 inputs, and end user c inputs_per_day is 5" in never.json()["error"]
    assert "2" == lone.headers["x-ratelimit-remaining-requests"]
