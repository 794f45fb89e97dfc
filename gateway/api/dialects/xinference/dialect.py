"""Xinference: GET /v1/cluster/auth. Its other paths are OpenAI's, Cohere's and /v1/models.

Source: xinference-client 4.1, RESTfulClient.
"""

import msgspec
from litestar import get

from gateway.api.server.dialect import Dialect
from gateway.api.server.error_bodies import OPENAI
from gateway.api.server.paths import route_options
from gateway.api.server.responses import NO_KEY


class ClusterAuth(msgspec.Struct):
    """Answer about keys. auth: whether requests need one; a client sends none if it is false."""

    auth: bool


@get("/v1/cluster/auth", tags=["Cohere and Jina"], opt=route_options(errors=OPENAI), security=NO_KEY)
async def cluster_auth() -> ClusterAuth:
    """Report that requests need a key, as Xinference's client asks before it sends its own.

    Needs no key.
    """
    return ClusterAuth(auth=True)


DIALECT = Dialect(handlers=[cluster_auth])
