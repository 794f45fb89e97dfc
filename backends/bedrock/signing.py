"""Credentials of AWS and signatures (SigV4), with botocore: the only module that imports it.

Credentials come from botocore's usual chain: environment, profiles, single sign-on, web identity, containers
and instances. Reading and renewing them may ask a server, so it happens in a thread.
"""

import asyncio
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from backends.contract import NO_PROXY, ReplicaSpec
from backends.contract.errors import CredentialMissing, CredentialRefused, ModelUnavailable
from backends.http.client import OutgoingRequest
from backends.http.credentials import FETCH_TIMEOUT_S, AccessToken, TokenSource, silence, without_secrets
from backends.http.egress import proxy_passwords

# Of the runtime and of the agents' runtime alike.
SIGNING_NAME = "bedrock"
# Times for which credentials are used without asking botocore, which renews them 15 minutes before their end.
LIFETIMES_S = (300.0, 60.0, 10.0)
LEAST_LIFETIME_S = 1.0
NO_SOCKS = (
    "the credentials for AWS cannot be read: its identity services are called through no proxy of SOCKS"
)
UNREADABLE = "the credentials for AWS cannot be read"
SECRET_VARIABLES = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_CONTAINER_AUTHORIZATION_TOKEN")
SECRET_FILE_VARIABLES = ("AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE")
NONE_FOUND = (
    "no credentials for AWS were found: set `api_key` to a key of Bedrock, or AWS_PROFILE, AWS_ACCESS_KEY_ID "
    "and AWS_SECRET_ACCESS_KEY, or give the machine a role"
)


def check_installed() -> None:
    """Check that botocore is installed, and keep its log quiet. Raises: ModelUnavailable."""
    # Importing it takes a third of a second, which the thread that reads the credentials has.
    if find_spec("botocore") is None:
        raise ModelUnavailable("`backend: bedrock` needs the extra `aws`")
    silence("botocore")


class AwsAuthorizer:
    """Headers of requests to Bedrock: the key of Bedrock that the environment has, else a signature.

    spec: its proxy and authorities are used for AWS' identity services, too. region: of the service. profile:
    of AWS' files, None for the chain's own choice. takes_keys: the service takes keys of Bedrock.
    """

    def __init__(self, spec: ReplicaSpec, region: str, profile: str | None, *, takes_keys: bool) -> None:
        self._spec = spec
        self._region = region
        self._profile = profile
        self._takes_keys = takes_keys
        # botocore's credentials, or a key of Bedrock; None before they are read.
        self._kept: Any = None
        self._source = TokenSource[Any](self._fetch)

    async def headers(self, request: OutgoingRequest) -> Mapping[str, str]:
        """Return the headers that authorize a request. Raises: CredentialRefused."""
        if "authorization" in request.headers:
            return {}
        found = await self._source.value()
        return (
            {"authorization": f"Bearer {found}"} if isinstance(found, str) else self._signed(request, found)
        )

    def refused(self) -> None:
        """Forget the credentials: files and the environment's servers may have others by now."""
        self._kept = None
        self._source.forget()

    async def aclose(self) -> None:
        """End a fetch: botocore opens connections only while it reads credentials."""
        await self._source.aclose()

    async def _fetch(self) -> AccessToken[Any]:
        return await asyncio.to_thread(self._renewed)

    def _renewed(self) -> AccessToken[Any]:
        """Return the credentials of this moment, or a key; this blocks. Raises: CredentialRefused."""
        from botocore.exceptions import BotoCoreError, ClientError, ProxyConnectionError

        try:
            kept = self._kept or self._read()
            self._kept = kept
            if isinstance(kept, str):
                return AccessToken(kept, math.inf)
            frozen = kept.get_frozen_credentials()
        except (BotoCoreError, ClientError) as error:
            self._kept = None
            secrets = [*_secrets(), *proxy_passwords(self._spec.proxy)]
            words = without_secrets(str(error).encode(), secrets).decode()
            is_socks = isinstance(error, ProxyConnectionError) and "socks" in words
            raise CredentialRefused(NO_SOCKS if is_socks else UNREADABLE).with_facts(detail=words) from error
        # Only credentials that expire have the method, which is all that they show of their end.
        expires_within = getattr(kept, "refresh_needed", None)
        if expires_within is None:
            return AccessToken(frozen, math.inf)
        return AccessToken(frozen, next((s for s in LIFETIMES_S if not expires_within(s)), LEAST_LIFETIME_S))

    def _read(self) -> Any:
        """Return credentials or a key, which may ask a server. Raises: CredentialMissing, BotoCoreError."""
        from botocore.config import Config
        from botocore.session import Session
        from botocore.tokens import ScopedEnvTokenProvider

        session = Session(profile=self._profile)
        if self._takes_keys and self._profile is None:
            token = ScopedEnvTokenProvider(session).load_token(signing_name=SIGNING_NAME)
            if token is not None:
                return str(token.token)
        # None leaves the choice to botocore, which reads the same variables.
        proxies: dict[str, str] | None = None if self._spec.proxy is None else {}
        if self._spec.proxy not in {None, NO_PROXY}:
            proxies = {"https": str(self._spec.proxy)}
        timeout_s = FETCH_TIMEOUT_S / 2
        session.set_default_client_config(
            Config(
                proxies=proxies,
                connect_timeout=timeout_s,
                read_timeout=timeout_s,
                retries={"total_max_attempts": 1},
            )
        )
        if self._spec.tls.ca is not None:
            session.set_config_variable("ca_bundle", self._spec.tls.ca)
        credentials = session.get_credentials()
        if credentials is None:
            raise CredentialMissing(NONE_FOUND)
        return credentials

    def _signed(self, request: OutgoingRequest, credentials: Any) -> Mapping[str, str]:
        from botocore.auth import SigV4Auth
        from botocore.awsrequest import AWSRequest

        kept = {name: request.headers[name] for name in ("content-type",) if name in request.headers}
        signed = AWSRequest(request.method, request.url, dict(kept), request.body)
        SigV4Auth(credentials, SIGNING_NAME, self._region).add_auth(signed)
        return {name.lower(): value for name, value in signed.headers.items() if name.lower() not in kept}


def _secrets() -> list[str]:
    """Return what the identity services of AWS are sent, which their words may repeat."""
    found = [os.environ.get(name, "") for name in SECRET_VARIABLES]
    for name in SECRET_FILE_VARIABLES:
        with suppress(OSError):
            found.append(Path(os.environ.get(name, "")).read_text().strip())
    return found
