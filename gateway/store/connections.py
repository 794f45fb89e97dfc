"""Connections to a store by its URL, and the batches of script calls that travel over them."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any
from urllib.parse import unquote, urlsplit

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.sentinel import Sentinel
from redis.exceptions import ConnectionError as BrokenConnection
from redis.exceptions import NoPermissionError, NoScriptError, ResponseError

from gateway.store.scripts import ScriptCommand

DEFAULT_PORT = 6379
SENTINEL_PORT = 26379


class ScriptPipeline:
    """Connections to one store, used for script calls only.

    client: of redis-py. idle_max: how many connections are kept outside its pool. The pool checks each
    connection that it hands out, which costs half as much as a whole batch.
    """

    def __init__(self, client: Any, *, is_cluster: bool, idle_max: int) -> None:
        self._client = client
        self._is_cluster = is_cluster
        self._idle_max = idle_max
        self._idle: list[Any] = []
        # Some proxies only know EVAL; detected once.
        self._by_source = False

    def send(self, batch: Sequence[ScriptCommand]) -> Coroutine[Any, Any, list[Any]]:
        """Write a batch and return the coroutine that reads its replies, one per call, errors included."""
        return self._execute(batch, self._write(batch, by_source=self._by_source))

    def _write(self, batch: Sequence[ScriptCommand], *, by_source: bool) -> Any:
        """Write the batch to an idle connection and return that, or None if there is none.

        This happens at once and not in the task that reads the replies: in a busy loop that task may start
        later than the whole round trip takes. Written early, it finds the replies there.
        """
        if not self._idle:
            return None
        try:
            commands = _commands(batch, by_source=by_source)
        except (TypeError, ValueError):
            # The task packs them again, and reports the error to the callers.
            return None
        connection = self._idle.pop()
        # redis-py's own write method is a coroutine.
        writer = connection._writer  # noqa: SLF001
        # Reading the replies of a closed or closing connection fails, and the batch is then sent again.
        if writer is not None and not writer.is_closing():
            writer.writelines(commands)
        return connection

    async def _execute(self, batch: Sequence[ScriptCommand], connection: Any) -> list[Any]:
        """Return the replies. connection: already has the batch; None if no connection was idle."""
        if self._is_cluster:
            # A cluster pipeline cannot carry scripts: each goes to its own node, all at once.
            calls = [self._call_cluster(command) for command in batch]
            return await asyncio.gather(*calls, return_exceptions=True)
        replies = await self._replies_of(batch, connection, by_source=self._by_source)
        missed = [i for i, reply in enumerate(replies) if _needs_source(reply)]
        if missed:
            # EVAL teaches a server the scripts it has forgotten; a proxy that blocks EVALSHA goes on so.
            unknown = [batch[i] for i in missed]
            connection = self._write(unknown, by_source=True)
            retried = await self._replies_of(unknown, connection, by_source=True)
            self._by_source = not any(isinstance(replies[i], NoScriptError) for i in missed)
            for i, reply in zip(missed, retried, strict=True):
                replies[i] = reply
        return replies

    async def _replies_of(
        self, batch: Sequence[ScriptCommand], connection: Any, *, by_source: bool
    ) -> list[Any]:
        """Return one reply per call, over a raw connection.

        redis-py's pipeline packs commands in Python, at a third of the cost of a whole request.
        """
        if connection is not None:
            try:
                return await self._read(connection, len(batch))
            except (BrokenConnection, OSError):
                # It broke while it was idle. Scripts may run twice: they recognise a repeated id.
                pass
        connection = await self._client.connection_pool.get_connection()
        return await self._read(connection, len(batch), _commands(batch, by_source=by_source))

    async def _read(self, connection: Any, number: int, commands: Sequence[bytes] = ()) -> list[Any]:
        """Send more commands if there are any, and read `number` replies; keep the connection on success."""
        replies: list[Any] | None = None
        try:
            if commands:
                await connection.send_packed_command(commands)
            replies = [await _reply(connection) for _ in range(number)]
            return replies
        finally:
            if replies is not None and len(self._idle) < self._idle_max:
                self._idle.append(connection)
            else:
                # A connection that failed has been closed; the pool opens it again.
                await self._client.connection_pool.release(connection)

    async def _call_cluster(self, command: ScriptCommand) -> Any:
        script = command.script
        try:
            return await self._client.evalsha(script.sha, len(command.keys), *command.keys, command.argument)
        except ResponseError as error:
            if not _needs_source(error):
                raise
            return await self._client.eval(script.source, len(command.keys), *command.keys, command.argument)


def _commands(batch: Sequence[ScriptCommand], *, by_source: bool) -> list[bytes]:
    return [command.encode(by_source=by_source) for command in batch]


async def _reply(connection: Any) -> Any:
    try:
        return await connection.read_response()
    except ResponseError as error:
        return error


def _needs_source(reply: Any) -> bool:
    """Return True if EVALSHA failed because the server forgot the script or blocks the command."""
    if isinstance(reply, NoScriptError):
        return True
    blocked = isinstance(reply, NoPermissionError) or "unknown command" in str(reply).lower()
    return isinstance(reply, ResponseError) and blocked


def is_cluster(url: str) -> bool:
    """Return True if the URL lists the nodes of a Redis Cluster."""
    return url.startswith("redis+cluster://")


def open_clients(url: str, timeout_s: float) -> list[Any]:
    """Return the client of the store, followed by those of its sentinels."""
    options: dict[str, Any] = {
        "socket_timeout": None,  # BoundedTask is the only timeout; two would race.
        "socket_connect_timeout": max(timeout_s, 0.25),
        "decode_responses": False,
        "protocol": 2,
    }
    if url.startswith("redis+sentinel://"):
        return _sentinel_clients(url, options)
    if is_cluster(url):
        parts = urlsplit(url)
        nodes = [ClusterNode(host, port) for host, port in _hosts(parts.netloc, DEFAULT_PORT)]
        return [RedisCluster(startup_nodes=nodes, **(options | _credentials(url)))]
    return [Redis.from_url(url, **options)]


def _sentinel_clients(url: str, options: dict[str, Any]) -> list[Any]:
    """Parse redis+sentinel://[user:password@]h1:p1,h2:p2/name/db and return the clients."""
    parts = urlsplit(url)
    name, _, database = parts.path.strip("/").partition("/")
    # redis-py has not typed its constructor.
    sentinel: Any = Sentinel(  # type: ignore[no-untyped-call]
        _hosts(parts.netloc, SENTINEL_PORT), socket_connect_timeout=1.0
    )
    master = sentinel.master_for(name, db=int(database or 0), **(options | _credentials(url)))
    return [master, *sentinel.sentinels]


def _hosts(netloc: str, default_port: int) -> list[tuple[str, int]]:
    hosts = netloc.rpartition("@")[2].split(",")
    split = [host.partition(":") for host in hosts]
    return [(host, int(port or default_port)) for host, _, port in split]


def _credentials(url: str) -> dict[str, Any]:
    user, _, password = urlsplit(url).netloc.rpartition("@")[0].partition(":")
    credentials = {"username": unquote(user), "password": unquote(password)}
    return {name: value for name, value in credentials.items() if value}
