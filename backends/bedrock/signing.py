"""Credentials of AWS and signatures (SigV4), with botocore: the only module that imports it.

Credentials come from botocore's usual chain: environment, profiles, single sign-on, web identity, containers
and instances. Reading them may ask a server, so it happens in a thread, and botocore renews them.
"""

import asyncio
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from backends.contract.errors import CredentialMissing, CredentialRefused, ModelUnavailable
from backends.http.client import OutgoingRequest
from backends.http.credentials import silence

# Of the runtime and of the agents' runtime alike.
SIGNING_NAME = "bedrock"
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

    region: of the service. profile: of AWS' files, None for the chain's own choice. takes_keys: the service
    takes keys of Bedrock.
    """

    def __init__(self, region: str, profile: str | None, *, takes_keys: bool) -> None:
        self._region = region
        self._profile = profile
        self._takes_keys = takes_keys
        self._lock = asyncio.Lock()
        # botocore's credentials, or a key of Bedrock; None before they are read.
        self._kept: Any = None

    async def headers(self, request: OutgoingRequest) -> Mapping[str, str]:
        """Return the headers that authorize a request. Raises: CredentialRefused."""
        if "authorization" in request.headers:
            return {}
        async with self._lock:
            if self._kept is None:
                self._kept = await asyncio.to_thread(self._read)
            kept = self._kept
        if isinstance(kept, str):
            return {"authorization": f"Bearer {kept}"}
        # Only credentials that expire have the method; renewing them asks a server.
        is_due = getattr(kept, "refresh_needed", lambda: False)()
        frozen = await asyncio.to_thread(_frozen, kept) if is_due else _frozen(kept)
        return self._signed(request, frozen)

    def refused(self) -> None:
        """Forget the credentials: files and the environment's servers may have others by now."""
        self._kept = None

    async def aclose(self) -> None:
        """Do nothing: botocore opens connections only while it reads credentials."""

    def _read(self) -> Any:
        """Return credentials or a key, which may ask a server. Raises: CredentialRefused."""
        from botocore.exceptions import BotoCoreError
        from botocore.session import Session
        from botocore.tokens import ScopedEnvTokenProvider

        try:
            session = Session(profile=self._profile)
            if self._takes_keys and self._profile is None:
                token = ScopedEnvTokenProvider(session).load_token(signing_name=SIGNING_NAME)
                if token is not None:
                    return str(token.token)
            credentials = session.get_credentials()
        except BotoCoreError as error:
            raise _unusable(error) from error
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


def _frozen(credentials: Any) -> Any:
    """Return the credentials of this moment, renewed if they expire soon. Raises: CredentialRefused."""
    from botocore.exceptions import BotoCoreError

    try:
        return credentials.get_frozen_credentials()
    except BotoCoreError as error:
        raise _unusable(error) from error


def _unusable(error: Exception) -> CredentialRefused:
    """Return the error of credentials that cannot be read or renewed; botocore's words are for operators."""
    return CredentialRefused("the credentials for AWS cannot be read").with_facts(detail=str(error))
