"""Columns of the lines of JSONL, whose types follow from all lines."""

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import msgspec
import pyarrow as pa

from gateway.cli.embed.json_types import (
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


class JsonColumns:
    """Columns of lines. schema: of their record batches. as_json: columns that hold the text of JSON."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self._shapes = _shapes(batches)
        self.schema: Schema = pa.schema([pa.field(name, _type_of(s)) for name, s in self._shapes.items()])
        self.as_json = tuple(name for name, shape in self._shapes.items() if not is_plain(shape))

    def batch(self, lines: Any) -> Any:
        """Return a record batch of the lines of an Arrow array."""
        rows = [_OBJECT.decode(line) for line in lines.to_pylist()]
        arrays = [
            pa.array(_values(rows, name, shape), _type_of(shape)) for name, shape in self._shapes.items()
        ]
        return pa.record_batch(arrays, schema=self.schema)


def _shapes(batches: Iterable[Any]) -> dict[str, Shape]:
    """Return the shape of each field of all lines. Raises: EmbedFailed."""
    shapes: dict[str, Shape] = {}
    for batch in batches:
        for line in batch.column(0).to_pylist():
            for name, value in _OBJECT.decode(line).items():
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
