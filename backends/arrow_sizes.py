"""Size of an Arrow record batch once it is decompressed, read from the head of its message. Pure.

pyarrow decompresses a whole batch before it shows one row, and has no bound of its own: a kilobyte of zstd
can stand for gigabytes. The head of each message is a flatbuffer, which pyarrow has verified.
Source: format/Message.fbs and format/Schema.fbs of Apache Arrow; flatbuffers' internals.
"""

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

# Numbers of fields, in the order of the tables of Message.fbs.
HEADER_TYPE, HEADER = 1, 2
LENGTH, BUFFERS, COMPRESSION = 0, 2, 3
DICTIONARY_DATA, DICTIONARY_IS_DELTA = 1, 2
DICTIONARY_BATCH, RECORD_BATCH = 2, 3
BUFFER_BYTES = 16
# Declared length of a buffer that is stored as it is in a compressed batch.
STORED = -1


class BatchSize(NamedTuple):
    """Rows of a batch, and the bytes of its buffers once they are decompressed.

    is_delta: it adds values to a dictionary. pyarrow then copies the whole dictionary, which is not counted.
    """

    rows: int
    decoded_bytes: int
    is_delta: bool = False


def batch_sizes(reader: Any) -> Iterator[BatchSize]:
    """Yield the size of each message of a stream; of one that is no batch, zero.

    reader: pyarrow's `MessageReader`. Raises: ValueError, Arrow's errors.
    """
    while True:
        try:
            message = reader.read_next_message()
        except (EOFError, StopIteration):
            return
        head, body = message.metadata.to_pybytes(), memoryview(message.body or b"")
        yield batch_size(head, body) or BatchSize(0, 0)


def batch_size(head: bytes, body: memoryview) -> BatchSize | None:
    """Return the size of a record batch or dictionary batch; None for any other message.

    head: the flatbuffer of a message. body: its buffers. Raises: ValueError for lengths that cannot be.
    """
    try:
        message = _Table(head, _unsigned(head, 0))
        kind = message.byte(HEADER_TYPE)
        if kind not in (DICTIONARY_BATCH, RECORD_BATCH):
            return None
        batch, is_delta = message.table(HEADER), False
        if batch is not None and kind == DICTIONARY_BATCH:
            is_delta = bool(batch.byte(DICTIONARY_IS_DELTA))
            batch = batch.table(DICTIONARY_DATA)
        if batch is None:
            raise ValueError("a batch without data")
        return BatchSize(batch.long(LENGTH), _decoded_bytes(batch, body), is_delta)
    except struct.error as error:
        raise ValueError("a batch whose head is damaged") from error


def _decoded_bytes(batch: "_Table", body: memoryview) -> int:
    """Return the sum over the buffers. Raises: ValueError."""
    is_compressed = batch.table(COMPRESSION) is not None
    size = 0
    for offset, length in batch.buffers(BUFFERS):
        if offset < 0 or length < 0 or offset + length > len(body):
            raise ValueError("a buffer outside its message")
        declared = STORED
        if is_compressed and length:
            (declared,) = struct.unpack_from("<q", body[offset : offset + length])
        if declared < STORED:
            raise ValueError("a buffer of a negative length")
        size += length if declared == STORED else declared
    return size


class _Table:
    """Table of a flatbuffer. Raises: struct.error where it would read past the end."""

    def __init__(self, head: bytes, at: int) -> None:
        self._head = head
        self._at = at
        self._fields = at - struct.unpack_from("<i", head, at)[0]
        if self._fields < 0:
            raise struct.error("a table before the beginning")
        self._fields_bytes = struct.unpack_from("<H", head, self._fields)[0]

    def _place(self, number: int) -> int | None:
        """Return the place of a field's value, None for an absent field."""
        slot = 4 + 2 * number
        if slot + 2 > self._fields_bytes:
            return None
        offset: int = struct.unpack_from("<H", self._head, self._fields + slot)[0]
        return self._at + offset if offset else None

    def byte(self, number: int) -> int:
        place = self._place(number)
        return 0 if place is None else int(struct.unpack_from("<B", self._head, place)[0])

    def long(self, number: int) -> int:
        place = self._place(number)
        return 0 if place is None else int(struct.unpack_from("<q", self._head, place)[0])

    def table(self, number: int) -> "_Table | None":
        place = self._place(number)
        return None if place is None else _Table(self._head, place + _unsigned(self._head, place))

    def buffers(self, number: int) -> list[tuple[int, int]]:
        """Return offset and length of each buffer."""
        place = self._place(number)
        if place is None:
            return []
        at = place + _unsigned(self._head, place)
        count = _unsigned(self._head, at)
        if at + 4 + count * BUFFER_BYTES > len(self._head):
            raise struct.error("a vector past the end")
        return [
            struct.unpack_from("<qq", self._head, at + 4 + number * BUFFER_BYTES) for number in range(count)
        ]


def _unsigned(head: bytes, at: int) -> int:
    return int(struct.unpack_from("<I", head, at)[0])
