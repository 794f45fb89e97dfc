"""Whose key a request carries, and from which address; the one place where a wrong key is counted."""

import base64
import math
import time
from collections.abc import Callable, Sequence
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from typing import TypeAlias

from gateway.api.server.request_context import RequestContext
from gateway.errors import AuthThrottled, Unauthenticated
from gateway.tenants.guess_throttle import GuessThrottle
from gateway.tenants.keyring import Keyring, Tenant

Network: TypeAlias = IPv4Network | IPv6Network


class Authenticator:
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
        self._guesses = GuessThrottle()

    def authenticate(self, context: RequestContext) -> Tenant:
        """The tenant of the request's key, looked up once.

        Raises: Unauthenticated; AuthThrottled where the address has shown too many wrong keys.
        """
        if context.tenant is None:
            context.tenant = self._found(context)
        return context.tenant

    def _found(self, context: RequestContext) -> Tenant:
        try:
            return self._keyring.identify(api_key_of(context))
        except Unauthenticated:
            address, now_s = self.address_of(context), self._clock()
            wait_s = self._guesses.wait_s(address, now_s)
            if wait_s > 0:
                raise AuthThrottled(
                    "too many wrong keys from this address", retry_after_s=math.ceil(wait_s)
                ) from None
            self._guesses.record_failure(address, now_s)
            raise

    def address_of(self, context: RequestContext) -> str:
        """Where the request comes from: past proxies that are trusted, never past one that is not."""
        address = context.address
        lines = [value for name, value in context.headers if name == b"x-forwarded-for"]
        forwarded = [one.strip() for one in b",".join(lines).decode("latin-1").split(",")]
        while self._is_trusted(address) and forwarded and forwarded[-1]:
            address = forwarded.pop()
        return address

    def _is_trusted(self, address: str) -> bool:
        try:
            place = ip_address(address)
        except ValueError:
            return False
        return any(place in network for network in self._trusted)


def api_key_of(context: RequestContext) -> str | None:
    """The key as it was sent: a bearer token, or HTTP Basic's password, for clients that take a URL alone.

    A bare token is taken too: LlamaIndex's TEI reranker sends it so.
    """
    sent = context.header(b"authorization")
    scheme, _, rest = sent.partition(" ")
    match scheme.lower():
        case "bearer":
            key = rest.strip()
        case "basic":
            key = _password(rest.strip())
        case _:
            key = sent.strip()
    return key or None


def _password(sent: str) -> str:
    """What stands after the colon; empty where it cannot be read."""
    try:
        return base64.b64decode(sent, validate=True).decode("utf-8").partition(":")[2]
    except ValueError:
        return ""
