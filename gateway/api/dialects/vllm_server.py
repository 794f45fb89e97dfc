"""vLLM's GET /version, which its clients and other gateways query."""

import msgspec
from litestar import get
from litestar.di import NamedDependency

from gateway import __version__
from gateway.api.server.error_bodies import VLLM, document_errors
from gateway.api.server.inference_api import InferenceApi
from gateway.api.server.paths import route_options
from gateway.api.server.request_context import RequestContext


class Version(msgspec.Struct):
    """Release of the gateway."""

    version: str


@get("/version", responses=document_errors(VLLM), tags=["vLLM"], opt=route_options(dialect=VLLM))
async def version(context: NamedDependency[RequestContext], api: NamedDependency[InferenceApi]) -> Version:
    """Return the release of the gateway, in the form of vLLM's.

    Any valid key may ask.
    """
    api.authenticator.authenticate(context)
    return Version(__version__)


HANDLERS = [version]
