"""Random histories with inputs that fail, break or stop replicas: no other call is hurt, and each is named.

Calls of several tenants run through dispatcher, lane and pool, on one to four replicas. Time is simulated, so
that an input that hangs costs nothing. `POISON_HISTORIES=2000` runs so many histories.
"""

import asyncio
import os
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

import numpy as np
import pytest

from backends.contract import (
    Capabilities,
    Embed,
    EmbedReply,
    Operation,
    Reply,
    Rerank,
    RerankReply,
)
from backends.contract import Work as BackendWork
from backends.contract.errors import (
    AttemptTimedOut,
    BackendError,
    ConnectionLost,
    CredentialRefused,
    InvalidWork,
    ReplicaFailed,
    ReplicaOverloaded,
    ReplicaUnavailable,
    RequestTooLarge,
)
from gateway.admission import Grant
from gateway.calls import Call, Deadline
from gateway.config import schema as config
from gateway.dispatch import Dispatcher
from gateway.errors import GatewayError
from gateway.events import AttemptFinished, Event, ReplicaChanged
from gateway.lane.lane import Lane
from gateway.lane.retries import LaneSettings
from gateway.prepare import TOKENS_MAX, Preparer
from gateway.quotas.ledger import NOTHING, MemoryLedger, QuotaRequest, Reservation
from gateway.routing.health import ReplicaEvent, State
from gateway.routing.pool import Pool
from gateway.routing.replica import Replica
from gateway.routing.routes import Route
from gateway.routing.window import Window
from gateway.telemetry.timeline import Timeline
from gateway.tenants.keyring import Tenant
from gateway.upstreams.factory import BatchBounds
from gateway.upstreams.fair_threads import FairThreads
from gateway.upstreams.model_inputs import ModelInputs
from gateway.upstreams.upstream import Upstream
from gateway.vector_spaces.space import VectorSpace
from tests.fakes.tei import score_of, vector_of

PAUSE_S = 30.0
HISTORIES = int(os.environ.get("POISON_HISTORIES", "60"))
# Refusals for a while, with and without a pause.
LATER = {"paused-503": 503, "429": 429, "paused-429": 429}
ERRORS: dict[str, Callable[[], BackendError]] = {
    "400": lambda: InvalidWork("the server refuses it"),
    "413": lambda: RequestTooLarge("the request is too large"),
    "500": lambda: ReplicaFailed("the server returned 500"),
    "null": lambda: ReplicaFailed("the server returned null"),
    "nan": lambda: ReplicaFailed("the server returned nan"),
    "lost": lambda: ConnectionLost("the connection broke"),
    "hang": lambda: AttemptTimedOut("no answer in time"),
    "503": lambda: ReplicaUnavailable("not ready").with_facts(upstream_status="503"),
    "401": lambda: CredentialRefused("the key is refused"),
    "403": lambda: CredentialRefused("the key is refused"),
    "paused-503": lambda: ReplicaUnavailable("busy").with_facts(upstream_status="503", retry_after_s=PAUSE_S),
    "429": lambda: ReplicaOverloaded("full").with_facts(upstream_status="429"),
    "paused-429": lambda: ReplicaOverloaded("full").with_facts(upstream_status="429", retry_after_s=PAUSE_S),
}
KINDS = (*ERRORS, "width")
WIDTH = len(vector_of("a"))
ATTEMPT_TIMEOUT_S = 30.0
DEADLINE_S = 900.0
# Of a batch.
WORK_S = 0.01
# More than a working replica gets for a part of a batch that timed out, and less than for the verdict.
SLOW_S = 2.0


class SimulatedLoop(asyncio.SelectorEventLoop):
    """Event loop whose clock jumps to the next timer as soon as nothing else is to be done."""

    _ahead_s = 0.0

    def time(self) -> float:
        return super().time() + self._ahead_s

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self._ahead_s += max(0.0, self._scheduled[0].when() - self.time())  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


def kind_of(text: str) -> str | None:
    """Return what a text does to a replica; None for a fine one."""
    return text.split()[1] if text.startswith("bad ") else None


class PoisonedReplica:
    """A replica on which some texts have effects."""

    def __init__(self, request_inputs: int, work_s: float = WORK_S) -> None:
        self.work_s = work_s
        self.capabilities = Capabilities(
            "m",
            frozenset({Operation.EMBED, Operation.RERANK}),
            request_inputs=request_inputs,
            reports_input_tokens=True,
        )
        self.requests = 0

    async def describe(self, timeout_s: float) -> Capabilities:  # noqa: ARG002
        return self.capabilities

    async def run(self, work: BackendWork, timeout_s: float) -> Reply:
        self.requests += 1
        texts = [str(text) for text in work.inputs]
        kinds = {kind for text in texts if (kind := kind_of(text)) is not None}
        if self.work_s > timeout_s:
            await asyncio.sleep(timeout_s)
            raise AttemptTimedOut("no answer in time")
        await asyncio.sleep(self.work_s)
        if kinds:
            await self._fail(min(kinds), timeout_s)
        counts = tuple(len(text) for text in texts)
        if isinstance(work, Rerank):
            scores = np.array([score_of(work.query, text) for text in texts], np.float32)
            return RerankReply(scores, sum(counts), ())
        vectors = np.stack([vector_of(text) for text in texts])
        if "width" in kinds:
            vectors = vectors[:, :-1]
        return EmbedReply(vectors, sum(counts), (), counts)

    async def _fail(self, kind: str, timeout_s: float) -> None:
        if kind == "slow":
            await asyncio.sleep(min(SLOW_S, timeout_s))
            if timeout_s < SLOW_S:
                raise AttemptTimedOut("no answer in time")
        if kind == "hang":
            await asyncio.sleep(timeout_s)
        if (error := ERRORS.get(kind)) is not None:
            raise error()

    async def aclose(self) -> None:
        pass


async def _no_limits(*_: object) -> int:
    return TOKENS_MAX


class PoisonedWorld:
    """One upstream behind a dispatcher."""

    def __init__(self, backends: list[PoisonedReplica], window: int) -> None:
        self.events: list[Event] = []
        self.backends = backends
        replicas = [Replica(str(i), backend, Window(window)) for i, backend in enumerate(self.backends)]
        self.pool = Pool("up", replicas, "least_tokens", self.events.append, seed=0)
        settings = config.UpstreamSettings(backend="tei", replicas=("http://up",))
        clock = asyncio.get_running_loop().time
        # No retry is free: what isolates an input must cost no budget.
        lane_settings = LaneSettings(10**9, ATTEMPT_TIMEOUT_S, holds=False, retry_share=0.0)
        self.lane = Lane(
            self.pool, lane_settings, self.events.append, clock, BatchBounds(self.pool, settings)
        )
        space = VectorSpace("up", settings, None, lambda _: None)
        inputs = ModelInputs(settings, self.pool.capabilities)
        self.upstream = Upstream("up", settings, self.pool, {"texts": self.lane}, space, inputs)
        self.preparer = Preparer(FairThreads(), _no_limits)
        self.dispatcher = Dispatcher(self.preparer)
        for replica, backend in zip(replicas, self.backends, strict=True):
            self.pool.transition(replica, ReplicaEvent.JOINED, "", backend.capabilities)
            replica.record_space(WIDTH, is_foreign=False)

    async def call(
        self, index: int, work: Embed | Rerank, tenant: str, deadline_s: float = DEADLINE_S
    ) -> Reply | GatewayError:
        """Return the reply to a call, or its error."""
        at_s = asyncio.get_running_loop().time() + deadline_s
        route = Route("m", "up", Operation.EMBED, work.truncate, deadline_s)
        owner, deadline = Tenant(tenant), Deadline(at_s, deadline_s)
        reservation = Reservation(QuotaRequest(str(index), tenant, (), NOTHING, 10**9, "m"), ())
        inputs = self.upstream.model_inputs
        prepared = await self.preparer.prepare(inputs, owner, route, Call(work), deadline)
        async with Grant(owner, prepared, deadline, reservation, MemoryLedger()) as grant:
            try:
                lane, inputs = self.upstream.lane_of(grant.prepared.work), self.upstream.model_inputs
                return await self.dispatcher.dispatch(grant, lane, inputs, Timeline())
            except GatewayError as error:
                return error


def random_text(chance: Random, kinds: list[str], bad_share: float) -> str:
    """Return a fine text, or a bad one, which may have been sent before."""
    if chance.random() < bad_share:
        return f"bad {chance.choice(kinds)} {chance.randint(0, 3)}"
    return f"fine {chance.randint(0, 10**6)}"


def random_works(chance: Random) -> list[Embed | Rerank]:
    """Return the works of a history."""
    kinds = chance.sample(KINDS, chance.choice((1, 1, 2, len(KINDS))))
    bad_share = chance.choice((0.2, 0.05, 0.02))
    works: list[Embed | Rerank] = []
    for _ in range(chance.randint(5, 40)):
        size = chance.choice((1, 1, 1, 1, 4, 40))
        texts = tuple(random_text(chance, kinds, bad_share) for _ in range(size))
        # A reranker's replies have no width.
        is_rerank = chance.random() < 0.1 and "width" not in {kind_of(text) for text in texts}
        works.append(Rerank("q", texts) if is_rerank else Embed(texts))
    return works


def assert_right(work: Embed | Rerank, result: Reply | GatewayError) -> None:
    """Check that a fine call has its own results, and another the error of one of its bad inputs."""
    texts = [str(text) for text in work.inputs]
    bad = [index for index, text in enumerate(texts) if kind_of(text) is not None]
    if isinstance(result, GatewayError):
        assert bad, result.message
        if result.facts.status in {LATER.get(str(kind_of(texts[index]))) for index in bad}:
            assert result.retry_after_s is not None
            return
        assert ("caller", False) == (result.facts.source, result.facts.retryable), result.message
        if result.input_index is None:
            # The first two inputs of a slice are bad: what all inputs share may be the cause.
            assert len(texts) == 1 or any(index + 1 in bad for index in bad), (result.message, bad)
        else:
            assert result.input_index in bad
            assert result.message.startswith(f"input {result.input_index}: ")
        return
    assert not bad
    if isinstance(work, Rerank):
        assert isinstance(result, RerankReply)
        np.testing.assert_array_equal(
            np.array([score_of("q", text) for text in texts], np.float32), result.scores
        )
    else:
        assert isinstance(result, EmbedReply)
        np.testing.assert_array_equal([vector_of(text) for text in texts], result.vectors)


async def run_history(chance: Random) -> None:
    """Run the calls of a history and check their results and the replicas."""
    backends = [PoisonedReplica(chance.randint(1, 32)) for _ in range(chance.choice((1, 2, 4)))]
    world, works = PoisonedWorld(backends, chance.choice((1, 2, 4, 8))), random_works(chance)
    is_burst = chance.random() < 0.5

    async def send(index: int, work: Embed | Rerank) -> Reply | GatewayError:
        if not is_burst:
            await asyncio.sleep(chance.random() * 0.5)
        return await world.call(index, work, chance.choice("ab"))

    results = await asyncio.gather(*(send(index, work) for index, work in enumerate(works)))
    for work, result in zip(works, results, strict=True):
        assert_right(work, result)
    assert not [
        event for event in world.events if isinstance(event, ReplicaChanged) and event.state == "down"
    ]
    assert {State.UP} == {replica.state for replica in world.pool.replicas}
    assert not any(replica.is_held for replica in world.pool.replicas)
    assert 0 == world.lane.queued_tokens
    slices = sum(isinstance(event, AttemptFinished) for event in world.events)
    texts = sum(len(work.inputs) for work in works)
    assert slices <= 40 + 8 * texts


@pytest.mark.parametrize("part", range(4))
def test_no_input_hurts_another(part: int) -> None:
    for seed in range(part, HISTORIES, 4):
        with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
            try:
                runner.run(run_history(Random(seed)))
            except AssertionError as error:
                raise AssertionError(f"history {seed}") from error


# The default deadline of a model.
MODEL_DEADLINE_S = 60.0


def world_of(replicas: int, *, work_s: float = WORK_S) -> PoisonedWorld:
    """Return replicas with requests of 32 inputs, behind a dispatcher with the default settings."""
    return PoisonedWorld([PoisonedReplica(32, work_s) for _ in range(replicas)], 4)


def simulated(history: Coroutine[Any, Any, None]) -> None:
    """Run a history in simulated time."""
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        runner.run(history)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("size", [1, 6, 32, 256])
def test_names_what_hangs_before_the_deadline(replicas: int, size: int, caplog: Any) -> None:
    async def history() -> None:
        world, place = world_of(replicas), size * 4 // 7
        works = [
            Embed(tuple(f"bad hang {call}" if i == place else f"fine {call} {i}" for i in range(size)))
            for call in range(3)
        ]
        fine = Embed(("fine",))
        calls = [world.call(0, fine, "a"), *(world.call(0, work, "b", MODEL_DEADLINE_S) for work in works)]
        for work, result in zip((fine, *works), await asyncio.gather(*calls), strict=True):
            assert_right(work, result)
            assert work is fine or place == result.input_index  # type: ignore[union-attr]
        # Sent again, it takes no more than the short timeout and a check.
        again = await world.call(1, works[0], "b", 10.0)
        assert_right(works[0], again)

    simulated(history())
    lines = [record.getMessage() for record in caplog.records if "of tenant b" in record.getMessage()]
    assert 1 <= len(lines) <= 3
    assert all("does not answer for an input of tenant b" in line for line in lines)
    assert "bad hang" not in caplog.text


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_slow_input_next_to_one_that_hangs_is_computed(replicas: int) -> None:
    async def history() -> None:
        world = world_of(replicas)
        # They wait for a slot and share a batch.
        held = [asyncio.create_task(world.call(0, Embed((f"fine {i}",)), "a")) for i in range(4 * replicas)]
        await asyncio.sleep(0)
        works = [Embed((text,)) for text in ("bad hang", "bad slow", "fine")]
        hung, slow, fine = await asyncio.gather(*(world.call(1, work, "a") for work in works))
        assert isinstance(hung, GatewayError)
        assert [True, True] == [isinstance(result, EmbedReply) for result in (slow, fine)]
        assert [0] * replicas == [replica.record_failure() - 1 for replica in world.pool.replicas]
        await asyncio.gather(*held)

    simulated(history())


@pytest.mark.parametrize("replicas", [1, 2])
def test_replicas_that_became_slow_lose_no_call(replicas: int) -> None:
    async def history() -> None:
        world = world_of(replicas)
        for _ in range(10):
            await world.call(0, Embed(("before",)), "a")
        for backend in world.backends:
            backend.work_s = ATTEMPT_TIMEOUT_S + 1
        calls = [asyncio.create_task(world.call(i, Embed((f"fine {i}", f"and {i}")), "a")) for i in range(20)]
        await asyncio.sleep(ATTEMPT_TIMEOUT_S + 0.5)
        for backend in world.backends:
            backend.work_s = ATTEMPT_TIMEOUT_S / 2
        assert [EmbedReply] * 20 == [type(result) for result in await asyncio.gather(*calls)]

    simulated(history())
