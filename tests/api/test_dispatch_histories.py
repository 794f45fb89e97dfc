"""Random calls through dispatcher, lane and pool: the answer is what one replica would give the whole call.

Every kind of work, with its options, over several replicas that take little, answer in any order and fail by
chance; several calls at once, which may share requests. Each input's own answer comes back, in order, once,
and the token total is the sum.
"""

import asyncio
import hashlib
from random import Random
from typing import Any

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.contract import (
    Capabilities,
    Classify,
    ClassifyReply,
    Detokenize,
    DetokenizeReply,
    Embed,
    EmbedReply,
    Encode,
    EncodeReply,
    Operation,
    Output,
    Reply,
    Rerank,
    RerankReply,
    Score,
    TermWeights,
    Token,
    Tokenize,
    TokenizeReply,
    Truncate,
    Vectors,
    inputs_of,
    operation_of,
)
from backends.contract import Work as BackendWork
from backends.errors import ConnectionLost, ReplicaFailed, ReplicaOverloaded, ReplicaUnavailable
from backends.vectors import pair_cosines
from gateway.admission import Grant
from gateway.batching.lane import Lane
from gateway.batching.lane_settings import LaneSettings
from gateway.calls import Call, Deadline, Similarity, Work
from gateway.config import schema as config
from gateway.dispatch import Dispatcher
from gateway.errors import GatewayError
from gateway.prepare import PreparedWork, prepare
from gateway.quotas.ledger import NOTHING, MemoryLedger, QuotaRequest, Reservation
from gateway.routing.health import ReplicaEvent, State
from gateway.routing.pool import Pool
from gateway.routing.replica import Replica
from gateway.routing.routes import Route
from gateway.routing.window import Window
from gateway.tenants.keyring import Tenant
from gateway.timeline import Timeline
from gateway.upstreams.batch_bounds import BatchBounds
from gateway.upstreams.upstream import Upstream
from gateway.vector_spaces.space import VectorSpace
from tests.fakes.tei import score_of, vector_of

# Longer inputs are told to have been cut.
LONGEST = 12
TROUBLE = (ReplicaOverloaded, ReplicaFailed, ConnectionLost, ReplicaUnavailable)
PASSES = 3

texts = st.text(alphabet="abü ", min_size=1, max_size=15)
pairs = st.tuples(texts, texts)
ids = st.lists(st.integers(0, 9), min_size=1, max_size=4).map(tuple)


def several(one: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    """Enough to be cut several times."""
    return st.lists(one, min_size=1, max_size=30).map(tuple)


dense = {
    "normalize": st.booleans(),
    "dimensions": st.sampled_from([None, 4]),
    "prompt_name": st.sampled_from([None, "query"]),
}
outputs = st.sets(st.sampled_from(Output), min_size=1).map(frozenset)
works: st.SearchStrategy[Work] = st.one_of(
    st.builds(Embed, several(texts), **dense),
    st.builds(Encode, several(texts), outputs, **dense),
    st.builds(Rerank, texts, several(texts), raw_scores=st.booleans()),
    st.builds(Score, several(pairs), raw_scores=st.booleans()),
    st.builds(Classify, several(texts | pairs), raw_scores=st.booleans()),
    st.builds(Tokenize, several(texts), add_special_tokens=st.booleans()),
    st.builds(Detokenize, several(ids), skip_special_tokens=st.booleans()),
    st.builds(Similarity, texts, several(texts)),
)
histories = st.fixed_dictionaries(
    {
        "works": st.lists(works, min_size=1, max_size=8),
        "tenants": st.integers(1, 3),
        "replicas": st.integers(1, 3),
        "window": st.sampled_from([1, 2, None]),
        "batch_inputs": st.integers(1, 12),
        "batch_tokens": st.integers(1, 120),
        "batch_bytes": st.one_of(st.none(), st.integers(60, 400)),
        "concurrent_inputs": st.one_of(st.none(), st.integers(1, 12)),
        "tells": st.booleans(),
        "trouble": st.sampled_from([0.0, 0.0, 0.2]),
        "seed": st.integers(0, 2**16),
    }
)


def tokens_of(given_: Any) -> int:
    """What one input counts."""
    return len(str(given_)) + 2


def options_of(work: BackendWork) -> str:
    """All that is the same for every input of a work: whose options it was done with shows in its answer."""
    told = msgspec.to_builtins(work)
    return str(
        sorted((k, str(v)) for k, v in told.items() if k not in {"inputs", "documents", "pairs", "outputs"})
    )


def number(text: str) -> int:
    """A number between 0 and 255 for a text."""
    return hashlib.sha256(text.encode()).digest()[0]


def done_whole(work: BackendWork, *, tells: bool = False) -> Reply:
    """What a replica that takes everything at once answers; every answer tells its input and options."""
    marks = [f"{options_of(work)}{one}" for one in inputs_of(work)]
    counts = tuple(tokens_of(one) for one in inputs_of(work))
    cut = tuple(i for i, one in enumerate(inputs_of(work)) if len(str(one)) > LONGEST)
    told = (sum(counts), cut)
    match work:
        case Embed():
            return EmbedReply(_rows(marks), *told, counts if tells else None)
        case Encode():
            return _encoded(work, marks, told)
        case Rerank() | Score():
            return RerankReply(np.array([score_of("", mark) for mark in marks], np.float32), *told)
        case Classify():
            return ClassifyReply(("no", "yes"), _rows(marks)[:, :2].copy(), *told)
        case Tokenize():
            return TokenizeReply(tuple((Token(number(mark), mark, special=False),) for mark in marks))
        case Detokenize():
            return DetokenizeReply(tuple(marks))


def _rows(marks: list[str]) -> Vectors:
    return np.stack([vector_of(mark) for mark in marks])


def _encoded(work: Encode, marks: list[str], told: tuple[int, tuple[int, ...]]) -> EncodeReply:
    tokens, cut = told
    many = tuple(np.stack([vector_of(f"{mark}{i}") for i in range(number(mark) % 3 + 1)]) for mark in marks)
    terms = tuple(TermWeights(np.array([number(mark)], np.int32), vector_of(mark)[:1]) for mark in marks)
    asked = work.outputs
    return EncodeReply(
        tokens,
        _rows(marks) if Output.DENSE in asked else None,
        terms if Output.SPARSE in asked else None,
        many if Output.MULTIVECTOR in asked else None,
        tuple(-one for one in many) if Output.TOKENS in asked else None,
        cut,
    )


class Small:
    """A replica that takes little, answers when it likes, and fails by chance."""

    def __init__(self, history: dict[str, Any], chance: Random) -> None:
        self._chance = chance
        self._trouble = history["trouble"]
        self.capabilities = Capabilities(
            "m",
            frozenset(Operation),
            batch_inputs=history["batch_inputs"],
            batch_tokens=history["batch_tokens"],
            batch_bytes=history["batch_bytes"],
            concurrent_inputs=history["concurrent_inputs"],
            reports_input_tokens=history["tells"],
            outputs=frozenset(Output),
        )

    async def describe(self, timeout_s: float) -> Capabilities:  # noqa: ARG002
        return self.capabilities

    async def run(self, work: BackendWork, timeout_s: float) -> Reply:  # noqa: ARG002
        assert 1 <= len(inputs_of(work)) <= (self.capabilities.batch_inputs or 0)
        for _ in range(self._chance.randint(0, PASSES)):
            await asyncio.sleep(0)
        if self._chance.random() < self._trouble:
            raise self._chance.choice(TROUBLE)("trouble")
        return done_whole(work, tells=self.capabilities.reports_input_tokens)

    async def aclose(self) -> None:
        pass


class World:
    """One upstream behind a dispatcher."""

    def __init__(self, history: dict[str, Any]) -> None:
        chance = Random(history["seed"])
        backends = [Small(history, chance) for _ in range(history["replicas"])]
        replicas = [Replica(str(i), one, Window(history["window"])) for i, one in enumerate(backends)]
        self.pool = Pool("up", replicas, "least_tokens", lambda _: None, seed=0)
        self.tenants = [Tenant(f"tenant {i}") for i in range(history["tenants"])]
        upstream_settings = config.UpstreamSettings(backend="tei", replicas=("http://up",))
        clock = asyncio.get_running_loop().time
        lane = Lane(
            self.pool,
            LaneSettings(10**9, 5, holds=False, retry_share=1.0),
            lambda _: None,
            clock,
            BatchBounds(self.pool, upstream_settings),
        )
        space = VectorSpace("up", upstream_settings, None, lambda _: None)
        self.upstream = Upstream("up", upstream_settings, self.pool, lane, space)
        self.dispatcher = Dispatcher()
        for replica, backend in zip(replicas, backends, strict=True):
            self.pool.transition(replica, ReplicaEvent.JOINED, "", backend.capabilities)

    def revive(self) -> None:
        """What the prober does, at once."""
        for replica in self.pool.replicas:
            if replica.state is State.DOWN:
                self.pool.transition(replica, ReplicaEvent.JOINED, "")

    async def prepared(self, work: Work) -> PreparedWork:
        """The work as replicas are asked for it."""
        route = Route("m", "up", Operation.EMBED, Truncate.RIGHT, 60)
        deadline = Deadline(asyncio.get_running_loop().time() + 30)
        return await prepare(self.upstream.inputs, Tenant("any"), route, Call(work), deadline)

    async def call(self, index: int, work: Work) -> tuple[Reply, int] | None:
        """The reply and the tokens counted for it; None where the replicas failed it."""
        tenant = self.tenants[index % len(self.tenants)]
        deadline = Deadline(asyncio.get_running_loop().time() + 30)
        reservation = Reservation(QuotaRequest(str(index), tenant.name, (), NOTHING, 10**9, "m"), ())
        prepared = await self.prepared(work)
        with Grant(tenant, prepared, deadline, reservation, MemoryLedger()) as grant:
            try:
                upstream = self.upstream
                reply = await self.dispatcher.dispatch(grant, upstream.lane, upstream.inputs, Timeline())
            except GatewayError:
                return None
            return reply, grant._tokens


def assert_same(expected: Any, given_: Any, *unknown: str) -> None:
    """Whatever a reply holds, it holds the same; the sum of tokens is told, each input's may not be."""
    assert type(expected) is type(given_)
    for field in expected.__struct_fields__:
        if field == "input_tokens" or field in unknown:
            continue
        assert_equal(getattr(expected, field), getattr(given_, field))


def assert_equal(one: Any, other: Any) -> None:
    if isinstance(one, np.ndarray):
        np.testing.assert_array_equal(one, other)
        assert one.dtype == other.dtype
    elif isinstance(one, tuple) and not isinstance(other, np.ndarray):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_equal(a, b)
    elif isinstance(one, TermWeights):
        assert_same(one, other)
    else:
        assert one == other


async def expected_of(world: World, work: Work) -> Reply:
    """What the call is worth, whole."""
    whole = done_whole((await world.prepared(work)).work)
    if not isinstance(work, Similarity):
        return whole
    assert isinstance(whole, EmbedReply)
    others = whole.vectors[1:]
    scores = pair_cosines(np.repeat(whole.vectors[:1], len(others), axis=0), others)
    cut = whole.truncated or ()
    shown = tuple(range(len(scores))) if 0 in cut else tuple(i - 1 for i in cut)
    return RerankReply(scores, whole.tokens, shown)


async def live(history: dict[str, Any]) -> None:
    world = World(history)

    async def keep_reviving() -> None:
        while True:
            await asyncio.sleep(0.001)
            world.revive()

    prober = asyncio.create_task(keep_reviving())
    async with asyncio.timeout(20):
        got = await asyncio.gather(*(world.call(i, work) for i, work in enumerate(history["works"])))
    prober.cancel()
    await asyncio.gather(prober, return_exceptions=True)
    owed = given_ = 0
    for work, one in zip(history["works"], got, strict=True):
        if one is None:
            assert history["trouble"] > 0
            continue
        reply, counted = one
        expected = await expected_of(world, work)
        # A joined reply that tells no input's tokens is shared out: only all together are exact, and only
        # where none is computed once for several.
        shared = isinstance(work, Embed | Similarity) and not history["tells"]
        assert_same(expected, reply, *(["tokens"] if shared else []))
        assert reply.tokens == counted
        owed, given_ = owed + expected.tokens, given_ + counted
    sent = [(await world.prepared(work)).work for work in history["works"]]
    inputs = [one for work in sent for one in inputs_of(work)]
    if None not in got and len(set(inputs)) == len(inputs):
        assert owed == given_


@settings(max_examples=200, deadline=None)
@given(histories)
def test_cut_and_joined_reply_equals_the_reply_to_the_whole_call(history: dict[str, Any]) -> None:
    asyncio.run(live(history))


def test_histories_cover_every_operation() -> None:
    """So that a kind that is added is not forgotten."""
    kinds = {operation_of(work) for work in (Embed(("a",)), Encode(("a",), frozenset(Output)))}
    kinds |= {operation_of(work) for work in (Rerank("q", ("a",)), Score((("q", "a"),)), Classify(("a",)))}
    kinds |= {operation_of(work) for work in (Tokenize(("a",)), Detokenize(((1,),)))}

    assert kinds == set(Operation)
