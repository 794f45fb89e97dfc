"""Rows and their packing into requests. Pure."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import msgspec

# Rows without a text cost no input; this many are one chunk.
ROWS_MAX = 4096


class Position(msgspec.Struct, frozen=True):
    """Place between two rows. offset: bytes of the uncompressed file, or rows of a Parquet file."""

    file: int = 0
    offset: int = 0
    line: int = 0


class Row(NamedTuple):
    """One row. text: None for null, and for a row with a problem. size: bytes. payload: the reader's own.

    group: rows of several groups are not packed together. advice: on the problem, if it is not to skip it.
    """

    line: int
    text: str | None
    size: int
    payload: Any
    end: Position
    group: int = 0
    problem: str = ""
    advice: str = ""


class Bounds(msgspec.Struct, frozen=True):
    """Bounds of one request. row_bytes: of whole rows, whose other columns wait for the reply in memory."""

    inputs: int
    text_bytes: int
    row_bytes: int = 4 * 1024 * 1024


def text_bytes(text: str) -> int:
    """Return the bytes of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())


def pack(rows: Iterable[Row], bounds: Bounds) -> Iterator[list[Row]]:
    """Yield rows in lists that keep the bounds, in order; a row beyond them is a list of its own."""
    packed: list[Row] = []
    inputs = texts = size = 0
    for row in rows:
        own_text = text_bytes(row.text) if row.text else 0
        is_full = (
            inputs + bool(row.text) > bounds.inputs
            or texts + own_text > bounds.text_bytes
            or size + row.size > bounds.row_bytes
            or len(packed) >= ROWS_MAX
        )
        if packed and (is_full or packed[-1].group != row.group):
            yield packed
            packed, inputs, texts, size = [], 0, 0, 0
        packed.append(row)
        inputs += bool(row.text)
        texts += own_text
        size += row.size
    if packed:
        yield packed
