"""State of one HTTP request, from its head to its last byte."""

import logging
import re
import secrets
from collections.abc import Mapping
from typing import Any

from litestar import Request

from gateway.api.server.call_io import CallIO, Scope
from gateway.api.server.error_bodies import render_error
from gateway.api.server.error_translation import as_gateway_error
from gateway.api.server.paths import Target
from gateway.api.server.responses import HttpReply
from gateway.errors import Internal, InvalidInput
from gateway.tenants.keyring import Tenant
from gateway.timeline import Timeline

logger = logging.getLogger(__name__)

REQUEST_ID_CHARACTERS_MAX = 128
# No spaces: the next field of a log line begins after one.
REQUEST_ID = re.compile(r"[!-~]+")
# The one key of the ASGI scope that the gateway sets: Litestar hands handlers nothing else.
STATE_KEY = "context"


class RequestContext:
    """One request. Filled while it is answered, read when it is over.

    target: of its path. headers: as sent, names in lower case. address: of the peer of the
    connection. dialect: whose errors the caller reads; on a path that dialects share, the body decides it.
    dependencies: collaborators of the handlers, by name.
    """

    io: CallIO

    def __init__(self, scope: Scope, target: Target, dependencies: Mapping[str, Any]) -> None:
        client = scope.get("client")
        self.target = target
        self.dialect = target.dialect
        self.dependencies = dependencies
        self.http_version: str = scope["http_version"]
        self.headers: list[tuple[bytes, bytes]] = scope["headers"]
        self.address: str = client[0] if client else "unknown"
        self._by_name = dict(self.headers)
        self.request_id = request_id_from(self.header(b"x-request-id"))
        self.timeline = Timeline()
        # The tenant of its key, once that is known.
        self.tenant: Tenant | None = None
        self.outcome = "ok"
        self.inputs = 0
        self.tokens = 0

    def header(self, name: bytes, missing: str = "") -> str:
        """Return a header's value, the last one if it was sent several times, or `missing`."""
        value = self._by_name.get(name)
        return missing if value is None else value.decode("latin-1")

    def timeout_s(self) -> float | None:
        """Return the time that the caller allows, None if it sets no limit.

        Raises: InvalidInput.
        """
        if b"x-timeout-s" not in self._by_name:
            return None
        value = self.header(b"x-timeout-s")
        try:
            seconds = float(value) if "_" not in value else 0.0
        except ValueError:
            seconds = 0.0
        if not 0 < seconds < float("inf"):
            raise InvalidInput("x-timeout-s must be a positive number of seconds", param="x-timeout-s")
        return seconds

    def is_bulk(self) -> bool:
        """Return whether the request yields to interactive ones.

        Raises: InvalidInput.
        """
        priority = self.header(b"x-priority", "interactive").lower()
        if priority not in ("interactive", "bulk"):
            raise InvalidInput("x-priority is interactive or bulk", param="x-priority")
        return priority == "bulk"

    def failure(self, error: Exception) -> HttpReply:
        """Return the reply that reports an error in the caller's dialect, and log a bug."""
        failure = as_gateway_error(error)
        self.outcome = failure.kind
        if isinstance(failure, Internal):
            logger.error("call %s failed", self.request_id, exc_info=error)
        return render_error(failure, self.dialect)


def context_of(scope: Mapping[str, Any]) -> RequestContext:
    """Return the context of a request from its ASGI scope."""
    # The scope is an untyped mapping by ASGI's definition; this is the one place that reads it.
    context: RequestContext = scope["state"][STATE_KEY]
    return context


def context_of_request(request: Request[Any, Any, Any]) -> RequestContext:
    """Return the context, as a dependency of handlers that Litestar calls."""
    return context_of(request.scope)


def request_id_from(sent: str) -> str:
    """Return the caller's own id if it is fit for headers and logs, else a new one."""
    if sent and len(sent) <= REQUEST_ID_CHARACTERS_MAX and REQUEST_ID.fullmatch(sent):
        return sent
    return secrets.token_hex(16)
