"""In-memory replicas behind a real lane; the test decides when and how each request is answered."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from backends.contract import Capabilities, Embed, EmbedReply, Operation, Reply, Work
from backends.contract.errors import AttemptTimedOut, BackendError
from gateway.events import AttemptFinished, Event
from gateway.lane.lane import Lane
from gateway.lane.retries import LaneSettings
from gateway.lane.slices import Bounds, Slice
from gateway.lane.ticket import Owner
from gateway.routing.health import ReplicaEvent
from gateway.routing.pool import Pool
from gateway.routing.replica import Replica
from gateway.routing.window import Window
from tests.fakes.hooks import until
from tests.fakes.tei import vector_of

SETTINGS = LaneSettings(10**9, 30, holds=False)


class SentWork:
    """One request received by a replica, unanswered until the test completes it."""

    def __init__(self, work: Work) -> None:
        assert isinstance(work, Embed)
        self.texts = list(work.inputs)
        self.answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()

    def succeed(self) -> None:
        """Answer with the vector and token count of each text."""
        self.answer.set_result(reply_to(self.texts))

    def fail(self, error: BackendError) -> None:
        """Answer with an error."""
        self.answer.set_exception(error)


def tokens_of(text: str) -> int:
    """Return the token count a replica reports for a text; the slices of these tests use the same."""
    return len(text) + 2


def reply_to(texts: Sequence[str]) -> EmbedReply:
    """Return a reply with the vector and token count of each text."""
    counts = tuple(tokens_of(text) for text in texts)
    return EmbedReply(np.stack([vector_of(text) for text in texts]), sum(counts), (), counts)


# Answers a request without the test's help.
Handler = Callable[[list[str]], Awaitable[Reply]]


class HeldReplica:
    """Backend that holds every request until the test answers it.

    requests: all requests received. pending: those without an answer. handler: answers instead of the test.
    """

    def __init__(self, *, reports_tokens: bool = True) -> None:
        embed = frozenset({Operation.EMBED})
        self.capabilities = Capabilities("m", embed, reports_input_tokens=reports_tokens)
        self.requests: list[SentWork] = []
        self.pending: list[SentWork] = []
        self.cancelled: list[SentWork] = []
        self.handler: Handler | None = None

    async def describe(self, timeout_s: float) -> Capabilities:  # noqa: ARG002 - the protocol's parameter
        """Return the capabilities of an embedding model."""
        return self.capabilities

    async def run(self, work: Work, timeout_s: float) -> Reply:
        """Hold the work until the test answers it.

        Raises: BackendError, from the test or when timeout_s expires.
        """
        request = SentWork(work)
        self.requests.append(request)
        if self.handler is not None:
            return await self.handler(request.texts)
        self.pending.append(request)
        try:
            async with asyncio.timeout(timeout_s):
                return await request.answer
        except TimeoutError as error:
            raise AttemptTimedOut("no answer in time") from error
        except asyncio.CancelledError:
            self.cancelled.append(request)
            raise
        finally:
            self.pending.remove(request)

    async def aclose(self) -> None:
        """Do nothing; there are no connections."""


class Rig:
    """Lane in front of held replicas, all of them healthy."""

    def __init__(
        self,
        replicas: int = 1,
        *,
        window: int = 1,
        bounds: Bounds | None = None,
        settings: LaneSettings = SETTINGS,
        reports_tokens: bool = True,
    ) -> None:
        self.backends = [HeldReplica(reports_tokens=reports_tokens) for _ in range(replicas)]
        self.replicas = [Replica(str(i), backend, Window(window)) for i, backend in enumerate(self.backends)]
        self.events: list[Event] = []
        self.bounds = bounds or Bounds()
        self.clock = asyncio.get_running_loop().time
        self.pool = Pool(
            "up", self.replicas, "least_tokens", self.events.append, seed=0, holds=settings.holds
        )
        self.lane = Lane(self.pool, settings, self.events.append, self.clock, lambda: self.bounds)
        for replica, backend in zip(self.replicas, self.backends, strict=True):
            self.pool.transition(replica, ReplicaEvent.JOINED, "", backend.capabilities)
        self._flows = 0

    @property
    def replica(self) -> HeldReplica:
        """The first replica."""
        return self.backends[0]

    @property
    def attempts(self) -> list[AttemptFinished]:
        """Every attempt that has ended."""
        return [event for event in self.events if isinstance(event, AttemptFinished)]

    def call(
        self,
        *texts: str,
        tenant: str = "acme",
        within_s: float = 30,
        work: Embed | None = None,
        **owner_options: object,
    ) -> "asyncio.Task[Reply]":
        """Submit a call of a new flow and return its task."""
        self._flows += 1
        owner = Owner(tenant, self._flows, **owner_options)  # type: ignore[arg-type]
        embed = work or Embed(texts)
        tokens = sum(map(tokens_of, embed.inputs))
        piece = Slice(0, embed, len(embed.inputs), tokens, sum(map(len, texts)))
        return asyncio.create_task(self._submit(piece, owner, self.clock() + within_s))

    async def _submit(self, piece: Slice, owner: Owner, deadline_s: float) -> Reply:
        return (await self.lane.submit(piece, owner, deadline_s)).reply

    async def sent(self, *texts: str, to: int = 0) -> SentWork:
        """Wait until a replica holds a request of these texts, and return the request."""
        pending = self.backends[to].pending
        await until(lambda: any(request.texts == list(texts) for request in pending))
        return next(request for request in pending if request.texts == list(texts))

    async def queued(self, tokens: int) -> None:
        """Wait until this many tokens are queued in the lane."""
        await until(lambda: self.lane.queued_tokens == tokens)

    async def assert_empty(self) -> None:
        """Assert that no call has left state behind in the lane or at a replica."""
        lane = self.lane
        await until(lambda: not lane._attempts.in_flight)
        assert 0 == len(lane._queue) == lane.queued_tokens
        assert not lane._shared
        for replica in self.replicas:
            assert (0, 0, 0) == (replica.batches, replica.inputs, replica.tokens)
            assert not replica.batches_by_tenant


def assert_vectors(reply: Reply, *texts: str) -> None:
    """Assert that a reply holds the vector of each text and the tokens of all of them."""
    assert isinstance(reply, EmbedReply)
    np.testing.assert_array_equal([vector_of(text) for text in texts], reply.vectors)
    assert sum(map(tokens_of, texts)) == reply.tokens
