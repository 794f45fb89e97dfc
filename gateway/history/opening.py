"""The keeper of a process, with the place that its configuration has for the history."""

import secrets
from collections.abc import Callable
from pathlib import Path

from gateway.history.keeper import HistoryKeeper
from gateway.history.redis_store import HistoryInRedis
from gateway.history.spans import SpanRecorder
from gateway.history.sqlite_store import FILE_NAME, HistoryInSqlite
from gateway.history.store import HistoryStore
from gateway.store.redis_client import RedisClient

# No caller waits for a part, and a chart of 90 days reads 2 MB.
TIMEOUT_S = 5.0


def open_history(
    redis_url: str | None,
    state_dir: Path | None,
    price: Callable[[str], int],
    *,
    records_replicas: bool,
) -> HistoryKeeper:
    """Return a keeper, which contacts no store yet.

    redis_url: None without Redis, which several workers need. state_dir: None if none is known.
    records_replicas: no other worker does.
    """
    store: HistoryStore
    if redis_url is not None:
        store = HistoryInRedis(RedisClient(redis_url, TIMEOUT_S))
    else:
        store = HistoryInSqlite(None if state_dir is None else state_dir / FILE_NAME)
    recorder = SpanRecorder() if records_replicas else None
    return HistoryKeeper(store, secrets.token_hex(8), price, recorder)
