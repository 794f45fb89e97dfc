"""Threads that compute forward passes: order of turns, cores, and isolation of concurrent passes."""

import asyncio
import os
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from threading import Barrier, Event, Lock, get_native_id
from time import monotonic, sleep
from weakref import ref

import msgspec
import numpy as np
import pytest
import torch
from transformers import Qwen3Config

from backends.contract import Embed, EmbedParts, EmbedReply, Encode, EncodeReply, Output
from backends.contract.errors import ReplicaFailed, ReplicaOverloaded
from backends.torch.inputs.sequences import Head, InputSequence, Row
from backends.torch.passes.engine import Engine
from backends.torch.passes.jobs import plan
from backends.torch.passes.loaded_model import LoadedModel
from backends.torch.passes.threads import ForwardThreads
from backends.torch.priority import BACKGROUND_NICENESS, NICENESS_MAX
from tests.engine.checkpoints import DECODERS, make_encoder
from tests.engine.conftest import Engines
from tests.engine.dual_checkpoints import make_dual
from tests.engine.engines import load_tiny
from tests.engine.test_sparse import make_splade
from tests.engine.texts import real_texts
from tests.pictures import encoded, noise, part_of

CPU = torch.device("cpu")
LONG_S = 20.0


def test_single_pass_uses_all_cores_and_concurrent_passes_share_them() -> None:
    threads = ForwardThreads(CPU, cores=2)
    first_began, second_ended = Event(), Event()

    def count_cores() -> int:
        cores = torch.get_num_threads()
        first_began.set()
        assert second_ended.wait(LONG_S)
        return cores

    first = threads.submit(count_cores)
    assert first_began.wait(LONG_S)
    second = threads.submit(torch.get_num_threads)
    assert second.result(LONG_S) == 1
    second_ended.set()

    assert first.result(LONG_S) == 2
    assert threads.submit(torch.get_num_threads).result(LONG_S) == 2


@pytest.mark.parametrize(
    ("cores", "alone", "share"), [(1, 1, 1), (2, 2, 1), (3, 3, 1), (8, 5, 4), (16, 9, 8)]
)
def test_teams_have_no_more_threads_than_cores(cores: int, alone: int, share: int) -> None:
    threads = ForwardThreads(CPU, cores)
    both = Barrier(threads.count)

    def count_shared() -> int:
        both.wait(LONG_S)
        threads.take_cores()
        both.wait(LONG_S)
        return torch.get_num_threads()

    assert threads.submit(torch.get_num_threads).result(LONG_S) == alone
    together = [threads.submit(count_shared) for _ in range(threads.count)]
    assert [future.result(LONG_S) for future in together] == [share] * threads.count
    # Threads of all teams: those of a single pass, and the idle ones of the other teams.
    assert alone + (threads.count - 1) * (share - 1) <= cores


def test_gpu_computes_one_pass_at_a_time() -> None:
    assert ForwardThreads(torch.device("cuda"), cores=8).count == 1


def test_turns_alternate_between_engines() -> None:
    threads = ForwardThreads(CPU, cores=1)
    order: list[str] = []
    hold, done = Event(), Event()

    def twice() -> bool:
        hold.wait(LONG_S)
        order.append("first")
        return order.count("first") < 2

    def last() -> bool:
        done.set()
        return False

    threads.enter(twice)
    threads.enter(lambda: order.append("second") is not None)
    hold.set()
    while order.count("first") < 2:
        sleep(0.001)
    threads.enter(last)

    assert done.wait(LONG_S)
    assert order == ["first", "second", "first"]


def test_thread_survives_a_failing_turn() -> None:
    threads = ForwardThreads(CPU, cores=1)

    def broken() -> bool:
        raise RuntimeError("boom")

    threads.enter(broken)
    failed: Future[None] = threads.submit(lambda: int("boom") and None)

    assert isinstance(failed.exception(LONG_S), ValueError)
    assert threads.submit(lambda: 5).result(LONG_S) == 5


class Counting:
    """Head that returns the length of each sequence. most: maximum of concurrent passes."""

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
        return [Row(np.full(384, len(sequence.ids), dtype=np.float32)) for sequence in sequences]


@pytest.fixture
def eager_switches() -> Iterator[None]:
    """Make threads switch as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def engine_with(head: Head, whole: LoadedModel, *, reentrant: bool = True) -> Engine:
    model = LoadedModel(
        whole.recipe, whole.preparer, head, whole.capabilities, packed=True, reentrant=reentrant
    )
    return Engine(model, batch_tokens=64, queue_tokens=10**9, threads=ForwardThreads(CPU, cores=2))


class HoldingPictures(Counting):
    """Head that computes texts at once, and pictures after they were released."""

    def __init__(self) -> None:
        super().__init__()
        self.began, self.released = Event(), Event()

    def run(self, sequences: list[InputSequence], outputs: frozenset[Output]) -> list[Row]:
        if sequences[0].features is not None:
            self.began.set()
            assert self.released.wait(LONG_S)
        return super().run(sequences, outputs)


def test_background_threads_leave_the_cores_to_others() -> None:
    threads = ForwardThreads(CPU, cores=2)

    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, get_native_id())

    own, lower = (group.submit(niceness).result(LONG_S) for group in (threads, threads.background))

    assert threads.background is threads.background
    assert min(own + BACKGROUND_NICENESS, NICENESS_MAX) == lower
    assert threads.background.count == threads.count


def test_a_gpu_has_no_background_threads() -> None:
    threads = ForwardThreads(torch.device("cuda"), cores=8)
    assert threads.background is threads


@pytest.mark.parametrize("reentrant", [True, False])
async def test_texts_wait_for_no_picture_unless_passes_would_disturb_each_other(
    minilm: Path, tmp_path: Path, reentrant: bool
) -> None:
    make_dual("clip", minilm, tmp_path / "clip")
    head = HoldingPictures()
    loaded = msgspec.structs.replace(load_tiny(tmp_path / "clip"), head=head, reentrant=reentrant)
    engine = Engine(loaded, batch_tokens=64, queue_tokens=10**9, threads=ForwardThreads(CPU, cores=2))
    pictures = [
        asyncio.create_task(engine.run(EmbedParts(((part_of(encoded(noise(9, 9, seed))),),))))
        for seed in range(9)
    ]
    assert await asyncio.to_thread(head.began.wait, LONG_S)
    text = asyncio.create_task(engine.run(Embed(("a b",))))
    done, _ = await asyncio.wait([text], timeout=LONG_S if reentrant else 0.2)
    head.released.set()
    replies = await asyncio.gather(text, *pictures)

    assert ({text} if reentrant else set()) == done
    assert 10 == len(replies)
    assert head.most <= (4 if reentrant else 1)


async def test_a_full_queue_of_pictures_refuses_no_text(minilm: Path, tmp_path: Path) -> None:
    make_dual("clip", minilm, tmp_path / "clip")
    head = HoldingPictures()
    loaded = msgspec.structs.replace(load_tiny(tmp_path / "clip"), head=head)
    engine = Engine(loaded, batch_tokens=64, queue_tokens=20, threads=ForwardThreads(CPU, cores=2))
    parts = [(part_of(encoded(noise(9, 9, seed))),) for seed in range(12)]
    pictures = [asyncio.create_task(engine.run(EmbedParts((part,)))) for part in parts]
    # The first ones compute, one waits, and the others are refused.
    _, held = await asyncio.wait(pictures, timeout=LONG_S, return_when=asyncio.FIRST_EXCEPTION)
    assert held
    reply = await asyncio.wait_for(engine.run(Embed(("a b",))), LONG_S)
    head.released.set()
    ended = await asyncio.gather(*pictures, return_exceptions=True)

    assert isinstance(reply, EmbedReply)
    assert {EmbedReply, ReplicaOverloaded} == {type(outcome) for outcome in ended}


async def test_one_call_is_computed_by_two_concurrent_passes(minilm: Path, engine_of: Engines) -> None:
    head = Counting(Barrier(2))
    engine = engine_with(head, engine_of(minilm, "float32")._loaded)

    reply = await engine.run(Embed(("x " * 60,) * 2))

    assert isinstance(reply, EmbedReply)
    assert head.most == 2


@pytest.mark.usefixtures("eager_switches")
@pytest.mark.parametrize("reentrant", [True, False])
async def test_every_text_gets_its_own_row_when_passes_overlap(
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
def test_stateful_network_computes_one_pass_at_a_time(
    kind: str, reentrant: bool, minilm: Path, tmp_path: Path
) -> None:
    config = DECODERS["qwen3"]()
    assert isinstance(config, Qwen3Config)
    config.rope_parameters = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}

    assert load_tiny(make_encoder(config, minilm, tmp_path)).reentrant is reentrant


def test_idle_thread_holds_no_reference_to_its_last_turn() -> None:
    threads = ForwardThreads(CPU, cores=1)
    held = Counting()
    seen = ref(held)
    threads.submit(partial(setattr, held, "most", 1)).result(LONG_S)

    del held
    until_s = monotonic() + LONG_S
    while seen() is not None and monotonic() < until_s:
        sleep(0.001)

    assert seen() is None


def test_both_team_sizes_are_warmed_up() -> None:
    threads = ForwardThreads(CPU, cores=2)
    sizes: list[int] = []

    threads.warm_up(lambda: sizes.append(torch.get_num_threads())).result(LONG_S)

    assert sizes == [1, 2]


def test_a_gpu_leaves_the_processor_one_thread_of_work() -> None:
    threads = ForwardThreads(torch.device("cuda"), cores=8)
    sizes: list[int] = []

    threads.warm_up(lambda: sizes.append(torch.get_num_threads())).result(LONG_S)

    assert sizes == [1]


def test_both_team_sizes_are_warmed_up_during_another_pass() -> None:
    threads = ForwardThreads(CPU, cores=2)
    sizes: list[int] = []
    ended = Event()
    computing = threads.submit(partial(ended.wait, LONG_S))

    warmed = threads.warm_up(lambda: sizes.append(torch.get_num_threads()))
    # A pass submitted after the warm-up does not wait for the first one.
    assert threads.submit(lambda: True).result(LONG_S)
    assert not sizes
    ended.set()

    assert computing.result(LONG_S)
    warmed.result(LONG_S)
    assert sizes == [1, 2]


@pytest.mark.usefixtures("eager_switches")
async def test_concurrent_passes_of_a_language_head_do_not_mix_tokens(minilm: Path, tmp_path: Path) -> None:
    make_splade("bert", minilm, tmp_path)
    model = load_tiny(tmp_path / "splade")
    engine = Engine(model, batch_tokens=64, queue_tokens=10**9, threads=ForwardThreads(CPU, cores=2))
    works = [Encode((text,), frozenset({Output.SPARSE})) for text in real_texts() if len(text) > 12][:60]
    expected = [await engine.run(work) for work in works]

    found = await asyncio.gather(*(engine.run(work) for work in works))

    for single, concurrent in zip(expected, found, strict=True):
        assert isinstance(single, EncodeReply)
        assert isinstance(concurrent, EncodeReply)
        assert single.sparse is not None
        assert concurrent.sparse is not None
        assert concurrent.sparse[0].indices.tolist() == single.sparse[0].indices.tolist()
        np.testing.assert_allclose(concurrent.sparse[0].values, single.sparse[0].values, atol=1e-4)


async def test_planning_failure_is_reported_and_other_work_is_computed(
    minilm: Path, engine_of: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(minilm, "float32")

    def planned(lengths: list[int], most: int, *, packed: bool) -> list[list[int]]:
        assert max(lengths) < 20
        return plan(lengths, most, packed=packed)

    monkeypatch.setattr("backends.torch.passes.engine.plan", planned)

    for _ in range(engine._texts.turns_max + 1):
        with pytest.raises(ReplicaFailed):
            await asyncio.wait_for(engine.run(Embed(("x " * 50,))), LONG_S)
    assert isinstance(await asyncio.wait_for(engine.run(Embed(("x",))), LONG_S), EmbedReply)


async def test_failed_turn_is_reported_and_the_next_one_runs(minilm: Path, engine_of: Engines) -> None:
    class Odd:
        def run(self, sequences: list[InputSequence], outputs: frozenset[Output]) -> list[Row]:
            assert outputs == {Output.DENSE}
            lengths = [len(sequence.ids) for sequence in sequences]
            # Too few rows: an error that the engine does not expect.
            return [Row(np.ones(384, dtype=np.float32)) for n in lengths if n != 7]

    engine = engine_with(Odd(), engine_of(minilm, "float32")._loaded)

    for _ in range(3):
        with pytest.raises(ReplicaFailed):
            await asyncio.wait_for(engine.run(Embed(("x " * 5,))), LONG_S)
    assert isinstance(await engine.run(Embed(("x",))), EmbedReply)
