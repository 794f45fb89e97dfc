"""Rows of JSONL and CSV files, with the position behind each.

pyarrow's readers of JSON and CSV report neither the line of a row that is bad nor the offset behind a row,
read no `sep=` and do not bound a line in bytes. A run that names bad rows and continues behind any row needs
all of these.
"""

import codecs
import csv
import gzip
import math
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any, NamedTuple, cast

import msgspec
import pyarrow as pa

from gateway.cli.embed.plan import EmbedFailed, Position, Settings, Source

LINE_BYTES_MAX = 64 * 1024 * 1024
BUFFER_BYTES = 1024 * 1024
BOM = b"\xef\xbb\xbf"
# UTF-16 and UTF-32 begin with these.
OTHER_BOMS = (b"\xff\xfe", b"\xfe\xff", b"\x00\x00\xfe\xff")
UTF_8 = "utf-8"
# Bytes of a character in the encodings whose lines do not end with the byte 10.
WIDTHS = {"utf-16": 2, "utf-32": 4}
OTHER_ENCODING = "name the encoding of the file with --encoding, such as cp1252 or utf-16"
OLD_MAC = (
    "has a carriage return that ends no line; if the lines of the file end with CR alone, as on old Macs, "
    "convert it: tr '\\r' '\\n' < FILE"
)
# Column of the lines of JSONL, which are kept as they are.
LINE = "line"
LINES_SCHEMA = pa.schema([pa.field(LINE, pa.binary())])
DEFAULT_FIELD = "text"
# Names of fields that are kept while the field of texts is found, and that a message lists.
FIELDS_MAX, NAMES_SHOWN = 10_000, 20
# Lines of one record of CSV. A quote that is missing makes all lines behind it one record.
RECORD_LINES_MAX = 10_000
# First line that gives Excel the delimiter.
SEPARATOR = re.compile(r'"?sep=(.)"?\s*', re.IGNORECASE)
QUOTE, NULL = ord('"'), b"null"
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_VALUE = msgspec.json.Decoder(type=str | None)


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


class Lines:
    """Iterator over the lines of a file, in its bytes. offset, line: behind the last that it returned."""

    def __init__(self, source: Source, file: IO[bytes], start: Position, encoding: str) -> None:
        self._source = source
        self._file = file
        self._encoding = encoding
        self._width = WIDTHS.get(encoding[:6], 1)
        if encoding in WIDTHS:
            # The mark at the beginning states the order of the bytes.
            is_big = file.read(self._width) in (codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)
            file.seek(0)
            self._encoding = f"{encoding}-{'be' if is_big else 'le'}"
        self._end = "\n".encode(self._encoding)
        self.offset = start.offset
        self.line = start.line
        # First line of the record of CSV in progress.
        self._first = math.inf
        if start.offset:
            file.seek(start.offset)

    def start_record(self) -> int:
        """Have the next line begin a record of CSV, whose lines are bounded; return its number."""
        self._first = self.line + 1
        return self.line + 1

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        """Return the next line with its end. Raises: EmbedFailed."""
        try:
            line = self._file.readline(LINE_BYTES_MAX + 1) if self._width == 1 else self._wide_line()
        except (OSError, EOFError, zlib.error) as error:
            place = self._source.place(self.line + 1)
            raise EmbedFailed(f"{place}: the file cannot be read on: {error}") from error
        if not line:
            raise StopIteration
        self.line += 1
        if len(line) > LINE_BYTES_MAX:
            raise EmbedFailed(
                f"{self._source.place(self.line)}: the line has more than {LINE_BYTES_MAX} bytes"
            )
        if self.line - self._first >= RECORD_LINES_MAX:
            raise EmbedFailed(
                f"{self._source.place(int(self._first))}: a quote opens a value that has not ended after "
                f"{RECORD_LINES_MAX:,} lines; the quote that ends it is missing"
            )
        self.offset += len(line)
        return self._without_mark(line) if self.line == 1 else line

    def _wide_line(self) -> bytes:
        """Return the bytes up to the next end of a line, or so many that they are too many."""
        line = b""
        while len(line) <= LINE_BYTES_MAX and (rest := self._file.readline(LINE_BYTES_MAX + 1)):
            line += rest
            # A byte 10 ends a line only as the character of a line's end.
            line += self._file.read(-len(line) % self._width)
            if line.endswith(self._end):
                break
        return line

    def _without_mark(self, line: bytes) -> bytes:
        if self._width > 1:
            return line.removeprefix("\ufeff".encode(self._encoding))
        if line.startswith(OTHER_BOMS):
            raise EmbedFailed(f"{self._source.path}: the file is UTF-16 or UTF-32; {OTHER_ENCODING}")
        if line.startswith(BOM) and self._encoding != UTF_8:
            raise EmbedFailed(
                f"{self._source.path}: the file begins with the mark of UTF-8, and --encoding is "
                f"{self._encoding}; leave it out"
            )
        return line.removeprefix(BOM)

    def text(self, line: bytes) -> str:
        """Return a line as text. Raises: UnicodeDecodeError."""
        return line.decode(self._encoding)

    def decode_problem(self, error: UnicodeDecodeError) -> str:
        """Return in words why the last line could not be decoded."""
        name = "UTF-8" if self._encoding == UTF_8 else self._encoding
        return f"is not {name}: {error.reason} at byte {error.start} of line {self.line}"


class TextRows:
    """Files of lines, one behind the other."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._sources = settings.sources

    def ends(self) -> list[int]:
        """Return the offset behind each file; 0 for a gzip file, whose uncompressed size is unknown."""
        return [0 if source.is_gzip else source.size for source in self._sources]

    @contextmanager
    def _open(self, position: Position) -> Iterator[Lines]:
        """Open a file at a position. Raises: EmbedFailed."""
        source = self._sources[position.file]
        try:
            with (
                open(source.path, "rb", buffering=BUFFER_BYTES) as raw,  # noqa: PTH123 - its path is a string
                cast("IO[bytes]", gzip.GzipFile(fileobj=raw) if source.is_gzip else raw) as file,
            ):
                yield Lines(source, file, position, self._settings.encoding or UTF_8)
        except OSError as error:
            raise EmbedFailed(f"{source.path}: {error.strerror or error}") from error

    def _starts(self, start: Position) -> list[Position]:
        """Return where to read each file that is not read yet."""
        return [start, *map(Position, range(start.file + 1, len(self._sources)))]


class JsonLines(TextRows):
    """Reader of JSONL. A row is its line, so that nothing of it changes. Raises: EmbedFailed."""

    names: tuple[str, ...] = ()

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.field = settings.field or self._found_field()

    def _found_field(self) -> str:
        """Return `text` if any row has a text or null in it, else the only field with texts."""
        names: dict[str, None] = {}
        texts: dict[str, None] = {}
        for _, _, content, _ in self._contents(Position()):
            try:
                fields = _OBJECT.decode(content)
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
        for number, lines, content, undecodable in self._contents(start):
            text, problem = (None, undecodable) if undecodable else self._read(content)
            advice = OTHER_ENCODING if undecodable else ""
            end = Position(number, lines.offset, lines.line)
            yield Row(lines.line, text, len(content), content, end, number, problem, advice)

    def _contents(self, start: Position) -> Iterator[tuple[int, Lines, bytes, str]]:
        """Yield file, lines, content in UTF-8, and problem of each line that is not empty."""
        for position in self._starts(start):
            with self._open(position) as lines:
                for line in lines:
                    problem = ""
                    try:
                        content = lines.text(line).encode().strip()
                    except UnicodeDecodeError as error:
                        content, problem = line, lines.decode_problem(error)
                    if content:
                        yield position.file, lines, content, problem

    def _read(self, line: bytes) -> tuple[str | None, str]:
        """Return the text of a line and its problem."""
        id_field, column = self._settings.id_field, self._settings.column
        try:
            fields = _OBJECT.decode(line)
        except UNREADABLE as error:
            return None, OLD_MAC if b"\r" in line else f"is no JSON object: {error}"
        if id_field is not None and bytes(fields.get(id_field, NULL)) == NULL:
            return None, f"has no `{id_field}`"
        if column in fields:
            return None, f"has a field `{column}`; name another one for the vectors with --column"
        try:
            return _VALUE.decode(fields.get(self.field, NULL)), ""
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            return None, f"`{self.field}` is no text: {error}"

    def batch(self, rows: Sequence[Row]) -> pa.RecordBatch:
        """Return a record batch with the lines."""
        return pa.record_batch([pa.array([row.payload for row in rows], pa.binary())], schema=LINES_SCHEMA)


class CsvRows(TextRows):
    """Reader of CSV with a header, whose columns are texts. Raises: EmbedFailed."""

    def __init__(self, settings: Settings) -> None:
        csv.field_size_limit(LINE_BYTES_MAX)
        super().__init__(settings)
        self._separators = [self._separator(number) for number in range(len(self._sources))]
        self.names: tuple[str, ...] = ()
        self._id: int | None = None
        headers = [self._header(number) for number in range(len(self._sources))]
        for source, names in zip(self._sources, headers, strict=True):
            if names != headers[0]:
                raise EmbedFailed(f"{source.path}: its columns {names} differ from those of the first file")
        self.names = headers[0]
        path, id_field = self._sources[0].path, settings.id_field
        self.field = choose_field(settings.field, self.names, self.names, path)
        check_fields(self.names, id_field, path)
        self._text = self.names.index(self.field)
        self._id = None if id_field is None else self.names.index(id_field)
        self._schema = pa.schema([pa.field(name, pa.string()) for name in self.names])

    def _separator(self, number: int) -> str | None:
        """Return the delimiter that Excel states in a first line `sep=;`, None if there is no such line."""
        with self._open(Position(number)) as lines:
            try:
                found = SEPARATOR.fullmatch(lines.text(next(lines, b"")))
            except UnicodeDecodeError:
                return None
        return found and found[1]

    def _header(self, number: int) -> tuple[str, ...]:
        source = self._sources[number]
        header = next(self._records(Position(number)), None)
        if header is None:
            raise EmbedFailed(
                f"{source.path}: the file is empty; a CSV file begins with the names of its columns"
            )
        if header.problem:
            advice = f"; {header.advice}" if header.advice else ""
            raise EmbedFailed(f"{source.place(header.line)}: the header {header.problem}{advice}")
        names: tuple[str, ...] = tuple(header.payload)
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise EmbedFailed(f"{source.path}: two columns have the name `{twice}`")
        other = next((mark for mark in ";\t|" if mark in names[0]), None)
        if len(names) == 1 and other is not None and self._settings.delimiter is None:
            raise EmbedFailed(
                f"{source.path}: the header is one column `{names[0]}`; if {other!r} separates columns, "
                "pass it as --delimiter"
            )
        return names

    def rows(self, start: Position) -> Iterator[Row]:
        """Yield the rows of all files from a position on. Raises: EmbedFailed."""
        for position in self._starts(start):
            records = self._records(position)
            if not position.offset:
                next(records, None)
            for row in records:
                last = row.end.line
                if row.problem and last > row.line:
                    raise EmbedFailed(
                        f"{self._sources[position.file].place(row.line)}: a quote makes the lines {row.line} "
                        f"to {last} one row, which {row.problem}; a quote may be missing, and rows may be "
                        "hidden, so that such a row is not left out"
                    )
                yield row

    def _records(self, position: Position) -> Iterator[Row]:
        """Yield the records of a file that are not empty, from a position on. Raises: EmbedFailed."""
        number, separator = position.file, self._separators[position.file]
        is_tsv = self._sources[number].path.lower().removesuffix(".gz").endswith(".tsv")
        delimiter = self._settings.delimiter or separator or ("\t" if is_tsv else ",")
        with self._open(position) as lines:
            if not position.offset and separator is not None:
                next(lines)
            reader = csv.reader(map(lines.text, lines), delimiter=delimiter, strict=True)
            while True:
                line = lines.start_record()
                fields: list[str] = []
                advice = ""
                try:
                    fields = next(reader)
                    problem = self._problem_of(fields)
                except StopIteration:
                    return
                except csv.Error as error:
                    is_old_mac = "new-line character" in str(error)
                    problem = OLD_MAC if is_old_mac else f"is no valid CSV: {error}"
                except UnicodeDecodeError as error:
                    problem, advice = lines.decode_problem(error), OTHER_ENCODING
                if fields or problem:
                    text = fields[self._text] if self.names and not problem else None
                    end = Position(number, lines.offset, lines.line)
                    yield Row(line, text, sum(map(len, fields)), fields, end, number, problem, advice)

    def _problem_of(self, fields: list[str]) -> str:
        if self.names and fields and len(fields) != len(self.names):
            return f"has {len(fields)} values for {len(self.names)} columns"
        is_absent = fields and self._id is not None and not fields[self._id]
        return f"has no `{self._settings.id_field}`" if is_absent else ""

    def batch(self, rows: Sequence[Row]) -> pa.RecordBatch:
        """Return a record batch of texts."""
        columns = zip(*[row.payload for row in rows], strict=True) if rows else [()] * len(self.names)
        return pa.record_batch([pa.array(column, pa.string()) for column in columns], schema=self._schema)


def choose_field(given: str | None, names: Sequence[str], texts: Sequence[str], path: str) -> str:
    """Return the column of texts: the given one, `text`, or the only one that has texts.

    names: all columns. texts: those of strings. Raises: EmbedFailed.
    """
    if given is not None:
        check_fields(names, given, path)
        if given not in texts:
            raise EmbedFailed(f"{path}: the column `{given}` holds no texts; {_listed('texts', texts)}")
        return given
    if DEFAULT_FIELD in texts:
        return DEFAULT_FIELD
    if len(texts) == 1:
        return texts[0]
    raise EmbedFailed(
        f"{path}: no column `{DEFAULT_FIELD}`, and {len(texts)} columns with texts; "
        f"choose with --field: {_listed('columns', texts or names)}"
    )


def check_fields(names: Sequence[str], needed: str | None, path: str) -> None:
    """Check that a column is there. Raises: EmbedFailed."""
    if needed is not None and needed not in names:
        raise EmbedFailed(f"{path}: there is no column `{needed}`; {_listed('columns', names)}")


def _listed(what: str, names: Sequence[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:NAMES_SHOWN])
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return f"{what}: {shown or 'none'}{more}"
