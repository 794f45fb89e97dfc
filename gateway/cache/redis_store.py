"""Cache in Redis, shared by all gateways of one store.

Rule: Redis away is a miss. A lookup waits no longer than its client's timeout. After a failure no lookup is
sent for a while, and writes happen in the background, where they are bounded.
"""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from gateway.cache.entries import SHARED
from gateway.store.errors import StoreUnavailable
from gateway.store.redis_client import RedisClient
from gateway.store.scripts import load_script

# Under one hash tag, because a script writes entries together with their count of bytes.
PREFIX = "gw:{cache}:"
WRITTEN = f"{PREFIX}written"
EPOCHS = f"{PREFIX}epochs"
PUT = load_script("put", package="gateway.cache")
# Of Redis for one key with a time to live, in addition to key and value.
ENTRY_OVERHEAD = 150
# Finer parts of a time to live free bytes sooner after their entries have expired.
TTL_PARTS = 8
# An owner may hold this many times what stays free: three quarters of the bound, if it is alone.
SHARE = 3
# Keys of one MGET, and entries of one script call: Redis runs one command at a time.
KEYS_MAX = 256
# No caller waits for a write.
WRITE_TIMEOUT_S = 1.0
# Bytes of entries that wait to be written; further ones are dropped.
UNWRITTEN_BYTES_MAX = 16 * 1024 * 1024
# How soon this gateway learns of an epoch that another has begun.
FOLLOW_EVERY_S = 2.0
PAUSE_MIN_S = 0.5
PAUSE_MAX_S = 15.0

Item = TypeVar("Item")

logger = logging.getLogger("gateway")


class RedisBounds(msgspec.Struct, frozen=True):
    """Bounds on entries. bytes: of all live entries of the store. ttl_s: time to live of an entry."""

    bytes: int
    ttl_s: float


class RedisClients(msgspec.Struct, frozen=True):
    """Connections of lookups and of writes. A large write delays no lookup."""

    reader: RedisClient
    writer: RedisClient


def open_redis_clients(url: str, timeout_s: float) -> RedisClients:
    """Return clients of a store. timeout_s: of a lookup."""
    return RedisClients(RedisClient(url, timeout_s), RedisClient(url, max(WRITE_TIMEOUT_S, timeout_s)))


class Breaker:
    """Pause after failures, which doubles with each. clock: in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pause_s = 0.0
        self._until_s = 0.0

    @property
    def is_open(self) -> bool:
        """True during a pause."""
        return self._clock() < self._until_s

    def record_failure(self, reason: str) -> None:
        """Begin a pause, and log the first of several in a row."""
        if not self._pause_s:
            logger.warning("the cache in Redis is unavailable (%s): every text is a miss", reason)
        self._pause_s = min(max(PAUSE_MIN_S, 2 * self._pause_s), PAUSE_MAX_S)
        self._until_s = self._clock() + self._pause_s

    def record_success(self) -> None:
        """End the series of failures."""
        if self._pause_s:
            logger.info("the cache in Redis is available again")
        self._pause_s = self._until_s = 0.0


class RedisStore:
    """Entries by key, in Redis. clock: in seconds, never back.

    size_bytes: upper bound of all live entries, as it was last read. evictions: entries that were not
    stored, because the bound was reached, too many waited, or Redis did not reply.
    """

    def __init__(self, clients: RedisClients, bounds: RedisBounds, clock: Callable[[], float]) -> None:
        self.size_bytes = 0
        self.evictions = 0
        self._clients = clients
        self._bounds = bounds
        self._breaker = Breaker(clock)
        self._writes: set[asyncio.Task[None]] = set()
        self._unwritten_bytes = 0
        # None until they were read: entries of an old epoch could be found before.
        self._epochs: dict[str, int] | None = None
        self._distrusted: set[str] = set()

    async def get(self, keys: Sequence[bytes], owner: str) -> list[bytes | None]:
        """Return the entry of each key, None where there is none; no entry at all without Redis."""
        del owner  # It is part of the keys.
        if self._breaker.is_open or not keys:
            return [None] * len(keys)
        commands = [("MGET", *map(_name, chunk)) for chunk in _chunks(keys)]
        replies = await asyncio.gather(
            *(self._clients.reader.execute(*command) for command in commands), return_exceptions=True
        )
        found: list[bytes | None] = []
        for reply in replies:
            if isinstance(reply, StoreUnavailable):
                self._breaker.record_failure(str(reply))
                return [None] * len(keys)
            if isinstance(reply, BaseException):
                raise reply
            found += reply
        self._breaker.record_success()
        return found

    def put(self, entries: Sequence[tuple[bytes, bytes]], owner: str) -> None:
        """Store entries in the background, within the share of their owner."""
        for chunk in _chunks(entries):
            size = sum(len(entry) for _, entry in chunk)
            if self._breaker.is_open or self._unwritten_bytes + size > UNWRITTEN_BYTES_MAX:
                self.evictions += len(chunk)
                continue
            self._unwritten_bytes += size
            task = asyncio.create_task(self._write(chunk, owner, size))
            self._writes.add(task)
            task.add_done_callback(self._writes.discard)

    def epoch_of(self, upstream: str) -> int | None:
        """Return the epoch of an upstream's entries, None while it is unknown."""
        return None if self._epochs is None else self._epochs.get(upstream, 0)

    def distrust(self, upstream: str) -> None:
        """Begin a new epoch for all gateways: no entry of an upstream is found again."""
        if self._epochs is not None:
            self._epochs[upstream] = self._epochs.get(upstream, 0) + 1
        self._distrusted.add(upstream)

    async def maintain(self) -> None:
        """Follow the epochs in Redis until cancelled."""
        while True:
            try:
                await self.follow()
            except StoreUnavailable as error:
                self._breaker.record_failure(str(error))
            await asyncio.sleep(FOLLOW_EVERY_S)

    async def follow(self) -> None:
        """Publish the epochs that this gateway has begun, and adopt those of others.

        Raises: StoreUnavailable.
        """
        for upstream in list(self._distrusted):
            await self._clients.writer.execute("HINCRBY", EPOCHS, upstream, 1)
            self._distrusted.discard(upstream)
        self.size_bytes = sum(map(int, await self._clients.writer.execute("HVALS", WRITTEN)))
        stored = await self._clients.writer.execute("HGETALL", EPOCHS)
        known = self._epochs or {}
        epochs = {name.decode(): int(epoch) for name, epoch in _pairs(stored)}
        # A flushed store begins again at 0, without entries. Its own epochs never go back.
        self._epochs = known | {name: max(epoch, known.get(name, 0)) for name, epoch in epochs.items()}

    async def aclose(self) -> None:
        """Cancel the writes and close the connections."""
        for task in self._writes:
            task.cancel()
        await asyncio.gather(*self._writes, return_exceptions=True)
        await self._clients.reader.aclose()
        await self._clients.writer.aclose()

    async def _write(self, entries: Sequence[tuple[bytes, bytes]], owner: str, size: int) -> None:
        ttl_ms = max(TTL_PARTS, round(self._bounds.ttl_s * 1000))
        argument = {
            "ttl": ttl_ms,
            "part": -(-ttl_ms // TTL_PARTS),
            "bytes": self._bounds.bytes,
            "share": 0 if owner == SHARED else SHARE,
            "overhead": ENTRY_OVERHEAD,
            "values": [_as_string(entry) for _, entry in entries],
        }
        keys = [WRITTEN, _written_by(owner), *(_name(key) for key, _ in entries)]
        try:
            reply = await self._clients.writer.run_script(PUT, keys, msgspec.msgpack.encode(argument))
        except StoreUnavailable as error:
            self._breaker.record_failure(str(error))
            self.evictions += len(entries)
            return
        finally:
            self._unwritten_bytes -= size
        stored, self.size_bytes = msgspec.msgpack.decode(reply, type=tuple[int, int])
        self.evictions += len(entries) - stored


def _chunks(items: Sequence[Item]) -> Iterator[Sequence[Item]]:
    return (items[start : start + KEYS_MAX] for start in range(0, len(items), KEYS_MAX))


def _as_string(value: bytes) -> msgspec.Raw:
    """Encode bytes as a string of msgpack: the Lua library of Redis knows no type for bytes."""
    return msgspec.Raw(b"\xdb" + len(value).to_bytes(4, "big") + value)


def _written_by(owner: str) -> str:
    return f"{WRITTEN}:{hashlib.sha256(owner.encode()).hexdigest()[:16]}"


def _name(key: bytes) -> str:
    return f"{PREFIX}{key.hex()}"


def _pairs(reply: Any) -> list[tuple[bytes, bytes]]:
    """Return the fields and values of HGETALL, in either of redis-py's forms."""
    if isinstance(reply, dict):
        return list(reply.items())
    return list(zip(reply[::2], reply[1::2], strict=True))
