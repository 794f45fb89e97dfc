"""A database of SQLite, for the processes of one gateway.

Every call runs on one thread of its own, because SQLite blocks.
"""

import asyncio
import logging
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from gateway.config.state_folder import lock_private, make_private, make_private_folder
from gateway.store.errors import StoreUnavailable

IN_MEMORY = ":memory:"
BUSY_S = 5.0
Result = TypeVar("Result")

logger = logging.getLogger("gateway")


class SqliteFile:
    """A file that is created at its first use, or memory if path is None. All calls raise StoreUnavailable.

    tables: statements that create what is missing, each on lines of its own. layout: their number. dropped:
    tables that a file of another layout loses.
    """

    def __init__(self, path: Path | None, tables: str, layout: int, dropped: tuple[str, ...]) -> None:
        self._path = path
        self._tables = tables
        self._layout = layout
        self._dropped = dropped
        self._thread = ThreadPoolExecutor(1, path.stem if path else "memory")
        self._connection: sqlite3.Connection | None = None

    async def run(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        """Return the result of work on the thread of the connection. It must not be a cursor."""

        def run() -> Result:
            try:
                return work(self._connection or self._open())
            except (OSError, sqlite3.Error) as error:
                reason = (isinstance(error, OSError) and error.strerror) or error
                name = self._path.name if self._path else "the database in memory"
                raise StoreUnavailable(f"{name} cannot be used: {reason}") from error

        return await asyncio.wrap_future(self._thread.submit(run))

    async def transact(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        """Return the result of a transaction."""

        def transact(database: sqlite3.Connection) -> Result:
            # At once for writing: a transaction that begins by reading cannot wait for another writer.
            database.execute("BEGIN IMMEDIATE")
            with database:
                return work(database)

        return await self.run(transact)

    async def change(self, command: str, *values: tuple[object, ...]) -> None:
        """Execute a command once for each tuple of values, in one transaction."""

        def change(database: sqlite3.Connection) -> None:
            # The cursor is freed on this thread: freed on another, it resets a statement that is in use here.
            database.executemany(command, values)

        await self.transact(change)

    async def rows(self, query: str, *values: object) -> list[Any]:
        """Return all rows of a query."""
        return await self.run(lambda database: database.execute(query, values).fetchall())

    async def aclose(self) -> None:
        """Close the file."""

        def close() -> None:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

        await asyncio.wrap_future(self._thread.submit(close))
        self._thread.shutdown(wait=False)

    def _open(self) -> sqlite3.Connection:
        if self._path is None:
            self._connection = self._connect()
            return self._connection
        lock = self._path.with_suffix(".lock")
        try:
            with lock_private(lock, shared=True):
                self._connection = self._connect()
        except sqlite3.OperationalError:
            raise
        except sqlite3.DatabaseError:
            # Processes that start together find the damage together, and only one may put the file aside.
            with lock_private(lock):
                self._connection = self._connect_alone(self._path)
        return self._connection

    def _connect_alone(self, path: Path) -> sqlite3.Connection:
        """Connect to a file that was no database, or damaged, while no other process opens it.

        It stays for the operator to look at, unless another process has put it aside by now.
        """
        try:
            return self._connect()
        except sqlite3.OperationalError:
            raise
        except sqlite3.DatabaseError as error:
            aside = path.with_suffix(".unreadable")
            path.replace(aside)
            logger.warning("%s is unreadable (%s): an empty one replaces it; see %s", path, error, aside)
            return self._connect()

    def _connect(self) -> sqlite3.Connection:
        if self._path is not None:
            make_private_folder(self._path.parent)
            make_private(self._path)
            # SQLite creates its files next to it with the same rights.
            for path in self._path.parent.glob(f"{self._path.name}-*"):
                make_private(path)
        database = sqlite3.connect(
            self._path or IN_MEMORY, BUSY_S, isolation_level=None, check_same_thread=False
        )
        try:
            database.execute("PRAGMA journal_mode = WAL")
            # A kill of the process loses nothing; a crash of the machine may lose the last minutes.
            database.execute("PRAGMA synchronous = NORMAL")
            _check_pages(database)
            database.execute("BEGIN IMMEDIATE")
            if database.execute("PRAGMA user_version").fetchone() != (self._layout,):
                for name in self._dropped:
                    database.execute(f"DROP TABLE IF EXISTS {name}")
            for statement in self._tables.split(";\n"):
                database.execute(statement)
            database.execute(f"PRAGMA user_version = {self._layout}")
            database.execute("COMMIT")
        except BaseException:
            database.close()
            raise
        return database


def _check_pages(database: sqlite3.Connection) -> None:
    """Check all pages: damage behind the first would fail every call, also after a restart.

    Raises: sqlite3.DatabaseError.
    """
    (found,) = database.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":
        raise sqlite3.DatabaseError(found.splitlines()[-1])
