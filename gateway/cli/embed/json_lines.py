"""JSON lines with a vector: the only module of the command that writes numbers as JSON."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np
import orjson
import pyarrow as pa

from gateway.cli.embed.plan import EmbedFailed
from gateway.cli.embed.replies import Vectors

# pyarrow has no types.
DataType: TypeAlias = Any


def lines_of(rows: Sequence[bytes], name: str, vectors: Vectors, is_null: Sequence[bool]) -> bytes:
    """Return the lines of JSON objects with a vector, or null, as their last field."""
    field = b"," + msgspec.json.encode(name) + b":"
    parts: list[bytes] = []
    for row, vector, null in zip(rows, vectors, is_null, strict=True):
        start = row.rstrip()[:-1].rstrip()
        numbers = b"null" if null else orjson.dumps(vector, option=orjson.OPT_SERIALIZE_NUMPY)
        parts += (start, field[1:] if start == b"{" else field, numbers, b"}\n")
    return b"".join(parts)


def objects_of(batch: Any) -> list[bytes]:
    """Return the rows of a record batch as JSON objects. Raises: EmbedFailed."""
    try:
        columns = [column.cast(_readable(column.type)).to_pylist() for column in batch.columns]
        names = batch.schema.names
        return [
            msgspec.json.encode(dict(zip(names, values, strict=True)))
            for values in (zip(*columns, strict=True) if columns else [()] * len(batch))
        ]
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise EmbedFailed(f"a column has values that JSON cannot hold: {error}; write Parquet") from error


def has_moments(kind: DataType) -> bool:
    """Return whether values of a type have moments, of which Python cannot hold each."""
    if pa.types.is_dictionary(kind):
        return has_moments(kind.value_type)
    if pa.types.is_map(kind):
        return has_moments(kind.key_type) or has_moments(kind.item_type)
    fields = [kind.field(index).type for index in range(kind.num_fields)]
    return bool(pa.types.is_temporal(kind)) or any(map(has_moments, fields))


def _readable(kind: DataType) -> DataType:
    """Return the type in which Python can hold values: moments with nanoseconds become text."""
    if not has_moments(kind):
        return kind
    if pa.types.is_temporal(kind):
        if getattr(kind, "unit", "") != "ns":
            return kind
        return pa.int64() if pa.types.is_duration(kind) else pa.string()
    if pa.types.is_dictionary(kind):
        return _readable(kind.value_type)
    if pa.types.is_map(kind):
        return pa.map_(_readable(kind.key_type), _readable(kind.item_type))
    if pa.types.is_struct(kind):
        fields = [kind.field(index) for index in range(kind.num_fields)]
        return pa.struct([field.with_type(_readable(field.type)) for field in fields])
    return _readable_list(kind)


def _readable_list(kind: DataType) -> DataType:
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_readable(kind.value_type), kind.list_size)
    if pa.types.is_list(kind):
        return pa.list_(_readable(kind.value_type))
    return pa.large_list(_readable(kind.value_type)) if pa.types.is_large_list(kind) else kind


def as_stored(vectors: Vectors, dtype: str) -> Any:
    """Return vectors in the type in which they are written."""
    return np.ascontiguousarray(vectors, dtype=dtype)
