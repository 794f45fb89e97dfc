"""Columns of the lines of JSONL, whose types follow from all lines."""

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import msgspec
import pyarrow as pa

from gateway.cli.embed.json_types import (
    JsonText,
    ListShape,
    ObjectShape,
    Shape,
    common,
    converted,
    is_plain,
    is_text,
    shape_of,
)
from gateway.cli.embed.plan import EmbedFailed

DataType: TypeAlias = Any
Schema: TypeAlias = Any

COLUMNS_MAX = 10_000
TYPES: dict[str, DataType] = {
    "null": pa.null(),
    "bool": pa.bool_(),
    "int": pa.int64(),
    "large": pa.int64(),
    "float": pa.float64(),
    "string": pa.string(),
}

_OBJECT = msgspec.json.Decoder(dict[str, Any])
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


class JsonColumns:
    """Columns of lines. schema: of their record batches. as_json: columns that hold the text of JSON."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self._shapes = _shapes(batches)
        self.schema: Schema = pa.schema([pa.field(name, _type_of(s)) for name, s in self._shapes.items()])
        self.as_json = tuple(name for name, shape in self._shapes.items() if not is_plain(shape))

    def batch(self, lines: Any) -> Any:
        """Return a record batch of the lines of an Arrow array. Raises: EmbedFailed."""
        rows = [_fields_of(line) for line in lines.to_pylist()]
        try:
            arrays = [
                pa.array(_values(rows, name, shape), _type_of(shape)) for name, shape in self._shapes.items()
            ]
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


def _shapes(batches: Iterable[Any]) -> dict[str, Shape]:
    """Return the shape of each field of all lines. Raises: EmbedFailed."""
    shapes: dict[str, Shape] = {}
    for batch in batches:
        for line in batch.column(0).to_pylist():
            for name, value in _fields_of(line).items():
                shapes[name] = common(shapes.get(name, "null"), shape_of(value))
        if len(shapes) > COLUMNS_MAX:
            raise EmbedFailed(f"the rows have more than {COLUMNS_MAX} different fields; write JSONL")
    return shapes


def _values(rows: Sequence[dict[str, Any]], name: str, shape: Shape) -> list[Any]:
    if is_plain(shape):
        return [row.get(name) for row in rows]
    return [converted(row.get(name), shape) for row in rows]


def _type_of(shape: Shape) -> DataType:
    if is_text(shape):
        return pa.string()
    if isinstance(shape, ListShape):
        return pa.list_(_type_of(shape.item))
    if isinstance(shape, ObjectShape):
        return pa.struct([pa.field(name, _type_of(field)) for name, field in shape.fields.items()])
    return TYPES[shape]
