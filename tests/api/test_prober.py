"""Probes of replicas that hold work and return nothing, and the work of those that have stalled."""

import asyncio

import msgspec
import pytest

from backends.contract import Capabilities, Reply
from backends.contract.errors import BackendError, ReplicaFailed, ReplicaUnavailable
from gateway.events import ReplicaChanged
from gateway.routing import prober
from gateway.routing.health import USABLE, ReplicaEvent, State
from gateway.routing.pool import Pool
from gateway.routing.prober import ProbeIntervals, Prober
from gateway.routing.replica import BRIEF_MIN_S, STALL_MIN_S, BatchLoad, Replica
from tests.fakes.hooks import until
from tests.fakes.replicas import HeldReplica, Rig, assert_vectors, reply_to

# Checks all the time, and probes after 5 ms without a reply.
IMPATIENT = ProbeIntervals(0.001, 0.001, stall_timeout_s=0.005)


@pytest.fixture(autouse=True)
def short_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let probes time out quickly."""
    monkeypatch.setattr(prober, "PROBE_TIMEOUT_S", 0.005)


async def test_work_of_a_stalled_replica_moves_and_the_replica_rejoins_on_probation() -> None:
    rig = Rig(2)
    first, second = rig.call("first"), rig.call("second")
    await rig.sent("first")
    (await rig.sent("second", to=1)).succeed()
    watching = asyncio.create_task(Prober(rig.pool, rig.replicas[0], IMPATIENT, rig.clock).run())
    (await rig.sent("first", to=1)).succeed()

    assert_vectors(await first, "first")
    assert_vectors(await second, "second")
    assert rig.replicas[0].state is State.DOWN

    async def answers(texts: list[str]) -> Reply:
        return reply_to(texts)

    rig.replica.handler = answers
    await until(lambda: rig.replicas[0].state is State.PROBATION)
    for index in range(6):
        rig.backends[1].handler = answers
        await rig.call(f"more {index}")
    await until(lambda: rig.replicas[0].state is State.UP)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    await rig.assert_empty()


async def test_slow_replica_that_passes_a_probe_keeps_its_work() -> None:
    rig = Rig()
    probes = []

    async def doing(texts: list[str]) -> Reply:
        if texts == [prober.PROBE_TEXT]:
            probes.append(texts)
        else:
            await until(lambda: len(probes) > 2)
        return reply_to(texts)

    rig.replica.handler = doing
    watching = asyncio.create_task(Prober(rig.pool, rig.replicas[0], IMPATIENT, rig.clock).run())
    assert_vectors(await rig.call("slow"), "slow")
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)

    assert rig.replicas[0].state is State.UP
    assert ["ok"] == [attempt.outcome for attempt in rig.attempts]


async def test_patience_is_several_times_the_slowest_recent_batch() -> None:
    replica = Rig().replicas[0]
    assert replica.patience_s(30) == 30
    replica.record_success(BatchLoad(1, 10, ["acme"]), 0.02, 0.0, was_full=False)
    assert replica.patience_s(30) == STALL_MIN_S
    replica.add_batch(BatchLoad(32, 16_000, ["acme"]), 0.0)
    # No batch this large has completed here, therefore its duration is not known.
    assert replica.patience_s(30) == 30
    replica.record_success(BatchLoad(32, 16_000, ["acme"]), 2.0, 1.0, was_full=False)
    assert replica.patience_s(30) == 6
    for _ in range(10):
        replica.record_success(BatchLoad(1, 10, ["acme"]), 0.02, 1.0, was_full=False)
    # Small calls since then do not lower the estimate.
    assert replica.patience_s(30) == pytest.approx(6)
    assert not replica.is_silent(6.9, 30)
    assert replica.is_silent(7.1, 30)


async def test_brief_time_follows_the_slowest_batch_or_the_last_check() -> None:
    replica = Rig().replicas[0]
    assert replica.brief_s(30) == 30
    replica.record_check(0.02, 0.0)
    assert replica.brief_s(30) == BRIEF_MIN_S
    replica.add_batch(BatchLoad(32, 1_000, ["acme"]), 0.0)
    # A hundred times the tokens of a check.
    assert replica.brief_s(30) == pytest.approx(6)
    replica.record_success(BatchLoad(32, 1_000, ["acme"]), 0.5, 1.0, was_full=False)
    assert replica.brief_s(30) == 1.5
    # All work is slow here.
    replica.record_success(BatchLoad(32, 1_000, ["acme"]), 20.0, 1.0, was_full=False)
    assert replica.brief_s(30) == 30


@pytest.mark.parametrize(
    ("answer", "state"),
    [(ReplicaUnavailable("it loads"), State.JOINING), (ReplicaFailed("no number"), State.DOWN)],
    ids=["loads", "fails"],
)
async def test_an_engine_that_fails_its_first_check_is_down_with_the_reason(
    answer: BackendError, state: State
) -> None:
    events: list[object] = []
    replica = Replica("engine", HeldReplica())
    pool = Pool("up", [replica], "least_tokens", events.append)
    probes: list[float] = []

    async def describe(timeout_s: float) -> Capabilities:
        probes.append(timeout_s)
        raise answer

    replica.backend.describe = describe  # type: ignore[method-assign]
    intervals = ProbeIntervals(0.001, 0.001, awaits_first_join=True)
    clock = asyncio.get_running_loop().time
    watching = asyncio.create_task(Prober(pool, replica, intervals, clock).run())
    await until(lambda: len(probes) > 2)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)

    assert replica.state is state
    assert ["no number"] * (state is State.DOWN) == [
        event.reason for event in events if isinstance(event, ReplicaChanged)
    ]


async def test_a_vendor_is_sent_few_texts_of_our_own_in_a_day(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prober, "PAID_CHECKS_PER_DAY", 3)
    replica, checked = Replica("vendor", HeldReplica()), []
    pool = Pool("up", [replica], "least_tokens", lambda _: None)
    metered = msgspec.structs.replace(replica.backend.capabilities, metered=True)  # type: ignore[attr-defined]
    now_s = 0.0

    async def describe(_: float) -> Capabilities:
        return metered

    async def answer(texts: list[str]) -> Reply:
        checked.append(texts)
        return reply_to(texts)

    replica.backend.describe = describe  # type: ignore[method-assign]
    replica.backend.handler = answer  # type: ignore[attr-defined]
    watch = Prober(pool, replica, IMPATIENT, lambda: now_s)
    joins, texts = [], []
    for hour in range(40):
        now_s = hour * 3600.0
        if replica.state in USABLE:
            pool.transition(replica, ReplicaEvent.UNREACHED, "it is not reached")
        before = len(checked)
        joins.append(await watch._try_join())
        texts.append(len(checked) > before)

    # It joins each time; of those after a failure, few send it a text before callers do.
    assert [True] * 40 == joins
    assert 2 == sum(texts[:24])
    assert any(texts[24:])
