"""Rows of Parquet files, decoded in bounded pieces.

pyarrow bounds a batch by rows only, and one value of a dictionary may stand for many rows: a small file can
be gigabytes once it is decoded. So `RowSizes` finds how many rows of a row group may be decoded at once.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing, suppress

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gateway.cli.embed.outputs import has_moments, objects_of
from gateway.cli.embed.plan import EmbedFailed, Position, Settings, Source
from gateway.cli.embed.text_rows import DEFAULT_FIELD, Row, check_fields, choose_field

BUFFER_BYTES = 1024 * 1024
# As the file states its sizes, and at most with all values of a dictionary as long as its longest.
BATCH_BYTES, BATCH_BYTES_MAX = 8 * 1024 * 1024, 256 * 1024 * 1024
BATCH_ROWS_MAX = 4096
ROW_BYTES_MAX = 1024 * 1024 * 1024
# A row group that is larger than a batch may stand for this many times its bytes in the file.
RATIO_MAX = 10_000
NUMBER_BYTES = 8


class ParquetRows:
    """Reader of Parquet. A row keeps its types. to_json: the rows become JSON. Raises: EmbedFailed."""

    def __init__(self, settings: Settings, *, to_json: bool = False) -> None:
        if settings.encoding is not None:
            raise EmbedFailed("--encoding is for JSONL and CSV; texts of Parquet are UTF-8")
        self._sources = settings.sources
        self._schema = _common_schema(settings.sources)
        self._is_tried = to_json and any(has_moments(field.type) for field in self._schema)
        self.names: tuple[str, ...] = tuple(self._schema.names)
        of_folders = {name for source in settings.sources for name, _ in source.partitions}
        columns = [field for field in self._schema if field.name not in of_folders]
        texts = [field.name for field in columns if _is_text(field.type)]
        # A column of nulls has no texts, but it is one in other files of its writer.
        wanted, path = settings.field or DEFAULT_FIELD, settings.sources[0].path
        is_null = wanted in self.names and pa.types.is_null(self._schema.field(wanted).type)
        self.field = wanted if is_null else choose_field(settings.field, self.names, texts, path)
        check_fields(self.names, settings.id_field, path)
        self._id_field = settings.id_field
        self._groups = 0

    def ends(self) -> list[int]:
        """Return the number of rows of each file. Raises: EmbedFailed."""
        try:
            return [pq.read_metadata(source.path).num_rows for source in self._sources]
        except (pa.ArrowException, OSError) as error:
            raise EmbedFailed(f"a file cannot be read: {error}") from error

    def rows(self, start: Position) -> Iterator[Row]:
        """Yield the rows of all files from a position on. Raises: EmbedFailed."""
        for number in range(start.file, len(self._sources)):
            try:
                yield from self._rows_of(number, start.offset if number == start.file else 0)
            except (pa.ArrowException, OSError) as error:
                raise EmbedFailed(
                    f"{self._sources[number].path}: the file cannot be read on: {error}"
                ) from error

    def _rows_of(self, number: int, skipped: int) -> Iterator[Row]:
        source, position = self._sources[number], 0
        with (
            pq.ParquetFile(source.path, buffer_size=BUFFER_BYTES, pre_buffer=False) as file,
            closing(RowSizes(source, file)) as sizes,
        ):
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                if position + rows <= skipped:
                    position += rows
                    continue
                size = sizes.batch_rows(group)
                for batch in file.iter_batches(size, row_groups=[group], use_threads=False):
                    if position + len(batch) > skipped:
                        yield from self._rows_in(batch, position, number, skipped)
                    position += len(batch)

    def _rows_in(self, batch: pa.RecordBatch, position: int, number: int, skipped: int) -> Iterator[Row]:
        """Yield the rows of a batch that begins at a position, without those before `skipped`."""
        self._groups += 1
        batch = self._cast(batch, self._sources[number])
        problems = _problems(batch)
        if self._is_tried and not any(problems):
            self._try_json(batch, self._sources[number], position)
        column = batch.column(self.field)
        # Values that are damaged cannot be converted.
        texts = (
            [None if problem else value.as_py() for problem, value in zip(problems, column, strict=True)]
            if any(problems)
            else column.to_pylist()
        )
        if self._id_field is not None:
            absent = batch.column(self._id_field).is_null().to_pylist()
            lacking = f"has no `{self._id_field}`"
            problems = [bad or lacking * is_absent for bad, is_absent in zip(problems, absent, strict=True)]
        size = max(1, batch.nbytes // max(1, len(batch)))
        for index in range(max(0, skipped - position), len(batch)):
            line, problem = position + index + 1, problems[index]
            text = None if problem else texts[index]
            end = Position(number, line, line)
            yield Row(line, text, size, (batch, index), end, self._groups, problem)

    def _try_json(self, batch: pa.RecordBatch, source: Source, position: int) -> None:
        """Check that values can be written as JSON, before a call is made for them. Raises: EmbedFailed."""
        try:
            objects_of(batch)
        except EmbedFailed as error:
            place = f"rows {position + 1} to {position + len(batch)}"
            raise EmbedFailed(f"{source.path} {place}: {error}") from error

    def _cast(self, batch: pa.RecordBatch, source: Source) -> pa.RecordBatch:
        """Return a batch with the columns and types of all files, and those of its folders."""
        of_folders = dict(source.partitions)
        columns = [
            batch.column(name) if name in batch.schema.names else pa.array([of_folders[name]] * len(batch))
            for name in self.names
        ]
        casts = [column.cast(field.type) for column, field in zip(columns, self._schema, strict=True)]
        return pa.record_batch(casts, schema=self._schema)

    def batch(self, rows: Sequence[Row]) -> pa.RecordBatch:
        """Return a record batch of rows of one group."""
        if not rows:
            return pa.record_batch([pa.array([], field.type) for field in self._schema], schema=self._schema)
        batch, first = rows[0].payload
        indices = [row.payload[1] for row in rows]
        if indices[-1] - first == len(indices) - 1:
            return batch.slice(first, len(indices))
        return batch.take(pa.array(indices))


def _common_schema(sources: Sequence[Source]) -> pa.Schema:
    """Return the columns of all files, which have the same names. Raises: EmbedFailed."""
    schemas: list[pa.Schema] = []
    kinds = _partition_kinds(sources)
    for source in sources:
        try:
            schema = pq.read_schema(source.path).remove_metadata()
        except (pa.ArrowException, OSError) as error:
            raise EmbedFailed(f"{source.path}: is no readable Parquet file: {error}") from error
        if len(set(schema.names)) < len(schema.names):
            raise EmbedFailed(f"{source.path}: several columns have one name")
        for name, _ in source.partitions:
            if name not in schema.names:
                schema = schema.append(pa.field(name, kinds[name]))
        if schemas and set(schema.names) != set(schemas[0].names):
            different = sorted(set(schema.names) ^ set(schemas[0].names))
            raise EmbedFailed(f"{source.path}: its columns differ from those of the first file: {different}")
        schemas.append(schema)
    try:
        return pa.unify_schemas(schemas, promote_options="permissive")
    except pa.ArrowException as error:
        raise EmbedFailed(f"the files have columns of different types: {error}") from error


def _partition_kinds(sources: Sequence[Source]) -> dict[str, pa.DataType]:
    """Return the types of the columns in the names of folders: 32-bit integers, else texts."""
    values: dict[str, list[str | None]] = {}
    for source in sources:
        for name, value in source.partitions:
            values.setdefault(name, []).append(value)
    kinds = dict.fromkeys(values, pa.string())
    for name, found in values.items():
        with suppress(pa.ArrowInvalid):
            if pa.array(found, pa.string()).cast(pa.int32()).null_count < len(found):
                kinds[name] = pa.int32()
    return kinds


def _is_text(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _problems(batch: pa.RecordBatch) -> list[str]:
    """Return the problem of each row: a value that is damaged, as a text that is not UTF-8."""
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid:
        return [_problem(batch.take(pa.array([index]))) for index in range(len(batch))]
    return [""] * len(batch)


def _problem(row: pa.RecordBatch) -> str:
    for name, column in zip(row.schema.names, row.columns, strict=True):
        try:
            column.validate(full=True)
        except pa.ArrowInvalid as error:
            return f"`{name}` is damaged, or no UTF-8: {str(error).splitlines()[0]}"
    return ""


class RowSizes:
    """Sizes of the rows of a file once they are decoded.

    Raises: EmbedFailed; pyarrow's errors if the file is damaged.
    """

    def __init__(self, source: Source, file: pq.ParquetFile) -> None:
        self._source = source
        self._metadata = file.metadata
        # Columns of bytes that have a dictionary in any row group.
        groups = map(file.metadata.row_group, range(file.metadata.num_row_groups))
        self._names = list(
            dict.fromkeys(
                column.path_in_schema
                for group in groups
                for column in map(group.column, range(group.num_columns))
                if column.physical_type == "BYTE_ARRAY" and column.has_dictionary_page
            )
        )
        self._encoded = pq.ParquetFile(
            source.path, read_dictionary=self._names, buffer_size=BUFFER_BYTES, pre_buffer=False
        )

    def close(self) -> None:
        """Close the file."""
        self._encoded.close()

    def batch_rows(self, group: int) -> int:
        """Return how many rows of a row group may be decoded at once."""
        facts = self._metadata.row_group(group)
        rows = max(1, facts.num_rows)
        columns = [facts.column(index) for index in range(facts.num_columns)]
        # Before the dictionaries are read.
        self._check(group, rows, sum(column.num_values * NUMBER_BYTES // 2 for column in columns))
        longest = self._longest(group)
        decoded = sum(self._decoded_bytes(index, column, longest) for index, column in enumerate(columns))
        self._check(group, rows, decoded)
        stored = max(1, sum(column.total_compressed_size for column in columns))
        if decoded > BATCH_BYTES_MAX and decoded > RATIO_MAX * stored:
            raise EmbedFailed(
                f"{self._source.path}: {stored:,} bytes of row group {group + 1} stand for {decoded:,} bytes "
                f"of rows; at most {RATIO_MAX:,} times as many are read"
            )
        by_file = BATCH_BYTES // max(1, facts.total_byte_size // rows)
        by_values = BATCH_BYTES_MAX // max(1, decoded // rows)
        return int(max(1, min(BATCH_ROWS_MAX, by_file, by_values)))

    def _check(self, group: int, rows: int, decoded: int) -> None:
        if decoded // rows > ROW_BYTES_MAX:
            raise EmbedFailed(
                f"{self._source.path}: a row of row group {group + 1} has {decoded // rows:,} bytes; at most "
                f"{ROW_BYTES_MAX:,} are read"
            )

    def _decoded_bytes(self, index: int, column: pq.ColumnChunkMetaData, longest: dict[str, int]) -> int:
        if column.physical_type == "FIXED_LEN_BYTE_ARRAY":
            return int(column.num_values * self._metadata.schema.column(index).length)
        if column.physical_type != "BYTE_ARRAY":
            return int(column.num_values * NUMBER_BYTES)
        of_dictionary = longest.get(column.path_in_schema, 0) if column.has_dictionary_page else 0
        return int(column.total_uncompressed_size + column.num_values * of_dictionary)

    def _longest(self, group: int) -> dict[str, int]:
        """Return the length of the longest value in each dictionary that the first row needs."""
        if not self._names:
            return {}
        # The dictionary is read whole with the first row. Other rows stay encoded, and are not read.
        batch = next(self._encoded.iter_batches(1, row_groups=[group], columns=self._names), None)
        longest: dict[str, int] = {}
        for name, column in zip(() if batch is None else batch.schema.names, batch or (), strict=False):
            lengths = [pc.max(pc.binary_length(values)).as_py() or 0 for values in _dictionaries(column)]
            own = (path for path in self._names if path == name or path.startswith(f"{name}."))
            longest |= dict.fromkeys(own, max(lengths, default=0))
        return longest


def _dictionaries(column: pa.Array) -> list[pa.Array]:
    """Return the dictionaries in a column, which may have lists and structs around them."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        return [column.dictionary]
    if pa.types.is_struct(kind):
        return [found for index in range(kind.num_fields) for found in _dictionaries(column.field(index))]
    if pa.types.is_map(kind):
        return [*_dictionaries(column.keys), *_dictionaries(column.items)]
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _dictionaries(column.values)
    return []
