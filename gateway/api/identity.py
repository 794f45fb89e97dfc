"""Whose key a request carries, and from which address; the one place where a wrong key is counted."""

import math
import time
from collections.abc import Callable, Sequence
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from typing import Any, TypeAlias

from litestar.connection import ASGIConnection

from gateway.errors import AuthThrottled, Unauthenticated
from gateway.tenants.guesses import Guesses
from gateway.tenants.keyring import Keyring, Tenant

Connection: TypeAlias = ASGIConnection[Any, Any, Any, Any]
Network: TypeAlias = IPv4Network | IPv6Network


class Identity:
    """trusted_proxies: networks whose x-forwarded-for is believed."""

    def __init__(
        self,
        keyring: Keyring,
        trusted_proxies: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keyring = keyring
        self._trusted: list[Network] = [ip_network(one) for one in trusted_proxies]
        self._clock = clock
        self._guesses = Guesses()

    def of(self, connection: Connection) -> Tenant:
        """The tenant of the request's key.

        Raises: Unauthenticated; AuthThrottled where the address has shown too many wrong keys.
        """
        try:
            return self._keyring.identify(api_key_of(connection))
        except Unauthenticated:
            address, now_s = self.address_of(connection), self._clock()
            wait_s = self._guesses.wait_s(address, now_s)
            if wait_s > 0:
                raise AuthThrottled(
                    "too many wrong keys from this address", retry_after_s=math.ceil(wait_s)
                ) from None
            self._guesses.failed(address, now_s)
            raise

    async def guard(self, connection: Connection, _: Any) -> None:
        """For Litestar, which sends one that is not async to a thread: nobody without a key has a body read or parsed. /admin has a rule of its own."""
        scope = connection.scope
        if scope.get("method") == "POST" and not scope["path"].startswith("/admin/"):
            self.of(connection)

    def address_of(self, connection: Connection) -> str:
        """Where the request comes from: past proxies that are trusted, never past one that is not."""
        client = connection.scope.get("client")
        address = client[0] if client else "unknown"
        forwarded = [one.strip() for one in connection.headers.get("x-forwarded-for", "").split(",")]
        while self._is_trusted(address) and forwarded and forwarded[-1]:
            address = forwarded.pop()
        return address

    def _is_trusted(self, address: str) -> bool:
        try:
            place = ip_address(address)
        except ValueError:
            return False
        return any(place in network for network in self._trusted)


def api_key_of(connection: Connection) -> str | None:
    """The key as it was sent. A bare token is taken too: LlamaIndex's TEI reranker sends it so."""
    sent = connection.headers.get("authorization", "")
    scheme, _, rest = sent.partition(" ")
    key = rest.strip() if scheme.lower() == "bearer" else sent.strip()
    return key or None
