"""/ui: a page of plain HTML, one script and one stylesheet, which lie in `page/` beside this file.

They hold nothing secret, so they are open wherever they are served: a browser sends no key with a navigation.
All that they show is asked for by the script, with the key that a person has typed, of paths that check it.
"""

from pathlib import Path

from litestar import Response, get
from litestar.openapi.datastructures import ResponseSpec

from gateway.api.server.error_bodies import documented

FAILURES = documented("tei")
FOLDER = Path(__file__).parent / "page"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
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
    # A page of another release than its script would be broken.
    "cache-control": "no-cache",
}
HTML, SCRIPT, STYLE, ICON = "text/html", "text/javascript", "text/css", "image/svg+xml"


def served(media_type: str, description: str) -> dict[int, ResponseSpec]:
    """How a file of the page is documented."""
    found = ResponseSpec(str, generate_examples=False, description=description, media_type=media_type)
    return {200: found} | FAILURES


def answered(name: str, media_type: str) -> Response[bytes]:
    """A file of the page."""
    return Response(FILES[name], headers=HEADERS, media_type=media_type)


FILES = {one.name: one.read_bytes() for one in FOLDER.iterdir()}


@get("/ui", responses=served(HTML, "The page"), tags=["Operators"])
async def page() -> Response[bytes]:
    """What the gateway is doing, and a place to try it, for a person with a browser."""
    return answered("index.html", HTML)


@get("/ui/page.js", responses=served(SCRIPT, "The page's script"), tags=["Operators"])
async def script() -> Response[bytes]:
    """The script of /ui."""
    return answered("page.js", SCRIPT)


@get("/ui/page.css", responses=served(STYLE, "The page's stylesheet"), tags=["Operators"])
async def style() -> Response[bytes]:
    """The stylesheet of /ui."""
    return answered("page.css", STYLE)


@get("/ui/icon.svg", responses=served(ICON, "The page's icon"), tags=["Operators"])
async def icon() -> Response[bytes]:
    """The icon of /ui."""
    return answered("icon.svg", ICON)


HANDLERS = [page, script, style, icon]
