"""Recorded passes: size classes on any processor, CUDA graphs on a GPU."""

from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np
import pytest
import torch
from torch import Tensor

from backends.contract import Output
from backends.torch.inputs.sequences import InputSequence
from backends.torch.load.load_plan import LoadOptions
from backends.torch.load.loader import load
from backends.torch.networks import pass_graphs
from backends.torch.networks.packing import PackedEncoder
from backends.torch.networks.pass_graphs import PassGraphs, PassSize, Replay, sizes
from backends.torch.passes.threads import ForwardThreads
from loadtest.runtimes import sequences_of

DENSE = frozenset({Output.DENSE})
CPU = torch.device("cpu")
NAMES = ("input_ids", "position_ids")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Replays:
    """Recordings that compute again what they recorded, as a graph does, and count it."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def record(self, launch: Callable[[], Tensor]) -> Replay:
        """Record a pass."""
        self.recorded += 1
        output = launch().clone()

        def replay() -> Tensor:
            self.replayed += 1
            return output.copy_(launch())

        return replay


class Recorded(NamedTuple):
    """A head with recorded passes, its encoder, and the recordings."""

    head: Any
    packed: PackedEncoder
    graphs: PassGraphs
    replays: Replays


@pytest.fixture(scope="module")
def head(minilm: Path) -> Any:
    """Return the head of a network on a processor."""
    return load(minilm, "m", LoadOptions("float32", "cpu")).head


@pytest.fixture(scope="module")
def all_recorded(head: Any) -> Recorded:
    """Return a network with recorded passes of up to 256 tokens."""
    packed: PackedEncoder = head._network
    replays = Replays()
    graphs = PassGraphs(CPU, (*NAMES, "token_type_ids"), replays.record)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pass_graphs, "SHARE_MAX", float("inf"))
        note = graphs.choose(without_empty_sequences(packed.encoder), 256)
    assert note == "passes of up to 256 tokens are recorded as CUDA graphs; 256 is the most"
    return Recorded(head, packed, graphs, replays)


@pytest.fixture
def recorded(all_recorded: Recorded) -> Iterator[Recorded]:
    """Return a network that computes by its recorded passes during one test."""
    all_recorded.packed.graphs = all_recorded.graphs
    yield all_recorded
    all_recorded.packed.graphs = None


def without_empty_sequences(encoder: Any) -> Any:
    """Return the encoder for a processor, whose attention has no sequences without tokens."""

    def run(cu_seq_lens_q: Tensor, **inputs: Any) -> Any:
        return encoder(cu_seq_lens_q=cu_seq_lens_q.unique(), **inputs)

    return run


def test_size_classes_hold_many_short_sequences_or_few_long_ones() -> None:
    found = list(sizes(512))
    assert found == [
        PassSize(16, 2, 16),
        PassSize(32, 4, 32),
        PassSize(64, 8, 64),
        PassSize(128, 16, 128),
        PassSize(256, 32, 128),
        PassSize(256, 4, 256),
        PassSize(512, 64, 128),
        PassSize(512, 8, 512),
    ]
    assert found[4].has_room(PassSize(256, 32, 128))
    assert not found[4].has_room(PassSize(256, 2, 129))
    assert not found[5].has_room(PassSize(256, 5, 52))


@pytest.mark.parametrize(
    ("lengths", "is_recorded"),
    [
        ([8], True),
        ([16], True),
        ([17], True),
        ([5, 11, 3], True),
        ([3] * 32, True),
        ([250], True),
        ([200, 30, 20], True),
        # More sequences than any class has, or more tokens.
        ([3] * 33, False),
        ([250, 10], False),
    ],
)
def test_recorded_passes_agree_with_launched_ones(
    lengths: list[int], is_recorded: bool, recorded: Recorded
) -> None:
    before = recorded.replays.replayed
    # What an earlier pass left behind must not show.
    recorded.head.run(sequences_of([120, 130]), DENSE)
    found = recorded.head.run(sequences_of(lengths), DENSE)
    assert recorded.replays.replayed - before == 1 + is_recorded

    recorded.packed.graphs = None
    expected = recorded.head.run(sequences_of(lengths), DENSE)
    for row, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(row.dense, other.dense, atol=2e-6)


def test_inputs_that_were_not_recorded_are_launched(recorded: Recorded) -> None:
    before = recorded.replays.replayed
    fillers = [InputSequence([101, 102, 103, 103], [0] * 4, attended_tokens=2)]
    (row,) = recorded.head.run(fillers, frozenset({Output.TOKENS}))
    assert row.token_vectors.shape == (4, 384)
    with torch.inference_mode():
        recorded.packed.compute_packed(torch.ones(1, 4, dtype=torch.long), torch.ones(1, 4, dtype=torch.long))
    assert recorded.replays.replayed == before


def test_threads_do_not_read_outputs_of_each_other(recorded: Recorded) -> None:
    head = recorded.head
    batches = [sequences_of([length]) for length in (9, 10, 11, 12)]
    expected = [head.run(batch, DENSE)[0].dense for batch in batches]
    wrong: list[int] = []

    def compute(place: int) -> None:
        for _ in range(20):
            found = head.run(batches[place], DENSE)[0].dense
            if not np.allclose(found, expected[place], atol=2e-6):
                wrong.append(place)

    threads = [Thread(target=compute, args=(place,)) for place in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_pass_that_cannot_be_recorded_is_launched(head: Any) -> None:
    def refuse(launch: Callable[[], Tensor]) -> Replay:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    packed = head._network
    packed.graphs = PassGraphs(CPU, (*NAMES, "token_type_ids"), refuse)
    note = packed.graphs.choose(packed.encoder)
    assert note == "no pass is recorded as a CUDA graph: operation not permitted when stream is capturing"
    assert head.run(sequences_of([8]), DENSE)[0].dense.shape == (384,)
    packed.graphs = None


def test_recording_ends_where_it_gains_nothing(head: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_graphs, "SHARE_MAX", 0.0)
    replays = Replays()
    graphs = PassGraphs(CPU, (*NAMES, "token_type_ids"), replays.record)
    note = graphs.choose(without_empty_sequences(head._network.encoder))
    assert note.startswith("no pass is recorded as a CUDA graph: with 16 it takes")
    assert replays.recorded == 1


class Pool:
    """Memory of recordings, which PyTorch takes no more once all of them have ended."""

    def __init__(self) -> None:
        self.recordings: WeakSet[Any] = WeakSet()
        self.was_used = False

    def record(self, launch: Callable[[], Tensor]) -> Replay:
        if self.was_used and not self.recordings:
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
        replay = Replays().record(launch)
        self.was_used = True
        self.recordings.add(replay)
        return replay


def test_passes_can_be_recorded_again(head: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", Pool)
    monkeypatch.setattr(pass_graphs, "record_graph", lambda _, pool, launch: pool.record(launch))
    monkeypatch.setattr(pass_graphs, "SHARE_MAX", float("inf"))
    graphs = PassGraphs(CPU, (*NAMES, "token_type_ids"))
    encoder = without_empty_sequences(head._network.encoder)

    notes = [graphs.choose(encoder, 32) for _ in range(2)]

    assert notes == ["passes of up to 32 tokens are recorded as CUDA graphs; 32 is the most"] * 2


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_gpu_agrees_with_the_processor(dtype: Any, minilm: Path) -> None:
    on_cpu, on_gpu = (
        load(minilm, "m", LoadOptions(kind, device)).head
        for kind, device in (("float32", "cpu"), (dtype, "cuda"))
    )
    for lengths in ([8], [50], [250], [5, 11, 3], [50] * 20, [250, 100, 30, 7] * 8, [60] * 200):
        sequences = sequences_of(lengths)
        found, expected = (head.run(sequences, DENSE) for head in (on_gpu, on_cpu))
        cosines = [
            float(row.dense @ other.dense / np.linalg.norm(row.dense) / np.linalg.norm(other.dense))
            for row, other in zip(found, expected, strict=True)
        ]
        assert min(cosines) > (0.99999 if dtype == "float32" else 0.9995)


@pytest.mark.cuda
@needs_gpu
def test_recorded_passes_on_a_gpu_agree_with_launched_ones(minilm: Path) -> None:
    # As an engine process loads it.
    threads = ForwardThreads(torch.device("cuda"))
    options = LoadOptions("bfloat16", "cuda")
    loaded = load(minilm, "m", options, run_on_device=lambda run: threads.warm_up(run).result())
    assert any("are recorded as CUDA graphs" in note for note in loaded.capabilities.notes)
    head: Any = loaded.head
    graphs = head._network.graphs
    assert "are recorded as CUDA graphs" in graphs.choose(head._network.encoder)
    for lengths in ([8], [16], [17], [5, 11, 3], [3] * 40, [250], [200, 30, 20], [60] * 30):
        head._network.graphs = graphs
        found = head.run(sequences_of(lengths), DENSE)
        head._network.graphs = None
        expected = head.run(sequences_of(lengths), DENSE)
        for row, other in zip(found, expected, strict=True):
            cosine = row.dense @ other.dense / np.linalg.norm(row.dense) / np.linalg.norm(other.dense)
            assert cosine > 0.9999
