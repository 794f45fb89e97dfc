"""The page at /docs and its files: a browser of the OpenAPI document, which its script fetches.

The files contain no secrets and need no key. They are packed once, like the document, because anybody may ask
for them. The page names its files relative to its own address, so that it also works below a path of a proxy.
"""

import asyncio
import gzip
import hashlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
from litestar import Litestar, Request, Response, get
from litestar.openapi.datastructures import ResponseSpec
from litestar.openapi.plugins import JsonRenderPlugin

from gateway.api.document.complete import completed
from gateway.api.server.error_bodies import TEI, document_errors
from gateway.api.server.responses import NO_KEY
from gateway.errors import NotFound

FOLDER = Path(__file__).parent / "page"
# Address of a page as it was sent, to which the names of its files are relative → what its files are below.
PAGES = {b"/docs": "docs/", b"/docs/": "", b"/docs/reference": ""}
HTML, SCRIPT, STYLE, JSON = "text/html", "text/javascript", "text/css", "application/json"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
# Browsers ask whether their copies are current: files of different releases would not work together.
DOCS_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
    "vary": "accept-encoding",
}


class Packed(msgspec.Struct, frozen=True):
    """A file in plain bytes and in gzip, with the entity tag of its content."""

    plain: bytes
    small: bytes
    etag: str

    @classmethod
    def of(cls, content: bytes) -> "Packed":
        """Pack a content."""
        etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        return cls(content, gzip.compress(content, mtime=0), etag)

    def response(
        self, request: Request[Any, Any, Any], media_type: str, policy: Mapping[str, str] = DOCS_HEADERS
    ) -> Response[bytes]:
        """Return the form that a browser asks for: nothing if its copy is current, gzip where it takes it.

        policy: headers of the page's security.
        """
        headers = {**policy, "etag": self.etag}
        if self.etag in request.headers.get("if-none-match", ""):
            return Response(b"", status_code=304, headers=headers, media_type=media_type)
        if "gzip" not in request.headers.get("accept-encoding", ""):
            return Response(self.plain, headers=headers, media_type=media_type)
        headers["content-encoding"] = "gzip"
        return Response(self.small, headers=headers, media_type=media_type)


@lru_cache(maxsize=4)
def _page(files: str, console: str) -> Packed:
    """Return the page whose files are below an address, with a link to the console if there is one."""
    text = (FOLDER / "docs.html").read_text()
    return Packed.of(text.replace("{files}", files).replace("{console}", console).encode())


@lru_cache(maxsize=2)
def _file(name: str) -> Packed:
    return Packed.of((FOLDER / name).read_bytes())


def page_response(request: Request[Any, Any, Any], *, has_console: bool) -> Response[bytes]:
    """Return the page at /docs, and at /docs/reference, its older address.

    has_console: the console is served at the address that the request came to. Raises: NotFound.
    """
    path = request.scope["raw_path"].partition(b"?")[0]
    if path == b"/docs/reference/":
        # Relative: the gateway does not know below which path a proxy serves it.
        return Response(b"", status_code=308, headers={"location": "../reference"}, media_type="text/plain")
    # The router takes other spellings, such as //docs, for the same page, which would find no file.
    if (files := PAGES.get(path)) is None:
        raise NotFound("there is no page at this address; the documentation is at /docs")
    console = "ui" if path == b"/docs" else "../ui"
    return _page(files, console if has_console else "").response(request, HTML)


_preparing = asyncio.Lock()


async def document_response(request: Request[Any, Any, Any]) -> Response[bytes]:
    """Return the document. It is built on a thread when it is first shown, because anybody may ask for it."""
    async with _preparing:
        document = await asyncio.to_thread(_document, request.app)
    return document.response(request, JSON)


@lru_cache(maxsize=1)
def _document(application: Litestar) -> Packed:
    return Packed.of(msgspec.json.encode(completed(application)))


# Litestar makes routes of these; `answer` replies before their handlers, which would build the document.
ROUTES = JsonRenderPlugin(path=["/reference", "/openapi.json"])


async def answer(request: Request[Any, Any, Any], *, has_console: bool) -> Response[bytes] | None:
    """Return the page or the document, as their path says; None at a path without either."""
    path = request.scope["path"].rstrip("/")
    if path == "/docs/openapi.json":
        return await document_response(request)
    return page_response(request, has_console=has_console) if path in {"/docs", "/docs/reference"} else None


def _spec(media_type: str, description: str) -> dict[int, ResponseSpec]:
    spec = ResponseSpec(str, generate_examples=False, description=description, media_type=media_type)
    return {200: spec} | document_errors(TEI)


@get("/docs/docs.js", responses=_spec(SCRIPT, "The page's script"), tags=["TEI"], security=NO_KEY)
async def docs_script(request: Request[Any, Any, Any]) -> Response[bytes]:
    """Return the script of /docs."""
    return _file("docs.js").response(request, SCRIPT)


@get("/docs/docs.css", responses=_spec(STYLE, "The page's stylesheet"), tags=["TEI"], security=NO_KEY)
async def docs_style(request: Request[Any, Any, Any]) -> Response[bytes]:
    """Return the stylesheet of /docs."""
    return _file("docs.css").response(request, STYLE)


HANDLERS = [docs_script, docs_style]
