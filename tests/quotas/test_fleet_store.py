"""Gateways that share a Redis: records that expire, and questions with bounds in number, bytes and time."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress

import msgspec
import pytest

from gateway.config.identity import Identity
from gateway.errors import Overloaded
from gateway.fleet import fleet as fleet_module
from gateway.fleet.fleet import Fleet
from gateway.fleet.members import Member
from gateway.fleet.store import PREFIX, QUESTIONS_MAX, TENANTS_QUESTIONS_MAX, CallFilter, FleetStore, Question
from gateway.store.redis_client import RedisClient
from gateway.telemetry.history import RecentCall
from tests.quotas.redis_server import RedisServer
from tests.waiting import PATIENCE_S

CALL = RecentCall(1.0, "r", "/v1/embeddings", 200, "ok", 0.1, "acme", "k", "m", "embed", 1, 3, {})


def calls(name: str, count: int) -> list[RecentCall]:
    """Return calls, the newest first; every second one failed."""
    return [
        msgspec.structs.replace(
            CALL,
            at_s=float(count - number),
            request_id=f"{name}-{number}",
            outcome="overloaded" if number % 2 else "ok",
        )
        for number in range(count)
    ]


class Stand:
    """Gateways on one Redis, each with its task."""

    def __init__(self, redis: RedisServer) -> None:
        self.client = RedisClient(redis.url, PATIENCE_S)
        self.store = FleetStore(self.client)
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def join(self, name: str, recent: Sequence[RecentCall] = (), *, runs: bool = True) -> Fleet:
        record = Member(Identity(name, name, 1, "0.0.0.0:8080", 1.0), "1.0", 1)
        joined = Fleet(record.gateway, self.store, lambda: record, lambda: recent)
        if runs:
            self.tasks[name] = asyncio.create_task(joined.run())
        return joined

    async def stop(self, name: str) -> None:
        task = self.tasks.pop(name)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    async def names(self) -> set[str]:
        return {each.member.gateway.id for each in await self.store.members()}

    async def wait_for(self, *names: str) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while await self.names() != set(names):  # noqa: ASYNC110 - another task changes it in Redis
                await asyncio.sleep(0.02)


@pytest.fixture
async def stand(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stand]:
    redis.command("FLUSHALL")
    monkeypatch.setattr(fleet_module, "BEAT_EVERY_S", 0.1)
    made = Stand(redis)
    yield made
    for name in list(made.tasks):
        await made.stop(name)
    await made.client.aclose()


async def test_calls_of_all_are_asked_for_once_and_leave_nothing(stand: Stand, redis: RedisServer) -> None:
    first, _ = stand.join("a", calls("a", 3)), stand.join("b", calls("b", 2))
    await stand.wait_for("a", "b")
    found = await first.calls(CallFilter())
    failed = await first.calls(CallFilter(failed=True))

    assert ["a-0", "a-1", "b-0", "a-2", "b-1"] == [call.request_id for call in found.calls]
    assert {"a:8080", "b:8080"} == {call.gateway for call in found.calls}
    assert ((), "") == (found.missing, found.problem)
    assert {"a-1", "b-1"} == {call.request_id for call in failed.calls}
    keys = redis.command("KEYS", f"{PREFIX}*")
    assert "answers" not in keys

    await stand.stop("b")
    # A gateway that stops is gone at once.
    await stand.wait_for("a")


async def test_an_answer_has_a_bound_in_bytes_and_keeps_the_newest(stand: Stand) -> None:
    stand.join("b", calls("b", 200))
    await stand.wait_for("b")
    question = Question("q", "a", CallFilter(), 2_000)
    assert await stand.store.ask(question)
    async with asyncio.timeout(PATIENCE_S):
        while not await stand.store.count_answers(question):  # noqa: ASYNC110 - another task answers
            await asyncio.sleep(0.02)
    answer = (await stand.store.take_answers(question))["b"]
    ids = [call["request_id"] for call in msgspec.json.decode(answer)]

    assert 1_500 < len(answer) <= 2_000
    assert [f"b-{number}" for number in range(len(ids))] == ids


async def test_a_member_that_does_not_answer_is_named(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "ANSWER_PATIENCE_S", 0.5)
    asking, silent = stand.join("a", calls("a", 1)), stand.join("c", runs=False)
    await stand.store.beat(Member(silent.identity, "1.0", 1))
    await stand.wait_for("a", "c")
    found = await asking.calls(CallFilter())

    assert (["a-0"], ("c:8080",)) == ([call.request_id for call in found.calls], found.missing)


async def test_open_questions_have_a_bound(stand: Stand) -> None:
    asking = stand.join("a")
    stand.join("b")
    await stand.wait_for("a", "b")
    for number in range(QUESTIONS_MAX):
        assert await stand.store.ask(Question(str(number), "z", CallFilter(), 100))
    with pytest.raises(Overloaded):
        await asking.calls(CallFilter())


async def test_one_tenant_has_one_question_and_tenants_leave_room_for_operators(stand: Stand) -> None:
    def question(number: int, asker: str = "") -> Question:
        return Question(str(number), "z", CallFilter(), 100, asker)

    assert await stand.store.ask(question(0, "acme"))
    assert not await stand.store.ask(question(1, "acme"))
    for number in range(1, TENANTS_QUESTIONS_MAX):
        assert await stand.store.ask(question(number, f"other-{number}"))
    assert not await stand.store.ask(question(8, "one-more"))
    assert await stand.store.ask(question(9))


async def test_a_tenant_waits_for_the_question_of_another(stand: Stand) -> None:
    asking, _ = stand.join("a"), stand.join("b", calls("b", 1))
    await stand.wait_for("a", "b")
    open_ = [Question(str(number), "z", CallFilter(), 100, f"t-{number}") for number in range(3)]
    for question in open_:
        assert await stand.store.ask(question)
    waiting = asyncio.create_task(asking.calls(CallFilter(), asker="acme"))
    await asyncio.sleep(0)
    await stand.store.take_answers(open_[0])
    async with asyncio.timeout(PATIENCE_S):
        assert ["b-0"] == [call.request_id for call in (await waiting).calls]


async def test_records_of_another_release_are_left_out(stand: Stand, redis: RedisServer) -> None:
    own = stand.join("a")
    await stand.wait_for("a")
    redis.command("ZADD", f"{PREFIX}members", "99999999999", "z")
    redis.command("SET", f"{PREFIX}member:z", '{"later": {}}')

    assert ["a"] == [each.id for each in (await own.report()).members]


async def test_an_outage_is_a_problem_and_ends_no_renewal(own_redis: RedisServer) -> None:
    stand = Stand(own_redis)
    own = stand.join("a", calls("a", 1))
    await stand.wait_for("a")
    own_redis.kill()
    report, found = await own.report(), await own.calls(CallFilter())

    assert (["a"], True) == ([each.id for each in report.members], "Redis is unavailable" in report.problem)
    assert (["a-0"], True) == (
        [call.request_id for call in found.calls],
        "Redis is unavailable" in found.problem,
    )
    own_redis.restart()
    own.renew()
    await stand.wait_for("a")
    await stand.stop("a")
    await stand.client.aclose()
