"""Rows of JSONL and CSV files."""

import csv
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import msgspec
import pyarrow as pa

from gateway.cli.embed.fields import check_fields, choose_field
from gateway.cli.embed.lines import LINE_BYTES_MAX, LineReader, open_lines
from gateway.cli.embed.packing import Position, Row
from gateway.cli.embed.plan import EmbedFailed, Reading, Source

# Column of the lines of JSONL, which are kept as they are.
LINE = "line"

_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_VALUE = msgspec.json.Decoder(type=str | None)


class RowReader(Protocol):
    """Reader of the files of one format. field: column of texts. names: columns, none where rows differ."""

    field: str
    names: tuple[str, ...]

    def rows(self, start: Position) -> Iterator[Row]:
        """Yield the rows of all files from a position on. Raises: EmbedFailed."""
        ...

    def batch(self, rows: Sequence[Row]) -> Any:
        """Return a record batch of rows of one group, or of none."""
        ...


class JsonLines:
    """Reader of JSONL. A row is its line, so that nothing of it changes. column: of the vectors.

    Raises: EmbedFailed.
    """

    names: tuple[str, ...] = ()

    def __init__(self, sources: Sequence[Source], reading: Reading, column: str) -> None:
        self._sources = sources
        self._id_field = reading.id_field
        self._column = column
        self.field = reading.field or self._found_field()
        self._schema = pa.schema([pa.field(LINE, pa.binary())])

    def _found_field(self) -> str:
        """Return the field of texts by the first row that is an object."""
        for row in _json_lines(self._sources, Position(), _nothing):
            try:
                fields = msgspec.json.decode(row.payload, type=dict[str, Any])
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                continue
            texts = [name for name, value in fields.items() if isinstance(value, str)]
            return choose_field(None, tuple(fields), texts, self._sources[0].path)
        raise EmbedFailed("the files have no row that is a JSON object")

    def rows(self, start: Position) -> Iterator[Row]:
        """Yield the rows of all files from a position on. Raises: EmbedFailed."""
        return _json_lines(self._sources, start, self._read)

    def batch(self, rows: Sequence[Row]) -> Any:
        """Return a record batch with the lines."""
        return pa.record_batch([pa.array([row.payload for row in rows], pa.binary())], schema=self._schema)

    def _read(self, line: bytes) -> tuple[str | None, str]:
        """Return the text of a line and its problem."""
        try:
            fields = _OBJECT.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            return None, f"is no JSON object: {error}"
        if self._id_field is not None and fields.get(self._id_field, b"null") == b"null":
            return None, f"has no `{self._id_field}`"
        if self._column in fields:
            return None, f"has a field `{self._column}`; name another one for the vectors with --column"
        try:
            return _VALUE.decode(fields.get(self.field, b"null")), ""
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            return None, f"`{self.field}` is no text: {error}"


def _nothing(_: bytes) -> tuple[str | None, str]:
    return None, ""


def _json_lines(sources: Sequence[Source], start: Position, read: Any) -> Iterator[Row]:
    for number in range(start.file, len(sources)):
        position = start if number == start.file else Position(number)
        with open_lines(sources[number], position) as lines:
            for line in lines:
                content = line.strip()
                if not content:
                    continue
                text, problem = read(content)
                end = Position(number, lines.offset, lines.line)
                yield Row(lines.line, text, len(content), content, end, number, problem)


class CsvRows:
    """Reader of CSV with a header, whose columns are texts. Raises: EmbedFailed."""

    def __init__(self, sources: Sequence[Source], reading: Reading) -> None:
        csv.field_size_limit(LINE_BYTES_MAX)
        self._sources = sources
        self._delimiter = reading.delimiter
        self.names = self._header(sources[0])
        for source in sources[1:]:
            if (names := self._header(source)) != self.names:
                raise EmbedFailed(f"{source.path}: its columns {names} differ from those of the first file")
        self.field = choose_field(reading.field, self.names, self.names, sources[0].path)
        check_fields(self.names, reading.id_field, sources[0].path)
        self._text = self.names.index(self.field)
        self._id = None if reading.id_field is None else self.names.index(reading.id_field)
        self._schema = pa.schema([pa.field(name, pa.string()) for name in self.names])

    def _header(self, source: Source) -> tuple[str, ...]:
        with open_lines(source, Position()) as lines:
            for fields, problem, _ in _records(lines, self._delimiter_of(source)):
                if problem:
                    raise EmbedFailed(f"{source.place(lines.line)}: the header {problem}")
                if fields:
                    return self._checked(source, tuple(fields))
        raise EmbedFailed(
            f"{source.path}: the file is empty; a CSV file begins with the names of its columns"
        )

    def _checked(self, source: Source, names: tuple[str, ...]) -> tuple[str, ...]:
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise EmbedFailed(f"{source.path}: two columns have the name `{twice}`")
        other = next((mark for mark in ";\t|" if mark in names[0]), None)
        if len(names) == 1 and other is not None and self._delimiter is None:
            raise EmbedFailed(
                f"{source.path}: the header is one column `{names[0]}`; if {other!r} separates columns, "
                "pass it as --delimiter"
            )
        return names

    def _delimiter_of(self, source: Source) -> str:
        name = source.path.lower().removesuffix(".gz")
        return self._delimiter or ("\t" if name.endswith(".tsv") else ",")

    def rows(self, start: Position) -> Iterator[Row]:
        """Yield the rows of all files from a position on. Raises: EmbedFailed."""
        for number in range(start.file, len(self._sources)):
            position = start if number == start.file else Position(number)
            source = self._sources[number]
            with open_lines(source, position) as lines:
                is_header = not position.offset
                for fields, problem, line in _records(lines, self._delimiter_of(source)):
                    if is_header or not (fields or problem):
                        is_header = is_header and not fields
                        continue
                    yield self._row(fields, problem or self._problem_of(fields), line, number, lines)

    def _row(self, fields: list[str], problem: str, line: int, number: int, lines: LineReader) -> Row:
        text = None if problem else fields[self._text]
        size = sum(map(len, fields))
        return Row(line, text, size, fields, Position(number, lines.offset, lines.line), number, problem)

    def _problem_of(self, fields: list[str]) -> str:
        if len(fields) != len(self.names):
            return f"has {len(fields)} values for {len(self.names)} columns"
        if self._id is not None and not fields[self._id]:
            return f"has no `{self.names[self._id]}`"
        return ""

    def batch(self, rows: Sequence[Row]) -> Any:
        """Return a record batch of texts."""
        columns = zip(*[row.payload for row in rows], strict=True) if rows else [()] * len(self.names)
        return pa.record_batch([pa.array(column, pa.string()) for column in columns], schema=self._schema)


def _records(lines: LineReader, delimiter: str) -> Iterator[tuple[list[str], str, int]]:
    """Yield the fields of each record, its problem, and the line at which it begins."""
    decoded = (line.decode() for line in lines)
    reader = csv.reader(decoded, delimiter=delimiter, strict=True)
    while True:
        first = lines.line + 1
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield [], f"is no valid CSV: {error}", first
        except UnicodeDecodeError as error:
            # The generator of lines has ended with the error.
            yield [], f"is not UTF-8: {error.reason} at byte {error.start} of line {lines.line}", first
            reader = csv.reader((line.decode() for line in lines), delimiter=delimiter, strict=True)
        else:
            yield fields, "", first
