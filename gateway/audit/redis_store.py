"""Records of changes that gateways share, in Redis: a sorted set by time, which a copied record enters once.

What changes in Redis is recorded by the script that changes it. All other changes are appended after them.
"""

import time
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import msgspec

from gateway.audit.query import AuditPage, AuditQuery, PageBuilder, decode_record
from gateway.audit.records import AuditRecord, time_text
from gateway.config.schema import AuditSettings
from gateway.store.redis_client import RedisClient
from gateway.store.scripts import load_script

# Under the hash tag of keys, tenants and additions: their scripts append to it.
AUDIT = "gw:{store}:audit"
APPEND = load_script("append", package="gateway.audit").source
COPY = load_script("copy", package="gateway.audit", library=APPEND)
DAY_S = 24 * 3600
CHUNK = 500


class AuditInRedis:
    """Records in Redis. Its operations raise StoreUnavailable."""

    def __init__(self, client: RedisClient, settings: AuditSettings) -> None:
        self._client = client
        self._settings = settings

    def argument(self, records: Sequence[AuditRecord]) -> dict[str, Any]:
        """Return the argument of the function in `append.lua`, for a script that changes something too."""
        return {
            "records": [(str(record.at_ms), msgspec.json.encode(record).decode()) for record in records],
            "most": self._settings.records,
            "oldest": str(round(self._oldest_s() * 1000)),
        }

    async def append(self, records: Sequence[AuditRecord]) -> None:
        """Append records; those that are there already stay as they are."""
        argument = msgspec.msgpack.encode({"audit": self.argument(records)})
        await self._client.run_script(COPY, (AUDIT,), argument)

    async def page(self, query: AuditQuery) -> AuditPage:
        """Return a page. Raises: InvalidCursor."""
        page = PageBuilder(query)
        since = max(query.since, time_text(self._oldest_s()))
        tops = [_milliseconds(place) for place in (query.until, (query.before or ("",))[0]) if place]
        top, offset = min(tops) if tops else "+inf", 0
        while True:
            members = await self._client.execute(
                "ZREVRANGEBYSCORE", AUDIT, top, _milliseconds(since), "LIMIT", offset, CHUNK
            )
            records = [record for record in map(decode_record, members) if record is not None]
            if not page.add(records) or len(members) < CHUNK:
                return page.page()
            offset += len(members)

    def _oldest_s(self) -> float:
        return time.time() - self._settings.keep_days * DAY_S


def _milliseconds(text: str) -> int:
    return round(datetime.fromisoformat(text).timestamp() * 1000)
