"""Close of a connection whose client may still be sending."""

import asyncio
from collections.abc import Callable
from typing import Final


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
