"""Store in SQLite, for the processes of one gateway.

A lease is a time in the row of a chunk, on the wall clock, which all processes of a host share.
"""

import sqlite3
import time
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path

import msgspec

from gateway.batches.records import ChunkResult
from gateway.batches.store import (
    LEASE_S,
    BoundExceeded,
    Bounds,
    Page,
    QueueState,
    Row,
)
from gateway.store.sqlite_file import SqliteFile

# A database of another layout is built again from the objects.
LAYOUT = 1
TABLES = """
CREATE TABLE IF NOT EXISTS rows (
    id TEXT PRIMARY KEY, kind TEXT NOT NULL, tenant TEXT NOT NULL, at_ms INTEGER NOT NULL,
    bytes INTEGER NOT NULL, is_shown INTEGER NOT NULL, is_active INTEGER NOT NULL, data TEXT NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS rows_listed ON rows (kind, is_shown, at_ms, id);
CREATE INDEX IF NOT EXISTS rows_of_tenant ON rows (tenant, kind, is_shown, at_ms, id);
CREATE INDEX IF NOT EXISTS rows_active ON rows (at_ms) WHERE is_active;
CREATE INDEX IF NOT EXISTS rows_active_of_tenant ON rows (tenant, at_ms) WHERE is_active;
CREATE INDEX IF NOT EXISTS rows_bytes ON rows (tenant, bytes);
CREATE TABLE IF NOT EXISTS chunks (
    job TEXT NOT NULL, number INTEGER NOT NULL, owner TEXT NOT NULL DEFAULT '',
    until_s REAL NOT NULL DEFAULT 0, result BLOB, is_done INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (job, number)
) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS waits (job TEXT PRIMARY KEY, reason TEXT NOT NULL, until_s REAL NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE INDEX IF NOT EXISTS chunks_open ON chunks (job, until_s) WHERE NOT is_done;
"""
COLUMNS = "kind, id, tenant, at_ms, bytes, is_shown, is_active, data"
PUT = f"INSERT OR REPLACE INTO rows ({COLUMNS}) VALUES (?,?,?,?,?,?,?,?)"  # noqa: S608 - fixed names
BYTES = "SELECT coalesce(sum(bytes), 0) FROM rows"
CLAIM = """
UPDATE chunks SET owner = ?, until_s = ? WHERE job = ? AND number = (
    SELECT number FROM chunks WHERE job = ? AND NOT is_done AND until_s < ? ORDER BY number LIMIT 1
) RETURNING number
"""
HOLD = "UPDATE chunks SET until_s = ? WHERE job = ? AND number = ? AND owner = ?"
FINISH = """
INSERT INTO chunks (job, number, result, is_done) VALUES (?, ?, ?, 1)
ON CONFLICT (job, number) DO UPDATE SET result = excluded.result, is_done = 1
"""
QUEUE = """
SELECT count(*) > 0, count(*) FILTER (WHERE NOT is_done), count(result) FILTER (WHERE is_done),
    coalesce(max(until_s) FILTER (WHERE NOT is_done) < ?, 0) FROM chunks WHERE job = ?
"""
DROPPED = ("rows", "chunks")


class SqliteJobStore:
    """Rows, chunks and reasons in a file, which is created at its first use. now_s: the wall clock."""

    def __init__(self, path: Path, now_s: Callable[[], float] = time.time) -> None:
        self._file = SqliteFile(path, TABLES, LAYOUT, DROPPED)
        self._now_s = now_s

    async def put(self, row: Row, bounds: Bounds | None = None, *, is_trial: bool = False) -> None:
        def put(database: sqlite3.Connection) -> None:
            if bounds is not None:
                _check(database, row, bounds)
            if not is_trial:
                database.execute(PUT, [getattr(row, name) for name in COLUMNS.split(", ")])

        # A trial only reads, and waits for no writer.
        await (self._file.run if is_trial else self._file.transact)(put)

    async def get(self, id_: str) -> Row | None:
        found = await self._rows("WHERE id = ?", (id_,))
        return found[0] if found else None

    async def remove(self, id_: str) -> None:
        await self._file.change("DELETE FROM rows WHERE id = ?", (id_,))

    async def rows(self, page: Page) -> list[Row]:
        where, values = "WHERE kind = ? AND is_shown", [str(page.kind)]
        if page.tenant is not None:
            where += " AND tenant = ?"
            values.append(page.tenant)
        if page.after is not None:
            sign = "<" if page.newest_first else ">"
            where += f" AND (at_ms, id) {sign} (SELECT at_ms, id FROM rows WHERE id = ?)"  # noqa: S608
            values.append(page.after)
        order = "DESC" if page.newest_first else "ASC"
        clause = f"{where} ORDER BY at_ms {order}, id {order} LIMIT ?"
        return await self._rows(clause, (*values, page.limit), page.data_bytes)

    async def active(self, tenant: str | None = None) -> list[Row]:
        if tenant is None:
            return await self._rows("WHERE is_active ORDER BY at_ms", ())
        return await self._rows("WHERE is_active AND tenant = ? ORDER BY at_ms", (tenant,))

    async def unfinished(self, before_ms: int) -> list[str]:
        where = "WHERE NOT is_shown AND id LIKE 'file-%' AND at_ms < ?"
        return [row.id for row in await self._rows(where, (before_ms,))]

    async def used_bytes(self) -> int:
        return await self._number(BYTES)

    async def agree(self, identity: str) -> str:
        """Return this identity; rows of other objects are removed."""

        def agree(database: sqlite3.Connection) -> str:
            known = database.execute("SELECT value FROM facts WHERE name = 'objects'").fetchone()
            if known is not None and known[0] != identity:
                database.execute("DELETE FROM rows")
                database.execute("DELETE FROM chunks")
            database.execute("INSERT OR REPLACE INTO facts VALUES ('objects', ?)", (identity,))
            return identity

        return await self._file.transact(agree)

    async def beat(self) -> int:
        """Return the time: a file loses nothing while it is open."""
        await self._number("SELECT 1")
        return time.monotonic_ns()

    async def enqueue(self, job: str, chunks: Sequence[int]) -> None:
        command = "INSERT OR IGNORE INTO chunks (job, number) VALUES (?, ?)"
        await self._file.change(command, *((job, number) for number in chunks))

    async def claim(self, job: str, owner: str) -> int | None:
        def claim(database: sqlite3.Connection) -> int | None:
            now_s = self._now_s()
            found = database.execute(CLAIM, (owner, now_s + LEASE_S, job, job, now_s)).fetchone()
            return None if found is None else int(found[0])

        return await self._file.transact(claim)

    async def renew(self, job: str, chunks: Sequence[int], owner: str) -> None:
        until_s = self._now_s() + LEASE_S
        await self._file.change(HOLD, *((until_s, job, number, owner) for number in chunks))

    async def release(self, job: str, chunk: int, owner: str, after_s: float = 0.0) -> None:
        await self._file.change(HOLD, (self._now_s() + after_s if after_s else 0.0, job, chunk, owner))

    async def finish(self, job: str, chunk: int, result: ChunkResult | None) -> None:
        await self._file.change(
            FINISH, (job, chunk, None if result is None else msgspec.msgpack.encode(result))
        )

    async def progress(self, job: str) -> dict[int, ChunkResult]:
        command = "SELECT number, result FROM chunks WHERE job = ? AND is_done AND result IS NOT NULL"
        found = await self._file.rows(command, job)
        return {int(number): msgspec.msgpack.decode(result, type=ChunkResult) for number, result in found}

    async def queue_of(self, job: str) -> QueueState:
        (found,) = await self._file.rows(QUEUE, self._now_s(), job)
        return msgspec.convert(found, QueueState, strict=False)

    async def drop(self, job: str) -> None:
        await self._file.change("DELETE FROM chunks WHERE job = ?", (job,))

    async def put_wait(self, job: str, reason: str, for_s: float) -> None:
        now_s = self._now_s()

        def put(database: sqlite3.Connection) -> None:
            database.execute("DELETE FROM waits WHERE until_s <= ?", (now_s,))
            database.execute("INSERT OR REPLACE INTO waits VALUES (?, ?, ?)", (job, reason, now_s + for_s))

        await self._file.transact(put)

    async def wait_of(self, job: str) -> str | None:
        command = "SELECT reason FROM waits WHERE job = ? AND until_s > ?"
        found = await self._file.rows(command, job, self._now_s())
        return str(found[0][0]) if found else None

    async def aclose(self) -> None:
        await self._file.aclose()

    async def _number(self, command: str, *values: object) -> int:
        return await self._file.run(lambda database: _number(database, command, *values))

    async def _rows(self, clause: str, values: Sequence[object], data_bytes: float = inf) -> list[Row]:
        """Return rows, up to the one with which their data is longer than this."""

        def read(database: sqlite3.Connection) -> list[Row]:
            rows: list[Row] = []
            size = 0
            for columns in database.execute(f"SELECT {COLUMNS} FROM rows {clause}", values):  # noqa: S608
                fields = dict(zip(Row.__struct_fields__, columns, strict=True))
                rows.append(msgspec.convert(fields, Row, strict=False))
                size += rows[-1].data_bytes
                if size > data_bytes:
                    break
            return rows

        return await self._file.run(read)


def _check(database: sqlite3.Connection, row: Row, bounds: Bounds) -> None:
    """Check that a row fits. Raises: BoundExceeded."""
    is_shown = "SELECT count(*) FROM rows WHERE id = ? AND is_shown"
    if bounds.shown is not None and not _number(database, is_shown, row.id):
        active = "SELECT count(*) FROM rows WHERE is_active AND tenant = ?"
        if row.is_active and _number(database, active, row.tenant) >= bounds.active:
            raise BoundExceeded("active")
        shown = "SELECT count(*) FROM rows WHERE tenant = ? AND kind = ? AND is_shown"
        if _number(database, shown, row.tenant, row.kind) >= bounds.shown:
            raise BoundExceeded("shown")
    more = row.bytes - _number(database, f"{BYTES} WHERE id = ?", row.id)
    if more > 0 and _number(database, f"{BYTES} WHERE tenant = ?", row.tenant) + more > bounds.tenant:
        raise BoundExceeded("tenant")
    if more > 0 and _number(database, BYTES) + more > bounds.total:
        raise BoundExceeded("total")


def _number(database: sqlite3.Connection, command: str, *values: object) -> int:
    return int(database.execute(command, values).fetchone()[0])
