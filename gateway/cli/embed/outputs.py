"""Files with vectors: Parquet, Arrow, Lance and JSONL, written from parts in a bounded memory."""

import gzip
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gateway.cli.embed.json_columns import JsonColumns
from gateway.cli.embed.json_lines import as_stored, lines_of, objects_of
from gateway.cli.embed.plan import EmbedFailed, Output
from gateway.cli.embed.replies import Vectors

# pyarrow has no types.
Schema: TypeAlias = Any
Table: TypeAlias = Any

GROUP_BYTES = 32 * 1024 * 1024


class Rows(NamedTuple):
    """Rows with their vectors, (rows, dim); a null has zeros."""

    columns: Any
    vectors: Vectors
    is_null: list[bool]


class Content(NamedTuple):
    """All rows, to be read as often as needed. has_lines: whether the one column has lines of JSON.

    batches: the columns of the input, and the bytes of the vectors as the last column. written: takes the
    number of rows after each write.
    """

    batches: Callable[[], Iterator[Any]]
    has_lines: bool
    dimensions: int
    written: Callable[[int], None]


def check_output(output: Output) -> None:
    """Check that the format can be written. Raises: EmbedFailed."""
    if output.format == "lance" and find_spec("lance") is None:
        raise EmbedFailed(
            f"{output.path}: Lance needs the package pylance: install the gateway's extra `lance`, "
            "or write Parquet, which LanceDB reads"
        )


def write_output(content: Content, output: Output, path: Path, facts: Mapping[str, str]) -> tuple[str, ...]:
    """Write all rows to a path; return the columns that became the text of JSON. Blocks; for a thread.

    facts: metadata of the file, where its format has such. Raises: EmbedFailed, OSError.
    """
    try:
        if output.format == "jsonl":
            _write_lines(content, output, path)
            return ()
        return _write_columns(content, output, path, facts)
    except pa.ArrowException as error:
        raise EmbedFailed(f"{output.path}: {output.format} cannot hold these columns: {error}") from error


def _write_columns(content: Content, output: Output, path: Path, facts: Mapping[str, str]) -> tuple[str, ...]:
    columns = JsonColumns(content.batches()) if content.has_lines else None
    schema = _schema(content, output, None if columns is None else columns.schema).with_metadata(dict(facts))

    def tables() -> Iterator[Table]:
        for rows in _rows(content):
            batch = rows.columns if columns is None else columns.batch(rows.columns.column(0))
            yield _with_vectors(batch, rows, schema)

    grouped = _grouped(tables())
    match output.format:
        case "lance":
            _write_lance(grouped, schema, path)
        case "arrow":
            with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema) as writer:
                for table in grouped:
                    writer.write_table(table)
        case _:
            # Vectors neither repeat nor shrink.
            dictionary = [name for name in schema.names if name != output.column]
            with pq.ParquetWriter(path, schema, use_dictionary=dictionary, compression="snappy") as writer:
                for table in grouped:
                    writer.write_table(table, row_group_size=max(1, len(table)))
    return () if columns is None else columns.as_json


def _schema(content: Content, output: Output, columns: Schema | None) -> Schema:
    """Return the schema of the output. Raises: EmbedFailed."""
    if columns is None:
        columns = next(content.batches()).schema.remove_metadata()
        columns = columns.remove(len(columns.names) - 1)
    if output.format != "parquet":
        # A file of Arrow has one dictionary for all its batches, and Lance has none.
        for index, field in enumerate(columns):
            if pa.types.is_dictionary(field.type):
                columns = columns.set(index, field.with_type(field.type.value_type))
    number = pa.float32() if output.dtype == "float32" else pa.float16()
    return columns.append(pa.field(output.column, pa.list_(number, content.dimensions)))


def _rows(content: Content) -> Iterator[Rows]:
    for batch in content.batches():
        last = batch.num_columns - 1
        vectors = batch.column(last)
        is_null = vectors.is_null().to_pylist()
        filled = np.zeros((len(batch), content.dimensions), np.float32)
        packed = b"".join(vectors.drop_null().to_pylist())
        filled[~np.asarray(is_null, bool)] = np.frombuffer(packed, "<f4").reshape(-1, content.dimensions)
        yield Rows(batch.remove_column(last), filled, is_null)
        content.written(len(batch))


def _with_vectors(batch: Any, rows: Rows, schema: Schema) -> Table:
    kind = schema.field(len(schema.names) - 1).type
    numbers = as_stored(rows.vectors, "float16" if pa.types.is_float16(kind.value_type) else "float32")
    values = pa.array(numbers.reshape(-1), kind.value_type)
    vectors = pa.FixedSizeListArray.from_arrays(values, type=kind, mask=pa.array(rows.is_null, pa.bool_()))
    columns = [column.cast(schema.field(index).type) for index, column in enumerate(batch.columns)]
    return pa.table([*columns, vectors], schema=schema)


def _grouped(tables: Iterable[Table]) -> Iterator[Table]:
    """Yield tables of many rows each."""
    group: list[Table] = []
    size = 0
    for table in tables:
        group.append(table)
        size += table.nbytes
        if size >= GROUP_BYTES:
            yield pa.concat_tables(group)
            group, size = [], 0
    if group:
        yield pa.concat_tables(group)


def _write_lance(tables: Iterator[Table], schema: Schema, path: Path) -> None:
    import lance

    batches = (batch for table in tables for batch in table.to_batches())
    try:
        lance.write_dataset(pa.RecordBatchReader.from_batches(schema, batches), str(path), schema=schema)
    except (OSError, ValueError, RuntimeError) as error:
        raise EmbedFailed(f"Lance cannot write these rows: {str(error)[:300]}") from error


def _write_lines(content: Content, output: Output, path: Path) -> None:
    with path.open("wb") as raw:
        is_gzip = output.path.suffix == ".gz"
        file = (
            cast("IO[bytes]", gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=3, mtime=0))
            if is_gzip
            else raw
        )
        for rows in _rows(content):
            lines = rows.columns.column(0).to_pylist() if content.has_lines else objects_of(rows.columns)
            file.write(lines_of(lines, output.column, as_stored(rows.vectors, output.dtype), rows.is_null))
        file.close()
