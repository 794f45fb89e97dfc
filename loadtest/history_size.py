"""Size of the kept history, and the cost of counting one call, at its bounds.

python -m loadtest.history_size [--redis URL] [--days 91]

It stores a whole history of 1,000 tenants and 20 models, all of them busy in every minute, and reports the
bytes that it takes in a SQLite file, and in an empty Redis if one is named. Then it times the observer.
"""

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gateway.events import CallFinished
from gateway.history.counter import CallCounter, table_of
from gateway.history.folding import folded, places_of
from gateway.history.latencies import BUCKETS, bound_s
from gateway.history.ranges import Range
from gateway.history.reader import HistoryReader
from gateway.history.redis_store import HistoryInRedis
from gateway.history.rows import REST_ID, TOTAL_ID, row_id
from gateway.history.sqlite_store import HistoryInSqlite
from gateway.history.store import DAY_S, HOUR_S, Chunk, Fold, HistoryStore, Part, sharded
from gateway.history.table import CALLS, COST, FAILED, REFUSED, TOKENS, Table, packed
from gateway.history.views import top
from gateway.store.redis_client import RedisClient

TENANTS, MODELS, ERRORS = 1000, 20, 8
# Middle of the calls of a tenant in a minute; tenants differ by a factor of 2 around it.
CALLS_A_MINUTE = 60
PRICES = (20, 100, 13, 130, 0)
NAME = "租户-{}-" + "長" * 190
RANDOM = np.random.default_rng(7)


def ids() -> NDArray[np.uint64]:
    """Return all rows."""
    rows = [TOTAL_ID, REST_ID]
    rows += [row_id("model", f"model-{number}") for number in range(MODELS)]
    rows += [row_id("tenant", NAME.format(number)) for number in range(TENANTS)]
    rows += [row_id("error", f"kind-{number}") for number in range(ERRORS)]
    return np.array(sorted(rows), dtype=np.uint64)


def table(intervals: int, minutes: int) -> Table:
    """Return a table in which every row is busy. minutes: in one interval."""
    rows = ids()
    rate = CALLS_A_MINUTE * minutes * np.random.default_rng(1).lognormal(0, 0.7, len(rows))
    middle = np.random.default_rng(2).normal(np.log(0.04), 0.5, len(rows))
    bounds = np.log([bound_s(bucket) for bucket in range(BUCKETS)])
    spread = np.exp(-(((bounds[None, :] - middle[:, None]) / 0.6) ** 2) / 2)
    spread /= spread.sum(axis=1, keepdims=True)
    expected = (rate[:, None] * spread)[:, :, None].repeat(intervals, axis=2)
    latencies = RANDOM.poisson(expected).astype(np.uint64)
    counts = np.zeros((5, len(rows), intervals), dtype=np.uint64)
    counts[CALLS] = latencies.sum(axis=1)
    counts[FAILED] = RANDOM.binomial(counts[CALLS].astype(np.int64), 0.01)
    counts[REFUSED] = RANDOM.binomial(counts[FAILED].astype(np.int64), 0.2)
    for price in PRICES:
        noise = RANDOM.integers(0, 800, counts[CALLS].shape).astype(np.uint64)
        tokens = counts[CALLS] // len(PRICES) * 300 + noise
        counts[TOKENS] += tokens
        counts[COST] += tokens * np.uint64(price)
    return Table(rows, np.ones(intervals, dtype=np.uint64), counts, latencies)


async def fill(store: HistoryStore, days: int) -> None:
    """Store a history that ends now."""
    now_s = int(time.time())
    hour_s, today_s = now_s - now_s % HOUR_S, now_s - now_s % DAY_S
    names = {row_id("tenant", NAME.format(number)): NAME.format(number) for number in range(TENANTS)}
    for back in range(24):
        start_s = hour_s - (back + 1) * HOUR_S
        chunks = {
            Chunk("minute", start_s, shard): packed(part) for shard, part in sharded(table(60, 1)).items()
        }
        await store.fold(Fold(await store.version(), {}, chunks=chunks))
    for back in range(days):
        start_s = today_s - back * DAY_S
        chunks = {
            Chunk("hour", start_s, shard): packed(part) for shard, part in sharded(table(24, 60)).items()
        }
        await store.fold(Fold(await store.version(), {}, chunks=chunks))
    for minute in range(60):
        part = Part(hour_s // 60 + minute, f"process:{minute}", packed(table(1, 1)), names)
        await store.put(part)


async def report(store: HistoryStore, days: int) -> None:
    """Fill a store, and time a fold and the longest list."""
    await fill(store, days)
    hour_s = int(time.time()) // HOUR_S * HOUR_S
    places = places_of(hour_s - HOUR_S)
    known = dict(zip(places, await store.chunks(places), strict=True))
    parts = {hour_s // 60 - 60 + minute: [packed(table(1, 1))] for minute in range(60)}
    begun_s = time.process_time()
    folded(hour_s - HOUR_S, parts, known)
    print(f"{store.kept}: fold of an hour {time.process_time() - begun_s:.2f} CPU s")
    until_s = (hour_s // 21600 + 1) * 21600
    range_ = Range(until_s - 90 * DAY_S, until_s, 21600)
    for metric in ("calls", "p95"):
        begun_s = time.process_time()
        await top(HistoryReader(store, lambda: None), range_, "tenant", metric, 10, {}, None)
        print(
            f"{store.kept}: busiest tenants of 90 days by {metric} {time.process_time() - begun_s:.2f} CPU s"
        )


def time_observer() -> None:
    """Report the time that the observer takes per call, and the end of a minute at the bound of entries."""
    counter = CallCounter()
    events = [
        CallFinished("r", "POST", "/", 200, "ok", 0.001 * (1 + number % 50), f"t{number % 40}", "m", 1, 9)
        for number in range(1000)
    ]
    rounds = 300
    begun_s = time.process_time()
    for _ in range(rounds):
        for event in events:
            counter.observe(event)
    own_s = time.process_time() - begun_s
    print(f"observer: {own_s / rounds / len(events) * 1e6:.2f} us per call")
    for number in range(20_000):
        tenant, model = f"t{number % 1000}", f"m{number // 1000}"
        counter.observe(CallFinished("r", "POST", "/", 200, "ok", 0.01, tenant, model))
    begun_s = time.process_time()
    table_of(counter.take(), lambda _: 20)
    print(f"end of a minute with 20,000 entries: {time.process_time() - begun_s:.2f} CPU s, on a thread")


async def main() -> None:
    """Parse the command line and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--redis")
    parser.add_argument("--days", type=int, default=91)
    arguments = parser.parse_args()
    time_observer()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "history.sqlite"
        store = HistoryInSqlite(path)
        await report(store, arguments.days)
        await store.aclose()
        print(f"file: {path.stat().st_size / 1e6:.1f} MB")
    if arguments.redis:
        client = RedisClient(arguments.redis, 5.0)
        before = (await client.memory())[0]["used_memory"]
        await report(HistoryInRedis(client), arguments.days)
        print(f"Redis: {((await client.memory())[0]['used_memory'] - before) / 1e6:.1f} MB")
        await client.aclose()


if __name__ == "__main__":
    asyncio.run(main())
