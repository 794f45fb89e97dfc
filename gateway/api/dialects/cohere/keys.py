"""Cohere: POST /v1/check-api-key, by which its clients check a key before they use it.

Source: cohere-python 7.3.1, `CheckApiKeyResponse`; those in other languages have the same.
"""

import msgspec
from litestar import post
from litestar.di import NamedDependency

from gateway.api.dialects.cohere.errors import COHERE
from gateway.api.server.error_bodies import document_errors
from gateway.api.server.inference_api import InferenceApi
from gateway.api.server.paths import route_options
from gateway.api.server.request_context import RequestContext


class CheckApiKeyResponse(msgspec.Struct):
    """valid: always true; any other key is refused with 401. organization_id: the tenant. owner_id: null."""

    valid: bool
    organization_id: str
    owner_id: None = None


@post(
    "/v1/check-api-key",
    status_code=200,
    responses=document_errors(COHERE),
    tags=["Cohere and Jina"],
    opt=route_options(errors=COHERE),
)
async def check_api_key(
    context: NamedDependency[RequestContext], api: NamedDependency[InferenceApi]
) -> CheckApiKeyResponse:
    """Check that the key of the request is valid.

    Costs nothing.
    """
    tenant = api.authenticator.authenticate(context)
    return CheckApiKeyResponse(valid=True, organization_id=tenant.name)


HANDLERS = [check_api_key]
