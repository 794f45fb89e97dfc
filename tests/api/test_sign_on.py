"""Single sign-on: tokens in place of keys, rights of users, and keys that change or cannot be read."""

import asyncio
import base64
import logging
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.config.load import parse_config
from gateway.errors import SignOnUnavailable, TokenRefused
from gateway.events import CallFinished
from gateway.tenants.guess_throttle import GUESSES_MAX
from gateway.tenants.keyring import Keyring, key_digest
from gateway.tenants.sign_on import key_source
from gateway.tenants.sign_on import sign_on as sign_on_module
from gateway.tenants.sign_on.issuer_client import DOCUMENT_BYTES_MAX
from gateway.tenants.sign_on.key_source import KeySource
from gateway.tenants.sign_on.sign_on import SignOn
from tests.api.test_grpc import GRPC, grpc_gateway
from tests.conftest import KEY, Running, running_gateway
from tests.fakes.hooks import until
from tests.fakes.issuer import FakeIssuer, public_jwk, until_read
from tests.fakes.tei import FakeTei
from tests.fakes.threaded import serve_in_thread
from tests.waiting import PATIENCE_S

SIGN_ON = """
sign_on:
  corporate:
    issuer: {issuer}
    audience: [gateway-test]
    claims:
      tenant: {{claim: team, values: {{search: acme, sales: beta, platform: operators}}}}
      scopes: {{claim: [realm, roles], values: {{admin: [admin, metrics], "*": [embed]}}}}
      limits: {{claim: plan, values: {{small: {{requests_per_minute: 2}}, "*": {{}}}}}}
"""
CONFIG = (
    """
upstreams: {{embedder: {{backend: tei, replicas: ["http://tei-0"]}}}}
models: {{bge: {{upstream: embedder}}, other: {{upstream: embedder}}}}
tenants:
  acme: {{keys: ["{digest}"], models: [bge]}}
  beta: {{}}
"""
    + SIGN_ON
)


@pytest.fixture
def issuer() -> Iterator[FakeIssuer]:
    fake = FakeIssuer()
    with serve_in_thread(fake) as address:
        fake.address = address
        yield fake


def config_of(issuer: FakeIssuer, template: str = CONFIG) -> str:
    return template.format(issuer=issuer.address, digest=key_digest(KEY))


@asynccontextmanager
async def signed_on(issuer: FakeIssuer, template: str = CONFIG) -> AsyncIterator[Running]:
    """Boot a gateway that has read the issuer's keys."""
    async with running_gateway({"tei-0": FakeTei()}, config_of(issuer, template)) as gateway:
        await until_read(gateway)
        yield gateway


async def embed(gateway: Running, token: str, model: str = "bge", **headers: str) -> httpx.Response:
    sent = headers or {"authorization": f"Bearer {token}"}
    body = {"input": "a", "model": model}
    return await gateway.client.post("/v1/embeddings", json=body, headers=sent)


def source_of(gateway: Running) -> KeySource:
    return gateway.application.sign_on.issuers["corporate"].source


async def test_a_user_is_seen_as_the_holder_of_a_key_is(issuer: FakeIssuer) -> None:
    async with signed_on(issuer) as gateway:
        token = issuer.token()
        replies = [await embed(gateway, token), await embed(gateway, token, "other")]
        usage = await gateway.client.get("/usage?by=key", headers={"authorization": f"Bearer {token}"})
        calls = [event for event in gateway.events if isinstance(event, CallFinished)]

    assert [200, 403] == [reply.status_code for reply in replies]
    assert ("acme", "corporate:alice", ["embed"]) == tuple(
        usage.json()[name] for name in ("tenant", "key", "scopes")
    )
    assert [("corporate:alice", 1)] == [(row["key"], row["requests"]) for row in usage.json()["data"]]
    assert time.time() < usage.json()["expires_s"] < time.time() + 601
    embedded = next(call for call in calls if call.route == "/v1/embeddings")
    assert ("acme", "corporate:alice", None) == (embedded.tenant, embedded.key_id, embedded.reason)


async def test_batches_outlive_tokens_and_need_a_key(issuer: FakeIssuer, tmp_path: Path) -> None:
    template = CONFIG + f"batches: {{{{dir: {tmp_path}}}}}\n"
    job = {"input_file_id": "file-1", "endpoint": "/v1/embeddings", "completion_window": "24h"}
    async with signed_on(issuer, template) as gateway:
        keys = issuer.token(), KEY
        replies = [
            await gateway.client.post("/v1/batches", json=job, headers={"authorization": f"Bearer {key}"})
            for key in keys
        ]

    assert [403, 404] == [reply.status_code for reply in replies]
    assert "create it with an API key" in replies[0].json()["error"]["message"]


async def test_each_user_sees_its_own_files_only(issuer: FakeIssuer, tmp_path: Path) -> None:
    template = CONFIG + f"batches: {{{{dir: {tmp_path}}}}}\n"
    async with signed_on(issuer, template) as gateway:
        headers = [{"authorization": f"Bearer {issuer.token(sub=name)}"} for name in ("alice", "bob")]
        form = {"data": {"purpose": "batch"}, "files": {"file": ("a.jsonl", b"{}\n")}}
        sent = await gateway.client.post("/v1/files", headers=headers[0], **form)  # type: ignore[arg-type]
        assert 200 == sent.status_code, sent.text
        path = f"/v1/files/{sent.json()['id']}/content"
        statuses = [(await gateway.client.get(path, headers=each)).status_code for each in headers]
        listed = [(await gateway.client.get("/v1/files", headers=each)).json()["data"] for each in headers]

    assert [200, 404] == statuses
    assert [1, 0] == [len(files) for files in listed]


async def test_each_user_has_limits_of_its_own(issuer: FakeIssuer) -> None:
    async with signed_on(issuer) as gateway:
        alice, bob = issuer.token(plan="small"), issuer.token(sub="bob", plan="small")
        statuses = [(await embed(gateway, token)).status_code for token in (alice, alice, alice, bob)]
        # A new token of the same user does not refill its limits.
        again = await embed(gateway, issuer.token(plan="small", jti="2"))

    assert [200, 200, 429, 200] == statuses
    assert 429 == again.status_code


async def test_every_header_of_a_key_may_carry_a_token(issuer: FakeIssuer) -> None:
    token = issuer.token()
    password = base64.b64encode(f"user:{token}".encode()).decode()
    async with signed_on(issuer) as gateway:
        del gateway.client.headers["authorization"]
        replies = [
            await embed(gateway, token, **{name: value})
            for name, value in {
                "authorization": token,
                "Authorization": f"Basic {password}",
                "api-key": token,
                "x-goog-api-key": token,
            }.items()
        ]
        refused = [
            await gateway.client.post(path, json=body, headers={"api-key": token[:-6]})
            for path, body in {
                "/embed": {"inputs": "a"},
                "/v2/embed": {"texts": ["a"], "model": "bge"},
                "/v1/rerank": {"query": "a", "documents": ["b"]},
                "/api/embed": {"model": "bge", "input": "a"},
                "/v1beta/models/bge:embedContent": {"content": {"parts": [{"text": "a"}]}},
                "/infinity/embeddings": {"model": "bge", "input": "a"},
                "/v1/encode/bge": {"items": [{"text": "a"}]},
            }.items()
        ]

    assert [200] * 4 == [reply.status_code for reply in replies]
    assert [401] * 7 == [reply.status_code for reply in refused]
    assert all("the token's signature is wrong" in reply.text for reply in refused)
    assert all('error="invalid_token"' in reply.headers["www-authenticate"] for reply in refused)
    assert 6 <= len({str(sorted(reply.json())) + str(reply.json())[:20] for reply in refused})


async def test_grpc_takes_tokens_in_its_metadata(issuer: FakeIssuer) -> None:
    from backends.tei_protos import tei_pb2 as pb

    async with grpc_gateway(
        GRPC + "tenants: {acme: {}, beta: {}}" + SIGN_ON.format(issuer=issuer.address)
    ) as client:
        await until_read(client.gateway)
        rpc = client.channel.unary_unary(
            "/tei.v1.Embed/Embed", response_deserializer=pb.EmbedResponse.FromString
        )
        message = pb.EmbedRequest(inputs="a").SerializeToString()
        # Larger than the 8 KiB that grpc takes by default, with everything around it.
        token = issuer.token(padding="x" * 5500)
        good = await rpc(message, metadata=[("authorization", f"Bearer {token}")], timeout=10)
        bad = rpc(message, metadata=[("authorization", f"Bearer {issuer.token(aud='mail')}")], timeout=10)
        code, reason = await bad.code(), await bad.details()
        calls = client.finished()

    assert good.embeddings
    assert ("UNAUTHENTICATED", "the token is meant for others (aud)") == (code.name, reason)
    assert {("corporate:alice", None), (None, "audience")} == {(call.key_id, call.reason) for call in calls}


async def test_operators_are_made_by_the_table_only(issuer: FakeIssuer) -> None:
    async with signed_on(issuer) as gateway:

        async def status(path: str, **claims: Any) -> int:
            headers = {"authorization": f"Bearer {issuer.token(**claims)}", "via": "1.1 proxy"}
            return (await gateway.client.get(path, headers=headers)).status_code

        admins = {"realm": {"roles": ["admin"]}}
        assert 200 == await status("/admin/status", **admins)
        assert 200 == await status("/admin/status", team="platform", **admins)
        assert 403 == await status("/admin/status")
        assert 403 == await status("/admin/status", scope="admin", roles=["admin"], team="platform")
        operator = await embed(gateway, issuer.token(team="platform", **admins))

    # Without a tenant there are no limits: operators call no models.
    assert (403, "scope_forbidden") == (operator.status_code, operator.json()["error"]["code"])


async def test_a_token_is_verified_once(issuer: FakeIssuer, monkeypatch: pytest.MonkeyPatch) -> None:
    verified = []
    verify = SignOn.verify
    monkeypatch.setattr(SignOn, "verify", lambda self, checked: verified.append(1) or verify(self, checked))
    monkeypatch.setattr(sign_on_module, "ACCEPTED_MAX", 2)
    async with signed_on(issuer) as gateway:
        first, second, third = (issuer.token(jti=str(number)) for number in range(3))
        statuses = [(await embed(gateway, token)).status_code for token in (first, first, second, first)]
        assert ([200] * 4, 2) == (statuses, len(verified))
        for token in (third, first):
            assert 200 == (await embed(gateway, token)).status_code
        assert 4 == len(verified)
        assert 2 == len(gateway.application.sign_on._accepted)


async def test_a_remembered_token_ends_with_its_time_and_its_tenant(issuer: FakeIssuer) -> None:
    config = parse_config(config_of(issuer), {}, None)  # type: ignore[arg-type] - no path in it
    now_s = time.time()
    keyring = Keyring(config.tenants, None)
    sign_on = SignOn(keyring, config.sign_on, lambda: now_s)
    await sign_on.issuers["corporate"].source.read()
    token = issuer.token()
    assert "acme" == sign_on.accept(sign_on.check(token), "digest").name
    assert "acme" == getattr(sign_on.find("digest"), "name", None)

    keyring.replace_configured({"beta": config.tenants["beta"]})
    assert sign_on.find("digest") is None
    keyring.replace_configured(config.tenants)
    sign_on.accept(sign_on.check(token), "digest")
    now_s += 600 + 61
    assert sign_on.find("digest") is None
    with pytest.raises(Exception, match="expired"):
        sign_on.check(token)


async def test_a_reload_changes_tenants_and_issuers(issuer: FakeIssuer) -> None:
    async with signed_on(issuer) as gateway:
        token = issuer.token()
        assert 200 == (await embed(gateway, token)).status_code
        source = source_of(gateway)

        await gateway.follow(config_of(issuer).replace("search: acme", "search: beta"))
        moved = await embed(gateway, token, "other")
        assert source is source_of(gateway)
        await gateway.follow(
            config_of(issuer).replace("  acme:", "  gamma:").replace("search: acme", "search: gone")
        )
        gone = await embed(gateway, token)
        await gateway.follow(config_of(issuer, CONFIG.replace(SIGN_ON, "")))
        off = await embed(gateway, token)

    assert [200, 403, 401] == [reply.status_code for reply in (moved, gone, off)]
    assert "'gone', is not defined" in gone.text
    assert "Incorrect API key" in off.text


async def test_an_issuer_may_be_added_by_a_reload(issuer: FakeIssuer) -> None:
    async with running_gateway(
        {"tei-0": FakeTei()}, config_of(issuer, CONFIG.replace(SIGN_ON, ""))
    ) as gateway:
        assert 401 == (await embed(gateway, issuer.token())).status_code
        await gateway.follow(config_of(issuer))
        await until_read(gateway)
        assert 200 == (await embed(gateway, issuer.token())).status_code


async def test_a_key_in_the_form_of_a_token_stays_valid(issuer: FakeIssuer) -> None:
    key = "eyJhbGciOiJub25lIn0.eyJpc3MiOiJhIn0."
    config = CONFIG.replace("{digest}", key_digest(key))
    async with signed_on(issuer, config) as gateway:
        assert 200 == (await embed(gateway, key)).status_code


async def test_new_keys_are_read_and_old_ones_end(
    issuer: FakeIssuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_source, "REREAD_INTERVAL_S", 0.02)
    async with signed_on(issuer) as gateway:
        old, new = issuer.token(), issuer.token("rsa-2")
        assert 200 == (await embed(gateway, old)).status_code
        issuer.keys = [public_jwk("rsa-2")]
        replies = [await embed(gateway, new)]
        async with asyncio.timeout(PATIENCE_S):
            while replies[-1].status_code != 200:
                # The client and the gateway share a loop, and no request of theirs yields to the reading.
                await asyncio.sleep(0.005)
                replies.append(await embed(gateway, new))
        after = await embed(gateway, old)

    assert {200, 401, 503} >= {reply.status_code for reply in replies}
    assert all("retry-after" in reply.headers for reply in replies if reply.status_code == 503)
    # It was remembered, and its key is the issuer's no longer.
    assert after.status_code in (401, 503)


async def test_a_flood_of_unknown_keys_costs_one_reading_an_interval(
    issuer: FakeIssuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    interval_s = 0.2
    monkeypatch.setattr(key_source, "REREAD_INTERVAL_S", interval_s)
    async with signed_on(issuer) as gateway:
        began_s, statuses = time.monotonic(), []
        for number in range(300):
            reply = await embed(gateway, issuer.token(header={"kid": f"random-{number}"}))
            statuses.append(reply.status_code)
            await asyncio.sleep(0.001)
        elapsed_s = time.monotonic() - began_s
        known = await embed(gateway, issuer.token())

    assert {401, 429, 503} >= set(statuses)
    # Each reading is of the description and of the keys.
    assert 4 <= len(issuer.requests) <= 2 * (2 + elapsed_s / interval_s)
    assert 200 == known.status_code


async def test_api_keys_are_served_while_an_issuer_cannot_be_read(
    issuer: FakeIssuer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(key_source, "REREAD_INTERVAL_S", 0.02)
    issuer.status = 500
    async with running_gateway({"tei-0": FakeTei()}, config_of(issuer)) as gateway:
        await until(lambda: len(issuer.requests) >= 3)
        waiting = await embed(gateway, issuer.token())
        with_key = await embed(gateway, KEY)
        issuer.status = 200
        await until_read(gateway)
        later = await embed(gateway, issuer.token())

    assert (503, "sign_on_unavailable") == (waiting.status_code, waiting.json()["error"]["code"])
    assert "1" == waiting.headers["retry-after"]
    assert [200, 200] == [with_key.status_code, later.status_code]
    lines = [record.getMessage() for record in caplog.records if "sign_on.corporate" in record.getMessage()]
    fault = "the issuer cannot be read: /.well-known/openid-configuration answered with status 500"
    assert [f"sign_on.corporate: {fault}"] == [line for line in lines if "cannot" in line]


async def test_known_keys_outlive_their_issuer_for_the_grace(issuer: FakeIssuer) -> None:
    clock = 1000.0
    settings = parse_config(config_of(issuer), {}, None).sign_on["corporate"]  # type: ignore[arg-type]
    sign_on = SignOn(Keyring({}, None), {"corporate": settings})
    source = KeySource("corporate", settings, lambda: clock)
    token = sign_on.check(issuer.token()).token
    assert await source.read()
    issuer.status = 503

    clock += settings.keys_grace_s - 1
    assert not await source.read()
    assert source.key_for(token)
    clock += 2
    assert not await source.read()
    with pytest.raises(Exception, match="are being read"):
        source.key_for(token)
    issuer.status = 200
    assert await source.read()
    assert source.key_for(token)


async def test_an_issuer_may_be_written_with_or_without_a_slash_at_its_end(issuer: FakeIssuer) -> None:
    """Auth0's issuers have one. Tokens need the form of the description, whatever the configuration has."""
    plain, slash = issuer.address, f"{issuer.address}/"
    for described, configured in ((plain, slash), (slash, plain), (slash, slash)):
        issuer.described = {"issuer": described}
        config = CONFIG.format(issuer=configured, digest=key_digest(KEY))
        async with running_gateway({"tei-0": FakeTei()}, config) as gateway:
            await until_read(gateway)
            replies = {form: await embed(gateway, issuer.token(iss=form)) for form in (plain, slash)}

        assert 200 == replies.pop(described).status_code
        (refused,) = replies.values()
        assert 401 == refused.status_code
        assert "issuer (iss)" in refused.json()["error"]["message"]


async def test_tokens_of_either_form_wait_for_the_description(issuer: FakeIssuer) -> None:
    settings = parse_config(config_of(issuer), {}, None).sign_on["corporate"]  # type: ignore[arg-type]
    sign_on = SignOn(Keyring({}, None), {"corporate": settings})
    tokens = [issuer.token(), issuer.token(iss=f"{issuer.address}/")]

    for token in tokens:
        with pytest.raises(SignOnUnavailable):
            sign_on.verify(sign_on.check(token))
    assert await sign_on.issuers["corporate"].source.read()
    assert sign_on.verify(sign_on.check(tokens[0]))
    with pytest.raises(TokenRefused, match="issuer"):
        sign_on.check(tokens[1])


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "another issuer": ({"described": {"issuer": "https://other.example.org"}}, "is that of another issuer"),
    "keys without TLS": (
        {"described": {"jwks_uri": "http://192.0.2.1/keys"}},
        "unusable `jwks_uri`: needs https",
    ),
    "keys in a file": ({"described": {"jwks_uri": "file:///etc/passwd"}}, "unusable `jwks_uri`"),
    "user name": ({"described": {"token_endpoint": "https://a@b.example/"}}, "unusable `token_endpoint`"),
    "redirect": ({"status": 302, "headers": [(b"location", b"http://192.0.2.1/")]}, "status 302"),
    "not JSON": ({"body": b"<html>"}, "its description cannot be used"),
    "deeply nested": ({"body": b"[" * 100_000}, "its description cannot be used"),
    "too large": ({"body": b" " * (DOCUMENT_BYTES_MAX + 1)}, "too large"),
    "compressed": ({"headers": [(b"content-encoding", b"gzip")]}, "compressed"),
    "no keys": ({"keys": []}, "it has no key for RS256, ES256"),
    "too many keys": ({"keys": [public_jwk("rsa-1")] * 101}, "no list of up to 100 keys"),
    "keys no list": ({"keys": {"kid": "rsa-1"}}, "no list of up to 100 keys"),
    "shared secret": ({"keys": [{"kty": "oct", "k": "c2VjcmV0", "kid": "a"}]}, "it has no key"),
    "weak key": ({"keys": [public_jwk("weak-1")]}, "it has no key"),
    "key for encryption": ({"keys": [public_jwk("rsa-1", use="enc")]}, "it has no key"),
    "key for signing": ({"keys": [public_jwk("rsa-1", key_ops=["sign"])]}, "it has no key"),
    "key of other algorithm": ({"keys": [public_jwk("rsa-1", alg="PS512")]}, "it has no key"),
    "key of other curve": ({"keys": [public_jwk("p384-1")]}, "it has no key"),
    "key published whole": ({"keys": [public_jwk("rsa-1", d="AQAB")]}, "it has no key"),
    "broken key": ({"keys": [public_jwk("p256-1", x="AQAB"), 1, {"kty": "RSA", "n": 1}]}, "it has no key"),
}


@pytest.mark.parametrize(("broken", "reason"), FAULTS.values(), ids=FAULTS.keys())
async def test_an_issuer_that_cannot_be_used_gives_no_keys(
    issuer: FakeIssuer, caplog: pytest.LogCaptureFixture, broken: dict[str, Any], reason: str
) -> None:
    caplog.set_level(logging.INFO)
    for name, value in broken.items():
        setattr(issuer, name, value)
    settings = parse_config(config_of(issuer), {}, None).sign_on["corporate"]  # type: ignore[arg-type]
    source = KeySource("corporate", settings)

    assert not await source.read()
    assert not await source.read()

    assert 1 == sum(reason in record.getMessage() for record in caplog.records), caplog.text
    assert 0 == source.version


async def test_an_issuer_that_is_not_there_is_named_as_one(caplog: pytest.LogCaptureFixture) -> None:
    config = CONFIG.format(issuer="http://127.0.0.1:1", digest=key_digest(KEY))
    settings = parse_config(config, {}, None).sign_on["corporate"]  # type: ignore[arg-type]

    assert not await KeySource("corporate", settings).read()

    assert "no connection to the issuer: nothing listens at its port" in caplog.text


async def test_forged_signatures_are_throttled_before_they_are_checked(
    issuer: FakeIssuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    verified = []
    verify = SignOn.verify
    async with signed_on(issuer) as gateway:
        known, unknown = issuer.token(), issuer.token(sub="bob")
        assert 200 == (await embed(gateway, known)).status_code
        expired = [
            await embed(gateway, issuer.token(exp=1, jti=str(number))) for number in range(GUESSES_MAX + 5)
        ]
        # Refusals that cost nothing do not close the address.
        between = await embed(gateway, issuer.token(sub="carol"))
        monkeypatch.setattr(
            SignOn, "verify", lambda self, checked: verified.append(1) or verify(self, checked)
        )
        forged = [
            await embed(gateway, issuer.token("rsa-2", header={"kid": "rsa-1"}, jti=str(number)))
            for number in range(GUESSES_MAX + 10)
        ]
        refused = await embed(gateway, unknown)
        passing = [await embed(gateway, known), await embed(gateway, KEY)]

    assert [401] * GUESSES_MAX + [429] * 5 == [reply.status_code for reply in expired]
    assert 200 == between.status_code
    assert {401, 429} >= {reply.status_code for reply in forged}
    assert GUESSES_MAX == len(verified)
    assert 429 == refused.status_code
    assert [200, 200] == [reply.status_code for reply in passing]
