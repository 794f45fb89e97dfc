"""State of one HTTP request, from its head to its last byte."""

import logging
from collections.abc import Mapping
from typing import Any

from litestar import Request

from gateway.api.server.call_context import CallContext
from gateway.api.server.call_io import CallIO, Scope
from gateway.api.server.error_bodies import render_error
from gateway.api.server.error_translation import as_gateway_error
from gateway.api.server.paths import Target
from gateway.api.server.responses import HttpReply
from gateway.errors import Internal

logger = logging.getLogger(__name__)

# The one key of the ASGI scope that the gateway sets: Litestar hands handlers nothing else.
STATE_KEY = "context"


class RequestContext(CallContext):
    """One HTTP request.

    target: of its path. dialect: whose errors the caller reads; on a path that dialects share, the body
    decides it. dependencies: collaborators of the handlers, by name. query: of its URL. rows: of the texts of
    an Arrow stream (`api/wire/arrow.py`), None for any other body. came_to_operators: to `admin.listen` or
    `manager.listen`, where operators have a listener of their own.
    """

    io: CallIO
    rows: Any = None
    came_to_operators = False

    def __init__(self, scope: Scope, target: Target, dependencies: Mapping[str, Any]) -> None:
        client = scope.get("client")
        super().__init__(scope["headers"], client[0] if client else "unknown")
        self.target = target
        self.dialect = target.dialect
        self.dependencies = dependencies
        self.http_version: str = scope["http_version"]
        self.query: bytes = scope.get("query_string", b"")

    def failure(self, error: Exception) -> HttpReply:
        """Return the reply that reports an error in the caller's dialect, and log a bug."""
        failure = as_gateway_error(error)
        self.outcome, self.reason = failure.kind, failure.reason
        if self.rows is not None:
            failure.name_rows(self.rows.texts)
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
