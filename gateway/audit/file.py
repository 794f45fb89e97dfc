"""Records of changes in a file of `state_dir`: one line of JSON each, appended and never changed.

Several processes append under a lock. The file is bounded: once it has a tenth more lines than it may have,
or its first line is too old, the newest ones replace it in one step.
"""

import mmap
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import msgspec

from gateway.audit.query import AuditPage, AuditQuery, PageBuilder, decode_record
from gateway.audit.records import RECORD_BYTES_MAX, AuditRecord, time_text
from gateway.config.schema import AuditSettings
from gateway.config.state_folder import lock_private, open_private, replace_private

FILE_NAME = "audit.jsonl"
# Records that wait for Redis.
WAITING_NAME = "audit-waiting.jsonl"
DAY_S = 24 * 3600
# A line begins with the id and the time of its record.
BEGINNING, TIME = b'{"id":"', b'","time":"'


class AuditFile:
    """File of records. Its operations block, and raise OSError."""

    def __init__(self, path: Path, settings: AuditSettings) -> None:
        self.path = path
        self._settings = settings
        # Of the file as this process has last seen it: its number, its size and its lines.
        self._known = (0, -1, 0)

    def append(self, records: Sequence[AuditRecord]) -> None:
        """Append records that the file does not have."""
        with self._locked(), open_private(self.path) as file:
            descriptor = file.fileno()
            size = os.fstat(descriptor).st_size
            text = b"".join(msgspec.json.encode(record) + b"\n" for record in records)
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                # The last line was cut off by a crash.
                text = b"\n" + text
            lines = self._lines(descriptor) + text.count(b"\n")
            os.lseek(descriptor, 0, os.SEEK_END)
            while text:
                text = text[os.write(descriptor, text) :]
            os.fsync(descriptor)
            status = os.fstat(descriptor)
            self._known = (status.st_ino, status.st_size, lines)
            first = decode_record(os.pread(descriptor, RECORD_BYTES_MAX, 0).partition(b"\n")[0])
            is_old = first is not None and first.time < time_text(self._oldest_s() - DAY_S)
            if is_old or lines > self._settings.records + self._settings.records // 10:
                self._trim()

    def has(self, record: AuditRecord) -> bool:
        """Return whether the file has a record."""
        try:
            with self.path.open("rb") as file, _mapped(file.fileno()) as content:
                return content is not None and content.rfind(BEGINNING + record.id.encode()) >= 0
        except (FileNotFoundError, NotADirectoryError):
            return False

    def page(self, query: AuditQuery) -> AuditPage:
        """Return a page. Only the records that may be on it are decoded. Raises: InvalidCursor."""
        page, before = PageBuilder(query), query.before
        since = max(query.since, time_text(self._oldest_s()))

        def candidates() -> Iterator[AuditRecord]:
            # Clocks may have been set back.
            for line in sorted(self._lines_of()[-self._settings.records :], key=_order_of, reverse=True):
                order = _order_of(line)
                if order[0] < since:
                    return
                is_later = (query.until and order[0] >= query.until) or (before and order >= before)
                if not is_later and (record := decode_record(line)) is not None:
                    yield record

        page.add(candidates())
        return page.page()

    def records(self) -> list[AuditRecord]:
        """Return all records in the order of the file."""
        return [record for record in map(decode_record, self._lines_of()) if record is not None]

    def _lines_of(self) -> list[bytes]:
        """Return the lines, apart from those that a crash has cut off early."""
        try:
            lines = self.path.read_bytes().splitlines()
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [line for line in lines if line.startswith(BEGINNING) and TIME in line]

    def remove(self, copied: Sequence[AuditRecord]) -> None:
        """Remove records that were copied elsewhere."""
        ids = {record.id for record in copied}
        with self._locked():
            left = [record for record in self.records() if record.id not in ids]
            if left:
                self._replace(left)
            else:
                self.path.unlink(missing_ok=True)

    def _locked(self) -> IO[str]:
        return lock_private(self.path.with_suffix(".lock"))

    def _trim(self) -> None:
        oldest = time_text(self._oldest_s())
        kept = [record for record in self.records() if record.time >= oldest]
        self._replace(kept[-self._settings.records :])

    def _replace(self, records: Sequence[AuditRecord]) -> None:
        replace_private(self.path, b"".join(msgspec.json.encode(record) + b"\n" for record in records))

    def _lines(self, descriptor: int) -> int:
        """Return the number of lines, which are counted again only if another process has appended."""
        status = os.fstat(descriptor)
        if self._known[:2] == (status.st_ino, status.st_size):
            return self._known[2]
        with _mapped(descriptor) as content:
            return 0 if content is None else sum(1 for _ in iter(content.readline, b""))

    def _oldest_s(self) -> float:
        return time.time() - self._settings.keep_days * DAY_S


@contextmanager
def _mapped(descriptor: int) -> Iterator[mmap.mmap | None]:
    """Map a file for reading; None if it is empty."""
    if not os.fstat(descriptor).st_size:
        yield None
        return
    with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as content:
        yield content


def _order_of(line: bytes) -> tuple[str, str]:
    """Return the place of a record among all, which its line begins with."""
    id_, _, rest = line[len(BEGINNING) :].partition(TIME)
    return rest.partition(b'"')[0].decode(errors="replace"), id_.decode(errors="replace")
