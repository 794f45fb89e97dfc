"""One HTTP/1.1 connection to an upstream; it serves one request at a time."""

import asyncio
from collections.abc import Callable

import httpx

from backends.http.responses import REPLY_LIMIT_BYTES, InvalidResponse, RawResponse, ResponseReader

# Time for a head from its first byte. Servers send it in one piece.
HEAD_TIMEOUT_S = 10.0


class SlowHead(httpx.ReadTimeout):
    """Head of a response that was not complete in time; the message is safe to show."""


class StaleConnection(httpx.ReadError):
    """End of a kept-alive connection without an answer to the request on it.

    The server ended the connection for its idle time while the request was on its way.
    """


class Connection(asyncio.Protocol):
    """One connection and the response that is read from it.

    on_unsolicited: called with data that no request asked for; the connection then closes. reply_bytes_max:
    bound on the body of one response.
    """

    def __init__(
        self, on_unsolicited: Callable[[bytes], None], reply_bytes_max: int = REPLY_LIMIT_BYTES
    ) -> None:
        self._on_unsolicited = on_unsolicited
        self._reader = ResponseReader(reply_bytes_max)
        self._transport: asyncio.Transport | None = None
        self._pending: asyncio.Future[RawResponse] | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._reusable = True
        # True once it has answered a request.
        self._is_reused = False
        self.idle_since_s = 0.0

    @property
    def is_idle(self) -> bool:
        """True if the connection is open and no request or response is outstanding."""
        transport = self._transport
        return (
            self._reusable and self._pending is None and transport is not None and not transport.is_closing()
        )

    async def send(self, head: bytes, body: bytes, reply_bytes_max: int | None = None) -> RawResponse:
        """Send a request and wait for the complete response.

        reply_bytes_max: bound on its body, None for that of the connection.

        Raises: StaleConnection, SlowHead, InvalidResponse, httpx.ReadError.
        """
        assert self._transport is not None
        self._pending = asyncio.get_running_loop().create_future()
        self._reader.begin(reply_bytes_max)
        try:
            self._transport.writelines((head, body))
            return await self._pending
        except asyncio.CancelledError:
            # The response may still arrive, and must not be taken for that of the next request.
            self._reusable = False
            raise
        finally:
            self._pending = None

    def close(self) -> None:
        """Close immediately; a request in flight fails."""
        self._fail(httpx.ReadError("the connection was closed"))
        self._drop()
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Store the transport; called by asyncio when the connection is open."""
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        """End the response; called by asyncio when the connection is closed."""
        self._reusable, self._transport = False, None
        if self._pending is not None and not self._pending.done():
            response = self._reader.finish() if exc is None else None
            if response is not None:
                self._answer(self._pending, response)
            elif self._is_reused and (not self._reader.has_begun or self._reader.is_timeout):
                self._fail(StaleConnection("the kept-alive connection broke"))
            else:
                self._fail(httpx.ReadError("the connection broke"))
        self._drop()

    def data_received(self, data: bytes) -> None:
        """Parse bytes of a response; called by asyncio."""
        pending, reader = self._pending, self._reader
        if pending is None or pending.done():
            self._reject(data)
            return
        try:
            response = reader.feed(data)
        except InvalidResponse as error:
            self._fail(error)
            self.close()
            return
        if response is not None:
            self._answer(pending, response)
            if reader.has_excess and reader.keeps_alive:
                self._on_unsolicited(b"")
        elif reader.in_head and self._head_timer is None:
            self._head_timer = asyncio.get_running_loop().call_later(HEAD_TIMEOUT_S, self._end_slow_head)

    def _answer(self, pending: "asyncio.Future[RawResponse]", response: RawResponse) -> None:
        """Deliver a response, and keep the connection only if both sides have nothing more to send."""
        reader, transport = self._reader, self._transport
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        self._reusable = (
            self._reusable
            and reader.keeps_alive
            and not reader.has_excess
            and transport is not None
            # After an early answer the rest of the body would be read as the next request.
            and not transport.get_write_buffer_size()
        )
        if self._is_reused and reader.is_timeout and not reader.keeps_alive:
            pending.set_exception(StaleConnection("the kept-alive connection timed out"))
        else:
            pending.set_result(response)
        self._is_reused = True

    def _end_slow_head(self) -> None:
        self._fail(SlowHead(f"the head of the reply was not complete within {HEAD_TIMEOUT_S:.1f} s"))
        self.close()

    def _reject(self, data: bytes) -> None:
        """Report data that no request asked for, and close."""
        pending, transport = self._pending, self._transport
        # A request cancelled in the same loop iteration in which its response arrives did ask for it.
        is_cancelled = pending is not None and pending.cancelled()
        if not is_cancelled and transport is not None and not transport.is_closing():
            self._on_unsolicited(data)
        self.close()

    def _fail(self, error: httpx.RequestError) -> None:
        if self._pending is not None and not self._pending.done():
            self._pending.set_exception(error)

    def _drop(self) -> None:
        """Give up the connection and the data that it has read."""
        self._reusable = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        self._reader.close()
