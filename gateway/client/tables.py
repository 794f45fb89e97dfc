"""Tables of rows in, and tables with vectors out: texts, calls, and the columns that are added. Pure."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gateway.client.errors import CallFailed, Refused
from gateway.client.replies import Reply, Vectors
from gateway.client.request import Space, same_space

ERROR_KIND, ERROR_MESSAGE, TRUNCATED = "error_kind", "error_message", "truncated"
# Column of the numbers of rows, where no column is the key.
ROW = "row"
# Of a row without text; the gateway has the same kind.
EMPTY = ("empty_input", "the text is null or empty")
# Of the texts of a call.
TEXT_BYTES = 1024 * 1024
NUMBERS_MAX = 2**31 - 1


class Embedded(NamedTuple):
    """Rows with vectors, and those that cannot be embedded.

    table: the columns of the input, `embedding` as a list of fixed size of float32, and `truncated`: whether
    the model cut the text, null if the server does not say. bad: the key of each bad row, or its number from
    0 in `row`, with `error_kind` and `error_message`.
    """

    table: pa.Table
    bad: pa.Table


class Spaces:
    """Vector space of all replies to one client. fingerprint: of the only one that is accepted, if given."""

    def __init__(self, fingerprint: str | None) -> None:
        self.space: Space | None = None
        self._fingerprint = fingerprint

    def add(self, reply: Reply) -> None:
        """Take the space of a reply. Raises: CallFailed if it is another one."""
        space = Space(reply.vectors.shape[1], reply.fingerprint, reply.model)
        if self._fingerprint is not None and space.fingerprint != self._fingerprint:
            raise CallFailed(
                f"the server's vectors have the fingerprint {space.fingerprint or 'none'}, and this client "
                f"accepts {self._fingerprint} only"
            )
        self.space = same_space(self.space, space)


class TableRows:
    """Texts of a table, and the replies to them so far."""

    def __init__(self, table: pa.Table, column: str, spaces: Spaces) -> None:
        self.table = table
        self.texts: Sequence[str | None] = [text or None for text in texts_of(table, column)]
        self._spaces = spaces
        self._vectors: Vectors | None = None
        self._errors: dict[int, tuple[str, str]] = {
            index: EMPTY for index, text in enumerate(self.texts) if text is None
        }
        self._truncated: list[bool | None] = [False] * len(self.texts)

    def add(self, reply: Reply, indices: Sequence[int]) -> None:
        """Add the vectors of texts. Raises: CallFailed if they are of another space."""
        self._spaces.add(reply)
        if self._vectors is None:
            self._vectors = np.zeros((len(self.texts), reply.vectors.shape[1]), np.float32)
        self._vectors[indices] = reply.vectors
        cut = range(len(indices)) if reply.truncated is None else reply.truncated
        for place in cut:
            self._truncated[indices[place]] = None if reply.truncated is None else True

    def refuse(self, index: int, kind: str, message: str) -> None:
        """Note why a row has no vector."""
        self._errors[index] = (kind, message)

    def result(self, into: str, dimensions: int) -> pa.Table:
        """Return the rows with the columns of vectors, cuts and errors."""
        rows = len(self.texts)
        vectors = np.zeros((rows, dimensions), np.float32) if self._vectors is None else self._vectors
        is_bad = np.zeros(rows, bool)
        is_bad[list(self._errors)] = True
        errors = [self._errors.get(index, (None, None)) for index in range(rows)]
        truncated = [None if bad else cut for bad, cut in zip(is_bad, self._truncated, strict=True)]
        columns = {
            into: vector_lists(vectors, is_bad),
            TRUNCATED: pa.array(truncated, pa.bool_()),
            ERROR_KIND: pa.array([kind for kind, _ in errors], pa.string()),
            ERROR_MESSAGE: pa.array([message for _, message in errors], pa.string()),
        }
        table = self.table
        for name, values in columns.items():
            table = table.append_column(name, values)
        return table


class CallRows:
    """Rows of one call: consecutive ones of a table."""

    def __init__(self, rows: TableRows, start: int, stop: int) -> None:
        self.texts = rows.texts[start:stop]
        self._rows = rows
        self._start = start

    def add(self, reply: Reply, indices: Sequence[int]) -> None:
        """Add the vectors of texts. Raises: CallFailed if they are of another space."""
        self._rows.add(reply, [self._start + index for index in indices])

    def refuse(self, index: int, error: Refused) -> None:
        """Note why a row has no vector."""
        self._rows.refuse(self._start + index, error.kind, str(error))

    def place(self, first: int, last: int | None = None) -> str:
        """Return the words for a row, or for the rows up to a last one."""
        place = f"row {self._start + first}"
        return place if last is None else f"{place} to {self._start + last}"


def table_of(rows: Any) -> pa.Table:
    """Return a table, record batch, or anything that exports an Arrow stream, as a table."""
    return rows if isinstance(rows, pa.Table) else pa.table(rows)


def texts_of(table: pa.Table, column: str) -> list[str | None]:
    """Return the texts of a column. Raises: ValueError if it has none."""
    if table.column_names.count(column) != 1:
        raise ValueError(f"the table has no column `{column}`, or several; it has {table.column_names}")
    values = table[column]
    kind = values.type.value_type if pa.types.is_dictionary(values.type) else values.type
    # A column of nulls has no type of its own.
    if kind not in (pa.string(), pa.large_string(), pa.string_view(), pa.null()):
        raise ValueError(f"the column `{column}` holds no texts, but {values.type}")
    texts: list[str | None] = values.to_pylist()
    return texts


def check_columns(table: pa.Table, into: str) -> None:
    """Check that the columns to be added are not there. Raises: ValueError."""
    taken = sorted({into, TRUNCATED, ERROR_KIND, ERROR_MESSAGE} & set(table.column_names))
    if taken:
        raise ValueError(f"the table has a column `{taken[0]}` already; rename it, or name `into` otherwise")


def calls_of(rows: TableRows, inputs_max: int) -> Iterator[CallRows]:
    """Yield the rows of each call: at most so many texts and `TEXT_BYTES`; a larger text goes alone."""
    start = inputs = size = 0
    for index, text in enumerate(rows.texts):
        own = 0 if text is None else len(text) if text.isascii() else len(text.encode())
        if inputs and text is not None and (inputs == inputs_max or size + own > TEXT_BYTES):
            yield CallRows(rows, start, index)
            start, inputs, size = index, 0, 0
        inputs += text is not None
        size += own
    if inputs:
        yield CallRows(rows, start, len(rows.texts))


def vector_lists(vectors: Vectors, is_null: "np.ndarray[tuple[int], np.dtype[np.bool_]]") -> pa.ChunkedArray:
    """Return vectors as a column of lists.

    The lists have no fixed size: Spark has no such type, and pyarrow before 26 reads no Parquet file with
    nulls in it.
    """
    kind = pa.list_(pa.from_numpy_dtype(vectors.dtype))
    # Offsets have 32 bits.
    most = NUMBERS_MAX // vectors.shape[1]
    chunks = []
    for start in range(0, len(vectors), most):
        part, valid = vectors[start : start + most], ~is_null[start : start + most]
        offsets = np.append(0, np.cumsum(valid)) * vectors.shape[1]
        buffers = [pa.array(valid).buffers()[1], pa.py_buffer(offsets.astype(np.int32))]
        values = pa.array(part[valid].reshape(-1))
        chunks.append(pa.Array.from_buffers(kind, len(part), buffers, children=[values]))
    return pa.chunked_array(chunks, kind)


def with_fixed_size(table: pa.Table, column: str, dimensions: int) -> pa.Table:
    """Return a table whose lists of a column have a fixed size; none is null."""
    lists = table[column].cast(pa.list_(pa.float32(), dimensions))
    return table.set_column(table.column_names.index(column), column, lists)


def split(rows: Any, key: str | None = None) -> Embedded:
    """Return the rows of `embed_rows` as a table with vectors, and one of bad rows. Raises: KeyError.

    key: column that identifies a row; without one, bad rows have their number in `rows`.
    """
    table = table_of(rows)
    if key is None:
        key, numbers = ROW, pa.array(np.arange(len(table)))
        bad = table if ROW not in table.column_names else table.drop_columns([ROW])
        bad = bad.append_column(ROW, numbers)
    else:
        bad = table
    is_good = pc.is_null(table[ERROR_KIND])
    good = table.filter(is_good).drop_columns([ERROR_KIND, ERROR_MESSAGE])
    return Embedded(good, bad.select([key, ERROR_KIND, ERROR_MESSAGE]).filter(pc.invert(is_good)))


def remaining(rows: Any, key: str, done: pa.Array | pa.ChunkedArray) -> pa.Table:
    """Return the rows whose key is not among those of an earlier run. done: finished keys, bad rows' too."""
    table = table_of(rows)
    return table.filter(pc.invert(pc.is_in(table[key], value_set=done)))
