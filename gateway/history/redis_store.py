"""History in Redis, which all gateways and their workers share.

All keys have one hash tag, so that a fold is one step in a cluster too. Every key expires by itself. The
parts of a minute are a hash, in which an empty value marks a part that was folded.
"""

import time
from collections.abc import Mapping, Sequence

import msgspec

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
from gateway.store.redis_client import RedisClient
from gateway.store.scripts import load_script

PREFIX = "gw:{history}:"
OPEN = f"{PREFIX}open"
VERSION = f"{PREFIX}version"
CHOSEN = f"{PREFIX}chosen"
# Chunks that one command reads: at most some 500 KB each.
CHUNKS_PER_READ = 16
# Names that one command stores, within a millisecond.
NAMES_PER_PUT = 250
CHOSEN_S = 150
EXPIRES_MIN_S = 60

PUT = load_script("put", package="gateway.history")
PUT_NAMES = load_script("put_names", package="gateway.history")
FOLD = load_script("fold", package="gateway.history")
PUT_SPANS = load_script("put_spans", package="gateway.history")


class HistoryInRedis:
    """History in Redis. All operations raise StoreUnavailable."""

    kept: Kept = "redis"

    def __init__(self, client: RedisClient) -> None:
        self._client = client

    async def put(self, part: Part) -> None:
        await self._put_names(_names(names_periods(part.minute * 60)[0]), part.names)
        argument = {
            "name": part.name,
            "content": _words(part.content),
            "minute": str(part.minute),
            "kept": PARTS_KEPT_S,
        }
        keys = (_minute(part.minute), OPEN)
        await self._client.run_script(PUT, keys, msgspec.msgpack.encode(argument))

    async def _put_names(self, key: str, names: Mapping[int, str]) -> None:
        pairs = [(f"{number:x}", name) for number, name in names.items()]
        for start in range(0, len(pairs), NAMES_PER_PUT):
            argument = {
                "names": pairs[start : start + NAMES_PER_PUT],
                "kept": (KEPT_DAYS + NAMES_PERIOD_DAYS) * DAY_S,
                "most": NAMES_MAX,
            }
            await self._client.run_script(PUT_NAMES, (key,), msgspec.msgpack.encode(argument))

    async def open_minutes(self) -> list[int]:
        return [int(minute) for minute in await self._client.execute("ZRANGE", OPEN, 0, -1)]

    async def parts(self, minute: int) -> Mapping[str, bytes]:
        found: Mapping[bytes, bytes] = await self._client.execute("HGETALL", _minute(minute))
        return {name.decode(errors="replace"): content for name, content in found.items() if content}

    async def chunks(self, places: Sequence[Chunk]) -> list[bytes | None]:
        found: list[bytes | None] = []
        for start in range(0, len(places), CHUNKS_PER_READ):
            keys = [_chunk(place) for place in places[start : start + CHUNKS_PER_READ]]
            found += await self._client.execute("MGET", *keys)
        return found

    async def version(self) -> int:
        return int(await self._client.execute("GET", VERSION) or 0)

    async def fold(self, fold: Fold) -> bool:
        keys: dict[str, int] = {VERSION: 1, OPEN: 2}

        def index(key: str) -> int:
            return keys.setdefault(key, len(keys) + 1)

        now_s = int(time.time())
        argument = {
            "version": fold.version,
            "parts": [
                (index(_minute(minute)), str(minute), list(names)) for minute, names in fold.parts.items()
            ],
            "merged": [
                (index(_minute(part.minute)), part.name, _words(part.content)) for part in fold.merged
            ],
            "chunks": [
                (index(_chunk(place)), _words(content), max(EXPIRES_MIN_S, place.expires_s - now_s))
                for place, content in fold.chunks.items()
            ],
            "marks_kept": MARKS_KEPT_S,
            "kept": (KEPT_DAYS + NAMES_PERIOD_DAYS) * DAY_S,
        }
        reply = await self._client.run_script(FOLD, tuple(keys), msgspec.msgpack.encode(argument))
        return msgspec.msgpack.decode(reply, type=bool)

    async def is_chosen(self, process: str) -> bool:
        """Return whether this process folds now."""
        if await self._client.execute("SET", CHOSEN, process, "NX", "EX", CHOSEN_S):
            return True
        if await self._client.execute("GET", CHOSEN) != process.encode():
            return False
        await self._client.execute("EXPIRE", CHOSEN, CHOSEN_S)
        return True

    async def names(self) -> Mapping[int, str]:
        names: dict[int, str] = {}
        for period in reversed(names_periods(time.time())):
            found: Mapping[bytes, bytes] = await self._client.execute("HGETALL", _names(period))
            names |= {int(number, 16): name.decode(errors="replace") for number, name in found.items()}
        return names

    async def put_spans(self, day: int, recorder: str, content: bytes) -> None:
        argument = {
            "recorder": recorder,
            "content": _words(content),
            "kept": (KEPT_DAYS + 1) * DAY_S,
            "most": RECORDERS_MAX,
        }
        await self._client.run_script(PUT_SPANS, (_spans(day),), msgspec.msgpack.encode(argument))

    async def spans(self, days: Sequence[int]) -> list[bytes]:
        found: list[bytes] = []
        for day in days:
            found += await self._client.execute("HVALS", _spans(day))
        return found

    async def aclose(self) -> None:
        await self._client.aclose()


def _minute(minute: int) -> str:
    return f"{PREFIX}parts:{minute}"


def _chunk(place: Chunk) -> str:
    return f"{PREFIX}{place.key}"


def _names(period: int) -> str:
    return f"{PREFIX}names:{period}"


def _spans(day: int) -> str:
    return f"{PREFIX}spans:{day}"


def _words(content: bytes) -> msgspec.Raw:
    """Return bytes as msgpack's text: the servers' decoder knows no other type of bytes."""
    return msgspec.Raw(b"\xdb" + len(content).to_bytes(4) + content)
