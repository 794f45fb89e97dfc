"""Sign-in of the console's users: a code that their issuer gave them is exchanged for their token.

Rule: the gateway keeps nothing. The page that began a sign-in keeps its state, its nonce and the verifier of
PKCE, and no address that a caller sends is ever visited or answered with.
"""

import hmac
import logging
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from gateway.config.schema import ConsoleClient
from gateway.errors import InvalidInput, SignOnUnavailable, TokenRefused
from gateway.tenants.guess_throttle import network_of
from gateway.tenants.keyring import Tenant, key_digest
from gateway.tenants.sign_on.sign_on import CheckedToken, Issuer, SignOn

logger = logging.getLogger("gateway")

# Exchanges in progress: each is a request to the issuer, which a caller without a key can cause.
EXCHANGES_MAX = 256
EXCHANGES_PER_ADDRESS = 8
# Exchanges of one address are at most so many times those that stay free, as bodies of a tenant are.
SHARE_OF_FREE = 3
# An error of OAuth as it may be written to a log.
ERROR_NAME = re.compile(r"[a-z_]{1,40}")


class Offer(msgspec.Struct, frozen=True):
    """Way to sign in by an issuer, as the page needs it.

    authorization_endpoint: None while the issuer has not been reached. end_session_endpoint: None if the
    issuer has none.
    """

    name: str
    issuer: str
    client_id: str
    scope: str
    authorization_endpoint: str | None
    end_session_endpoint: str | None


class Code(msgspec.Struct, frozen=True):
    """Code that an issuer gave a user.

    name: of the issuer in router.yaml. verifier, nonce: as the page chose them.
    """

    name: str
    code: str
    verifier: str
    nonce: str
    redirect_uri: str


class SignedIn(msgspec.Struct, frozen=True):
    """Token of a user, which the page sends as it sends a key.

    expires_in_s: from now on, because the browser's clock may be wrong.
    """

    token: str
    expires_in_s: float
    tenant: str
    key: str


class _TokenReply(msgspec.Struct, frozen=True):
    id_token: str


class _ErrorReply(msgspec.Struct, frozen=True):
    error: str = ""


class SignIns:
    """The console's part of single sign-on."""

    def __init__(self, sign_on: SignOn) -> None:
        self._sign_on = sign_on
        self._in_progress: Counter[str] = Counter()

    def offers(self) -> Sequence[Offer]:
        """Return the issuers by which the console's users can sign in."""
        return [
            _offer(issuer, issuer.settings.console)
            for issuer in self._sign_on.issuers.values()
            if issuer.settings.console is not None
        ]

    async def redeem(self, code: Code, address: str) -> SignedIn:
        """Return the token that an issuer gives for a code. address: of the client.

        Raises: InvalidInput, TokenRefused, TenantUnknown, SignOnUnavailable, QuotaUnavailable.
        """
        issuer = self._sign_on.issuers.get(code.name)
        if issuer is None or issuer.settings.console is None:
            raise InvalidInput("there is no sign-in by this issuer", param="name")
        with self._exchanging(network_of(address)):
            token = await _exchange(code, issuer, issuer.settings.console.client_id)
            checked = self._checked(token, code.nonce, issuer, issuer.settings.console.client_id)
            tenant = await self._accept(checked, token)
        expires_in_s = max(0.0, float(checked.token.claims["exp"]) - time.time())
        return SignedIn(token, expires_in_s, tenant.name, tenant.key_id)

    @contextmanager
    def _exchanging(self, network: str) -> Iterator[None]:
        """Take the permit of one exchange. Raises: SignOnUnavailable."""
        own = self._in_progress[network] + 1
        free = EXCHANGES_MAX - self._in_progress.total() - 1
        if own > EXCHANGES_PER_ADDRESS or own > SHARE_OF_FREE * free:
            raise SignOnUnavailable("too many sign-ins at once; try again")
        self._in_progress[network] = own
        try:
            yield
        finally:
            self._in_progress[network] -= 1
            if not self._in_progress[network]:
                del self._in_progress[network]

    def _checked(self, token: str, nonce: str, issuer: Issuer, client_id: str) -> CheckedToken:
        """Check an ID token of this sign-in, apart from its signature. Raises: TokenRefused."""
        checked = self._sign_on.check(token, (client_id,))
        claims = checked.token.claims
        if checked.issuer.name != issuer.name:
            raise TokenRefused("issuer", "the token is of another issuer than the sign-in")
        found = claims.get("nonce")
        if not isinstance(found, str) or not hmac.compare_digest(
            found.encode(errors="replace"), nonce.encode()
        ):
            raise TokenRefused("nonce", "the token belongs to another sign-in (nonce)")
        party, audience = claims.get("azp"), claims["aud"]
        is_shared = isinstance(audience, list) and len(audience) > 1
        if party != client_id and (party is not None or is_shared):
            raise TokenRefused("audience", "the token was issued to another client (azp)")
        return checked

    async def _accept(self, checked: CheckedToken, token: str) -> Tenant:
        """Verify a token; wait for its key if that is new, because a code cannot be sent again."""
        try:
            return self._sign_on.accept(checked, key_digest(token))
        except SignOnUnavailable:
            await checked.issuer.source.wait_for_reading()
            return self._sign_on.accept(checked, key_digest(token))


def _offer(issuer: Issuer, client: ConsoleClient) -> Offer:
    described = issuer.source.description
    return Offer(
        issuer.name,
        issuer.source.issuer,
        client.client_id,
        " ".join(client.scopes),
        None if described is None or described.token_endpoint is None else described.authorization_endpoint,
        None if described is None else described.end_session_endpoint,
    )


async def _exchange(code: Code, issuer: Issuer, client_id: str) -> str:
    """Return the ID token for a code. Raises: TokenRefused, SignOnUnavailable."""
    from gateway.tenants.sign_on.issuer_client import IssuerFault, post_form

    described = issuer.source.description
    if described is None or described.token_endpoint is None:
        raise SignOnUnavailable("the issuer cannot be reached now; try again")
    form = {
        "grant_type": "authorization_code",
        "code": code.code,
        "redirect_uri": code.redirect_uri,
        "client_id": client_id,
        "code_verifier": code.verifier,
    }
    try:
        reply = await post_form(described.token_endpoint, form, issuer.settings)
    except IssuerFault as fault:
        logger.warning("sign_on.%s: a code could not be exchanged: %s", issuer.name, fault)
        raise SignOnUnavailable("the issuer does not answer; sign in again") from fault
    if reply.status != 200:
        name = _error_name(reply.body)
        logger.warning("sign_on.%s: a code was refused with %d %s", issuer.name, reply.status, name)
        if reply.status >= 500:
            raise SignOnUnavailable("the issuer failed; sign in again")
        raise TokenRefused("code", f"the issuer does not accept this sign-in ({name}); sign in again")
    try:
        return msgspec.json.decode(reply.body, type=_TokenReply).id_token
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        logger.warning("sign_on.%s: its reply to a code has no ID token", issuer.name)
        raise SignOnUnavailable("the issuer sent no ID token; ask the operator") from error


def _error_name(body: bytes) -> str:
    """Return the name of an error of OAuth, which is safe to show."""
    try:
        name = msgspec.json.decode(body, type=_ErrorReply).error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "no reason"
    return name if ERROR_NAME.fullmatch(name) else "no reason"
