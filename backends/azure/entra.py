"""Access tokens of Microsoft Entra ID, with azure-identity: the only module that imports it.

Its chain of credentials is the usual one: variables of the environment, workload identity, managed identity,
and the command line of Azure. It blocks, so that tokens are fetched in a thread.
"""

import asyncio
import os
import re
import time
from typing import Any
from urllib.parse import urlsplit

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

SCOPE = "https://cognitiveservices.azure.com/.default"
# Of clouds with hosts of their own: the governments' of the United States, and China's.
SCOPES = {
    ".azure.us": "https://cognitiveservices.azure.us/.default",
    ".azure.cn": "https://cognitiveservices.azure.cn/.default",
}
AUTHORITY = "https://login.microsoftonline.com"
# The chain ends at the first credential that fails otherwise than for want of its settings or its program.
ATTEMPT = re.compile(r"\w+Credential: .+")
ABSENT = re.compile("unavailable|not found|not be found|not installed|requires the")
# A machine's identity service that refuses counts there as one that is unavailable.
REFUSED = "Token request error"
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
    scope = scope_of(spec.address)
    kept: list[DefaultAzureCredential] = []

    def fetch() -> AccessToken[str]:
        if not kept:
            kept.append(DefaultAzureCredential(**_options(spec)))
        try:
            token = kept[0].get_token(scope)
        except ClientAuthenticationError as error:
            secrets = [os.environ.get(name, "") for name in SECRET_VARIABLES]
            secrets += proxy_passwords(spec.proxy)
            words = without_secrets(str(error).encode(), secrets).decode()
            raise _refusal(words) from error
        return AccessToken(token.token, max(1.0, token.expires_on - time.time()))

    async def fetch_in_thread() -> AccessToken[str]:
        return await asyncio.to_thread(fetch)

    async def close() -> None:
        for credential in kept:
            credential.close()

    return BearerToken(TokenSource(fetch_in_thread), close)


def scope_of(address: str) -> str:
    """Return the scope of tokens for a resource, by the cloud that its host is in."""
    host = urlsplit(address).hostname or ""
    return next((scope for end, scope in SCOPES.items() if host.endswith(end)), SCOPE)


def _refusal(words: str) -> CredentialRefused:
    """Return the error of a chain that had no token. words: with a line for each credential that it tried."""
    attempts = ATTEMPT.findall(words)
    failed = [words for words in attempts if REFUSED in words or not ABSENT.search(words)]
    if not failed:
        return CredentialMissing(NONE_FOUND)
    message = "Microsoft Entra ID gives no access token for the gateway's identity"
    return CredentialRefused(message).with_facts(detail=failed[-1][:DETAIL_CHARACTERS])


def _options(spec: ReplicaSpec) -> dict[str, Any]:
    """Return the options of azure-identity's own connections."""
    # The environment's proxy is never the way to the server of a machine's identity.
    options: dict[str, Any] = {"use_env_settings": False, "retry_total": 1}
    options |= dict.fromkeys(("connection_timeout", "read_timeout"), FETCH_TIMEOUT_S / 2)
    host = os.environ.get("AZURE_AUTHORITY_HOST") or AUTHORITY
    proxy = identity_proxy(host if "://" in host else f"https://{host}", spec.proxy)
    if proxy is not None:
        options["proxies"] = {"https": proxy}
    if spec.tls.ca is not None:
        options["connection_verify"] = spec.tls.ca
    return options
