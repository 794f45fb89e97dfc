"""The outermost layer of the server: one `RequestContext` and one observation per request.

It performs the checks that need only the head of a request, refuses requests while the gateway drains, and
handles callers that disconnect. It is independent of a call's content.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from gateway.api.server.call_io import ASGIApp, CallIO, Receive, Scope, Send
from gateway.api.server.cors import CorsPolicy
from gateway.api.server.in_flight import RETRY_AFTER_DRAIN_S, InFlight
from gateway.api.server.paths import OTHER, SLASH, RouteTable
from gateway.api.server.refusal_pace import RefusalPace
from gateway.api.server.request_context import STATE_KEY, RequestContext
from gateway.api.server.responses import encode_headers
from gateway.errors import GatewayError, MalformedBody, NotFound, ShuttingDown, UnsupportedMedia
from gateway.events import CallFinished, Observe

if TYPE_CHECKING:
    # OpenTelemetry is loaded only where calls are traced.
    from gateway.telemetry.tracing import CallTrace, CallTraces

# The status that nginx logs where a client hung up first. It is never sent.
CALLER_GONE = 499
# Of the path of a request that no handler serves, in its log line.
PATH_CHARACTERS_MAX = 128


@dataclass(frozen=True, slots=True)
class ServerParts:
    """Settings and collaborators of the middleware.

    dependencies: collaborators of the handlers, by name. address_of: returns the address of a request's
    client, behind trusted proxies. body_bytes_max: `limits.body_bytes`. admin_port, manager_port: of
    `admin.listen` and `manager.listen`, if they exist. cors, traces: None if the configuration has no such
    section. moves: replace the paths of requests that a dialect knows by their headers or their listener.
    """

    routes: RouteTable
    dependencies: Mapping[str, Any]
    in_flight: InFlight
    body_bytes_max: int
    observe: Observe
    address_of: Callable[[RequestContext], str]
    admin_port: int | None = None
    cors: CorsPolicy | None = None
    traces: "CallTraces | None" = None
    manager_port: int | None = None
    refusals: RefusalPace = field(default_factory=RefusalPace)
    moves: Sequence[Callable[[Scope], None]] = ()


class Middleware:
    """ASGI around the application."""

    def __init__(self, app: ASGIApp, parts: ServerParts) -> None:
        self._app = app
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request, and pass everything else on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        parts = self._parts
        for move in parts.moves:
            move(scope)
        context = RequestContext(scope, parts.routes.parse(scope["path"]), parts.dependencies)
        if parts.admin_port is not None:
            context.came_to_operators = scope["server"][1] in (parts.admin_port, parts.manager_port)
        body_bytes_max = context.target.body_bytes_max or parts.body_bytes_max
        context.io = CallIO(scope, receive, send, parts.in_flight, body_bytes_max)
        context.io.headers.append((b"x-request-id", context.request_id.encode()))
        context.io.address, context.io.refusals = parts.address_of(context), parts.refusals
        if parts.cors is not None:
            context.io.headers += encode_headers(parts.cors.reply_headers(context.header(b"origin")))
        if parts.traces is not None:
            context.timeline.trace = _begin_trace(parts.traces, scope, context)
        try:
            await self._answer(scope, context)
        finally:
            context.io.release()
            # They lead back to the request itself: its objects would wait for the cycle collector.
            scope.pop("extensions", None)
            scope.pop("state", None)
            event = _finished(scope, context, context.io.address)
            if context.timeline.trace is not None:
                context.timeline.trace.finish(event)
            parts.observe(event)

    async def _answer(self, scope: Scope, context: RequestContext) -> None:
        io = context.io
        try:
            self._check(scope, context)
        except GatewayError as error:
            await io.reply(context.failure(error))
            return
        if self._parts.cors is not None and scope["method"] == "OPTIONS" and context.header(b"origin"):
            await self._answer_preflight(self._parts.cors, context)
            return
        try:
            if context.target.answer is not None and scope["method"] == "POST":
                await context.target.answer(context)
            else:
                scope["path"] = context.target.path
                scope["state"] = {**scope.get("state", {}), STATE_KEY: context}
                # A HEAD is a GET whose body is not sent (RFC 9110 §9.3.2).
                sent = {**scope, "method": "GET"} if io.is_head else scope
                await self._app(sent, io.receive, io.send)
        except asyncio.CancelledError:
            io.release_connection()
            await self._end_cancelled(context)
        finally:
            io.release_connection()

    def _check(self, scope: Scope, context: RequestContext) -> None:
        """Perform the checks that need only the head of a request.

        Raises: GatewayError.
        """
        target = context.target
        is_divided = self._parts.admin_port is not None and not target.on_both_listeners
        if is_divided and target.for_operators is not context.came_to_operators:
            raise NotFound("there is nothing at this path on this listener")
        if not target.is_probe:
            context.io.enter()
        if SLASH in scope["path"] or (target.for_operators and _is_disguised(scope)):
            raise NotFound("there is nothing at this path")
        if context.header(b"content-encoding", "identity").lower() != "identity":
            raise UnsupportedMedia("send the body without content-encoding: compressed bodies are not read")
        coding = context.header(b"transfer-encoding", "chunked").lower()
        if coding != "chunked" or context.is_ambiguous(b"transfer-encoding"):
            raise MalformedBody("the only `transfer-encoding` of a body is chunked")
        if target.answer is None or scope["method"] != "POST":
            # An endpoint that runs a model does it after the key, and charges a body that is too large.
            context.io.check_length(context.header(b"content-length"))

    async def _answer_preflight(self, cors: CorsPolicy, context: RequestContext) -> None:
        """Answer a browser that asks whether a page may send a request."""
        io = context.io
        # The reply's own headers contain everything about CORS.
        del io.headers[1:]
        origin, method, headers = (
            context.header(name)
            for name in (b"origin", b"access-control-request-method", b"access-control-request-headers")
        )
        await io.reply(cors.preflight(origin, method, headers))

    async def _end_cancelled(self, context: RequestContext) -> None:
        """Record a request that was cancelled, and answer it if its caller is still there.

        Raises: CancelledError, if the cancellation came from outside the gateway.
        """
        io = context.io
        if io.caller_gone:
            io.status, context.outcome = CALLER_GONE, "cancelled"
        elif self._parts.in_flight.abandoned and not io.replying:
            error = ShuttingDown(
                "this gateway stopped before the call was done", retry_after_s=RETRY_AFTER_DRAIN_S
            )
            await io.reply(context.failure(error))
        else:
            context.outcome = "cancelled"
            raise asyncio.CancelledError


def _begin_trace(traces: "CallTraces", scope: Scope, context: RequestContext) -> "CallTrace | None":
    """Start the trace of a request; probes leave none."""
    if context.target.is_probe:
        return None
    parent, state = context.header(b"traceparent"), context.header(b"tracestate")
    name = f"{scope['method']} {context.target.label}"
    return traces.begin(name, context.timeline.started_s, parent, state)


def _finished(scope: Scope, context: RequestContext, address: str) -> CallFinished:
    timeline, tenant = context.timeline, context.tenant
    return CallFinished(
        request_id=context.request_id,
        method=scope["method"],
        route=context.target.label,
        path=_escaped(scope["path"]) if context.target.label == OTHER else None,
        status=context.io.status,
        outcome=context.outcome,
        reason=context.reason,
        duration_s=time.perf_counter() - timeline.started_s,
        tenant=None if tenant is None else tenant.name,
        model=timeline.model,
        inputs=context.inputs,
        tokens=context.tokens,
        operation=timeline.operation,
        stages=timeline.laps,
        is_bulk=timeline.is_bulk,
        replicas=timeline.attempts.replicas,
        attempts=timeline.attempts.attempts,
        upstream_status=timeline.attempts.upstream_status,
        upstream_words=timeline.attempts.upstream_words,
        trace_id=None if timeline.trace is None else timeline.trace.trace_id,
        key_id=None if tenant is None else tenant.key_id or None,
        address=address,
    )


def _is_disguised(scope: Scope) -> bool:
    """Return whether a path would pass a proxy that compares the beginning of paths as they are sent.

    Such a proxy decodes no letters and merges no slashes. Names at the end of a path may be encoded.
    """
    path: str = scope["path"]
    sent = scope.get("raw_path", path.encode()).decode("latin-1")
    return "//" in sent or sent.split("/")[:3] != path.split("/")[:3]


def _escaped(path: str) -> str:
    """Return the beginning of a path in characters that are safe in a log line."""
    return quote(path[:PATH_CHARACTERS_MAX], errors="replace")
