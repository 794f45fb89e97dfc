"""Requests to an issuer: its description, its keys, and the exchange of a code for a token.

Rule: redirects are not followed, a reply has a bound, and every address is checked before it is used: all
but the issuer's own come from its description.
"""

from collections.abc import Mapping
from urllib.parse import urlencode, urlsplit

import msgspec

from backends.contract import TlsFiles
from backends.contract.errors import BackendError
from backends.http.client import ConnectionOptions, UpstreamClient, UpstreamResponse
from gateway.config.access_checks import issuer_address_problem, issuer_key
from gateway.config.schema import IssuerSettings

DISCOVERY_PATH = "/.well-known/openid-configuration"
# The largest descriptions and key sets of hosted issuers have some 20 KB.
DOCUMENT_BYTES_MAX = 256 * 1024
# Of one request, with the connection.
REQUEST_TIMEOUT_S = 5.0
HEADERS = {"accept": "application/json", "user-agent": "embedding-gateway"}
FORM = "application/x-www-form-urlencoded"


class IssuerFault(Exception):
    """An issuer cannot be reached, or its reply cannot be used; the message is for the operator's log."""


class Description(msgspec.Struct, frozen=True):
    """Endpoints of an issuer, from its description. None: it has no such endpoint."""

    issuer: str
    jwks_uri: str
    authorization_endpoint: str | None = None
    token_endpoint: str | None = None
    end_session_endpoint: str | None = None


async def fetch_description(settings: IssuerSettings) -> Description:
    """Return the checked description of an issuer. Raises: IssuerFault."""
    address = issuer_key(settings.issuer) + DISCOVERY_PATH
    try:
        description = msgspec.json.decode(await _fetch(address, settings), type=Description)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise IssuerFault(f"its description cannot be used: {error}") from error
    if issuer_key(description.issuer) != issuer_key(settings.issuer):
        raise IssuerFault(f"its description is that of another issuer, {description.issuer[:200]!r}")
    is_local = settings.issuer.startswith("http://")
    for name in Description.__struct_fields__:
        address = getattr(description, name)
        if address is not None and (problem := issuer_address_problem(address, may_be_http=is_local)):
            raise IssuerFault(f"its description has an unusable `{name}`: {problem}")
    return description


async def fetch_keys(address: str, settings: IssuerSettings) -> bytes:
    """Return the key set of an issuer, undecoded. Raises: IssuerFault."""
    return await _fetch(address, settings)


async def post_form(address: str, form: Mapping[str, str], settings: IssuerSettings) -> UpstreamResponse:
    """Send a form to an endpoint and return the reply, of any status. Raises: IssuerFault."""
    return await _send(address, settings, urlencode(form).encode("ascii"))


async def _fetch(address: str, settings: IssuerSettings) -> bytes:
    response = await _send(address, settings)
    if response.status != 200:
        raise IssuerFault(f"{urlsplit(address).path} answered with status {response.status}")
    return response.body


async def _send(address: str, settings: IssuerSettings, form: bytes | None = None) -> UpstreamResponse:
    parts = urlsplit(address)
    options = ConnectionOptions(tls=TlsFiles(ca=settings.ca), reply_bytes_max=DOCUMENT_BYTES_MAX)
    client = UpstreamClient(f"{parts.scheme}://{parts.netloc}", HEADERS, options)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    try:
        if form is None:
            return await client.get(path, REQUEST_TIMEOUT_S)
        return await client.post(path, form, REQUEST_TIMEOUT_S, FORM)
    except BackendError as error:
        # The client calls every server a replica.
        raise IssuerFault(str(error).replace("replica", "issuer")) from error
    finally:
        await client.aclose()
