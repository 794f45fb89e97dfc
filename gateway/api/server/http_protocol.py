"""HTTP/1.1 of uvicorn with the bounds it lacks: time for a head, a body and a stalled reply; size of a head.

It is independent of the served application. Rule: an idle connection keeps resources no longer than these
bounds. `BoundedProtocol` is one connection. `BodyPace` is the time that its client has for a body, and
`LingeringClose` its end while the client may still be sending. `ConnectionHandle` is the connection as the
call on it sees it.
"""

import asyncio
import sys
from collections.abc import Callable, Collection, Sequence
from http import HTTPStatus
from typing import Any, Final, TypeAlias, cast

import httptools
import msgspec
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from gateway.api.server.client_tls import certificate_of
from gateway.api.server.connection_limit import NEW_S, ConnectionLimit
from gateway.api.server.in_flight import Backlog, InFlight, StalledReplyTimer
from gateway.tenants.client_certificate import ClientCertificate

# The ASGI extension that contains the `ConnectionHandle` of a call.
CONNECTION = "connection"
HTTP_TIMEOUT = 408
HTTP_UNAVAILABLE = 503
# Answered even while calls take all connections.
PROBE_PATHS = frozenset({"/livez", "/readyz", "/health"})
# Headers, and tokens of `connection`, that ask for a different protocol.
UPGRADING = frozenset({b"upgrade", b"http2-settings"})
# The end of every head, and of every chunked body.
BLANK_LINE = b"\r\n\r\n"

Received: TypeAlias = bytes | bytearray


class Refusal(msgspec.Struct, frozen=True):
    """The last reply on a connection, to a request that cannot be read."""

    status: int
    kind: str
    message: str

    @property
    def body(self) -> bytes:
        """The body of the reply. It is JSON, like every other."""
        return msgspec.json.encode(
            {"error": self.message, "error_type": "Validation", "message": self.message, "type": self.kind}
        )

    def encode(self) -> bytes:
        """Return the whole reply."""
        body = self.body
        retry = "retry-after: 1\r\n" if self.status == HTTP_UNAVAILABLE else ""
        head = (
            f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n{retry}connection: close\r\n\r\n"
        )
        return head.encode() + body


FULL = Refusal(HTTP_UNAVAILABLE, "gateway_full", "too many connections; try again")


class ConnectionHandle:
    """The connection of one call, past ASGI's messages.

    timed_out: the call's body did not come in time.
    """

    def __init__(self, protocol: "BoundedProtocol", cycle: RequestResponseCycle) -> None:
        self.protocol = protocol
        self._cycle = cycle
        self._on_lost: Callable[[], None] | None = None
        self.timed_out = False

    def answer(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes | memoryview) -> bool:
        """Write a reply in one system call, at a fraction of the cost of ASGI messages.

        headers: with `content-length`. Returns False if the reply has to be sent by ASGI messages: the client
        reads too slowly, or the connection closes with this reply.
        """
        cycle, protocol = self._cycle, self.protocol
        all_headers = [*cycle.default_headers, *headers]
        head = b"".join([STATUS_LINE[status], *[b"%b: %b\r\n" % header for header in all_headers], b"\r\n"])
        if not cycle.keep_alive or cycle.response_started or head.count(b"\n") != len(all_headers) + 2:
            return False
        if protocol.flow.write_paused and not protocol.is_closing():
            return False
        cycle.response_started = cycle.response_complete = True
        cycle.message_event.set()
        # A connection that was refused has had its last reply.
        if not protocol.is_closing():
            protocol.transport.writelines((head, body))
        cycle.on_response()
        return True

    def watch(self, on_lost: Callable[[], None] | None) -> None:
        """Have a function called if the connection closes before the reply; None for no function."""
        self._on_lost = on_lost

    def hold_back(self) -> None:
        """Drop what has come of the body and read no more of it: the reply is a refusal, and comes later."""
        self._cycle.body = bytearray()
        self.protocol.hold_back()

    def lose(self) -> None:
        """Record that the connection has closed, and report it if the call has no reply."""
        self._cycle.disconnected = not self._cycle.response_complete
        self._cycle.message_event.set()
        if self._cycle.disconnected and self._on_lost is not None:
            self._on_lost()

    def time_out(self) -> None:
        """Record that the call's body did not come in time."""
        self.timed_out = True


class BoundedProtocol(HttpToolsProtocol):
    """One connection. A timer runs while the client owes a head or a body, or reads slower than it is sent.

    One request is parsed at a time: the bytes after it are kept as they came until it is answered, and no
    more is read meanwhile. Therefore pipelined requests are answered in order, and one that cannot be read is
    refused after every request before it. A request that is answered before its body is complete is the last
    one of its connection.
    """

    head_timeout_s = 10.0
    body_timeout_s = 60.0
    # A client that reads no byte in this time has disconnected, or occupies memory on purpose.
    write_timeout_s = 30.0
    head_bytes_max = 64 * 1024
    # A line costs a hundred times its shortest form in memory.
    head_lines_max = 256
    # Sizes of chunks, their extensions and trailers, over as many bytes as the body has.
    framing_bytes_max = 64 * 1024

    # Bytes that the kernel has not taken yet before a reply counts as one that waits for its client.
    write_buffer_bytes = 16 * 1024
    # Shared by the connections of one server.
    in_flight = InFlight(sys.maxsize)
    limit = ConnectionLimit(sys.maxsize)

    # Initial values of each connection, because the constructor is uvicorn's.
    _read_timer: asyncio.TimerHandle | None = None
    # Whether a head is read now, whether any of it has come, and how much.
    _in_head = True
    _head_begun = False
    _head_bytes = 0
    _framing_bytes = 0
    # Bytes of the body that have come, and the time of one that has not come whole.
    _body_came = 0
    _pace: "BodyPace | None" = None
    # Bytes still owed of a body whose length was announced; 0 for a body in chunks.
    _body_bytes = 0
    # The last bytes of a part of a head or of a chunked body: its end may be split.
    _tail: Received = b""
    # The request that is not answered yet.
    _handle: ConnectionHandle | None = None
    # Counts what came after it.
    _kept: Backlog | None = None
    # Whether the connection is to persist after the request whose body is owed.
    _persists = False
    _refusal: Refusal | None = None
    for_probes = False
    # Whether the request in progress is refused, and its reply comes later.
    is_held_back = False
    # Of the client, read once for all its requests.
    certificate: ClientCertificate | None = None
    flow: "PipelineFlow"

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time for the head of the first request."""
        # What has come after a request that is not answered yet: at most what the event loop reads at once.
        self._rest = bytearray()
        super().connection_made(transport)
        self.certificate = certificate_of(transport)
        self.flow = PipelineFlow(self.transport, self._rest)
        transport.set_write_buffer_limits(self.write_buffer_bytes)
        self.backlog = Backlog(transport, self.loop, self.in_flight)
        self._stalls = StalledReplyTimer(transport, self.loop, self.write_timeout_s)
        self._lingering = LingeringClose(transport, self.loop)
        self._reply_transport = ReplyTransport(transport, self._close_after_reply)
        self._start_read_timer(self.head_timeout_s)
        self._accepted_s = self.loop.time()
        self.owner = f"address {self.client[0] if self.client else ''}"
        # uvicorn's set has more types of connections than this server.
        admission = self.limit.admit(self, cast("set[BoundedProtocol]", self.connections))
        if admission == "refused":
            self._end(FULL)
        elif admission == "for_probes":
            self.for_probes = True
            self.app = ProbesOnly(self.app)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers, and report the loss to calls without a reply."""
        self._stop_read_timer()
        self._stalls.cancel()
        self.backlog.end()
        self._lingering.cancel()
        self._reply_transport.detach()
        self._drop_requests()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feed the parser with one request, and keep what comes after it."""
        if self._lingering.begun:
            self._lingering.drop(len(data))
            return
        if self._rest:
            # The event loop had read it before the pause.
            self._rest += data
            return
        at, size = 0, len(data)
        while at < size and (end := self._end_of_piece(data, at)) > at:
            self._read(data if end - at == size else data[at:end])
            at = end
        if at < size and self._refusal is None and not self.is_closing():
            self._keep(data, at)
        # After the parsing: most requests come whole and need no timer.
        self._start_owed_timer()

    def _keep(self, data: bytes, at: int) -> None:
        """Keep bytes until the request before them is answered, and count them as a reply that waits."""
        self._rest += memoryview(data)[at:]
        self.flow.pause_reading()
        self._kept = self._kept or Backlog(self.transport, self.loop, self.in_flight, self._rest.__len__)
        self._kept.set_tenant(self.owner)
        self._kept.start()

    def _read_rest(self) -> None:
        """Feed the parser with the next request of those that came together."""
        while self._rest and (end := self._end_of_piece(self._rest, 0)):
            piece = bytes(self._rest[:end])
            del self._rest[:end]
            self._read(piece)
        if not self._rest:
            self._end_kept()
            if self._in_head and self._refusal is None:
                self.flow.resume_reading()
        self._start_owed_timer()

    def _end_of_piece(self, data: Received, at: int) -> int:
        """Return the end of what the parser may read at once: no head, body or set of trailers after another.

        The parser cannot stop within what it is given, and a request takes a hundred times its shortest form
        in memory. The result is `at` while nothing may be read.
        """
        if self._refusal is not None or self.is_closing():
            return at
        if not self._in_head:
            return min(len(data), at + self._body_bytes) if self._body_bytes else self._end_of_lines(data, at)
        if self._handle is not None:
            return at
        return min(self._end_of_lines(data, at), at + self.head_bytes_max - self._head_bytes)

    def _end_of_lines(self, data: Received, at: int) -> int:
        """Return the end of the next blank line, or of the data; its beginning may have come before."""
        split = (self._tail + data[at : at + 3]).find(BLANK_LINE) if self._tail else -1
        end = at + split - len(self._tail) if split >= 0 else data.find(BLANK_LINE, at)
        if split < 0 and end < 0:
            self._tail = (self._tail + data[max(at, len(data) - 3) :])[-3:]
            return len(data)
        self._tail = b""
        return end + len(BLANK_LINE)

    def _read(self, piece: bytes) -> None:
        """Feed the parser, but no more of a head or of framing than the bound."""
        if self._in_head:
            self._head_bytes += len(piece)
        elif not self._body_bytes:
            # `on_body` takes the body's own bytes off again.
            self._framing_bytes += len(piece)
        self._feed(piece)
        # Blank lines before a head count as one.
        if self._head_bytes or self._framing_bytes:
            self._check_head_and_framing()

    def is_closing(self) -> bool:
        """Return whether nothing that arrives is read as a request any more."""
        return self._lingering.begun or self.transport.is_closing()

    def _check_head_and_framing(self) -> None:
        """Refuse a head, or what surrounds a body, that has come to its bound."""
        if not self._in_head:
            # What a body has in excess of its framing is no credit for a later extension or trailer.
            self._framing_bytes = max(self._framing_bytes, 0)
            if self._framing_bytes > self.framing_bytes_max:
                self._refuse(431, "framing_too_large", "the trailers and chunk extensions are too large")
        elif self._head_bytes >= self.head_bytes_max:
            self._refuse(431, "head_too_large", f"the head is larger than {self.head_bytes_max} bytes")
        else:
            self._refuse_lines()

    def _refuse_lines(self) -> bool:
        """Refuse a head of too many lines; return whether it has them."""
        if not self._head_begun or len(self.headers) <= self.head_lines_max:
            return False
        self._refuse(431, "head_too_large", f"the head has more than {self.head_lines_max} lines")
        return True

    def _feed(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        while data:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as stopped:
                data = self._without_upgrade(data[stopped.args[0] :])
                continue
            except httptools.HttpParserError:
                if not self._refuse_lines():
                    self._refuse(400, "malformed_request", "this is not HTTP/1.1")
            return

    def _without_upgrade(self, rest: bytes) -> bytes:
        """Return the head that has come without its request for a different protocol, and the bytes after it.

        The server offers HTTP/1.1 only, and answers in it. The parser takes the bytes after such a head for
        the other protocol, and would read a body as requests.
        """
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._refuse(400, "malformed_request", "this is no proxy")
            return b""
        lines = [line for name, value in self.headers for line in _header_without_upgrade(name, value)]
        first = b"%b %b HTTP/%b\r\n" % (method, self.url, self.parser.get_http_version().encode())
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return b"".join([first, *lines, b"\r\n", rest])

    def on_message_begin(self) -> None:
        """Note that a head has begun."""
        if self._handle is not None:
            # Stops the parser: the end of the request before it was none of this protocol.
            raise ValueError
        super().on_message_begin()
        self._head_begun = True
        self._body_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a line of the head; drop a trailer, which must not act as a header."""
        if self._in_head:
            # uvicorn's own method, without a call for each line.
            name = name.lower()
            if name == b"expect" and value.lower() == b"100-continue":
                self.expect_100_continue = True
            elif name == b"content-length":
                # The parser refuses what is no number, as it does when this raises.
                self._body_bytes = int(value)
            self.headers.append((name, value))

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body; subtract twice its size from the framing if it came in a chunk.

        It was counted as framing.
        """
        if self._body_bytes:
            self._body_bytes -= len(body)
        else:
            self._framing_bytes -= 2 * len(body)
        self._body_came += len(body)
        cycle = self.cycle
        if cycle.response_complete:
            return
        # uvicorn's own method, without its question whether this is a WebSocket.
        cycle.body += body
        if len(cycle.body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        cycle.message_event.set()

    def on_headers_complete(self) -> None:
        """Hand the request to the application; the client owes the body next."""
        if self.parser.should_upgrade():
            return
        if len(self.headers) > self.head_lines_max:
            # Stops the parser, as a malformed target does below. The fault is then still in the head.
            raise ValueError
        super().on_headers_complete()
        self.cycle.transport = self._reply_transport  # type: ignore[assignment]
        self._in_head = self._head_begun = False
        self._head_bytes = self._framing_bytes = self._body_came = 0
        self._persists, self._pace = False, None
        self._stop_read_timer()
        self._handle = ConnectionHandle(self, self.cycle)
        self.scope["extensions"] = {CONNECTION: self._handle}  # type: ignore[dict-item]

    def on_message_complete(self) -> None:
        """Stop the timer: the client owes nothing until the next request begins."""
        if self.parser.should_upgrade():
            return
        self._in_head = True
        self._head_bytes = 0
        if self._persists and not self.cycle.response_started:
            self.cycle.keep_alive = True
        self._stop_read_timer()
        super().on_message_complete()
        # A large body has paused reading. A closed connection is only noticed while reading.
        self.flow.resume_reading()

    def _start_owed_timer(self) -> None:
        """Start the timer for the data that the client has to send next: a body, or the rest of a head."""
        if self._in_head and not self._head_begun:
            return
        if self._read_timer is None and self._refusal is None and not self.is_closing():
            if not self._in_head:
                pace = self._pace = self._pace or BodyPace(self.loop)
                pace.start(self.body_timeout_s)
                self._start_read_timer(pace.next_check_s())
                # A reply before the end of the body closes the connection, and its head announces that.
                self._persists = self._persists or self.cycle.keep_alive
                self.cycle.keep_alive = False
            else:
                self._start_read_timer(self.head_timeout_s)

    def pause_writing(self) -> None:
        """Check from now on that the client reads the data sent to it."""
        super().pause_writing()
        self.backlog.start()
        self._stalls.start()

    def resume_writing(self) -> None:
        """Count the reply as taken."""
        self.backlog.end()
        super().resume_writing()

    def on_response_complete(self) -> None:
        """Check that the client takes the rest of a reply, which would otherwise stay as long as it likes."""
        if self._lingering.begun:
            self.server_state.total_requests += 1
            self._stalls.start()
            return
        self._handle = None
        self.is_held_back = False
        super().on_response_complete()
        if self._refusal is not None:
            self._end(self._refusal)
        elif self._rest:
            # In a later turn: callers on other connections come first.
            self.loop.call_soon(self._read_rest)
        if self.transport.get_write_buffer_size():
            self._stalls.start()

    def claim(self, tenant: str) -> bool:
        """Count the connection as one of a tenant's; return False beyond its share."""
        self.owner = tenant
        return self.limit.claim(tenant)

    def hold_back(self) -> None:
        """Read no more of a body: the reply is a refusal, and comes later."""
        self.is_held_back = True
        self.flow.pause_reading()

    def waiting_rank(self) -> tuple[int, float] | None:
        """Return the place in the order of making room, lowest first; None while a request is served.

        First come connections without any request and those whose request is refused, then idle ones, then
        those that owe a body, then those that do not read their reply; among these the one whose timeout is
        next.
        """
        cycle: RequestResponseCycle | None = self.cycle
        timer = self._read_timer or self.timeout_keep_alive_task
        ends_s = timer.when() if timer is not None else 0.0
        if not self._in_head:
            ends_s = self._pace.ends_s if self._pace is not None else 0.0
        if cycle is None or self._lingering.begun or self.is_held_back:
            return 0, ends_s
        if self._in_head:
            if not cycle.response_complete:
                return None
            return (3 if self.flow.write_paused else 1), ends_s
        return (2, ends_s) if not self.flow.read_paused else None

    def is_new(self) -> bool:
        """Return whether the client has had no time yet to send a request."""
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is None and not self._head_begun and self.loop.time() < self._accepted_s + NEW_S

    def make_room(self) -> None:
        """Close the connection; a request whose body is owed is refused as if its time were over."""
        if self.flow.write_paused:
            self.transport.abort()
        elif self._in_head or self._lingering.begun or self.is_held_back:
            self.transport.close()
        else:
            self._refuse(HTTP_TIMEOUT, "request_timeout", "the gateway needs this connection for others")

    def _start_read_timer(self, seconds: float) -> None:
        self._stop_read_timer()
        self._read_timer = self.loop.call_later(seconds, self._on_read_timeout)

    def _stop_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _on_read_timeout(self) -> None:
        """Refuse a half-sent request, and close a silent connection without a reply."""
        self._read_timer = None
        pace = None if self._in_head else self._pace
        if self._in_head and not self._head_begun:
            self.transport.close()
        elif self.flow.read_paused:
            # The server itself has stopped reading.
            self._start_owed_timer()
        elif pace is not None and not pace.is_late(self._body_came, was_paused=self.flow.take_has_paused()):
            self._start_read_timer(pace.next_check_s())
        else:
            if self._handle is not None and not self._in_head:
                self._handle.time_out()
            self._refuse(408, "request_timeout", "the request was not complete in time")

    def _refuse(self, status: int, kind: str, message: str) -> None:
        """Read nothing more, and refuse after every complete request has been answered."""
        if self._refusal is not None or self.is_closing():
            return
        refusal = Refusal(status, kind, message)
        # uvicorn's annotation is wrong: there is no cycle before the first head is complete.
        cycle: RequestResponseCycle | None = self.cycle
        if self._in_head and cycle is not None and not cycle.response_complete:
            self._refusal = refusal
            self.flow.pause_reading()
        elif not self._in_head and cycle is not None and cycle.response_started:
            self.transport.close()
        else:
            self._end(refusal)

    def _end(self, refusal: Refusal) -> None:
        self.transport.write(refusal.encode())
        if refusal.status in {HTTP_TIMEOUT, HTTP_UNAVAILABLE}:
            # The client sends nothing that could reset the connection, or the gateway has none to spare.
            self.transport.close()
        else:
            self._linger()

    def _close_after_reply(self) -> None:
        """Close the connection for uvicorn, without a reset if the client still owes a body."""
        if self._in_head:
            self.transport.close()
        else:
            self._linger()

    def _linger(self) -> None:
        """Answer nothing more, and drop what arrives until the client has closed the connection."""
        if self.is_closing():
            return
        self._stop_read_timer()
        self._drop_requests()
        self._lingering.start()
        self.flow.resume_reading()

    def _end_kept(self) -> None:
        if self._kept is not None:
            self._kept.end()

    def _drop_requests(self) -> None:
        """Report the loss of the connection to the call without a reply, and forget what came after it."""
        self._rest.clear()
        self._end_kept()
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.lose()


class ProbesOnly:
    """Application of a connection for which there is room only while it carries one probe."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a probe, and close the connection; refuse everything else."""

        async def send_last(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        # The extension writes past `send_last`.
        scope.pop("extensions", None)
        if scope["path"] in PROBE_PATHS:
            await self._app(scope, receive, send_last)
            return
        body = FULL.body
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        headers.append((b"retry-after", b"1"))
        await send_last({"type": "http.response.start", "status": FULL.status, "headers": headers})
        await send_last({"type": "http.response.body", "body": body})


def bounded_protocol(in_flight: InFlight, connections_max: int) -> type[BoundedProtocol]:
    """Return the protocol of one server. in_flight: counts the bytes of its replies."""
    return type(
        "ServerProtocol",
        (BoundedProtocol,),
        {"in_flight": in_flight, "limit": ConnectionLimit(connections_max)},
    )


class PipelineFlow(FlowControl):
    """Flow control that resumes reading only when no pipelined request waits; uvicorn's always resumes.

    waiting: what has come of such requests.
    """

    def __init__(self, transport: asyncio.Transport, waiting: Collection[object]) -> None:
        super().__init__(transport)
        self._waiting = waiting
        self._has_paused = False

    def pause_reading(self) -> None:
        """Pause, and note it."""
        self._has_paused = True
        super().pause_reading()

    def take_has_paused(self) -> bool:
        """Return whether reading was paused since the last call."""
        has_paused, self._has_paused = self._has_paused, False
        return has_paused

    def resume_reading(self) -> None:
        """Resume, unless a pipelined request waits for its turn."""
        if not self._waiting:
            super().resume_reading()


def _header_without_upgrade(name: bytes, value: bytes) -> list[bytes]:
    """Return the line of a header without tokens that ask for a different protocol; none if only those."""
    if name == b"connection":
        tokens = [token.strip() for token in value.split(b",")]
        value = b", ".join([token for token in tokens if token.lower() not in UPGRADING])
        return [b"connection: %b\r\n" % value] if value else []
    return [] if name in UPGRADING else [b"%b: %b\r\n" % (name, value)]


class BodyPace:
    """Time that a client has for a body: in all, and by its rate in each interval.

    A body that hardly moves takes memory from others. ends_s: when the time in all is over; from then on only
    a fast body goes on, which is the upload of a large file.
    """

    check_s = 5.0
    bytes_per_s = 16 * 1024
    # As a body of 32 MiB needs about half of this to be in time, only uploads get here.
    fast_bytes_per_s = 1024 * 1024
    # A check this late was delayed by the gateway itself, which may not have read what has come.
    late_s = 1.0

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._since_s = 0.0
        self._check_at_s = 0.0
        self.ends_s = 0.0
        self._counted = 0

    def start(self, timeout_s: float) -> None:
        """Start the time of a body, of which some bytes have come with its head."""
        self._since_s = self._loop.time()
        self.ends_s = self._since_s + timeout_s

    def next_check_s(self) -> float:
        """Return the time until the next check."""
        now_s = self._loop.time()
        check_at_s = now_s + self.check_s
        self._check_at_s = min(check_at_s, self.ends_s) if now_s < self.ends_s else check_at_s
        return self._check_at_s - now_s

    def is_late(self, came: int, *, was_paused: bool) -> bool:
        """Return whether the time is over.

        came: bytes of the body so far. was_paused: the gateway did not read for a part of the interval.
        """
        now_s = self._loop.time()
        bytes_per_s = self.fast_bytes_per_s if now_s >= self.ends_s else self.bytes_per_s
        needed = bytes_per_s * (now_s - self._since_s)
        is_slow = came - self._counted < needed and not was_paused and now_s <= self._check_at_s + self.late_s
        self._since_s, self._counted = now_s, came
        return is_slow


class LingeringClose:
    """Close of a connection whose client may still be sending.

    A socket that is closed while bytes of the client are unread resets the connection, and the reset can
    destroy the reply before the client has read it. Therefore the rest is read and dropped, within bounds.

    begun: the connection is closing, and its bytes are dropped.
    """

    timeout_s = 5.0
    # A client that sends its whole body before it reads gets the reply, if the body is not much too large.
    bytes_max = 64 * 1024 * 1024

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._room_bytes = self.bytes_max
        self.begun = False

    def start(self) -> None:
        """Send the end of the stream after the reply, and wait for the client's."""
        self.begun = True
        self._timer = self._loop.call_later(self.timeout_s, self._transport.close)
        if self._transport.can_write_eof():
            self._transport.write_eof()

    def drop(self, size: int) -> None:
        """Count bytes that arrived and are dropped; close at the bound."""
        self._room_bytes -= size
        if self._room_bytes < 0:
            self._transport.close()

    def cancel(self) -> None:
        """Wait no more: the connection is lost."""
        if self._timer is not None:
            self._timer.cancel()


class ReplyTransport:
    """The transport as far as uvicorn's reply cycle uses it.

    close: called instead of the transport's own, until the connection is lost.
    """

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write: Final = transport.write
        self.is_closing: Final = transport.is_closing
        self.close = close
        self._own_close = transport.close

    def detach(self) -> None:
        """Close the transport itself from now on, to break a reference cycle."""
        self.close = self._own_close
