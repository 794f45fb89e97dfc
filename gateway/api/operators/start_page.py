"""GET /, which people open in a browser and TEI's clients use as a health check, and TEI's OpenAPI path."""

from litestar import Response, get
from litestar.di import NamedDependency
from litestar.openapi.datastructures import ResponseSpec

from gateway.api.operators.status import StatusSource
from gateway.api.server.error_bodies import TEI, document_errors
from gateway.api.server.inference_api import InferenceApi
from gateway.api.server.request_context import RequestContext
from gateway.api.server.responses import EMPTY, NO_KEY, empty

FAILURES = document_errors(TEI)
MOVED = ResponseSpec(None, generate_examples=False, description="A redirect")
FOLLOWED = ResponseSpec(None, generate_examples=False, description="The document, after the redirect")
DOCUMENT = "/docs/openapi.json"


@get("/", responses={200: EMPTY, 303: MOVED} | FAILURES, tags=["TEI"], security=NO_KEY)
async def start(
    context: NamedDependency[RequestContext],
    api: NamedDependency[InferenceApi],
    watched: NamedDependency[StatusSource],
) -> Response[bytes]:
    """Send a browser to /ui, and answer others like /health.

    Where /ui is served on another address, a browser is sent to /docs.
    """
    if "text/html" in context.header(b"accept"):
        page = "/ui" if watched.config.admin.listen is None else "/docs"
        return _redirect(page, 303)
    api.check_health(None)
    return empty()


@get("/api-doc/openapi.json", responses={200: FOLLOWED, 307: MOVED}, tags=["TEI"], security=NO_KEY)
async def openapi_document() -> Response[bytes]:
    """Send clients of TEI to /docs/openapi.json."""
    return _redirect(DOCUMENT, 307)


def _redirect(path: str, status: int) -> Response[bytes]:
    headers = {"location": path, "vary": "accept"}
    return Response(b"", status_code=status, headers=headers, media_type="text/plain")


HANDLERS = [start, openapi_document]
