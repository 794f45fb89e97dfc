"""The one door to redis: a connection by URL, and scripts that travel many to a pipeline.

Knows nothing of quotas. What leaves here is bytes or StoreAway.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Sequence
from importlib.resources import files
from itertools import count
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec
from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.sentinel import Sentinel
from redis.exceptions import NoPermissionError, NoScriptError, RedisError, ResponseError

# A pipeline of this many keeps one round trip short; what is left goes in the next.
PIPELINE_MAX = 128
# A late trip may be making a connection, by TLS several round trips: so long, and so many, until it stays.
LATE_S = 2.0
LATE_MAX = 8
DEFAULT_PORT = 6379
SENTINEL_PORT = 26379


class StoreAway(Exception):
    """The store did not answer as it should in the time it has; the message is safe to log.

    trip: a number that all who travelled together share.
    """

    def __init__(self, reason: str, trip: int = 0) -> None:
        super().__init__(reason)
        self.trip = trip


class Script(msgspec.Struct, frozen=True):
    """A Lua script and the name that servers know it by."""

    source: str
    sha: str


def script(*names: str) -> Script:
    """The .lua files of this package, one after the other, as one script."""
    folder = files("gateway.quotas")
    source = "\n".join((folder / f"{name}.lua").read_text(encoding="utf-8") for name in names)
    return Script(source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())


class Waiting(msgspec.Struct, frozen=True):
    """One run of a script that waits for the turn's pipeline."""

    script: Script
    keys: Sequence[str]
    argument: bytes
    future: asyncio.Future[bytes]


class RedisDoor:
    """One store. timeout_s bounds every trip to it."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._is_cluster = url.startswith("redis+cluster://")
        # The store itself, and the sentinels that told where it is.
        self._client, *self._sentinels = _clients(url, timeout_s)
        self._waiting: list[Waiting] = []
        self._trips: set[asyncio.Task[None]] = set()
        self._late: set[asyncio.Future[Any]] = set()
        self._numbers = count(1)
        # Some proxies know EVAL only; found out once.
        self._by_source = False

    async def run(self, program: Script, keys: Sequence[str], argument: bytes) -> bytes:
        """Run a script. All runs of one turn of the event loop travel together.

        Raises: StoreAway.
        """
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._depart)
        one = Waiting(program, keys, argument, loop.create_future())
        self._waiting.append(one)
        return await one.future

    async def ask(self, *command: Any) -> Any:
        """One plain command. Raises: StoreAway."""
        return await self._bounded(self._client.execute_command(*command))

    async def aclose(self) -> None:
        """Close all connections."""
        for trip in (*self._trips, *self._late):
            trip.cancel()
        await asyncio.gather(*self._late, return_exceptions=True)
        for client in (self._client, *self._sentinels):
            await client.aclose()

    def _depart(self) -> None:
        waiting, self._waiting = self._waiting, []
        for start in range(0, len(waiting), PIPELINE_MAX):
            trip = asyncio.create_task(self._travel(waiting[start : start + PIPELINE_MAX]))
            self._trips.add(trip)
            trip.add_done_callback(self._trips.discard)

    async def _travel(self, batch: Sequence[Waiting]) -> None:
        """Every future of the batch is resolved, whatever happens."""
        trip = next(self._numbers)
        replies: list[Any] = [StoreAway("the connection was closed")] * len(batch)
        try:
            replies = await self._bounded(self._execute(batch))
        except StoreAway as error:
            replies = [error] * len(batch)
        finally:
            # Also where this task is cancelled: somebody waits for each of them.
            self._hand_out(batch, replies, trip)

    def _hand_out(self, batch: Sequence[Waiting], replies: Sequence[Any], trip: int) -> None:
        for one, reply in zip(batch, replies, strict=True):
            if one.future.done():
                continue
            if isinstance(reply, bytes):
                one.future.set_result(reply)
            else:
                one.future.set_exception(StoreAway(_reason(reply), trip))
                # Whoever waited may have gone; nobody needs to hear of it then.
                one.future.exception()

    async def _execute(self, batch: Sequence[Waiting]) -> list[Any]:
        if self._is_cluster:
            # A cluster's pipeline carries no scripts: each goes to its own node, all at once.
            return await asyncio.gather(*(self._single(one) for one in batch), return_exceptions=True)
        replies = await self._pipeline(batch, by_source=self._by_source)
        missed = [i for i, reply in enumerate(replies) if _wants_source(reply)]
        if missed:
            # A server that forgot a script learns it again from EVAL; a proxy that blocks EVALSHA stays.
            again = await self._pipeline([batch[i] for i in missed], by_source=True)
            self._by_source = not any(isinstance(replies[i], NoScriptError) for i in missed)
            for i, reply in zip(missed, again, strict=True):
                replies[i] = reply
        return replies

    async def _pipeline(self, batch: Sequence[Waiting], *, by_source: bool) -> list[Any]:
        async with self._client.pipeline(transaction=False) as pipeline:
            for one in batch:
                command, text = ("EVAL", one.script.source) if by_source else ("EVALSHA", one.script.sha)
                pipeline.execute_command(command, text, len(one.keys), *one.keys, one.argument)
            replies: list[Any] = await pipeline.execute(raise_on_error=False)
            return replies

    async def _single(self, one: Waiting) -> Any:
        try:
            return await self._client.evalsha(one.script.sha, len(one.keys), *one.keys, one.argument)
        except ResponseError as error:
            if not _wants_source(error):
                raise
            return await self._client.eval(one.script.source, len(one.keys), *one.keys, one.argument)

    async def _bounded(self, trip: Awaitable[Any]) -> Any:
        """Raises: StoreAway past the timeout, or where the store answers with an error."""
        task = asyncio.ensure_future(trip)
        try:
            await asyncio.wait({task}, timeout=self._timeout_s)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if not task.done():
            # The loop may have been too busy to read a reply that is already there: look once more.
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        if not task.done():
            self._let_end(task)
            raise StoreAway(f"no answer within {self._timeout_s * 1000:.0f} ms")
        try:
            return task.result()
        except (RedisError, OSError, TimeoutError) as error:
            raise StoreAway(_reason(error)) from error

    def _let_end(self, late: asyncio.Future[Any]) -> None:
        """Nobody waits for it any more, but the next trip wants the connection that it makes."""
        if len(self._late) >= LATE_MAX:
            late.cancel()
            return
        self._late.add(late)
        timer = asyncio.get_running_loop().call_later(LATE_S, late.cancel)

        def ended(_: asyncio.Future[Any]) -> None:
            timer.cancel()
            self._late.discard(late)
            if not late.cancelled():
                late.exception()  # Heard: it has been told as a miss already.

        late.add_done_callback(ended)


def _wants_source(reply: Any) -> bool:
    if isinstance(reply, NoScriptError):
        return True
    blocked = isinstance(reply, NoPermissionError) or "unknown command" in str(reply).lower()
    return isinstance(reply, ResponseError) and blocked


def _reason(error: Any) -> str:
    """The kind of failure; a message of the store could hold its address or credentials."""
    return str(error) if isinstance(error, StoreAway) else type(error).__name__


def _clients(url: str, timeout_s: float) -> list[Any]:
    options: dict[str, Any] = {
        "socket_timeout": None,  # `_bounded` is the one clock; two would race.
        "socket_connect_timeout": max(timeout_s, 0.25),
        "decode_responses": False,
        "protocol": 2,
    }
    if url.startswith("redis+sentinel://"):
        return _by_sentinel(url, options)
    if url.startswith("redis+cluster://"):
        parts = urlsplit(url)
        nodes = [ClusterNode(host, port) for host, port in _hosts(parts.netloc, DEFAULT_PORT)]
        return [RedisCluster(startup_nodes=nodes, **(options | _credentials(url)))]
    return [Redis.from_url(url, **options)]


def _by_sentinel(url: str, options: dict[str, Any]) -> list[Any]:
    """redis+sentinel://[user:password@]h1:p1,h2:p2/name/db."""
    parts = urlsplit(url)
    name, _, database = parts.path.strip("/").partition("/")
    # redis-py has not typed its constructor.
    sentinel: Any = Sentinel(  # type: ignore[no-untyped-call]
        _hosts(parts.netloc, SENTINEL_PORT), socket_connect_timeout=1.0
    )
    master = sentinel.master_for(name, db=int(database or 0), **(options | _credentials(url)))
    return [master, *sentinel.sentinels]


def _hosts(netloc: str, port: int) -> list[tuple[str, int]]:
    hosts = netloc.rpartition("@")[2].split(",")
    split = [host.partition(":") for host in hosts]
    return [(host, int(given or port)) for host, _, given in split]


def _credentials(url: str) -> dict[str, Any]:
    user, _, password = urlsplit(url).netloc.rpartition("@")[0].partition(":")
    found = {"username": unquote(user), "password": unquote(password)}
    return {name: value for name, value in found.items() if value}
