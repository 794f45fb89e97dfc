"""Replicas in memory, behind a real lane: the test answers what they are sent, or lets them answer."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from backends.contract import Capabilities, Embed, EmbedReply, Operation, Reply, Work
from backends.errors import AttemptTimedOut, BackendError
from gateway.batching.lane import Lane, Rules
from gateway.batching.slices import Bounds, Slice
from gateway.batching.ticket import Owner
from gateway.events import AttemptFinished, Event
from gateway.routing.health import ReplicaEvent
from gateway.routing.pool import Pool
from gateway.routing.replica import Replica
from gateway.routing.window import Window
from tests.fakes.hooks import until
from tests.fakes.tei import vector_of

RULES = Rules(10**9, 30, holds=False)


class SentWork:
    """One request that a replica was sent, unanswered until the test says so."""

    def __init__(self, work: Work) -> None:
        assert isinstance(work, Embed)
        self.texts = list(work.inputs)
        self.answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()

    def succeed(self) -> None:
        """Answer with each text's own vector and tokens."""
        self.answer.set_result(reply_to(self.texts))

    def fail(self, error: BackendError) -> None:
        """Answer with an error."""
        self.answer.set_exception(error)


def tokens_of(text: str) -> int:
    """What a replica counts for a text; the slices of these tests say the same."""
    return len(text) + 2


def reply_to(texts: Sequence[str]) -> EmbedReply:
    """Each text's own vector and tokens."""
    each = tuple(tokens_of(text) for text in texts)
    return EmbedReply(np.stack([vector_of(text) for text in texts]), sum(each), (), each)


# What a replica does with a request by itself.
Doing = Callable[[list[str]], Awaitable[Reply]]


class HeldReplica:
    """A backend that holds what it is sent; open are the requests without an answer yet.

    doing: answers in the test's place.
    """

    def __init__(self, *, tells: bool = True) -> None:
        self.told = Capabilities("m", frozenset({Operation.EMBED}), reports_input_tokens=tells)
        self.all: list[SentWork] = []
        self.open: list[SentWork] = []
        self.cancelled: list[SentWork] = []
        self.doing: Doing | None = None

    async def describe(self, timeout_s: float) -> Capabilities:  # noqa: ARG002
        return self.told

    async def run(self, work: Work, timeout_s: float) -> Reply:
        sent = SentWork(work)
        self.all.append(sent)
        if self.doing is not None:
            return await self.doing(sent.texts)
        self.open.append(sent)
        try:
            async with asyncio.timeout(timeout_s):
                return await sent.answer
        except TimeoutError as error:
            raise AttemptTimedOut("no answer in time") from error
        except asyncio.CancelledError:
            self.cancelled.append(sent)
            raise
        finally:
            self.open.remove(sent)

    async def aclose(self) -> None:
        pass


class Rig:
    """A lane in front of held replicas, all of them up."""

    def __init__(
        self,
        replicas: int = 1,
        *,
        window: int = 1,
        bounds: Bounds | None = None,
        rules: Rules = RULES,
        tells: bool = True,
    ) -> None:
        self.backends = [HeldReplica(tells=tells) for _ in range(replicas)]
        self.replicas = [Replica(str(i), one, Window(window)) for i, one in enumerate(self.backends)]
        self.events: list[Event] = []
        self.bounds = bounds or Bounds()
        self.clock = asyncio.get_running_loop().time
        self.pool = Pool("up", self.replicas, "least_tokens", self.events.append, seed=0)
        self.lane = Lane(self.pool, rules, self.events.append, self.clock, lambda: self.bounds)
        for replica, backend in zip(self.replicas, self.backends, strict=True):
            self.pool.transition(replica, ReplicaEvent.JOINED, "", backend.told)
        self._flows = 0

    @property
    def one(self) -> HeldReplica:
        """The first replica."""
        return self.backends[0]

    @property
    def attempts(self) -> list[AttemptFinished]:
        """Every attempt that has ended."""
        return [one for one in self.events if isinstance(one, AttemptFinished)]

    def call(
        self,
        *texts: str,
        tenant: str = "acme",
        within_s: float = 30,
        work: Embed | None = None,
        **whose: object,
    ) -> "asyncio.Task[Reply]":
        """Submit a call; each is another flow."""
        self._flows += 1
        owner = Owner(tenant, self._flows, **whose)  # type: ignore[arg-type]
        asked = work or Embed(texts)
        piece = Slice(0, asked, len(asked.inputs), sum(map(tokens_of, asked.inputs)), sum(map(len, texts)))
        return asyncio.create_task(self._submit(piece, owner, self.clock() + within_s))

    async def _submit(self, piece: Slice, owner: Owner, deadline_s: float) -> Reply:
        return (await self.lane.submit(piece, owner, deadline_s)).reply

    async def sent(self, *texts: str, to: int = 0) -> SentWork:
        """Wait until a replica holds a request of these texts."""
        held = self.backends[to].open
        await until(lambda: any(one.texts == list(texts) for one in held))
        return next(one for one in held if one.texts == list(texts))

    async def queued(self, tokens: int) -> None:
        """Wait until so much waits in the lane."""
        await until(lambda: self.lane.queued_tokens == tokens)

    async def assert_empty(self) -> None:
        """Nothing of any call is left, in the lane or at a replica."""
        lane = self.lane
        await until(lambda: not lane._attempts)
        assert 0 == len(lane._queue) == lane.queued_tokens
        assert not lane._shared
        for replica in self.replicas:
            assert (0, 0, 0) == (replica.batches, replica.inputs, replica.tokens)
            assert not replica.batches_by_tenant


def assert_vectors(reply: Reply, *texts: str) -> None:
    """Each text got its own vector, and the call its own tokens."""
    assert isinstance(reply, EmbedReply)
    np.testing.assert_array_equal([vector_of(text) for text in texts], reply.vectors)
    assert sum(map(tokens_of, texts)) == reply.tokens
