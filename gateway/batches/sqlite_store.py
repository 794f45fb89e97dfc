"""Table and queue in SQLite, for the processes of one gateway. Every call runs on one thread of its own."""

import asyncio
import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import inf
from pathlib import Path
from typing import TypeVar

import msgspec

from gateway.batches.job_store import (
    LEASE_S,
    ByteBounds,
    JobStore,
    JobStoreUnavailable,
    Page,
    Row,
    RowBounds,
    StorageFull,
    TooManyRows,
)
from gateway.batches.records import ChunkResult
from gateway.config.state_folder import make_private, make_private_folder

BUSY_S = 5.0
# Of files that SQLite keeps next to a database.
SQLITE_ENDINGS = ("-wal", "-shm")
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
ALL_BYTES = "SELECT coalesce(sum(bytes), 0) FROM rows"
Result = TypeVar("Result")


class SqliteDatabase:
    """Connection to a file, which one thread uses."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = ThreadPoolExecutor(1, "jobs")
        self._connection: sqlite3.Connection | None = None

    async def write(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        """Return the result of a transaction. Raises: JobStoreUnavailable."""

        def write(database: sqlite3.Connection) -> Result:
            # At once for writing: a transaction that begins by reading cannot wait for another writer.
            database.execute("BEGIN IMMEDIATE")
            with database:
                return work(database)

        return await self.run(write)

    async def run(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        """Return the result of reading. Raises: JobStoreUnavailable."""

        def run() -> Result:
            try:
                return work(self._open())
            except sqlite3.Error as error:
                raise JobStoreUnavailable(f"the database of jobs failed: {type(error).__name__}") from error

        return await asyncio.get_running_loop().run_in_executor(self._thread, run)

    async def aclose(self) -> None:
        """Close the file."""
        loop = asyncio.get_running_loop()
        if self._connection is not None:
            await loop.run_in_executor(self._thread, self._connection.close)
        self._thread.shutdown(wait=False)

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            self._make_private()
            connection = sqlite3.connect(
                self._path, timeout=BUSY_S, isolation_level=None, check_same_thread=False
            )
            connection.execute("PRAGMA journal_mode = WAL")
            # A power failure may cost the last rows, which the objects have too.
            connection.execute("PRAGMA synchronous = NORMAL")
            if connection.execute("PRAGMA user_version").fetchone()[0] != LAYOUT:
                connection.executescript("DROP TABLE IF EXISTS rows; DROP TABLE IF EXISTS chunks;")
                connection.execute(f"PRAGMA user_version = {LAYOUT}")
            connection.executescript(TABLES)
            self._connection = connection
        return self._connection

    def _make_private(self) -> None:
        """Create the file for this user only; SQLite gives its files next to it the same rights.

        Raises: JobStoreUnavailable.
        """
        try:
            make_private_folder(self._path.parent)
            make_private(self._path)
            for ending in SQLITE_ENDINGS:
                path = self._path.with_name(f"{self._path.name}{ending}")
                if path.exists():
                    make_private(path)
        except OSError as error:
            raise JobStoreUnavailable(f"{self._path} cannot be opened: {error.strerror}") from error


class SqliteTable:
    """Rows in a file."""

    def __init__(self, database: SqliteDatabase) -> None:
        self._database = database

    async def put(self, row: Row, bounds: ByteBounds | None = None, counts: RowBounds | None = None) -> None:
        """Add or replace a row. Raises: JobStoreUnavailable, StorageFull, TooManyRows."""

        def put(database: sqlite3.Connection) -> None:
            if counts is not None:
                _check_count(database, row, counts)
            if bounds is not None:
                _check_room(database, row, bounds)
            values = (*(getattr(row, name.strip()) for name in COLUMNS.split(",")),)
            database.execute(PUT, values)

        await self._database.write(put)

    async def check(self, row: Row, bounds: ByteBounds, counts: RowBounds) -> None:
        """Raise what `put` would raise now. Raises: JobStoreUnavailable, StorageFull, TooManyRows."""

        def check(database: sqlite3.Connection) -> None:
            _check_count(database, row, counts)
            _check_room(database, row, bounds)

        await self._database.run(check)

    async def get(self, id_: str) -> Row | None:
        """Return a row. Raises: JobStoreUnavailable."""
        found = await self._rows("WHERE id = ?", (id_,))
        return found[0] if found else None

    async def remove(self, id_: str) -> None:
        """Remove a row. Raises: JobStoreUnavailable."""
        await self._database.write(lambda database: database.execute("DELETE FROM rows WHERE id = ?", (id_,)))

    async def rows(self, page: Page) -> list[Row]:
        """Return shown rows. Raises: JobStoreUnavailable."""
        where = "WHERE kind = ? AND is_shown"
        values: list[object] = [page.kind]
        if page.tenant is not None:
            where, values = where + " AND tenant = ?", [*values, page.tenant]
        if page.after is not None:
            sign = "<" if page.newest_first else ">"
            where += f" AND (at_ms, id) {sign} (SELECT at_ms, id FROM rows WHERE id = ?)"  # noqa: S608
            values.append(page.after)
        order = "DESC" if page.newest_first else "ASC"
        clause = f"{where} ORDER BY at_ms {order}, id {order} LIMIT ?"
        return await self._rows(clause, (*values, page.limit), page.data_bytes)

    async def active(self, tenant: str | None = None) -> list[Row]:
        """Return the jobs that have not ended. Raises: JobStoreUnavailable."""
        if tenant is None:
            return await self._rows("WHERE is_active ORDER BY at_ms", ())
        return await self._rows("WHERE is_active AND tenant = ? ORDER BY at_ms", (tenant,))

    async def unfinished(self, before_ms: int) -> list[str]:
        """Return the ids of uploads that were never completed. Raises: JobStoreUnavailable."""
        where = "WHERE NOT is_shown AND id LIKE 'file-%' AND at_ms < ?"
        return [row.id for row in await self._rows(where, (before_ms,))]

    async def used_bytes(self) -> int:
        """Return the bytes of all files. Raises: JobStoreUnavailable."""
        return await self._database.run(lambda database: _one(database, ALL_BYTES))

    async def agree(self, identity: str) -> str:
        """Return this identity; rows of other objects are removed. Raises: JobStoreUnavailable."""

        def agree(database: sqlite3.Connection) -> str:
            known = database.execute("SELECT value FROM facts WHERE name = 'objects'").fetchone()
            if known is not None and known[0] != identity:
                database.execute("DELETE FROM rows")
                database.execute("DELETE FROM chunks")
            database.execute("INSERT OR REPLACE INTO facts VALUES ('objects', ?)", (identity,))
            return identity

        return await self._database.write(agree)

    async def beat(self) -> int:
        """Return the time: a file loses nothing while it is open. Raises: JobStoreUnavailable."""
        await self._database.run(lambda database: _one(database, "SELECT 1"))
        return time.monotonic_ns()

    async def _rows(self, clause: str, values: Sequence[object], data_bytes: float = inf) -> list[Row]:
        """Return rows, up to the one with which their data is longer than this."""

        def read(database: sqlite3.Connection) -> list[Row]:
            found = database.execute(f"SELECT {COLUMNS} FROM rows {clause}", values)  # noqa: S608 - fixed texts
            rows: list[Row] = []
            size = 0
            for columns in found:
                rows.append(_row(*columns))
                size += rows[-1].data_bytes
                if size > data_bytes:
                    break
            return rows

        return await self._database.run(read)

    async def aclose(self) -> None:
        """Close the file, for the queue too."""
        await self._database.aclose()


class SqliteQueue:
    """Chunks in a file. now_s: the wall clock, which all processes of a host share."""

    def __init__(self, database: SqliteDatabase, now_s: Callable[[], float] = time.time) -> None:
        self._database = database
        self._now_s = now_s

    async def enqueue(self, job: str, chunks: Sequence[int]) -> None:
        """Add chunks to the queue. Raises: JobStoreUnavailable."""
        values = [(job, number) for number in chunks]
        command = "INSERT OR IGNORE INTO chunks (job, number) VALUES (?, ?)"
        await self._database.write(lambda database: database.executemany(command, values))

    async def claim(self, job: str, owner: str) -> int | None:
        """Return a chunk that no live owner has. Raises: JobStoreUnavailable."""

        def claim(database: sqlite3.Connection) -> int | None:
            now_s = self._now_s()
            found = database.execute(
                "UPDATE chunks SET owner = ?, until_s = ? WHERE job = ? AND number = ("
                "SELECT number FROM chunks WHERE job = ? AND NOT is_done AND until_s < ? "
                "ORDER BY number LIMIT 1) RETURNING number",
                (owner, now_s + LEASE_S, job, job, now_s),
            ).fetchone()
            return None if found is None else int(found[0])

        return await self._database.write(claim)

    async def renew(self, job: str, chunks: Sequence[int], owner: str) -> None:
        """Keep chunks for another lease. Raises: JobStoreUnavailable."""
        until_s = self._now_s() + LEASE_S
        values = [(until_s, job, number, owner) for number in chunks]
        command = "UPDATE chunks SET until_s = ? WHERE job = ? AND number = ? AND owner = ?"
        await self._database.write(lambda database: database.executemany(command, values))

    async def release(self, job: str, chunk: int, owner: str, after_s: float = 0.0) -> None:
        """Let others claim a chunk. Raises: JobStoreUnavailable."""
        until_s = self._now_s() + after_s if after_s else 0.0
        command = "UPDATE chunks SET until_s = ? WHERE job = ? AND number = ? AND owner = ?"
        await self._database.write(lambda database: database.execute(command, (until_s, job, chunk, owner)))

    async def finish(self, job: str, chunk: int, result: ChunkResult | None) -> None:
        """Take a chunk off the queue. Raises: JobStoreUnavailable."""
        encoded = None if result is None else msgspec.msgpack.encode(result)
        command = (
            "INSERT INTO chunks (job, number, result, is_done) VALUES (?, ?, ?, 1) "
            "ON CONFLICT (job, number) DO UPDATE SET result = excluded.result, is_done = 1"
        )
        await self._database.write(lambda database: database.execute(command, (job, chunk, encoded)))

    async def progress(self, job: str) -> dict[int, ChunkResult]:
        """Return the results of finished chunks. Raises: JobStoreUnavailable."""
        command = "SELECT number, result FROM chunks WHERE job = ? AND is_done AND result IS NOT NULL"
        found = await self._database.run(lambda database: database.execute(command, (job,)).fetchall())
        return {int(number): msgspec.msgpack.decode(result, type=ChunkResult) for number, result in found}

    async def finished(self, job: str) -> int:
        """Return the number of finished chunks. Raises: JobStoreUnavailable."""
        command = "SELECT count(*) FROM chunks WHERE job = ? AND is_done AND result IS NOT NULL"
        return await self._database.run(lambda database: _one(database, command, job))

    async def is_queued(self, job: str) -> bool:
        """Return whether the queue knows the job. Raises: JobStoreUnavailable."""
        command = "SELECT EXISTS (SELECT 1 FROM chunks WHERE job = ?)"
        return bool(await self._database.run(lambda database: _one(database, command, job)))

    async def has_chunks(self, job: str) -> bool:
        """Return whether a chunk of the job is not finished. Raises: JobStoreUnavailable."""
        command = "SELECT EXISTS (SELECT 1 FROM chunks WHERE job = ? AND NOT is_done)"
        return bool(await self._database.run(lambda database: _one(database, command, job)))

    async def is_idle(self, job: str) -> bool:
        """Return whether all chunks wait for an owner. Raises: JobStoreUnavailable."""
        command = "SELECT count(*) > 0 AND max(until_s) < ? FROM chunks WHERE job = ? AND NOT is_done"
        now_s = self._now_s()
        return bool(await self._database.run(lambda database: _one(database, command, now_s, job)))

    async def drop(self, job: str) -> None:
        """Remove a job's chunks. Raises: JobStoreUnavailable."""
        await self._database.write(
            lambda database: database.execute("DELETE FROM chunks WHERE job = ?", (job,))
        )


class SqliteWaits:
    """Reasons for which jobs wait, in a file. now_s: the wall clock, which all processes of a host share."""

    def __init__(self, database: SqliteDatabase, now_s: Callable[[], float] = time.time) -> None:
        self._database = database
        self._now_s = now_s

    async def put(self, job: str, reason: str, for_s: float) -> None:
        """Keep the reason of a job. Raises: JobStoreUnavailable."""
        now_s = self._now_s()

        def put(database: sqlite3.Connection) -> None:
            database.execute("DELETE FROM waits WHERE until_s <= ?", (now_s,))
            database.execute("INSERT OR REPLACE INTO waits VALUES (?, ?, ?)", (job, reason, now_s + for_s))

        await self._database.write(put)

    async def get(self, job: str) -> str | None:
        """Return the reason of a job. Raises: JobStoreUnavailable."""
        command, values = "SELECT reason FROM waits WHERE job = ? AND until_s > ?", (job, self._now_s())
        found = await self._database.run(lambda database: database.execute(command, values).fetchone())
        return None if found is None else str(found[0])


def open_sqlite(path: Path) -> JobStore:
    """Return the store in a file, which is created at its first use."""
    database = SqliteDatabase(path)
    return JobStore(SqliteTable(database), SqliteQueue(database), SqliteWaits(database))


def _check_count(database: sqlite3.Connection, row: Row, counts: RowBounds) -> None:
    """Check that a tenant may have another shown row. Raises: TooManyRows."""
    if _one(database, "SELECT count(*) FROM rows WHERE id = ? AND is_shown", row.id):
        return
    if row.is_active:
        active = "SELECT count(*) FROM rows WHERE is_active AND tenant = ?"
        if _one(database, active, row.tenant) >= counts.active:
            raise TooManyRows(of_active=True)
    shown = "SELECT count(*) FROM rows WHERE tenant = ? AND kind = ? AND is_shown"
    if _one(database, shown, row.tenant, row.kind) >= counts.shown:
        raise TooManyRows(of_active=False)


def _check_room(database: sqlite3.Connection, row: Row, bounds: ByteBounds) -> None:
    """Check that a row fits. Raises: StorageFull."""
    old = _one(database, "SELECT coalesce(sum(bytes), 0) FROM rows WHERE id = ?", row.id)
    more = row.bytes - old
    if more <= 0:
        return
    of_tenant = _one(database, "SELECT coalesce(sum(bytes), 0) FROM rows WHERE tenant = ?", row.tenant)
    if of_tenant + more > bounds.tenant:
        raise StorageFull(of_tenant=True)
    if _one(database, ALL_BYTES) + more > bounds.total:
        raise StorageFull(of_tenant=False)


def _one(database: sqlite3.Connection, command: str, *values: object) -> int:
    return int(database.execute(command, values).fetchone()[0])


def _row(*columns: object) -> Row:
    return msgspec.convert(dict(zip(Row.__struct_fields__, columns, strict=True)), Row, strict=False)
