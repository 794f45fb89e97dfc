"""The table of files and jobs, and the queue of chunks: one contract, in SQLite and in Redis."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from gateway.batches import redis_store, sqlite_store
from gateway.batches.records import ChunkResult, Counts
from gateway.batches.redis_store import RedisJobStore
from gateway.batches.sqlite_store import SqliteJobStore
from gateway.batches.store import (
    BoundExceeded,
    Bounds,
    JobStore,
    Page,
    QueueState,
    Row,
)
from gateway.store.errors import StoreUnavailable
from gateway.store.redis_client import RedisClient
from gateway.store.sqlite_file import SqliteFile
from tests.quotas.redis_server import RedisServer
from tests.waiting import PATIENCE_S

RESULT = ChunkResult("attempt", Counts(3, 1, 20, 2), {"out": 10, "err": 5})


def row(id_: str, at_ms: int, tenant: str = "acme", **fields: object) -> Row:
    kind = "batch" if id_.startswith("batch") else "file"
    settings: dict[str, object] = {"bytes": 0, "is_shown": True, "is_active": kind == "batch", "data": "{}"}
    return Row(kind, id_, tenant, at_ms, **(settings | fields))  # type: ignore[arg-type]


@pytest.fixture(params=["sqlite", "redis"])
async def open_store(
    request: pytest.FixtureRequest, redis: RedisServer, tmp_path: Path
) -> AsyncIterator[Callable[[], JobStore]]:
    """Return a function that opens the store, as another process would."""
    stores: list[JobStore] = []
    if request.param == "redis":
        client = RedisClient(redis.url, 2)
        await client.execute("FLUSHALL")
        await client.aclose()

    def open_one() -> JobStore:
        path = tmp_path / "jobs.sqlite"
        store = RedisJobStore(RedisClient(redis.url, 2)) if request.param == "redis" else SqliteJobStore(path)
        stores.append(store)
        return store

    yield open_one
    for store in stores:
        await store.aclose()


@pytest.fixture
def store(open_store: Callable[[], JobStore]) -> JobStore:
    return open_store()


@pytest.fixture
def short_lease(monkeypatch: pytest.MonkeyPatch) -> float:
    for module in (redis_store, sqlite_store):
        monkeypatch.setattr(module, "LEASE_S", 0.05)
    return 0.05


async def claimed(store: JobStore, owner: str) -> int:
    """Return the next chunk of a batch once there is one."""
    async with asyncio.timeout(PATIENCE_S):
        while (chunk := await store.claim("batch_1", owner)) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    return chunk


async def test_keeps_rows_and_replaces_them(store: JobStore) -> None:
    await store.put(row("file-1", 1, bytes=10, data='{"a": 1}'))
    await store.put(row("file-1", 1, bytes=30, data='{"a": 2}'))

    assert await store.get("file-1") == row("file-1", 1, bytes=30, data='{"a": 2}')
    assert await store.get("file-2") is None
    assert await store.used_bytes() == 30
    await store.remove("file-1")
    await store.remove("file-1")
    assert await store.get("file-1") is None
    assert await store.used_bytes() == 0


async def test_lists_pages_of_a_tenant_in_both_orders(store: JobStore) -> None:
    for number in range(7):
        await store.put(row(f"file-{number}", number // 2))
    await store.put(row("file-other", 3, "other"))
    await store.put(row("file-hidden", 3, is_shown=False))
    await store.put(row("batch_1", 3))

    newest = [item.id for item in await store.rows(Page("file", "acme", 3))]
    then = [item.id for item in await store.rows(Page("file", "acme", 9, newest[-1]))]
    oldest = [item.id for item in await store.rows(Page("file", "acme", 9, newest_first=False))]

    assert newest + then == [f"file-{number}" for number in range(6, -1, -1)]
    assert oldest == [f"file-{number}" for number in range(7)]
    assert len(await store.rows(Page("file", None, 99))) == 8
    assert await store.rows(Page("file", "acme", 9, "file-unknown")) == []


async def test_bounds_the_bytes_of_a_tenant_and_of_all(store: JobStore) -> None:
    bounds = Bounds(tenant=100, total=150)
    await store.put(row("file-1", 1, bytes=60), bounds)
    await store.put(row("file-1", 1, bytes=90), bounds)
    with pytest.raises(BoundExceeded, match="tenant"):
        await store.put(row("file-2", 1, bytes=11), bounds)
    with pytest.raises(BoundExceeded, match="total"):
        await store.put(row("file-3", 1, "other", bytes=61), bounds)
    await store.put(row("file-3", 1, "other", bytes=60), bounds)
    await store.remove("file-1")
    await store.put(row("file-2", 1, bytes=90), bounds)

    assert await store.used_bytes() == 150
    assert await store.get("file-4") is None


async def test_bounds_the_rows_of_a_tenant(store: JobStore) -> None:
    bounds = Bounds(tenant=100, total=150, shown=3, active=2)

    async def refusal(new: Row) -> str:
        found: set[str] = set()
        for is_trial in (True, False):
            try:
                await store.put(new, bounds, is_trial=is_trial)
            except BoundExceeded as error:
                found.add(error.bound)
            else:
                found.add("none")
        (only,) = found
        return only

    assert await refusal(row("batch_1", 1, bytes=10)) == "none"
    assert await refusal(row("batch_2", 1, bytes=10)) == "none"
    assert await refusal(row("batch_3", 1, bytes=10)) == "active"
    await store.put(row("batch_1", 1, bytes=10, is_active=False))
    assert await refusal(row("batch_3", 1, bytes=81)) == "tenant"
    assert await refusal(row("batch_3", 1, bytes=10)) == "none"
    assert [item.id for item in await store.active("acme")] == ["batch_2", "batch_3"]
    await store.put(row("batch_2", 1, bytes=10, is_active=False))
    assert await refusal(row("batch_4", 1)) == "shown"
    # Neither a row that is there, nor those of others and of another kind.
    assert await refusal(row("batch_2", 1, bytes=12)) == "none"
    assert await refusal(row("batch_5", 1, "other", bytes=10)) == "none"
    assert await refusal(row("file-1", 1)) == "none"
    await store.remove("batch_2")
    assert await refusal(row("batch_4", 1)) == "none"

    assert await store.get("batch_6") is None
    assert await store.used_bytes() == 30
    assert [item.id for item in await store.active("other")] == ["batch_5"]


async def test_a_row_counts_once_it_is_shown(store: JobStore) -> None:
    bounds = Bounds(tenant=100, total=150, shown=2)
    for number in range(3):
        await store.put(row(f"file-{number}", 1, bytes=20, is_shown=False), bounds)
    for number in range(2):
        await store.put(row(f"file-{number}", 1, bytes=10), bounds)

    with pytest.raises(BoundExceeded, match="shown"):
        await store.put(row("file-2", 1, bytes=10), bounds)
    with pytest.raises(BoundExceeded, match="shown"):
        await store.put(row("file-3", 1, is_shown=False), bounds)
    await store.put(row("file-1", 1, bytes=12), bounds)
    assert [item.id for item in await store.rows(Page("file", "acme", 9))] == ["file-1", "file-0"]
    assert await store.used_bytes() == 10 + 12 + 20


async def test_a_trial_changes_nothing(store: JobStore) -> None:
    await store.put(row("batch_1", 1, bytes=9), Bounds(9, 9, 1, 1), is_trial=True)

    assert await store.get("batch_1") is None
    assert await store.used_bytes() == 0
    assert await store.active("acme") == []
    assert await store.rows(Page("batch", "acme", 9)) == []


async def test_a_page_ends_with_its_bytes(store: JobStore) -> None:
    for number in range(50):
        await store.put(row(f"file-{number:02}", number, data='"\U0001f600"'))

    page = Page("file", "acme", 50, newest_first=False, data_bytes=6 * 40)
    found = [item.id for item in await store.rows(page)]

    assert found == [f"file-{number:02}" for number in range(41)]


async def test_knows_active_jobs_and_unfinished_uploads(store: JobStore) -> None:
    await store.put(row("batch_2", 2))
    await store.put(row("batch_1", 1))
    await store.put(row("batch_3", 3))
    await store.put(row("batch_2", 2, is_active=False))
    await store.put(row("file-1", 5, is_shown=False))
    await store.put(row("file-2", 50, is_shown=False))
    await store.put(row("chunk:batch_1:0", 1, is_shown=False))

    assert [item.id for item in await store.active()] == ["batch_1", "batch_3"]
    assert await store.unfinished(20) == ["file-1"]
    await store.put(row("file-1", 5))
    assert await store.unfinished(20) == []


async def test_gives_each_chunk_to_one_owner(open_store: Callable[[], JobStore]) -> None:
    stores = [open_store() for _ in range(3)]
    await stores[0].enqueue("batch_1", range(30))
    await stores[0].enqueue("batch_2", [0])

    async def claim_all(number: int) -> list[int]:
        found = []
        while (chunk := await stores[number].claim("batch_1", f"owner-{number}")) is not None:
            found.append(chunk)
        return found

    claimed = await asyncio.gather(*map(claim_all, range(3)))

    assert sorted(chunk for chunks in claimed for chunk in chunks) == list(range(30))
    assert (await stores[1].queue_of("batch_1")).open == 30
    for number, chunks in enumerate(claimed):
        for chunk in chunks:
            await stores[number].finish("batch_1", chunk, RESULT)
    assert await stores[1].queue_of("batch_1") == QueueState(True, 0, 30, False)
    assert await stores[2].progress("batch_1") == dict.fromkeys(range(30), RESULT)
    await stores[0].drop("batch_1")
    assert await stores[1].queue_of("batch_1") == QueueState(False, 0, 0, False)
    assert await stores[1].progress("batch_1") == {}
    assert await stores[1].claim("batch_2", "owner") == 0


async def test_passes_on_the_chunk_of_an_owner_that_is_gone(
    open_store: Callable[[], JobStore], short_lease: float
) -> None:
    dead, alive = open_store(), open_store()
    await dead.enqueue("batch_1", [0, 1])
    assert await dead.claim("batch_1", "dead") == 0
    assert await alive.claim("batch_1", "alive") == 1
    # A live owner renews its own chunk, and gets that of the other after its lease.
    async with asyncio.timeout(PATIENCE_S):
        while (chunk := await alive.claim("batch_1", "alive")) is None:
            await alive.renew("batch_1", [1], "alive")
            await asyncio.sleep(0.005)

    assert chunk == 0
    # The first result counts, whoever stores it.
    await alive.finish("batch_1", 0, RESULT)
    await dead.finish("batch_1", 0, RESULT)
    assert await alive.progress("batch_1") == {0: RESULT}


async def test_passes_on_a_released_chunk_at_once(open_store: Callable[[], JobStore]) -> None:
    first, second = open_store(), open_store()
    await first.enqueue("batch_1", [4])
    assert await first.claim("batch_1", "first") == 4
    assert await second.claim("batch_1", "second") is None
    await first.release("batch_1", 4, "first")

    assert await second.claim("batch_1", "second") == 4


async def test_a_finished_chunk_is_not_claimed_again(store: JobStore) -> None:
    await store.enqueue("batch_1", [-1, 0])
    assert await store.claim("batch_1", "owner") == -1
    await store.finish("batch_1", -1, None)
    assert await store.claim("batch_1", "owner") == 0
    await store.finish("batch_1", 0, RESULT)

    assert await store.claim("batch_1", "owner") is None
    assert await store.progress("batch_1") == {0: RESULT}


async def test_beats_rise_and_an_identity_is_agreed_on(open_store: Callable[[], JobStore]) -> None:
    first, second = open_store(), open_store()
    before = await first.beat()

    assert await first.beat() > before
    assert await first.agree("one") == "one"
    other = await second.agree("two")
    # Gateways of one Redis must share their objects; a single gateway's table follows them.
    assert other == ("one" if isinstance(second, RedisJobStore) else "two")


async def test_redis_away_is_reported(own_redis: RedisServer) -> None:
    store = RedisJobStore(RedisClient(own_redis.url, 0.5))
    await store.beat()
    own_redis.stop()
    for work in (
        store.beat(),
        store.get("file-1"),
        store.put(row("file-1", 1)),
        store.claim("batch_1", "o"),
    ):
        with pytest.raises(StoreUnavailable):
            await work
    await store.aclose()


async def test_a_chunk_that_its_owner_lost_is_claimed_again_by_it(
    store: JobStore, short_lease: float
) -> None:
    await store.enqueue("batch_1", [0])
    assert await store.claim("batch_1", "owner") == 0
    assert await claimed(store, "owner") == 0


async def test_a_released_chunk_rests_until_its_time_or_until_it_is_released_again(
    open_store: Callable[[], JobStore],
) -> None:
    first, second = open_store(), open_store()
    await first.enqueue("batch_1", [0])
    assert await first.claim("batch_1", "first") == 0
    await first.release("batch_1", 0, "first", 10.0)
    assert await second.claim("batch_1", "second") is None
    assert await first.claim("batch_1", "first") is None
    await first.release("batch_1", 0, "first")
    assert await second.claim("batch_1", "second") == 0
    await second.release("batch_1", 0, "second", 0.02)
    assert await claimed(first, "first") == 0


async def test_a_job_is_idle_while_no_owner_has_a_chunk_of_it(store: JobStore, short_lease: float) -> None:
    assert not (await store.queue_of("batch_1")).is_idle
    await store.enqueue("batch_1", [0, 1])
    assert (await store.queue_of("batch_1")).is_idle
    await store.claim("batch_1", "owner")
    assert not (await store.queue_of("batch_1")).is_idle
    await store.release("batch_1", 0, "owner")
    assert (await store.queue_of("batch_1")).is_idle
    await store.claim("batch_1", "owner")
    # Its owner was killed.
    await asyncio.sleep(2 * short_lease)
    assert (await store.queue_of("batch_1")).is_idle
    for _ in range(2):
        chunk = await store.claim("batch_1", "owner")
        assert chunk is not None
        await store.finish("batch_1", chunk, RESULT)
    assert not (await store.queue_of("batch_1")).is_idle


async def test_keeps_the_reason_for_which_a_job_waits_for_a_time(store: JobStore) -> None:
    assert await store.wait_of("batch_1") is None
    await store.put_wait("batch_2", "short", 0.001)
    await store.put_wait("batch_1", "the first", 60)
    await store.put_wait("batch_1", "the second: ’", 60)

    await asyncio.sleep(0.01)
    assert [await store.wait_of(f"batch_{number}") for number in (1, 2, 3)] == ["the second: ’", None, None]


async def test_changes_at_the_same_time_do_not_disturb_each_other(tmp_path: Path) -> None:
    store = SqliteJobStore(tmp_path / "jobs.sqlite")

    async def change(job: str) -> None:
        for _ in range(400):
            await store.enqueue(job, [0, 1])
            await store.renew(job, [0, 1], "me")
            assert await store.claim(job, "me") == 0
            assert (await store.queue_of(job)).is_known
            await store.put_wait(job, "queue", 5)
            await store.drop(job)

    await asyncio.gather(*(change(f"batch_{number}") for number in range(12)))
    await store.aclose()


@pytest.mark.parametrize("kept_bytes", [0, 4096])
async def test_a_damaged_file_is_put_aside(
    tmp_path: Path, kept_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "jobs.sqlite"
    store = SqliteJobStore(path)
    assert await store.unfinished(0) == []
    await store.aclose()
    path.write_bytes(path.read_bytes()[:kept_bytes] + b"this is no database" * 4000)
    assert not caplog.records

    store = SqliteJobStore(path)
    assert await store.unfinished(0) == []
    await store.aclose()
    assert path.with_suffix(".unreadable").exists()
    assert f"{path} is unreadable" in caplog.text

    broken = SqliteJobStore(tmp_path / "jobs.unreadable" / "jobs.sqlite")
    with pytest.raises(StoreUnavailable, match=r"jobs\.sqlite cannot be used: File exists"):
        await broken.beat()
    await broken.aclose()


async def test_stores_that_open_a_damaged_file_together_share_its_successor(tmp_path: Path) -> None:
    path = tmp_path / "jobs.sqlite"
    first = SqliteFile(path, "CREATE TABLE IF NOT EXISTS texts (text)", 1, ())
    await first.change("INSERT INTO texts VALUES (?)", *((f"{i:0>1000}",) for i in range(20_000)))
    await first.aclose()
    content = path.read_bytes()
    # A page near the end, so that all find it while each still checks those before it.
    at = len(content) - 10 * 4096
    damaged = content[:at] + b"\xff" * 4096 + content[at + 4096 :]
    path.write_bytes(damaged)

    files = [SqliteFile(path, "CREATE TABLE IF NOT EXISTS texts (text)", 1, ()) for _ in range(4)]
    await asyncio.gather(*(file.change("INSERT INTO texts VALUES (?)", ("new",)) for file in files))
    found = [await file.rows("SELECT text FROM texts") for file in files]
    for file in files:
        await file.aclose()
    assert found == [[("new",)] * 4] * 4
    assert path.with_suffix(".unreadable").read_bytes() == damaged
