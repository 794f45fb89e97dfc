"""The outermost layer of the HTTP server: one `HttpContext` per request, and its end.

It performs the checks that need only the head of a request, refuses requests while the gateway drains, and
handles callers that disconnect. It is independent of a call's content.
"""

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from gateway.api.server.call_io import ASGIApp, CallIO, Receive, RefusalPace, Scope, Send
from gateway.api.server.in_flight import RETRY_AFTER_DRAIN_S, InFlight
from gateway.api.server.inference_api import InferenceApi
from gateway.api.server.paths import SLASH, RouteTable
from gateway.api.server.request_context import SERVICES_KEY, STATE_KEY, HttpContext
from gateway.api.server.responses import HttpReply, encode_headers
from gateway.config.schema import Cors, ListenerSettings
from gateway.errors import GatewayError, MalformedBody, NotFound, ShuttingDown, UnsupportedMedia
from gateway.events import Observe

if TYPE_CHECKING:
    # OpenTelemetry is loaded only where calls are traced.
    from gateway.telemetry.tracing import CallTraces

ALLOWED_METHODS = ("GET", "POST")
# A browser may send these without asking, so they are always allowed.
SAFELISTED_HEADERS = frozenset({"Accept", "Accept-Language", "Content-Language", "Content-Type"})
Move: TypeAlias = Callable[[Scope], None]
READS = frozenset({"GET", "HEAD"})
# Returns the address of a client, from that of its connection and the headers of its request.
AddressOf: TypeAlias = Callable[[str, Sequence[tuple[bytes, bytes]]], str]


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


@dataclass(frozen=True, slots=True)
class ServerParts:
    """Settings and collaborators of the middleware.

    api: for endpoints that answer without Litestar. services: of Litestar's handlers. address_of: of a client
    behind trusted proxies. body_bytes_max: `limits.body_bytes`. admin_port, manager_port: of `admin.listen`
    and `manager.listen`, if they exist. listeners: `listeners` by their ports. cors, traces: None if the
    configuration has no such section. moves: `Dialect.move` of those that have it. move_to_manager: replaces
    the path of a request to `manager.listen`.
    """

    routes: RouteTable
    api: InferenceApi
    services: object
    in_flight: InFlight
    body_bytes_max: int
    observe: Observe
    address_of: AddressOf
    admin_port: int | None = None
    manager_port: int | None = None
    listeners: Mapping[int, ListenerSettings] = field(default_factory=dict)
    cors: CorsPolicy | None = None
    traces: "CallTraces | None" = None
    refusals: RefusalPace = field(default_factory=RefusalPace)
    moves: Sequence[Move] = ()
    move_to_manager: Move = lambda _: None


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
        context = self._context(scope, receive, send)
        try:
            await self._answer(scope, context)
        finally:
            context.io.close()
            # They lead back to the request itself: its objects would wait for the cycle collector.
            scope.pop("extensions", None)
            scope.pop("state", None)
            context.finish(context.io.status)

    def _context(self, scope: Scope, receive: Receive, send: Send) -> HttpContext:
        """Return the context of a request, whose path may be one of another server's."""
        parts, (_, port) = self._parts, scope.get("server") or ("", None)
        if parts.manager_port is not None and port == parts.manager_port:
            parts.move_to_manager(scope)
        if scope["method"] in READS:
            for move in parts.moves:
                move(scope)
        target, client = parts.routes.parse(scope["path"]), scope.get("client")
        peer = client[0] if client else "unknown"
        address = parts.address_of(peer, scope["headers"])
        bytes_max = target.options.body_bytes_max or parts.body_bytes_max
        io = CallIO(scope, receive, send, parts.in_flight, bytes_max, address, parts.refusals)
        is_operators = parts.admin_port is not None and port in (parts.admin_port, parts.manager_port)
        context = HttpContext(
            scope,
            target,
            io,
            address,
            parts.observe,
            peer=peer,
            came_to_operators=is_operators,
            listener=None if port is None else parts.listeners.get(port),
        )
        io.headers.append((b"x-request-id", context.request_id.encode()))
        if parts.cors is not None:
            io.headers.extend(encode_headers(parts.cors.reply_headers(context.header(b"origin"))))
        if parts.traces is not None and not target.options.is_probe:
            context.begin_trace(parts.traces)
        return context

    async def _answer(self, scope: Scope, context: HttpContext) -> None:
        io, target, is_post = context.io, context.target, scope["method"] == "POST"
        try:
            self._check(scope, context)
        except GatewayError as error:
            await io.reply(context.failure(error))
            return
        if self._parts.cors is not None and scope["method"] == "OPTIONS" and context.header(b"origin"):
            await self._answer_preflight(self._parts.cors, context)
            return
        try:
            if target.options.answer is not None and is_post:
                await target.options.answer(context, self._parts.api)
            else:
                scope["path"] = target.path
                own = {STATE_KEY: context, SERVICES_KEY: self._parts.services}
                scope["state"] = {**scope.get("state", {}), **own}
                # A HEAD is a GET whose body is not sent (RFC 9110 §9.3.2).
                sent = {**scope, "method": "GET"} if io.is_head else scope
                await self._app(sent, io.receive, io.send)
        except asyncio.CancelledError:
            io.release_connection()
            await self._end_cancelled(context)
        finally:
            io.release_connection()

    def _check(self, scope: Scope, context: HttpContext) -> None:
        """Perform the checks that need only the head of a request.

        Raises: GatewayError.
        """
        target = context.target
        is_divided = self._parts.admin_port is not None and not target.options.on_both_listeners
        is_elsewhere = is_divided and target.options.for_operators is not context.came_to_operators
        if is_elsewhere or (context.listener is not None and target.options.for_operators):
            raise NotFound("there is nothing at this path on this listener")
        if not target.options.is_probe:
            context.io.enter()
        if SLASH in scope["path"] or (target.options.for_operators and _is_disguised(scope)):
            raise NotFound("there is nothing at this path")
        sent = context.by_name
        if sent.get(b"content-encoding", b"identity").lower() != b"identity":
            raise UnsupportedMedia("send the body without content-encoding: compressed bodies are not read")
        coding = sent.get(b"transfer-encoding", b"chunked").lower()
        if coding != b"chunked" or (context.repeats_headers and context.is_ambiguous(b"transfer-encoding")):
            raise MalformedBody("the only `transfer-encoding` of a body is chunked")
        if target.options.answer is None or scope["method"] != "POST":
            # An endpoint that runs a model does it after the key, and charges a body that is too large.
            context.io.check_length(context.header(b"content-length"))

    async def _answer_preflight(self, cors: CorsPolicy, context: HttpContext) -> None:
        """Answer a browser that asks whether a page may send a request."""
        io = context.io
        # The reply's own headers contain everything about CORS.
        del io.headers[1:]
        origin, method, headers = (
            context.header(name)
            for name in (b"origin", b"access-control-request-method", b"access-control-request-headers")
        )
        await io.reply(cors.preflight(origin, method, headers))

    async def _end_cancelled(self, context: HttpContext) -> None:
        """Record a request that was cancelled, and answer it if its caller is still there.

        Raises: CancelledError, if the cancellation came from outside the gateway.
        """
        io = context.io
        if io.caller_gone:
            io.note_cancelled()
            context.cancel()
        elif self._parts.in_flight.abandoned and not io.replying:
            error = ShuttingDown(
                "this gateway stopped before the call was done", retry_after_s=RETRY_AFTER_DRAIN_S
            )
            await io.reply(context.failure(error))
        else:
            context.cancel()
            raise asyncio.CancelledError


def _is_disguised(scope: Scope) -> bool:
    """Return whether a path would pass a proxy that compares the beginning of paths as they are sent.

    Such a proxy decodes no letters and merges no slashes. Names at the end of a path may be encoded.
    """
    path: str = scope["path"]
    sent = scope.get("raw_path", path.encode()).decode("latin-1")
    return "//" in sent or sent.split("/")[:3] != path.split("/")[:3]
