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

# Nobody waits for a part, and a chart of 90 days reads 2 MB.
TIMEOUT_S = 5.0


def open_history(
    redis_url: str | None,
    state_dir: Path | None,
    workers_dir: Path | None,
    price: Callable[[str], int],
    *,
    records_replicas: bool,
) -> HistoryKeeper:
    """Return a keeper, which contacts no store yet.

    redis_url: None without Redis. state_dir: None if none is known. workers_dir: that the workers of this
    gateway share and that does not outlive it, None for a single one. records_replicas: no other worker does.
    """
    store: HistoryStore
    if redis_url is not None:
        store = HistoryInRedis(RedisClient(redis_url, TIMEOUT_S))
    elif state_dir is not None:
        store = HistoryInSqlite(state_dir / FILE_NAME)
    else:
        path = None if workers_dir is None else workers_dir / FILE_NAME
        store = HistoryInSqlite(path, is_lasting=False)
    recorder = SpanRecorder() if records_replicas else None
    return HistoryKeeper(store, secrets.token_hex(8), price, recorder)
