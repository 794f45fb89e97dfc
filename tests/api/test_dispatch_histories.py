"""Random calls through dispatcher, lane and pool: the reply equals that of one replica to the whole call.

Every kind of work, with its options, runs on several replicas that take small batches, answer in any order
and fail by chance. Several calls run at once and may share requests. Each input's own result comes back once,
in order, and the token total is the sum.
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
)
from backends.contract import Work as BackendWork
from backends.contract.errors import ConnectionLost, ReplicaFailed, ReplicaOverloaded, ReplicaUnavailable
from backends.contract.vectors import pair_cosines
from gateway.admission import Grant
from gateway.calls import Call, Deadline, Similarity, Work
from gateway.config import schema as config
from gateway.dispatch import Dispatcher
from gateway.errors import GatewayError
from gateway.lane.lane import Lane
from gateway.lane.retries import LaneSettings
from gateway.prepare import TOKENS_MAX, PreparedWork, Preparer
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
from tests.waiting import PATIENCE_S

# Longer inputs are reported as truncated.
LONGEST = 12
TROUBLE = (ReplicaOverloaded, ReplicaFailed, ConnectionLost, ReplicaUnavailable)
TURNS_MAX = 3

texts = st.text(alphabet="abü ", min_size=1, max_size=15)
pairs = st.tuples(texts, texts)
ids = st.lists(st.integers(0, 9), min_size=1, max_size=4).map(tuple)


def several(item: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    """Return a strategy for enough items to be cut several times."""
    return st.lists(item, min_size=1, max_size=30).map(tuple)


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
        "request_inputs": st.integers(1, 12),
        "request_tokens": st.integers(1, 120),
        "request_bytes": st.one_of(st.none(), st.integers(60, 400)),
        "concurrent_inputs": st.one_of(st.none(), st.integers(1, 12)),
        "reports_tokens": st.booleans(),
        "trouble": st.sampled_from([0.0, 0.0, 0.2]),
        "seed": st.integers(0, 2**16),
    }
)


def tokens_of(work_input: Any) -> int:
    """Return the tokens of one input."""
    return len(str(work_input)) + 2


def options_of(work: BackendWork) -> str:
    """Return the options of a work as text, so that a result shows the options it was computed with."""
    fields = msgspec.to_builtins(work)
    return str(
        sorted((k, str(v)) for k, v in fields.items() if k not in {"inputs", "documents", "pairs", "outputs"})
    )


def number(text: str) -> int:
    """Return a number between 0 and 255 for a text."""
    return hashlib.sha256(text.encode()).digest()[0]


def whole_reply(work: BackendWork, *, reports_tokens: bool = False) -> Reply:
    """Return the reply of a replica that takes everything at once.

    Each result depends on its input and options.
    """
    marks = [f"{options_of(work)}{work_input}" for work_input in work.inputs]
    counts = tuple(tokens_of(work_input) for work_input in work.inputs)
    cut = tuple(i for i, item in enumerate(work.inputs) if len(str(item)) > LONGEST)
    counts_and_cut = (sum(counts), cut)
    match work:
        case Embed():
            return EmbedReply(_rows(marks), *counts_and_cut, counts if reports_tokens else None)
        case Encode():
            return _encoded(work, marks, counts_and_cut)
        case Rerank() | Score():
            return RerankReply(np.array([score_of("", mark) for mark in marks], np.float32), *counts_and_cut)
        case Classify():
            return ClassifyReply(("no", "yes"), _rows(marks)[:, :2].copy(), *counts_and_cut)
        case Tokenize():
            return TokenizeReply(tuple((Token(number(mark), mark, special=False),) for mark in marks))
        case Detokenize():
            return DetokenizeReply(tuple(marks))


def _rows(marks: list[str]) -> Vectors:
    return np.stack([vector_of(mark) for mark in marks])


def _encoded(work: Encode, marks: list[str], counts_and_cut: tuple[int, tuple[int, ...]]) -> EncodeReply:
    tokens, cut = counts_and_cut
    many = tuple(np.stack([vector_of(f"{mark}{i}") for i in range(number(mark) % 3 + 1)]) for mark in marks)
    terms = tuple(TermWeights(np.array([number(mark)], np.int32), vector_of(mark)[:1]) for mark in marks)
    requested = work.outputs
    return EncodeReply(
        tokens,
        _rows(marks) if Output.DENSE in requested else None,
        terms if Output.SPARSE in requested else None,
        many if Output.MULTIVECTOR in requested else None,
        tuple(-matrix for matrix in many) if Output.TOKENS in requested else None,
        cut,
    )


class SmallReplica:
    """A replica that takes small batches, answers after a random delay, and fails by chance."""

    def __init__(self, history: dict[str, Any], chance: Random) -> None:
        self._chance = chance
        self._trouble = history["trouble"]
        self.capabilities = Capabilities(
            "m",
            frozenset(Operation),
            request_inputs=history["request_inputs"],
            request_tokens=history["request_tokens"],
            request_bytes=history["request_bytes"],
            concurrent_inputs=history["concurrent_inputs"],
            reports_input_tokens=history["reports_tokens"],
            outputs=frozenset(Output),
        )

    async def describe(self, timeout_s: float) -> Capabilities:  # noqa: ARG002
        return self.capabilities

    async def run(self, work: BackendWork, timeout_s: float) -> Reply:  # noqa: ARG002
        assert 1 <= len(work.inputs) <= (self.capabilities.request_inputs or 0)
        for _ in range(self._chance.randint(0, TURNS_MAX)):
            await asyncio.sleep(0)
        if self._chance.random() < self._trouble:
            raise self._chance.choice(TROUBLE)("trouble")
        return whole_reply(work, reports_tokens=self.capabilities.reports_input_tokens)

    async def aclose(self) -> None:
        pass


async def _no_limits(*_: object) -> int:
    return TOKENS_MAX


class World:
    """One upstream behind a dispatcher."""

    def __init__(self, history: dict[str, Any]) -> None:
        chance = Random(history["seed"])
        backends = [SmallReplica(history, chance) for _ in range(history["replicas"])]
        replicas = [Replica(str(i), backend, Window(history["window"])) for i, backend in enumerate(backends)]
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
        inputs = ModelInputs(upstream_settings, self.pool.capabilities)
        self.upstream = Upstream("up", upstream_settings, self.pool, {"texts": lane}, space, inputs)
        self.preparer = Preparer(FairThreads(), _no_limits)
        self.dispatcher = Dispatcher(self.preparer)
        for replica, backend in zip(replicas, backends, strict=True):
            self.pool.transition(replica, ReplicaEvent.JOINED, "", backend.capabilities)

    def revive(self) -> None:
        """Let every down replica rejoin, without the prober's pauses."""
        for replica in self.pool.replicas:
            if replica.state is State.DOWN:
                self.pool.transition(replica, ReplicaEvent.JOINED, "")

    async def prepared(self, work: Work) -> PreparedWork:
        """Return the work as replicas receive it."""
        route = Route("m", "up", Operation.EMBED, Truncate.RIGHT, 60)
        deadline = Deadline(asyncio.get_running_loop().time() + 30, 30)
        return await self.preparer.prepare(
            self.upstream.model_inputs, Tenant("any"), route, Call(work), deadline
        )

    async def call(self, index: int, work: Work) -> tuple[Reply, int] | None:
        """Return the reply and its counted tokens, or None if the replicas failed it."""
        tenant = self.tenants[index % len(self.tenants)]
        deadline = Deadline(asyncio.get_running_loop().time() + 30, 30)
        reservation = Reservation(QuotaRequest(str(index), tenant.name, (), NOTHING, 10**9, "m"), ())
        prepared = await self.prepared(work)
        async with Grant(tenant, prepared, deadline, reservation, MemoryLedger()) as grant:
            try:
                lane, inputs = self.upstream.lane_of(grant.prepared.work), self.upstream.model_inputs
                reply = await self.dispatcher.dispatch(grant, lane, inputs, Timeline())
            except GatewayError:
                return None
            return reply, grant._tokens


def assert_same(expected: Any, actual: Any, *unknown: str) -> None:
    """Check all fields of a reply, except tokens per input, which a joined reply may not report."""
    assert type(expected) is type(actual)
    for field in expected.__struct_fields__:
        if field == "input_tokens" or field in unknown:
            continue
        assert_equal(getattr(expected, field), getattr(actual, field))


def assert_equal(expected: Any, actual: Any) -> None:
    if isinstance(expected, np.ndarray):
        np.testing.assert_array_equal(expected, actual)
        assert expected.dtype == actual.dtype
    elif isinstance(expected, tuple) and not isinstance(actual, np.ndarray):
        assert len(expected) == len(actual)
        for a, b in zip(expected, actual, strict=True):
            assert_equal(a, b)
    elif isinstance(expected, TermWeights):
        assert_same(expected, actual)
    else:
        assert expected == actual


async def expected_of(world: World, work: Work) -> Reply:
    """Return the reply to the whole call, computed at once."""
    whole = whole_reply((await world.prepared(work)).work)
    if not isinstance(work, Similarity):
        return whole
    assert isinstance(whole, EmbedReply)
    sentence_vectors = whole.vectors[1:]
    scores = pair_cosines(np.repeat(whole.vectors[:1], len(sentence_vectors), axis=0), sentence_vectors)
    cut = whole.truncated or ()
    shown = tuple(range(len(scores))) if 0 in cut else tuple(i - 1 for i in cut)
    return RerankReply(scores, whole.tokens, shown)


async def run_history(history: dict[str, Any]) -> None:
    world = World(history)

    async def keep_reviving() -> None:
        while True:
            await asyncio.sleep(0.001)
            world.revive()

    prober = asyncio.create_task(keep_reviving())
    async with asyncio.timeout(PATIENCE_S):
        results = await asyncio.gather(*(world.call(i, work) for i, work in enumerate(history["works"])))
    prober.cancel()
    await asyncio.gather(prober, return_exceptions=True)
    expected_tokens = counted_tokens = 0
    for work, result in zip(history["works"], results, strict=True):
        if result is None:
            assert history["trouble"] > 0
            continue
        reply, counted = result
        expected = await expected_of(world, work)
        # If no tokens per input are reported, a joined reply's tokens are divided in proportion. Then only
        # the total is exact, and only if no work was computed once for several calls.
        shared = isinstance(work, Embed | Similarity) and not history["reports_tokens"]
        assert_same(expected, reply, *(["tokens"] if shared else []))
        assert reply.tokens == counted
        expected_tokens, counted_tokens = expected_tokens + expected.tokens, counted_tokens + counted
    prepared_works = [(await world.prepared(work)).work for work in history["works"]]
    inputs = [work_input for work in prepared_works for work_input in work.inputs]
    if None not in results and len(set(inputs)) == len(inputs):
        assert expected_tokens == counted_tokens


@settings(max_examples=200, deadline=None)
@given(histories)
def test_cut_and_joined_reply_equals_the_reply_to_the_whole_call(history: dict[str, Any]) -> None:
    asyncio.run(run_history(history))


def test_histories_cover_every_operation() -> None:
    """Fail when an operation is added and the histories do not draw it."""
    kinds = {work.operation for work in (Embed(("a",)), Encode(("a",), frozenset(Output)))}
    kinds |= {work.operation for work in (Rerank("q", ("a",)), Score((("q", "a"),)), Classify(("a",)))}
    kinds |= {work.operation for work in (Tokenize(("a",)), Detokenize(((1,),)))}

    # Inputs with images or sound are not cut by the texts' rules.
    media = {Operation.EMBED_IMAGE, Operation.EMBED_AUDIO, Operation.RERANK_IMAGE}
    assert kinds == set(Operation) - media
