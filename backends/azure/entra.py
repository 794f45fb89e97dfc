"""Access tokens of Microsoft Entra ID, with azure-identity: the only module that imports it.

Its chain of credentials is the usual one: variables of the environment, workload identity, managed identity,
and the command line of Azure. It blocks, so that tokens are fetched in a thread.
"""

import asyncio
import logging
import os
import time
from typing import Any

from backends.contract import ReplicaSpec
from backends.contract.errors import CredentialRefused, ModelUnavailable
from backends.http.credentials import AccessToken, BearerToken, TokenSource, without_secrets
from backends.http.egress import proxy_of

SCOPE = "https://cognitiveservices.azure.com/.default"
AUTHORITY = "https://login.microsoftonline.com"
# Whose values the chain sends.
SECRET_VARIABLES = (
    "AZURE_CLIENT_SECRET",
    "AZURE_CLIENT_CERTIFICATE_PASSWORD",
    "AZURE_PASSWORD",
    "IDENTITY_HEADER",
    "MSI_SECRET",
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
    # Its warnings have the words of the identity service, and requests.
    logging.getLogger("azure").setLevel(logging.ERROR)
    options = _options(spec)
    kept: list[DefaultAzureCredential] = []

    def fetch() -> AccessToken:
        if not kept:
            kept.append(DefaultAzureCredential(**options))
        try:
            token = kept[0].get_token(SCOPE)
        except ClientAuthenticationError as error:
            message = "Microsoft Entra ID gives no access token for the gateway's identity"
            secrets = [os.environ.get(name, "") for name in SECRET_VARIABLES]
            words = without_secrets(str(error).encode(), secrets).decode()
            raise CredentialRefused(message).with_facts(detail=words) from error
        return AccessToken(token.token, max(1.0, token.expires_on - time.time()))

    async def fetch_in_thread() -> AccessToken:
        return await asyncio.to_thread(fetch)

    async def close() -> None:
        for credential in kept:
            credential.close()

    return BearerToken(TokenSource(fetch_in_thread), close)


def _options(spec: ReplicaSpec) -> dict[str, Any]:
    """Return the options of azure-identity's own connections."""
    options: dict[str, Any] = {}
    if (proxy := proxy_of(AUTHORITY, spec.proxy)) is not None:
        options["proxies"] = {"https": proxy}
    if spec.tls.ca is not None:
        options["connection_verify"] = spec.tls.ca
    return options
