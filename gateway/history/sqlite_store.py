"""History in a SQLite file of `state_dir`, or in memory, where there is no Redis.

Every change is a transaction, so that a kill loses at most the
minute that was not put yet. Rows expire by themselves, and SQLite uses their space again.
"""

import sqlite3
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

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
from gateway.store.sqlite_file import SqliteFile

FILE_NAME = "history.sqlite"
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


class HistoryInSqlite:
    """History in a file, or in memory. All operations raise StoreUnavailable.

    path: None for memory.
    """

    def __init__(self, path: Path | None) -> None:
        self.kept: Kept = "memory" if path is None else "state_dir"
        self._file = SqliteFile(path, TABLES, LAYOUT, NAMES)

    async def put(self, part: Part) -> None:

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

        await self._file.transact(put)

    async def open_minutes(self) -> list[int]:
        query = "SELECT DISTINCT minute FROM parts WHERE length(content) ORDER BY minute"
        return [minute for (minute,) in await self._file.rows(query)]

    async def parts(self, minute: int) -> Mapping[str, bytes]:
        query = "SELECT name, content FROM parts WHERE minute = ? AND length(content)"
        return dict(await self._file.rows(query, minute))

    async def chunks(self, places: Sequence[Chunk]) -> list[bytes | None]:
        query = "SELECT content FROM chunks WHERE key = ?"

        def read(database: sqlite3.Connection) -> list[bytes | None]:
            rows = [database.execute(query, (place.key,)).fetchone() for place in places]
            return [None if row is None else row[0] for row in rows]

        return await self._file.run(read)

    async def version(self) -> int:
        return int((await self._file.rows("SELECT number FROM version"))[0][0])

    async def fold(self, fold: Fold) -> bool:

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

        return await self._file.transact(carry_out)

    async def is_chosen(self, process: str) -> bool:
        """Return whether this process folds now: any may, as a fold of this size is quick."""
        del process
        return True

    async def names(self) -> Mapping[int, str]:
        rows = await self._file.rows("SELECT number, name FROM names ORDER BY period")
        return {int(number, 16): name for number, name in rows}

    async def put_spans(self, day: int, recorder: str, content: bytes) -> None:
        query = """
        INSERT INTO spans SELECT ?1, ?2, ?3 WHERE (SELECT count(*) FROM spans WHERE day = ?1) < ?4
            OR EXISTS (SELECT 1 FROM spans WHERE day = ?1 AND recorder = ?2)
        ON CONFLICT (day, recorder) DO UPDATE SET content = excluded.content
        """
        await self._file.change(query, (day, recorder, content, RECORDERS_MAX))

    async def spans(self, days: Sequence[int]) -> list[bytes]:
        query = "SELECT content FROM spans WHERE day BETWEEN ? AND ? ORDER BY day"
        return [content for (content,) in await self._file.rows(query, min(days), max(days))]

    async def aclose(self) -> None:
        await self._file.aclose()
