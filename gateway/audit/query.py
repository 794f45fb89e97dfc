"""Pages of records, newest first, and what they are filtered by. Pure."""

from collections.abc import Iterable

import msgspec

from gateway.audit.records import AuditRecord

# Records that one request examines; the next page begins after them, even if none of them was wanted.
EXAMINED_MAX = 10_000
PAGE_MAX = 1_000


class InvalidCursor(ValueError):
    """A cursor is not one of a page."""


class AuditQuery(msgspec.Struct, frozen=True):
    """Wanted records.

    since, until: times as records have them, the latter exclusive; empty is open. object: as in
    `tenant/acme`, or only the kind. actor, action: as in the record. cursor: `next` of the page before.
    search: a text that any part of the record has, without case; empty for any.
    """

    since: str = ""
    until: str = ""
    object: str = ""
    actor: str = ""
    limit: int = 100
    cursor: str = ""
    action: str = ""
    search: str = ""

    @property
    def before(self) -> tuple[str, str] | None:
        """Place after which the page begins. Raises: InvalidCursor."""
        if not self.cursor:
            return None
        time, separator, id_ = self.cursor.partition("_")
        if not separator or not time.endswith("Z") or not id_.isalnum():
            raise InvalidCursor("the cursor is not one of a page: take `next` as it is")
        return time, id_

    def wants(self, record: AuditRecord) -> bool:
        """Return whether a record passes the filters, apart from its place."""
        if self.actor and record.actor != self.actor:
            return False
        if self.action and record.action != self.action:
            return False
        if self.search and self.search.casefold() not in record.text.casefold():
            return False
        if not self.object or record.object == self.object:
            return True
        return "/" not in self.object and record.object.startswith(f"{self.object}/")


class AuditPage(msgspec.Struct, frozen=True):
    """Records, newest first. next: cursor of the next page, null after the last one."""

    data: list[AuditRecord]
    next: str | None = None


class PageBuilder:
    """Page that is filled from records in their order, newest first."""

    def __init__(self, query: AuditQuery) -> None:
        self._query = query
        self._before = query.before
        self._found: list[AuditRecord] = []
        self._examined = 0
        self._has_more = False

    def add(self, records: Iterable[AuditRecord]) -> bool:
        """Take records that follow those before; return False once the page is full."""
        query = self._query
        for record in records:
            if query.until and record.time >= query.until:
                continue
            if query.since and record.time < query.since:
                continue
            if self._before is not None and record.order >= self._before:
                continue
            if self._examined >= EXAMINED_MAX or len(self._found) >= query.limit:
                self._has_more = True
                return False
            self._before = record.order
            self._examined += 1
            if query.wants(record):
                self._found.append(record)
        return True

    def page(self) -> AuditPage:
        """Return the page."""
        return AuditPage(self._found, "_".join(self._before) if self._has_more and self._before else None)


def decode_record(line: bytes) -> AuditRecord | None:
    """Return the record of a line, None if it was cut off, or is none."""
    try:
        return msgspec.json.decode(line, type=AuditRecord)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
