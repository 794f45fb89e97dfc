"""Journal of the results of a chunk while it runs, and the files that are composed from it.

A result is appended in one write as soon as it is there, and is therefore safe from a process that is
killed. The next attempt at the chunk adopts the results of all earlier ones, and computes only the rest.
"""

import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from gateway.batches.folder import make_private
from gateway.batches.records import Counts, Part
from gateway.batches.results import LineResult

# Line in the chunk, kind of result, tokens, cached tokens and length of the text; then a checksum of all.
FIELDS = struct.Struct("<IBQQI")
KINDS: tuple[tuple[Part, bool], ...] = (("out", True), ("err", True), ("err", False))
CHECKSUM = struct.Struct("<I")
HEADER_BYTES = FIELDS.size + CHECKSUM.size
COPY_BYTES = 256 * 1024
# Of one write, as POSIX bounds it in Linux.
BUFFERS_MAX = 1024


class Entry(msgspec.Struct, frozen=True):
    """Place of a result. offset: of its text in the file."""

    line: int
    part: Part
    tokens: int
    cached_tokens: int
    is_executed: bool
    offset: int
    length: int


class Spool:
    """Results of one attempt at a chunk, by line. All methods block. path: of its own file."""

    def __init__(self, path: Path) -> None:
        self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0)
        self._size = 0
        self.entries: dict[int, Entry] = {}
        for entry, _ in _frames(self._file.fileno()):
            # Of this attempt, before it was interrupted.
            self.entries[entry.line] = entry
            self._size = entry.offset + entry.length

    def adopt(self, earlier: Path) -> None:
        """Copy the results of an earlier attempt that this one lacks. Raises: OSError."""
        try:
            with earlier.open("rb") as file:
                for entry, text in _frames(file.fileno()):
                    if entry.line not in self.entries:
                        self.append([(entry.line, _result_of(entry, text))])
        except FileNotFoundError:
            # Its attempt has just been completed, or removed.
            return

    def append(self, results: Sequence[tuple[int, LineResult]]) -> None:
        """Append the results of lines, without a copy of them. Raises: OSError, with nothing appended."""
        frames: list[bytes] = []
        entries: list[Entry] = []
        at = self._size
        for line, result in results:
            text, kind = result.text, KINDS.index((result.part, result.is_executed))
            fields = FIELDS.pack(line, kind, result.tokens, result.cached_tokens, len(text))
            frames += (fields, CHECKSUM.pack(_checksum(fields, text)), text)
            at += HEADER_BYTES
            entries.append(
                Entry(
                    line,
                    result.part,
                    result.tokens,
                    result.cached_tokens,
                    result.is_executed,
                    at,
                    len(text),
                )
            )
            at += len(text)
        self._write(frames)
        self._size = at
        self.entries |= {entry.line: entry for entry in entries}

    def _write(self, frames: Sequence[bytes]) -> None:
        """Write after the last whole result, over the rest of a failed write. Raises: OSError."""
        at = self._size
        for start in range(0, len(frames), BUFFERS_MAX):
            rest = [memoryview(frame) for frame in frames[start : start + BUFFERS_MAX]]
            while rest:
                written = os.pwritev(self._file.fileno(), rest, at)
                at += written
                while rest and written >= len(rest[0]):
                    written -= len(rest.pop(0))
                if rest:
                    rest[0] = rest[0][written:]

    def compose(self, part: Part, target: Path) -> int:
        """Write the results of a part in the order of their lines; return their bytes. Raises: OSError."""
        size = 0
        with target.open("wb") as file:
            for entry in self._of(part):
                size += entry.length
                for start in range(entry.offset, entry.offset + entry.length, COPY_BYTES):
                    length = min(COPY_BYTES, entry.offset + entry.length - start)
                    file.write(os.pread(self._file.fileno(), length, start))
        return size

    @property
    def size(self) -> int:
        """Bytes of all results."""
        return sum(entry.length for entry in self.entries.values())

    def size_of(self, part: Part) -> int:
        """Return the bytes of a part's results."""
        return sum(entry.length for entry in self._of(part))

    def counts(self) -> Counts:
        """Return the counts of all results."""
        entries = self.entries.values()
        completed = sum(entry.part == "out" for entry in entries)
        tokens = sum(entry.tokens for entry in entries)
        cached = sum(entry.cached_tokens for entry in entries)
        unexecuted = sum(not entry.is_executed for entry in entries)
        return Counts(completed, len(entries) - completed, unexecuted, tokens, cached)

    def close(self) -> None:
        """Close the file, which stays for the next attempt."""
        self._file.close()

    def _of(self, part: Part) -> list[Entry]:
        return [entry for _, entry in sorted(self.entries.items()) if entry.part == part]


class Journals:
    """Journals of all attempts at one chunk. All methods block. folder: of all journals. chunk: its name."""

    def __init__(self, folder: Path, chunk: str) -> None:
        self._folder = folder
        self._chunk = chunk

    def open(self, attempt: str) -> Spool:
        """Open the journal of an attempt, with the results of all earlier ones. Raises: OSError."""
        make_private(self._folder)
        own = self.path(f"{attempt}.journal")
        earlier = [path for path in self._all() if path != own]
        spool = Spool(own)
        for journal in earlier:
            spool.adopt(journal)
        return spool

    def remove(self) -> None:
        """Remove the journals of all attempts. Raises: OSError."""
        for path in self._all():
            path.unlink(missing_ok=True)

    def path(self, end: str) -> Path:
        """Return the path of a file of the chunk."""
        return self._folder / f"{self._chunk}.{end}"

    def _all(self) -> list[Path]:
        return sorted(self._folder.glob(f"{self._chunk}.*.journal"))


def _frames(file: int) -> Iterator[tuple[Entry, bytes]]:
    """Yield the complete results of a journal. The first damaged one ends it."""
    at = 0
    while len(head := os.pread(file, HEADER_BYTES, at)) == HEADER_BYTES:
        fields = head[: FIELDS.size]
        line, kind, tokens, cached, length = FIELDS.unpack(fields)
        at += HEADER_BYTES
        text = os.pread(file, length, at)
        if len(text) < length or CHECKSUM.pack(_checksum(fields, text)) != head[FIELDS.size :]:
            return
        part, is_executed = KINDS[kind]
        yield Entry(line, part, tokens, cached, is_executed, at, length), text
        at += length


def _checksum(fields: bytes, text: bytes) -> int:
    return zlib.crc32(text, zlib.crc32(fields))


def _result_of(entry: Entry, text: bytes) -> LineResult:
    return LineResult(entry.part, text, entry.tokens, entry.cached_tokens, entry.is_executed)
