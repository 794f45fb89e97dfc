"""The page at /docs: the OpenAPI document as one plain page, without scripts and external files."""

import base64
import hashlib
from collections import defaultdict
from html import escape
from typing import Any

from litestar import Request
from litestar.openapi.plugins import OpenAPIRenderPlugin

STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { margin: 0 auto; max-width: 60rem; padding: 1rem; }
h2 { margin: 2rem 0 .5rem; }
table { border-collapse: collapse; width: 100%; }
td { border-top: 1px solid color-mix(in srgb, currentColor 20%, transparent); padding: .35rem .5rem;
     vertical-align: top; overflow-wrap: anywhere; }
td:first-child { width: 4.5rem; font-weight: 600; }
code { font-family: ui-monospace, monospace; }
"""
STYLE_DIGEST = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
POLICY = f"default-src 'none'; style-src 'sha256-{STYLE_DIGEST}'; img-src data:; base-uri 'none'"


class ReferenceRenderPlugin(OpenAPIRenderPlugin):
    """Page that lists every path, with a link to the whole document for tools that read it."""

    def __init__(self) -> None:
        super().__init__(path="/reference")

    def render(self, request: Request[Any, Any, Any], openapi_schema: dict[str, Any]) -> bytes:
        """Return the page in UTF-8."""
        document = escape(self.get_openapi_json_route(request))
        info = openapi_schema["info"]
        title = escape(f"{info['title']} {info['version']}")
        return (
            '<!doctype html><html lang="en"><meta charset="utf-8">'
            f'<meta http-equiv="content-security-policy" content="{POLICY}">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f'<link rel="icon" href="data:,"><title>{title}</title><style>{STYLE}</style>'
            f"<h1>{title}</h1><p>Fields and answers of each path are in the OpenAPI document, which most API "
            f'tools read: <a href="{document}">{document}</a>.</p>{_sections(openapi_schema)}</html>'
        ).encode()


def _sections(schema: dict[str, Any]) -> str:
    rows: dict[str, list[str]] = defaultdict(list)
    for path, item in schema["paths"].items():
        for method, operation in item.items():
            description = operation.get("description") or operation.get("summary") or ""
            cells = f"<td>{escape(method.upper())}</td><td><code>{escape(path)}</code></td>"
            rows[operation["tags"][0]].append(f"<tr>{cells}<td>{escape(description)}</td></tr>")
    return "".join(
        f"<h2>{escape(tag)}</h2><table>{''.join(lines)}</table>" for tag, lines in sorted(rows.items())
    )
