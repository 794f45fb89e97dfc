"""Files with vectors: Parquet, Arrow, Lance and JSONL, written from parts in a bounded memory.

Columns of JSONL get their types from all rows. pyarrow's reader of JSON is not used: it takes the types from
the first block, reads texts that look like moments as moments, and refuses values without a common type.
"""

import gzip
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from gateway.cli.embed.plan import EmbedFailed, Plan
from gateway.client.tables import vector_lists

GROUP_BYTES = 32 * 1024 * 1024
COLUMNS_MAX, FIELDS_MAX, DEPTH_MAX = 10_000, 1000, 16
INT_MIN, INT_MAX = -(2**63), 2**63 - 1
# Integers up to here are exact as float64.
EXACT_MAX = 2**53

# Type that JSON values have in common. Lists have one item, and objects their fields. large: integers beyond
# those that float64 holds exactly. json: values without a type in common, stored as the text of their JSON.
Shape: TypeAlias = str | list[Any] | dict[str, Any]
TYPES = {
    "null": pa.null(),
    "bool": pa.bool_(),
    "int": pa.int64(),
    "large": pa.int64(),
    "float": pa.float64(),
    "string": pa.string(),
    "json": pa.string(),
}
# Shapes that different kinds of numbers have in common.
NUMBERS = {frozenset({"int", "float"}): "float", frozenset({"int", "large"}): "large"}

_OBJECT = msgspec.json.Decoder(dict[str, Any])
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


class JsonText(str):
    """JSON of a value that has no counterpart, such as a number of 5,000 digits."""

    __slots__ = ()


PYTHON_TYPES = {type(None): "null", bool: "bool", float: "float", str: "string", JsonText: "json"}


def check_output(plan: Plan) -> None:
    """Check that the format can be written. Raises: EmbedFailed."""
    if plan.output_format == "lance" and find_spec("lance") is None:
        raise EmbedFailed(
            f"{plan.output}: Lance needs the package pylance: install the gateway's extra `lance`, "
            "or write Parquet, which LanceDB reads"
        )


class Writer:
    """Writer of an output. written: takes the number of rows after each write.

    batches: yields the columns of the input, and last the bytes of the vectors.
    """

    def __init__(
        self,
        plan: Plan,
        batches: Callable[[], Iterator[pa.RecordBatch]],
        dimensions: int,
        written: Callable[[int], None],
    ) -> None:
        self._output, self._format, self._dtype = plan.output, plan.output_format, plan.dtype
        self._column = plan.settings.column
        self._has_lines = plan.settings.sources[0].format == "jsonl"
        self._batches = batches
        self._dimensions = dimensions
        # pyarrow before 26 reads no Parquet file with nulls among lists of a fixed size.
        may_be_null = plan.output_format == "parquet" and plan.settings.on_empty == "null"
        self._list_size = -1 if may_be_null else dimensions
        self._written = written

    def write(self, path: Path, facts: Mapping[str, str]) -> tuple[str, ...]:
        """Write all rows to a path; return the columns that became the text of JSON. Blocks; for a thread.

        facts: metadata of the file, where its format has such. Raises: EmbedFailed, OSError.
        """
        try:
            if self._format == "jsonl":
                self._write_lines(path)
                return ()
            return self._write_columns(path, facts)
        except pa.ArrowException as error:
            raise EmbedFailed(f"{self._output}: {self._format} cannot hold these columns: {error}") from error

    def _rows(self) -> Iterator[tuple[pa.RecordBatch, Any, list[bool]]]:
        """Yield the columns of rows, their vectors in the type of the output, and which vectors are null."""
        for batch in self._batches():
            if not len(batch):
                continue
            last = batch.num_columns - 1
            packed = batch.column(last)
            data = packed.buffers()[2]
            if packed.null_count:
                # A null becomes zeros.
                data = packed.cast(pa.binary(4 * self._dimensions)).buffers()[1]
            numbers = np.frombuffer(data, "<f4", len(batch) * self._dimensions)
            vectors = numbers.reshape(-1, self._dimensions).astype(self._dtype, copy=False)
            yield batch.remove_column(last), vectors, packed.is_null().to_pylist()
            self._written(len(batch))

    def _write_lines(self, path: Path) -> None:
        with path.open("wb") as raw:
            is_gzip = self._output.suffix == ".gz"
            file = gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=3, mtime=0) if is_gzip else raw
            for columns, vectors, is_null in self._rows():
                objects = columns.column(0).to_pylist() if self._has_lines else objects_of(columns)
                file.write(lines_of(objects, self._column, vectors, is_null))
            file.close()

    def _write_columns(self, path: Path, facts: Mapping[str, str]) -> tuple[str, ...]:
        columns = JsonColumns(self._batches()) if self._has_lines else None
        schema = self._schema(columns).with_metadata(dict(facts))
        grouped = _grouped(self._tables(columns, schema))
        match self._format:
            case "lance":
                _write_lance(grouped, schema, path)
            case "arrow":
                with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema) as writer:
                    for table in grouped:
                        writer.write_table(table)
            case _:
                # Vectors neither repeat nor shrink.
                dictionary = [name for name in schema.names if name != self._column]
                with pq.ParquetWriter(path, schema, use_dictionary=dictionary) as writer:
                    for table in grouped:
                        writer.write_table(table, row_group_size=max(1, len(table)))
        return () if columns is None else columns.as_json

    def _schema(self, columns: "JsonColumns | None") -> pa.Schema:
        """Return the schema of the output. Raises: EmbedFailed."""
        if columns is None:
            schema = next(self._batches()).schema.remove_metadata()
            schema = schema.remove(len(schema.names) - 1)
        else:
            schema = columns.schema
        if self._format != "parquet":
            # A file of Arrow has one dictionary for all its batches, and Lance has none.
            for index, field in enumerate(schema):
                if pa.types.is_dictionary(field.type):
                    schema = schema.set(index, field.with_type(field.type.value_type))
        number = pa.float32() if self._dtype == "float32" else pa.float16()
        return schema.append(pa.field(self._column, pa.list_(number, self._list_size)))

    def _tables(self, columns: "JsonColumns | None", schema: pa.Schema) -> Iterator[pa.Table]:
        *kinds, kind = schema.types
        for rows, vectors, is_null in self._rows():
            batch = rows if columns is None else columns.batch(rows.column(0))
            if self._list_size < 0:
                lists = vector_lists(vectors, np.array(is_null, bool))
            else:
                mask = pa.array(is_null, pa.bool_())
                lists = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), type=kind, mask=mask)
            cast_columns = [column.cast(to) for column, to in zip(batch.columns, kinds, strict=True)]
            yield pa.table([*cast_columns, lists], schema=schema)


def _grouped(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Yield tables of many rows each."""
    group: list[pa.Table] = []
    size = 0
    for table in tables:
        group.append(table)
        size += table.nbytes
        if size >= GROUP_BYTES:
            yield pa.concat_tables(group)
            group, size = [], 0
    if group:
        yield pa.concat_tables(group)


def _write_lance(tables: Iterator[pa.Table], schema: pa.Schema, path: Path) -> None:
    import lance

    batches = (batch for table in tables for batch in table.to_batches())
    try:
        lance.write_dataset(pa.RecordBatchReader.from_batches(schema, batches), str(path), schema=schema)
    except (OSError, ValueError, RuntimeError) as error:
        raise EmbedFailed(f"Lance cannot write these rows: {str(error)[:300]}") from error


def lines_of(rows: Sequence[bytes], name: str, vectors: Any, is_null: Sequence[bool]) -> bytes:
    """Return the lines of JSON objects with a vector, or null, as their last field."""
    field = b"," + msgspec.json.encode(name) + b":"
    parts: list[bytes] = []
    for row, vector, null in zip(rows, vectors, is_null, strict=True):
        start = row.rstrip()[:-1].rstrip()
        numbers = b"null" if null else orjson.dumps(vector, option=orjson.OPT_SERIALIZE_NUMPY)
        parts += (start, field[1:] if start == b"{" else field, numbers, b"}\n")
    return b"".join(parts)


def objects_of(batch: pa.RecordBatch) -> list[bytes]:
    """Return the rows of a record batch as JSON objects. Raises: EmbedFailed."""
    try:
        columns = [column.cast(_readable(column.type)).to_pylist() for column in batch.columns]
        rows = zip(*columns, strict=True) if columns else [()] * len(batch)
        return [msgspec.json.encode(dict(zip(batch.schema.names, row, strict=True))) for row in rows]
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise EmbedFailed(f"a column has values that JSON cannot hold: {error}; write Parquet") from error


def has_moments(kind: pa.DataType) -> bool:
    """Return whether values of a type have moments, of which Python cannot hold each."""
    if pa.types.is_dictionary(kind):
        return has_moments(kind.value_type)
    inner = (kind.field(index).type for index in range(kind.num_fields))
    return bool(pa.types.is_temporal(kind)) or any(map(has_moments, inner))


def _readable(kind: pa.DataType) -> pa.DataType:
    """Return the type in which Python can hold values: moments with nanoseconds become text."""
    if not has_moments(kind):
        return kind
    if pa.types.is_dictionary(kind):
        return _readable(kind.value_type)
    if pa.types.is_map(kind):
        return pa.map_(_readable(kind.key_type), _readable(kind.item_type))
    if pa.types.is_struct(kind):
        fields = [kind.field(index) for index in range(kind.num_fields)]
        return pa.struct([field.with_type(_readable(field.type)) for field in fields])
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return pa.large_list(_readable(kind.value_type))
    if getattr(kind, "unit", "") != "ns":
        return kind
    return pa.int64() if pa.types.is_duration(kind) else pa.string()


class JsonColumns:
    """Columns of the lines of JSONL. as_json: columns that hold the text of JSON. Raises: EmbedFailed."""

    def __init__(self, batches: Iterable[pa.RecordBatch]) -> None:
        self._shapes: dict[str, Shape] = {}
        for batch in batches:
            for name, values in _by_name(map(_fields_of, batch.column(0).to_pylist())).items():
                self._shapes[name] = common(self._shapes.get(name, "null"), shape_of(values))
            if len(self._shapes) > COLUMNS_MAX:
                raise EmbedFailed(f"the rows have more than {COLUMNS_MAX} different fields; write JSONL")
        self.schema = pa.schema([pa.field(name, _type_of(shape)) for name, shape in self._shapes.items()])
        self.as_json = tuple(name for name, shape in self._shapes.items() if not is_plain(shape))

    def batch(self, lines: pa.Array) -> pa.RecordBatch:
        """Return a record batch of the lines of an Arrow array. Raises: EmbedFailed."""
        rows = [_fields_of(line) for line in lines.to_pylist()]
        arrays = []
        try:
            for name, kind in zip(self.schema.names, self.schema.types, strict=True):
                values, shape = [row.get(name) for row in rows], self._shapes[name]
                if name in self.as_json:
                    values = [_stored(value, shape) for value in values]
                arrays.append(pa.array(values, kind))
        except RecursionError as error:
            raise EmbedFailed("a row has lists or objects in too many levels; write JSONL") from error
        return pa.record_batch(arrays, schema=self.schema)


def _fields_of(line: bytes) -> dict[str, Any]:
    """Return the fields of a line; the JSON of those whose values have no counterpart."""
    try:
        return _OBJECT.decode(line)
    except (msgspec.ValidationError, RecursionError):
        return {name: _value_of(raw) for name, raw in _FIELDS.decode(line).items()}


def _value_of(raw: msgspec.Raw) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.ValidationError, RecursionError):
        return JsonText(bytes(raw).decode())


def shape_of(values: Sequence[Any], depth: int = 0) -> Shape:
    """Return the shape that values have in common."""
    shape: Shape = "null"
    for kind in set(map(type, values)):
        shape = common(shape, _shape_of_kind(kind, [item for item in values if type(item) is kind], depth))
    return shape


def _shape_of_kind(kind: type, values: Sequence[Any], depth: int) -> Shape:
    if kind in PYTHON_TYPES:
        return PYTHON_TYPES[kind]
    if kind is int:
        least, most = min(values), max(values)
        if least < INT_MIN or most > INT_MAX:
            return "json"
        return "int" if max(-least, most) <= EXACT_MAX else "large"
    if depth >= DEPTH_MAX:
        return "json"
    if kind is list:
        return [shape_of([item for value in values for item in value], depth + 1)]
    fields = _by_name(values)
    if len(fields) > FIELDS_MAX:
        return "json"
    return {name: shape_of(found, depth + 1) for name, found in fields.items()}


def _by_name(objects: Iterable[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return the values of each field of JSON objects."""
    fields: dict[str, list[Any]] = {}
    for found in objects:
        for name, value in found.items():
            fields.setdefault(name, []).append(value)
    return fields


def common(first: Shape, second: Shape) -> Shape:
    """Return the shape that holds values of both shapes."""
    if second in (first, "null"):
        return first
    if first == "null":
        return second
    if isinstance(first, list) and isinstance(second, list):
        return [common(first[0], second[0])]
    if isinstance(first, dict) and isinstance(second, dict):
        fields = first | {name: common(first.get(name, "null"), shape) for name, shape in second.items()}
        return fields if len(fields) <= FIELDS_MAX else "json"
    if isinstance(first, str) and isinstance(second, str):
        return NUMBERS.get(frozenset({first, second}), "json")
    return "json"


def is_plain(shape: Shape) -> bool:
    """Return whether values of a shape are stored as they are. Parquet has no type without fields."""
    if isinstance(shape, list):
        return is_plain(shape[0])
    if isinstance(shape, dict):
        return bool(shape) and all(map(is_plain, shape.values()))
    return shape != "json"


def _type_of(shape: Shape) -> pa.DataType:
    if isinstance(shape, list):
        return pa.list_(_type_of(shape[0]))
    if isinstance(shape, dict) and shape:
        return pa.struct([pa.field(name, _type_of(field)) for name, field in shape.items()])
    return TYPES[str(shape) if shape else "json"]


def _stored(value: Any, shape: Shape) -> Any:
    """Return a value as its column stores it."""
    if value is None:
        return None
    if isinstance(shape, list):
        return [_stored(item, shape[0]) for item in value]
    if isinstance(shape, dict) and shape:
        return {name: _stored(value.get(name), field) for name, field in shape.items()}
    if shape and shape != "json":
        return value
    return str(value) if isinstance(value, JsonText) else msgspec.json.encode(value).decode()
