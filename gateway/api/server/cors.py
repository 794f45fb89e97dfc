"""CORS: the pages of other origins that may send requests and read replies. Pure."""

import re

from gateway.api.server.responses import HttpReply
from gateway.config.schema import Cors

ALLOWED_METHODS = ("GET", "POST")
# A browser may send these without asking, so they are always allowed.
SAFELISTED_HEADERS = frozenset({"Accept", "Accept-Language", "Content-Language", "Content-Type"})


class CorsPolicy:
    """The `cors` section of the configuration, applied to requests. A `*` in an origin matches any text."""

    def __init__(self, settings: Cors) -> None:
        self._any_origin = "*" in settings.origins
        patterns = [".*".join(map(re.escape, origin.split("*"))) for origin in settings.origins]
        self._allowed = re.compile("|".join(patterns))
        self._max_age_s = settings.max_age_s

    def reply_headers(self, origin: str) -> dict[str, str]:
        """Return the headers that let a page of this origin read a reply; none if it may not."""
        if not self._allows(origin):
            return {}
        return {
            "access-control-allow-origin": "*" if self._any_origin else origin,
            "vary": "Origin",
            "access-control-expose-headers": "*",
        }

    def preflight(self, origin: str, method: str, headers: str) -> HttpReply:
        """Answer a browser that asks whether a page may send a request.

        method, headers: the values of `access-control-request-method` and `-headers`, empty if not sent.
        """
        refusals = ["method"] if method and method not in ALLOWED_METHODS else []
        refusals += [] if self._allows(origin) else ["Origin"]
        if refusals:
            text = f"Disallowed CORS {', '.join(refusals)}"
            return HttpReply(text.encode(), {}, "text/plain; charset=utf-8", 400)
        allowed = {
            "access-control-max-age": str(self._max_age_s),
            "access-control-allow-origin": "*" if self._any_origin else origin,
            "access-control-allow-methods": ", ".join(ALLOWED_METHODS),
        }
        if not self._any_origin:
            allowed["vary"] = "Origin"
        requested = {name.strip() for name in headers.split(",")} - {""}
        if requested:
            allowed["access-control-allow-headers"] = ", ".join(sorted(requested | SAFELISTED_HEADERS))
        return HttpReply(b"", allowed, status=204)

    def _allows(self, origin: str) -> bool:
        return bool(origin) and (self._any_origin or self._allowed.fullmatch(origin) is not None)
