"""Access tokens of Microsoft Entra ID, with azure-identity: the only module that imports it.

Its chain of credentials is the usual one: variables of the environment, workload identity, managed identity,
and the command line of Azure. It blocks, so that tokens are fetched in a thread.
"""

import asyncio
import os
import re
import time
from typing import Any

from backends.contract import ReplicaSpec
from backends.contract.errors import CredentialMissing, CredentialRefused, ModelUnavailable
from backends.http.credentials import AccessToken, BearerToken, TokenSource, silence, without_secrets
from backends.http.egress import proxy_of

SCOPE = "https://cognitiveservices.azure.com/.default"
AUTHORITY = "https://login.microsoftonline.com"
# The chain ends at the first credential that fails otherwise than for want of its settings or its program.
ATTEMPT = re.compile(r"\w+Credential: .+")
ABSENT = re.compile("unavailable|not found|not be found|not installed|requires the")
DETAIL_CHARACTERS = 200
# Whose values the chain sends.
SECRET_VARIABLES = (
    "AZURE_CLIENT_SECRET",
    "AZURE_CLIENT_CERTIFICATE_PASSWORD",
    "AZURE_PASSWORD",
    "IDENTITY_HEADER",
    "MSI_SECRET",
)
NONE_FOUND = (
    "no credentials for Microsoft Entra ID were found: set AZURE_TENANT_ID, AZURE_CLIENT_ID and "
    "AZURE_CLIENT_SECRET, or give the machine a managed or workload identity"
)


def entra_token(spec: ReplicaSpec) -> BearerToken:
    """Return an authorizer with the tokens of the machine's identity.

    spec: its proxy and authorities are used for the identity service, too.

    Raises: ModelUnavailable, if azure-identity is not installed.
    """
    try:
        from azure.core.exceptions import ClientAuthenticationError
        from azure.identity import DefaultAzureCredential
    except ImportError as error:
        raise ModelUnavailable("`azure.entra` needs the extra `azure`") from error
    silence("azure", "msal")
    options = _options(spec)
    kept: list[DefaultAzureCredential] = []

    def fetch() -> AccessToken:
        if not kept:
            kept.append(DefaultAzureCredential(**options))
        try:
            token = kept[0].get_token(SCOPE)
        except ClientAuthenticationError as error:
            secrets = [os.environ.get(name, "") for name in SECRET_VARIABLES]
            words = without_secrets(str(error).encode(), secrets).decode()
            raise _refusal(words) from error
        return AccessToken(token.token, max(1.0, token.expires_on - time.time()))

    async def fetch_in_thread() -> AccessToken:
        return await asyncio.to_thread(fetch)

    async def close() -> None:
        for credential in kept:
            credential.close()

    return BearerToken(TokenSource(fetch_in_thread), close)


def _refusal(words: str) -> CredentialRefused:
    """Return the error of a chain that had no token. words: with a line for each credential that it tried."""
    last = ["", *ATTEMPT.findall(words)][-1]
    if not last or ABSENT.search(last):
        return CredentialMissing(NONE_FOUND)
    message = "Microsoft Entra ID gives no access token for the gateway's identity"
    return CredentialRefused(message).with_facts(detail=last[:DETAIL_CHARACTERS])


def _options(spec: ReplicaSpec) -> dict[str, Any]:
    """Return the options of azure-identity's own connections."""
    options: dict[str, Any] = {}
    if (proxy := proxy_of(AUTHORITY, spec.proxy)) is not None:
        options["proxies"] = {"https": proxy}
    if spec.tls.ca is not None:
        options["connection_verify"] = spec.tls.ca
    return options
