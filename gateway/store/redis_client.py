"""Client of the shared Redis: plain commands, and script calls in batches.

It knows nothing of quotas. Everything it returns is bytes, or raises StoreUnavailable. A `BoundedTask`
gives work a timeout, a `ScriptPipeline` sends batches over idle connections, and `RedisClient` decides what
a batch has.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from itertools import count
from typing import Any
from urllib.parse import unquote, urlsplit

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.sentinel import Sentinel
from redis.exceptions import ConnectionError as BrokenConnection
from redis.exceptions import NoPermissionError, NoScriptError, ResponseError

from gateway.store.errors import StoreUnavailable, unavailable
from gateway.store.scripts import Script, ScriptCall, ScriptCommand, SingleCall

# A timer that fires this many timeouts after its start shows that the event loop was stalled.
LATE_TIMER = 1.5
# Turns of the event loop that a reply needs to be read once it has arrived.
TURNS_TO_READ = 2


class BoundedTask:
    """Work on the store with a timeout. It calls on_result once, with the result or a StoreUnavailable.

    The timeout does not cancel the task: it may be opening the connection that the next batch needs.
    """

    def __init__(
        self, work: Coroutine[Any, Any, Any], timeout_s: float, on_result: Callable[[Any], None]
    ) -> None:
        loop = asyncio.get_running_loop()
        self.task: asyncio.Task[Any] = loop.create_task(work)
        self._timeout_s = timeout_s
        self._on_result: Callable[[Any], None] | None = on_result
        self._due_s = loop.time() + timeout_s
        self._timer = loop.call_later(timeout_s, self._on_timer)
        self.task.add_done_callback(self._on_done)

    def detach(self) -> None:
        """Stop the timer and drop the callback; the task itself goes on."""
        self._on_result = None
        self._timer.cancel()

    def _on_done(self, task: asyncio.Task[Any]) -> None:
        if task.cancelled():
            self._report(StoreUnavailable("the connection was closed"))
        elif (error := task.exception()) is not None:
            self._report(unavailable(error))
        else:
            self._report(task.result())

    def _on_timer(self) -> None:
        loop = asyncio.get_running_loop()
        late_s, self._due_s = loop.time() - self._due_s, loop.time() + self._timeout_s
        if late_s > self._timeout_s * (LATE_TIMER - 1):
            # The event loop was stalled: the silence is not the store's.
            self._timer = loop.call_later(self._timeout_s, self._on_timer)
        else:
            self._time_out_after(TURNS_TO_READ)

    def _time_out_after(self, turns: int) -> None:
        """Time out some turns later: a busy loop may not have read a reply that has arrived."""
        if turns:
            asyncio.get_running_loop().call_soon(self._time_out_after, turns - 1)
        else:
            self._report(StoreUnavailable(f"no answer within {self._timeout_s * 1000:.0f} ms"))

    def _report(self, result: Any) -> None:
        on_result, self._on_result = self._on_result, None
        if on_result is not None:
            self._timer.cancel()
            on_result(result)


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


DEFAULT_PORT = 6379
SENTINEL_PORT = 26379


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


# This many calls keep a round trip short; the rest goes into the next batch.
BATCH_MAX = 128
# More batches on the way at a time would each carry fewer calls.
BATCHES_MAX = 2
# A task past its timeout may be opening a connection, which takes several round trips with TLS. So many of
# them may go on for so long.
OVERDUE_S = 2.0
OVERDUE_MAX = 8


class RedisClient:
    """Client of one store. timeout_s bounds each batch and each command."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._client, *self._sentinels = open_clients(url, timeout_s)
        self._pipeline = ScriptPipeline(self._client, is_cluster=is_cluster(url), idle_max=BATCHES_MAX)
        self._queue: list[ScriptCall] = []
        # Calls that may wait for others, and the timer at which they are enqueued at the latest.
        self._delayed: dict[ScriptCall, None] = {}
        self._delay_timer: asyncio.TimerHandle | None = None
        self._sent: dict[int, BoundedTask] = {}
        self._overdue: set[asyncio.Future[Any]] = set()
        self._batch_numbers = count(1)

    def enqueue(self, call: ScriptCall) -> None:
        """Send a call with all others of this turn of the loop, or when one of two batches is back."""
        if not self._queue and len(self._sent) < BATCHES_MAX:
            asyncio.get_running_loop().call_soon(self._send_queue)
        self._queue.append(call)

    def enqueue_within(self, call: ScriptCall, seconds: float) -> None:
        """Enqueue a call within that time, together with all other delayed calls."""
        self._delayed[call] = None
        if self._delay_timer is None:
            self._delay_timer = asyncio.get_running_loop().call_later(seconds, self._enqueue_delayed)

    async def run_script(self, script: Script, keys: Sequence[str], argument: bytes) -> bytes:
        """Run a script and return its reply. Raises: StoreUnavailable."""
        call = SingleCall(script, keys, argument)
        self.enqueue(call)
        return await call.reply

    async def execute(self, *command: Any) -> Any:
        """Run one plain command and return its reply. Raises: StoreUnavailable."""
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        task = BoundedTask(self._client.execute_command(*command), self._timeout_s, reply.set_result)
        try:
            result = await reply
        finally:
            self._release(task)
        if isinstance(result, StoreUnavailable):
            raise result
        return result

    async def aclose(self) -> None:
        """Close all connections."""
        if self._delay_timer is not None:
            self._delay_timer.cancel()
        self._fail_pending(StoreUnavailable("the connection was closed"))
        for task in (*(sent.task for sent in self._sent.values()), *self._overdue):
            task.cancel()
        await asyncio.gather(*self._overdue, return_exceptions=True)
        for client in (self._client, *self._sentinels):
            await client.aclose()

    def _enqueue_delayed(self) -> None:
        delayed, self._delayed, self._delay_timer = self._delayed, {}, None
        for call in delayed:
            call.enqueue()

    def _send_queue(self) -> None:
        queue, self._queue = self._queue, []
        for start in range(0, len(queue), BATCH_MAX):
            calls = queue[start : start + BATCH_MAX]
            batch = [ScriptCommand(call.script, *call.pack()) for call in calls]
            number = next(self._batch_numbers)
            on_result = partial(self._on_replies, number, calls)
            self._sent[number] = BoundedTask(self._pipeline.send(batch), self._timeout_s, on_result)

    def _on_replies(self, number: int, calls: Sequence[ScriptCall], result: Any) -> None:
        """Give every call of a batch its reply, or the error that all of them share."""
        self._release(self._sent.pop(number))
        replies: Sequence[Any] = result
        if isinstance(result, StoreUnavailable):
            replies = [result] * len(calls)
            self._fail_pending(unavailable(result, number))
        for call, reply in zip(calls, replies, strict=True):
            call.on_reply(reply if isinstance(reply, bytes) else unavailable(reply, number))
        if self._queue and len(self._sent) < BATCHES_MAX:
            self._send_queue()

    def _fail_pending(self, error: StoreUnavailable) -> None:
        """Fail every queued call: after waiting for a batch that failed, none has time for another."""
        queue, self._queue = self._queue, []
        for call in queue:
            call.on_reply(error)

    def _release(self, bounded: BoundedTask) -> None:
        """Stop waiting for a task.

        An overdue task goes on for a while: it may be opening the connection that the next one needs.
        """
        task = bounded.task
        bounded.detach()
        if task.done():
            return
        if len(self._overdue) >= OVERDUE_MAX:
            task.cancel()
            return
        self._overdue.add(task)
        timer = asyncio.get_running_loop().call_later(OVERDUE_S, task.cancel)

        def on_done(_: asyncio.Future[Any]) -> None:
            timer.cancel()
            self._overdue.discard(task)
            if not task.cancelled():
                task.exception()  # Marks it as retrieved; the caller has had a timeout error already.

        task.add_done_callback(on_done)
