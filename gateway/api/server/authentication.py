"""Authentication of requests by a key, a token, a certificate or a place, with a limit on wrong keys."""

import base64
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import TypeAlias
from urllib.parse import parse_qs

from gateway.api.server.error_bodies import ErrorFormat
from gateway.api.server.relays import is_forwarded, is_of_page
from gateway.api.server.request_context import RequestContext
from gateway.errors import AuthThrottled, QuotaUnavailable, TokenRefused, Unauthenticated
from gateway.tenants.guess_throttle import GuessThrottle
from gateway.tenants.keyring import Keyring, Tenant, key_digest
from gateway.tenants.sign_on.sign_on import SignOn
from gateway.tenants.sign_on.token_form import is_token

# Of a query that may have a key.
QUERY_FIELDS_MAX = 32
PAGE_NEEDS_KEY = (
    "no API key: callers here need none, but web pages do, and this request has `origin`, `referer` or "
    "`sec-fetch-site`: send the header `Authorization: Bearer <key>`"
)
NAMED_HEADERS = "`x-goog-api-key`, or `Authorization: Bearer <key>`"
# The address alone is in the first group, or in the second.
HOP_WITH_PORT = re.compile(r"\[([0-9A-Fa-f:.]+)\](?::[0-9]+)?|([0-9.]+):[0-9]+")

Address: TypeAlias = IPv4Address | IPv6Address
Network: TypeAlias = IPv4Network | IPv6Network


class Authenticator:
    """Finds the tenant of a request's key or token.

    trusted_proxies: networks whose x-forwarded-for is trusted. key_headers: headers in which clients of some
    dialects send the bare key. key_parameters: of the query of a URL in which they may, by the format of the
    dialect's errors. reads_queries: whether the configuration permits that.
    """

    def __init__(
        self,
        keyring: Keyring,
        trusted_proxies: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
        sign_on: SignOn | None = None,
        key_headers: Sequence[bytes] = (),
        key_parameters: Mapping[ErrorFormat, str] = {},
        *,
        reads_queries: bool = False,
    ) -> None:
        self._keyring = keyring
        self._key_parameters = key_parameters
        self._reads_queries = reads_queries
        self._key_headers = key_headers
        self.sign_on = sign_on or SignOn(keyring, {})
        self._trusted: list[Network] = [ip_network(network) for network in trusted_proxies]
        self._clock = clock
        self._guesses = GuessThrottle()
        # Checking a signature costs more than everything else that is done for a wrong token.
        self._forgeries = GuessThrottle()

    def authenticate(self, context: RequestContext) -> Tenant:
        """Return the tenant of a request's key or token. It is looked up once per request.

        Without one it is the tenant of the client's certificate, else that of its listener or its network. A
        web page needs a key: a browser shows its certificate at the request of any page.
        Raises: Unauthenticated; AuthThrottled if the address has sent too many wrong keys; TenantUnknown,
        QuotaUnavailable, SignOnUnavailable.
        """
        if context.tenant is not None:
            return context.tenant
        key = self.key_of(context)
        if key is None:
            if context.certificate is not None and b"origin" not in context.by_name:
                return context.identify(self._keyring.identify_certificate(context.certificate))
            if (tenant := self._tenant_of_place(context)) is not None:
                if is_of_page(context):
                    raise Unauthenticated(PAGE_NEEDS_KEY)
                return context.identify(tenant)
            # Nothing was guessed: the caller needs the hint on how to send a key, however often it asks.
            return context.identify(self._keyring.identify(None))
        try:
            if self.sign_on.issuers and is_token(key):
                return context.identify(self._find_user(context, key))
            return context.identify(self._identify(context, key))
        except Unauthenticated as refusal:
            self.count_failure(context, key, refusal.message)
            raise

    def _tenant_of_place(self, context: RequestContext) -> Tenant | None:
        """Return the tenant of a caller without a key, by its listener or its network; None elsewhere.

        Operators need a key everywhere. Raises: TenantUnknown, QuotaUnavailable.
        """
        listener = context.listener
        if context.target.options.for_operators or not (listener or self._keyring.has_networks):
            return None
        if listener is not None:
            return self._keyring.identify_listener(listener)
        if context.came_to_operators:
            return None
        address = _parsed(context.address)
        # A proxy is no caller: a trusted one names its own, and what others name counts nothing.
        if address is None or self._trusts(address):
            return None
        peer = _parsed(context.peer)
        if is_forwarded(context) and (peer is None or not self._trusts(peer)):
            return None
        return self._keyring.identify_network(address)

    def _identify(self, context: RequestContext, key: str) -> Tenant:
        """Return the owner of a key. While the store is away, each unknown key counts once as a guess.

        The caller of a valid key that is not known yet may try it again until the store has returned.
        """
        try:
            return self._keyring.identify(key)
        except QuotaUnavailable as refusal:
            if not self._guesses.has_recent(context.address, key_digest(key)):
                self.count_failure(context, key, refusal.message)
            raise

    def _find_user(self, context: RequestContext, token: str) -> Tenant:
        """Return the owner of a token, which may also be a key of the same form."""
        digest = key_digest(token)
        if self._keyring.knows(digest):
            return self._keyring.identify(token)
        if (found := self.sign_on.find(digest)) is not None:
            return found
        checked = self.sign_on.check(token)
        address, now_s = context.address, self._clock()
        _refuse_for(self._forgeries.wait_s(address, now_s))
        try:
            return self.sign_on.accept(checked, digest)
        except TokenRefused as refused:
            if refused.reason == "signature":
                self._forgeries.record_failure(address, digest, now_s)
            raise

    def count_failure(self, context: RequestContext, secret: str, refusal: str) -> None:
        """Count a wrong key, token or code against its address. One that was valid before is no guess.

        refusal: why it is wrong. A client that repeats shows only its last error.
        Raises: AuthThrottled if the address has sent too many.
        """
        digest = key_digest(secret)
        if self._keyring.has_known(digest):
            return
        address, now_s = context.address, self._clock()
        _refuse_for(self._guesses.wait_s(address, now_s), f"{refusal}; ")
        self._guesses.record_failure(address, digest, now_s)

    def refuse_guessing(self, context: RequestContext) -> None:
        """Refuse an address that has sent too many wrong keys. Raises: AuthThrottled."""
        _refuse_for(self._guesses.wait_s(context.address, self._clock()))

    def forgive_known_keys(self) -> None:
        """Take back failures with keys that have become known, such as one that was just created."""
        self._guesses.forgive(self._keyring.knows)

    def address_of(self, peer: str, headers: Sequence[tuple[bytes, bytes]]) -> str:
        """Return the client's address: behind trusted proxies, never behind one that is not trusted.

        peer: the other end of the connection.
        """
        if not self._trusted:
            return peer
        lines = [value for name, value in headers if name == b"x-forwarded-for"]
        forwarded = [hop.strip() for hop in b",".join(lines).decode("latin-1").split(",")]
        address = peer
        while self._is_trusted(address) and forwarded and forwarded[-1]:
            address = _without_port(forwarded.pop())
        return address

    def key_of(self, context: RequestContext) -> str | None:
        """Return the API key of a request, None if it carries none.

        It is a bearer token, or the password of HTTP Basic, for clients that only take a URL. A bare token is
        accepted too: LlamaIndex's TEI reranker sends it like that. Without `authorization` it is the value of
        a header in which clients of a dialect send keys; or the key in the body, on a path of a dialect whose
        clients send it there. Raises: Unauthenticated.
        """
        key_headers = self._key_headers if context.target.options.key_field is None else ()
        if context.repeats_headers and any(map(context.is_ambiguous, (b"authorization", *key_headers))):
            # A proxy in front may have checked the other one.
            raise Unauthenticated("the request has several different keys in headers of one name: send one")
        authorization = context.header(b"authorization")
        if not authorization:
            sent = (key for name in key_headers if (key := context.header(name).strip()))
            return next(sent, None) or self._key_in_query(context) or context.body_key
        scheme, _, credentials = authorization.partition(" ")
        match scheme.lower():
            case "bearer":
                key = credentials.strip()
            case "basic":
                key = _password(credentials.strip())
            case _:
                key = authorization.strip()
        return key or None

    def _key_in_query(self, context: RequestContext) -> str | None:
        """Return the key in the query of a URL, if the path's dialect and the configuration have it there.

        Raises: Unauthenticated.
        """
        name = self._key_parameters.get(context.target.dialect) if context.query else None
        if name is None:
            return None
        try:
            fields = parse_qs(context.query.decode("latin-1"), max_num_fields=QUERY_FIELDS_MAX)
        except ValueError:
            fields = {}
        keys = {key.strip() for key in fields.get(name, ())} - {""}
        if keys and not self._reads_queries:
            raise Unauthenticated(f"a key in the query of a URL is not read: send the header {NAMED_HEADERS}")
        if len(keys) > 1:
            raise Unauthenticated(f"the request has several different keys in its query `{name}`: send one")
        return next(iter(keys), None)

    def _is_trusted(self, address: str) -> bool:
        parsed = _parsed(address)
        return parsed is not None and self._trusts(parsed)

    def _trusts(self, address: Address) -> bool:
        return any(address in network for network in self._trusted)


def _without_port(hop: str) -> str:
    """Return an address of x-forwarded-for without the port of a connection, which some proxies add.

    Each connection would otherwise have an address, and guesses of keys, of its own.
    Source: Azure Application Gateway's documentation, "how an application gateway works": IP:port.
    """
    match = HOP_WITH_PORT.fullmatch(hop)
    return match[1] or match[2] if match else hop


def _parsed(text: str) -> Address | None:
    """Return an address. A listener on both protocols shows IPv4 inside IPv6."""
    try:
        address = ip_address(text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def _refuse_for(wait_s: float, refusal: str = "") -> None:
    if wait_s > 0:
        raise AuthThrottled(
            f"{refusal}too many wrong keys from this address", retry_after_s=math.ceil(wait_s)
        ) from None


def _password(credentials: str) -> str:
    """Return the part after the colon, or nothing if the credentials cannot be decoded."""
    try:
        return base64.b64decode(credentials, validate=True).decode("utf-8").partition(":")[2]
    except ValueError:
        return ""
