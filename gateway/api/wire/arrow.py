"""Texts and vectors as Arrow IPC streams: the only module that imports pyarrow, once a call asks for Arrow.

A stream of texts has one column of strings. Its rows keep their place: a null is no input, and stays null in
the reply; each record batch of the request is one of the reply.
Source: Apache Arrow, "Serialization and Interprocess Communication"; nazq/tei-manager 0.12.0, README.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np

from backends.contract import TermWeights, Vectors
from gateway.arrow import batch_sizes
from gateway.errors import EmptyInput, InvalidInput, MalformedBody, Overloaded, UnsupportedMedia
from gateway.tenants.keyring import Tenant
from gateway.upstreams.fair_threads import Claim, FairThreads

# pyarrow has no types.
Table: TypeAlias = Any
Codec: TypeAlias = Literal["lz4", "zstd"]
# Names of the column of texts, if a stream has several columns.
COLUMNS = ("text", "texts", "input", "inputs")
# Those of dictionaries included. Each takes time, also without rows.
BATCHES_MAX = 4096
VIEW_BYTES = 16
# Of one stream, in the queue and in its thread.
READING_S = 30.0


class Rows(msgspec.Struct, frozen=True):
    """Place of the texts in the stream that they came from.

    batches: number of rows of each record batch. texts: the row of each text; the others are null.
    """

    batches: tuple[int, ...]
    texts: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of all rows."""
        return sum(self.batches)

    @property
    def has_nulls(self) -> bool:
        """True if a row is null."""
        return len(self.texts) < self.count


class Form(msgspec.Struct, frozen=True):
    """Form of a stream to write. codec: None stores buffers as they are. facts: metadata of the schema."""

    codec: Codec | None = None
    facts: Mapping[str, str] = {}


PLAIN = Form()


def all_rows(count: int) -> Rows:
    """Return the rows of texts that came in one list."""
    return Rows((count,), tuple(range(count)))


def check_installed() -> None:
    """Check that Arrow can be read and written. Raises: UnsupportedMedia."""
    if find_spec("pyarrow") is None:
        raise UnsupportedMedia("this gateway was installed without Arrow: install its extra `grpc`")


async def read_in_turn(
    threads: FairThreads,
    tenant: Tenant,
    stream: bytes | bytearray,
    rows_max: int,
    bytes_max: int,
    *,
    first_column: bool = False,
) -> tuple[Rows, list[str]]:
    """Return what `read_texts` returns, read by one of `threads` when it is the tenant's turn.

    Raises: Overloaded, and the errors of `read_texts`.
    """
    claim = Claim(tenant.name, weight=tenant.weight, priority=tenant.priority)
    try:
        async with asyncio.timeout(READING_S):
            with threads.hold(tenant.name, len(stream)):
                read = partial(read_texts, stream, rows_max, bytes_max, first_column=first_column)
                return await threads.run(claim, len(stream), read)
    except TimeoutError as error:
        raise Overloaded(f"the Arrow stream was not read within {READING_S:g} s") from error


def read_texts(
    stream: bytes | bytearray, rows_max: int, bytes_max: int, *, first_column: bool = False
) -> tuple[Rows, list[str]]:
    """Return the texts of an IPC stream, and their rows. Blocks; for a thread.

    There may be none. rows_max: most rows, nulls included. bytes_max: most bytes of all buffers once they are
    decompressed, and of all texts. first_column: read it whatever the names are, as TEI Manager does.
    Raises: EmptyInput, InvalidInput, MalformedBody.
    """
    pa = _pyarrow()
    try:
        _check_sizes(stream, rows_max, bytes_max)
        reader = _TextReader(pa, rows_max, bytes_max)
        for column in _columns(pa, stream, first_column=first_column):
            reader.add(column)
    except (pa.ArrowException, OSError, EOFError, ValueError, OverflowError, MemoryError) as error:
        raise MalformedBody(f"the body is no valid Arrow IPC stream: {str(error)[:200]}") from error
    texts = reader.texts
    _check_texts(texts, bytes_max)
    rows = Rows(tuple(reader.batches), tuple(row for row, text in enumerate(texts) if text is not None))
    return rows, [text for text in texts if text is not None]


def _check_sizes(stream: bytes | bytearray, rows_max: int, bytes_max: int) -> None:
    """Check all messages before pyarrow reads one of them. Raises: InvalidInput, ValueError."""
    # The schema is a message without rows.
    rows, size = -1, 0
    for number, found in enumerate(batch_sizes(stream)):
        if number > BATCHES_MAX:
            raise InvalidInput(f"the Arrow stream has more than {BATCHES_MAX} batches; send fewer at once")
        if found.is_delta:
            raise InvalidInput(
                "the Arrow stream has a delta of a dictionary; send each dictionary as a whole"
            )
        size += found.decoded_bytes
        # Dictionaries count as rows: each of their values becomes an object. So does a message without rows.
        rows += max(found.rows, 1)
        if found.rows < 0 or rows > 2 * rows_max:
            raise _too_many(rows_max)
        if size > bytes_max:
            raise InvalidInput(f"the Arrow stream has more than {bytes_max} bytes once it is decompressed")


def _columns(pa: Any, stream: bytes | bytearray, *, first_column: bool) -> Iterator[Any]:
    """Yield the column of texts of each batch. Raises: InvalidInput, Arrow's errors."""
    schema = pa.ipc.open_stream(pa.BufferReader(stream)).schema
    place = 0 if first_column and schema.names else _place(schema)
    _check_column(pa, schema.field(place))
    options = pa.ipc.IpcReadOptions(use_threads=False, included_fields=[place])
    for batch in pa.ipc.open_stream(pa.BufferReader(stream), options=options):
        yield batch.column(0)


def _place(schema: Any) -> int:
    """Return the place of the column of texts. Raises: InvalidInput."""
    names = [name for name in COLUMNS if name in schema.names]
    if len(schema.names) != 1 and len(names) != 1:
        raise InvalidInput(
            f"the Arrow stream has {len(schema.names)} columns; send one, or one of them named `text`"
        )
    place: int = schema.names.index(names[0]) if names else 0
    return place


def _check_column(pa: Any, field: Any) -> None:
    """Check that a column has strings. Raises: InvalidInput."""
    kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    if not is_text:
        raise InvalidInput(
            f"the Arrow column `{field.name[:64]}` is {str(field.type)[:64]}; send strings, such as utf8"
        )


class _Values(NamedTuple):
    """Checked values of a dictionary.

    source: the array that was read, whose memory stays allocated. values: strings of which elements can be
    taken. lengths: their bytes, int64.
    """

    source: Any
    values: Any
    lengths: Any


class _TextReader:
    """Texts of the batches of one stream.

    Batches share a dictionary until the stream replaces it. It is checked and measured once, because a batch
    without rows takes 100 bytes of the stream, and its dictionary up to `bytes_max`.

    rows_max: most rows. bytes_max: most bytes of all texts, however often they share their bytes. It is
    checked before they become objects.
    """

    def __init__(self, pa: Any, rows_max: int, bytes_max: int) -> None:
        self.batches: list[int] = []
        self.texts: list[str | None] = []
        self._pa = pa
        self._rows_max = rows_max
        self._bytes_max = self._remaining = self._remaining_of_views = bytes_max
        self._values: _Values | None = None

    def add(self, column: Any) -> None:
        """Add the texts of a batch, None for null. Raises: InvalidInput, Arrow's errors."""
        # Lengths and sizes of buffers: the values are not read.
        column.validate()
        # The head of a batch may state another number of rows.
        if len(self.texts) + len(column) > self._rows_max:
            raise _too_many(self._rows_max)
        self.batches.append(len(column))
        if self._pa.types.is_dictionary(column.type):
            self.texts += self._texts_of_dictionary(column)
            return
        if self._pa.types.is_string_view(column.type):
            # Before the full check, which reads the bytes of each view.
            self._count(_bytes_of_views(column))
            column.validate(full=True)
        else:
            column.validate(full=True)
            self._count(self._pa.compute.binary_length(column).sum().as_py() or 0)
        self.texts += column.to_pylist()

    def _texts_of_dictionary(self, column: Any) -> list[str | None]:
        """Return the texts of a batch. Only the values in use become objects, each of them once."""
        found = self._values_of(column.dictionary)
        indices = column.indices
        indices.validate(full=True)
        used = indices.drop_null()
        # Raises an error for an index out of bounds.
        self._count(found.lengths.take(used).sum().as_py() or 0)
        used = used.unique()
        by_index = dict(zip(used.to_pylist(), found.values.take(used).to_pylist(), strict=True))
        return [by_index.get(index) for index in indices.to_pylist()]

    def _values_of(self, dictionary: Any) -> _Values:
        """Return the values of a dictionary, those of the last batch if it has the same."""
        if self._values is None or _memory_of(self._values.source) != _memory_of(dictionary):
            self._values = self._checked(dictionary)
        return self._values

    def _checked(self, dictionary: Any) -> _Values:
        """Return the values of a new dictionary. Raises: InvalidInput, Arrow's errors."""
        is_view = self._pa.types.is_string_view(dictionary.type)
        if is_view:
            # Arrow takes no elements out of views, and a copy has the shared bytes of each.
            self._remaining_of_views -= _bytes_of_views(dictionary)
            if self._remaining_of_views < 0:
                raise _too_long(self._bytes_max)
        dictionary.validate(full=True)
        values = dictionary
        if is_view:
            # `cast` reads the undefined views of nulls, and ends the process if their lengths are negative.
            values = self._pa.array(dictionary.to_pylist(), self._pa.large_string())
        lengths = self._pa.compute.binary_length(values).cast(self._pa.int64())
        return _Values(dictionary, values, lengths)

    def _count(self, size: int) -> None:
        self._remaining -= size
        if self._remaining < 0:
            raise _too_long(self._bytes_max)


def _memory_of(array: Any) -> tuple[Any, ...]:
    """Return the length of an array, and the place of its buffers, which no other array has meanwhile."""
    buffers = [None if buffer is None else (buffer.address, buffer.size) for buffer in array.buffers()]
    return len(array), array.offset, *buffers


def _bytes_of_views(column: Any) -> int:
    """Return the bytes of all views together, which may share them. Raises: ValueError.

    column: validated, if not in full.
    """
    views = column.buffers()[1]
    if views is None or not len(column):
        return 0
    raw = np.frombuffer(views, "<i4", count=len(column) * VIEW_BYTES // 4, offset=column.offset * VIEW_BYTES)
    # The views of nulls are undefined.
    lengths = raw[:: VIEW_BYTES // 4].astype(np.int64)[column.is_valid().to_numpy(zero_copy_only=False)]
    if (lengths < 0).any():
        raise ValueError("a text of a negative length")
    return int(lengths.sum())


def _check_texts(texts: Sequence[str | None], bytes_max: int) -> None:
    """Check that no text is empty, and how long they are together. Raises: EmptyInput, InvalidInput."""
    if "" in texts:
        raise EmptyInput(f"row {texts.index('')} is an empty text")
    # A dictionary's value is in memory once, however often it is sent on.
    if sum(len(text) for text in texts if text is not None) > bytes_max:
        raise _too_long(bytes_max)


def _too_many(rows_max: int) -> InvalidInput:
    return InvalidInput(f"the Arrow stream has more than {rows_max} rows; send fewer at once")


def _too_long(bytes_max: int) -> InvalidInput:
    return InvalidInput(f"the texts of the Arrow stream have more than {bytes_max} bytes together")


def write_vectors(vectors: Vectors, rows: Rows, form: Form = PLAIN) -> memoryview:
    """Return vectors as an IPC stream with the column `embeddings`. Blocks; for a thread.

    vectors: (texts, dim) float32; they are copied once. rows: of the texts.
    """
    pa = _pyarrow()
    dim = vectors.shape[1]
    kind = pa.list_(pa.field("item", pa.float32(), nullable=False), dim)
    rows_with_nulls = _with_nulls(vectors, rows) if rows.has_nulls else np.ascontiguousarray(vectors)
    values = pa.Array.from_buffers(
        pa.float32(), rows.count * dim, [None, pa.py_buffer(rows_with_nulls.reshape(-1))]
    )
    column = pa.FixedSizeListArray.from_arrays(values, type=kind, mask=_mask(pa, rows))
    return _stream(pa, pa.field("embeddings", kind, nullable=rows.has_nulls), column, rows, form)


def write_sparse(terms: Sequence[TermWeights], rows: Rows, form: Form = PLAIN) -> memoryview:
    """Return term weights as an IPC stream with the column `sparse_embeddings`. Blocks; for a thread.

    terms: of each text. rows: of the texts.
    """
    pa = _pyarrow()
    sizes = np.zeros(rows.count, np.int64)
    sizes[list(rows.texts)] = [len(weights.indices) for weights in terms]
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    indices = np.concatenate([np.empty(0, np.int32), *[weights.indices for weights in terms]])
    values = np.concatenate([np.empty(0, np.float32), *[weights.values for weights in terms]])
    pairs = pa.StructArray.from_arrays(
        [pa.array(indices.astype(np.uint32)), pa.array(values)],
        fields=[
            pa.field("index", pa.uint32(), nullable=False),
            pa.field("value", pa.float32(), nullable=False),
        ],
    )
    kind = pa.list_(pa.field("item", pairs.type, nullable=False))
    column = pa.ListArray.from_arrays(pa.array(offsets), pairs, type=kind, mask=_mask(pa, rows))
    return _stream(
        pa, pa.field("sparse_embeddings", column.type, nullable=rows.has_nulls), column, rows, form
    )


def _with_nulls(vectors: Vectors, rows: Rows) -> Vectors:
    """Return a row of zeros for each null."""
    filled = np.zeros((rows.count, vectors.shape[1]), np.float32)
    filled[list(rows.texts)] = vectors
    return filled


def _mask(pa: Any, rows: Rows) -> Any:
    """Return which rows are null; None if none is."""
    if not rows.has_nulls:
        return None
    mask = np.ones(rows.count, bool)
    mask[list(rows.texts)] = False
    return pa.array(mask)


def _stream(pa: Any, field: Any, column: Any, rows: Rows, form: Form) -> memoryview:
    schema = pa.schema([field], metadata=dict(form.facts) or None)
    options = pa.ipc.IpcWriteOptions(compression=form.codec, use_threads=False)
    starts = np.cumsum((0, *rows.batches)).tolist()[:-1]
    batches = [
        pa.record_batch([column.slice(start, size)], schema=schema)
        for start, size in zip(starts, rows.batches, strict=True)
    ]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return memoryview(sink.getvalue())


@cache
def _pyarrow() -> Any:
    import pyarrow as pa
    import pyarrow.compute
    import pyarrow.ipc

    return pa
