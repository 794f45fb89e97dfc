"""Frames in the bytes of one client, each whole, and header blocks with their continuations. Pure.

The head of a frame is checked before its content arrives, so that at most 48 KiB are kept: a header block, or
one frame, and what came with it.
"""

from gateway.api.grpc import frames
from gateway.api.grpc.frames import ConnectionFault, Frame, OversizedBlock

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
        self._preface = frames.PREFACE
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
            if frame.kind not in (frames.HEADERS, frames.CONTINUATION):
                return frame
            self._add_to_block(frame)
            if frame.flags & frames.END_HEADERS:
                return self._end_block()
        return None

    def _next_frame(self) -> Frame | None:
        if self._preface:
            self._read_preface()
        if self._skipped:
            self._skip(0)
        pending = self._pending
        if len(pending) < frames.HEAD_BYTES:
            return None
        size = int.from_bytes(pending[:3], "big")
        kind, flags = pending[3], pending[4]
        number = int.from_bytes(pending[5 : frames.HEAD_BYTES], "big") & frames.NUMBER_MAX
        self._check_order(kind, number)
        if kind > frames.CONTINUATION:
            self._skip(frames.HEAD_BYTES + size)
            return Frame(frames.UNKNOWN, flags, number, b"")
        self._check_size(kind, flags, number, size)
        end = frames.HEAD_BYTES + size
        if len(pending) < end:
            return None
        content = bytes(pending[frames.HEAD_BYTES : end])
        del pending[:end]
        self.has_settings = True
        return Frame(kind, flags, number, content)

    def _read_preface(self) -> None:
        size = min(len(self._pending), len(self._preface))
        if self._pending[:size] != self._preface[:size]:
            raise ConnectionFault(frames.PROTOCOL_ERROR, "this port serves gRPC, over HTTP/2")
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
        if not self.has_settings and kind != frames.SETTINGS:
            raise ConnectionFault(frames.PROTOCOL_ERROR, "the first frame is not one of settings")
        head = self._block_head
        if (head is not None) != (kind == frames.CONTINUATION) or (head and head.stream != number):
            raise ConnectionFault(frames.PROTOCOL_ERROR, "a header block is interrupted")
        if kind == frames.PUSH_PROMISE:
            raise ConnectionFault(frames.PROTOCOL_ERROR, "a frame that clients do not send")
        if (kind in frames.OF_STREAM and not number) or (kind in frames.OF_CONNECTION and number):
            raise ConnectionFault(frames.PROTOCOL_ERROR, "a frame with a wrong stream")

    def _check_size(self, kind: int, flags: int, number: int, size: int) -> None:
        """Check the size of a frame before its content arrives. Raises: ConnectionFault."""
        least, most = frames.LENGTHS.get(kind, (0, frames.FRAME_BYTES_MAX))
        if not least <= size <= most or (kind == frames.SETTINGS and flags & frames.ACK and size):
            raise ConnectionFault(frames.FRAME_SIZE_ERROR, "a frame has a size that is not allowed")
        is_header = kind in (frames.HEADERS, frames.CONTINUATION)
        if is_header and len(self._block) + size > METADATA_BYTES_MAX:
            raise OversizedBlock(number, METADATA_REASON)

    def _add_to_block(self, frame: Frame) -> None:
        if frame.kind == frames.HEADERS:
            self._block_head, self._block_frames = frame._replace(content=b""), 0
            self._block += frames.unpadded(frame.content, frame.flags)
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
