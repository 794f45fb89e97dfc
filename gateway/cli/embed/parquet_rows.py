"""Rows of Parquet files."""

import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from gateway.cli.embed.fields import DEFAULT_FIELD, check_fields, choose_field
from gateway.cli.embed.json_lines import has_moments, objects_of
from gateway.cli.embed.packing import Position, Row
from gateway.cli.embed.parquet_sizes import RowSizes
from gateway.cli.embed.plan import EmbedFailed, Reading, Source

# pyarrow has no types.
Schema: TypeAlias = Any
DataType: TypeAlias = Any

BUFFER_BYTES = 1024 * 1024
INTEGER = re.compile(r"-?[0-9]{1,10}")


class ParquetRows:
    """Reader of Parquet. A row keeps its types. to_json: the rows become JSON. Raises: EmbedFailed."""

    def __init__(self, sources: Sequence[Source], reading: Reading, *, to_json: bool = False) -> None:
        if reading.encoding is not None:
            raise EmbedFailed("--encoding is for JSONL and CSV; texts of Parquet are UTF-8")
        self._sources = sources
        self._schema = _common_schema(sources)
        self._is_tried = to_json and any(has_moments(field.type) for field in self._schema)
        self.names = tuple(self._schema.names)
        of_folders = {name for source in sources for name, _ in source.partitions}
        texts = [
            field.name for field in self._schema if _is_text(field.type) and field.name not in of_folders
        ]
        nulls = [field.name for field in self._schema if pa.types.is_null(field.type)]
        # A column of nulls has no texts, but it is one in other files of its writer.
        wanted = reading.field or DEFAULT_FIELD
        chosen = wanted if wanted in nulls else None
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
        with (
            pq.ParquetFile(source.path, buffer_size=BUFFER_BYTES, pre_buffer=False) as file,
            closing(RowSizes(source, file, BUFFER_BYTES)) as sizes,
        ):
            position = 0
            for group in range(file.num_row_groups):
                facts = file.metadata.row_group(group)
                if position + facts.num_rows <= skipped:
                    position += facts.num_rows
                    continue
                size = sizes.batch_rows(group)
                for batch in file.iter_batches(size, row_groups=[group], use_threads=False):
                    yield from self._rows_in(batch, position, number, skipped)
                    position += len(batch)

    def _rows_in(self, batch: Any, position: int, number: int, skipped: int) -> Iterator[Row]:
        """Yield the rows of a batch that begins at a position, without those before `skipped`."""
        if position + len(batch) <= skipped:
            return
        self._groups += 1
        cast = self._cast(batch, self._sources[number])
        problems = _problems(cast)
        if self._is_tried and not any(problems):
            self._try_json(cast, self._sources[number], position)
        column = cast.column(self.field)
        texts = (
            [None if problem else value.as_py() for problem, value in zip(problems, column, strict=True)]
            if any(problems)
            else column.to_pylist()
        )
        if self._id_field is not None:
            missing = cast.column(self._id_field).is_null().to_pylist()
            lacking = f"has no `{self._id_field}`"
            problems = [
                problem or lacking * absent for problem, absent in zip(problems, missing, strict=True)
            ]
        size = max(1, batch.nbytes // max(1, len(batch)))
        for index in range(max(0, skipped - position), len(batch)):
            line = position + index + 1
            text = None if problems[index] else texts[index]
            end = Position(number, line, line)
            yield Row(line, text, size, (cast, index), end, self._groups, problems[index])

    def _try_json(self, batch: Any, source: Source, position: int) -> None:
        """Check that values can be written as JSON, before a call is made for them. Raises: EmbedFailed."""
        try:
            objects_of(batch)
        except EmbedFailed as error:
            place = f"rows {position + 1} to {position + len(batch)}"
            raise EmbedFailed(f"{source.path} {place}: {error}") from error

    def _cast(self, batch: Any, source: Source) -> Any:
        """Return a batch with the columns and types of all files, and those of its folders."""
        of_folders = dict(source.partitions)
        columns = []
        for field in self._schema:
            if field.name in batch.schema.names:
                columns.append(batch.column(field.name).cast(field.type))
            else:
                columns.append(pa.array([of_folders[field.name]] * len(batch), pa.string()).cast(field.type))
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
    kinds = _partition_kinds(sources)
    for source in sources:
        try:
            schema = pq.read_schema(source.path).remove_metadata()
        except (pa.ArrowException, OSError) as error:
            raise EmbedFailed(f"{source.path}: is no readable Parquet file: {error}") from error
        if len(set(schema.names)) < len(schema.names):
            raise EmbedFailed(f"{source.path}: several columns have one name")
        for name, kind in kinds.items():
            if name in dict(source.partitions) and name not in schema.names:
                schema = schema.append(pa.field(name, kind))
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


def _partition_kinds(sources: Sequence[Source]) -> dict[str, DataType]:
    """Return the types of the columns in the names of folders: 32-bit integers, else texts."""
    values: dict[str, list[str]] = {}
    for source in sources:
        for name, value in source.partitions:
            values.setdefault(name, []).extend([] if value is None else [value])
    return {name: pa.int32() if _are_int32(found) else pa.string() for name, found in values.items()}


def _are_int32(values: Sequence[str]) -> bool:
    numbers = [value for value in values if INTEGER.fullmatch(value) and -(2**31) <= int(value) < 2**31]
    return bool(values) and len(numbers) == len(values)


def _problems(batch: Any) -> list[str]:
    """Return the problem of each row: a value that is damaged, as a text that is not UTF-8."""
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid:
        return [_problem(batch.take(pa.array([index]))) for index in range(len(batch))]
    return [""] * len(batch)


def _problem(row: Any) -> str:
    for name, column in zip(row.schema.names, row.columns, strict=True):
        try:
            column.validate(full=True)
        except pa.ArrowInvalid as error:
            return f"`{name}` is damaged, or no UTF-8: {str(error).splitlines()[0]}"
    return ""
