"""Records of changes in Redis: written with the change, bounded, and copied after an outage."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from gateway.audit.file import WAITING_NAME
from gateway.audit.query import AuditQuery
from gateway.audit.records import Actor, AuditRecord, ChangedField, new_record, time_text
from gateway.audit.redis_store import AUDIT, AuditInRedis
from gateway.audit.trail import AuditTrail
from gateway.config.schema import AuditSettings, TenantConfig
from gateway.declared.additions import Additions, Drain, Put
from gateway.declared.composition import AdditionsState
from gateway.declared.store import AdditionsInRedis
from gateway.events import AuditRecorded
from gateway.store.errors import StoreUnavailable
from gateway.store.redis_client import RedisClient
from gateway.tenants.create_key import CannotRotate, make_key, new_secret, succeed
from gateway.tenants.keyring import StoredKey, key_digest
from gateway.tenants.store import KEYS, KeyExists, TenantStore
from tests.quotas.redis_server import RedisServer, opened
from tests.unit.test_addition_settings import TEI, file
from tests.waiting import PATIENCE_S

# Keys and records at one moment.
BOTH = "return {redis.call('HKEYS', KEYS[1]), redis.call('ZRANGE', KEYS[2], 0, -1)}"
OPERATOR = Actor("ops", "key", "10.0.0.9", "req-1", "host:8080")


@pytest.fixture
async def audit(redis: RedisServer) -> AsyncIterator[AuditInRedis]:
    redis.command("FLUSHALL")
    client = RedisClient(redis.url, 5)
    yield AuditInRedis(client, AuditSettings())
    await client.aclose()


async def until(is_done: Callable[[], Awaitable[bool]]) -> None:
    """Wait until something is the case."""
    async with asyncio.timeout(PATIENCE_S):
        while not await is_done():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def records(audit: AuditInRedis) -> list[AuditRecord]:
    """Return all records, the oldest first."""
    return (await audit.page(AuditQuery(limit=1000))).data[::-1]


async def test_every_change_is_recorded_without_secrets(audit: AuditInRedis, redis: RedisServer) -> None:
    events: list[AuditRecorded] = []
    store = TenantStore(RedisClient(redis.url, 5), AuditSettings(), events.append)
    key = make_key("acme", "laptop", limits={"requests_per_day": 5}, created_by="ops")
    secret = new_secret("laptop-2")
    await store.put_tenant("acme", TenantConfig(), by=OPERATOR)
    await store.put_tenant("acme", TenantConfig(), by=OPERATOR)
    await store.put_tenant("acme", TenantConfig(limits={"tokens_per_day": 9}), by=OPERATOR)
    await store.create_key(key.stored, by=OPERATOR)
    await store.create_key(key.stored, by=OPERATOR)
    rotation = await store.rotate_key("laptop", lambda old: succeed(old, secret, 3600, "ops"), by=OPERATOR)
    await store.revoke("laptop", by=OPERATOR)
    await store.revoke("laptop", by=OPERATOR)
    await store.remove_tenant("acme", by=OPERATOR)
    await store.remove_tenant("acme", by=OPERATOR)
    await store.aclose()

    found = await records(audit)
    assert [
        ("create", "tenant/acme"),
        ("change", "tenant/acme"),
        ("create", "key/laptop"),
        ("rotate", "key/laptop"),
        ("create", "key/laptop-2"),
        ("revoke", "key/laptop"),
        ("remove", "tenant/acme"),
    ] == [(record.action, record.object) for record in found]
    assert [record.id for record in found] == [event.record for event in events]
    assert (ChangedField("limits.tokens_per_day", None, 9),) == found[1].changes
    assert (ChangedField("keys", ["laptop-2"]), ChangedField("limits.tokens_per_day", 9)) == found[-1].changes
    assert {"ops"} == {record.actor for record in found}
    assert rotation is not None
    assert ("laptop-2", None) == (rotation.after.successor, rotation.successor.expires_s)
    written = redis.command("ZRANGE", AUDIT, "0", "-1")
    for hidden in (key.text, secret[1], "sha256"):
        assert hidden not in written


async def test_a_successor_may_do_the_same_for_as_long(audit: AuditInRedis, redis: RedisServer) -> None:
    async with opened(redis) as store:
        old = StoredKey(
            "old",
            key_digest("old"),
            "acme",
            expires_s=4e9,
            scopes=("embed",),
            models=("bge",),
            limits={"requests_per_day": 5},
            created_s=3e9,
        )
        await store.create_key(old, by=OPERATOR)
        await store.create_key(StoredKey("taken", key_digest("taken"), "acme"), by=OPERATOR)
        with pytest.raises(KeyExists):
            await store.rotate_key("old", lambda key: succeed(key, ("taken", "x"), 60, "ops"), by=OPERATOR)
        assert old in await store.keys()
        rotation = await store.rotate_key(
            "old", lambda key: succeed(key, ("new", "x"), 60, "ops"), by=OPERATOR
        )
        assert rotation is not None
        new, ended = rotation.successor, rotation.after
        assert (old.tenant, old.scopes, old.models, old.limits) == (
            new.tenant,
            new.scopes,
            new.models,
            new.limits,
        )
        assert 1e9 == pytest.approx((new.expires_s or 0) - new.created_s)
        assert 60 == pytest.approx((ended.expires_s or 0) - new.created_s, abs=5)
        assert "ops" == new.created_by
        with pytest.raises(CannotRotate, match="rotate its successor 'new'"):
            await store.rotate_key("old", lambda key: succeed(key, ("newer", "x"), 60, "ops"), by=OPERATOR)
        assert await store.rotate_key("none", lambda key: (key, key), by=OPERATOR) is None
    [rotated] = [record for record in await records(audit) if record.action == "rotate"]
    assert {"expires", "successor"} == {change.field for change in rotated.changes}


async def test_revoking_a_key_that_was_lost_is_recorded_where_it_is_kept(
    audit: AuditInRedis, redis: RedisServer
) -> None:
    async with opened(redis) as store:
        assert not await store.revoke("unknown", by=OPERATOR)
        assert not await store.revoke("lost", by=OPERATOR, is_kept=True)
    assert [("revoke", "key/lost", ())] == [
        (record.action, record.object, record.changes) for record in await records(audit)
    ]


async def test_a_change_that_timed_out_has_its_record(own_redis: RedisServer) -> None:
    key = StoredKey("k", key_digest("secret"), "acme")
    async with opened(own_redis) as store:
        await store.create_key(key, by=OPERATOR)
        impatient = TenantStore(RedisClient(own_redis.url, 0.1))
        # Both have a connection, so that the command itself arrives.
        await impatient.keys()
        own_redis.freeze()
        with pytest.raises(StoreUnavailable):
            await impatient.revoke("k", by=OPERATOR)
        with pytest.raises(StoreUnavailable):
            await impatient.create_key(StoredKey("l", key_digest("another"), "acme"), by=OPERATOR)
        own_redis.thaw()

        async def is_done() -> bool:
            # At no time is a change there without its record, nor a record without its change.
            found = own_redis.command("EVAL", BOTH, "2", KEYS, AUDIT)
            assert ('"action":"revoke","object":"key/k"' in found) is ("$1\r\nk\r\n" not in found)
            assert ('"action":"create","object":"key/l"' in found) is ("$1\r\nl\r\n" in found)
            return ["l"] == [key.id for key in await store.keys()]

        await until(is_done)
        await impatient.aclose()


async def test_concurrent_changes_have_one_record_each(audit: AuditInRedis, redis: RedisServer) -> None:
    def heavier(settings: TenantConfig | None) -> TenantConfig:
        return TenantConfig(weight=1 + (settings or TenantConfig()).weight)

    async with opened(redis) as one, opened(redis) as two:
        await asyncio.gather(*(store.change_tenant("acme", heavier, by=OPERATOR) for store in (one, two) * 4))
    changes = [record.changes[0] for record in await records(audit)]
    assert [(weight, weight + 1) for weight in range(1, 9)] == sorted((c.was, c.now) for c in changes)


async def test_keeps_the_newest_records_within_number_and_age(redis: RedisServer) -> None:
    redis.command("FLUSHALL")
    client = RedisClient(redis.url, 5)
    audit = AuditInRedis(client, AuditSettings(records=3, keep_days=2))
    made = [new_record(OPERATOR, "change", f"tenant/{number}") for number in range(5)]
    old = msgspec.structs.replace(made[0], id="0" * 16, time=time_text(1e9))
    await audit.append([old, *made])

    assert 3 == len(await records(audit))
    assert 3 == int(redis.command("ZCARD", AUDIT)[1:])
    assert "tenant/4" in {record.object for record in await records(audit)}
    await client.aclose()


async def test_pages_of_equal_times_lose_nothing(audit: AuditInRedis) -> None:
    made = [new_record(OPERATOR, "change", f"tenant/{number}") for number in range(700)]
    same = [msgspec.structs.replace(record, time=made[0].time) for record in made]
    await audit.append(same)
    found: list[str] = []
    query = AuditQuery(limit=300)
    for expected in (300, 300, 100):
        page = await audit.page(query)
        assert expected == len(page.data)
        found += [record.id for record in page.data]
        query = AuditQuery(limit=300, cursor=page.next or "")
    assert sorted((record.id for record in made), reverse=True) == found


async def test_records_of_an_outage_are_copied_once(own_redis: RedisServer, tmp_path: Path) -> None:
    events: list[AuditRecorded] = []
    clients = [RedisClient(own_redis.url, 0.2) for _ in range(2)]
    trails = [AuditTrail(client, tmp_path, AuditSettings(), events.append) for client in clients]
    await trails[0].record(new_record(OPERATOR, "start", "instance/before"))
    own_redis.freeze()
    # This one may arrive all the same, once the server runs on.
    await trails[0].record(new_record(OPERATOR, "drain", "replica/one/http://a"))
    own_redis.kill()
    await trails[1].record(new_record(OPERATOR, "reload", "configuration"))
    waiting = (tmp_path / WAITING_NAME).read_text()
    assert ["drain", "reload"] == [json.loads(line)["action"] for line in waiting.splitlines()]
    with pytest.raises(StoreUnavailable):
        await trails[0].page(AuditQuery())
    own_redis.restart()
    running = [asyncio.create_task(trail.run()) for trail in trails]

    async def is_copied() -> bool:
        return not (tmp_path / WAITING_NAME).exists()

    await until(is_copied)
    page = await trails[0].page(AuditQuery())
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    assert ["reload", "drain"] == [record.action for record in page.data]
    assert ["start", "drain", "reload"] == [event.action for event in events]
    for trail in trails:
        await trail.aclose()


async def test_additions_and_drains_are_recorded_with_their_change(
    audit: AuditInRedis, redis: RedisServer
) -> None:
    store = AdditionsInRedis(RedisClient(redis.url, 5))
    state = AdditionsState(store, {})
    secret = {**TEI, "api_key": "Bearer written-out", "replicas": ["http://u:pass@b"]}
    edits = (
        Put("upstreams", "two", secret, OPERATOR),
        Put("upstreams", "two", TEI, OPERATOR),
        Drain("two", "http://b", is_drained=True, by=OPERATOR),
    )
    for edit in edits:
        wanted, record = await state.preview(file(), edit)
        assert await state.store(wanted, record) is not None
        # Another gateway was faster: neither the change nor its record is stored.
        assert await state.store(wanted, record) is None
    await store.replace(
        (await store.load()).version, Additions(), [new_record(OPERATOR, "remove", "upstream/two")]
    )
    await store.aclose()

    found = await records(audit)
    assert [
        ("create", "upstream/two"),
        ("change", "upstream/two"),
        ("drain", "replica/two/http://b"),
        ("remove", "upstream/two"),
    ] == [(record.action, record.object) for record in found]
    assert (ChangedField("drained", was=False, now=True),) == found[2].changes
    for hidden in ("written-out", "pass"):
        assert hidden not in redis.command("ZRANGE", AUDIT, "0", "-1")


async def test_noted_uses_are_no_change_and_end_with_the_key(audit: AuditInRedis, redis: RedisServer) -> None:
    async with opened(redis) as store:
        await store.put_tenant("acme", TenantConfig(), by=OPERATOR)
        for id_ in ("a", "b"):
            await store.create_key(StoredKey(id_, key_digest(id_), "acme"), by=OPERATOR)
        before = await store.look()
        await store.note_uses({"a": "2026-11-27", "gone": "2026-11-27"})
        await store.note_uses({"a": "2026-11-26", "b": "2026-11-28"})
        assert before.version == (await store.look()).version
        assert {"a": "2026-11-27", "b": "2026-11-28"} == await store.last_uses()
        await store.revoke("a", by=OPERATOR)
        assert {"b": "2026-11-28"} == await store.last_uses()
        await store.remove_tenant("acme", by=OPERATOR)
        assert {} == await store.last_uses()
    assert "0" == redis.command("HLEN", KEYS)[1:2]
