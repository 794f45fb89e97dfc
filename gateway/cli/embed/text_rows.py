"""Rows of JSONL and CSV files."""

import csv
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, Protocol, TypeAlias

import msgspec
import pyarrow as pa

from gateway.cli.embed.fields import DEFAULT_FIELD, check_fields, choose_field
from gateway.cli.embed.lines import LINE_BYTES_MAX, OLD_MAC, OTHER_ENCODING, LineReader, open_lines
from gateway.cli.embed.packing import Position, Row
from gateway.cli.embed.plan import EmbedFailed, Reading, Source

# Column of the lines of JSONL, which are kept as they are.
LINE = "line"
# Names of fields that are kept while the field of texts is found.
FIELDS_MAX = 10_000
# Lines of one record of CSV. A quote that is missing makes all lines behind it one record.
RECORD_LINES_MAX = 10_000
# First line that gives Excel the delimiter.
SEPARATOR = re.compile(r'"?sep=(.)"?\s*', re.IGNORECASE)
QUOTE, NULL = ord('"'), b"null"
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

# Reading of the text of a line, and of its problem.
Read: TypeAlias = Callable[[bytes], tuple[str | None, str]]

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
        self._encoding = reading.encoding
        self._id_field = reading.id_field
        self._column = column
        self.field = reading.field or self._found_field()
        self._schema = pa.schema([pa.field(LINE, pa.binary())])

    def _found_field(self) -> str:
        """Return `text` if any row has a text or null in it, else the only field with texts."""
        names: dict[str, None] = {}
        texts: dict[str, None] = {}
        for row in self._lines(Position(), _nothing):
            try:
                fields = _OBJECT.decode(row.payload)
            except UNREADABLE:
                continue
            found = [name for name, raw in fields.items() if memoryview(raw)[0] == QUOTE]
            if DEFAULT_FIELD in found or bytes(fields.get(DEFAULT_FIELD, b"")) == NULL:
                return DEFAULT_FIELD
            names.update(dict.fromkeys(fields))
            texts.update(dict.fromkeys(found))
            if len(names) > FIELDS_MAX:
                raise EmbedFailed(
                    f"the rows have more than {FIELDS_MAX} different fields; choose with --field"
                )
        if not names:
            raise EmbedFailed("the files have no row that is a JSON object with fields")
        return choose_field(None, tuple(names), tuple(texts), self._sources[0].path)

    def rows(self, start: Position) -> Iterator[Row]:
        """Yield the rows of all files from a position on. Raises: EmbedFailed."""
        return self._lines(start, self._read)

    def batch(self, rows: Sequence[Row]) -> Any:
        """Return a record batch with the lines."""
        return pa.record_batch([pa.array([row.payload for row in rows], pa.binary())], schema=self._schema)

    def _lines(self, start: Position, read: Read) -> Iterator[Row]:
        for number in range(start.file, len(self._sources)):
            position = start if number == start.file else Position(number)
            with open_lines(self._sources[number], position, self._encoding) as lines:
                for line in lines:
                    text, problem, advice, content = None, "", "", line
                    try:
                        content = lines.in_utf8(line).strip()
                    except UnicodeDecodeError as error:
                        problem, advice = lines.decode_problem(error), OTHER_ENCODING
                    if not content:
                        continue
                    if not problem:
                        text, problem = read(content)
                    end = Position(number, lines.offset, lines.line)
                    yield Row(lines.line, text, len(content), content, end, number, problem, advice)

    def _read(self, line: bytes) -> tuple[str | None, str]:
        """Return the text of a line and its problem."""
        try:
            fields = _OBJECT.decode(line)
        except UNREADABLE as error:
            return None, OLD_MAC if b"\r" in line else f"is no JSON object: {error}"
        if self._id_field is not None and bytes(fields.get(self._id_field, NULL)) == NULL:
            return None, f"has no `{self._id_field}`"
        if self._column in fields:
            return None, f"has a field `{self._column}`; name another one for the vectors with --column"
        try:
            return _VALUE.decode(fields.get(self.field, NULL)), ""
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            return None, f"`{self.field}` is no text: {error}"


def _nothing(_: bytes) -> tuple[str | None, str]:
    return None, ""


class CsvRows:
    """Reader of CSV with a header, whose columns are texts. Raises: EmbedFailed."""

    def __init__(self, sources: Sequence[Source], reading: Reading) -> None:
        csv.field_size_limit(LINE_BYTES_MAX)
        self._sources = sources
        self._encoding = reading.encoding
        self._given = reading.delimiter
        self._separators = [self._separator(source) for source in sources]
        self.names = self._header(0)
        for number, source in enumerate(sources):
            if (names := self._header(number)) != self.names:
                raise EmbedFailed(f"{source.path}: its columns {names} differ from those of the first file")
        self.field = choose_field(reading.field, self.names, self.names, sources[0].path)
        check_fields(self.names, reading.id_field, sources[0].path)
        self._text = self.names.index(self.field)
        self._id = None if reading.id_field is None else self.names.index(reading.id_field)
        self._schema = pa.schema([pa.field(name, pa.string()) for name in self.names])

    def _separator(self, source: Source) -> str | None:
        """Return the delimiter that Excel states in a first line `sep=;`, None if there is no such line."""
        with open_lines(source, Position(), self._encoding) as lines:
            try:
                found = SEPARATOR.fullmatch(lines.text(next(lines, b"")))
            except UnicodeDecodeError:
                return None
        return found and found[1]

    def _delimiter(self, number: int) -> str:
        name = self._sources[number].path.lower().removesuffix(".gz")
        return self._given or self._separators[number] or ("\t" if name.endswith(".tsv") else ",")

    def _header(self, number: int) -> tuple[str, ...]:
        source = self._sources[number]
        for record in self._records(number, Position(number)):
            if record.problem:
                advice = f"; {record.advice}" if record.advice else ""
                raise EmbedFailed(f"{source.place(record.line)}: the header {record.problem}{advice}")
            return self._checked(number, tuple(record.fields))
        raise EmbedFailed(
            f"{source.path}: the file is empty; a CSV file begins with the names of its columns"
        )

    def _checked(self, number: int, names: tuple[str, ...]) -> tuple[str, ...]:
        path = self._sources[number].path
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise EmbedFailed(f"{path}: two columns have the name `{twice}`")
        other = next((mark for mark in ";\t|" if mark in names[0]), None)
        if len(names) == 1 and other is not None and self._given is None:
            raise EmbedFailed(
                f"{path}: the header is one column `{names[0]}`; if {other!r} separates columns, "
                "pass it as --delimiter"
            )
        return names

    def _records(self, number: int, position: Position) -> Iterator["_Record"]:
        """Yield the records of a file that are not empty, from a position on. Raises: EmbedFailed."""
        with open_lines(self._sources[number], position, self._encoding) as lines:
            if not position.offset and self._separators[number] is not None:
                next(lines)
            for record in _Records(lines, self._delimiter(number)):
                if record.fields or record.problem:
                    yield record

    def rows(self, start: Position) -> Iterator[Row]:
        """Yield the rows of all files from a position on. Raises: EmbedFailed."""
        for number in range(start.file, len(self._sources)):
            position = start if number == start.file else Position(number)
            records = self._records(number, position)
            for record in records if position.offset else islice(records, 1, None):
                yield self._row(record, number)

    def _row(self, record: "_Record", number: int) -> Row:
        fields, problem = record.fields, record.problem or self._problem_of(record.fields)
        end = Position(number, record.offset, record.last)
        if problem and record.last > record.line:
            raise EmbedFailed(
                f"{self._sources[number].place(record.line)}: a quote makes the lines {record.line} to "
                f"{record.last} one row, which {problem}; a quote may be missing, and rows may be hidden, so "
                "that such a row is not left out"
            )
        text = None if problem else fields[self._text]
        size = sum(map(len, fields))
        return Row(record.line, text, size, fields, end, number, problem, record.advice)

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


class _Record(NamedTuple):
    """Fields of a record of CSV. line, last: its lines. offset: behind it. problem: why it has no fields."""

    fields: list[str]
    line: int
    last: int
    offset: int
    problem: str = ""
    advice: str = ""


class _Records:
    """Iterator over the records of lines of CSV."""

    def __init__(self, lines: LineReader, delimiter: str) -> None:
        self._lines = lines
        self._delimiter = delimiter
        self._first = 0

    def __iter__(self) -> Iterator[_Record]:
        reader = self._reader()
        while True:
            self._first = self._lines.line + 1
            fields: list[str] = []
            problem = advice = ""
            try:
                fields = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                is_old_mac = "new-line character" in str(error)
                problem = OLD_MAC if is_old_mac else f"is no valid CSV: {error}"
            except UnicodeDecodeError as error:
                problem, advice = self._lines.decode_problem(error), OTHER_ENCODING
                # The generator of lines has ended with the error.
                reader = self._reader()
            yield _Record(fields, self._first, self._lines.line, self._lines.offset, problem, advice)

    def _reader(self) -> Any:
        return csv.reader(self._texts(), delimiter=self._delimiter, strict=True)

    def _texts(self) -> Iterator[str]:
        for line in self._lines:
            if self._lines.line - self._first >= RECORD_LINES_MAX:
                raise EmbedFailed(
                    f"{self._lines.place(self._first)}: a quote opens a value that has not ended after "
                    f"{RECORD_LINES_MAX:,} lines; the quote that ends it is missing"
                )
            yield self._lines.text(line)
