"""Sign-in of the console's users: what issuers answer to a code, and what of it is accepted."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import parse_qs

import httpx
import pytest

from gateway.api.operators.sign_in import BODY_BYTES_MAX
from gateway.tenants.guess_throttle import GUESSES_MAX, network_of
from gateway.tenants.sign_on import key_source, sign_in
from tests.conftest import Running, running_gateway
from tests.fakes.hooks import until
from tests.fakes.issuer import CLIENT, FakeIssuer, public_jwk, until_read
from tests.fakes.tei import FakeTei
from tests.fakes.threaded import serve_in_thread
from tests.waiting import PATIENCE_S

CONFIG = """
upstreams: {{embedder: {{backend: tei, replicas: ["http://tei-0"]}}}}
models: {{bge: {{upstream: embedder}}}}
tenants: {{acme: {{}}}}
sign_on:
  corporate:
    issuer: {issuer}
    audience: [gateway-test]
    claims: {{tenant: {{claim: team, values: {{search: acme}}}}}}
    console: {{client_id: console-test, scopes: [openid, profile]}}
  machines:
    issuer: http://127.0.0.1:1
    audience: [gateway-test]
    claims: {{tenant: {{claim: team}}}}
"""
NONCE = "a-nonce-of-the-page"
CODE = {
    "name": "corporate",
    "code": "a-code",
    "code_verifier": "v" * 43,
    "nonce": NONCE,
    "redirect_uri": "https://gateway.example.org/ui",
}


@pytest.fixture
def issuer() -> Iterator[FakeIssuer]:
    fake = FakeIssuer()
    with serve_in_thread(fake) as address:
        fake.address = address
        yield fake


@asynccontextmanager
async def console(issuer: FakeIssuer) -> AsyncIterator[Running]:
    """Boot a gateway that has read the keys of one of its issuers; the other cannot be reached."""
    async with running_gateway({"tei-0": FakeTei()}, CONFIG.format(issuer=issuer.address)) as gateway:
        del gateway.client.headers["authorization"]
        await until_read(gateway, names=("corporate",))
        yield gateway


async def redeem(gateway: Running, **changes: Any) -> httpx.Response:
    return await gateway.client.post("/ui/sign-on", json={**CODE, **changes})


def answer(issuer: FakeIssuer, token: str | None = None, **claims: Any) -> str:
    """Have the issuer answer a code with an ID token; return the token."""
    token = token or issuer.token(**{"aud": CLIENT, "nonce": NONCE, **claims})
    issuer.token_reply = (
        200,
        json.dumps({"id_token": token, "access_token": "opaque", "token_type": "Bearer"}).encode(),
    )
    return token


async def test_a_code_becomes_the_users_token(issuer: FakeIssuer) -> None:
    async with console(issuer) as gateway:
        offers = (await gateway.client.get("/ui/sign-on")).json()
        token = answer(issuer)
        reply = await redeem(gateway)
        own = await gateway.client.get("/usage", headers={"authorization": f"Bearer {reply.json()['token']}"})

    assert [
        {
            "name": "corporate",
            "issuer": issuer.address,
            "client_id": "console-test",
            "scope": "openid profile",
            "authorization_endpoint": f"{issuer.address}/authorize",
            "end_session_endpoint": None,
        }
    ] == offers["data"]
    assert (200, "no-store") == (reply.status_code, reply.headers["cache-control"])
    assert 590 < reply.json().pop("expires_in_s") <= 600
    assert (token, "acme", "corporate:alice") == tuple(
        reply.json()[name] for name in ("token", "tenant", "key")
    )
    assert (200, "corporate:alice") == (own.status_code, own.json()["key"])
    assert {
        "grant_type": ["authorization_code"],
        "code": ["a-code"],
        "redirect_uri": ["https://gateway.example.org/ui"],
        "client_id": ["console-test"],
        "code_verifier": ["v" * 43],
    } == parse_qs(issuer.forms[0].decode())


REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    "other nonce": ({"nonce": "another-nonce-altogether"}, 401, "another sign-in"),
    "no nonce": ({"nonce": None}, 401, "another sign-in"),
    "nonce a number": ({"nonce": 1}, 401, "another sign-in"),
    "for machines": ({"aud": "gateway-test"}, 401, "meant for others"),
    "for another client": ({"azp": "billing"}, 401, "another client"),
    "shared without azp": ({"aud": [CLIENT, "billing"]}, 401, "another client"),
    "expired": ({"exp": 1}, 401, "has expired"),
    "another issuer's": ({"iss": "http://127.0.0.1:1"}, 401, "another issuer"),
    "user without a tenant": ({"team": "sales"}, 403, "no tenant is mapped"),
}


@pytest.mark.parametrize(("claims", "status", "reason"), REFUSED.values(), ids=REFUSED.keys())
async def test_an_unfit_token_is_no_sign_in(
    issuer: FakeIssuer, claims: dict[str, Any], status: int, reason: str
) -> None:
    async with console(issuer) as gateway:
        token = answer(issuer, **claims)
        reply = await redeem(gateway)

    assert (status, True) == (reply.status_code, reason in reply.text), reply.text
    assert token not in reply.text


FAILED: dict[str, tuple[int, bytes, int, str]] = {
    "refused": (400, b'{"error": "invalid_grant"}', 401, "(invalid_grant)"),
    "refused with markup": (400, b'{"error": "<img src=x>"}', 401, "(no reason)"),
    "refused in HTML": (401, b"<html>", 401, "(no reason)"),
    "redirected": (302, b"", 401, "(no reason)"),
    "broken": (500, b"", 503, "the issuer failed"),
    "without a token": (200, b'{"access_token": "a"}', 503, "no ID token"),
    "no JSON": (200, b"ok", 503, "no ID token"),
    "no token": (200, b'{"id_token": "admin"}', 401, "three parts"),
    "forged": (200, b"forged", 401, "signature is wrong"),
}


@pytest.mark.parametrize(("status", "body", "expected", "reason"), FAILED.values(), ids=FAILED.keys())
async def test_a_failed_exchange_says_why(
    issuer: FakeIssuer, status: int, body: bytes, expected: int, reason: str
) -> None:
    async with console(issuer) as gateway:
        issuer.token_reply = status, body
        if body == b"forged":
            answer(issuer, issuer.token("rsa-2", header={"kid": "rsa-1"}, aud=CLIENT, nonce=NONCE))
        reply = await redeem(gateway)

    assert (expected, True) == (reply.status_code, reason in reply.text), reply.text


async def test_what_no_page_sends_is_refused_without_asking_the_issuer(issuer: FakeIssuer) -> None:
    async with console(issuer) as gateway:
        answer(issuer)
        replies = [
            await redeem(gateway, name="unknown"),
            await redeem(gateway, name="machines"),
            await redeem(gateway, code=""),
            await redeem(gateway, code_verifier="short"),
            await redeem(gateway, nonce=""),
            await redeem(gateway, code="c" * (BODY_BYTES_MAX + 1)),
            await gateway.client.post("/ui/sign-on", content=b"{"),
        ]

    assert [422, 422, 422, 422, 422, 413, 400] == [reply.status_code for reply in replies]
    assert [] == issuer.forms


async def test_guesses_of_codes_end(issuer: FakeIssuer) -> None:
    async with console(issuer) as gateway:
        statuses = [
            (await redeem(gateway, code=f"guess-{number}")).status_code for number in range(GUESSES_MAX + 5)
        ]

    assert [401] * GUESSES_MAX + [429] * 5 == statuses
    assert GUESSES_MAX == len(issuer.forms)


async def test_exchanges_in_progress_are_bounded(issuer: FakeIssuer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sign_in, "EXCHANGES_MAX", 0)
    async with console(issuer) as gateway:
        reply = await redeem(gateway)

    assert (503, []) == (reply.status_code, issuer.forms)
    assert "too many sign-ins at once" in reply.text


@pytest.mark.parametrize("addresses", [["203.0.113.1"], [f"203.0.113.{number}" for number in range(9)]])
async def test_codes_that_a_slow_issuer_checks_keep_no_other_address_out(
    issuer: FakeIssuer, addresses: list[str]
) -> None:
    issuer.held = b"bogus"
    config = CONFIG.format(issuer=issuer.address) + "trusted_proxies: [127.0.0.1]\n"
    async with running_gateway({"tei-0": FakeTei()}, config) as gateway:
        await until_read(gateway, names=("corporate",))

        async def send(code: str, address: str) -> httpx.Response:
            headers = {"x-forwarded-for": address}
            return await gateway.client.post("/ui/sign-on", json={**CODE, "code": code}, headers=headers)

        bogus = [
            asyncio.create_task(send(f"bogus-{number}", address))
            for address in addresses
            for number in range(sign_in.EXCHANGES_PER_ADDRESS + 2)
        ]
        async with asyncio.timeout(PATIENCE_S):
            await until(lambda: all(task.done() for task in bogus[8:10]) and len(issuer.forms) >= 8)
            answer(issuer)
            fine = [await send("a-code", f"198.51.100.{number}") for number in range(5)]
            issuer.released.set()
            statuses = [(await task).status_code for task in bogus]

    assert [200] * 5 == [reply.status_code for reply in fine]
    assert 503 in statuses


def test_addresses_of_one_network_share_their_exchanges() -> None:
    networks = {network_of(f"2001:db8::{number:x}") for number in range(4)}

    assert 1 == len(networks)
    assert network_of("2001:db8:0:1::1") not in networks
    assert ["203.0.113.1", "unknown"] == [network_of(each) for each in ("203.0.113.1", "unknown")]


async def test_a_sign_in_by_a_new_key_waits_for_it(
    issuer: FakeIssuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_source, "REREAD_INTERVAL_S", 0.02)
    async with console(issuer) as gateway:
        # The key is new, and the last reading is not.
        await asyncio.sleep(0.03)
        issuer.keys = [public_jwk("rsa-2")]
        answer(issuer, issuer.token("rsa-2", aud=CLIENT, nonce=NONCE))
        reply = await redeem(gateway)

    assert 200 == reply.status_code, reply.text


async def test_a_sign_in_before_the_issuer_was_reached_is_put_off(issuer: FakeIssuer) -> None:
    issuer.status = 500
    async with running_gateway({"tei-0": FakeTei()}, CONFIG.format(issuer=issuer.address)) as gateway:
        offers = (await gateway.client.get("/ui/sign-on")).json()["data"]
        reply = await redeem(gateway)

    assert [None] == [offer["authorization_endpoint"] for offer in offers]
    assert 503 == reply.status_code
