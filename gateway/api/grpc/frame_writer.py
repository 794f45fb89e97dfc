"""Frames to one client: joined within a turn of the event loop, and bounded by what it allows and reads."""

import asyncio
from collections import deque
from collections.abc import Mapping
from typing import Protocol

from gateway.api.grpc import frames
from gateway.api.grpc.frames import ConnectionFault

# Bytes that the socket has not taken. Above, no messages are written, and nothing is read before a key.
UNVERIFIED_UNSENT_BYTES = 8 * 1024
VERIFIED_UNSENT_BYTES = 128 * 1024
# Room of one write for another stream that waits for the connection's window.
SHARE_BYTES = 4 * 1024


class Target(Protocol):
    """Stream as far as writing needs it. send_window: bytes that its client takes."""

    number: int
    send_window: int


class FrameWriter:
    """Frames to one client.

    is_blocked: the client reads too slowly, since `blocked_s`. first_window: of each stream.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._unsent: list[bytes | memoryview] = []
        self._unsent_bytes = 0
        self._unsent_max = UNVERIFIED_UNSENT_BYTES
        self._is_flushing = False
        self._window = frames.WINDOW_BYTES
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._stream_waits: dict[int, asyncio.Future[None]] = {}
        self.first_window = frames.WINDOW_BYTES
        self.is_blocked = False
        self.blocked_s = 0.0

    def attach(self, transport: asyncio.Transport) -> None:
        """Write to a connection."""
        self._transport = transport
        transport.set_write_buffer_limits(self._unsent_max)

    def detach(self) -> None:
        """Write nothing any more."""
        self._transport = None
        self._unsent.clear()

    def trust(self) -> None:
        """Raise the bound: a key of the client is verified."""
        self._unsent_max = VERIFIED_UNSENT_BYTES
        if self._transport is not None:
            self._transport.set_write_buffer_limits(self._unsent_max)

    @property
    def kept_bytes(self) -> int:
        """Bytes that the socket has not taken."""
        if self._transport is None:
            return 0
        return self._unsent_bytes + self._transport.get_write_buffer_size()

    def send(self, *pieces: bytes | memoryview) -> None:
        """Write at the end of this turn of the event loop, or at once if it is much."""
        if self._transport is None:
            return
        self._unsent += pieces
        self._unsent_bytes += sum(map(len, pieces))
        if self._unsent_bytes > self._unsent_max:
            self.flush()
        elif not self._is_flushing:
            self._is_flushing = True
            self._loop.call_soon(self._flush_later)

    def _flush_later(self) -> None:
        self._is_flushing = False
        self.flush()

    def flush(self) -> None:
        """Write what was sent in this turn."""
        if self._transport is not None and self._unsent:
            unsent, self._unsent, self._unsent_bytes = self._unsent, [], 0
            self._transport.write(b"".join(unsent))

    def pause(self) -> None:
        """Write no messages: the client reads too slowly."""
        self.is_blocked, self.blocked_s = True, self._loop.time()

    def resume(self) -> None:
        """Write messages again."""
        self.is_blocked = False
        self._wake_waiting()

    def send_data(self, stream: Target, pieces: tuple[bytes | memoryview, ...], size: int) -> None:
        """Send bytes of messages, for which there is room."""
        self._window -= size
        stream.send_window -= size
        self.send(frames.frame_head(frames.DATA, 0, stream.number, size), *pieces)

    def room_for(self, stream: Target) -> int:
        """Return the bytes of messages that may be sent in one frame now."""
        if self.is_blocked or self._transport is None:
            return 0
        return min(self._window, stream.send_window, frames.FRAME_BYTES_MAX)

    async def wait_for_room(self, stream: Target) -> None:
        """Wait until there may be room for bytes of messages."""
        waiting = self._loop.create_future()
        if stream.send_window <= 0:
            self._stream_waits[stream.number] = waiting
        else:
            self._waiting.append(waiting)
        try:
            await waiting
        finally:
            self._stream_waits.pop(stream.number, None)
            # The next one, if this one leaves room.
            self._loop.call_soon(self._wake_waiting)

    def widen(self, size: int) -> None:
        """Take a larger window of the connection. Raises: ConnectionFault."""
        self._window += size
        if not size or self._window > frames.NUMBER_MAX:
            raise ConnectionFault(frames.FLOW_CONTROL_ERROR, "a window that is not allowed")
        self._wake_waiting()

    def widen_stream(self, stream: Target, size: int) -> bool:
        """Take a larger window of a stream; return whether it is allowed."""
        stream.send_window += size
        if not size or stream.send_window > frames.NUMBER_MAX:
            return False
        self._wake_stream(stream.number)
        return True

    def change_windows(self, size: int, streams: Mapping[int, Target]) -> None:
        """Take another window for all streams, the open ones included. Raises: ConnectionFault."""
        change, self.first_window = size - self.first_window, size
        for stream in streams.values():
            stream.send_window += change
            self._wake_stream(stream.number)
        if max([size, *[stream.send_window for stream in streams.values()]]) > frames.NUMBER_MAX:
            raise ConnectionFault(frames.FLOW_CONTROL_ERROR, "a window that is not allowed")

    def _wake_stream(self, number: int) -> None:
        waiting = self._stream_waits.get(number)
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    def _wake_waiting(self) -> None:
        """Wake streams that wait for the connection, as many as there is room for."""
        room = 0 if self.is_blocked else self._window
        while self._waiting and room > 0:
            waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_result(None)
                room -= SHARE_BYTES
