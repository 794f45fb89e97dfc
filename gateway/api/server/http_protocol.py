"""uvicorn's HTTP/1.1 with the bounds it lacks: time for a head, a body and a stalled answer; size of a head.

Knows nothing of what is served. Rule: a connection that does nothing costs nothing for longer than these.
"""

import asyncio
import contextlib
import fcntl
import struct
import termios
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

import httptools
import msgspec
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

# Under this name an application finds a call's `ConnectionHandle` among its ASGI extensions.
CONNECTION = "connection"
# Headers, and words of `connection`, by which a client asks for another protocol.
UPGRADING = frozenset({b"upgrade", b"http2-settings"})


class Refusal(msgspec.Struct, frozen=True):
    """What ends a connection."""

    status: int
    kind: str
    message: str

    def written(self) -> bytes:
        """As JSON, like everything else."""
        body = msgspec.json.encode(
            {"error": self.message, "error_type": "Validation", "message": self.message, "type": self.kind}
        )
        head = (
            f"HTTP/1.1 {self.status} {_PHRASES[self.status]}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        return head.encode() + body


class ConnectionHandle:
    """The connection of one call, past ASGI's messages. on_lost: called if it ends before the answer."""

    def __init__(self, protocol: "BoundedProtocol", cycle: RequestResponseCycle) -> None:
        self._protocol = protocol
        self._cycle = cycle
        self.on_lost: Callable[[], None] | None = None

    def answer(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> bool:
        """Write an answer in one go, at a fraction of what its parts cost; its length is among the headers.

        False where it must go the long way: the client is waited for or has gone, or the connection ends.
        """
        cycle, protocol = self._cycle, self._protocol
        lines = [*cycle.default_headers, *headers]
        head = b"".join([STATUS_LINE[status], *[b"%b: %b\r\n" % line for line in lines], b"\r\n"])
        if not cycle.keep_alive or cycle.response_started or head.count(b"\n") != len(lines) + 2:
            return False
        if protocol.flow.write_paused and not protocol.transport.is_closing():
            return False
        cycle.response_started = cycle.response_complete = True
        cycle.message_event.set()
        protocol.transport.write_whole(head, body)  # type: ignore[attr-defined]
        cycle.on_response()
        return True

    def lost(self) -> None:
        """The client has gone."""
        self._cycle.disconnected = not self._cycle.response_complete
        if self._cycle.disconnected and self.on_lost is not None:
            self.on_lost()


class BoundedProtocol(HttpToolsProtocol):
    """One connection. A timer runs while the client owes a head or a body, or takes less than it is sent.

    Requests that were sent without waiting for answers are answered in order, and no more is read while any
    of them waits for its turn. What cannot be read is refused once all before it has been answered.
    """

    head_timeout_s = 10.0
    body_timeout_s = 60.0
    # No byte taken by the client in this time: it is gone, or wants to be waited for.
    write_timeout_s = 30.0
    # How often it is looked at, in this time.
    looks = 6
    head_bytes_max = 64 * 1024

    # uvicorn's constructor is its own; these are set where a connection begins.
    _reading: asyncio.TimerHandle | None = None
    _writing: asyncio.TimerHandle | None = None
    _untaken_bytes = 0
    _stuck_looks = 0
    # What is read now is a head, of which so much has come; begun: something of it has.
    _in_head = True
    _head_begun = False
    _head_bytes = 0
    _refusal: Refusal | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client owes the head of its first request."""
        # Of the requests that have come and are not answered, in order.
        self._lines: deque[ConnectionHandle] = deque()
        super().connection_made(_Together(transport, self.loop))  # type: ignore[arg-type]
        self.flow = _Flow(self.transport, self.pipeline)
        self._expect(self.head_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """No timer outlives its connection."""
        self._stop_reading_timer()
        if self._writing is not None:
            self._writing.cancel()
        while self._lines:
            self._lines.popleft().lost()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feed the parser no more of a head than it may keep."""
        while data and self._refusal is None and not self.transport.is_closing():
            room = self.head_bytes_max - self._head_bytes if self._in_head else len(data)
            piece, data = data[:room], data[room:]
            self._head_bytes += len(piece) if self._in_head else 0
            self._feed(piece)
            if self._in_head and self._head_bytes >= self.head_bytes_max:
                self._refuse(431, "head_too_large", f"the head is larger than {self.head_bytes_max} bytes")
        # Most requests come whole: no timer is made for what was owed for no time.
        self._keep_time()

    def _feed(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        while data:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as stopped:
                data = self._less_upgrade(data[stopped.args[0] :])
                continue
            except httptools.HttpParserError:
                self._refuse(400, "malformed_request", "this is not HTTP/1.1")
            return

    def _less_upgrade(self, rest: bytes) -> bytes:
        """The head that has come, less its wish for another protocol, with what is behind it.

        Nothing is offered beside HTTP/1.1, and whoever asks is answered in that. The parser takes what
        follows such a head for the other protocol, so that a body would be read as requests.
        """
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._refuse(400, "malformed_request", "this is no proxy")
            return b""
        kept = [line for name, value in self.headers for line in _less_upgrading(name, value)]
        first = b"%b %b HTTP/%b\r\n" % (method, self.url, self.parser.get_http_version().encode())
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return b"".join([first, *kept, b"\r\n", rest])

    def on_message_begin(self) -> None:
        """The first byte of a head."""
        super().on_message_begin()
        self._head_begun = True

    def on_headers_complete(self) -> None:
        """The head is whole; the body is owed next."""
        if self.parser.should_upgrade():
            return
        # Raises where the target cannot be read: then it is still a head that is wrong.
        super().on_headers_complete()
        self._in_head = self._head_begun = False
        self._head_bytes = 0
        self._stop_reading_timer()
        self._lines.append(ConnectionHandle(self, self.cycle))
        self.scope["extensions"] = {CONNECTION: self._lines[-1]}  # type: ignore[dict-item]

    def on_message_complete(self) -> None:
        """Nothing is owed until the next request begins."""
        if self.parser.should_upgrade():
            return
        self._in_head = True
        self._head_bytes = 0
        self._stop_reading_timer()
        super().on_message_complete()
        # A large body has stopped the reading; whether its sender goes is only heard while there is some.
        self.flow.resume_reading()

    def _keep_time(self) -> None:
        """Of what the client owes now: a body, or the rest of a head that has begun."""
        if self._reading is None and self._refusal is None and not self.transport.is_closing():
            if not self._in_head:
                self._expect(self.body_timeout_s)
            elif self._head_begun:
                self._expect(self.head_timeout_s)

    def pause_writing(self) -> None:
        """The client takes less than it is sent: what it takes is watched from now on."""
        super().pause_writing()
        self._watch_writing()

    def on_response_complete(self) -> None:
        """What is left of an answer is watched too, or it would stay for as long as the client likes."""
        was_last = not self.pipeline
        if self._lines:
            self._lines.popleft()
        super().on_response_complete()
        if self._refusal is not None and was_last:
            self._end(self._refusal)
        if self.transport.get_write_buffer_size():
            self._watch_writing()

    def _watch_writing(self) -> None:
        if self._writing is None:
            self._untaken_bytes, self._stuck_looks = self._untaken(), 0
            self._look_again()

    def _look_again(self) -> None:
        self._writing = self.loop.call_later(self.write_timeout_s / self.looks, self._look)

    def _look(self) -> None:
        """End it where nothing was taken for too long; a slow client is no silent one."""
        self._writing = None
        if self.transport.get_write_buffer_size() == 0:
            return
        before, self._untaken_bytes = self._untaken_bytes, self._untaken()
        self._stuck_looks = 0 if self._untaken_bytes < before else self._stuck_looks + 1
        if self._stuck_looks == self.looks:
            self.transport.abort()
        else:
            self._look_again()

    def _untaken(self) -> int:
        """Bytes written and not acknowledged: here, and in the kernel, which takes them in large pieces."""
        waiting: int = self.transport.get_write_buffer_size()
        with contextlib.suppress(OSError):
            told = fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
            waiting += struct.unpack("i", told)[0]
        return waiting

    def _expect(self, seconds: float) -> None:
        self._stop_reading_timer()
        self._reading = self.loop.call_later(seconds, self._too_slow)

    def _stop_reading_timer(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _too_slow(self) -> None:
        """A half-sent request is answered if nothing has been yet; a silent connection is just closed."""
        self._reading = None
        if self._in_head and not self._head_begun:
            self.transport.close()
        elif self.flow.read_paused:
            # It is not let send.
            self._keep_time()
        else:
            self._refuse(408, "request_timeout", "the request was not complete in time")

    def _refuse(self, status: int, kind: str, message: str) -> None:
        """Read nothing more, and say why once all that came whole has been answered."""
        refusal = Refusal(status, kind, message)
        # uvicorn's annotation is wrong: there is no cycle before the first head is whole.
        cycle: RequestResponseCycle | None = self.cycle
        waits_for_its_turn = not self._in_head and bool(self.pipeline)
        if waits_for_its_turn:
            # Half a request behind others: its turn never comes.
            self.pipeline.popleft()
        if waits_for_its_turn or (self._in_head and cycle is not None and not cycle.response_complete):
            self._refusal = refusal
            self.flow.pause_reading()
        elif not self._in_head and cycle is not None and cycle.response_started:
            self.transport.close()
        else:
            self._end(refusal)

    def _end(self, refusal: Refusal) -> None:
        self.transport.write(refusal.written())
        self.transport.close()


class _Flow(FlowControl):
    """uvicorn's, which reads on with every answer: here not before all that was read has had its turn."""

    def __init__(self, transport: asyncio.Transport, waiting: Collection[object]) -> None:
        super().__init__(transport)
        self._waiting = waiting

    def resume_reading(self) -> None:
        if not self._waiting:
            super().resume_reading()


def _less_upgrading(name: bytes, value: bytes) -> list[bytes]:
    """A header's line, less what asks for another protocol; none where nothing is left."""
    if name == b"connection":
        tokens = [one.strip() for one in value.split(b",")]
        value = b", ".join([one for one in tokens if one.lower() not in UPGRADING])
        return [b"connection: %b\r\n" % value] if value else []
    return [] if name in UPGRADING else [b"%b: %b\r\n" % (name, value)]


class _Together:
    """A transport on which an answer's head waits for its body: one system call, one wake of the client.

    uvicorn writes them apart. What comes alone leaves in the loop's next turn.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head: bytes | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write_whole(self, head: bytes, body: bytes) -> None:
        self._flush()
        if not self._transport.is_closing():
            self._transport.writelines((head, body))

    def write(self, data: bytes) -> None:
        if self._transport.is_closing():
            # Nobody is there any more; uvloop would raise.
            self._head = None
        elif self._head is not None:
            head, self._head = self._head, None
            self._transport.writelines((head, data))
        elif data.startswith(b"HTTP/"):
            self._head = data
            self._loop.call_soon(self._flush)
        else:
            self._transport.write(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        head, self._head = self._head, None
        if head is not None and not self._transport.is_closing():
            self._transport.write(head)


_PHRASES: dict[int, str] = {
    400: "Bad Request",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
}
