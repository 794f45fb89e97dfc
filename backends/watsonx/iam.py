"""Access tokens of IBM Cloud, which its identity service gives for an API key."""

from urllib.parse import urlencode

import msgspec

from backends.contract import ReplicaSpec
from backends.contract.errors import CredentialRefused, ReplicaFailed
from backends.http.answers import decode_json
from backends.http.client import countdown
from backends.http.credentials import (
    FETCH_TIMEOUT_S,
    AccessToken,
    BearerToken,
    TokenSource,
    without_secrets,
)
from backends.http.egress import OpenClient
from backends.http.statuses import status_error

FORM = "application/x-www-form-urlencoded"
GRANT = "urn:ibm:params:oauth:grant-type:apikey"


class Token(msgspec.Struct, frozen=True):
    """Reply of the identity service. expires_in: seconds."""

    access_token: str
    expires_in: float = 3600.0


def iam_token(spec: ReplicaSpec, address: str, api_key: str, open_client: OpenClient) -> BearerToken:
    """Return an authorizer with the tokens of an API key. address: of the identity service."""
    own = msgspec.structs.replace(spec, address=address, headers={"accept": "application/json"})
    client = open_client(own, None)
    body = urlencode({"grant_type": GRANT, "apikey": api_key}).encode()

    async def fetch() -> AccessToken[str]:
        remaining_s = countdown(FETCH_TIMEOUT_S)
        response = await client.post("/identity/token", body, remaining_s(), FORM)
        if response.status in {400, 401, 403}:
            # Its words may repeat the key.
            raise CredentialRefused("IBM Cloud gives no access token for the API key").with_facts(
                upstream_status=str(response.status)
            )
        if response.status != 200:
            words = without_secrets(response.body, [api_key])
            raise status_error(msgspec.structs.replace(response, body=words))
        try:
            token = decode_json(response.body, Token)
        except ReplicaFailed:
            # Its words may repeat the key, or have a token.
            raise ReplicaFailed("IBM Cloud's answer to the API key could not be read") from None
        return AccessToken(token.access_token, token.expires_in)

    return BearerToken(TokenSource(fetch), client.aclose)
