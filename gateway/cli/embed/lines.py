"""Lines of text files and of gzip files, with the offset behind each."""

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


class LineReader:
    """Iterator over lines in UTF-8. offset, line: behind the last line that it returned."""

    def __init__(self, source: Source, file: IO[bytes], start: Position) -> None:
        self._source = source
        self._file = file
        self.offset = start.offset
        self.line = start.line
        if start.offset:
            file.seek(start.offset)

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        """Return the next line with its end. Raises: EmbedFailed."""
        try:
            line = self._file.readline(LINE_BYTES_MAX + 1)
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

    def _without_mark(self, line: bytes) -> bytes:
        if line.startswith(OTHER_BOMS):
            raise EmbedFailed(f"{self._source.path}: the file is UTF-16 or UTF-32; convert it to UTF-8")
        return line.removeprefix(BOM)


@contextmanager
def open_lines(source: Source, start: Position) -> Iterator[LineReader]:
    """Open a file at a position. Raises: EmbedFailed."""
    try:
        with open(source.path, "rb", buffering=BUFFER_BYTES) as raw:  # noqa: PTH123 - its path is a string
            file = cast("IO[bytes]", gzip.GzipFile(fileobj=raw)) if source.is_gzip else raw
            try:
                yield LineReader(source, file, start)
            finally:
                file.close()
    except OSError as error:
        raise EmbedFailed(f"{source.path}: {error.strerror or error}") from error
