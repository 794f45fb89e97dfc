"""`runtime: openvino`: the same vectors for a text alone, or PyTorch and a note that names the reason."""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from backends.contract import Output
from backends.contract.errors import ModelUnavailable
from backends.recipe.options import DTypeName, Runtime
from backends.torch.inputs.sequences import InputSequence
from backends.torch.load.load_plan import LoadOptions
from backends.torch.load.loader import load, options_of
from backends.torch.memory import held_bytes
from backends.torch.networks import openvino_passes
from backends.torch.networks.openvino_passes import OpenVinoPasses
from backends.torch.passes.loaded_model import LoadedModel
from backends.torch.wire import ModelBoot
from tests.engine.checkpoints import DECODERS, ENCODERS, make_classifier, make_encoder
from tests.engine.engines import cosines

pytestmark = pytest.mark.slow

LENGTHS = (1, 2, 7, 16, 33, 60)
# Of a text alone to itself in a batch, as for PyTorch alone.
LEAST: dict[DTypeName, float] = {"float32": 0.999999, "bfloat16": 0.9999}


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def small(minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(ENCODERS["bert"][0](), minilm, tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def small_model(small: Path) -> LoadedModel:
    """Load the small encoder once: the trace of a network takes seconds."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    with pytest.MonkeyPatch.context() as patch:
        accept_any_speed(patch)
        model = load_with(small)
    torch.set_num_threads(threads)
    return model


def accept_any_speed(patch: pytest.MonkeyPatch) -> None:
    """Let OpenVINO compute whatever it may, however fast it is."""
    patch.setattr(openvino_passes, "SHARE_MAX", 1e9)
    patch.setattr(openvino_passes, "PASS_MAX_S", 1e9)
    patch.setattr(openvino_passes, "LENGTHS", (8, 64))
    patch.setattr(openvino_passes, "ROUNDS", 1)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let OpenVINO compute whatever it may; return the lengths of its passes."""
    accept_any_speed(monkeypatch)
    lengths: list[int] = []
    run = OpenVinoPasses._run

    def count(self: OpenVinoPasses, input_ids: torch.Tensor, types: torch.Tensor | None) -> torch.Tensor:
        lengths.append(input_ids.shape[1])
        return run(self, input_ids, types)

    monkeypatch.setattr(OpenVinoPasses, "_run", count)
    return lengths


def load_with(
    folder: Path, runtime: Runtime = "openvino", dtype: DTypeName = "float32", **options: Any
) -> LoadedModel:
    return load(folder, "m", LoadOptions(dtype, "cpu", runtime=runtime, **options))


def sequences(vocabulary: int, *, has_types: bool = False) -> list[InputSequence]:
    random = np.random.default_rng(5)
    found = []
    for length in LENGTHS:
        types = [0] * (length // 2) + [int(has_types)] * (length - length // 2)
        found.append(InputSequence(random.integers(5, vocabulary, length).tolist(), types))
    return found


def rows(model: LoadedModel, texts: list[InputSequence], *, alone: bool) -> np.ndarray[Any, Any]:
    """Return the dense rows of sequences, in one pass each or in one for all."""
    passes = [[text] for text in texts] if alone else [texts]
    outputs = frozenset({Output.DENSE})
    found = [row.dense for each in passes for row in model.head.run(each, outputs)]
    return np.stack([row for row in found if row is not None])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_text_alone_has_the_vector_that_it_has_in_a_batch(
    dtype: DTypeName, minilm: Path, passes: list[int]
) -> None:
    model, texts = load_with(minilm, dtype=dtype), sequences(30_000)
    passes.clear()
    alone = rows(model, texts, alone=True)
    counted = passes.copy()
    together = rows(model, texts, alone=False)
    plain = rows(load_with(minilm, "torch", dtype), texts, alone=False)

    # Its telemetry would fork the engine at each conversion and send statistics to a vendor.
    assert sys.modules["openvino_telemetry"] is None
    assert list(LENGTHS) == counted == passes
    assert LEAST[dtype] <= cosines(alone, together).min()
    assert LEAST[dtype] <= cosines(alone, plain).min()


@pytest.mark.parametrize("name", ["xlm-roberta", "distilbert", "modernbert"])
def test_encoders_of_other_families_agree(name: str, minilm: Path, tmp_path: Path, passes: list[int]) -> None:
    make_encoder((ENCODERS[name][0] if name in ENCODERS else DECODERS[name])(), minilm, tmp_path)
    model, texts = load_with(tmp_path), sequences(90)
    passes.clear()
    alone = rows(model, texts, alone=True)

    assert "computes single texts" in " ".join(model.capabilities.notes), model.capabilities.notes
    assert list(LENGTHS) == passes
    assert LEAST["float32"] <= cosines(alone, rows(load_with(tmp_path, "torch"), texts, alone=False)).min()


def test_a_cross_encoder_scores_a_single_pair_alike(minilm: Path, tmp_path: Path, passes: list[int]) -> None:
    make_classifier(ENCODERS["bert"][0](), minilm, tmp_path)
    model, texts = load_with(tmp_path), sequences(30_000, has_types=True)
    passes.clear()
    alone = rows(model, texts, alone=True)

    assert list(LENGTHS) == passes
    np.testing.assert_allclose(alone, rows(load_with(tmp_path, "torch"), texts, alone=False), atol=1e-4)


def test_the_memory_of_openvino_is_counted(small: Path, small_model: LoadedModel, passes: list[int]) -> None:
    plain, with_copy = held_bytes(load_with(small, "torch").head), held_bytes(small_model.head)
    rows(small_model, sequences(30_000), alone=True)
    assert passes
    # The weights as PyTorch holds them, OpenVINO's, and those that it has compiled.
    assert 2.8 * plain < with_copy < 3.2 * plain


def test_a_pass_next_to_others_stays_with_torch(small_model: LoadedModel, passes: list[int]) -> None:
    torch.set_num_threads(1)
    rows(small_model, sequences(30_000), alone=True)

    assert passes == []


def test_longer_texts_than_were_measured_stay_with_torch(small_model: LoadedModel, passes: list[int]) -> None:
    rows(small_model, [InputSequence([101] * 65, [0] * 65)], alone=True)

    assert passes == []


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("SHARE_MAX", 0.0, "with 8 tokens it takes"),
        ("COSINE_MIN", {torch.float32: 1.1}, "its vectors differ"),
    ],
)
def test_torch_computes_what_openvino_cannot_improve(
    name: str,
    value: object,
    reason: str,
    small: Path,
    passes: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(openvino_passes, name, value)
    model, texts = load_with(small), sequences(30_000)
    passes.clear()
    rows(model, texts, alone=True)

    note = model.capabilities.notes[-1]
    assert note.startswith("`runtime: openvino` has no effect")
    assert reason in note
    assert passes == []


@pytest.mark.parametrize(
    ("name", "reason"), [("qwen3", "cannot be converted"), ("mpnet", "computes padding")]
)
def test_a_network_that_openvino_cannot_compute_is_served_by_torch(
    name: str, reason: str, minilm: Path, tmp_path: Path, passes: list[int]
) -> None:
    make_encoder((ENCODERS[name][0] if name in ENCODERS else DECODERS[name])(), minilm, tmp_path)
    root = logging.getLogger()
    before = root.level, root.filters.copy(), root.handlers.copy()
    model, texts = load_with(tmp_path), sequences(90)

    assert before == (root.level, root.filters, root.handlers)
    assert reason in " ".join(model.capabilities.notes)
    expected = rows(load_with(tmp_path, "torch"), texts, alone=True)
    assert cosines(rows(model, texts, alone=True), expected).min() > LEAST["float32"]
    assert passes == []


def test_refuses_what_it_cannot_serve(minilm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelUnavailable, match="needs `dtype: float32` or `bfloat16`"):
        load_with(minilm, dtype="int8")
    with pytest.raises(ModelUnavailable, match="needs `device: cpu`"):
        openvino_passes.require_openvino(torch.device("cuda"), "bfloat16")
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(ModelUnavailable, match="pip install 'openvino>="):
        load_with(minilm)


def test_the_setting_of_an_upstream_reaches_the_load() -> None:
    assert options_of(ModelBoot("m", "m", runtime="openvino")).runtime == "openvino"
