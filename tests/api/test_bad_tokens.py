"""Tokens that are refused, each for its own reason, and valid ones that look odd."""

import hashlib
import hmac
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, utils
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from gateway.events import CallFinished
from gateway.tenants.sign_on.token_form import TOKEN_CHARACTERS_MAX
from tests.conftest import running_gateway
from tests.fakes.issuer import FakeIssuer, base64url, private_key, public_jwk, signed, until_read
from tests.fakes.tei import FakeTei
from tests.fakes.threaded import serve_in_thread

CONFIG = """
upstreams: {{embedder: {{backend: tei, replicas: ["http://tei-0"]}}}}
models: {{bge: {{upstream: embedder}}}}
tenants: {{acme: {{}}}}
sign_on:
  corporate:
    issuer: {issuer}
    audience: [gateway-test]
    claims: {{tenant: {{claim: team, values: {{search: acme, ghosts: ghost}}}}}}
"""
DAY_S = 86400
Made = Callable[[FakeIssuer], str]


@pytest.fixture(scope="module")
def issuer() -> Iterator[FakeIssuer]:
    fake = FakeIssuer()
    with serve_in_thread(fake) as address:
        fake.address = address
        yield fake


def with_header(**header: Any) -> Made:
    return lambda issuer: issuer.token(header=header)


def with_claims(**claims: Any) -> Made:
    return lambda issuer: issuer.token(**claims)


def with_times(**seconds: float) -> Made:
    """Return a token with times from now: NOW_S may be minutes ago when a test runs."""
    return lambda issuer: issuer.token(**{name: int(time.time()) + after for name, after in seconds.items()})


def with_payload(payload: bytes | str) -> Made:
    return lambda _: signed({"alg": "RS256", "kid": "rsa-1"}, payload, "rsa-1", "RS256")


def with_written(name: str, written: str) -> Made:
    """Return a maker of tokens with a claim that is written in JSON as given."""

    def make(issuer: FakeIssuer) -> str:
        text = json.dumps(issuer.claims(**{name: None}))[:-1] + f', "{name}": {written}}}'
        return signed({"alg": "RS256", "kid": "rsa-1"}, text, "rsa-1", "RS256")

    return make


def with_raw_header(header: bytes | str) -> Made:
    return lambda issuer: signed(header, issuer.claims(), "rsa-1", "RS256")


def altered(alter: Callable[[str, str, str], str]) -> Made:
    """Return a maker that changes a valid token. alter: takes its three parts."""
    return lambda issuer: alter(*issuer.token().split("."))


def unsigned(algorithm: Any) -> Made:
    return lambda issuer: f"{base64url({'alg': algorithm, 'kid': 'rsa-1'})}.{base64url(issuer.claims())}."


def with_secret(algorithm: str, secret: bytes) -> Made:
    """Return a maker of tokens whose MAC has public bytes as its secret."""

    def make(issuer: FakeIssuer) -> str:
        content = f"{base64url({'alg': algorithm, 'kid': 'rsa-1'})}.{base64url(issuer.claims())}"
        hashed = hashlib.sha512 if algorithm == "HS512" else hashlib.sha256
        return f"{content}.{base64url(hmac.digest(secret, content.encode(), hashed))}"

    return make


def signed_as(algorithm: str, key: str, kid: str, really: str | None = None) -> Made:
    """Return a maker of tokens whose key id is not that of the key. really: algorithm of the signature."""

    def make(issuer: FakeIssuer) -> str:
        header = {"alg": algorithm, "typ": "JWT", "kid": kid}
        return signed(header, issuer.claims(), key, really or algorithm)

    return make


def with_der_signature(issuer: FakeIssuer) -> str:
    content = issuer.token("p256-1", "ES256").rpartition(".")[0]
    return f"{content}.{base64url(private_key('p256-1').sign(content.encode(), ec.ECDSA(SHA256())))}"


def public_pem() -> bytes:
    public = private_key("rsa-1").public_key()
    return bytes(public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))


def changed_claims(head: str, body: str, signature: str) -> str:
    claims = json.loads(jwt.utils.base64url_decode(body)) | {"sub": "root"}
    return f"{head}.{base64url(claims)}.{signature}"


def noncanonical(head: str, body: str, signature: str) -> str:
    """Return the token with another last letter, whose bits beyond the last byte are dropped."""
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    return f"{head}.{body}.{signature[:-1]}{letters[letters.index(signature[-1]) ^ 1]}"


def nested_token(issuer: FakeIssuer) -> str:
    return signed({"alg": "RS256", "kid": "rsa-1"}, issuer.token(), "rsa-1", "RS256")


NOW_S = int(time.time())
DEEP = "[" * 5000
ENCRYPTED = {"alg": "RSA-OAEP-256", "enc": "A256GCM", "kid": "rsa-1"}
ATTACKER = "https://attacker.example/keys"

REFUSED: dict[str, tuple[str, Made]] = {
    # Size and form.
    "huge": ("size", with_claims(padding="x" * 20_000)),
    "just too long": ("size", lambda issuer: issuer.token().ljust(TOKEN_CHARACTERS_MAX + 1, "A")),
    "two parts": ("form", altered(lambda head, body, _: f"{head}.{body}")),
    "four parts": ("form", altered(lambda *parts: ".".join((*parts, "AAAA")))),
    "six parts": ("form", altered(lambda *parts: ".".join(parts * 2))),
    "header not base64url": ("form", altered(lambda _, body, signature: f"ey!!.{body}.{signature}")),
    "header padded": ("form", altered(lambda head, body, signature: f"{head}==.{body}.{signature}")),
    "header cut": ("form", altered(lambda head, body, signature: f"{head[:-3]}.{body}.{signature}")),
    "header not JSON": ("form", with_raw_header('{"alg": "RS256", kid}')),
    "header deeply nested": ("form", with_raw_header('{"alg": "RS256", "a": ' + DEEP)),
    "header with alg twice": ("form", with_raw_header('{"alg": "none", "alg": "RS256", "kid": "rsa-1"}')),
    "payload a list": ("form", with_payload("[1]")),
    "payload a text": ("form", with_payload('"admin"')),
    "payload not JSON": ("form", with_payload("{'iss': 1}")),
    "payload empty object cut": ("form", with_payload("{")),
    "payload not UTF-8": ("form", with_payload(b'{"iss": "\xff"}')),
    "payload UTF-16": ("form", with_payload('{"iss": "a"}'.encode("utf-16"))),
    "payload with a mark of byte order": ("form", with_payload(b'\xef\xbb\xbf{"iss": "a"}')),
    "payload deeply nested": ("form", with_payload('{"iss": ' + DEEP)),
    "payload after data": ("form", with_payload('{"iss": "a"} {"iss": "b"}')),
    "claim twice": ("form", with_written("exp", f'{NOW_S + 600}, "exp": {NOW_S + 700}')),
    "claim twice inside another": ("form", with_written("realm", '{"a": 1, "a": 2}')),
    "not a number": ("form", with_written("exp", "NaN")),
    "infinite": ("form", with_written("exp", "Infinity")),
    "number of 5,000 digits": ("form", with_written("exp", "9" * 5000)),
    "detached": ("form", altered(lambda head, _, signature: f"{head}..{signature}")),
    "unsigned with RS256": ("form", altered(lambda head, body, _: f"{head}.{body}.")),
    "signature not base64url": ("form", altered(lambda head, body, _: f"{head}.{body}.a+/b")),
    "signature padded": ("form", altered(lambda *parts: ".".join(parts) + "==")),
    "trailing data": ("form", altered(lambda *parts: ".".join(parts) + "&admin=true")),
    "space within": ("form", altered(lambda head, body, signature: f"{head} .{body}.{signature}")),
    "space before the signature": ("form", altered(lambda head, body, end: f"{head}.{body}. {end}")),
    "two tokens": ("form", altered(lambda *parts: f"{'.'.join(parts)},{'.'.join(parts)}")),
    "not ASCII": ("form", altered(lambda head, body, end: f"{head}.{body}\u00e9.{end}")),
    "other base64 of the signature": ("form", altered(noncanonical)),
    "token in a token": ("form", nested_token),
    # Encryption, extensions, types.
    "encrypted": ("encrypted", lambda _: f"{base64url(ENCRYPTED)}.AAAA.AAAA.AAAA.AAAA"),
    "encrypted with a shared key": (
        "encrypted",
        lambda _: f"{base64url({**ENCRYPTED, 'alg': 'dir'})}..AAAA.AAAA.AAAA",
    ),
    "crit": ("header", with_header(crit=["exp"])),
    "crit of an unknown extension": ("header", with_header(crit=["bork"], bork=True)),
    "crit empty": ("header", with_header(crit=[])),
    "payload not encoded": ("header", with_header(b64=False)),
    "kid a number": ("header", with_header(kid=1)),
    "kid null": ("header", with_raw_header('{"alg": "RS256", "kid": null}')),
    "kid a list": ("header", with_header(kid=["rsa-1"])),
    "kid empty": ("header", with_header(kid="")),
    "kid very long": ("header", with_header(kid="k" * 300)),
    "cty of a token": ("type", with_header(cty="JWT")),
    "proof of possession": ("type", with_header(typ="dpop+jwt")),
    "logout token": ("type", with_header(typ="logout+jwt")),
    "typ a number": ("type", with_header(typ=1)),
    "event": ("type", with_claims(events={"http://schemas.openid.net/event/backchannel-logout": {}})),
    # Algorithms.
    "alg none": ("algorithm", unsigned("none")),
    "alg nOnE": ("algorithm", unsigned("nOnE")),
    "alg null": ("algorithm", unsigned(None)),
    "alg a list": ("algorithm", unsigned(["RS256"])),
    "alg empty": ("algorithm", unsigned("")),
    "alg missing": ("algorithm", with_raw_header('{"kid": "rsa-1"}')),
    "HS256 with the public key": ("algorithm", with_secret("HS256", public_pem())),
    "HS512 with the public key": ("algorithm", with_secret("HS512", public_pem())),
    "HS256 with the published key": (
        "algorithm",
        with_secret("HS256", json.dumps(public_jwk("rsa-1")).encode()),
    ),
    "HS256 with nothing": ("algorithm", with_secret("HS256", b"")),
    "RS512 which is not its issuer's": ("algorithm", with_header(alg="RS512")),
    "PS256 which is not its issuer's": ("algorithm", signed_as("PS256", "rsa-1", "rsa-1")),
    "EdDSA which is not its issuer's": ("algorithm", signed_as("EdDSA", "ed25519-1", "ed25519-1")),
    "ES256K": ("algorithm", with_header(alg="ES256K")),
    "ES256 by an RSA key": ("algorithm", signed_as("ES256", "p256-2", "rsa-1")),
    "RS256 by a key of a curve": ("algorithm", signed_as("RS256", "rsa-1", "p256-1")),
    # Keys and signatures.
    "unknown kid": ("key", signed_as("RS256", "rsa-2", "rsa-2")),
    "key that was replaced": ("key", signed_as("RS256", "rsa-old", "rsa-old")),
    "kid a path": ("key", signed_as("RS256", "rsa-1", "../../../../dev/null")),
    "kid a URL": ("key", signed_as("RS256", "rsa-1", ATTACKER)),
    "kid of SQL": ("key", signed_as("RS256", "rsa-1", "x' UNION SELECT 'key")),
    "kid in capitals": ("key", signed_as("RS256", "rsa-1", "RSA-1")),
    "other issuer's key": ("signature", signed_as("RS256", "rsa-2", "rsa-1")),
    "other issuer's key of a curve": ("signature", signed_as("ES256", "p256-2", "p256-1")),
    "jku": ("signature", lambda issuer: issuer.token("rsa-2", header={"kid": "rsa-1", "jku": ATTACKER})),
    "jku with a kid of its own": ("key", lambda issuer: issuer.token("rsa-2", header={"jku": ATTACKER})),
    "x5u": ("signature", lambda issuer: issuer.token("rsa-2", header={"kid": "rsa-1", "x5u": ATTACKER})),
    "jwk": (
        "signature",
        lambda issuer: issuer.token("rsa-2", header={"kid": "rsa-1", "jwk": public_jwk("rsa-2")}),
    ),
    "jwk with a kid of its own": (
        "key",
        lambda issuer: issuer.token("rsa-2", header={"jwk": public_jwk("rsa-2")}),
    ),
    "x5c": ("signature", lambda issuer: issuer.token("rsa-2", header={"kid": "rsa-1", "x5c": ["MIIB"]})),
    "no kid, other key": ("signature", lambda issuer: issuer.token("rsa-2", header={"kid": None})),
    "claims changed": ("signature", altered(changed_claims)),
    "signature of another token": (
        "signature",
        lambda issuer: f"{issuer.token().rpartition('.')[0]}.{issuer.token(sub='bob').rpartition('.')[2]}",
    ),
    "signature cut": ("signature", altered(lambda head, body, end: f"{head}.{body}.{end[:-6]}")),
    "signature of zeros": (
        "signature",
        altered(lambda head, body, _: f"{head}.{body}.{base64url(bytes(256))}"),
    ),
    "signature of zeros on a curve": (
        "signature",
        lambda issuer: issuer.token("p256-1", "ES256").rpartition(".")[0] + "." + base64url(bytes(64)),
    ),
    "signature in DER": ("signature", with_der_signature),
    "PS256 called RS256": ("signature", signed_as("RS256", "rsa-1", "rsa-1", "PS256")),
    # Issuer and audience.
    "issuer missing": ("issuer", with_claims(iss=None)),
    "other issuer": ("issuer", with_claims(iss="https://other.example.org")),
    "issuer with a slash": ("issuer", lambda issuer: issuer.token(iss=f"{issuer.address}/")),
    "issuer in capitals": ("issuer", lambda issuer: issuer.token(iss=issuer.address.upper())),
    "issuer in a list": ("issuer", lambda issuer: issuer.token(iss=[issuer.address])),
    "issuer a number": ("issuer", with_claims(iss=1)),
    "audience missing": ("claims", with_claims(aud=None)),
    "wrong audience": ("audience", with_claims(aud="billing")),
    "list of wrong audiences": ("audience", with_claims(aud=["billing", "mail"])),
    "empty list of audiences": ("audience", with_claims(aud=[])),
    "audience that begins alike": ("audience", with_claims(aud="gateway-test-2")),
    "audience in capitals": ("audience", with_claims(aud="GATEWAY-TEST")),
    "audience a number": ("claims", with_claims(aud=1)),
    "audience an object": ("claims", with_claims(aud={"gateway-test": True})),
    "audience with a number": ("claims", with_claims(aud=["gateway-test", 1])),
    # Times.
    "expired": ("expired", with_claims(exp=NOW_S - 120)),
    "expired in 1970": ("expired", with_claims(exp=0)),
    "expired before 1970": ("expired", with_claims(exp=-1)),
    "expiry missing": ("claims", with_claims(exp=None)),
    "expiry null": ("claims", with_written("exp", "null")),
    "expiry a text": ("claims", with_claims(exp=str(NOW_S + 600))),
    "expiry true": ("claims", with_written("exp", "true")),
    "expiry a list": ("claims", with_claims(exp=[NOW_S + 600])),
    "expiry beyond all times": ("claims", with_written("exp", "1e400")),
    "not yet valid": ("not_yet_valid", with_claims(nbf=NOW_S + DAY_S)),
    "begin a text": ("claims", with_claims(nbf="now")),
    "issued in the far future": ("not_yet_valid", with_claims(iat=NOW_S + 10 * 365 * DAY_S)),
    "issue a text": ("claims", with_claims(iat="now")),
    # Users.
    "user missing": ("claims", with_claims(sub=None)),
    "user a number": ("claims", with_claims(sub=7)),
    "user empty": ("claims", with_claims(sub="")),
    "several users": ("claims", with_claims(sub=["alice", "bob"])),
}
FORBIDDEN: dict[str, Made] = {
    "tenant not mapped": with_claims(team="sales"),
    "tenant claim missing": with_claims(team=None),
    "tenant claim a number": with_claims(team=1),
    "tenant not defined": with_claims(team="ghosts"),
}
ACCEPTED: dict[str, Made] = {
    "plain": with_claims(),
    "by a key of a curve": lambda issuer: issuer.token("p256-1", "ES256"),
    "access token": with_header(typ="at+JWT"),
    "without a type": with_header(typ=None),
    "without kid, which is not needed": with_header(kid=None),
    "with jku, which is not followed": with_header(jku=ATTACKER),
    "several audiences": with_claims(aud=["billing", "gateway-test"]),
    "within the clock's skew": with_times(exp=-5, nbf=50, iat=50),
    "fractions of a second": with_times(exp=600.5),
    "several teams": with_claims(team=["sales", "search"]),
    "unusual user": with_claims(sub="\ud800 √ "),
}


def test_the_refusals_are_many_and_differ() -> None:
    assert len(REFUSED) + len(FORBIDDEN) >= 60
    assert 13 == len({reason for reason, _ in REFUSED.values()})


@pytest.mark.parametrize(("reason", "make"), REFUSED.values(), ids=REFUSED.keys())
async def test_a_bad_token_is_refused_for_its_reason(issuer: FakeIssuer, reason: str, make: Made) -> None:
    token = make(issuer)
    async with running_gateway({"tei-0": FakeTei()}, CONFIG.format(issuer=issuer.address)) as gateway:
        await until_read(gateway)
        asked = list(issuer.requests)
        headers = {"authorization": f"Bearer {token}".encode()}
        reply = await gateway.client.post("/v1/embeddings", json={"input": "a"}, headers=headers)
        call = [event for event in gateway.events if isinstance(event, CallFinished)][-1]

    assert (401, reason) == (reply.status_code, call.reason)
    assert "invalid_api_key" == reply.json()["error"]["code"]
    challenge = reply.headers["www-authenticate"]
    assert (
        challenge == f'Bearer error="invalid_token", error_description="{reply.json()["error"]["message"]}"'
    )
    assert token not in reply.text + challenge + repr(call)
    assert asked == issuer.requests


@pytest.mark.parametrize("make", FORBIDDEN.values(), ids=FORBIDDEN.keys())
async def test_a_user_without_a_tenant_is_refused(issuer: FakeIssuer, make: Made) -> None:
    async with running_gateway({"tei-0": FakeTei()}, CONFIG.format(issuer=issuer.address)) as gateway:
        await until_read(gateway)
        headers = {"authorization": f"Bearer {make(issuer)}"}
        replies = [
            await gateway.client.post("/v1/embeddings", json={"input": "a"}, headers=headers)
            for _ in range(2)
        ]

    assert [(403, "tenant_unknown")] * 2 == [
        (reply.status_code, reply.json()["error"]["code"]) for reply in replies
    ]


@pytest.mark.parametrize("make", ACCEPTED.values(), ids=ACCEPTED.keys())
async def test_a_valid_token_is_accepted(issuer: FakeIssuer, make: Made) -> None:
    async with running_gateway({"tei-0": FakeTei()}, CONFIG.format(issuer=issuer.address)) as gateway:
        await until_read(gateway)
        asked = list(issuer.requests)
        headers = {"authorization": f"Bearer {make(issuer)}"}
        replies = [
            await gateway.client.post("/v1/embeddings", json={"input": "a"}, headers=headers)
            for _ in range(2)
        ]

    assert [200, 200] == [reply.status_code for reply in replies], replies[0].text
    assert asked == issuer.requests


def test_the_signature_in_der_is_of_the_right_key() -> None:
    """Check that only the form of that signature is wrong, so that its refusal proves something."""
    issuer = FakeIssuer()
    content, _, signature = with_der_signature(issuer).rpartition(".")
    r, s = utils.decode_dss_signature(jwt.utils.base64url_decode(signature))
    raw = r.to_bytes(32, "big") + s.to_bytes(32, "big")
    key = jwt.PyJWK(public_jwk("p256-1"), "ES256")

    assert jwt.api_jws.PyJWS().decode(f"{content}.{base64url(raw)}", key, algorithms=["ES256"])
