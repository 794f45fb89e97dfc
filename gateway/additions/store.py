"""Where additions stand: in Redis, where gateways share them, or in the memory of one gateway's parent.

Rule: every change gives a version that never was before, and is made only by who knows the one before it.
"""

import logging
import secrets
from typing import Protocol

import msgspec

from gateway.additions.entries import Additions
from gateway.store.errors import StoreUnavailable
from gateway.store.redis_client import RedisClient
from gateway.store.scripts import load_script

# One hash: the version, and all additions as JSON.
ADDED = "gw:{store}:added"
REPLACE = load_script("replace", package="gateway.additions")

logger = logging.getLogger("gateway")


class StoredAdditions(msgspec.Struct, frozen=True):
    """What stands. version: empty where nothing ever stood."""

    version: str = ""
    additions: Additions = Additions()


class AdditionStore(Protocol):
    """All operations raise StoreUnavailable where what stands cannot be known."""

    async def version(self) -> str:
        """What every change changes."""

    async def load(self) -> StoredAdditions:
        """All of it."""

    async def replace(self, expected: str, additions: Additions) -> StoredAdditions | None:
        """Put others in the place of those of a version; None where that is not what stands."""

    async def aclose(self) -> None:
        """Close the connections."""


class AdditionsInMemory:
    """Of one parent, until it ends."""

    def __init__(self) -> None:
        self._standing = StoredAdditions()

    async def version(self) -> str:
        """What every change changes."""
        return self._standing.version

    async def load(self) -> StoredAdditions:
        """All of it."""
        return self._standing

    async def replace(self, expected: str, additions: Additions) -> StoredAdditions | None:
        """As in Redis."""
        if expected != self._standing.version:
            return None
        self._standing = StoredAdditions(secrets.token_hex(8), additions)
        return self._standing

    async def aclose(self) -> None:
        """There is nothing to close."""


class AdditionsInRedis:
    """Of all gateways on one Redis."""

    def __init__(self, door: RedisClient) -> None:
        self._door = door
        self._unreadable: str | None = None

    async def version(self) -> str:
        """What every change changes."""
        return _text(await self._door.execute("HGET", ADDED, "version"))

    async def load(self) -> StoredAdditions:
        """All of it; away too where a person or another release has written what nobody can read here."""
        version, written = await self._door.execute("HMGET", ADDED, "version", "additions")
        known = _text(version)
        try:
            return StoredAdditions(known, _decoded(written))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            if known != self._unreadable:
                logger.warning("what was added cannot be read in Redis; what is served stays: %s", error)
            self._unreadable = known
            raise StoreUnavailable("what was added cannot be read in Redis") from error

    async def replace(self, expected: str, additions: Additions) -> StoredAdditions | None:
        """In one step with the look at the version."""
        wanted = StoredAdditions(secrets.token_hex(8), additions)
        argument = {
            "expected": expected,
            "version": wanted.version,
            "additions": msgspec.json.encode(additions).decode(),
        }
        done = await self._door.run_script(REPLACE, (ADDED,), msgspec.msgpack.encode(argument))
        return wanted if msgspec.msgpack.decode(done, type=bool) else None

    async def aclose(self) -> None:
        """Close the connections."""
        await self._door.aclose()


def _text(value: bytes | None) -> str:
    return (value or b"").decode(errors="replace")


def _decoded(written: bytes | None) -> Additions:
    return Additions() if written is None else msgspec.json.decode(written, type=Additions)
