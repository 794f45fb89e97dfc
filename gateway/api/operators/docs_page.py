"""The page at /docs: the OpenAPI document as one page, without external files.

Each path has a form that sends a request to this gateway, and each with a body also a command for a shell
that sends its example. Style and script are parts of the page, and its policy allows no others.
"""

import asyncio
import base64
import hashlib
import shlex
from html import escape
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
from litestar import Request
from litestar.openapi.plugins import JsonRenderPlugin, OpenAPIRenderPlugin

from gateway.api.document.complete import completed

STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { margin: 0 auto; max-width: 60rem; padding: 1rem; }
h2 { margin: 2rem 0 .5rem; }
article { border-top: 1px solid color-mix(in srgb, currentColor 20%, transparent); padding: .5rem 0; }
h3 { font-size: 1rem; margin: 0; }
p { margin: .25rem 0; }
code, dt { font-family: ui-monospace, monospace; overflow-wrap: break-word; }
h3 code { font-weight: 400; }
dl { margin: .25rem 0 0 1rem; }
dt { font-weight: 600; }
dd { margin: 0 0 .25rem 1rem; overflow-wrap: break-word; }
summary { cursor: pointer; }
pre { background: color-mix(in srgb, currentColor 8%, transparent); margin: .25rem 0; padding: .5rem; }
pre { overflow-wrap: anywhere; white-space: pre-wrap; }
label { display: block; margin: .25rem 0; }
input, textarea { box-sizing: border-box; display: block; font: .9rem ui-monospace, monospace; width: 100%; }
form pre { max-height: 30rem; overflow: auto; }
@media (max-width: 30rem) { body { padding: .5rem; } h3 { font-size: .7rem; } }
"""
SCRIPT = (Path(__file__).parent / "page" / "docs.js").read_text()


def _digest(part: str) -> str:
    """Return the source expression of a part of the page for its policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()}'"


POLICY = (
    f"default-src 'none'; style-src {_digest(STYLE)}; script-src {_digest(SCRIPT)}; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
# A policy in the page cannot forbid frames. The page has no secrets, and changes with the release only.
DOCS_HEADERS = {
    "content-security-policy": f"{POLICY}; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
# Typed once for all forms.
KEY_FIELD = (
    '<p class="try" hidden><label>API key for the forms below; it stays on this page'
    '<input id="key" type="password" autocomplete="off" spellcheck="false"></label></p>'
)

Schemas: TypeAlias = dict[str, dict[str, Any]]
# Method, content and example of an operation → its paths.
Articles: TypeAlias = dict[tuple[str, str, str], list[str]]


_preparing = asyncio.Lock()


async def prepare_document(request: Request[Any, Any, Any]) -> None:
    """Build the document on a thread before it is first shown, because anybody may ask for it."""
    async with _preparing:
        await asyncio.to_thread(completed, request.app)


class CompleteJsonRenderPlugin(JsonRenderPlugin):
    """The document in JSON, completed and encoded when it is first asked for."""

    def __init__(self) -> None:
        super().__init__()
        self._rendered = b""

    def render(self, request: Request[Any, Any, Any], openapi_schema: dict[str, Any]) -> bytes:  # noqa: ARG002
        """Return the document in JSON."""
        if not self._rendered:
            self._rendered = super().render(request, completed(request.app))
        return self._rendered


class ReferenceRenderPlugin(OpenAPIRenderPlugin):
    """Page that lists every path, with a link to the whole document for tools that read it."""

    def __init__(self) -> None:
        super().__init__(path="/reference")
        self._rendered = b""

    def render(self, request: Request[Any, Any, Any], openapi_schema: dict[str, Any]) -> bytes:  # noqa: ARG002
        """Return the page in UTF-8. It is written once: anybody may ask for it, without a key."""
        if not self._rendered:
            self._rendered = self._page(self.get_openapi_json_route(request), completed(request.app))
        return self._rendered

    def _page(self, document_path: str, openapi_schema: dict[str, Any]) -> bytes:
        document = escape(document_path)
        info = openapi_schema["info"]
        title = escape(f"{info['title']} {info['version']}")
        return (
            '<!doctype html><html lang="en"><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f'<link rel="icon" href="data:,"><title>{title}</title><style>{STYLE}</style>'
            f"<h1>{title}</h1><p>Send a key as <b>Authorization: Bearer</b>. The commands need "
            "<code>GATEWAY_URL</code> and <code>GATEWAY_API_KEY</code>, and a model of yours for that of the "
            "example. The OpenAPI document, which most API tools read, has the replies too: "
            f'<a id="document" href="{document}">{document}</a>.</p>'
            f"{KEY_FIELD}{_sections(openapi_schema)}<script>{SCRIPT}</script></html>"
        ).encode()


def _sections(schema: dict[str, Any]) -> str:
    # A handler's paths differ in nothing else, and are shown together.
    groups: dict[str, Articles] = {tag["name"]: {} for tag in schema["tags"]}
    for path, item in schema["paths"].items():
        for method, operation in item.items():
            below = method.upper(), _content(operation, schema["components"]["schemas"]), _example(operation)
            groups[operation["tags"][0]].setdefault(below, []).append(path)
    return "".join(
        f"<h2>{escape(tag)}</h2>{_articles(articles)}" for tag, articles in groups.items() if articles
    )


def _articles(articles: Articles) -> str:
    return "".join(
        _article(method, content, sorted(paths, key=_place), example)
        for (method, content, example), paths in articles.items()
    )


def _place(path: str) -> tuple[bool, bool, str]:
    return path.startswith("/models/{"), not path.startswith("/v"), path


def _article(method: str, content: str, paths: list[str], example: str) -> str:
    heads = "".join(f"<h3>{escape(method)} <code>{escape(path)}</code></h3>" for path in paths)
    command = f"<pre>{escape(curl_command(paths[0], example))}</pre>" if example else ""
    return f"<article>{heads}{content}{command}{_form(method, paths[0], example)}</article>"


def _form(method: str, path: str, example: str) -> str:
    """Return a form that sends a request; the script shows it, because without one it does nothing."""
    name = escape(f"{method} {path}")
    body = (
        f'<label>Body<textarea name="body" rows="5">{escape(example)}</textarea></label>' if example else ""
    )
    return (
        f'<details class="try" hidden><summary>Try {name}</summary><form data-method="{escape(method)}">'
        f'<label>Path<input name="path" value="{escape(path)}"></label>{body}'
        f'<button aria-label="Send {name}">Send</button><pre tabindex="0" aria-live="polite" hidden></pre>'
        "</form></details>"
    )


def curl_command(path: str, example: str) -> str:
    """Return a command for a shell that sends a JSON body; address and key are in the environment.

    The address is not that of the request: its Host header, which the sender of a request chooses, would
    then decide where the key is sent.
    """
    headers = '-H "Authorization: Bearer $GATEWAY_API_KEY" -H "Content-Type: application/json"'
    return f'curl "$GATEWAY_URL{path}" ' + f"{headers} \\\n  -d {shlex.quote(example)}"


def _example(operation: dict[str, Any]) -> str:
    """Return the example of an operation's body as JSON; empty if it has none."""
    media = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    return msgspec.json.encode(media["example"]).decode() if "example" in media else ""


def _content(operation: dict[str, Any], schemas: Schemas) -> str:
    description = operation.get("description") or operation.get("summary") or ""
    paragraphs = "".join(f"<p>{escape(' '.join(text.split()))}</p>" for text in description.split("\n\n"))
    return paragraphs + _fields(operation, schemas)


def _fields(operation: dict[str, Any], schemas: Schemas) -> str:
    """Return the fields of the query and of the body, those that are required first."""
    fields = [
        (field["name"], field["schema"], field["required"])
        for field in operation.get("parameters", ())
        if field["in"] == "query"
    ]
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    body = _resolved(body, schemas)
    required = body.get("required", ())
    fields += [(name, kind, name in required) for name, kind in body.get("properties", {}).items()]
    if not fields:
        return ""
    ordered = sorted(fields, key=lambda field: not field[2])
    rows = "".join(_row(name, kind, schemas, needed=needed) for name, kind, needed in ordered)
    return f"<details><summary>{len(fields)} fields</summary><dl>{rows}</dl></details>"


def _row(name: str, kind: dict[str, Any], schemas: Schemas, *, needed: bool) -> str:
    type_text = escape(type_name(kind, schemas)) + (", required" if needed else "")
    meaning = kind.get("description") or _resolved(kind, schemas).get("description", "")
    return f"<dt>{escape(name)}</dt><dd>{type_text}{'<br>' * bool(meaning)}{escape(meaning)}</dd>"


def type_name(kind: dict[str, Any], schemas: Schemas) -> str:
    """Return the type of a field for a person, without null."""
    kind = _resolved(kind, schemas)
    if "enum" in kind:
        return " | ".join(str(value) for value in kind["enum"] if value is not None)
    if "oneOf" in kind:
        names = dict.fromkeys(type_name(member, schemas) for member in kind["oneOf"])
        return " | ".join(name for name in names if name != "null")
    match kind.get("type"):
        case "array":
            return f"list of ({type_name(kind.get('items', {}), schemas)})"
        case "object":
            return f"object {kind['title']}" if "title" in kind else "object"
        case str(name):
            return name
    return "any"


def _resolved(kind: dict[str, Any], schemas: Schemas) -> dict[str, Any]:
    return schemas[kind["$ref"].rpartition("/")[2]] if "$ref" in kind else kind
