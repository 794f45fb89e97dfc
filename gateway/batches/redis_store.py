"""Store in Redis, shared by all gateways.

Rows are one hash, with sorted sets for lists; a script counts their bytes and checks the bounds. The queue
is a stream with a consumer group for each job: it has an entry for each chunk that is not finished, and goes
with its job. A lease is the time for which an entry is not idle. Redis forgets reasons for waits in time.
"""

from collections.abc import Iterable, Sequence
from math import inf
from typing import Any

import msgspec

from gateway.batches.records import ChunkResult
from gateway.batches.store import (
    LEASE_S,
    BoundExceeded,
    Bounds,
    Kind,
    Page,
    QueueState,
    Row,
)
from gateway.store.redis_client import RedisClient
from gateway.store.scripts import Script, load_script

# One hash tag, because scripts change several keys.
PREFIX = "gw:{batches}:"
ROWS = f"{PREFIX}rows"
BYTES = f"{PREFIX}bytes"
ACTIVE = f"{PREFIX}active"
UNFINISHED = f"{PREFIX}unfinished"
BEATS = f"{PREFIX}beats"
OBJECTS = f"{PREFIX}objects"
GROUP = "gateways"
PUT = load_script("put", package="gateway.batches")
CREATE = load_script("create", package="gateway.batches")
CLAIM = load_script("claim", package="gateway.batches")
RENEW = load_script("renew", package="gateway.batches")
QUEUE = load_script("queue", package="gateway.batches")
# For the script a bound of 0 bytes in total is none.
NO_BOUNDS = Bounds(0, 0)
# Ids of one command.
AT_ONCE = 500
# Rows of one command: a row may have a hundred kilobytes.
ROWS_AT_ONCE = 32


class RedisJobStore:
    """Rows, chunks and reasons in Redis."""

    def __init__(self, client: RedisClient) -> None:
        self._client = client
        # Entry of each chunk that this process owns.
        self._entries: dict[tuple[str, int], str] = {}
        # Those that it has released, and others may claim later.
        self._resting: dict[tuple[str, int], str] = {}

    async def put(self, row: Row, bounds: Bounds | None = None, *, is_trial: bool = False) -> None:
        await self._put(row, msgspec.json.encode(row).decode(), bounds or NO_BOUNDS, is_trial=is_trial)

    async def _put(self, row: Row, encoded: str, bounds: Bounds, *, is_trial: bool = False) -> None:
        """Add, replace or, without `encoded`, remove a row."""
        argument = {
            "id": row.id,
            "tenant": row.tenant,
            "at": row.at_ms,
            "bytes": row.bytes,
            "shown": row.is_shown,
            "active": row.is_active,
            # Rows of chunks are removed with their job.
            "unfinished": bool(encoded) and not row.is_shown and row.id.startswith("file-"),
            "row": encoded,
            "of_tenant": bounds.tenant,
            "total": bounds.total,
            "shown_max": -1 if bounds.shown is None else bounds.shown,
            "active_max": bounds.active,
            "trial": is_trial,
        }
        lists = _listed(row.kind, None), _listed(row.kind, row.tenant)
        keys = [ROWS, BYTES, ACTIVE, UNFINISHED, *lists, f"{ACTIVE}:{row.tenant}"]
        exceeded = await self._script(PUT, keys, argument)
        if exceeded:
            raise BoundExceeded(exceeded)

    async def get(self, id_: str) -> Row | None:
        found = await self._client.execute("HGET", ROWS, id_)
        return None if found is None else msgspec.json.decode(found, type=Row)

    async def remove(self, id_: str) -> None:
        row = await self.get(id_)
        if row is not None:
            gone = msgspec.structs.replace(row, bytes=0, is_shown=False, is_active=False)
            await self._put(gone, "", NO_BOUNDS)

    async def rows(self, page: Page) -> list[Row]:
        key, start = _listed(page.kind, page.tenant), 0
        if page.after is not None:
            rank = await self._client.execute("ZREVRANK" if page.newest_first else "ZRANK", key, page.after)
            if rank is None:
                return []
            start = int(rank) + 1
        name = "ZREVRANGE" if page.newest_first else "ZRANGE"
        ids = await self._client.execute(name, key, start, start + page.limit - 1)
        return await self._rows_of(ids, page.data_bytes)

    async def active(self, tenant: str | None = None) -> list[Row]:
        key = ACTIVE if tenant is None else f"{ACTIVE}:{tenant}"
        return await self._rows_of(await self._client.execute("ZRANGE", key, 0, -1))

    async def _rows_of(self, ids: Sequence[bytes], data_bytes: float = inf) -> list[Row]:
        """Return rows, up to the one with which their data is longer than this."""
        rows: list[Row] = []
        size = 0
        for start in range(0, len(ids), ROWS_AT_ONCE):
            for encoded in await self._client.execute("HMGET", ROWS, *ids[start : start + ROWS_AT_ONCE]):
                if encoded is not None:
                    rows.append(msgspec.json.decode(encoded, type=Row))
                    size += rows[-1].data_bytes
                if size > data_bytes:
                    return rows
        return rows

    async def unfinished(self, before_ms: int) -> list[str]:
        found = await self._client.execute(
            "ZRANGEBYSCORE", UNFINISHED, "-inf", before_ms, "LIMIT", 0, AT_ONCE
        )
        return [id_.decode() for id_ in found]

    async def used_bytes(self) -> int:
        return int(await self._client.execute("HGET", BYTES, "") or 0)

    async def agree(self, identity: str) -> str:
        """Return the identity on which the gateways of this Redis agree."""
        await self._client.execute("SET", OBJECTS, identity, "NX")
        return str((await self._client.execute("GET", OBJECTS)).decode())

    async def beat(self) -> int:
        """Count up."""
        return int(await self._client.execute("INCR", BEATS))

    async def enqueue(self, job: str, chunks: Sequence[int]) -> None:
        await self._script(CREATE, [_stream(job)], {"group": GROUP})
        for chunk in chunks:
            await self._client.execute("XADD", _stream(job), "*", "chunk", chunk)

    async def claim(self, job: str, owner: str) -> int | None:
        argument = {"group": GROUP, "consumer": owner, "lease": round(LEASE_S * 1000)}
        found = await self._script(CLAIM, [_stream(job)], argument)
        if not found:
            return None
        entry, chunk = found
        known = self._entries.get((job, chunk))
        if known is not None and known != entry:
            # A second entry of a chunk that runs here.
            await self._forget(job, entry)
            return None
        self._resting.pop((job, chunk), None)
        self._entries[job, chunk] = entry
        return int(chunk)

    async def renew(self, job: str, chunks: Sequence[int], owner: str) -> None:
        entries = [entry for chunk in chunks if (entry := self._entries.get((job, chunk)))]
        if entries:
            await self._set_idle(job, entries, owner, 0)

    async def release(self, job: str, chunk: int, owner: str, after_s: float = 0.0) -> None:
        key = job, chunk
        entry = self._entries.pop(key, None) or self._resting.pop(key, None)
        if entry is not None:
            if after_s:
                self._resting[key] = entry
            await self._set_idle(job, [entry], owner, round(max(0.0, LEASE_S - after_s) * 1000))

    async def _set_idle(self, job: str, entries: list[str], owner: str, idle_ms: int) -> None:
        argument = {"group": GROUP, "consumer": owner, "idle": idle_ms, "ids": entries}
        await self._script(RENEW, [_stream(job)], argument)

    async def finish(self, job: str, chunk: int, result: ChunkResult | None) -> None:
        if result is not None:
            await self._client.execute("HSET", _progress(job), chunk, msgspec.msgpack.encode(result))
        self._resting.pop((job, chunk), None)
        entry = self._entries.pop((job, chunk), None)
        if entry is not None:
            await self._forget(job, entry)

    async def _forget(self, job: str, entry: str) -> None:
        await self._client.execute("XACK", _stream(job), GROUP, entry)
        await self._client.execute("XDEL", _stream(job), entry)

    async def progress(self, job: str) -> dict[int, ChunkResult]:
        found = _pairs(await self._client.execute("HGETALL", _progress(job)))
        return {int(chunk): msgspec.msgpack.decode(result, type=ChunkResult) for chunk, result in found}

    async def queue_of(self, job: str) -> QueueState:
        argument = {"group": GROUP, "lease": round(LEASE_S * 1000)}
        found = await self._script(QUEUE, [_stream(job), _progress(job)], argument)
        return msgspec.convert(found, QueueState)

    async def drop(self, job: str) -> None:
        for entries in (self._entries, self._resting):
            for key in [key for key in entries if key[0] == job]:
                del entries[key]
        await self._client.execute("DEL", _stream(job), _progress(job))

    async def put_wait(self, job: str, reason: str, for_s: float) -> None:
        await self._client.execute("SET", _wait(job), reason, "PX", max(1, round(for_s * 1000)))

    async def wait_of(self, job: str) -> str | None:
        found = await self._client.execute("GET", _wait(job))
        return None if found is None else str(found.decode())

    async def aclose(self) -> None:
        await self._client.aclose()

    async def _script(self, script: Script, keys: Sequence[str], argument: dict[str, Any]) -> Any:
        """Return the reply of a script."""
        reply = await self._client.run_script(script, keys, msgspec.msgpack.encode(argument))
        return msgspec.msgpack.decode(reply)


def _listed(kind: Kind, tenant: str | None) -> str:
    return f"{PREFIX}{kind}" if tenant is None else f"{PREFIX}{kind}:{tenant}"


def _stream(job: str) -> str:
    return f"{PREFIX}chunks:{job}"


def _progress(job: str) -> str:
    return f"{PREFIX}progress:{job}"


def _wait(job: str) -> str:
    return f"{PREFIX}wait:{job}"


def _pairs(reply: Any) -> Iterable[tuple[bytes, bytes]]:
    """Return the fields and values of HGETALL, in either of redis-py's forms."""
    if isinstance(reply, dict):
        return reply.items()
    return zip(reply[::2], reply[1::2], strict=True)
