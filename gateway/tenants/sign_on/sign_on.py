"""Single sign-on: tokens of issuers in place of API keys.

Rule: the request path pays a hash and a lookup, as for API keys. A token that was verified is remembered by
its digest until it expires, its issuer changes its keys, or any key or tenant changes here.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

import msgspec

from gateway.config.access_checks import issuer_key
from gateway.config.schema import IssuerSettings
from gateway.errors import TenantUnknown, TokenRefused
from gateway.tenants.keyring import Keyring, StoredKey, Tenant
from gateway.tenants.sign_on.claims import check_claims, stored_key_of
from gateway.tenants.sign_on.token_form import UnverifiedToken, parse_token

if TYPE_CHECKING:
    from gateway.tenants.sign_on.key_source import KeySource

logger = logging.getLogger("gateway")

# Remembered tokens, some 2 KB each.
ACCEPTED_MAX = 10_000


class Issuer(msgspec.Struct, frozen=True):
    """One issuer. audience: that its tokens may be meant for."""

    name: str
    settings: IssuerSettings
    source: "KeySource"
    audience: frozenset[str]


class CheckedToken(msgspec.Struct, frozen=True):
    """Token whose claims would admit it, if its signature is right."""

    token: UnverifiedToken
    issuer: Issuer
    audience: Collection[str]


class _Accepted(msgspec.Struct, frozen=True):
    """Outcome of a verified token. owner: or why it has none. versions: of the keys and the keyring."""

    owner: Tenant | TenantUnknown
    ends_s: float
    issuer: Issuer
    versions: tuple[int, int]


class SignOn:
    """The issuers of the configuration, and the tokens that were accepted. now_s: the wall clock."""

    def __init__(
        self,
        keyring: Keyring,
        configured: Mapping[str, IssuerSettings],
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._keyring = keyring
        self._now_s = now_s
        self.issuers: Mapping[str, Issuer] = {}
        self._by_address: Mapping[str, Issuer] = {}
        self._accepted: OrderedDict[str, _Accepted] = OrderedDict()
        self._changed = asyncio.Event()
        self.apply(configured)

    def apply(self, configured: Mapping[str, IssuerSettings]) -> None:
        """Use the issuers of a configuration. Keys that are known already stay known."""
        issuers: dict[str, Issuer] = {}
        for name, settings in configured.items():
            clients = [settings.console.client_id] if settings.console else []
            audience = frozenset((*settings.audience, *clients))
            issuers[name] = Issuer(name, settings, self._source_of(name, settings), audience)
        self.issuers = issuers
        self._by_address = {issuer_key(issuer.settings.issuer): issuer for issuer in issuers.values()}
        self._accepted.clear()
        self._changed.set()

    def _source_of(self, name: str, settings: IssuerSettings) -> "KeySource":
        # PyJWT and its cryptography are loaded only where there is an issuer.
        from gateway.tenants.sign_on.key_source import KeySource

        before = self.issuers.get(name)
        if before is not None and before.source.serves(settings):
            return before.source
        return KeySource(name, settings)

    def find(self, digest: str) -> Tenant | None:
        """Return the owner of a token that was accepted before, None if it must be checked.

        Raises: TenantUnknown.
        """
        accepted = self._accepted.get(digest)
        if accepted is None:
            return None
        if accepted.versions != self._versions(accepted.issuer) or accepted.ends_s <= self._now_s():
            del self._accepted[digest]
            return None
        return _owner_or_raise(accepted.owner)

    def check(self, text: str, audience: Collection[str] | None = None) -> CheckedToken:
        """Check all of a token but its signature, which costs less than that.

        audience: that it is meant for, None for that of its issuer. Raises: TokenRefused.
        """
        token = parse_token(text)
        address = token.claims.get("iss")
        issuer = self._by_address.get(issuer_key(address)) if isinstance(address, str) else None
        # Before its description was read it has no keys either: no token is accepted then.
        is_read = issuer is not None and issuer.source.description is not None
        if issuer is None or (is_read and address != issuer.source.issuer):
            raise TokenRefused("issuer", "the token is of an issuer (iss) that this gateway does not know")
        if token.algorithm not in issuer.settings.algorithms:
            raise TokenRefused("algorithm", "the token is signed by an algorithm other than its issuer's")
        wanted = issuer.audience if audience is None else audience
        check_claims(token.claims, wanted, self._now_s(), issuer.settings.clock_skew_s)
        return CheckedToken(token, issuer, wanted)

    def verify(self, checked: CheckedToken) -> StoredKey:
        """Check the signature, and return what the claims stand for.

        Raises: TokenRefused, TenantUnknown, SignOnUnavailable.
        """
        from gateway.tenants.sign_on.jose import verify

        token, issuer = checked.token, checked.issuer
        settings, key = issuer.settings, issuer.source.key_for(token)
        verify(token, key, issuer.source.issuer, checked.audience, settings.clock_skew_s)
        return stored_key_of(token.claims, issuer.name, settings.claims)

    def accept(self, checked: CheckedToken, digest: str) -> Tenant:
        """Verify a token, remember it by its digest, and return its owner.

        Raises: TokenRefused, TenantUnknown, SignOnUnavailable, QuotaUnavailable.
        """
        versions = self._versions(checked.issuer)
        owner: Tenant | TenantUnknown
        try:
            owner = self._keyring.owner_of(self.verify(checked))
        except TenantUnknown as unknown:
            owner = unknown
        ends_s = float(checked.token.claims["exp"]) + checked.issuer.settings.clock_skew_s
        self._accepted[digest] = _Accepted(owner, ends_s, checked.issuer, versions)
        if len(self._accepted) > ACCEPTED_MAX:
            self._accepted.popitem(last=False)
        return _owner_or_raise(owner)

    def _versions(self, issuer: Issuer) -> tuple[int, int]:
        return issuer.source.version, self._keyring.version

    async def run(self) -> None:
        """Follow the keys of all issuers, also of those that a reload adds."""
        tasks: dict[KeySource, asyncio.Task[None]] = {}
        try:
            while True:
                self._changed.clear()
                sources = {issuer.source for issuer in self.issuers.values()}
                for source in tasks.keys() - sources:
                    tasks.pop(source).cancel()
                for source in sources - tasks.keys():
                    tasks[source] = asyncio.create_task(source.follow())
                    tasks[source].add_done_callback(_log_failure)
                await self._changed.wait()
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)


def _owner_or_raise(owner: Tenant | TenantUnknown) -> Tenant:
    if isinstance(owner, TenantUnknown):
        # A new one: an exception that is raised again keeps the frames of every request.
        raise TenantUnknown(owner.message)
    return owner


def _log_failure(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("the keys of an issuer are no longer read", exc_info=error)
