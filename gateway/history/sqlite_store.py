"""History in a SQLite file of `state_dir`, or in memory, where there is no Redis.

Every change is a transaction, so that a kill loses at most the
minute that was not put yet. Rows expire by themselves, and SQLite uses their space again.
"""

import asyncio
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from gateway.config.state_folder import make_private, make_private_folder
from gateway.history.store import (
    DAY_S,
    KEPT_DAYS,
    MARKS_KEPT_S,
    NAMES_MAX,
    NAMES_PERIOD_DAYS,
    PARTS_KEPT_S,
    RECORDERS_MAX,
    Chunk,
    Fold,
    Kept,
    Part,
    names_periods,
)
from gateway.store.errors import StoreUnavailable

FILE_NAME = "history.sqlite"
IN_MEMORY = ":memory:"
BUSY_S = 5.0
# A file of another layout is emptied.
LAYOUT = 1
TABLES = """
CREATE TABLE IF NOT EXISTS parts (
    minute INTEGER NOT NULL, name TEXT NOT NULL, content BLOB NOT NULL, expires_s REAL NOT NULL,
    PRIMARY KEY (minute, name)
) STRICT;
CREATE TABLE IF NOT EXISTS chunks (
    key TEXT PRIMARY KEY, content BLOB NOT NULL, expires_s REAL NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS names (
    period INTEGER NOT NULL, number TEXT NOT NULL, name TEXT NOT NULL, PRIMARY KEY (period, number)
) STRICT;
CREATE TABLE IF NOT EXISTS spans (
    day INTEGER NOT NULL, recorder TEXT NOT NULL, content BLOB NOT NULL, PRIMARY KEY (day, recorder)
) STRICT;
CREATE TABLE IF NOT EXISTS version (id INTEGER PRIMARY KEY CHECK (id = 0), number INTEGER NOT NULL) STRICT;
INSERT OR IGNORE INTO version VALUES (0, 0);
"""
NAMES = ("parts", "chunks", "names", "spans", "version")
Result = TypeVar("Result")


class HistoryInSqlite:
    """History in a file, or in memory. All operations raise StoreUnavailable.

    path: None for memory.
    """

    def __init__(self, path: Path | None) -> None:
        self.kept: Kept = "memory" if path is None else "state_dir"
        self._path = path
        self._thread = ThreadPoolExecutor(1, "history")
        self._connection: sqlite3.Connection | None = None

    async def put(self, part: Part) -> None:
        """Store a part, unless it is there or was folded."""

        def put(database: sqlite3.Connection) -> None:
            now_s = time.time()
            values = part.minute, part.name, part.content, now_s + PARTS_KEPT_S
            database.execute("INSERT OR IGNORE INTO parts VALUES (?, ?, ?, ?)", values)
            period = names_periods(part.minute * 60)[0]
            (known,) = database.execute("SELECT count(*) FROM names WHERE period = ?", (period,)).fetchone()
            for number, name in list(part.names.items())[: max(0, NAMES_MAX - known)]:
                row = period, f"{number:x}", name
                database.execute("INSERT OR IGNORE INTO names VALUES (?, ?, ?)", row)
            database.execute("DELETE FROM parts WHERE expires_s < ?", (now_s,))
            database.execute("DELETE FROM chunks WHERE expires_s < ?", (now_s,))
            last_period = period - (KEPT_DAYS // NAMES_PERIOD_DAYS + 1)
            database.execute("DELETE FROM names WHERE period < ?", (last_period,))
            database.execute("DELETE FROM spans WHERE day < ?", (now_s // DAY_S - KEPT_DAYS - 1,))

        await self._transact(put)

    async def open_minutes(self) -> list[int]:
        """Return the minutes that have parts."""
        query = "SELECT DISTINCT minute FROM parts WHERE length(content) ORDER BY minute"
        return [minute for (minute,) in await self._rows(query)]

    async def parts(self, minute: int) -> Mapping[str, bytes]:
        """Return the parts of a minute, without folded ones."""
        query = "SELECT name, content FROM parts WHERE minute = ? AND length(content)"
        return dict(await self._rows(query, minute))

    async def chunks(self, places: Sequence[Chunk]) -> list[bytes | None]:
        """Return chunks, None for each that is not there."""
        query = "SELECT content FROM chunks WHERE key = ?"

        def read(database: sqlite3.Connection) -> list[bytes | None]:
            rows = [database.execute(query, (place.key,)).fetchone() for place in places]
            return [None if row is None else row[0] for row in rows]

        return await self._run(read)

    async def version(self) -> int:
        """Return the number of the last fold."""
        return int((await self._rows("SELECT number FROM version"))[0][0])

    async def fold(self, fold: Fold) -> bool:
        """Carry out a step; return False, with nothing changed, if another one came between."""

        def carry_out(database: sqlite3.Connection) -> bool:
            (version,) = database.execute("SELECT number FROM version").fetchone()
            if version != fold.version:
                return False
            marked_until_s = time.time() + MARKS_KEPT_S
            for minute, names in fold.parts.items():
                for name in names:
                    database.execute(
                        "UPDATE parts SET content = x'', expires_s = ? WHERE minute = ? AND name = ?",
                        (marked_until_s, minute, name),
                    )
            for part in fold.merged:
                values = part.minute, part.name, part.content, time.time() + PARTS_KEPT_S
                database.execute("INSERT INTO parts VALUES (?, ?, ?, ?)", values)
            for place, content in fold.chunks.items():
                chunk = place.key, content, place.expires_s
                database.execute("INSERT OR REPLACE INTO chunks VALUES (?, ?, ?)", chunk)
            database.execute("UPDATE version SET number = number + 1")
            return True

        return await self._transact(carry_out)

    async def is_chosen(self, process: str) -> bool:
        """Return whether this process folds now: any may, as a fold of this size is quick."""
        del process
        return True

    async def names(self) -> Mapping[int, str]:
        """Return the names of rows."""
        rows = await self._rows("SELECT number, name FROM names ORDER BY period")
        return {int(number, 16): name for number, name in rows}

    async def put_spans(self, day: int, recorder: str, content: bytes) -> None:
        """Store the replicas of one process on a day, in place of those before."""
        query = """
        INSERT INTO spans SELECT ?1, ?2, ?3 WHERE (SELECT count(*) FROM spans WHERE day = ?1) < ?4
            OR EXISTS (SELECT 1 FROM spans WHERE day = ?1 AND recorder = ?2)
        ON CONFLICT (day, recorder) DO UPDATE SET content = excluded.content
        """
        await self._transact(
            lambda database: database.execute(query, (day, recorder, content, RECORDERS_MAX))
        )

    async def spans(self, days: Sequence[int]) -> list[bytes]:
        """Return the replicas of all processes on some days."""
        query = "SELECT content FROM spans WHERE day BETWEEN ? AND ? ORDER BY day"
        return [content for (content,) in await self._rows(query, min(days), max(days))]

    async def aclose(self) -> None:
        """Close the file."""

        def close() -> None:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

        await asyncio.wrap_future(self._thread.submit(close))
        self._thread.shutdown(wait=False)

    async def _rows(self, query: str, *values: object) -> list[tuple]:  # type: ignore[type-arg]
        return await self._run(lambda database: database.execute(query, values).fetchall())

    async def _transact(self, change: Callable[[sqlite3.Connection], Result]) -> Result:
        def transact(database: sqlite3.Connection) -> Result:
            database.execute("BEGIN IMMEDIATE")
            try:
                result = change(database)
            except BaseException:
                database.execute("ROLLBACK")
                raise
            database.execute("COMMIT")
            return result

        return await self._run(transact)

    async def _run(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        def run() -> Result:
            try:
                return work(self._connection or self._open())
            except (OSError, sqlite3.Error) as error:
                raise StoreUnavailable(
                    f"the history cannot be kept in {self._path or 'memory'}: {error}"
                ) from error

        return await asyncio.wrap_future(self._thread.submit(run))

    def _open(self) -> sqlite3.Connection:
        if self._path is not None:
            make_private_folder(self._path.parent)
            make_private(self._path)
        try:
            self._connection = _connect(self._path)
        except sqlite3.DatabaseError as error:
            if self._path is None or isinstance(error, sqlite3.OperationalError):
                raise
            # The file is no database. It stays for the operator to look at.
            self._path.replace(self._path.with_suffix(".unreadable"))
            make_private(self._path)
            self._connection = _connect(self._path)
        return self._connection


def _connect(path: Path | None) -> sqlite3.Connection:
    """Open a database with the tables of this layout."""
    database = sqlite3.connect(path or IN_MEMORY, BUSY_S, isolation_level=None, check_same_thread=False)
    try:
        database.execute("PRAGMA journal_mode = WAL")
        # A kill of the process loses nothing; a crash of the machine may lose the last minutes.
        database.execute("PRAGMA synchronous = NORMAL")
        database.execute("BEGIN IMMEDIATE")
        (layout,) = database.execute("PRAGMA user_version").fetchone()
        if layout not in (0, LAYOUT):
            for name in NAMES:
                database.execute(f"DROP TABLE IF EXISTS {name}")
        for statement in TABLES.split(";\n"):
            database.execute(statement)
        database.execute(f"PRAGMA user_version = {LAYOUT}")
        database.execute("COMMIT")
    except BaseException:
        database.close()
        raise
    return database
