"""Parts of a connection: stalled replies, the reply's transport, and the last close."""

import asyncio
import contextlib
import fcntl
import math
import struct
import termios
from collections.abc import Callable
from typing import Final

from gateway.in_flight import InFlight

# A reply that has just been written has no rate yet.
GRACE_S = 2.0


class Backlog:
    """Bytes of replies that the client of one connection has not taken.

    in_flight: counts them. tenant: of the last call on the connection.
    """

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, in_flight: InFlight
    ) -> None:
        self._transport = transport
        self._loop = loop
        self._in_flight = in_flight
        self.tenant = ""
        self.held_bytes = 0
        self._since_s = 0.0

    def start(self) -> None:
        """Count what the transport buffers, until all of it is taken."""
        self.end()
        self.held_bytes = self._transport.get_write_buffer_size()
        self._since_s = self._loop.time()
        # This reply is not among the readers yet: a single one always fits.
        self._in_flight.hold_reply(self.held_bytes)
        self._in_flight.readers.add(self)

    def end(self) -> None:
        """Count nothing more: the client has taken everything, or has disconnected."""
        if self in self._in_flight.readers:
            self._in_flight.readers.remove(self)
            self._in_flight.release_reply(self.held_bytes)

    def bytes_per_s(self) -> float:
        """Return the rate since the backlog began; infinite for a young one."""
        age_s = self._loop.time() - self._since_s
        if age_s < GRACE_S:
            return math.inf
        return (self.held_bytes - self._transport.get_write_buffer_size()) / age_s

    def disconnect(self) -> None:
        """Drop the connection with what it buffers."""
        self.end()
        self._transport.abort()


class BodyPace:
    """Time that a client has for a body: in all, and by its rate in each interval.

    A body that hardly moves takes memory from others. ends_s: when the time in all is over. bytes: that came
    in this interval.
    """

    check_s = 5.0
    bytes_per_s = 16 * 1024
    # A check this late was delayed by the gateway itself, which may not have read what has come.
    late_s = 1.0

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._since_s = 0.0
        self._check_at_s = 0.0
        self.ends_s = 0.0
        self.bytes = 0

    def start(self, timeout_s: float) -> None:
        """Start the time of a body, of which some bytes have come with its head."""
        self._since_s = self._loop.time()
        self.ends_s = self._since_s + timeout_s

    def next_check_s(self) -> float:
        """Return the time until the next check."""
        now_s = self._loop.time()
        self._check_at_s = min(now_s + self.check_s, self.ends_s)
        return self._check_at_s - now_s

    def is_late(self, *, was_paused: bool) -> bool:
        """Return whether the time is over. was_paused: the gateway did not read for a part of it."""
        now_s = self._loop.time()
        if now_s >= self.ends_s:
            return True
        needed = self.bytes_per_s * (now_s - self._since_s)
        is_slow = self.bytes < needed and not was_paused and now_s <= self._check_at_s + self.late_s
        self._since_s, self.bytes = now_s, 0
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

    close: called instead of the transport's own; replaced when the connection is lost, to break a reference
    cycle.
    """

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write: Final = transport.write
        self.is_closing: Final = transport.is_closing
        self.close = close


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
