"""Journal of the results of a chunk while it runs, and the files that are composed from it.

A result is appended in one write as soon as it is there, and is therefore safe from a process that is
killed. The next attempt at the chunk adopts the results of all earlier ones, and computes only the rest.
A journal is a sequence of frames: a header with a checksum, and the text of the result. The first damaged
frame ends it. Its file is `<job>.<chunk>.<attempt>.journal`.
"""

import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from gateway.batches.lines import LineResult
from gateway.batches.records import Counts, Part, total
from gateway.config.state_folder import make_private_folder

# Line in the chunk, kind of result, tokens, cached tokens and length of the text; then a checksum of all.
FIELDS = struct.Struct("<IBQQI")
KINDS: tuple[tuple[Part, bool], ...] = (("out", True), ("err", True), ("err", False))
CHECKSUM = struct.Struct("<I")
HEADER_BYTES = FIELDS.size + CHECKSUM.size
COPY_BYTES = 256 * 1024
# Of one write, as POSIX bounds it in Linux.
BUFFERS_MAX = 1024
# Header and text of a result.
Frame = tuple[bytes, bytes]


class Entry(msgspec.Struct, frozen=True):
    """A result in the journal. offset: of its text in the file."""

    part: Part
    counts: Counts
    offset: int
    length: int


class Journal:
    """Results of one attempt at a chunk, by line. All methods block, and raise OSError."""

    def __init__(self, path: Path) -> None:
        self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0)
        self._end = 0
        self.entries: dict[int, Entry] = {}
        # Of this attempt, before it was interrupted.
        for frame in _frames(self._file.fileno()):
            self._note(frame)

    def adopt(self, earlier: Path) -> None:
        """Copy the results of an earlier attempt that this one lacks."""
        # A missing one has just been completed, or removed.
        with suppress(FileNotFoundError), earlier.open("rb") as file:
            for frame in _frames(file.fileno()):
                if FIELDS.unpack_from(frame[0])[0] not in self.entries:
                    self._write([frame])

    def append(self, results: Sequence[tuple[int, LineResult]]) -> None:
        """Append the results of lines, without a copy of them; an error leaves nothing appended."""
        self._write([(_header(line, result), result.text) for line, result in results])

    def _write(self, frames: Sequence[Frame]) -> None:
        """Write after the last whole result, over the rest of a failed write."""
        at, buffers = self._end, [buffer for frame in frames for buffer in frame]
        for start in range(0, len(buffers), BUFFERS_MAX):
            rest = [memoryview(buffer) for buffer in buffers[start : start + BUFFERS_MAX]]
            while rest:
                written = os.pwritev(self._file.fileno(), rest, at)
                at += written
                while rest and written >= len(rest[0]):
                    written -= len(rest.pop(0))
                if rest:
                    rest[0] = rest[0][written:]
        for frame in frames:
            self._note(frame)

    def _note(self, frame: Frame) -> None:
        line, kind, tokens, cached_tokens, length = FIELDS.unpack_from(frame[0])
        offset, (part, is_executed) = self._end + HEADER_BYTES, KINDS[kind]
        is_out = part == "out"
        counts = Counts(int(is_out), int(not is_out), int(not is_executed), tokens, cached_tokens)
        self.entries[line] = Entry(part, counts, offset, length)
        self._end = offset + length

    def compose(self, part: Part, target: Path) -> None:
        """Write the results of a part in the order of their lines."""
        with target.open("wb") as file:
            for _, entry in sorted(self.entries.items()):
                end = entry.offset + entry.length if entry.part == part else entry.offset
                for start in range(entry.offset, end, COPY_BYTES):
                    file.write(os.pread(self._file.fileno(), min(COPY_BYTES, end - start), start))

    def size_of(self, *parts: Part) -> int:
        """Return the bytes of the results of these parts."""
        return sum(entry.length for entry in self.entries.values() if entry.part in parts)

    def counts(self) -> Counts:
        """Return the counts of all results."""
        return total(entry.counts for entry in self.entries.values())

    def close(self) -> None:
        """Close the file, which stays for the next attempt."""
        self._file.close()


def open_journal(folder: Path, chunk: str, attempt: str) -> Journal:
    """Open the journal of an attempt, with the results of all earlier ones at the chunk. Raises: OSError."""
    make_private_folder(folder)
    own = folder / f"{chunk}.{attempt}.journal"
    earlier = [path for path in _journals(folder, chunk) if path != own]
    journal = Journal(own)
    for path in earlier:
        journal.adopt(path)
    return journal


def remove_journals(folder: Path, chunk: str) -> None:
    """Remove the journals of all attempts at a chunk. Raises: OSError."""
    for path in _journals(folder, chunk):
        path.unlink(missing_ok=True)


def _journals(folder: Path, chunk: str) -> list[Path]:
    return sorted(folder.glob(f"{chunk}.*.journal"))


def _header(line: int, result: LineResult) -> bytes:
    kind = KINDS.index((result.part, result.is_executed))
    fields = FIELDS.pack(line, kind, result.tokens, result.cached_tokens, len(result.text))
    return fields + CHECKSUM.pack(_checksum(fields, result.text))


def _frames(file: int) -> Iterator[Frame]:
    """Yield the whole results of a journal, up to the first damaged one."""
    at = 0
    while len(header := os.pread(file, HEADER_BYTES, at)) == HEADER_BYTES:
        fields = header[: FIELDS.size]
        length = FIELDS.unpack(fields)[-1]
        text = os.pread(file, length, at + HEADER_BYTES)
        if len(text) < length or CHECKSUM.pack(_checksum(fields, text)) != header[FIELDS.size :]:
            return
        yield header, text
        at += HEADER_BYTES + length


def _checksum(fields: bytes, text: bytes) -> int:
    return zlib.crc32(text, zlib.crc32(fields))
