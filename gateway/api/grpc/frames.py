"""Frames of HTTP/2: their form, and one connection's reader and writer of them.

The project has its own frame code because h2 takes 1.9 ms of the event loop for 900 references to a header,
which is one small frame (docs/decisions/091-http2-is-bounded-before-the-key.md); a library with bounds on
headers and resets would replace it. Source: RFC 9113.
"""

import asyncio
from collections import deque
from collections.abc import Mapping
from struct import Struct
from typing import NamedTuple

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD_BYTES = 9
# The least that a receiver has to take, and the default.
FRAME_BYTES_MAX = 16_384
WINDOW_BYTES = 65_535
NUMBER_MAX = 2**31 - 1

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = (
    range(10)
)
END_STREAM = ACK = 0x1
END_HEADERS, PADDED, WITH_PRIORITY = 0x4, 0x8, 0x20

OF_CONNECTION = frozenset({SETTINGS, PING, GOAWAY})
OF_STREAM = frozenset({DATA, HEADERS, PRIORITY, RST_STREAM, CONTINUATION})

# Errors.
NO_ERROR, PROTOCOL_ERROR, INTERNAL_ERROR, FLOW_CONTROL_ERROR = range(4)
STREAM_CLOSED, FRAME_SIZE_ERROR, REFUSED_STREAM, CANCEL, COMPRESSION_ERROR = range(5, 10)
ENHANCE_YOUR_CALM = 0xB

# Settings.
ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE = range(2, 7)

_HEAD = Struct(">HBBBI")
_SETTING = Struct(">HI")
_NUMBER = Struct(">I")
# Frames of kinds that HTTP/2 does not define, whose content is dropped.
UNKNOWN = 0x100
# Least and most bytes of frames that are small.
LENGTHS: Mapping[int, tuple[int, int]] = {
    PRIORITY: (5, 5),
    RST_STREAM: (4, 4),
    SETTINGS: (0, 64 * _SETTING.size),
    PING: (8, 8),
    GOAWAY: (8, 1024),
    WINDOW_UPDATE: (4, 4),
}


class Frame(NamedTuple):
    """One frame. HEADERS come with those that continue them. stream: 0 for the connection."""

    kind: int
    flags: int
    stream: int
    content: bytes


class ConnectionFault(Exception):
    """Fault of a client that ends its connection. code: HTTP/2's error. reason: sent as debug data."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class OversizedBlock(ConnectionFault):
    """Header block over a bound. stream: its number."""

    def __init__(self, stream: int, reason: str) -> None:
        super().__init__(ENHANCE_YOUR_CALM, reason)
        self.stream = stream


class StreamFault(Exception):
    """Fault of a client that ends one stream. code: HTTP/2's error."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def encode_frame(kind: int, flags: int, stream: int, content: bytes = b"") -> bytes:
    """Return a frame."""
    return frame_head(kind, flags, stream, len(content)) + content


def frame_head(kind: int, flags: int, stream: int, size: int) -> bytes:
    """Return the head of a frame whose content has a size."""
    return _HEAD.pack(size >> 8, size & 0xFF, kind, flags, stream)


def settings_frame(settings: Mapping[int, int]) -> bytes:
    """Return a frame with settings."""
    content = b"".join([_SETTING.pack(name, value) for name, value in settings.items()])
    return encode_frame(SETTINGS, 0, 0, content)


def read_settings(content: bytes) -> list[tuple[int, int]]:
    """Return the settings in a frame. Raises: ConnectionFault."""
    if len(content) % _SETTING.size:
        raise ConnectionFault(FRAME_SIZE_ERROR, "a frame of settings has a wrong size")
    return list(_SETTING.iter_unpack(content))


def window_frame(stream: int, size: int) -> bytes:
    """Return a frame that allows more bytes of DATA. stream: 0 for the connection."""
    return encode_frame(WINDOW_UPDATE, 0, stream, _NUMBER.pack(size))


def reset_frame(stream: int, code: int) -> bytes:
    """Return a frame that ends a stream."""
    return encode_frame(RST_STREAM, 0, stream, _NUMBER.pack(code))


def goaway_frame(last_stream: int, code: int, reason: str = "") -> bytes:
    """Return a frame that announces the end of a connection."""
    return encode_frame(GOAWAY, 0, 0, _NUMBER.pack(last_stream) + _NUMBER.pack(code) + reason.encode())


def headers_frames(stream: int, block: bytes, *, ends: bool, frame_bytes: int = FRAME_BYTES_MAX) -> bytes:
    """Return a header block in as many frames as it takes. ends: it is the last of its stream."""
    flags = END_STREAM if ends else 0
    if len(block) <= frame_bytes:
        return encode_frame(HEADERS, flags | END_HEADERS, stream, block)
    frames = [encode_frame(HEADERS, flags, stream, block[:frame_bytes])]
    for start in range(frame_bytes, len(block), frame_bytes):
        piece = block[start : start + frame_bytes]
        last = start + frame_bytes >= len(block)
        frames.append(encode_frame(CONTINUATION, END_HEADERS if last else 0, stream, piece))
    return b"".join(frames)


def number_of(content: bytes) -> int:
    """Return the number of 31 bits that a frame contains."""
    return int(_NUMBER.unpack(content[:4])[0]) & NUMBER_MAX


def unpadded(content: bytes, flags: int) -> bytes:
    """Return the content of a DATA or HEADERS frame without padding and priority. Raises: ConnectionFault."""
    start, end = 0, len(content)
    if flags & PADDED:
        start = 1
        end -= content[0] if content else 1
    if flags & WITH_PRIORITY:
        start += 5
    if start > end:
        raise ConnectionFault(PROTOCOL_ERROR, "the padding is longer than its frame")
    return content[start:end] if flags & (PADDED | WITH_PRIORITY) else content


# As docs/grpc.md says. HTTP's heads have the same bound.
METADATA_BYTES_MAX = 32 * 1024
FIELDS_MAX = 128
METADATA_REASON = f"the metadata is larger than {METADATA_BYTES_MAX} bytes or {FIELDS_MAX} fields"
# Frames of one header block: 32 KiB fit into three.
BLOCK_FRAMES_MAX = 8


class FrameReader:
    """Bytes of one client that are not handled yet.

    has_settings: the first frame has come.
    """

    def __init__(self) -> None:
        self.has_settings = False
        self._pending = bytearray()
        self._preface = PREFACE
        # Bytes of a frame of unknown kind that are still to come.
        self._skipped = 0
        self._block = bytearray()
        self._block_head: Frame | None = None
        self._block_frames = 0

    @property
    def kept_bytes(self) -> int:
        """Bytes in memory."""
        return len(self._pending) + len(self._block)

    @property
    def is_in_block(self) -> bool:
        """True while a header block is incomplete."""
        return self._block_head is not None

    def feed(self, data: memoryview) -> None:
        """Add bytes that have arrived."""
        self._pending += data

    def next(self) -> Frame | None:
        """Return the next frame, None until it has arrived. Raises: ConnectionFault."""
        while (frame := self._next_frame()) is not None:
            if frame.kind not in (HEADERS, CONTINUATION):
                return frame
            self._add_to_block(frame)
            if frame.flags & END_HEADERS:
                return self._end_block()
        return None

    def _next_frame(self) -> Frame | None:
        if self._preface:
            self._read_preface()
        if self._skipped:
            self._skip(0)
        pending = self._pending
        if len(pending) < HEAD_BYTES:
            return None
        size = int.from_bytes(pending[:3], "big")
        kind, flags = pending[3], pending[4]
        number = int.from_bytes(pending[5:HEAD_BYTES], "big") & NUMBER_MAX
        self._check_order(kind, number)
        if kind > CONTINUATION:
            self._skip(HEAD_BYTES + size)
            return Frame(UNKNOWN, flags, number, b"")
        self._check_size(kind, flags, number, size)
        end = HEAD_BYTES + size
        if len(pending) < end:
            return None
        content = bytes(pending[HEAD_BYTES:end])
        del pending[:end]
        self.has_settings = True
        return Frame(kind, flags, number, content)

    def _read_preface(self) -> None:
        size = min(len(self._pending), len(self._preface))
        if self._pending[:size] != self._preface[:size]:
            raise ConnectionFault(PROTOCOL_ERROR, "this port serves gRPC, over HTTP/2")
        self._preface = self._preface[size:]
        del self._pending[:size]

    def _skip(self, size: int) -> None:
        """Drop more bytes, as far as they have arrived."""
        self._skipped += size
        dropped = min(self._skipped, len(self._pending))
        self._skipped -= dropped
        del self._pending[:dropped]

    def _check_order(self, kind: int, number: int) -> None:
        """Check that a frame may come here. Raises: ConnectionFault."""
        if not self.has_settings and kind != SETTINGS:
            raise ConnectionFault(PROTOCOL_ERROR, "the first frame is not one of settings")
        head = self._block_head
        if (head is not None) != (kind == CONTINUATION) or (head and head.stream != number):
            raise ConnectionFault(PROTOCOL_ERROR, "a header block is interrupted")
        if kind == PUSH_PROMISE:
            raise ConnectionFault(PROTOCOL_ERROR, "a frame that clients do not send")
        if (kind in OF_STREAM and not number) or (kind in OF_CONNECTION and number):
            raise ConnectionFault(PROTOCOL_ERROR, "a frame with a wrong stream")

    def _check_size(self, kind: int, flags: int, number: int, size: int) -> None:
        """Check the size of a frame before its content arrives. Raises: ConnectionFault."""
        least, most = LENGTHS.get(kind, (0, FRAME_BYTES_MAX))
        if not least <= size <= most or (kind == SETTINGS and flags & ACK and size):
            raise ConnectionFault(FRAME_SIZE_ERROR, "a frame has a size that is not allowed")
        is_header = kind in (HEADERS, CONTINUATION)
        if is_header and len(self._block) + size > METADATA_BYTES_MAX:
            raise OversizedBlock(number, METADATA_REASON)

    def _add_to_block(self, frame: Frame) -> None:
        if frame.kind == HEADERS:
            self._block_head, self._block_frames = frame._replace(content=b""), 0
            self._block += unpadded(frame.content, frame.flags)
        else:
            self._block += frame.content
        self._block_frames += 1
        if self._block_frames > BLOCK_FRAMES_MAX:
            raise OversizedBlock(frame.stream, METADATA_REASON)

    def _end_block(self) -> Frame:
        assert self._block_head is not None
        whole = self._block_head._replace(content=bytes(self._block))
        self._block_head = None
        self._block.clear()
        return whole


# Bytes that the socket has not taken. Above, no messages are written, and nothing is read before a key.
UNVERIFIED_UNSENT_BYTES = 8 * 1024
VERIFIED_UNSENT_BYTES = 128 * 1024
# Room of one write for another stream that waits for the connection's window.
SHARE_BYTES = 4 * 1024


class FlowControlled:
    """Stream as far as frames are concerned.

    window: bytes that the client may send; below 0 before it knows the connection's settings. send_window:
    bytes that it takes. client_has_ended: it sends no more.
    """

    def __init__(self, number: int, window: int, send_window: int, *, client_has_ended: bool) -> None:
        self.number = number
        self.window = window
        self.send_window = send_window
        self.client_has_ended = client_has_ended

    def count_received(self, size: int) -> None:
        """Take bytes off the client's window, or give them back if the size is below 0."""
        self.window -= size

    def count_sent(self, size: int) -> None:
        """Take bytes off the window of this side, or add them if the size is below 0."""
        self.send_window -= size

    def end_sending(self) -> None:
        """Record that the client sends no more."""
        self.client_has_ended = True


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
        self._window = WINDOW_BYTES
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._stream_waits: dict[int, asyncio.Future[None]] = {}
        self.first_window = WINDOW_BYTES
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

    def send_data(self, stream: FlowControlled, pieces: tuple[bytes | memoryview, ...], size: int) -> None:
        """Send bytes of messages, for which there is room."""
        self._window -= size
        stream.count_sent(size)
        self.send(frame_head(DATA, 0, stream.number, size), *pieces)

    def room_for(self, stream: FlowControlled) -> int:
        """Return the bytes of messages that may be sent in one frame now."""
        if self.is_blocked or self._transport is None:
            return 0
        return min(self._window, stream.send_window, FRAME_BYTES_MAX)

    async def wait_for_room(self, stream: FlowControlled) -> None:
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
        if not size or self._window > NUMBER_MAX:
            raise ConnectionFault(FLOW_CONTROL_ERROR, "a window that is not allowed")
        self._wake_waiting()

    def widen_stream(self, stream: FlowControlled, size: int) -> bool:
        """Take a larger window of a stream; return whether it is allowed."""
        stream.count_sent(-size)
        if not size or stream.send_window > NUMBER_MAX:
            return False
        self._wake_stream(stream.number)
        return True

    def change_windows(self, size: int, streams: Mapping[int, FlowControlled]) -> None:
        """Take another window for all streams, the open ones included. Raises: ConnectionFault."""
        change, self.first_window = size - self.first_window, size
        for stream in streams.values():
            stream.count_sent(-change)
            self._wake_stream(stream.number)
        if max([size, *[stream.send_window for stream in streams.values()]]) > NUMBER_MAX:
            raise ConnectionFault(FLOW_CONTROL_ERROR, "a window that is not allowed")

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
