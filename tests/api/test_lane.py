"""A lane keeps its slots, whoever goes and whenever."""

import asyncio

from backends.contract import Capabilities, Embed, Embedded, Operation, Reply, Work
from gateway.batching.lane import Lane, Rules
from gateway.batching.slices import Slice
from gateway.batching.ticket import Passenger
from gateway.routing.health import Happened
from gateway.routing.pool import Pool, Replica
from gateway.routing.window import Window
from tests.fakes.hooks import until


class Slow:
    """A backend whose replies the test lets go."""

    def __init__(self) -> None:
        self.replies: list[asyncio.Future[Reply]] = []

    async def describe(self, timeout_s: float) -> Capabilities:  # noqa: ARG002
        return Capabilities("m", frozenset({Operation.EMBED}))

    async def run(self, work: Work, timeout_s: float) -> Reply:  # noqa: ARG002
        self.replies.append(asyncio.get_running_loop().create_future())
        return await self.replies[-1]

    async def aclose(self) -> None:
        pass


async def test_a_caller_that_goes_as_its_turn_comes_leaves_its_slot_free() -> None:
    backend = Slow()
    replica = Replica("one", backend, Window(1))
    pool = Pool("up", [replica], "least_tokens", lambda _: None)
    loop = asyncio.get_running_loop()
    lane = Lane(pool, Rules(1000, 30, holds=False), lambda _: None, loop.time)
    pool.learn(replica, Happened.JOINED, "", await backend.describe(1))
    pieces = [Slice(0, Embed((text,)), 1, 10) for text in "ab"]

    first = asyncio.create_task(lane.submit(pieces[0], Passenger("a", 1), loop.time() + 10))
    second = asyncio.create_task(lane.submit(pieces[1], Passenger("a", 2), loop.time() + 10))
    await until(lambda: bool(backend.replies))
    backend.replies[0].set_result(Embedded(None, 1))  # type: ignore[arg-type]
    second.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    for _ in range(5):
        await asyncio.sleep(0)

    assert 0 == replica.batches
    assert 0 == lane.queued_tokens
