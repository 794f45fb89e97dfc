"""Stores of what operators declare: Redis or memory for additions, files of `state_dir` for this host's.

Additions are the same for all gateways on one Redis. Every change writes a new random version, and succeeds
only if the version before it is still stored. Instances and checkpoints are this host's: each kind has one
file of JSON, which is replaced in one step, and locks next to it, because commands change it too.
"""

import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from gateway.audit.records import AuditRecord
from gateway.audit.redis_store import APPEND, AUDIT, AuditInRedis
from gateway.config.reader import with_current_keys
from gateway.config.schema import AuditSettings
from gateway.config.state_folder import replace_private
from gateway.declared.additions import Additions
from gateway.events import AuditRecorded
from gateway.store.errors import StoreUnavailable
from gateway.store.redis_client import RedisClient
from gateway.store.scripts import load_script

# One hash: the version, and all additions as JSON.
ADDED = "gw:{store}:added"
REPLACE = load_script("replace", package="gateway.declared", library=APPEND)
# All records of one host are far smaller.
FILE_BYTES_MAX = 16 * 1024 * 1024

_Content = TypeVar("_Content")

logger = logging.getLogger("gateway")


class StoredAdditions(msgspec.Struct, frozen=True):
    """All additions with their version, which is empty before the first change."""

    version: str = ""
    additions: Additions = Additions()


class AdditionStore(Protocol):
    """Store of additions. All operations raise StoreUnavailable if the additions cannot be read."""

    async def version(self) -> str:
        """Return the version, which every change replaces."""

    async def load(self) -> StoredAdditions:
        """Return all additions with their version."""

    async def replace(
        self, expected: str, additions: Additions, records: Sequence[AuditRecord]
    ) -> StoredAdditions | None:
        """Replace the additions and record that, or return None if their version is not the expected one."""

    async def aclose(self) -> None:
        """Close the connections."""


class AdditionsInMemory:
    """Additions of one parent process, lost when it exits. record: records a change."""

    def __init__(self, record: Callable[[AuditRecord], Awaitable[None]]) -> None:
        self._record = record
        self._stored = StoredAdditions()

    async def version(self) -> str:
        """Return the version, which every change replaces."""
        return self._stored.version

    async def load(self) -> StoredAdditions:
        """Return all additions with their version."""
        return self._stored

    async def replace(
        self, expected: str, additions: Additions, records: Sequence[AuditRecord]
    ) -> StoredAdditions | None:
        """Replace the additions and record that, or return None if their version is not the expected one."""
        if expected != self._stored.version:
            return None
        self._stored = StoredAdditions(secrets.token_hex(8), additions)
        for record in records:
            await self._record(record)
        return self._stored

    async def aclose(self) -> None:
        """Do nothing: there are no connections."""


class AdditionsInRedis:
    """Additions of all gateways on one Redis. audit: bounds of the records. observe: logs them."""

    def __init__(
        self,
        client: RedisClient,
        audit: AuditSettings = AuditSettings(),  # noqa: B008 - it is frozen
        observe: Callable[[AuditRecorded], None] = lambda _: None,
    ) -> None:
        self._client = client
        self._audit = AuditInRedis(client, audit)
        self._observe = observe
        self._unreadable_version: str | None = None

    async def version(self) -> str:
        """Return the version, which every change replaces."""
        return _text(await self._client.execute("HGET", ADDED, "version"))

    async def load(self) -> StoredAdditions:
        """Return all additions with their version.

        Raises: StoreUnavailable, also if a person or another release has written something unreadable.
        """
        stored_version, written = await self._client.execute("HMGET", ADDED, "version", "additions")
        version = _text(stored_version)
        try:
            return StoredAdditions(version, _decode(written))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            if version != self._unreadable_version:
                logger.warning("the additions in Redis cannot be read; the served ones stay: %s", error)
            self._unreadable_version = version
            raise StoreUnavailable("the additions in Redis cannot be read") from error

    async def replace(
        self, expected: str, additions: Additions, records: Sequence[AuditRecord]
    ) -> StoredAdditions | None:
        """Compare the version, replace the additions and record that, in one step."""
        wanted = StoredAdditions(secrets.token_hex(8), additions)
        argument = {
            "expected": expected,
            "version": wanted.version,
            "additions": msgspec.json.encode(additions).decode(),
            "audit": self._audit.argument(records),
        }
        replaced = await self._client.run_script(REPLACE, (ADDED, AUDIT), msgspec.msgpack.encode(argument))
        if not msgspec.msgpack.decode(replaced, type=bool):
            return None
        for record in records:
            self._observe(record.event())
        return wanted

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()


def _text(value: bytes | None) -> str:
    return (value or b"").decode(errors="replace")


def _decode(written: bytes | None) -> Additions:
    if written is None:
        return Additions()
    stored = msgspec.json.decode(written, type=Additions)
    upstreams = {name: with_current_keys(settings) for name, settings in stored.upstreams.items()}
    return msgspec.structs.replace(stored, upstreams=upstreams)


class StateFile(Generic[_Content]):
    """File of JSON in `state_dir`. kind: type of its content."""

    def __init__(self, folder: Path, name: str, kind: Any) -> None:
        self.folder = folder
        self.path = folder / name
        self._decoder: msgspec.json.Decoder[_Content] = msgspec.json.Decoder(kind)

    def read(self) -> _Content | None:
        """Return the content, None if there is no file.

        Raises: OSError; msgspec.DecodeError or UnicodeDecodeError if the file was damaged, or is too large.
        """
        try:
            with self.path.open("rb") as file:
                return self._decoder.decode(file.read(FILE_BYTES_MAX))
        except FileNotFoundError:
            return None

    def write(self, content: _Content) -> None:
        """Replace the file in one step. Raises: OSError."""
        replace_private(self.path, msgspec.json.encode(content))
