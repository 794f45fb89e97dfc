"""Lines of text files and of gzip files, with the offset behind each."""

import codecs
import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, cast

from gateway.cli.embed.packing import Position
from gateway.cli.embed.plan import EmbedFailed, Source

LINE_BYTES_MAX = 64 * 1024 * 1024
BOM = b"\xef\xbb\xbf"
# UTF-16 and UTF-32 begin with these.
OTHER_BOMS = (b"\xff\xfe", b"\xfe\xff", b"\x00\x00\xfe\xff")
BUFFER_BYTES = 1024 * 1024
UTF_8 = "utf-8"
# Encodings of names and of literals.
NO_TEXT = ("idna", "raw-unicode-escape", "raw_unicode_escape")
# What rows consist of, apart from their values.
SYNTAX = '{"a": [0]},;\t\r\n'
# Bytes of a character, and the encodings that state the order of the bytes.
WIDTHS = {"utf-16": 2, "utf-32": 4}
OTHER_ENCODING = "name the encoding of the file with --encoding, such as cp1252 or utf-16"
OLD_MAC = (
    "has a carriage return that ends no line; if the lines of the file end with CR alone, as on old Macs, "
    "convert it: tr '\\r' '\\n' < FILE"
)


def encoding_of(name: str) -> str | None:
    """Return an encoding by its name in Python, None for UTF-8. Raises: EmbedFailed if it cannot be read."""
    found = ""
    try:
        found = codecs.lookup(name).name
        is_ascii = found == "utf-8-sig" or SYNTAX.encode(found) == SYNTAX.encode()
        is_readable = (is_ascii or found[:6] in WIDTHS) and found not in NO_TEXT
    except (LookupError, ValueError):
        is_readable = False
    if not is_readable:
        raise EmbedFailed(f"--encoding: {name!r} is no encoding of lines of text, such as cp1252 or utf-16")
    return None if found in (UTF_8, "utf-8-sig") else found


class LineReader:
    """Iterator over lines, in the bytes of the file. offset, line: behind the last line that it returned.

    encoding: of the file.
    """

    def __init__(self, source: Source, file: IO[bytes], start: Position, encoding: str = UTF_8) -> None:
        self._source = source
        self._file = file
        self.encoding = encoding
        self._width = WIDTHS.get(encoding[:6], 1)
        if self._width > 1 and encoding in WIDTHS:
            self.encoding = self._with_order(encoding)
        self._end = "\n".encode(self.encoding)
        self.offset = start.offset
        self.line = start.line
        if start.offset:
            file.seek(start.offset)

    def _with_order(self, encoding: str) -> str:
        """Return the encoding with the order of bytes that the mark at the beginning states."""
        beginning = self._file.read(self._width)
        self._file.seek(0)
        is_big = beginning in (codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)
        return f"{encoding}-{'be' if is_big else 'le'}"

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        """Return the next line with its end. Raises: EmbedFailed."""
        try:
            line = self._next_line()
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
        self.offset += len(line)
        return self._without_mark(line) if self.line == 1 else line

    def _next_line(self) -> bytes:
        """Return the bytes up to the next end of a line, or so many that they are too many."""
        line = self._file.readline(LINE_BYTES_MAX + 1)
        while self._width > 1 and line and not len(line) > LINE_BYTES_MAX:
            # A byte 10 ends a line only as the character of a line's end.
            line += self._file.read(-len(line) % self._width)
            if line.endswith(self._end) or not (rest := self._file.readline(LINE_BYTES_MAX + 1)):
                break
            line += rest
        return line

    def _without_mark(self, line: bytes) -> bytes:
        if self._width > 1:
            return line.removeprefix("\ufeff".encode(self.encoding))
        if line.startswith(OTHER_BOMS):
            raise EmbedFailed(f"{self._source.path}: the file is UTF-16 or UTF-32; {OTHER_ENCODING}")
        if line.startswith(BOM) and self.encoding != UTF_8:
            raise EmbedFailed(
                f"{self._source.path}: the file begins with the mark of UTF-8, and --encoding is "
                f"{self.encoding}; leave it out"
            )
        return line.removeprefix(BOM)

    def place(self, line: int) -> str:
        """Return the words for a line of the file."""
        return self._source.place(line)

    def text(self, line: bytes) -> str:
        """Return a line as text. Raises: UnicodeDecodeError."""
        return line.decode(self.encoding)

    def in_utf8(self, line: bytes) -> bytes:
        """Return a line in UTF-8. Raises: UnicodeDecodeError."""
        if self.encoding != UTF_8:
            return self.text(line).encode()
        if not line.isascii():
            line.decode()
        return line

    def decode_problem(self, error: UnicodeDecodeError) -> str:
        """Return in words why the last line could not be decoded."""
        name = "UTF-8" if self.encoding == UTF_8 else self.encoding
        return f"is not {name}: {error.reason} at byte {error.start} of line {self.line}"


@contextmanager
def open_lines(source: Source, start: Position, encoding: str | None = None) -> Iterator[LineReader]:
    """Open a file at a position. encoding: None for UTF-8. Raises: EmbedFailed."""
    try:
        with open(source.path, "rb", buffering=BUFFER_BYTES) as raw:  # noqa: PTH123 - its path is a string
            file = cast("IO[bytes]", gzip.GzipFile(fileobj=raw)) if source.is_gzip else raw
            try:
                yield LineReader(source, file, start, encoding or UTF_8)
            finally:
                file.close()
    except OSError as error:
        raise EmbedFailed(f"{source.path}: {error.strerror or error}") from error
