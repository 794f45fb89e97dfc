"""Clients for bulk work, with and without coroutines: tables of texts in, tables with vectors out."""

import asyncio
import logging
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import httpx
import msgspec
import pyarrow as pa

from gateway.client.calls import CLOSED, Bounds, Caller, open_http
from gateway.client.errors import CallFailed, CallStopped, Refused
from gateway.client.isolation import HARMLESS, Embedder
from gateway.client.request import OPENAI_PATH, Request, Space
from gateway.client.tables import (
    CallRows,
    Embedded,
    Spaces,
    TableRows,
    calls_of,
    check_columns,
    split,
    table_of,
    with_fixed_size,
)

T = TypeVar("T")
LOG = logging.getLogger("gateway.client")
# For which a client waits, as it is closed, until its thread has ended.
CLOSE_S = 10.0


class Settings(msgspec.Struct, frozen=True):
    """Settings of a client; it is all of a client that is pickled.

    address: of the gateway, such as https://gateway.example. model: None for the gateway's default.
    dimensions: width of the vectors. input_type: purpose of the texts. truncate: of texts that are too long.
    None leaves these three to the model. fingerprint: the vector space that is accepted, None for that of the
    first reply. batch_inputs: texts of a call at most; a call also has at most 1 MiB of text. concurrency:
    calls at once. timeout_s: of one call. deadline_s: time without success after which a call is given up.
    ca: file of certificates to trust.
    """

    address: str
    key: str | None = None
    model: str | None = None
    dimensions: int | None = None
    input_type: Literal["query", "document"] | None = None
    truncate: Literal["error", "left", "right"] | None = None
    fingerprint: str | None = None
    batch_inputs: int = 256
    concurrency: int = 4
    timeout_s: float = 120.0
    deadline_s: float = 600.0
    ca: Path | str | None = None

    def __post_init__(self) -> None:
        url = httpx.URL(self.address)
        if url.scheme not in ("http", "https") or not url.host or url.userinfo or url.query:
            raise ValueError("`address` is that of a gateway, such as https://gateway.example")
        for name in ("batch_inputs", "concurrency", "timeout_s", "deadline_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"`{name}` is more than 0")

    def request(self) -> Request:
        """Return the request that all calls share."""
        base = self.address.rstrip("/").removesuffix("/v1")
        return Request(base, OPENAI_PATH, self.model, self.dimensions, self.input_type, None, self.truncate)


class AsyncClient:
    """Client whose methods are coroutines of one event loop. settings: as of `Settings`.

    Calls have the class bulk, so that interactive ones go first. They are repeated if the gateway is away or
    defers them, not before `retry-after`, until `deadline_s`. A pickled client has its settings only, the key
    among them.
    """

    def __init__(
        self, address: str, key: str | None = None, model: str | None = None, **settings: Any
    ) -> None:
        self._settings = Settings(address, key, model, **settings)
        self._request = self._settings.request()
        self._spaces = Spaces(self._settings.fingerprint)
        self._http: httpx.AsyncClient | None = None
        self._permits = asyncio.Semaphore(self._settings.concurrency)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), self._settings)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; a later call opens new ones. Calls in flight end with CallStopped."""
        if self._http is not None:
            http, self._http = self._http, None
            await http.aclose()

    async def embed_table(
        self, rows: Any, column: str = "text", *, key: str | None = None, into: str = "embedding"
    ) -> Embedded:
        """Return the rows with their vectors, and a table of those that cannot be embedded.

        rows: a table, a record batch, or anything that exports an Arrow stream. column: of the texts. key:
        column that identifies a row in the table of bad rows. into: column of the vectors. Raises: ValueError
        for columns that do not fit, CallFailed, CallStopped.
        """
        good, bad = split(await self.embed_rows(rows, column, into=into), key)
        return Embedded(with_fixed_size(good, into, (await self._space()).dimensions), bad)

    async def embed_rows(self, rows: Any, column: str = "text", *, into: str = "embedding") -> pa.Table:
        """Return all rows in one table, for engines that expect one; `split` makes two of it.

        Vectors are lists of float32. A bad row has a null in place of it, an `error_kind` and an
        `error_message`, which are null for the others. The schema is the same for all tables, also for those
        without rows. Raises: as `embed_table`.
        """
        table = table_of(rows)
        check_columns(table, into)
        found = TableRows(table, column, self._spaces)
        await self._embed(found)
        return found.result(into, (await self._space()).dimensions)

    async def fingerprint(self) -> str | None:
        """Return the fingerprint of the vector space, None if the server reports none. Raises: as calls."""
        return (await self._space()).fingerprint

    async def _space(self) -> Space:
        """Return the space of the replies; if there is none yet, after a call with a harmless text."""
        if self._spaces.space is None:
            try:
                reply = await self._opened().embed(self._request, [HARMLESS])
            except Refused as error:
                raise CallFailed(f"{error}; the server refuses a harmless text too") from error
            self._spaces.add(reply)
        assert self._spaces.space is not None
        return self._spaces.space

    async def _embed(self, rows: TableRows) -> None:
        embedder = Embedder(self._opened(), self._request)

        async def embed(part: CallRows) -> None:
            # Tables that are embedded at once share the connections.
            async with self._permits:
                await embedder.embed(part)

        tasks = [asyncio.create_task(embed(part)) for part in calls_of(rows, self._settings.batch_inputs)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _opened(self) -> Caller:
        settings = self._settings
        bounds = Bounds(settings.concurrency, settings.timeout_s, settings.deadline_s)
        if self._http is None:
            self._http = open_http(bounds, settings.key, settings.ca)
            self._caller = Caller(self._http, bounds, LOG.warning)
        return self._caller


class Client:
    """The same without coroutines, for any thread, also next to a running event loop.

    settings: as of `Settings`. Its event loop runs in a thread of its own, which starts with the first call.
    """

    def __init__(
        self, address: str, key: str | None = None, model: str | None = None, **settings: Any
    ) -> None:
        self._settings = Settings(address, key, model, **settings)
        self._client: AsyncClient = _restored(AsyncClient, self._settings)
        self._lock = threading.Lock()
        self._thread: _LoopThread | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), self._settings)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections and end the thread; a later call opens new ones.

        Calls of other threads that are in flight end with CallStopped.
        """
        with self._lock:
            thread, self._thread = self._thread, None
            client = self._client
        if thread is not None:
            thread.close(client.close)

    def embed_table(
        self, rows: Any, column: str = "text", *, key: str | None = None, into: str = "embedding"
    ) -> Embedded:
        """Return the rows with their vectors, and a table of bad rows: see `AsyncClient`."""
        return self._run(lambda client: client.embed_table(rows, column, key=key, into=into))

    def embed_rows(self, rows: Any, column: str = "text", *, into: str = "embedding") -> pa.Table:
        """Return all rows in one table, with their vectors or errors: see `AsyncClient`."""
        return self._run(lambda client: client.embed_rows(rows, column, into=into))

    def fingerprint(self) -> str | None:
        """Return the fingerprint of the vector space, None if the server reports none."""
        return self._run(AsyncClient.fingerprint)

    def _run(self, work: Callable[[AsyncClient], Coroutine[Any, Any, T]]) -> T:
        with self._lock:
            if self._thread is None or self._thread.process != os.getpid():
                # A forked process has no threads but the one that forked.
                self._client = _restored(AsyncClient, self._settings)
                self._thread = _LoopThread()
                weakref.finalize(self, self._thread.stop)
            thread, client = self._thread, self._client
        return thread.run(work(client))


class _LoopThread:
    """Event loop in a thread. process: the one in which it runs; its calls do nothing in another."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._is_closed = False
        self._futures: set[Future[Any]] = set()
        self._thread = threading.Thread(target=self._run_loop, name="gateway.client", daemon=True)
        self._thread.start()

    def _run_loop(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of a coroutine, which ends with the caller's wait. Raises: CallStopped."""
        with self._lock:
            if self._is_closed:
                work.close()
                raise CallStopped(CLOSED)
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
            self._futures.add(future)
        try:
            return future.result()
        except CancelledError as error:
            raise CallStopped(CLOSED) from error
        finally:
            future.cancel()
            with self._lock:
                self._futures.discard(future)

    def close(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """End what runs, then run a last coroutine and end the thread; wait for it, but not for ever."""
        if self.process != os.getpid():
            return
        with self._lock:
            self._is_closed = True
            futures = list(self._futures)
        for future in futures:
            future.cancel()
        asyncio.run_coroutine_threadsafe(self._end(last), self._loop)
        self._thread.join(CLOSE_S)

    async def _end(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            async with asyncio.timeout(CLOSE_S / 2):
                others = asyncio.all_tasks() - {asyncio.current_task()}
                await asyncio.gather(*others, return_exceptions=True)
                await last()
        finally:
            self._loop.stop()

    def stop(self) -> None:
        """End the thread."""
        # It may have ended before.
        with suppress(RuntimeError):
            if self.process == os.getpid():
                self._loop.call_soon_threadsafe(self._loop.stop)


def _restored(kind: type[Any], settings: Settings) -> Any:
    """Return a client of its pickled settings."""
    return kind(**msgspec.structs.asdict(settings))
