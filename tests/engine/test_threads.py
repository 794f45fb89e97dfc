"""The threads that compute: who comes next, on how many cores, and what two passes at once may not do."""

import asyncio
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from threading import Barrier, Event, Lock
from time import monotonic, sleep
from weakref import ref

import numpy as np
import pytest
import torch
from transformers import Qwen3Config

from backends.contract import Embed, EmbedReply, Encode, EncodeReply, Output
from backends.errors import ReplicaFailed
from backends.torch.engine import Engine
from backends.torch.loaded_model import LoadedModel
from backends.torch.planner import plan
from backends.torch.sequences import Head, InputSequence, Row
from backends.torch.threads import ForwardThreads
from tests.engine.checkpoints import DECODERS, make_encoder
from tests.engine.conftest import Engines
from tests.engine.engines import load_tiny
from tests.engine.test_sparse import make_splade
from tests.engine.texts import real_texts

CPU = torch.device("cpu")
LONG_S = 20.0


def test_who_is_alone_has_all_cores_and_who_is_not_a_share() -> None:
    threads = ForwardThreads(CPU, cores=2)
    one_began, two_ended = Event(), Event()

    def one() -> int:
        cores = torch.get_num_threads()
        one_began.set()
        assert two_ended.wait(LONG_S)
        return cores

    first = threads.submit(one)
    assert one_began.wait(LONG_S)
    second = threads.submit(torch.get_num_threads)
    assert second.result(LONG_S) == 1
    two_ended.set()

    assert first.result(LONG_S) == 2
    assert threads.submit(torch.get_num_threads).result(LONG_S) == 2


@pytest.mark.parametrize(
    ("cores", "alone", "share"), [(1, 1, 1), (2, 2, 1), (3, 3, 1), (8, 5, 4), (16, 9, 8)]
)
def test_their_teams_have_no_more_threads_than_there_are_cores(cores: int, alone: int, share: int) -> None:
    threads = ForwardThreads(CPU, cores)
    both = Barrier(threads.count)

    def beside() -> int:
        both.wait(LONG_S)
        threads.take_cores()
        both.wait(LONG_S)
        return torch.get_num_threads()

    assert threads.submit(torch.get_num_threads).result(LONG_S) == alone
    together = [threads.submit(beside) for _ in range(threads.count)]
    assert [one.result(LONG_S) for one in together] == [share] * threads.count
    # What their teams hold beside themselves: the one's while it is alone, the others' while they rest.
    assert alone + (threads.count - 1) * (share - 1) <= cores


def test_another_device_computes_one_pass_at_a_time() -> None:
    assert ForwardThreads(torch.device("cuda"), cores=8).count == 1


def test_who_wants_more_waits_behind_the_others() -> None:
    threads = ForwardThreads(CPU, cores=1)
    order: list[str] = []
    hold, done = Event(), Event()

    def twice() -> bool:
        hold.wait(LONG_S)
        order.append("one")
        return order.count("one") < 2

    def last() -> bool:
        done.set()
        return False

    threads.enter(twice)
    threads.enter(lambda: order.append("other") is not None)
    hold.set()
    while order.count("one") < 2:
        sleep(0.001)
    threads.enter(last)

    assert done.wait(LONG_S)
    assert order == ["one", "other", "one"]


def test_what_breaks_takes_no_thread_along() -> None:
    threads = ForwardThreads(CPU, cores=1)

    def broken() -> bool:
        raise RuntimeError("boom")

    threads.enter(broken)
    failed: Future[None] = threads.submit(lambda: int("boom") and None)

    assert isinstance(failed.exception(LONG_S), ValueError)
    assert threads.submit(lambda: 5).result(LONG_S) == 5


class Counting:
    """Tells each sequence's length as its row. most: how many passes there ever were at once."""

    def __init__(self, both: Barrier | None = None) -> None:
        self.most = self._now = 0
        self._lock = Lock()
        self._both = both

    def run(self, sequences: list[InputSequence], outputs: frozenset[Output]) -> list[Row]:
        assert outputs == {Output.DENSE}
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        if self._both is not None:
            self._both.wait(LONG_S)
        sleep(0.0002)
        with self._lock:
            self._now -= 1
        return [Row(np.full(384, len(one.ids), dtype=np.float32)) for one in sequences]


@pytest.fixture
def eager_switches() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def engine_with(head: Head, whole: LoadedModel, *, reentrant: bool = True) -> Engine:
    one = LoadedModel(
        whole.recipe, whole.preparer, head, whole.capabilities, packed=True, reentrant=reentrant
    )
    return Engine(one, batch_tokens=64, queue_tokens=10**9, threads=ForwardThreads(CPU, cores=2))


async def test_one_call_is_computed_by_two_passes_at_once(minilm: Path, engine_of: Engines) -> None:
    head = Counting(Barrier(2))
    engine = engine_with(head, engine_of(minilm, "float32")._loaded)

    reply = await engine.run(Embed(("x " * 60,) * 2))

    assert isinstance(reply, EmbedReply)
    assert head.most == 2


@pytest.mark.usefixtures("eager_switches")
@pytest.mark.parametrize("reentrant", [True, False])
async def test_every_text_has_its_own_row_however_passes_overlap(
    minilm: Path, engine_of: Engines, reentrant: bool
) -> None:
    head = Counting()
    engine = engine_with(head, engine_of(minilm, "float32")._loaded, reentrant=reentrant)
    calls = [tuple("x " * (1 + (call * 7 + i) % 30) for i in range(24)) for call in range(40)]

    replies = await asyncio.gather(*(engine.run(Embed(texts, normalize=False)) for texts in calls))

    for texts, reply in zip(calls, replies, strict=True):
        assert isinstance(reply, EmbedReply)
        assert reply.vectors[:, 0].tolist() == [len(text) // 2 + 2 for text in texts]
    assert head.most == (2 if reentrant else 1)
    counted = engine.recorder.snapshot(0).distributions["te_batch_next_tokens"].total
    assert counted == sum(len(text) // 2 + 2 for texts in calls for text in texts)


@pytest.mark.parametrize(("kind", "reentrant"), [("default", True), ("dynamic", False)])
def test_a_network_that_changes_with_what_it_computes_computes_one_pass_at_a_time(
    kind: str, reentrant: bool, minilm: Path, tmp_path: Path
) -> None:
    config = DECODERS["qwen3"]()
    assert isinstance(config, Qwen3Config)
    config.rope_parameters = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}

    assert load_tiny(make_encoder(config, minilm, tmp_path)).reentrant is reentrant


def test_a_thread_that_rests_holds_nothing_of_what_it_did() -> None:
    threads = ForwardThreads(CPU, cores=1)
    held = Counting()
    seen = ref(held)
    threads.submit(partial(setattr, held, "most", 1)).result(LONG_S)

    del held
    until_s = monotonic() + LONG_S
    while seen() is not None and monotonic() < until_s:
        sleep(0.001)

    assert seen() is None


def test_both_sizes_of_team_are_warmed_up() -> None:
    threads = ForwardThreads(CPU, cores=2)
    sizes: list[int] = []

    threads.warm_up(lambda: sizes.append(torch.get_num_threads())).result(LONG_S)

    assert sizes == [1, 2]


def test_both_sizes_are_warmed_up_whoever_computes_meanwhile() -> None:
    threads = ForwardThreads(CPU, cores=2)
    sizes: list[int] = []
    ended = Event()
    computing = threads.submit(partial(ended.wait, LONG_S))

    warmed = threads.warm_up(lambda: sizes.append(torch.get_num_threads()))
    # Whoever comes after it does not wait for the first as well.
    assert threads.submit(lambda: True).result(LONG_S)
    assert not sizes
    ended.set()

    assert computing.result(LONG_S)
    warmed.result(LONG_S)
    assert sizes == [1, 2]


@pytest.mark.usefixtures("eager_switches")
async def test_passes_of_a_language_models_end_do_not_see_each_others_tokens(
    minilm: Path, tmp_path: Path
) -> None:
    make_splade("bert", minilm, tmp_path)
    model = load_tiny(tmp_path / "splade")
    engine = Engine(model, batch_tokens=64, queue_tokens=10**9, threads=ForwardThreads(CPU, cores=2))
    works = [Encode((text,), frozenset({Output.SPARSE})) for text in real_texts() if len(text) > 12][:60]
    expected = [await engine.run(work) for work in works]

    found = await asyncio.gather(*(engine.run(work) for work in works))

    for one_alone, beside in zip(expected, found, strict=True):
        assert isinstance(one_alone, EncodeReply)
        assert isinstance(beside, EncodeReply)
        assert one_alone.sparse is not None
        assert beside.sparse is not None
        assert beside.sparse[0].indices.tolist() == one_alone.sparse[0].indices.tolist()
        np.testing.assert_allclose(beside.sparse[0].values, one_alone.sparse[0].values, atol=1e-4)


async def test_what_cannot_be_planned_is_told_and_the_rest_is_computed(
    minilm: Path, engine_of: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(minilm, "float32")

    def planned(lengths: list[int], most: int, *, packed: bool) -> list[list[int]]:
        assert max(lengths) < 20
        return plan(lengths, most, packed=packed)

    monkeypatch.setattr("backends.torch.engine.plan", planned)

    for _ in range(engine._turns_max + 1):
        with pytest.raises(ReplicaFailed):
            await asyncio.wait_for(engine.run(Embed(("x " * 50,))), LONG_S)
    assert isinstance(await asyncio.wait_for(engine.run(Embed(("x",))), LONG_S), EmbedReply)


async def test_a_turn_that_breaks_is_told_and_the_next_is_taken(minilm: Path, engine_of: Engines) -> None:
    class Odd:
        def run(self, sequences: list[InputSequence], outputs: frozenset[Output]) -> list[Row]:
            assert outputs == {Output.DENSE}
            lengths = [len(one.ids) for one in sequences]
            # Too few rows: nothing that the engine looks for.
            return [Row(np.ones(384, dtype=np.float32)) for n in lengths if n != 7]

    engine = engine_with(Odd(), engine_of(minilm, "float32")._loaded)

    for _ in range(3):
        with pytest.raises(ReplicaFailed):
            await asyncio.wait_for(engine.run(Embed(("x " * 5,))), LONG_S)
    assert isinstance(await engine.run(Embed(("x",))), EmbedReply)
