"""The one door to redis: a connection by URL, and scripts that travel many to a trip.

Knows nothing of quotas. What leaves here is bytes or StoreAway.
"""

import asyncio
import hashlib
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from importlib.resources import files
from itertools import count
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

import hiredis
import msgspec
from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.sentinel import Sentinel
from redis.exceptions import ConnectionError as BrokenConnection
from redis.exceptions import (
    NoPermissionError,
    NoScriptError,
    ResponseError,
)

# So many runs keep one round trip short; what is left goes in the next.
PIPELINE_MAX = 128
# A late trip may be making a connection, by TLS several round trips: so long, and so many, until it stays.
LATE_S = 2.0
LATE_MAX = 8
# More at a time would each carry less.
TRIPS_MAX = 2
# A timer that comes so much later than it was set for tells of a loop that was held up.
LATE_TIMER = 1.5
# How many turns of the event loop a reply that has arrived needs to be read.
TURNS_TO_READ = 2
# How errors begin that any script would meet.
STORES_ERRORS = (
    "OOM",
    "READONLY",
    "MISCONF",
    "NOREPLICAS",
    "NOPERM",
    "NOAUTH",
    "LOADING",
    "BUSY",
    "MASTERDOWN",
)
DEFAULT_PORT = 6379
SENTINEL_PORT = 26379


class StoreAway(Exception):
    """The store did not answer as it should in the time it has; the message is safe to log.

    trip: a number that all who travelled together share. alone: the store is there; this run alone failed.
    """

    def __init__(self, reason: str, trip: int = 0, *, alone: bool = False) -> None:
        super().__init__(reason)
        self.trip = trip
        self.alone = alone


class Script(msgspec.Struct, frozen=True):
    """A Lua script and the name that servers know it by."""

    source: str
    sha: str


def script(*names: str, package: str = "gateway.quotas") -> Script:
    """The .lua files of a package, one after the other, as one script."""
    folder = files(package)
    source = "\n".join((folder / f"{name}.lua").read_text(encoding="utf-8") for name in names)
    return Script(source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())


class Run(Protocol):
    """One run of a script. What it carries is asked for when it departs; its answer comes by itself."""

    @property
    def script(self) -> Script:
        """What runs."""

    def enqueue(self) -> None:
        """Join the next trip, where there still is a reason to."""

    def pack(self) -> tuple[Sequence[str], bytes]:
        """Its keys, all under one hash tag, and its argument."""

    def on_reply(self, reply: bytes | StoreAway) -> None:
        """Take the answer, once for each time that it boarded; one that was turned away was never packed."""


class Single:
    """A run whose argument is known and for which somebody waits."""

    def __init__(self, program: Script, keys: Sequence[str], argument: bytes) -> None:
        self.script = program
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._packed = keys, argument

    def enqueue(self) -> None:
        """It has."""

    def pack(self) -> tuple[Sequence[str], bytes]:
        """As it was given."""
        return self._packed

    def on_reply(self, reply: bytes | StoreAway) -> None:
        """Tell whoever waits, if anybody still does."""
        if self.answer.done():
            return
        if isinstance(reply, StoreAway):
            self.answer.set_exception(reply)
        else:
            self.answer.set_result(reply)


class Packed(msgspec.Struct, frozen=True):
    """A run that has departed."""

    run: Run
    keys: Sequence[str]
    argument: bytes


class BoundedTask:
    """Work at the store that has so long to end. told: what it gave, or a StoreAway, once."""

    def __init__(self, work: Coroutine[Any, Any, Any], timeout_s: float, told: Callable[[Any], None]) -> None:
        loop = asyncio.get_running_loop()
        self.task: asyncio.Task[Any] = loop.create_task(work)
        self._timeout_s = timeout_s
        self._told: Callable[[Any], None] | None = told
        self._due_s = loop.time() + timeout_s
        self._timer = loop.call_later(timeout_s, self._due)
        self.task.add_done_callback(self._ended)

    def stop(self) -> None:
        """Nobody wants to be told any more."""
        self._told = None
        self._timer.cancel()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        if task.cancelled():
            self._tell(StoreAway("the connection was closed"))
        elif (error := task.exception()) is not None:
            self._tell(StoreAway(_reason(error)))
        else:
            self._tell(task.result())

    def _due(self) -> None:
        loop = asyncio.get_running_loop()
        late_s, self._due_s = loop.time() - self._due_s, loop.time() + self._timeout_s
        if late_s > self._timeout_s * (LATE_TIMER - 1):
            # The loop itself was held up: that is no silence of the store's.
            self._timer = loop.call_later(self._timeout_s, self._due)
        else:
            self._give_turns(TURNS_TO_READ)

    def _give_turns(self, turns: int) -> None:
        """The loop may have been too busy to read a reply that is already there."""
        if turns:
            asyncio.get_running_loop().call_soon(self._give_turns, turns - 1)
        else:
            self._tell(StoreAway(f"no answer within {self._timeout_s * 1000:.0f} ms"))

    def _tell(self, result: Any) -> None:
        told, self._told = self._told, None
        if told is not None:
            self._timer.cancel()
            told(result)


class RedisDoor:
    """One store. timeout_s bounds every trip to it."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._is_cluster = url.startswith("redis+cluster://")
        # The store itself, and the sentinels that told where it is.
        self._client, *self._sentinels = _clients(url, timeout_s)
        self._boarding: list[Run] = []
        # Those in no hurry, and when they leave at the latest.
        self._patient: dict[Run, None] = {}
        self._last_call: asyncio.TimerHandle | None = None
        self._trips: dict[int, BoundedTask] = {}
        self._late: set[asyncio.Future[Any]] = set()
        # Connections at rest: the pool asks each one that it hands out how it is, for half of a trip's cost.
        self._held: list[Any] = []
        self._numbers = count(1)
        # Some proxies know EVAL only; found out once.
        self._by_source = False

    def enqueue(self, run: Run) -> None:
        """All that board in one turn of the loop, or while two trips are on the way, travel together."""
        if not self._boarding and len(self._trips) < TRIPS_MAX:
            asyncio.get_running_loop().call_soon(self._depart)
        self._boarding.append(run)

    def board_within(self, run: Run, seconds: float) -> None:
        """Let it board after so long with all the others that are in no hurry."""
        self._patient[run] = None
        if self._last_call is None:
            self._last_call = asyncio.get_running_loop().call_later(seconds, self._call_patient)

    async def run(self, program: Script, keys: Sequence[str], argument: bytes) -> bytes:
        """Run a script. Raises: StoreAway."""
        one = Single(program, keys, argument)
        self.enqueue(one)
        return await one.answer

    async def ask(self, *command: Any) -> Any:
        """One plain command. Raises: StoreAway."""
        told: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        errand = BoundedTask(self._client.execute_command(*command), self._timeout_s, told.set_result)
        try:
            result = await told
        finally:
            self._over_with(errand)
        if isinstance(result, StoreAway):
            raise result
        return result

    async def aclose(self) -> None:
        """Close all connections."""
        if self._last_call is not None:
            self._last_call.cancel()
        self._turn_away(StoreAway("the connection was closed"))
        for task in (*(trip.task for trip in self._trips.values()), *self._late):
            task.cancel()
        await asyncio.gather(*self._late, return_exceptions=True)
        for client in (self._client, *self._sentinels):
            await client.aclose()

    def _call_patient(self) -> None:
        patient, self._patient, self._last_call = self._patient, {}, None
        for run in patient:
            run.enqueue()

    def _depart(self) -> None:
        boarding, self._boarding = self._boarding, []
        for start in range(0, len(boarding), PIPELINE_MAX):
            batch = [Packed(run, *run.pack()) for run in boarding[start : start + PIPELINE_MAX]]
            number = next(self._numbers)
            held = self._written(batch, by_source=self._by_source)
            trip = BoundedTask(
                self._execute(batch, held), self._timeout_s, partial(self._back, number, batch)
            )
            self._trips[number] = trip

    def _back(self, number: int, batch: Sequence[Packed], result: Any) -> None:
        """Every run of the trip lands, whatever happened."""
        self._over_with(self._trips.pop(number))
        replies: Sequence[Any] = result
        if isinstance(result, StoreAway):
            replies = [result] * len(batch)
            self._turn_away(StoreAway(_reason(result), number))
        for one, reply in zip(batch, replies, strict=True):
            failure = StoreAway(_reason(reply), number, alone=_is_scripts_own(reply))
            one.run.on_reply(reply if isinstance(reply, bytes) else failure)
        if self._boarding and len(self._trips) < TRIPS_MAX:
            self._depart()

    def _turn_away(self, error: StoreAway) -> None:
        """Who has waited behind a trip that got no answer has no time for another."""
        boarding, self._boarding = self._boarding, []
        for run in boarding:
            run.on_reply(error)

    def _written(self, batch: Sequence[Packed], *, by_source: bool) -> Any:
        """A connection at rest that the batch has been written to; None where there is none.

        At once, not by the task that reads the replies: a busy loop may take longer to come to that than
        the trip takes, and then comes to rest until the replies are there.
        """
        if not self._held:
            return None
        try:
            commands = _commands(batch, by_source=by_source)
        except (TypeError, ValueError):
            # The task packs them again, and tells those aboard.
            return None
        connection = self._held.pop()
        # redis-py's own way to write is a coroutine.
        writer = connection._writer  # noqa: SLF001
        # One that is closed, or is about to be, says so to whom reads its replies.
        if writer is not None and not writer.is_closing():
            writer.writelines(commands)
        return connection

    async def _execute(self, batch: Sequence[Packed], held: Any) -> list[Any]:
        """held: a connection that the batch has been written to already, if there was one at rest."""
        if self._is_cluster:
            # A cluster's pipeline carries no scripts: each goes to its own node, all at once.
            return await asyncio.gather(*(self._single(one) for one in batch), return_exceptions=True)
        replies = await self._pipeline(batch, held, by_source=self._by_source)
        missed = [i for i, reply in enumerate(replies) if _wants_source(reply)]
        if missed:
            # A server that forgot a script learns it again from EVAL; a proxy that blocks EVALSHA stays.
            unknown = [batch[i] for i in missed]
            held = self._written(unknown, by_source=True)
            again = await self._pipeline(unknown, held, by_source=True)
            self._by_source = not any(isinstance(replies[i], NoScriptError) for i in missed)
            for i, reply in zip(missed, again, strict=True):
                replies[i] = reply
        return replies

    async def _pipeline(self, batch: Sequence[Packed], held: Any, *, by_source: bool) -> list[Any]:
        """Straight over a connection: redis-py's pipeline packs in Python, at a third of a call's cost."""
        if held is not None:
            try:
                return await self._replies(held, len(batch))
            except (BrokenConnection, OSError):
                # It broke while nobody looked. Scripts may run twice: they know what they have done.
                pass
        connection = await self._client.connection_pool.get_connection()
        return await self._replies(connection, len(batch), _commands(batch, by_source=by_source))

    async def _replies(self, connection: Any, number: int, commands: Sequence[bytes] = ()) -> list[Any]:
        """So many, to what has been written and commands; the connection is kept if nothing happens to it."""
        replies: list[Any] | None = None
        try:
            if commands:
                await connection.send_packed_command(commands)
            replies = [await _reply(connection) for _ in range(number)]
            return replies
        finally:
            if replies is not None and len(self._held) < TRIPS_MAX:
                self._held.append(connection)
            else:
                # One that failed on the way has been closed; the pool opens it again.
                await self._client.connection_pool.release(connection)

    async def _single(self, one: Packed) -> Any:
        script = one.run.script
        try:
            return await self._client.evalsha(script.sha, len(one.keys), *one.keys, one.argument)
        except ResponseError as error:
            if not _wants_source(error):
                raise
            return await self._client.eval(script.source, len(one.keys), *one.keys, one.argument)

    def _over_with(self, errand: BoundedTask) -> None:
        """Nobody waits for it any more; one that is late may make the connection that the next trip wants."""
        late = errand.task
        errand.stop()
        if late.done():
            return
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


def _commands(batch: Sequence[Packed], *, by_source: bool) -> list[bytes]:
    return [_command(one, by_source=by_source) for one in batch]


def _command(one: Packed, *, by_source: bool) -> bytes:
    script = one.run.script
    name, text = ("EVAL", script.source) if by_source else ("EVALSHA", script.sha)
    words: tuple[Any, ...] = (name, text, len(one.keys), *one.keys, one.argument)
    packed: bytes = hiredis.pack_command(words)
    return packed


async def _reply(connection: Any) -> Any:
    try:
        return await connection.read_response()
    except ResponseError as error:
        return error


def _wants_source(reply: Any) -> bool:
    if isinstance(reply, NoScriptError):
        return True
    blocked = isinstance(reply, NoPermissionError) or "unknown command" in str(reply).lower()
    return isinstance(reply, ResponseError) and blocked


def _is_scripts_own(reply: Any) -> bool:
    """Whether what a script found in its keys made it fail, and not the state that the store is in."""
    # Errors of the store itself, such as READONLY and OOM, have classes of their own; in a script's error of
    # older servers their names are inside.
    if type(reply) is not ResponseError:
        return False
    text = str(reply)
    by_script = "WRONGTYPE" in text or "user_script" in text
    return by_script and not any(name in text for name in STORES_ERRORS)


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
