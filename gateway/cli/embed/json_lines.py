"""JSON lines with a vector: the only module of the command that writes numbers as JSON."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import orjson
import pyarrow as pa

from gateway.cli.embed.plan import EmbedFailed
from gateway.cli.embed.replies import Vectors


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
        columns = [_readable(column).to_pylist() for column in batch.columns]
        names = batch.schema.names
        return [
            msgspec.json.encode(dict(zip(names, values, strict=True)))
            for values in (zip(*columns, strict=True) if columns else [()] * len(batch))
        ]
    except (pa.ArrowException, TypeError, ValueError, UnicodeDecodeError) as error:
        raise EmbedFailed(f"a column has values that JSON cannot hold: {error}; write Parquet") from error


def _readable(column: Any) -> Any:
    """Return a column whose values Python can hold: moments with nanoseconds become text."""
    kind = column.type
    if pa.types.is_temporal(kind) and getattr(kind, "unit", "") == "ns":
        return column.cast(pa.int64() if pa.types.is_duration(kind) else pa.string())
    return column


def as_stored(vectors: Vectors, dtype: str) -> Any:
    """Return vectors in the type in which they are written."""
    return np.ascontiguousarray(vectors, dtype=dtype)
