"""GET /, which people open in a browser and TEI's clients use as a health check, and TEI's OpenAPI path."""

import asyncio
from functools import lru_cache
from typing import Any

import msgspec
from litestar import Litestar, Request, Response, get
from litestar.di import NamedDependency
from litestar.openapi.datastructures import ResponseSpec

from gateway.api.document.complete import completed
from gateway.api.operators.docs_page import prepare_document
from gateway.api.operators.status import StatusSource
from gateway.api.server.error_bodies import TEI, document_errors
from gateway.api.server.inference_api import InferenceApi
from gateway.api.server.request_context import HttpContext
from gateway.api.server.responses import EMPTY, NO_KEY, empty

FAILURES = document_errors(TEI)
MOVED = ResponseSpec(None, generate_examples=False, description="A redirect")
DOCUMENT = ResponseSpec(dict[str, Any], generate_examples=False, description="The OpenAPI document")


@get("/", responses={200: EMPTY, 303: MOVED} | FAILURES, tags=["TEI"], security=NO_KEY)
async def start(
    context: NamedDependency[HttpContext],
    api: NamedDependency[InferenceApi],
    watched: NamedDependency[StatusSource],
) -> Response[bytes]:
    """Send a browser to /ui, and answer others like /health.

    Where /ui is served on another address only, a browser is sent to /docs.
    """
    if "text/html" in context.header(b"accept"):
        has_console = watched.config.admin.listen is None or context.came_to_operators
        page = "/ui" if has_console else "/docs"
        headers = {"location": page, "vary": "accept"}
        return Response(b"", status_code=303, headers=headers, media_type="text/plain")
    api.check_health(None)
    return empty()


@get(["/api-doc/openapi.json", "/openapi.json"], responses={200: DOCUMENT}, tags=["TEI"], security=NO_KEY)
async def openapi_document(request: Request[Any, Any, Any]) -> Response[bytes]:
    """Return the OpenAPI document of all dialects, where TEI, vLLM and Infinity have theirs."""
    await prepare_document(request)
    return Response(await asyncio.to_thread(_document, request.app), media_type="application/json")


@lru_cache(maxsize=1)
def _document(application: Litestar) -> bytes:
    """Return the document as JSON, which is encoded once because no key is needed to read it."""
    return msgspec.json.encode(completed(application))


HANDLERS = [start, openapi_document]
