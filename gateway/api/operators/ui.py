"""Pages for browsers: /ui, the console, from the folder `page/` next to this file; /; the OpenAPI document.

The files contain no secrets and need no key, because a browser sends no key with a navigation. The script
requests everything it shows from paths that check the key that the user has typed.
"""

from functools import cache
from pathlib import Path
from typing import Any

from litestar import Request, Response, get
from litestar.di import NamedDependency
from litestar.openapi.datastructures import ResponseSpec

from gateway.api.operators import docs_page
from gateway.api.operators.docs_page import Packed
from gateway.api.operators.status import StatusSource
from gateway.api.server.error_bodies import TEI, document_errors
from gateway.api.server.inference_api import InferenceApi
from gateway.api.server.paths import route_options
from gateway.api.server.request_context import HttpContext
from gateway.api.server.responses import EMPTY, NO_KEY, empty

FAILURES = document_errors(TEI)
PAGE = route_options(for_operators=True)
FOLDER = Path(__file__).parent / "page"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    # A page and a script of different releases would not work together.
    "cache-control": "no-cache",
}
HTML, SCRIPT, STYLE, ICON = "text/html", "text/javascript", "text/css", "image/svg+xml"


def file_spec(media_type: str, description: str) -> dict[int, ResponseSpec]:
    """Return the documentation of a file's response."""
    spec = ResponseSpec(str, generate_examples=False, description=description, media_type=media_type)
    return {200: spec} | FAILURES


def file_response(request: Request[Any, Any, Any], name: str, media_type: str) -> Response[bytes]:
    """Return a file of the page, with its security headers."""
    return _file(name).response(request, media_type, HEADERS)


@cache
def _file(name: str) -> Packed:
    return Packed.of((FOLDER / name).read_bytes())


@get("/ui", responses=file_spec(HTML, "The page"), tags=["Operators"], opt=PAGE, security=NO_KEY)
async def page(request: Request[Any, Any, Any]) -> Response[bytes]:
    """Show the console.

    For a person with a browser.
    """
    return file_response(request, "index.html", HTML)


@get(
    "/ui/page.js",
    responses=file_spec(SCRIPT, "The page's script"),
    tags=["Operators"],
    opt=PAGE,
    security=NO_KEY,
)
async def script(request: Request[Any, Any, Any]) -> Response[bytes]:
    """Return the script of /ui."""
    return file_response(request, "page.js", SCRIPT)


@get(
    "/ui/page.css",
    responses=file_spec(STYLE, "The page's stylesheet"),
    tags=["Operators"],
    opt=PAGE,
    security=NO_KEY,
)
async def style(request: Request[Any, Any, Any]) -> Response[bytes]:
    """Return the stylesheet of /ui."""
    return file_response(request, "page.css", STYLE)


@get(
    "/ui/icon.svg",
    responses=file_spec(ICON, "The page's icon"),
    tags=["Operators"],
    opt=PAGE,
    security=NO_KEY,
)
async def icon(request: Request[Any, Any, Any]) -> Response[bytes]:
    """Return the icon of /ui."""
    return file_response(request, "icon.svg", ICON)


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
    return await docs_page.document_response(request)


HANDLERS = [page, script, style, icon, start, openapi_document, *docs_page.HANDLERS]
