"""Frames of HTTP/2: their kinds, flags, errors and settings, and how they are written. Pure.

Source: RFC 9113.
"""

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
