"""Issuer of tokens with keys of its own: what it signs is real, and tests choose every part of a token."""

import asyncio
import base64
import json
import threading
import time
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from tests.waiting import PATIENCE_S

AUDIENCE = "gateway-test"
CLIENT = "console-test"


@cache
def private_key(name: str) -> Any:
    """Return the private key of a name, whose beginning is its kind; it is made once per process."""
    match name.partition("-")[0]:
        case "rsa":
            return rsa.generate_private_key(65537, 2048)
        case "weak":
            return rsa.generate_private_key(65537, 1024)
        case "p256":
            return ec.generate_private_key(ec.SECP256R1())
        case "p384":
            return ec.generate_private_key(ec.SECP384R1())
        case "ed25519":
            return ed25519.Ed25519PrivateKey.generate()
    raise ValueError(name)


def public_jwk(name: str, **fields: Any) -> dict[str, Any]:
    """Return the public key of a name as an issuer publishes it; its id is the name."""
    public = private_key(name).public_key()
    kinds = {
        "rsa": jwt.algorithms.RSAAlgorithm,
        "weak": jwt.algorithms.RSAAlgorithm,
        "ed25519": jwt.algorithms.OKPAlgorithm,
    }
    algorithm = kinds.get(name.partition("-")[0], jwt.algorithms.ECAlgorithm)
    return {**algorithm.to_jwk(public, as_dict=True), "kid": name, "use": "sig", **fields}


def base64url(data: bytes | str | Mapping[str, Any]) -> str:
    """Encode bytes, a text, or an object as JSON, as a part of a token."""
    if isinstance(data, Mapping):
        data = json.dumps(data)
    raw = data.encode() if isinstance(data, str) else data
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def signed(
    header: bytes | str | Mapping[str, Any],
    payload: bytes | str | Mapping[str, Any],
    key: str,
    algorithm: str,
) -> str:
    """Return a token of any header and payload, signed with a key of `private_key`."""
    content = f"{base64url(header)}.{base64url(payload)}"
    made = jwt.algorithms.get_default_algorithms()[algorithm]
    return f"{content}.{base64url(made.sign(content.encode(), private_key(key)))}"


class FakeIssuer:
    """Issuer as an ASGI app. address: where it is served. keys: their names, as published.

    requests: paths in the order of the requests. status, body: sent in place of everything, if set.
    held: part of a form whose reply waits until `released`.
    """

    def __init__(self) -> None:
        self.address = ""
        self.keys: list[dict[str, Any]] = [public_jwk("rsa-1"), public_jwk("p256-1")]
        self.requests: list[str] = []
        self.status = 200
        self.body: bytes | None = None
        self.headers: list[tuple[bytes, bytes]] = []
        self.described: dict[str, Any] = {}
        self.token_reply: tuple[int, bytes] = (400, b'{"error": "invalid_grant"}')
        self.forms: list[bytes] = []
        self.held: bytes | None = None
        self.released = threading.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request."""
        message = await receive()
        self.requests.append(scope["path"])
        status, body = self.status, self.body
        if scope["method"] == "POST":
            self.forms.append(message["body"])
            if self.held is not None and self.held in message["body"]:
                await asyncio.to_thread(self.released.wait, 20)
            status, body = self.token_reply
        elif body is None:
            content = {"keys": self.keys} if scope["path"] == "/keys" else self.description()
            body = json.dumps(content).encode()
        headers = [(b"content-length", str(len(body)).encode()), *self.headers]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def description(self) -> dict[str, Any]:
        """Return what discovery finds."""
        return {
            "issuer": self.address,
            "jwks_uri": f"{self.address}/keys",
            "authorization_endpoint": f"{self.address}/authorize",
            "token_endpoint": f"{self.address}/token",
            **self.described,
        }

    def claims(self, **changes: Any) -> dict[str, Any]:
        """Return claims that are accepted, with changes; None removes a claim."""
        now_s = int(time.time())
        claims = {
            "iss": self.address,
            "aud": AUDIENCE,
            "sub": "alice",
            "team": "search",
            "iat": now_s,
            "exp": now_s + 600,
            **changes,
        }
        return {name: value for name, value in claims.items() if value is not None}

    def token(
        self, key: str = "rsa-1", algorithm: str = "RS256", header: Mapping[str, Any] = {}, **changes: Any
    ) -> str:
        """Return a signed token. header: further fields; None removes one."""
        fields = {"alg": algorithm, "typ": "JWT", "kid": key, **header}
        fields = {name: value for name, value in fields.items() if value is not None}
        return signed(fields, self.claims(**changes), key, algorithm)


async def until_read(gateway: Any, names: Collection[str] | None = None) -> None:
    """Wait until a gateway has read the keys of its issuers. names: of those, None for all."""
    issuers = gateway.application.sign_on.issuers
    sources = [issuers[name].source for name in names or issuers]
    async with asyncio.timeout(PATIENCE_S):
        while any(source.version == 0 for source in sources):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
