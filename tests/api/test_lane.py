"""Lane: joins waiting calls, computes identical work once, and answers every call despite failures."""

import asyncio
from collections.abc import Callable

import msgspec
import pytest

from backends.contract import Embed, Reply
from backends.contract.errors import (
    AttemptTimedOut,
    BackendError,
    ConnectionLost,
    InvalidWork,
    ReplicaFailed,
    ReplicaOverloaded,
    ReplicaUnavailable,
)
from gateway.errors import Overloaded
from gateway.lane.isolation import SUSPECT_S
from gateway.lane.measures import SAMPLES_MIN
from gateway.lane.retries import LaneSettings
from gateway.lane.slices import Bounds
from gateway.lane.ticket import Owner
from gateway.routing.checks import PLAIN_TEXT
from gateway.routing.health import ReplicaEvent, State
from gateway.routing.window import Window
from tests.fakes.hooks import until
from tests.fakes.replicas import Rig, assert_vectors, reply_to, tokens_of
from tests.waiting import PATIENCE_S

NO = InvalidWork("this text is not allowed: bad")


async def held_and_waiting(rig: Rig, *texts: str, **owner_options: object) -> list[asyncio.Task[Reply]]:
    """Let a first call hold the only slot, and one call for each text wait behind it."""
    first = rig.call("first")
    await rig.sent("first")
    calls = [first, *(rig.call(text, **owner_options) for text in texts)]  # type: ignore[arg-type]
    await rig.queued(sum(map(tokens_of, texts)))
    return calls


async def all_answered(rig: Rig, calls: list[asyncio.Task[Reply]]) -> list[Reply]:
    """Let every replica answer every request until the calls are done."""
    while not all(call.done() for call in calls):
        for backend in rig.backends:
            for request in backend.pending:
                if not request.answer.done():
                    request.succeed()
        await asyncio.sleep(0)
    return [await call for call in calls]


async def test_dispatches_each_call_alone_while_slots_are_free() -> None:
    rig = Rig(window=3)
    calls = [rig.call(text) for text in "abc"]
    for text in "abc":
        (await rig.sent(text)).succeed()

    for text, call in zip("abc", calls, strict=True):
        assert_vectors(await call, text)
    await rig.assert_empty()


@pytest.mark.parametrize(
    ("bounds", "batches"),
    [
        (Bounds(), [5]),
        (Bounds(inputs=2), [2, 2, 1]),
        (Bounds(tokens=3 * 3), [3, 2]),
        (Bounds(bytes=4), [4, 1]),
    ],
)
async def test_waiting_calls_share_batches_up_to_each_bound(bounds: Bounds, batches: list[int]) -> None:
    rig = Rig(bounds=bounds)
    calls = await held_and_waiting(rig, *"abcde")
    replies = await all_answered(rig, calls)

    assert [1, *batches] == [len(sent.texts) for sent in rig.replica.requests]
    for text, reply in zip(["first", *"abcde"], replies, strict=True):
        assert_vectors(reply, text)
    await rig.assert_empty()


@pytest.mark.parametrize("other", [Embed(("b",), dimensions=4), Embed(("b",), normalize=False)])
async def test_calls_with_different_options_share_no_batch(other: Embed) -> None:
    rig = Rig()
    calls = await held_and_waiting(rig, "a")
    calls += [rig.call(work=other), rig.call("c")]
    await rig.queued(9)
    await all_answered(rig, calls)

    batches = [request.texts for request in rig.replica.requests]
    assert ["b"] in batches
    assert ["a"] in batches or ["a", "c"] in batches


async def test_interactive_and_bulk_calls_share_no_batch() -> None:
    rig = Rig()
    calls = await held_and_waiting(rig, "i1", "i2")
    calls += [rig.call(text, priority="bulk") for text in ("b1", "b2")]
    await rig.queued(16)
    await all_answered(rig, calls)

    assert [["i1", "i2"], ["b1", "b2"]] == [request.texts for request in rig.replica.requests[1:]]


@pytest.mark.parametrize(
    ("reports_tokens", "join", "together"), [(True, True, True), (False, True, False), (True, False, False)]
)
async def test_tenants_share_a_batch_only_if_tokens_are_known_and_both_allow_it(
    *, reports_tokens: bool, join: bool, together: bool
) -> None:
    rig = Rig(reports_tokens=reports_tokens)
    calls = await held_and_waiting(rig)
    calls += [rig.call("mine", tenant="one"), rig.call("yours", tenant="two", shares_batches=join)]
    await rig.queued(tokens_of("mine") + tokens_of("yours"))
    replies = await all_answered(rig, calls)

    assert ([["mine", "yours"]] if together else [["mine"], ["yours"]]) == [
        request.texts for request in rig.replica.requests[1:]
    ]
    assert_vectors(replies[1], "mine")
    assert_vectors(replies[2], "yours")


async def turns_of_answers(calls: list[asyncio.Task[Reply]]) -> list[int]:
    """Return the turn of the event loop in which each call was answered, counted from the batch's reply."""
    turns: dict[asyncio.Task[Reply], int] = {}
    for call in calls:
        call.add_done_callback(lambda done: turns.setdefault(done, turn))
    turn = 0
    while len(turns) < len(calls):
        await asyncio.sleep(0)
        turn += 1
    return [turns[call] for call in calls]


@pytest.mark.parametrize("has_other_tenant", [False, True])
async def test_delivers_replies_one_per_turn_while_another_tenant_is_active(
    *, has_other_tenant: bool
) -> None:
    rig = Rig()
    if has_other_tenant:
        other_call = rig.call("theirs", tenant="two")
        (await rig.sent("theirs")).succeed()
        await other_call
    first, *calls = await held_and_waiting(rig, *"abcd")
    (await rig.sent("first")).succeed()
    (await rig.sent(*"abcd")).succeed()
    turns = await turns_of_answers(calls)

    assert (4 if has_other_tenant else 1) == len(set(turns))
    assert turns == sorted(turns)
    await first
    await rig.assert_empty()


def poisonous(error: BackendError, rig: Rig) -> None:
    """Make every replica fail batches that hold the text `bad`, and answer all others."""

    async def doing(texts: list[str]) -> Reply:
        await asyncio.sleep(0)
        if "bad" in texts:
            raise type(error)(f"{error.message} {texts}")
        return reply_to(texts)

    for backend in rig.backends:
        backend.handler = doing


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("error", [NO, ReplicaFailed("it broke on")])
async def test_isolates_a_bad_input_and_answers_the_rest_of_its_batch(
    error: BackendError, replicas: int
) -> None:
    rig = Rig(replicas)
    firsts = [rig.call(f"first {index}") for index in range(replicas)]
    await until(lambda: all(backend.pending for backend in rig.backends))
    texts = [*(f"good {i}" for i in range(7)), "bad"]
    calls = [rig.call(text, tenant=f"tenant {i}") for i, text in enumerate(texts)]
    await rig.queued(sum(map(tokens_of, texts)))
    poisonous(error, rig)
    for backend in rig.backends:
        backend.pending[0].succeed()
    results = await asyncio.gather(*calls, return_exceptions=True)
    await asyncio.gather(*firsts)

    for text, result in zip(texts[:-1], results[:-1], strict=True):
        assert not isinstance(result, BaseException), (text, result)
        assert_vectors(result, text)
    assert isinstance(results[-1], InvalidWork)
    assert "good" not in str(results[-1])
    requests = [request for backend in rig.backends for request in backend.requests]
    assert sum(request.texts != [PLAIN_TEXT] for request in requests) - replicas <= 2 * 3 + 3
    await rig.assert_empty()


async def test_suspect_tenant_shares_no_batch_for_ten_seconds() -> None:
    rig = Rig()
    calls = await held_and_waiting(rig, "good", tenant="fair")
    spoilt = rig.call("bad", tenant="poisoner")
    await rig.queued(tokens_of("good") + tokens_of("bad"))
    (await rig.sent("first")).succeed()
    (await rig.sent("good", "bad")).fail(NO)
    (await rig.sent("good")).succeed()
    (await rig.sent("bad")).fail(NO)
    with pytest.raises(InvalidWork):
        await spoilt
    await asyncio.gather(*calls)

    again = [rig.call("hold", tenant="fair")]
    await rig.sent("hold")
    again += [rig.call("g1", tenant="fair"), rig.call("b1", tenant="poisoner"), rig.call("g2", tenant="fair")]
    await rig.queued(12)
    await all_answered(rig, again)
    assert [["b1"], ["g1", "g2"]] == sorted(request.texts for request in rig.replica.requests[-2:])

    activity = rig.lane._activity
    assert not activity.is_suspect("poisoner", rig.clock() + SUSPECT_S + 1)
    assert not activity._suspect_until_s


async def test_error_of_a_joined_batch_hides_other_callers_texts() -> None:
    rig = Rig(settings=LaneSettings(10**9, 30, holds=False, retry_share=0))
    calls = await held_and_waiting(rig, "mine", tenant="one")
    calls.append(rig.call("secret", tenant="two"))
    await rig.queued(tokens_of("mine") + tokens_of("secret"))
    (await rig.sent("first")).succeed()
    (await rig.sent("mine", "secret")).fail(ReplicaOverloaded("no room for 'secret'"))
    (await rig.sent(PLAIN_TEXT)).fail(ReplicaOverloaded("no room"))
    results = await asyncio.gather(*calls, return_exceptions=True)

    assert isinstance(results[1], ReplicaOverloaded)
    assert "secret" not in str(results[1])


async def test_only_the_last_caller_to_leave_cancels_the_batch() -> None:
    rig = Rig()
    calls = await held_and_waiting(rig, *"abc")
    (await rig.sent("first")).succeed()
    batch = await rig.sent(*"abc")
    for leaving in (calls[1], calls[2]):
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
    assert not rig.replica.cancelled
    calls[3].cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    await rig.assert_empty()

    assert [batch] == rig.replica.cancelled


async def test_deadline_ends_only_its_own_call() -> None:
    rig = Rig()
    calls = await held_and_waiting(rig)
    short = rig.call("short", within_s=0.05)
    calls.append(rig.call("patient"))
    await rig.queued(tokens_of("short") + tokens_of("patient"))
    (await rig.sent("first")).succeed()
    batch = await rig.sent("short", "patient")
    with pytest.raises(TimeoutError):
        await short
    batch.succeed()

    assert_vectors(await calls[1], "patient")
    assert ["ok", "ok"] == [attempt.outcome for attempt in rig.attempts]


async def test_shared_work_runs_until_the_latest_deadline() -> None:
    rig = Rig()
    short = rig.call("same", within_s=0.05)
    await rig.sent("same")
    patient = rig.call("same")
    with pytest.raises(TimeoutError):
        await short
    (await rig.sent("same")).succeed()

    assert_vectors(await patient, "same")


async def test_computes_identical_work_once_per_tenant() -> None:
    rig = Rig(window=4)
    calls = [rig.call("same"), rig.call("same"), rig.call("same", tenant="other")]
    await until(lambda: len(rig.replica.pending) == 2)
    replies = await all_answered(rig, calls)

    assert [["same"], ["same"]] == [request.texts for request in rig.replica.requests]
    for reply in replies:
        assert_vectors(reply, "same")
    await rig.assert_empty()


async def test_shared_work_survives_its_first_caller() -> None:
    rig = Rig()
    first, second = rig.call("same"), rig.call("same")
    await rig.sent("same")
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    (await rig.sent("same")).succeed()

    assert_vectors(await second, "same")
    await rig.assert_empty()


async def test_answers_a_call_that_arrives_as_identical_work_ends() -> None:
    rig = Rig()
    late: list[asyncio.Task[Reply]] = []

    async def doing(texts: list[str]) -> Reply:
        if not late:
            # It arrives after the first call's waiter is settled, and before that call has left.
            late.append(rig.call("same"))
        return reply_to(texts)

    rig.replica.handler = doing
    assert_vectors(await rig.call("same"), "same")

    async with asyncio.timeout(PATIENCE_S):
        assert_vectors(await late[0], "same")
    await rig.assert_empty()


def fails(rig: Rig, fault: Callable[[list[str]], BackendError | None]) -> None:
    """Make every replica fail the batches for which a function returns an error, and answer all others."""

    async def doing(texts: list[str]) -> Reply:
        await asyncio.sleep(0)
        error = fault(texts)
        if error is not None:
            raise error
        return reply_to(texts)

    for backend in rig.backends:
        backend.handler = doing


@pytest.mark.parametrize("holds", [True, False])
async def test_slices_of_a_broken_batch_go_alone_and_the_cause_is_refused(*, holds: bool) -> None:
    rig = Rig(settings=LaneSettings(10**9, 30, holds=holds, retry_share=0))
    calls = await held_and_waiting(rig, "good", "bad")
    fails(rig, lambda texts: ConnectionLost("it broke") if "bad" in texts else None)
    (await rig.sent("first")).succeed()

    assert_vectors(await calls[1], "good")
    with pytest.raises(InvalidWork, match="it broke") as refused:
        await calls[2]
    assert 0 == refused.value.input_index
    assert State.UP is rig.replicas[0].state
    batches = [request.texts for request in rig.replica.requests]
    assert 1 == sum("good" in texts and "bad" in texts for texts in batches)
    await rig.assert_empty()


async def test_input_that_breaks_the_server_is_refused_when_the_server_is_back() -> None:
    rig = Rig(settings=LaneSettings(10**9, 30, holds=True))
    is_down = False

    def fault(texts: list[str]) -> BackendError | None:
        nonlocal is_down
        is_down = is_down or "bad" in texts
        return ConnectionLost("it died") if is_down else None

    fails(rig, fault)
    call = rig.call("bad")
    for _ in range(2):
        await until(lambda: rig.replicas[0].state is State.DOWN)
        is_down = False
        rig.pool.transition(rig.replicas[0], ReplicaEvent.JOINED, "")
    with pytest.raises(InvalidWork, match="it died"):
        await call

    assert 2 == sum("bad" in request.texts for request in rig.replica.requests)
    assert_vectors(await rig.call("good"), "good")
    await rig.assert_empty()


@pytest.mark.parametrize(
    ("answer", "state"),
    [
        (None, State.UP),
        (ReplicaFailed("500"), State.UP),
        (ReplicaUnavailable("refused"), State.DOWN),
        (ConnectionLost("reset"), State.DOWN),
        (AttemptTimedOut("silent"), State.DOWN),
    ],
    ids=["answers", "fails", "refuses", "breaks", "hangs"],
)
@pytest.mark.usefixtures("brief_return")
async def test_last_replica_with_a_broken_connection_is_checked_before_it_is_ejected(
    answer: BackendError | None, state: State
) -> None:
    rig = Rig()
    fails(rig, lambda texts: answer if texts == [PLAIN_TEXT] else ConnectionLost("reset"))
    call = rig.call("first")
    await until(lambda: any(request.texts == [PLAIN_TEXT] for request in rig.replica.requests))
    await until(lambda: not rig.lane._attempts.in_flight)

    assert rig.replicas[0].state is state
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)


@pytest.mark.parametrize("error", [ReplicaFailed("null"), ConnectionLost("reset"), NO])
@pytest.mark.parametrize("replicas", [1, 2])
async def test_input_that_failed_alone_goes_alone_when_it_is_sent_again(
    error: BackendError, replicas: int
) -> None:
    rig = Rig(replicas)
    fails(rig, lambda texts: error if "bad" in texts else None)
    with pytest.raises(InvalidWork):
        await rig.call("bad")
    before = sum(len(backend.requests) for backend in rig.backends)
    calls = [rig.call(text, tenant=f"tenant {index}") for index, text in enumerate(["a", "bad", "b", "c"])]
    results = await asyncio.gather(*calls, return_exceptions=True)

    assert [False, True, False, False] == [isinstance(result, InvalidWork) for result in results]
    batches = [request.texts for backend in rig.backends for request in backend.requests]
    assert all(texts == ["bad"] for texts in batches if "bad" in texts)
    # Three fine texts, the bad one once more, and a check.
    assert len(batches) - before <= 5
    await rig.assert_empty()


async def test_replica_that_fails_what_another_computes_is_ejected() -> None:
    rig = Rig(2)

    async def fails_all_but_plain(texts: list[str]) -> Reply:
        if texts == [PLAIN_TEXT]:
            return reply_to(texts)
        raise ReplicaFailed("500")

    async def works(texts: list[str]) -> Reply:
        await asyncio.sleep(0.001)
        return reply_to(texts)

    rig.replica.handler, rig.backends[1].handler = fails_all_but_plain, works
    for index in range(20):
        calls = [rig.call(f"text {index} {part}") for part in range(3)]
        for part, reply in enumerate(await asyncio.gather(*calls)):
            assert_vectors(reply, f"text {index} {part}")

    assert [State.DOWN, State.UP] == [replica.state for replica in rig.replicas]
    await rig.assert_empty()


async def test_rejoined_replica_gets_one_batch_at_a_time_until_proven() -> None:
    rig = Rig(window=4)
    replica = rig.replicas[0]
    rig.pool.transition(replica, ReplicaEvent.LOST, "")
    rig.pool.transition(replica, ReplicaEvent.JOINED, "")
    rig.bounds = Bounds(inputs=1)
    calls = [rig.call(text) for text in "abcdef"]
    for text in "abc":
        request = await rig.sent(text)
        assert (State.PROBATION, 1) == (replica.state, len(rig.replica.pending))
        request.succeed()
    await until(lambda: len(rig.replica.pending) == 3)

    assert replica.state is State.UP
    await all_answered(rig, calls)


async def test_short_deadlines_do_not_eject_a_replica() -> None:
    rig = Rig(2, window=16)
    calls = [rig.call(f"slow {index}", within_s=0.2) for index in range(12)]
    results = await asyncio.gather(*calls, return_exceptions=True)

    assert {TimeoutError} == {type(result) for result in results}
    assert "timed_out" in [attempt.outcome for attempt in rig.attempts]
    assert [State.UP, State.UP] == [replica.state for replica in rig.replicas]
    await rig.assert_empty()


async def test_requeues_an_abandoned_batch_once_even_if_it_fails_later() -> None:
    rig = Rig(2)

    async def clings(texts: list[str]) -> Reply:
        try:
            return await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError as error:
            raise ConnectionLost("it let go late") from error

    rig.replica.handler = clings
    call, other = rig.call("a"), rig.call("b")
    await until(lambda: bool(rig.replica.requests and rig.backends[1].pending))
    rig.pool.transition(rig.replicas[0], ReplicaEvent.STALLED, "silent")
    await until(lambda: not rig.replicas[0].batches)

    assert tokens_of("a") == rig.lane.queued_tokens
    (await rig.sent("b", to=1)).succeed()
    (await rig.sent("a", to=1)).succeed()
    await asyncio.gather(call, other)
    await rig.assert_empty()


async def test_call_that_tried_the_free_replica_does_not_block_its_tenants_calls() -> None:
    rig = Rig(2)
    calls = [rig.call("held", "long and held")]
    await rig.sent("held", "long and held")
    calls.append(rig.call("again"))
    for text in ("again", PLAIN_TEXT):
        (await rig.sent(text, to=1)).fail(ReplicaOverloaded("full"))
    await rig.queued(tokens_of("again"))
    calls.append(rig.call("other"))
    (await rig.sent("other", to=1)).succeed()

    assert_vectors(await calls[2], "other")
    (await rig.sent("held", "long and held")).succeed()
    (await rig.sent("again")).succeed()
    await asyncio.gather(*calls)
    await rig.assert_empty()


async def with_known_latencies(rig: Rig) -> None:
    """Record enough fast single inputs to know which later ones are late."""
    for index in range(SAMPLES_MIN):
        await all_answered(rig, [rig.call(f"known {index}")])


async def test_hedges_a_late_single_input_once_and_takes_the_first_reply() -> None:
    rig = Rig(2, window=2)
    await with_known_latencies(rig)
    before = len(rig.attempts)
    late = rig.call("late")
    await until(lambda: all(backend.pending for backend in rig.backends))
    second = next(backend for backend in rig.backends if backend.requests[-1] is backend.pending[0])
    second.pending[0].succeed()

    assert_vectors(await late, "late")
    await rig.assert_empty()
    ended = rig.attempts[before:]
    assert ["cancelled", "ok"] == sorted(attempt.outcome for attempt in ended)
    assert [False, True] == sorted(attempt.hedge for attempt in ended)


@pytest.mark.parametrize("share", [0.0, 0.05])
async def test_hedges_stay_within_their_budget(share: float) -> None:
    rig = Rig(2, window=200, settings=LaneSettings(10**9, 30, holds=False, hedge_share=share))
    await with_known_latencies(rig)
    calls = [rig.call(f"late {index}") for index in range(100)]
    await until(lambda: len(rig.lane._attempts.in_flight) >= 100)
    last_s = max(
        attempt.hedge_timer.when()
        for attempt in rig.lane._attempts.in_flight
        if attempt.hedge_timer is not None
    )
    # This timer is the last and latest: when it fires, all hedge timers have fired.
    passed = asyncio.Event()
    asyncio.get_running_loop().call_at(last_s + 0.001, passed.set)
    await passed.wait()
    hedges = sum(attempt.is_hedge for attempt in rig.lane._attempts.in_flight)

    assert 10 <= hedges <= 10 + 140 * share
    await all_answered(rig, calls)
    await rig.assert_empty()


async def test_does_not_hedge_while_calls_wait() -> None:
    rig = Rig(2)
    late = rig.call("late")
    await rig.sent("late")
    (attempt,) = rig.lane._attempts.in_flight
    again = rig.call("again")
    for text in ("again", PLAIN_TEXT):
        (await rig.sent(text, to=1)).fail(ReplicaOverloaded("full"))
    await until(lambda: rig.lane._attempts.in_flight == {attempt})
    assert tokens_of("again") == rig.lane.queued_tokens
    rig.lane._attempts.hedge(attempt)
    assert {attempt} == rig.lane._attempts.in_flight

    again.cancel()
    await asyncio.gather(again, return_exceptions=True)
    rig.lane._attempts.hedge(attempt)
    assert 2 == len(rig.lane._attempts.in_flight)
    await all_answered(rig, [late])
    await rig.assert_empty()


@pytest.mark.parametrize("how", ["killed", "hung"])
async def test_dead_or_hung_replica_fails_no_call(how: str) -> None:
    rig = Rig(2, window=4)

    async def answers(texts: list[str]) -> Reply:
        await asyncio.sleep(0.001)
        return reply_to(texts)

    async def is_killed(texts: list[str]) -> Reply:
        raise ConnectionLost("reset")

    async def hangs(texts: list[str]) -> Reply:
        return await asyncio.get_running_loop().create_future()

    for backend in rig.backends:
        backend.handler = answers
    first = await asyncio.gather(*(rig.call(f"first {index}") for index in range(100)))
    rig.replica.handler = is_killed if how == "killed" else hangs
    calls = [rig.call(f"text {index}") for index in range(200)]
    if how == "hung":
        await until(lambda: rig.replicas[0].batches == 4)
        # The prober reports this for a replica that holds work and fails a probe.
        rig.pool.transition(rig.replicas[0], ReplicaEvent.STALLED, "silent")
    for index, reply in enumerate(await asyncio.gather(*calls)):
        assert_vectors(reply, f"text {index}")

    assert len(rig.attempts) / (len(first) + len(calls)) <= 1.1
    await rig.assert_empty()


@pytest.mark.parametrize(
    "error",
    [ReplicaUnavailable("refused"), ReplicaFailed("500"), ReplicaOverloaded("429"), ConnectionLost("reset")],
)
@pytest.mark.usefixtures("brief_return")
async def test_adds_few_attempts_while_every_replica_fails(error: BackendError) -> None:
    rig = Rig(2, window=4)

    async def fails(texts: list[str]) -> Reply:
        await asyncio.sleep(0)
        raise error

    for backend in rig.backends:
        backend.handler = fails
    calls = 0
    for _ in range(40):
        results = await asyncio.gather(*(rig.call(f"{calls + i}") for i in range(5)), return_exceptions=True)
        assert all(isinstance(result, Exception) for result in results)
        calls += 5

    assert len(rig.attempts) <= 1.2 * calls + 10
    await rig.assert_empty()


async def test_backend_bug_leaves_no_caller_waiting() -> None:
    rig = Rig()
    broken, cancelled = rig.call("broken"), None
    (await rig.sent("broken")).answer.set_exception(ValueError("odd"))
    with pytest.raises(RuntimeError):
        await broken
    cancelled = rig.call("cancelled")
    (await rig.sent("cancelled")).answer.cancel()
    with pytest.raises(RuntimeError):
        await cancelled
    await rig.assert_empty()


async def test_caller_that_leaves_at_its_turn_frees_its_slot() -> None:
    rig = Rig()
    first = rig.call("a")
    held = await rig.sent("a")
    second = rig.call("b")
    held.succeed()
    second.cancel()
    await asyncio.gather(first, second, return_exceptions=True)

    await rig.assert_empty()


async def test_replica_that_asks_for_a_pause_gets_no_work_until_then() -> None:
    rig = Rig(2)
    first = rig.call("first")
    refusal = ReplicaOverloaded("full").with_facts(upstream_status="429", retry_after_s=0.05)
    asked_s = rig.clock()
    (await rig.sent("first")).fail(refusal)
    (await rig.sent(PLAIN_TEXT)).fail(refusal)
    (await rig.sent("first", to=1)).succeed()
    assert_vectors(await first, "first")
    assert rig.replicas[0].is_held
    for number in range(4):
        call = rig.call(f"more {number}")
        (await rig.sent(f"more {number}", to=1)).succeed()
        await call
    assert [["first"], [PLAIN_TEXT]] == [request.texts for request in rig.backends[0].requests]

    await until(lambda: not rig.replicas[0].is_held)
    assert rig.clock() >= asked_s + 0.05
    for index in range(2):
        rig.backends[index].handler = answer_at_once
    for number in range(4):
        await rig.call(f"later {number}")
    assert len(rig.backends[0].requests) > 2


async def test_call_waits_for_the_end_of_a_pause_before_its_deadline() -> None:
    rig = Rig(1)
    call = rig.call("a")
    for text in ("a", PLAIN_TEXT):
        (await rig.sent(text)).fail(ReplicaOverloaded("full").with_facts(retry_after_s=0.02))
    await until(lambda: len(rig.backends[0].requests) == 3)
    rig.backends[0].pending[0].succeed()

    assert_vectors(await call, "a")


async def test_call_that_would_wait_past_its_deadline_is_told_how_long() -> None:
    rig = Rig(1)
    first = rig.call("first", within_s=20)
    for text in ("first", PLAIN_TEXT):
        (await rig.sent(text)).fail(ReplicaOverloaded("full").with_facts(retry_after_s=30.0))

    with pytest.raises(ReplicaOverloaded) as waited:
        await first
    with pytest.raises(Overloaded) as refused:
        await rig.call("second", within_s=5)

    assert 30 == waited.value.retry_after_s
    assert 30 == refused.value.retry_after_s
    assert 2 == len(rig.backends[0].requests)


async def test_an_input_that_is_told_to_pause_holds_no_replica_that_works_for_others() -> None:
    rig = Rig(3)
    refusal = ReplicaUnavailable("busy").with_facts(upstream_status="503", retry_after_s=30.0)
    fails(rig, lambda texts: refusal if texts == ["bad"] else None)

    with pytest.raises(ReplicaUnavailable) as told:
        await rig.call("bad", within_s=60)
    assert 30 == told.value.retry_after_s
    assert [False] * 3 == [replica.is_held for replica in rig.replicas]
    assert {State.UP} == {replica.state for replica in rig.replicas}
    assert 2 == sum(request.texts == ["bad"] for backend in rig.backends for request in backend.requests)


async def test_a_short_pause_is_waited_for_by_its_own_input_alone() -> None:
    rig = Rig(1)
    call = rig.call("a")
    (await rig.sent("a")).fail(ReplicaOverloaded("full").with_facts(retry_after_s=0.02))
    (await rig.sent(PLAIN_TEXT)).succeed()
    assert not rig.replicas[0].is_held
    (await rig.sent("a")).succeed()

    assert_vectors(await call, "a")


async def test_a_refusal_of_one_input_leaves_the_window_as_it_is() -> None:
    rig = Rig(1)
    rig.replicas[0].window = Window(start=4)
    fails(rig, lambda texts: ReplicaOverloaded("full") if "bad" in texts else None)

    for _ in range(20):
        with pytest.raises(ReplicaOverloaded):
            await rig.call("bad")
    assert 4 == rig.replicas[0].window.size

    fails(rig, lambda _: ReplicaOverloaded("full"))
    with pytest.raises(ReplicaOverloaded):
        await rig.call("fine")
    assert rig.replicas[0].window.size < 4


async def test_a_metered_replica_gets_no_hedge() -> None:
    rig = Rig(2, window=2)
    await with_known_latencies(rig)
    for replica in rig.replicas:
        metered = msgspec.structs.replace(rig.replica.capabilities, metered=True)
        rig.pool.update_capabilities(replica, metered)
    late = rig.call("late")
    await until(lambda: any(backend.pending for backend in rig.backends))
    (attempt,) = rig.lane._attempts.in_flight
    assert attempt.hedge_timer is None
    next(backend for backend in rig.backends if backend.pending).pending[0].succeed()
    assert_vectors(await late, "late")


@pytest.mark.parametrize("pause_s", [None, 30.0])
async def test_a_metered_replica_gets_no_check_and_is_held_after_two_inputs(pause_s: float | None) -> None:
    rig = Rig(1)
    rig.replicas[0].window = Window(start=4)
    metered = msgspec.structs.replace(rig.replica.capabilities, metered=True)
    rig.pool.update_capabilities(rig.replicas[0], metered)
    refusal = ReplicaOverloaded("full").with_facts(upstream_status="429", retry_after_s=pause_s)
    fails(rig, lambda texts: refusal if texts[0].startswith("bad") else None)

    with pytest.raises(ReplicaOverloaded):
        await rig.call("bad 1", within_s=20)
    assert not rig.replicas[0].is_held
    with pytest.raises(ReplicaOverloaded):
        await rig.call("bad 1", within_s=20)
    assert (False, 4) == (rig.replicas[0].is_held, rig.replicas[0].window.size)
    with pytest.raises(ReplicaOverloaded):
        await rig.call("bad 2", within_s=20)
    assert rig.replicas[0].window.size < 4
    assert rig.replicas[0].is_held is (pause_s is not None)
    assert [PLAIN_TEXT] not in [request.texts for request in rig.replica.requests]


async def test_an_unready_server_is_taken_out_and_its_call_fails_over() -> None:
    rig = Rig(2)
    unready = ReplicaUnavailable("not ready").with_facts(upstream_status="503")
    call = rig.call("a")
    for text in ("a", PLAIN_TEXT):
        (await rig.sent(text)).fail(unready)
    (await rig.sent("a", to=1)).succeed()

    assert_vectors(await call, "a")
    assert [State.DOWN, State.UP] == [replica.state for replica in rig.replicas]


async def test_a_text_that_breaks_servers_behind_a_proxy_takes_out_two_at_most() -> None:
    rig = Rig(4)
    unready = ReplicaUnavailable("not ready").with_facts(upstream_status="503")
    fails(rig, lambda _: unready)

    with pytest.raises(ReplicaUnavailable):
        await rig.call("bad")
    assert 2 == sum(replica.state is State.DOWN for replica in rig.replicas)


async def answer_at_once(texts: list[str]) -> Reply:
    """Answer without the test's help."""
    return reply_to(texts)


async def test_a_tenant_leaves_others_a_share_of_the_queue() -> None:
    rig = Rig(settings=LaneSettings(1000, 30, holds=False))
    calls = [rig.call("first")]
    await rig.sent("first")
    greedy, refused = Owner("greedy"), 0
    for index in range(200):
        try:
            rig.lane.check_room(tokens_of("8 signs."), greedy)
        except Overloaded:
            refused += 1
            continue
        calls.append(rig.call("8 signs.", tenant="greedy", work=Embed(("8 signs.",), dimensions=index + 1)))
        await asyncio.sleep(0)
    assert 750 == rig.lane.queued_tokens
    assert 200 - 75 == refused

    with pytest.raises(Overloaded, match="too much of yours"):
        rig.lane.check_room(10, greedy)
    # Three times what stays free then: 3/7 of the queue for each of two.
    rig.lane.check_room(240, Owner("victim"))
    # A heavier tenant may have more.
    rig.lane.check_room(10, Owner("greedy", weight=2))
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    await rig.assert_empty()
