"""Rows of Parquet files."""

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from gateway.cli.embed.fields import check_fields, choose_field
from gateway.cli.embed.packing import Position, Row
from gateway.cli.embed.plan import EmbedFailed, Reading, Source

# pyarrow has no types.
Schema: TypeAlias = Any
DataType: TypeAlias = Any

BATCH_BYTES = 8 * 1024 * 1024
BATCH_ROWS_MAX = 4096
BUFFER_BYTES = 1024 * 1024


class ParquetRows:
    """Reader of Parquet. A row keeps its types. Raises: EmbedFailed."""

    def __init__(self, sources: Sequence[Source], reading: Reading) -> None:
        self._sources = sources
        self._schema = _common_schema(sources)
        self.names = tuple(self._schema.names)
        texts = [field.name for field in self._schema if _is_text(field.type)]
        nulls = [field.name for field in self._schema if pa.types.is_null(field.type)]
        # A column of nulls has no texts, but it is one in other files of its writer.
        chosen = reading.field if reading.field in nulls else None
        self.field = chosen or choose_field(reading.field, self.names, texts, sources[0].path)
        check_fields(self.names, reading.id_field, sources[0].path)
        self._id_field = reading.id_field
        self._groups = 0

    def rows(self, start: Position) -> Iterator[Row]:
        """Yield the rows of all files from a position on. Raises: EmbedFailed."""
        for number in range(start.file, len(self._sources)):
            source = self._sources[number]
            try:
                yield from self._rows_of(source, number, start.offset if number == start.file else 0)
            except (pa.ArrowException, OSError) as error:
                raise EmbedFailed(f"{source.path}: the file cannot be read on: {error}") from error

    def _rows_of(self, source: Source, number: int, skipped: int) -> Iterator[Row]:
        with pq.ParquetFile(source.path, buffer_size=BUFFER_BYTES, pre_buffer=False) as file:
            position = 0
            for group in range(file.num_row_groups):
                facts = file.metadata.row_group(group)
                if position + facts.num_rows <= skipped:
                    position += facts.num_rows
                    continue
                average = max(1, facts.total_byte_size // max(1, facts.num_rows))
                size = min(BATCH_ROWS_MAX, max(1, BATCH_BYTES // average))
                for batch in file.iter_batches(size, row_groups=[group], use_threads=False):
                    yield from self._rows_in(batch, position, number, skipped)
                    position += len(batch)

    def _rows_in(self, batch: Any, position: int, number: int, skipped: int) -> Iterator[Row]:
        """Yield the rows of a batch that begins at a position, without those before `skipped`."""
        if position + len(batch) <= skipped:
            return
        self._groups += 1
        cast = self._cast(batch)
        texts = _texts(cast.column(self.field))
        missing = [False] * len(cast)
        if self._id_field is not None:
            missing = cast.column(self._id_field).is_null().to_pylist()
        size = max(1, batch.nbytes // max(1, len(batch)))
        for index in range(max(0, skipped - position), len(batch)):
            line = position + index + 1
            problem = f"has no `{self._id_field}`" if missing[index] else ""
            text = None if problem else texts[index]
            yield Row(line, text, size, (cast, index), Position(number, line, line), self._groups, problem)

    def _cast(self, batch: Any) -> Any:
        """Return a batch with the columns and types of all files."""
        columns = [batch.column(name).cast(self._schema.field(name).type) for name in self.names]
        return pa.record_batch(columns, schema=self._schema)

    def batch(self, rows: Sequence[Row]) -> Any:
        """Return a record batch of rows of one group."""
        if not rows:
            return pa.record_batch([pa.array([], field.type) for field in self._schema], schema=self._schema)
        batch, first = rows[0].payload
        indices = [row.payload[1] for row in rows]
        if indices[-1] - first == len(indices) - 1:
            return batch.slice(first, len(indices))
        return batch.take(pa.array(indices))


def row_counts(sources: Sequence[Source]) -> list[int]:
    """Return the number of rows of each file. Raises: EmbedFailed."""
    try:
        return [pq.read_metadata(source.path).num_rows for source in sources]
    except (pa.ArrowException, OSError) as error:
        raise EmbedFailed(f"a file cannot be read: {error}") from error


def _common_schema(sources: Sequence[Source]) -> Schema:
    """Return the columns of all files, which have the same names. Raises: EmbedFailed."""
    schemas: list[Schema] = []
    for source in sources:
        try:
            schema = pq.read_schema(source.path).remove_metadata()
        except (pa.ArrowException, OSError) as error:
            raise EmbedFailed(f"{source.path}: is no readable Parquet file: {error}") from error
        if len(set(schema.names)) < len(schema.names):
            raise EmbedFailed(f"{source.path}: several columns have one name")
        if schemas and set(schema.names) != set(schemas[0].names):
            different = sorted(set(schema.names) ^ set(schemas[0].names))
            raise EmbedFailed(f"{source.path}: its columns differ from those of the first file: {different}")
        schemas.append(schema)
    try:
        return pa.unify_schemas(schemas, promote_options="permissive")
    except pa.ArrowException as error:
        raise EmbedFailed(f"the files have columns of different types: {error}") from error


def _is_text(kind: DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _is_text(kind.value_type)
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _texts(column: Any) -> list[str | None]:
    texts: list[str | None] = column.to_pylist()
    return texts
