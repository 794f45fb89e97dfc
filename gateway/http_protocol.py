"""uvicorn's HTTP/1.1 with the bounds it lacks: time for a head, a body and a stalled answer; size of a head.

Knows nothing of what is served. Rule: a connection that does nothing costs nothing for longer than these.
"""

import asyncio
import contextlib
import fcntl
import struct
import termios
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

# Under this name an application finds, among a call's ASGI extensions, what writes a whole answer at once.
WHOLE_ANSWER = "whole_answer"


class BoundedProtocol(HttpToolsProtocol):
    """One connection. A timer runs while the client owes a head or a body, or takes less than it is sent."""

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
    _head_bytes = 0
    _in_head = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client owes the head of its first request."""
        super().connection_made(_Together(transport, self.loop))  # type: ignore[arg-type]
        self._expect(self.head_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """No timer outlives its connection."""
        self._stop_reading_timer()
        if self._writing is not None:
            self._writing.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feed the parser no more of a head than it may keep."""
        room = self.head_bytes_max - self._head_bytes
        piece = data[:room] if self._in_head else data
        self._head_bytes += len(piece) if self._in_head else 0
        super().data_received(piece)
        if len(piece) < len(data) and not self.transport.is_closing():
            if self._in_head:
                self._refuse(431, "head_too_large", f"the head is larger than {self.head_bytes_max} bytes")
                return
            super().data_received(data[room:])
        # Most requests come whole: no timer is made for what was owed for no time.
        self._keep_time()

    def on_headers_complete(self) -> None:
        """The head is whole; the body is owed next."""
        self._in_head = False
        self._head_bytes = 0
        self._stop_reading_timer()
        super().on_headers_complete()
        self.scope["extensions"] = {WHOLE_ANSWER: partial(self._answer_whole, self.cycle)}  # type: ignore[dict-item]

    def on_message_complete(self) -> None:
        """Nothing is owed until the next request begins."""
        self._in_head = True
        self._head_bytes = 0
        self._stop_reading_timer()
        super().on_message_complete()

    def _keep_time(self) -> None:
        """Of what the client owes now: a body, or the rest of a head that has begun."""
        if self._reading is None and not self.transport.is_closing():
            if not self._in_head:
                self._expect(self.body_timeout_s)
            elif self._head_bytes:
                self._expect(self.head_timeout_s)

    def pause_writing(self) -> None:
        """The client takes less than it is sent: what it takes is watched from now on."""
        super().pause_writing()
        self._watch_writing()

    def on_response_complete(self) -> None:
        """What is left of an answer is watched too, or it would stay for as long as the client likes."""
        super().on_response_complete()
        if self.transport.get_write_buffer_size():
            self._watch_writing()

    def _answer_whole(
        self, cycle: RequestResponseCycle, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes
    ) -> bool:
        """Write an answer in one go, at a fraction of what its parts cost; its length is among the headers.

        False where it must go the long way: the client is waited for or has gone, or the connection ends.
        """
        lines = [*cycle.default_headers, *headers]
        head = b"".join([STATUS_LINE[status], *[b"%b: %b\r\n" % line for line in lines], b"\r\n"])
        is_plain = cycle.keep_alive and not cycle.response_started and head.count(b"\n") == len(lines) + 2
        if not is_plain or cycle.disconnected or self.flow.write_paused or self.transport.is_closing():
            return False
        cycle.response_started = cycle.response_complete = True
        cycle.message_event.set()
        self.transport.write_whole(head, body)  # type: ignore[attr-defined]
        cycle.on_response()
        return True

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

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP is refused as JSON, like everything else."""
        self._refuse(400, "malformed_request", msg)

    def _expect(self, seconds: float) -> None:
        self._stop_reading_timer()
        self._reading = self.loop.call_later(seconds, self._too_slow)

    def _stop_reading_timer(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _too_slow(self) -> None:
        """A half-sent request is answered if nothing has been yet; a silent connection is just closed."""
        # uvicorn's annotation is wrong: there is no cycle before the first head is whole.
        cycle: RequestResponseCycle | None = self.cycle
        answered = cycle is not None and cycle.response_started
        if self.transport.is_closing() or answered or (self._in_head and self._head_bytes == 0):
            self.transport.close()
            return
        self._refuse(408, "request_timeout", "the request was not complete in time")

    def _refuse(self, status: int, kind: str, message: str) -> None:
        body = msgspec.json.encode(
            {"error": message, "error_type": "Validation", "message": message, "type": kind}
        )
        head = (
            f"HTTP/1.1 {status} {_PHRASES[status]}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


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
        self._transport.writelines((head, body))

    def write(self, data: bytes) -> None:
        if self._head is not None:
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
        if head is not None:
            self._transport.write(head)


_PHRASES: dict[int, str] = {
    400: "Bad Request",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
}
