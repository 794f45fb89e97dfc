"""Bytes that wait on one connection: replies that its client has not taken, and requests after them."""

import asyncio
import contextlib
import fcntl
import math
import struct
import termios
from collections.abc import Callable

from gateway.api.server.in_flight import InFlight

# A reply that has just been written has no rate yet.
GRACE_S = 2.0


class Backlog:
    """Bytes that wait on one connection for its client, which has not taken its replies.

    in_flight: counts them. tenant: of the last call on the connection. count: returns how many wait; those of
    replies if it is None.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        in_flight: InFlight,
        count: Callable[[], int] | None = None,
    ) -> None:
        self._transport = transport
        self._count = count or transport.get_write_buffer_size
        self._loop = loop
        self._in_flight = in_flight
        self.tenant = ""
        self.held_bytes = 0
        self._since_s = 0.0

    def start(self) -> None:
        """Count what waits, until all of it is taken."""
        self.end()
        self.held_bytes = self._count()
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
        return (self.held_bytes - self._count()) / age_s

    def disconnect(self) -> None:
        """Drop the connection with what it buffers."""
        self.end()
        self._transport.abort()


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
