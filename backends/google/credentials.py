"""Access tokens of Google, with google-auth: the only module that imports it.

A file names a service account or a workload identity; without one google-auth looks for the default
credentials of the machine. Its transport blocks, so that tokens are fetched in a thread.
"""

import asyncio
import json
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from backends.contract import ReplicaSpec
from backends.contract.errors import CredentialMissing, CredentialRefused, ModelUnavailable
from backends.http.credentials import (
    FETCH_TIMEOUT_S,
    AccessToken,
    BearerToken,
    TokenSource,
    silence,
    without_secrets,
)
from backends.http.egress import identity_proxy, proxy_passwords

SCOPE = "https://www.googleapis.com/auth/cloud-platform"
TOKEN_ADDRESS = "https://oauth2.googleapis.com"  # noqa: S105 - an address, not a secret
# Of a token whose end is not stated.
LIFETIME_S = 600.0


def bearer_token(spec: ReplicaSpec, file: str | None) -> BearerToken:
    """Return an authorizer with the tokens of a file, or of the machine's default credentials.

    spec: its proxy and authorities are used for the identity service, too.

    Raises: ModelUnavailable, if google-auth is not installed.
    """
    # Importing them takes a third of a second, which the thread that fetches tokens has.
    if find_spec("requests") is None or find_spec("google.auth") is None:
        raise ModelUnavailable("`backend: vertex` needs the extra `google`")
    silence("google.auth")
    tokens = _Tokens(spec, file)

    async def fetch() -> AccessToken[str]:
        return await asyncio.to_thread(tokens.fetch)

    return BearerToken(TokenSource(fetch), tokens.aclose)


class _Tokens:
    """Credentials of one upstream, with the connections to their identity service."""

    def __init__(self, spec: ReplicaSpec, file: str | None) -> None:
        self._spec = spec
        self._file = file
        self._session: Any = None
        self._credentials: Any = None

    def fetch(self) -> AccessToken[str]:
        """Return a new token; this blocks. Raises: CredentialRefused, ReplicaUnavailable."""
        if self._session is None:
            self._session = _session(self._spec)
        request = _request(self._session)
        if self._credentials is None:
            self._credentials = _read(self._file, request)
        try:
            return _refreshed(self._credentials, request, proxy_passwords(self._spec.proxy))
        except CredentialRefused:
            # The file may have another key by now.
            self._credentials = None
            raise

    async def aclose(self) -> None:
        """Close the connections."""
        if self._session is not None:
            self._session.close()


def _session(spec: ReplicaSpec) -> Any:
    """Return connections through the proxy of the upstream, with its authorities."""
    import requests

    session = requests.Session()
    session.trust_env = False
    proxy = identity_proxy(TOKEN_ADDRESS, spec.proxy)
    if proxy is not None:
        session.proxies = {"https": proxy}
    if spec.tls.ca is not None:
        session.verify = spec.tls.ca
    return session


def _request(session: Any) -> Any:
    """Return google-auth's caller of a session, which waits for two minutes by itself."""
    from google.auth.transport.requests import Request

    class TimedRequest(Request):
        def __call__(
            self,
            url: str,
            method: str = "GET",
            body: Any = None,
            headers: Any = None,
            timeout: float = FETCH_TIMEOUT_S,
            **options: Any,
        ) -> Any:
            return super().__call__(url, method, body, headers, timeout, **options)  # type: ignore[no-untyped-call]

    return TimedRequest(session)


def _read(file: str | None, request: Any) -> Any:
    """Read credentials; the default ones may be those of a server of metadata. Raises: CredentialRefused."""
    import google.auth
    from google.auth.exceptions import GoogleAuthError

    try:
        if file is not None:
            return _read_file(file)
        credentials, _ = google.auth.default([SCOPE], request=request)
    except (GoogleAuthError, OSError, ValueError) as error:
        message = "the credentials for Google cannot be read: set `vertex.credentials` to their file"
        raise CredentialMissing(message).with_facts(detail=str(error)) from error
    return credentials


def _read_file(file: str) -> Any:
    """Read the credentials of a file. Raises: GoogleAuthError, OSError, ValueError."""
    from google.auth.identity_pool import Credentials as WorkloadIdentity
    from google.oauth2.service_account import Credentials as ServiceAccount

    content = json.loads(Path(file).read_bytes())
    kind = content.get("type") if isinstance(content, dict) else None
    if kind == "service_account":
        return ServiceAccount.from_service_account_info(content, scopes=[SCOPE])  # type: ignore[no-untyped-call]
    if kind == "external_account":
        return WorkloadIdentity.from_info(content, scopes=[SCOPE])  # type: ignore[no-untyped-call]
    raise ValueError(f"the file is of type {kind!r}, and neither service_account nor external_account")


def _refreshed(credentials: Any, request: Any, passwords: list[str]) -> AccessToken[str]:
    """Return a new token. passwords: of proxies. Raises: CredentialRefused."""
    from google.auth.exceptions import GoogleAuthError

    try:
        credentials.refresh(request)
    except GoogleAuthError as error:
        message = "Google gives no access token for the gateway's credentials"
        # Of a person's default credentials.
        secrets = [getattr(credentials, name, None) or "" for name in ("client_secret", "refresh_token")]
        words = without_secrets(str(error).encode(), [*secrets, *passwords]).decode()
        raise CredentialRefused(message).with_facts(detail=words) from error
    if credentials.expiry is None:
        return AccessToken(credentials.token, LIFETIME_S)
    # It is in UTC, without a zone.
    remaining = credentials.expiry.replace(tzinfo=UTC) - datetime.now(UTC)
    return AccessToken(credentials.token, max(1.0, remaining.total_seconds()))
