"""The kept history in Redis and in SQLite: writers of several gateways, folds, an emptied Redis, a kill."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.events import CallFinished
from gateway.history import keeper as keeper_module
from gateway.history.folding import PART_TENANTS_MAX
from gateway.history.keeper import WAITING_MAX, HistoryKeeper
from gateway.history.ranges import Range
from gateway.history.reader import HistoryReader
from gateway.history.redis_store import NAMES_PER_PUT, PREFIX, PUT_NAMES, HistoryInRedis
from gateway.history.rows import TOTAL_ID, row_id
from gateway.history.sqlite_store import HistoryInSqlite
from gateway.history.store import DAY_S, HOUR_S, HistoryStore, Part, names_periods
from gateway.history.views import HistoryChart, chart, top
from gateway.store.errors import StoreUnavailable
from gateway.store.redis_client import RedisClient
from tests.quotas.redis_server import RedisServer
from tests.waiting import PATIENCE_S

# The begin of an hour that is over: keys of it do not expire yet.
HOUR_BEGUN_S = int(time.time()) // HOUR_S * HOUR_S - 2 * HOUR_S


class Clock:
    """Clock that the test sets."""

    def __init__(self) -> None:
        self.now_s = float(HOUR_BEGUN_S)

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(params=["redis", "sqlite"])
def open_store(
    request: pytest.FixtureRequest, tmp_path: Path, redis: RedisServer
) -> Callable[[], HistoryStore]:
    """Return a function that opens one more connection to the same, empty, place."""

    def create() -> HistoryStore:
        if request.param == "redis":
            return HistoryInRedis(RedisClient(redis.url, PATIENCE_S))
        return HistoryInSqlite(tmp_path / "history.sqlite")

    return create


def count(keeper: HistoryKeeper, tenant: str, calls: int, model: str = "m") -> None:
    for _ in range(calls):
        keeper.counter.observe(
            CallFinished("r", "POST", "/", 200, "ok", 0.02, tenant=tenant, model=model, tokens=10)
        )


async def shown(store: HistoryStore, row: int = TOTAL_ID, step_s: int = 60) -> HistoryChart:
    day_s = HOUR_BEGUN_S // DAY_S * DAY_S
    range_ = (
        Range(HOUR_BEGUN_S, HOUR_BEGUN_S + 2 * HOUR_S, 60)
        if step_s == 60
        else Range(day_s, day_s + 2 * DAY_S, step_s)
    )
    return await chart(HistoryReader(store, lambda: None), range_, row, {}, "EUR")


def total(found: HistoryChart) -> int:
    return sum(point.calls or 0 for point in found.points)


async def empty(store: HistoryStore) -> None:
    if isinstance(store, HistoryInRedis):
        await store._client.execute("FLUSHALL")


async def test_gateways_add_up_before_and_after_each_fold(open_store: Callable[[], HistoryStore]) -> None:
    clock, stores = Clock(), [open_store() for _ in range(2)]
    await empty(stores[0])
    keepers = [HistoryKeeper(store, f"p{at}", lambda _: 20, None, clock) for at, store in enumerate(stores)]
    for minute in range(60):
        for at, keeper in enumerate(keepers):
            count(keeper, f"tenant-{at}", at + 1)
        clock.now_s = HOUR_BEGUN_S + (minute + 1) * 60.0
        for keeper in keepers:
            await keeper.end_minute()
            await keeper.put_waiting()
        if minute == 30:
            before = await shown(stores[1])
            await asyncio.gather(*(keeper.fold() for keeper in keepers))
            assert await shown(stores[1]) == before
            assert total(before) == 3 * 31
    clock.now_s = HOUR_BEGUN_S + HOUR_S + 600.0
    assert total(await shown(stores[0])) == 180
    await asyncio.gather(*(keeper.fold() for keeper in keepers))
    assert await stores[0].open_minutes() == []

    for step_s in (60, 3600):
        assert total(await shown(stores[0], step_s=step_s)) == 180
        assert total(await shown(stores[0], row_id("tenant", "tenant-1"), step_s)) == 120
        assert total(await shown(stores[0], row_id("model", "m"), step_s)) == 180
    found = await shown(stores[0])
    assert [point.calls for point in found.points[:60]] == [3] * 60
    # No gateway counted in the hour after it.
    assert [point.calls for point in found.points[60:]] == [None] * 60
    assert found.points[0].cost == 3 * 10 * 20 / 1e9
    day = Range(HOUR_BEGUN_S // DAY_S * DAY_S, HOUR_BEGUN_S // DAY_S * DAY_S + 2 * DAY_S, 3600)
    for metric in ("calls", "p95"):
        listed = await top(
            HistoryReader(stores[0], lambda: None),
            day,
            "tenant",
            metric,
            1,
            await stores[0].names(),
            None,  # type: ignore[arg-type]
        )
        assert listed.others == 1
        assert (listed.data[0].name, listed.data[0].calls) in {("tenant-1", 120), ("tenant-0", 60)}
    assert listed.others_total is None
    for store in stores:
        await store.aclose()


async def test_a_part_is_counted_once_however_often_it_is_put(open_store: Callable[[], HistoryStore]) -> None:
    clock, store = Clock(), open_store()
    await empty(store)
    keeper = HistoryKeeper(store, "p", lambda _: 0, None, clock)
    count(keeper, "acme", 5)
    clock.now_s += 60
    await keeper.end_minute()
    (part,) = keeper._waiting
    for _ in range(2):
        await store.put(part)
    assert total(await shown(store)) == 5
    clock.now_s = HOUR_BEGUN_S + HOUR_S + 600.0
    await keeper.fold()
    await store.put(part)
    await keeper.put_waiting()
    await keeper.fold()
    assert total(await shown(store)) == 5
    await store.aclose()


async def test_a_clock_that_is_set_back_loses_no_call(open_store: Callable[[], HistoryStore]) -> None:
    clock, store = Clock(), open_store()
    await empty(store)
    keeper = HistoryKeeper(store, "p", lambda _: 0, None, clock)
    for _ in range(3):
        count(keeper, "acme", 2)
        clock.now_s = float(HOUR_BEGUN_S)
        await keeper.end_minute()
    await keeper.put_waiting()
    found = await shown(store)
    assert found.points[0].calls == 6
    await store.aclose()


async def test_two_folds_at_a_time_are_one(open_store: Callable[[], HistoryStore]) -> None:
    clock, stores = Clock(), [open_store() for _ in range(2)]
    await empty(stores[0])
    keepers = [HistoryKeeper(store, f"p{at}", lambda _: 0, None, clock) for at, store in enumerate(stores)]
    for keeper in keepers:
        count(keeper, "acme", 7)
        await keeper.end_minute()
        await keeper.put_waiting()
    clock.now_s = HOUR_BEGUN_S + HOUR_S + 600.0
    minutes = await stores[0].open_minutes()
    # Both are chosen, as after a lease that ran out.
    await asyncio.gather(*(keeper._fold_hour(HOUR_BEGUN_S, minutes) for keeper in keepers))
    assert total(await shown(stores[1])) == 14
    for store in stores:
        await store.aclose()


async def test_an_emptied_redis_loses_what_was_there_only(own_redis: RedisServer) -> None:
    clock, store = Clock(), HistoryInRedis(RedisClient(own_redis.url, PATIENCE_S))
    keeper = HistoryKeeper(store, "p", lambda _: 0, None, clock)
    count(keeper, "acme", 5)
    clock.now_s += 60
    await keeper.end_minute()
    await keeper.put_waiting()
    await empty(store)
    count(keeper, "acme", 3)
    clock.now_s += 60
    await keeper.end_minute()
    await keeper.put_waiting()
    assert [point.calls for point in (await shown(store)).points[:3]] == [None, 3, None]
    clock.now_s = HOUR_BEGUN_S + HOUR_S + 600.0
    await keeper.fold()
    assert total(await shown(store)) == 3
    await store.aclose()


async def test_a_redis_that_is_away_delays_parts_and_nothing_else(own_redis: RedisServer) -> None:
    clock, store = Clock(), HistoryInRedis(RedisClient(own_redis.url, 0.2))
    keeper = HistoryKeeper(store, "p", lambda _: 0, None, clock)
    own_redis.freeze()
    for _ in range(WAITING_MAX + 5):
        count(keeper, "acme", 1)
        clock.now_s += 60
        await keeper.end_minute()
    await keeper.put_waiting()
    await keeper.fold()
    with pytest.raises(StoreUnavailable):
        await shown(store)
    own_redis.thaw()
    deadline_s = time.monotonic() + PATIENCE_S
    while keeper._waiting and time.monotonic() < deadline_s:
        await keeper.put_waiting()
    # Parts of an hour wait at most.
    assert total(await shown(store)) == WAITING_MAX
    await store.aclose()


async def test_names_are_stored_of_rows_of_the_part_and_in_batches(
    own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, client = list[int](), RedisClient(own_redis.url, PATIENCE_S)
    run_script = client.run_script

    async def noted(script: Any, keys: Any, argument: bytes) -> Any:
        if script is PUT_NAMES:
            sizes.append(len(msgspec.msgpack.decode(argument)["names"]))
        return await run_script(script, keys, argument)

    monkeypatch.setattr(client, "run_script", noted)
    store = HistoryInRedis(client)
    keeper = HistoryKeeper(store, "p", lambda _: 0, None, Clock())
    for at in range(PART_TENANTS_MAX + 2000):
        count(keeper, f"tenant-{at}", 1 + (at < PART_TENANTS_MAX))
    await keeper.end_minute()
    await keeper.put_waiting()
    names = await store.names()
    assert set(names.values()) == {"m", *(f"tenant-{at}" for at in range(PART_TENANTS_MAX))}
    assert set(keeper.names.values()) == set(names.values())
    assert max(sizes) == NAMES_PER_PUT
    assert sum(sizes) == PART_TENANTS_MAX + 1
    await store.aclose()


class Failing(HistoryInSqlite):
    """Store in memory that fails at some minutes, as a fault of the gateway would have it."""

    def __init__(self, failures: int) -> None:
        super().__init__(None)
        self.failures = failures

    async def put(self, part: Part) -> None:
        if self.failures:
            self.failures -= 1
            raise LookupError("a fault")
        await super().put(part)


async def test_a_fault_ends_one_minute_and_not_the_keeper(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(keeper_module, "MINUTE_S", 0.05)
    store = Failing(failures=1)
    keeper = HistoryKeeper(store, "p", lambda _: 0)
    count(keeper, "acme", 1)
    running = asyncio.create_task(keeper.run())
    async with asyncio.timeout(PATIENCE_S):
        while not await store.open_minutes():
            count(keeper, "acme", 1)
            await asyncio.sleep(0.01)
    assert not running.done()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    (record,) = [each for each in caplog.records if each.levelname == "ERROR"]
    assert "a minute of the history has failed" in record.message
    assert record.exc_info is not None


async def test_all_keys_have_one_hash_tag_and_expire(own_redis: RedisServer) -> None:
    clock, store = Clock(), HistoryInRedis(RedisClient(own_redis.url, PATIENCE_S))
    keepers = [HistoryKeeper(store, name, lambda _: 0, None, clock) for name in ("p", "q")]
    for keeper in keepers:
        count(keeper, "acme", 5)
        await keeper.end_minute()
        await keeper.put_waiting()
    await store.put_spans(HOUR_BEGUN_S // DAY_S, "p", b"spans")
    clock.now_s += HOUR_S + 600
    await keepers[0].fold()
    client = RedisClient(own_redis.url, PATIENCE_S)
    keys = [key.decode() for key in await client.execute("KEYS", "*")]
    assert len(keys) >= 6
    for key in keys:
        assert key.startswith(PREFIX)
        assert await client.execute("TTL", key) > 0, key
    await client.aclose()
    await store.aclose()


CHILD = """
import asyncio, sys, time
from pathlib import Path
from gateway.events import CallFinished
from gateway.history import keeper as keeper_module
from gateway.history.folding import PART_TENANTS_MAX
from gateway.history.keeper import HistoryKeeper
from gateway.history.sqlite_store import HistoryInSqlite

async def main():
    now = [float(sys.argv[2])]
    keeper = HistoryKeeper(HistoryInSqlite(Path(sys.argv[1])), "child", lambda _: 0, None, lambda: now[0])
    for minute in range(10_000):
        keeper.counter.observe(CallFinished("r", "POST", "/", 200, "ok", 0.1, tenant="acme", model="m"))
        now[0] += 60 if minute < 59 else 0
        await keeper.end_minute()
        await keeper.put_waiting()
        print(minute + 1, flush=True)

asyncio.run(main())
"""


async def test_a_file_survives_a_kill_and_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "state" / "history.sqlite"
    child = subprocess.Popen(  # noqa: ASYNC220 - its output is read until the kill
        [sys.executable, "-c", CHILD, str(path), str(HOUR_BEGUN_S)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    for line in child.stdout:
        if int(line) == 20:
            os.kill(child.pid, signal.SIGKILL)
            break
    written = [20, *map(int, child.stdout.read().split())][-1]
    child.wait(PATIENCE_S)
    child.stdout.close()

    store = HistoryInSqlite(path)
    # The one that was being written when the kill came is there or not.
    assert written <= total(await shown(store)) <= written + 1
    assert store.kept == "state_dir"
    assert path.stat().st_mode & 0o077 == 0
    await store.aclose()


@pytest.mark.parametrize("kept_bytes", [0, 4096])
async def test_a_damaged_file_is_put_aside(
    tmp_path: Path, kept_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "history.sqlite"
    store = HistoryInSqlite(path)
    assert await store.open_minutes() == []
    await store.aclose()
    path.write_bytes(path.read_bytes()[:kept_bytes] + b"this is no database" * 4000)
    assert not caplog.records

    store = HistoryInSqlite(path)
    assert await store.open_minutes() == []
    await store.aclose()
    assert path.with_suffix(".unreadable").exists()
    assert f"{path} is unreadable" in caplog.text

    broken = HistoryInSqlite(tmp_path / "history.unreadable" / "history.sqlite")
    with pytest.raises(StoreUnavailable):
        await broken.open_minutes()
    await broken.aclose()


async def test_expired_rows_leave_the_file(tmp_path: Path) -> None:
    store = HistoryInSqlite(tmp_path / "history.sqlite")
    old = names_periods(time.time())[0] - 10
    database = await store._file.run(lambda database: database)
    database.execute("INSERT INTO parts VALUES (1, 'old', x'00', 1)")
    database.execute("INSERT INTO chunks VALUES ('old', x'00', 1)")
    database.execute("INSERT INTO names VALUES (?, 'f', 'old')", (old,))
    database.execute("INSERT INTO spans VALUES (1, 'old', x'00')")
    await store.put(Part(int(time.time()) // 60, "new", b"x"))
    for table in ("chunks", "names", "spans"):
        assert await store._file.rows(f"SELECT * FROM {table}") == []
    assert [name for (name,) in await store._file.rows("SELECT name FROM parts")] == ["new"]
    await store.aclose()
