"""The one door to redis: a connection by URL, and scripts that travel many to a trip.

Knows nothing of quotas. What leaves here is bytes or StoreAway.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Sequence
from importlib.resources import files
from itertools import count
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

import hiredis
import msgspec
from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.sentinel import Sentinel
from redis.exceptions import (
    NoPermissionError,
    NoScriptError,
    RedisClusterException,
    RedisError,
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

    def board(self) -> None:
        """Join the next trip, where there still is a reason to."""

    def pack(self) -> tuple[Sequence[str], bytes]:
        """Its keys, all under one hash tag, and its argument."""

    def landed(self, reply: bytes | StoreAway) -> None:
        """Take the answer, once for each time that it boarded; one that was turned away was never packed."""


class Single:
    """A run whose argument is known and for which somebody waits."""

    def __init__(self, program: Script, keys: Sequence[str], argument: bytes) -> None:
        self.script = program
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._packed = keys, argument

    def board(self) -> None:
        """It has."""

    def pack(self) -> tuple[Sequence[str], bytes]:
        """As it was given."""
        return self._packed

    def landed(self, reply: bytes | StoreAway) -> None:
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
        self._trips: set[asyncio.Task[None]] = set()
        self._late: set[asyncio.Future[Any]] = set()
        self._numbers = count(1)
        # Some proxies know EVAL only; found out once.
        self._by_source = False

    def board(self, run: Run) -> None:
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
        self.board(one)
        return await one.answer

    async def ask(self, *command: Any) -> Any:
        """One plain command. Raises: StoreAway."""
        return await self._bounded(self._client.execute_command(*command))

    async def aclose(self) -> None:
        """Close all connections."""
        if self._last_call is not None:
            self._last_call.cancel()
        self._turn_away(StoreAway("the connection was closed"))
        for trip in (*self._trips, *self._late):
            trip.cancel()
        await asyncio.gather(*self._late, return_exceptions=True)
        for client in (self._client, *self._sentinels):
            await client.aclose()

    def _call_patient(self) -> None:
        patient, self._patient, self._last_call = self._patient, {}, None
        for run in patient:
            run.board()

    def _depart(self) -> None:
        boarding, self._boarding = self._boarding, []
        for start in range(0, len(boarding), PIPELINE_MAX):
            batch = [Packed(run, *run.pack()) for run in boarding[start : start + PIPELINE_MAX]]
            trip = asyncio.create_task(self._travel(batch))
            self._trips.add(trip)
            trip.add_done_callback(self._back)

    def _back(self, trip: asyncio.Task[None]) -> None:
        self._trips.discard(trip)
        if self._boarding and len(self._trips) < TRIPS_MAX:
            self._depart()

    async def _travel(self, batch: Sequence[Packed]) -> None:
        """Every run of the batch lands, whatever happens."""
        trip = next(self._numbers)
        replies: Sequence[Any] = [StoreAway("the connection was closed")] * len(batch)
        try:
            replies = await self._bounded(self._execute(batch))
        except StoreAway as error:
            replies = [error] * len(batch)
            self._turn_away(StoreAway(_reason(error), trip))
        finally:
            # Also where this task is cancelled: somebody waits for each of them.
            for one, reply in zip(batch, replies, strict=True):
                failure = StoreAway(_reason(reply), trip, alone=_is_scripts_own(reply))
                one.run.landed(reply if isinstance(reply, bytes) else failure)

    def _turn_away(self, error: StoreAway) -> None:
        """Who has waited behind a trip that got no answer has no time for another."""
        boarding, self._boarding = self._boarding, []
        for run in boarding:
            run.landed(error)

    async def _execute(self, batch: Sequence[Packed]) -> list[Any]:
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

    async def _pipeline(self, batch: Sequence[Packed], *, by_source: bool) -> list[Any]:
        """Straight over a connection: redis-py's pipeline packs in Python, at a third of a call's cost."""
        commands = [_command(one, by_source=by_source) for one in batch]
        connection = await self._client.connection_pool.get_connection()
        try:
            await connection.send_packed_command(commands)
            return [await _reply(connection) for _ in batch]
        finally:
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

    async def _bounded(self, trip: Awaitable[Any]) -> Any:
        """Raises: StoreAway past the timeout, or where the store answers with an error."""
        loop = asyncio.get_running_loop()
        task, started_s = asyncio.ensure_future(trip), loop.time()
        try:
            await asyncio.wait({task}, timeout=self._timeout_s)
            if not task.done() and loop.time() - started_s > self._timeout_s * LATE_TIMER:
                # The loop itself was held up: that is no silence of the store's.
                await asyncio.wait({task}, timeout=self._timeout_s)
        except asyncio.CancelledError:
            task.cancel()
            raise
        for _ in range(TURNS_TO_READ if not task.done() else 0):
            # The loop may have been too busy to read a reply that is already there.
            await asyncio.sleep(0)
        if not task.done():
            self._let_end(task)
            raise StoreAway(f"no answer within {self._timeout_s * 1000:.0f} ms")
        try:
            return task.result()
        except (RedisError, RedisClusterException, OSError, TimeoutError) as error:
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
