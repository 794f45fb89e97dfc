"""Calls that quotas have refused today (UTC), by tenant: of all gateways of one Redis, or of this one.

A refusal is counted in this process, and the counts are written together every few seconds: a refused call
waits for no store. A process that is killed loses its last seconds, and after a timeout of Redis the same
seconds may be counted twice.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from gateway.config.state_folder import make_private_folder, replace_private
from gateway.errors import QuotaUnavailable
from gateway.events import QuotaDecided
from gateway.quotas.ledger import day_of
from gateway.quotas.limits import SECOND_US
from gateway.store.errors import StoreUnavailable
from gateway.store.redis_client import RedisClient
from gateway.store.scripts import load_script

logger = logging.getLogger("gateway")

FILE_NAME = "refusals.json"
WRITE_EVERY_S = 5.0
# Of two days, so that no clock of a gateway misses one.
KEPT_S = 2 * 24 * 3600
# Counts of more tenants are read together with those of all others.
TENANTS_TOGETHER = 1_000
ADD = load_script("add_refusals")


class _Content(msgspec.Struct, frozen=True):
    """Content of the file: counts of one day, by tenant."""

    day: str
    counts: dict[str, int]


class Refusals:
    """Counter of refused calls. now_s: the wall clock.

    client: of the shared counts, None without Redis. file: for the counts without Redis, None if they are
    lost with the process.
    """

    def __init__(
        self,
        client: RedisClient | None = None,
        file: Path | None = None,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._client = client
        self._file = file
        self._now_s = now_s
        self._day = self._today()
        # With Redis those that it does not have yet; without it all of the day.
        self._counts: Counter[str] = Counter()
        self._is_changed = False
        if client is None and file is not None:
            self._counts.update(self._read(file))

    def observe(self, event: QuotaDecided) -> None:
        """Count a refusal; admissions have no effect."""
        if event.decision == "refused":
            self._roll()
            self._counts[event.tenant] += 1
            self._is_changed = True

    async def today(self, tenants: Sequence[str] | None = None) -> dict[str, int]:
        """Return today's refused calls by tenant. tenants: None for all. Raises: QuotaUnavailable."""
        self._roll()
        if self._client is None:
            return dict(self._counts)
        try:
            await self._add(self._client)
            if tenants is not None and len(tenants) <= TENANTS_TOGETHER:
                found = await self._client.execute("HMGET", _key(self._day), *tenants) if tenants else ()
                return {name: int(count) for name, count in zip(tenants, found, strict=True) if count}
            counts: Mapping[bytes, bytes] = await self._client.execute("HGETALL", _key(self._day))
        except StoreUnavailable as error:
            raise QuotaUnavailable("the quota store is unavailable") from error
        return {name.decode(errors="replace"): int(count) for name, count in counts.items()}

    async def run(self) -> None:
        """Write the counts every `WRITE_EVERY_S`, until cancelled, and at the end."""
        try:
            while True:
                await asyncio.sleep(WRITE_EVERY_S)
                await self.write()
        finally:
            await self.write()

    async def write(self) -> None:
        """Write the counts that have changed, if the store can be used."""
        if not self._is_changed:
            return
        if self._client is not None:
            # They are added with the next ones.
            with suppress(StoreUnavailable):
                await self._add(self._client)
        elif self._file is not None:
            self._is_changed = False
            content = msgspec.json.encode(_Content(self._day, dict(self._counts)))
            try:
                make_private_folder(self._file.parent)
                await asyncio.to_thread(replace_private, self._file, content)
            except OSError as error:
                logger.warning("%s cannot be written: %s", self._file, error.strerror)

    async def _add(self, client: RedisClient) -> None:
        """Add what was counted here to the shared counts.

        Counts stay here if they cannot be added, or their reader has gone. Raises: StoreUnavailable.
        """
        counts, self._counts = self._counts, Counter()
        if not counts:
            return
        argument = msgspec.msgpack.encode({"counts": dict(counts), "ttl": KEPT_S})
        day = self._day
        try:
            await client.run_script(ADD, (_key(day),), argument)
        except BaseException:
            if day == self._day:
                self._counts.update(counts)
            raise
        self._is_changed = bool(self._counts)

    def _roll(self) -> None:
        """Begin a new day. What Redis lacks of the last one then is lost."""
        if (today := self._today()) != self._day:
            self._day, self._counts = today, Counter()

    def _today(self) -> str:
        return day_of(int(self._now_s() * SECOND_US))

    def _read(self, file: Path) -> dict[str, int]:
        try:
            content = msgspec.json.decode(file.read_bytes(), type=_Content)
        except (OSError, ValueError):
            return {}
        return content.counts if content.day == self._day else {}


def _key(day: str) -> str:
    return f"gw:{{refusals}}:{day}"
