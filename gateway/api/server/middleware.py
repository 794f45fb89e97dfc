"""The outermost layer: request ids, bounds that come before any parsing, drain, callers that hang up, and
the one observation.

Knows no dialect but through `failures`; decides nothing about a call's content.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from litestar.config.cors import CORSConfig

from gateway.api.server.error_bodies import plain_headers, rendered
from gateway.api.server.http_protocol import CONNECTION, ConnectionHandle
from gateway.api.server.paths import SLASH, dialect_of, is_for_operators, settled, template_of
from gateway.api.server.request_context import STATE_KEY, RequestContext, request_id_from
from gateway.errors import BodyTooLarge, GatewayError, NotFound, ShuttingDown, UnsupportedMedia
from gateway.events import CallFinished, Observe
from gateway.in_flight import RETRY_AFTER_DRAIN_S, InFlight

if TYPE_CHECKING:
    # OpenTelemetry is loaded only where calls are traced.
    from gateway.telemetry.tracing import CallTrace, CallTraces

# ASGI's own types: plain mappings, which any server and any framework agree on.
Message: TypeAlias = MutableMapping[str, Any]
Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
ASGIApp: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

# Answered while draining too: whoever asks them wants to know just that.
PROBES = frozenset({"/livez", "/readyz", "/health", "/metrics", "/admin/status"})
# Asked by whoever starts and watches this process, on either listener.
LIVENESS = frozenset({"/livez", "/readyz"})
# What nginx logs where a client hung up first; nobody reads it on the wire.
CALLER_GONE = 499
LENGTH_DIGITS_MAX = 18


class Middleware:
    """ASGI around the application.

    body_bytes: `limits.body_bytes`. admin_port: operators' own. cors: which pages may read what is refused
    here; the application says it on all that it answers itself. traces: of calls, where they are traced.
    """

    def __init__(
        self,
        app: ASGIApp,
        in_flight: InFlight,
        body_bytes: int,
        observe: Observe,
        admin_port: int | None = None,
        cors: CORSConfig | None = None,
        traces: "CallTraces | None" = None,
    ) -> None:
        self._app = app
        self._in_flight = in_flight
        self._body_bytes = body_bytes
        self._observe = observe
        self._admin_port = admin_port
        self._cors = cors
        self._traces = traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """HttpReply one HTTP call; anything else is passed on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        client = scope.get("client")
        path = scope["path"]
        context = RequestContext(
            "",
            template_of(path),
            scope["headers"],
            client[0] if client else "unknown",
            dialect_of(path),
            scope["http_version"],
        )
        context.request_id = request_id_from(context.header(b"x-request-id"))
        wire = CallIO(context, receive, send, self._in_flight)
        if self._cors is not None:
            context.readable_by = plain_headers(_readable_by(context.header(b"origin"), self._cors))
        if self._traces is not None:
            context.timeline.trace = _begun(self._traces, scope, context)
        started_s = time.perf_counter()
        try:
            await self._answer(scope, wire)
        finally:
            wire.release()
            # They lead back to the call itself: what is left of it would wait for the collector.
            scope.pop("extensions", None)
            event = _finished(scope, context, time.perf_counter() - started_s)
            if context.timeline.trace is not None:
                context.timeline.trace.finish(event)
            self._observe(event)

    async def _answer(self, scope: Scope, wire: "CallIO") -> None:
        path = scope["path"]
        try:
            if self._admin_port is not None:
                _check_side(path, operators=scope["server"][1] == self._admin_port)
            self._check(path, wire)
        except GatewayError as error:
            wire.context.outcome = error.kind
            await _send_failure(error, wire)
            return
        scope["path"] = settled(path)
        line: ConnectionHandle | None = scope.get("extensions", {}).get(CONNECTION)
        if line is not None:
            wire.hold(line)
            scope["extensions"] = {CONNECTION: wire}
        scope["state"] = {**scope.get("state", {}), STATE_KEY: wire.context}
        try:
            await self._app(scope, wire.receive, wire.send)
        except asyncio.CancelledError:
            wire.let_go()
            await self._cut_off(wire)
        finally:
            wire.let_go()

    async def _cut_off(self, wire: "CallIO") -> None:
        """What becomes of a call that was cancelled; raises where nobody here did it."""
        if wire.caller_gone:
            wire.context.status, wire.context.outcome = CALLER_GONE, "cancelled"
        elif self._in_flight.abandoned and not wire.answering:
            error = ShuttingDown(
                "this gateway stopped before the call was done", retry_after_s=RETRY_AFTER_DRAIN_S
            )
            wire.context.outcome = error.kind
            await _send_failure(error, wire)
        else:
            wire.context.outcome = "cancelled"
            raise asyncio.CancelledError

    def _check(self, path: str, wire: "CallIO") -> None:
        """What can be refused by the head of a request alone. Raises: GatewayError."""
        if path not in PROBES and not path.endswith("/health"):
            wire.enter()
        if SLASH in path:
            raise NotFound("there is nothing at this path")
        context = wire.context
        if context.header(b"content-encoding", "identity").lower() != "identity":
            raise UnsupportedMedia("send the body without content-encoding: compressed bodies are not read")
        length = context.header(b"content-length").lstrip("0")
        # As text first: Python refuses to make a number of thousands of digits.
        if length.isdigit() and (len(length) > LENGTH_DIGITS_MAX or int(length) > self._body_bytes):
            raise BodyTooLarge("the body is larger than this gateway takes")


def _check_side(path: str, *, operators: bool) -> None:
    """What operators call is served on their listener alone, and nothing else there. Raises: NotFound."""
    if path not in LIVENESS and is_for_operators(path) is not operators:
        raise NotFound("there is nothing at this path on this listener")


class CallIO:
    """One call's receive and send, with what they hold of the gateway's permits."""

    def __init__(self, context: RequestContext, receive: Receive, send: Send, in_flight: InFlight) -> None:
        self.context = context
        self.caller_gone = False
        self._receive = receive
        self._send = send
        self._in_flight = in_flight
        self.answering = False
        self._line: ConnectionHandle | None = None
        self._cancel: Callable[[], object] | None = None
        self._held_bytes = 0

    def enter(self) -> None:
        """Take a permit for this request."""
        self._in_flight.enter()
        running = asyncio.current_task()
        assert running is not None
        self._cancel = running.cancel
        self._in_flight.cancels.add(self._cancel)

    def hold(self, line: ConnectionHandle) -> None:
        """By which the call came."""
        self._line = line

    def let_go(self) -> None:
        """The answer is whole: what becomes of the connection from here on is no hanging up."""
        if self._line is not None:
            self._line.gone = None

    async def receive(self) -> Message:
        """Receive the next ASGI message and hold the bytes of its body."""
        if self._line is not None:
            # From here on; what is asked without a body is done to its end.
            self._line.gone = self._gone
        message = await self._receive()
        if message["type"] == "http.disconnect":
            # In the middle of its body: there is nobody to answer.
            self.caller_gone = True
            raise asyncio.CancelledError
        if message["type"] == "http.request":
            # A permit for what has come, not for what was announced: announcing costs a caller nothing.
            self._hold_bytes(len(message["body"]))
        return message

    async def send(self, message: Message) -> None:
        """Send an ASGI message; add the headers of every reply."""
        if message["type"] == "http.response.start":
            message["headers"] = self._begin(message["status"], message["headers"])
            if self._in_flight.draining:
                # What comes next on this connection would be refused: the client opens another, elsewhere.
                message["headers"].append((b"connection", b"close"))
        elif not message.get("more_body", False):
            self.let_go()
        await self._send(message)

    def answer(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> bool:
        """As the line's own, which it stands for inside the application."""
        if self._line is None or self._in_flight.draining:
            return False
        if not self._line.answer(status, self._begin(status, headers), body):
            return False
        self.let_go()
        return True

    def _begin(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        self.answering = True
        self.context.status = status
        return [*headers, (b"x-request-id", self.context.request_id.encode())]

    def release(self) -> None:
        """Return the permit and the held bytes."""
        self._in_flight.release(self._held_bytes)
        if self._cancel is not None:
            self._in_flight.cancels.discard(self._cancel)
            self._in_flight.leave()

    def _gone(self) -> None:
        self.caller_gone = True
        if self._cancel is not None:
            self._cancel()

    def _hold_bytes(self, size: int) -> None:
        self._in_flight.hold(size)
        self._held_bytes += size


async def _send_failure(error: GatewayError, wire: CallIO) -> None:
    status, body, headers = rendered(error, wire.context.dialect)
    headers["content-length"] = str(len(body))
    plain = plain_headers(headers) + wire.context.readable_by
    await wire.send({"type": "http.response.start", "status": status, "headers": plain})
    await wire.send({"type": "http.response.body", "body": body, "more_body": False})


def _readable_by(origin: str, cors: CORSConfig) -> dict[str, str]:
    """What lets a page of that origin read an answer that the application never gave."""
    if not origin or not cors.is_origin_allowed(origin):
        return {}
    allowed = {name.lower(): value for name, value in cors.simple_headers.items()}
    return {"access-control-allow-origin": origin, "vary": "Origin", **allowed}


def _begun(traces: "CallTraces", scope: Scope, context: RequestContext) -> "CallTrace | None":
    """A call's trace; whoever only watches leaves none."""
    path = scope["path"]
    if path in PROBES or path.endswith("/health"):
        return None
    parent, state = context.header(b"traceparent"), context.header(b"tracestate")
    name = f"{scope['method']} {context.route}"
    return traces.begin(name, context.timeline.started_s, parent, state)


def _finished(scope: Scope, context: RequestContext, duration_s: float) -> CallFinished:
    timeline = context.timeline
    return CallFinished(
        request_id=context.request_id,
        method=scope["method"],
        route=context.route,
        status=context.status,
        outcome=context.outcome,
        duration_s=duration_s,
        tenant=timeline.tenant,
        model=timeline.model,
        inputs=context.inputs,
        tokens=context.tokens,
        operation=timeline.operation,
        stages=timeline.laps,
        trace_id=None if timeline.trace is None else timeline.trace.trace_id,
    )
