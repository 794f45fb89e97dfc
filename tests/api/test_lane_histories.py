"""Random histories of a lane: every call gets its own result, and no state remains."""

import asyncio
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

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
from gateway.errors import GatewayError
from gateway.lane.outcomes import SliceFailed
from gateway.lane.retries import LaneSettings
from gateway.lane.slices import Bounds
from gateway.routing.health import ReplicaEvent, State
from gateway.routing.window import Window
from tests.fakes.replicas import Rig, assert_vectors, reply_to
from tests.waiting import PATIENCE_S

TROUBLE = (ReplicaOverloaded, ReplicaFailed, ConnectionLost, ReplicaUnavailable, AttemptTimedOut)
# Few texts, so that calls share work. Every replica refuses poison.
TEXTS = ("x", "yy", "a longer text", "poison", "z")
# Enough turns of the event loop for pending callbacks to run.
PASSES = 4

owner = st.fixed_dictionaries(
    {
        "tenant": st.sampled_from("abc"),
        "priority": st.sampled_from(["interactive", "bulk"]),
        "shares_batches": st.booleans(),
    }
)
calls = st.fixed_dictionaries(
    {
        "texts": st.lists(st.sampled_from(TEXTS), min_size=1, max_size=4),
        "dimensions": st.sampled_from([None, None, None, 8]),
        "owner": owner,
        "pause": st.integers(0, 3),
        # After how many turns the caller leaves, and how long it waits at most.
        "leaves_after": st.sampled_from([None, None, None, 0, 1, 5]),
        "within_s": st.sampled_from([30, 30, 30, 0.0, 0.005]),
    }
)
histories = st.fixed_dictionaries(
    {
        "calls": st.lists(calls, min_size=1, max_size=25),
        "replicas": st.integers(1, 3),
        "window": st.sampled_from([1, 2, 4, None]),
        "reports_tokens": st.booleans(),
        "holds": st.booleans(),
        "trouble": st.sampled_from([0.0, 0.2, 0.6]),
        "bounds": st.builds(
            Bounds, st.integers(1, 8), st.integers(1, 60), st.one_of(st.none(), st.integers(1, 60))
        ),
        "seed": st.integers(0, 2**16),
    }
)


class Chance:
    """Replicas that answer after some turns, fail by chance, refuse poison, and rejoin when down."""

    def __init__(self, history: dict[str, Any]) -> None:
        settings = LaneSettings(10**9, 5, holds=history["holds"])
        self.random = Random(history["seed"])
        self.trouble = history["trouble"]
        self.rig = Rig(
            history["replicas"],
            window=history["window"] or 4,
            bounds=history["bounds"],
            settings=settings,
            reports_tokens=history["reports_tokens"],
        )
        for replica in self.rig.replicas:
            replica.window = Window(history["window"])
        for backend in self.rig.backends:
            backend.handler = self.answer

    async def answer(self, texts: list[str]) -> Reply:
        """Answer a batch as a replica does."""
        for _ in range(self.random.randint(0, PASSES)):
            await asyncio.sleep(0)
        if self.random.random() < self.trouble:
            raise self.random.choice(TROUBLE)(f"trouble with {texts}")
        if "poison" in texts:
            raise InvalidWork(f"refused: {texts}")
        return reply_to(texts)

    def revive(self) -> None:
        """Let every down replica rejoin, without the prober's pauses."""
        for replica in self.rig.replicas:
            if replica.state is State.DOWN:
                self.rig.pool.transition(replica, ReplicaEvent.JOINED, "")

    async def call(self, call: dict[str, Any]) -> None:
        """Run one call and check its result."""
        for _ in range(call["pause"]):
            await asyncio.sleep(0)
        texts = tuple(call["texts"])
        task = self.rig.call(
            work=Embed(texts, dimensions=call["dimensions"]), within_s=call["within_s"], **call["owner"]
        )
        if call["leaves_after"] is not None:
            for _ in range(call["leaves_after"]):
                await asyncio.sleep(0)
            task.cancel()
        try:
            reply = await task
        except asyncio.CancelledError:
            assert call["leaves_after"] is not None
        except (GatewayError, TimeoutError):
            pass
        except (SliceFailed, BackendError) as error:
            self.assert_own(error.error if isinstance(error, SliceFailed) else error, texts)
        else:
            assert "poison" not in texts
            assert_vectors(reply, *texts)

    def assert_own(self, error: BackendError, texts: tuple[str, ...]) -> None:
        """Check that an error quotes only its own call's texts."""
        if isinstance(error, InvalidWork) and error.message.startswith("the upstream"):
            # It failed twice alone, by chance, at replicas that computed a plain text.
            assert self.trouble
            assert error.message.endswith(f": trouble with {list(texts)}")
        elif isinstance(error, InvalidWork):
            assert "poison" in texts
            assert error.message == f"refused: {list(texts)}"
        else:
            assert error.message in (
                f"trouble with {list(texts)}",
                "a replica did not do the batch that this call was part of",
            )


async def live(history: dict[str, Any]) -> None:
    """Run all calls of a history and check that no state remains."""
    chance = Chance(history)

    async def keep_reviving() -> None:
        while True:
            await asyncio.sleep(0.001)
            chance.revive()

    prober = asyncio.create_task(keep_reviving())
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*(chance.call(call) for call in history["calls"]))
        await chance.rig.assert_empty()
    prober.cancel()
    await asyncio.gather(prober, return_exceptions=True)
    if chance.rig.lane._recheck_timer is not None:
        chance.rig.lane._recheck_timer.cancel()
    assert asyncio.all_tasks() == {asyncio.current_task()}


@hypothesis_settings(max_examples=150, deadline=None)
@given(histories)
def test_every_call_gets_its_own_result_and_leaves_no_state(
    history: dict[str, Any],
) -> None:
    asyncio.run(live(history))


@pytest.mark.parametrize("seed", range(3))
def test_many_failing_calls_leave_no_state(seed: int) -> None:
    random = Random(seed)
    crowd = [
        {
            "texts": random.sample(["x", "poison", f"text {i}", f"other {i}"], random.randint(1, 3)),
            "dimensions": random.choice([None, 8]),
            "owner": {
                "tenant": f"tenant {random.randint(0, 20)}",
                "priority": random.choice(["interactive", "bulk"]),
                "shares_batches": True,
            },
            "pause": random.randint(0, 20),
            "leaves_after": random.choice([None] * 9 + [2]),
            "within_s": 30,
        }
        for i in range(400)
    ]
    history = {
        "calls": crowd,
        "replicas": 2,
        "window": 2,
        "reports_tokens": True,
        "holds": seed == 2,
        "trouble": 0.1,
        "bounds": Bounds(8, 10_000),
        "seed": seed,
    }
    asyncio.run(live(history))
