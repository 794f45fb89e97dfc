"""CORS: preflight requests, and the headers that allow a page to read replies and errors."""

import httpx
import pytest

from gateway.quotas.ledger import MemoryLedger
from gateway.tenants.keyring import key_digest
from tests.api.test_headers import drain
from tests.api.test_quotas import Clock
from tests.conftest import CONFIG, KEY, Boots
from tests.fakes.tei import FakeTei

OPENAI, PAGE = "/v1/embeddings", "https://app.example.org"
LISTED = f'cors: {{origins: ["{PAGE}"], max_age_s: 60}}\n'
TENANT = f"""
limits: {{body_bytes: 100}}
tenants: {{acme: {{keys: ["{key_digest(KEY)}"], limits: {{requests_per_minute: 2}}}}}}
"""
ALLOW = "access-control-allow-origin"
PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-timeout-s",
}


@pytest.mark.parametrize("path", [OPENAI, "/embed", "/models/org/bge/embed"])
async def test_preflight_allows_post_with_a_key(boot: Boots, path: str) -> None:
    async with boot({"tei-0": FakeTei()}, CONFIG + LISTED) as gateway:
        gateway.client.headers.pop("authorization")
        reply = await gateway.client.options(path, headers=PREFLIGHT)

    assert reply.is_success
    assert (PAGE, "60") == (reply.headers[ALLOW], reply.headers["access-control-max-age"])
    assert "POST" in reply.headers["access-control-allow-methods"]
    allowed = reply.headers["access-control-allow-headers"].lower()
    assert all(name in allowed for name in ("authorization", "content-type", "x-timeout-s"))


@pytest.mark.parametrize(
    "changed", [{"origin": "https://evil.example.org"}, {"access-control-request-method": "DELETE"}]
)
async def test_preflight_refuses_other_origins_and_methods(boot: Boots, changed: dict[str, str]) -> None:
    async with boot({"tei-0": FakeTei()}, CONFIG + LISTED) as gateway:
        reply = await gateway.client.options(OPENAI, headers=PREFLIGHT | changed)

    assert 400 == reply.status_code
    assert ALLOW not in reply.headers


async def replies_by_status(boot: Boots, config: str, origin: str) -> dict[int, httpx.Response]:
    """Return one reply of each status, from every layer that sends replies."""
    from_page = {"origin": origin}
    wrong_key = from_page | {"authorization": "Bearer wrong"}
    compressed = from_page | {"content-encoding": "gzip"}
    async with boot({"tei-0": FakeTei()}, CONFIG + TENANT + config, ledger=MemoryLedger(Clock())) as gateway:
        post = gateway.client.post
        replies = [
            await post(OPENAI, json={"input": "a" * 200}, headers=from_page),
            await post(OPENAI, json={"input": "a"}, headers=from_page),
            await post(OPENAI, json={"input": "a"}, headers=from_page),
            await post(OPENAI, json={"input": "a"}, headers=wrong_key),
            await post("/v1/nowhere", json={}, headers=from_page),
            await post(OPENAI, json={"input": "a"}, headers=compressed),
            await gateway.client.get(OPENAI, headers=from_page),
        ]
    return {reply.status_code: reply for reply in replies}


@pytest.mark.parametrize(
    ("origins", "allowed"), [(f'["{PAGE}"]', PAGE), ('["*"]', "*"), ('["https://*.example.org"]', PAGE)]
)
async def test_a_listed_page_may_read_every_reply(boot: Boots, origins: str, allowed: str) -> None:
    replies = await replies_by_status(boot, f"cors: {{origins: {origins}}}\n", PAGE)

    assert [200, 401, 404, 405, 413, 415, 429] == sorted(replies)
    assert {allowed} == {reply.headers.get(ALLOW) for reply in replies.values()}
    exposed = {reply.headers.get("access-control-expose-headers") for reply in replies.values()}
    assert {"*"} == exposed
    assert all(reply.headers.get_list(ALLOW) == [allowed] for reply in replies.values())


@pytest.mark.parametrize(("config", "origin"), [("", PAGE), (LISTED, "https://evil.example.org")])
async def test_a_page_that_is_not_listed_may_read_nothing(boot: Boots, config: str, origin: str) -> None:
    replies = await replies_by_status(boot, config, origin)

    assert 200 in replies
    assert all(ALLOW not in reply.headers for reply in replies.values())


async def test_a_listed_page_may_read_refusals_while_draining(boot: Boots) -> None:
    async with boot({"tei-0": FakeTei()}, CONFIG + LISTED) as gateway:
        await drain(gateway)
        reply = await gateway.client.post(OPENAI, json={"input": "a"}, headers={"origin": PAGE})

    assert (503, PAGE, "Origin") == (reply.status_code, reply.headers[ALLOW], reply.headers["vary"])


async def test_replies_have_no_cors_headers_without_the_setting(boot: Boots) -> None:
    async with boot({"tei-0": FakeTei()}) as gateway:
        reply = await gateway.client.post(OPENAI, json={"input": "a"}, headers={"origin": PAGE})

    assert 200 == reply.status_code
    assert not [name for name in reply.headers if name.startswith("access-control")]
