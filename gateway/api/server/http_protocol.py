"""HTTP/1.1 of uvicorn with the bounds it lacks: time for a head, a body and a stalled reply; size of a head.

It is independent of the served application. Rule: an idle connection keeps resources no longer than these
bounds.
"""

import asyncio
import contextlib
import fcntl
import struct
import termios
from collections import deque
from collections.abc import Callable, Collection, Sequence

import httptools
import msgspec
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

# The ASGI extension that contains the `ConnectionHandle` of a call.
CONNECTION = "connection"
# Headers, and tokens of `connection`, that ask for a different protocol.
UPGRADING = frozenset({b"upgrade", b"http2-settings"})


class Refusal(msgspec.Struct, frozen=True):
    """The last reply on a connection, to a request that cannot be read."""

    status: int
    kind: str
    message: str

    def encode(self) -> bytes:
        """Return the whole reply. Its body is JSON, like every other."""
        body = msgspec.json.encode(
            {"error": self.message, "error_type": "Validation", "message": self.message, "type": self.kind}
        )
        head = (
            f"HTTP/1.1 {self.status} {_PHRASES[self.status]}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        return head.encode() + body


class ConnectionHandle:
    """The connection of one call, past ASGI's messages. on_lost: called if it closes before the reply."""

    def __init__(self, protocol: "BoundedProtocol", cycle: RequestResponseCycle) -> None:
        self._protocol = protocol
        self._cycle = cycle
        self.on_lost: Callable[[], None] | None = None

    def answer(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> bool:
        """Write a reply in one system call, at a fraction of the cost of ASGI messages.

        headers: with `content-length`. Returns False if the reply has to be sent by ASGI messages: the client
        reads too slowly, or the connection closes with this reply.
        """
        cycle, protocol = self._cycle, self._protocol
        all_headers = [*cycle.default_headers, *headers]
        head = b"".join([STATUS_LINE[status], *[b"%b: %b\r\n" % header for header in all_headers], b"\r\n"])
        if not cycle.keep_alive or cycle.response_started or head.count(b"\n") != len(all_headers) + 2:
            return False
        if protocol.flow.write_paused and not protocol.transport.is_closing():
            return False
        cycle.response_started = cycle.response_complete = True
        cycle.message_event.set()
        if not protocol.transport.is_closing():
            protocol.transport.writelines((head, body))
        cycle.on_response()
        return True

    def lose(self) -> None:
        """Record that the connection has closed, and report it if the call has no reply."""
        self._cycle.disconnected = not self._cycle.response_complete
        if self._cycle.disconnected and self.on_lost is not None:
            self.on_lost()


class BoundedProtocol(HttpToolsProtocol):
    """One connection. A timer runs while the client owes a head or a body, or reads slower than it is sent.

    Pipelined requests are answered in order, and no more is read while one of them waits for its turn. A
    request that cannot be read is refused after every request before it has been answered.
    """

    head_timeout_s = 10.0
    body_timeout_s = 60.0
    # A client that reads no byte in this time has disconnected, or occupies memory on purpose.
    write_timeout_s = 30.0
    head_bytes_max = 64 * 1024

    # Initial values of each connection, because the constructor is uvicorn's.
    _read_timer: asyncio.TimerHandle | None = None
    # Whether a head is read now, whether any of it has come, and how much.
    _in_head = True
    _head_begun = False
    _head_bytes = 0
    _refusal: Refusal | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time for the head of the first request."""
        # Of the requests that have come and are not answered, in order.
        self._handles: deque[ConnectionHandle] = deque()
        super().connection_made(transport)
        self.flow = PipelineFlow(self.transport, self.pipeline)
        self._stalls = StalledReplyTimer(transport, self.loop, self.write_timeout_s)
        self._start_read_timer(self.head_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers, and report the loss to calls without a reply."""
        self._stop_read_timer()
        self._stalls.cancel()
        while self._handles:
            self._handles.popleft().lose()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feed the parser, but no more of a head than the bound."""
        while data and self._refusal is None and not self.transport.is_closing():
            room = self.head_bytes_max - self._head_bytes if self._in_head else len(data)
            piece, data = data[:room], data[room:]
            self._head_bytes += len(piece) if self._in_head else 0
            self._feed(piece)
            if self._in_head and self._head_bytes >= self.head_bytes_max:
                self._refuse(431, "head_too_large", f"the head is larger than {self.head_bytes_max} bytes")
        # After the parsing: most requests come whole and need no timer.
        self._start_owed_timer()

    def _feed(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        while data:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as stopped:
                data = self._without_upgrade(data[stopped.args[0] :])
                continue
            except httptools.HttpParserError:
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
        super().on_message_begin()
        self._head_begun = True

    def on_headers_complete(self) -> None:
        """Hand the request to the application; the client owes the body next."""
        if self.parser.should_upgrade():
            return
        # Raises if the target is malformed. The fault is then still in the head.
        super().on_headers_complete()
        self._in_head = self._head_begun = False
        self._head_bytes = 0
        self._stop_read_timer()
        self._handles.append(ConnectionHandle(self, self.cycle))
        self.scope["extensions"] = {CONNECTION: self._handles[-1]}  # type: ignore[dict-item]

    def on_message_complete(self) -> None:
        """Stop the timer: the client owes nothing until the next request begins."""
        if self.parser.should_upgrade():
            return
        self._in_head = True
        self._head_bytes = 0
        self._stop_read_timer()
        super().on_message_complete()
        # A large body has paused reading. A closed connection is only noticed while reading.
        self.flow.resume_reading()

    def _start_owed_timer(self) -> None:
        """Start the timer for the data that the client has to send next: a body, or the rest of a head."""
        if self._read_timer is None and self._refusal is None and not self.transport.is_closing():
            if not self._in_head:
                self._start_read_timer(self.body_timeout_s)
            elif self._head_begun:
                self._start_read_timer(self.head_timeout_s)

    def pause_writing(self) -> None:
        """Check from now on that the client reads the data sent to it."""
        super().pause_writing()
        self._stalls.start()

    def on_response_complete(self) -> None:
        """Check that the client takes the rest of a reply, which would otherwise stay as long as it likes."""
        was_last = not self.pipeline
        if self._handles:
            self._handles.popleft()
        super().on_response_complete()
        if self._refusal is not None and was_last:
            self._end(self._refusal)
        if self.transport.get_write_buffer_size():
            self._stalls.start()

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
        if self._in_head and not self._head_begun:
            self.transport.close()
        elif self.flow.read_paused:
            # The server itself has stopped reading.
            self._start_owed_timer()
        else:
            self._refuse(408, "request_timeout", "the request was not complete in time")

    def _refuse(self, status: int, kind: str, message: str) -> None:
        """Read nothing more, and refuse after every complete request has been answered."""
        refusal = Refusal(status, kind, message)
        # uvicorn's annotation is wrong: there is no cycle before the first head is complete.
        cycle: RequestResponseCycle | None = self.cycle
        waits_for_its_turn = not self._in_head and bool(self.pipeline)
        if waits_for_its_turn:
            # Half a request in the pipeline: its turn never comes.
            self.pipeline.popleft()
        if waits_for_its_turn or (self._in_head and cycle is not None and not cycle.response_complete):
            self._refusal = refusal
            self.flow.pause_reading()
        elif not self._in_head and cycle is not None and cycle.response_started:
            self.transport.close()
        else:
            self._end(refusal)

    def _end(self, refusal: Refusal) -> None:
        self.transport.write(refusal.encode())
        self.transport.close()


class StalledReplyTimer:
    """Ends a connection whose client takes nothing of its replies for a time. A slow client may go on."""

    # The number of checks in this time.
    checks = 6

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, timeout_s: float
    ) -> None:
        self._transport = transport
        self._loop = loop
        self._timeout_s = timeout_s
        self._timer: asyncio.TimerHandle | None = None
        self._unacknowledged_bytes = 0
        self._stalled_checks = 0

    def start(self) -> None:
        """Check from now on, until everything is taken."""
        if self._timer is None:
            self._unacknowledged_bytes, self._stalled_checks = self._count_unacknowledged(), 0
            self._schedule()

    def cancel(self) -> None:
        """Check no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _schedule(self) -> None:
        self._timer = self._loop.call_later(self._timeout_s / self.checks, self._check)

    def _check(self) -> None:
        self._timer = None
        if self._transport.get_write_buffer_size() == 0:
            return
        before, self._unacknowledged_bytes = self._unacknowledged_bytes, self._count_unacknowledged()
        self._stalled_checks = 0 if self._unacknowledged_bytes < before else self._stalled_checks + 1
        if self._stalled_checks == self.checks:
            self._transport.abort()
        else:
            self._schedule()

    def _count_unacknowledged(self) -> int:
        """Return the bytes written and not acknowledged, here and in the kernel, which takes large pieces."""
        waiting = self._transport.get_write_buffer_size()
        with contextlib.suppress(OSError):
            sock = self._transport.get_extra_info("socket")
            queued = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4))
            waiting += struct.unpack("i", queued)[0]
        return waiting


class PipelineFlow(FlowControl):
    """Flow control that resumes reading only when no pipelined request waits; uvicorn's always resumes."""

    def __init__(self, transport: asyncio.Transport, waiting: Collection[object]) -> None:
        super().__init__(transport)
        self._waiting = waiting

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


_PHRASES: dict[int, str] = {
    400: "Bad Request",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
}
