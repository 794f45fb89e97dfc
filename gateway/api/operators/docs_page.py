"""The page at /docs: the OpenAPI document as one plain page, without scripts and external files."""

import base64
import hashlib
from html import escape
from typing import Any, TypeAlias

from litestar import Request
from litestar.openapi.plugins import JsonRenderPlugin, OpenAPIRenderPlugin

from gateway.api.document.complete import TAGS, complete

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
"""
STYLE_DIGEST = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
POLICY = f"default-src 'none'; style-src 'sha256-{STYLE_DIGEST}'; img-src data:; base-uri 'none'"

Schemas: TypeAlias = dict[str, dict[str, Any]]


class CompleteJsonRenderPlugin(JsonRenderPlugin):
    """The document in JSON, completed when it is first asked for."""

    def render(self, request: Request[Any, Any, Any], openapi_schema: dict[str, Any]) -> bytes:
        """Return the document in JSON."""
        return super().render(request, complete(openapi_schema))


class ReferenceRenderPlugin(OpenAPIRenderPlugin):
    """Page that lists every path, with a link to the whole document for tools that read it."""

    def __init__(self) -> None:
        super().__init__(path="/reference")

    def render(self, request: Request[Any, Any, Any], openapi_schema: dict[str, Any]) -> bytes:
        """Return the page in UTF-8."""
        complete(openapi_schema)
        document = escape(self.get_openapi_json_route(request))
        info = openapi_schema["info"]
        title = escape(f"{info['title']} {info['version']}")
        return (
            '<!doctype html><html lang="en"><meta charset="utf-8">'
            f'<meta http-equiv="content-security-policy" content="{POLICY}">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f'<link rel="icon" href="data:,"><title>{title}</title><style>{STYLE}</style>'
            f"<h1>{title}</h1><p>Send a key as <b>Authorization: Bearer</b>. The OpenAPI document, which "
            f'most API tools read, has the answers too: <a href="{document}">{document}</a>.</p>'
            f"{_sections(openapi_schema)}</html>"
        ).encode()


def _sections(schema: dict[str, Any]) -> str:
    # A handler's paths differ in nothing else, and are shown together.
    groups: dict[str, dict[tuple[str, str], list[str]]] = {tag: {} for tag in TAGS}
    for path, item in schema["paths"].items():
        for method, operation in item.items():
            below = method.upper(), _content(operation, schema["components"]["schemas"])
            groups.setdefault(operation["tags"][0], {}).setdefault(below, []).append(path)
    return "".join(
        f"<h2>{escape(tag)}</h2>{''.join(_article(*below, paths) for below, paths in articles.items())}"
        for tag, articles in groups.items()
        if articles
    )


def _article(method: str, content: str, paths: list[str]) -> str:
    ordered = sorted(paths, key=lambda path: (path.startswith("/models/{"), not path.startswith("/v"), path))
    heads = "".join(f"<h3>{escape(method)} <code>{escape(path)}</code></h3>" for path in ordered)
    return f"<article>{heads}{content}</article>"


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
    rows = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(type_name(kind, schemas))}{', required' if needed else ''}</dd>"
        for name, kind, needed in sorted(fields, key=lambda field: not field[2])
    )
    return f"<details><summary>{len(fields)} fields</summary><dl>{rows}</dl></details>"


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
