"""Size of an Arrow record batch once it is decompressed, read from the head of its message. Pure.

pyarrow decompresses a whole batch before it shows one row, and has no bound of its own: a kilobyte of zstd
can stand for gigabytes. The head of each message is a flatbuffer, whose parts may share their bytes: pyarrow
copies each, and must not see a head before it was checked here.
Source: format/Message.fbs and format/Schema.fbs of Apache Arrow; flatbuffers' internals.
"""

import struct
from collections.abc import Iterator
from typing import NamedTuple

# Numbers of fields, in the order of the tables of Message.fbs and Schema.fbs.
HEADER_TYPE, HEADER, BODY_LENGTH, MESSAGE_METADATA = 1, 2, 3, 4
SCHEMA_FIELDS, SCHEMA_METADATA = 1, 2
FIELD_CHILDREN, FIELD_METADATA = 5, 6
LENGTH, BUFFERS, COMPRESSION = 0, 2, 3
DICTIONARY_DATA, DICTIONARY_IS_DELTA = 1, 2
SCHEMA, DICTIONARY_BATCH, RECORD_BATCH = 1, 2, 3
BUFFER_BYTES = 16
# Before the length of a head, since version 0.15 of Arrow.
CONTINUATION = 0xFFFFFFFF
# Of a batch of 4,000 buffers. All names and metadata of a head may be one string, which pyarrow copies for
# each.
HEAD_BYTES_MAX, SCHEMA_PARTS_MAX = 64 * 1024, 128
# Declared length of a buffer that is stored as it is in a compressed batch.
STORED = -1


class BatchSize(NamedTuple):
    """Rows of a batch, and the bytes of its buffers once they are decompressed.

    is_delta: it adds values to a dictionary. pyarrow then copies the whole dictionary, which is not counted.
    """

    rows: int
    decoded_bytes: int
    is_delta: bool = False


def batch_sizes(stream: bytes | bytearray | memoryview) -> Iterator[BatchSize]:
    """Yield the size of each message of a stream; of one that is no batch, zero.

    Raises: ValueError for a stream that pyarrow would not read, or whose heads would take much more memory
    than they have bytes.
    """
    for head, body in _messages(memoryview(stream)):
        try:
            yield _batch_size(head, body) or BatchSize(0, 0)
        except struct.error as error:
            raise ValueError("a message whose head is damaged") from error


def _messages(stream: memoryview) -> Iterator[tuple[bytes, memoryview]]:
    """Yield head and body of each message. Raises: ValueError, struct.error."""
    at = 0
    while at < len(stream):
        try:
            size, at = _unsigned(stream, at), at + 4
            if size == CONTINUATION:
                size, at = _unsigned(stream, at), at + 4
            if size == 0:
                break
            if size > HEAD_BYTES_MAX:
                raise ValueError(f"a message has a head of more than {HEAD_BYTES_MAX} bytes")
            head = bytes(stream[at : at + size])
            at += size
            length = _Table(head, _unsigned(head, 0)).long(BODY_LENGTH)
        except struct.error as error:
            raise ValueError("a message whose head is damaged") from error
        if length < 0 or at + length > len(stream):
            raise ValueError("it ends inside of a message")
        yield head, stream[at : at + length]
        at += length
    if at != len(stream):
        raise ValueError("there are bytes after its end")


def _batch_size(head: bytes, body: memoryview) -> BatchSize | None:
    """Return the size of a record batch or dictionary batch; None for any other message.

    head: the flatbuffer of a message. body: its buffers. Raises: ValueError, struct.error.
    """
    message = _Table(head, _unsigned(head, 0))
    kind = message.byte(HEADER_TYPE)
    batch, is_delta = message.table(HEADER), False
    if message.count(MESSAGE_METADATA):
        raise ValueError("a message has metadata of its own; only a schema may")
    if kind not in (DICTIONARY_BATCH, RECORD_BATCH):
        if batch is not None and kind == SCHEMA:
            _check_schema(batch)
        return None
    if batch is not None and kind == DICTIONARY_BATCH:
        is_delta = bool(batch.byte(DICTIONARY_IS_DELTA))
        batch = batch.table(DICTIONARY_DATA)
    if batch is None:
        raise ValueError("a batch without data")
    return BatchSize(batch.long(LENGTH), _decoded_bytes(batch, body), is_delta)


def _check_schema(schema: "_Table") -> None:
    """Raise ValueError for a schema of many parts: they may share bytes, and pyarrow copies each of them."""
    left = SCHEMA_PARTS_MAX - schema.count(SCHEMA_METADATA)
    fields = list(schema.tables(SCHEMA_FIELDS, left))
    while left >= 0 and fields:
        field = fields.pop()
        left -= 1 + field.count(FIELD_METADATA)
        fields += field.tables(FIELD_CHILDREN, left - len(fields))
    if left < 0:
        raise ValueError(f"its schema has more than {SCHEMA_PARTS_MAX} fields and entries of metadata")


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

    def count(self, number: int) -> int:
        """Return the length of a vector, 0 for an absent one."""
        place = self._place(number)
        return 0 if place is None else _unsigned(self._head, place + _unsigned(self._head, place))

    def tables(self, number: int, most: int) -> "list[_Table]":
        """Return the tables of a vector, one more than `most` of them if there are more."""
        place = self._place(number)
        if place is None:
            return []
        at = place + _unsigned(self._head, place)
        places = (at + 4 * index for index in range(1, min(_unsigned(self._head, at), max(0, most) + 1) + 1))
        return [_Table(self._head, each + _unsigned(self._head, each)) for each in places]

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


def _unsigned(head: bytes | memoryview, at: int) -> int:
    return int(struct.unpack_from("<I", head, at)[0])
