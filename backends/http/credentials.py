"""Access tokens and other credentials that expire: fetched when needed, and again before they expire."""

import asyncio
import json
import logging
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Generic, TypeVar
from urllib.parse import quote_plus

import msgspec

from backends.contract.errors import BackendError, CredentialRefused
from backends.http.client import SECRET_CHARACTERS_MIN, OutgoingRequest, mask_secrets

# Longest fetch of a token; clouds' identity services answer within a second.
FETCH_TIMEOUT_S = 10.0
# A token is fetched again when less than this remains of it, or a fifth of its life if that is shorter.
REFRESH_BEFORE_S = 300.0
REFRESH_SHARE = 0.2
# After a fetch that failed while the token is still valid.
RETRY_S = 10.0
# A signed token (JWT), such as the assertion of a service account.
SIGNED_TOKEN = re.compile(rb"[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,}")


def silence(*libraries: str) -> None:
    """Keep what a cloud's library logs below an error out of the log: requests, and each way that it tried.

    What matters is in the error that it raises, and becomes a replica's reason.
    """
    for library in libraries:
        logging.getLogger(library).setLevel(logging.ERROR)


T = TypeVar("T")


class AccessToken(msgspec.Struct, Generic[T], frozen=True):
    """Token of an identity service, or other credentials. lifetime_s: seconds of validity from now."""

    value: T
    lifetime_s: float


def without_secrets(words: bytes, secrets: Iterable[str]) -> bytes:
    """Mask what an identity service was sent, because its words may repeat it: secrets and signed tokens."""
    kept = [secret for secret in secrets if len(secret) >= SECRET_CHARACTERS_MIN]
    forms = {form for secret in kept for form in (secret, quote_plus(secret), json.dumps(secret)[1:-1])}
    longest_first = sorted([form.encode() for form in forms], key=len, reverse=True)
    return SIGNED_TOKEN.sub(b"...", mask_secrets(words, longest_first))


class TokenSource(Generic[T]):
    """Access token of one account. fetch: returns a new one. clock: monotonic, in seconds.

    Callers that need a token at the same time wait for one fetch.
    """

    def __init__(
        self, fetch: Callable[[], Awaitable[AccessToken[T]]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._fetch = fetch
        self._clock = clock
        self._token: T | None = None
        self._ends_s = self._refresh_s = 0.0
        self._fetching: asyncio.Task[None] | None = None

    async def value(self) -> T:
        """Return a valid token.

        Raises: CredentialRefused, if none could be fetched; other BackendErrors of the fetch.
        """
        now_s = self._clock()
        if now_s >= self._refresh_s and self._fetching is None:
            self._fetching = asyncio.create_task(self._refresh())
            # No caller may be left to read its failure.
            self._fetching.add_done_callback(lambda task: task.cancelled() or task.exception())
        if now_s >= self._ends_s:
            assert self._fetching is not None
            # Shielded: a caller that has gone does not end the fetch of the others.
            await asyncio.shield(self._fetching)
        assert self._token is not None
        return self._token

    def forget(self) -> None:
        """Forget the token, because it was refused: the next caller fetches another."""
        self._ends_s = self._refresh_s = 0.0

    async def aclose(self) -> None:
        """End a fetch in the background."""
        if self._fetching is not None:
            self._fetching.cancel()

    async def _refresh(self) -> None:
        try:
            async with asyncio.timeout(FETCH_TIMEOUT_S):
                token = await self._fetch()
        except Exception as error:
            self._fetching = None
            now_s = self._clock()
            if now_s < self._ends_s:
                self._refresh_s = now_s + RETRY_S
                return
            if isinstance(error, BackendError):
                raise
            failure = CredentialRefused("no access token for the upstream was had from its identity service")
            raise failure.with_facts(detail=f"{type(error).__name__}: {error}") from error
        now_s = self._clock()
        self._token, self._ends_s = token.value, now_s + token.lifetime_s
        self._refresh_s = self._ends_s - min(REFRESH_BEFORE_S, token.lifetime_s * REFRESH_SHARE)
        self._fetching = None


class BearerToken:
    """Authorizer that sends an access token. close: closes what its source fetches with."""

    def __init__(self, source: TokenSource[str], close: Callable[[], Awaitable[None]] | None = None) -> None:
        self._source = source
        self._close = close

    async def headers(self, _: OutgoingRequest) -> Mapping[str, str]:
        """Return the token's header. Raises: BackendError."""
        return {"authorization": f"Bearer {await self._source.value()}"}

    def refused(self) -> None:
        """Forget the token."""
        self._source.forget()

    async def aclose(self) -> None:
        """Close the source."""
        await self._source.aclose()
        if self._close is not None:
            await self._close()
