"""Weights of 8 bits: fidelity, independence of the batch, memory, and reasons for a refusal."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

from backends.contract import Embed, EmbedReply, Encode, EncodeReply, Output, Rerank, RerankReply, Vectors
from backends.contract.errors import ModelUnavailable
from backends.recipe.options import TaskSettings
from backends.torch import wire
from backends.torch.load.inspection import inspect_folder
from backends.torch.load.load_plan import LoadOptions
from backends.torch.load.loader import describe, served_dtype
from backends.torch.memory import held_bytes
from backends.torch.networks import attention, int8
from backends.torch.networks.int8 import Int8Linear, KernelProbe, probe_kernel, refuse_slow, require_int8
from backends.torch.networks.precision import WideLinear
from backends.torch.passes.loaded_model import LoadedModel
from tests.engine.checkpoints import DECODERS, ENCODERS, make_classifier, make_encoder, make_language_model
from tests.engine.conftest import Engines
from tests.engine.engines import TEXTS, cosines, dense_of, engine_on, load_tiny, run_work
from tests.engine.test_formats import store_as

NETWORKS = {name: config for name, (config, _) in ENCODERS.items()} | DECODERS
ROWS = torch.randn(40, 256, generator=torch.Generator().manual_seed(3))


def smooth_checkpoint(name: str, minilm: Path, folder: Path) -> Path:
    """Write a checkpoint whose layers amplify rounding less than those of the other tests."""
    config = NETWORKS[name]()
    config.initializer_range = 0.1
    return make_encoder(config, minilm, folder)


async def vectors_of(model: LoadedModel, texts: list[str]) -> Vectors:
    return (await run_work(engine_on(model), Embed(tuple(texts)), EmbedReply)).vectors


def quantized(layer: nn.Linear, peaks: Tensor | None = None) -> Int8Linear:
    return Int8Linear(layer, peaks, saturates=probe_kernel().saturates)


@pytest.mark.parametrize("cutting", [attention.Cutting(), attention.Cutting(64), attention.Cutting(128, 16)])
async def test_minilm_is_faithful_and_its_vectors_do_not_depend_on_the_batch(
    minilm: Path, engine_of: Engines, monkeypatch: pytest.MonkeyPatch, cutting: attention.Cutting
) -> None:
    monkeypatch.setattr(attention, "fastest_cutting", lambda _: cutting)
    texts = ("ok", *TEXTS)
    engine = engine_of(minilm, "int8")
    expected = (await run_work(engine_of(minilm, "float32"), Embed(texts), EmbedReply)).vectors
    together = (await run_work(engine, Embed(texts), EmbedReply)).vectors
    alone = [(await run_work(engine, Embed((text,)), EmbedReply)).vectors[0] for text in texts[:8]]

    assert cosines(together, expected).min() >= int8.MIN_COSINE
    assert cosines(together, expected).min() < 0.99999
    assert cosines(np.stack(alone), together[:8]).min() > 0.9999


@pytest.mark.parametrize("name", ["bert", "modernbert", "deberta", "qwen3"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
async def test_architectures_are_served_with_and_without_padding(
    name: str, stored: torch.dtype, minilm: Path, tmp_path: Path
) -> None:
    folder = smooth_checkpoint(name, minilm, tmp_path)
    store_as(stored, folder)

    model = load_tiny(folder, "int8")
    assert "int8: least cosine to float32 on the probe texts " in model.capabilities.notes[-1]

    expected = await vectors_of(load_tiny(folder, "float32"), TEXTS)
    assert model.capabilities.dtype == "int8"
    assert cosines(await vectors_of(model, TEXTS), expected).min() >= int8.MIN_COSINE
    layers = [type(layer) for layer in model.head._network.modules()]  # type: ignore[attr-defined]
    assert Int8Linear in layers
    assert not {nn.Linear, WideLinear} & {*layers}


async def test_scores_and_terms_are_those_of_float32(minilm: Path, tmp_path: Path) -> None:
    config = ENCODERS["bert"][0]()
    config.initializer_range = 0.1
    classifier = make_classifier(config, minilm, tmp_path / "classifier")
    splade = make_language_model(config, minilm, tmp_path / "splade", transformers.AutoModelForMaskedLM)
    settings = TaskSettings(pooling="splade")
    pairs = Rerank(TEXTS[0], tuple(TEXTS[1:]), raw_scores=True)
    terms = Encode(tuple(TEXTS[:4]), frozenset({Output.SPARSE}))
    scores, weights = [], []
    for dtype in ("float32", "int8"):
        scores.append((await run_work(engine_on(load_tiny(classifier, dtype)), pairs, RerankReply)).scores)
        reply = await run_work(engine_on(load_tiny(splade, dtype, settings)), terms, EncodeReply)
        weights.append(np.stack([dense_of(row) for row in reply.sparse or ()]))

    assert np.corrcoef(*scores)[0, 1] > 0.99
    assert cosines(*weights).min() > 0.99


def test_a_layer_is_close_to_float32_and_holds_a_quarter() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(256, 192)
    # One input is far larger than the others, as in trained models.
    rows = ROWS * torch.ones(256).index_fill_(0, torch.tensor([7]), 60.0)
    expected = layer(rows).detach()

    plain, smoothed = quantized(layer)(rows), quantized(layer, rows.abs().amax(dim=0))(rows)

    assert cosines(smoothed.numpy(), expected.numpy()).min() > 0.999
    assert (smoothed - expected).norm() < (plain - expected).norm() / 2
    assert held_bytes(quantized(layer)) < 0.32 * held_bytes(layer)


def test_a_row_is_the_same_next_to_any_other() -> None:
    layer = quantized(nn.Linear(256, 192))
    neighbors = torch.cat([ROWS[:3], ROWS[3:] * 1e4, torch.zeros(1, 256)])

    assert torch.allclose(layer(neighbors)[:3], layer(ROWS[:3]), rtol=0, atol=1e-5)
    assert torch.allclose(layer(neighbors)[-1], layer._bias, rtol=0, atol=1e-6)
    assert layer(ROWS.view(2, 20, 256)).shape == (2, 20, 192)
    assert layer(ROWS[:0]).shape == (0, 192)
    assert layer(torch.full((1, 256), torch.nan)).isnan().all()


@pytest.mark.parametrize("width", [256, 33])
def test_the_largest_weights_and_activations_do_not_overflow(width: int) -> None:
    layer = nn.Linear(width, 8, bias=False)
    with torch.no_grad():
        layer.weight.fill_(0.75)
        layer.weight[1::2, ::3] = -0.75
    rows = torch.ones(20, width)
    rows[:, -1] = 0

    assert torch.allclose(quantized(layer)(rows), layer(rows), rtol=0.01, atol=0.01 * width)


def test_kernels_that_cut_off_sums_get_smaller_weights() -> None:
    weight = torch.tensor([[1.0, 1.0, -1.0, -1.0], [1.0, -1.0, 0.5, 0.0], [1.0, 0.25, -0.5, -0.25]])

    limited = int8._weight_scales(weight, saturates=True) * int8.WEIGHT_MAX
    whole = int8._weight_scales(weight, saturates=False) * int8.WEIGHT_MAX

    assert limited.tolist() == pytest.approx([2.0, 1.0, 1.25])
    assert whole.tolist() == pytest.approx([1.0, 1.0, 1.0])


def test_devices_compiled_models_and_static_models_are_refused(
    minilm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = smooth_checkpoint("bert", minilm, tmp_path)
    for options, cause in (
        (LoadOptions("int8", "cuda"), "needs `device: cpu`, and the device is cuda"),
        (LoadOptions("int8", "cpu", compiled=True), "`compile` does not serve"),
    ):
        with pytest.raises(ModelUnavailable, match=cause):
            describe(folder, "tiny", options)
    monkeypatch.setattr(
        "backends.torch.load.loader.CheckpointFiles", lambda _: SimpleNamespace(static=object())
    )
    with pytest.raises(ModelUnavailable, match="does not serve static models"):
        served_dtype(folder, LoadOptions("int8", "cpu"))


def test_int8_is_refused_where_it_is_not_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = KernelProbe(saturates=False, seconds=3e-3, other=torch.bfloat16, other_seconds=2e-3)
    assert refuse_slow(slow._replace(seconds=1e-3)) is None
    monkeypatch.setattr(int8, "probe_kernel", lambda: slow)
    monkeypatch.setattr(int8, "refuse_slow", refuse_slow)

    with pytest.raises(ModelUnavailable, match=r"not faster than bfloat16 .*3\.0 ms against 2\.0 ms a layer"):
        require_int8(torch.device("cpu"), compiled=False)


def test_a_wrong_or_absent_kernel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut_off(integers: Tensor, *_: Tensor) -> Tensor:
        return integers.float()[:, :1].expand(-1, 64)

    def fail(*_: Tensor) -> Tensor:
        raise RuntimeError("could not create a primitive")

    for broken, cause in ((cut_off, "needs exact products"), (fail, "has none for this processor")):
        monkeypatch.setattr(int8, "_multiply", broken)
        with pytest.raises(ModelUnavailable, match=cause):
            probe_kernel.__wrapped__()


def test_a_model_that_changes_too_much_is_refused(
    minilm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = smooth_checkpoint("bert", minilm, tmp_path)
    scales = int8._weight_scales
    monkeypatch.setattr(int8, "_weight_scales", lambda *given, **options: scales(*given, **options) * 50)

    with pytest.raises(
        ModelUnavailable, match=r"the cosine to float32 on the probe texts is 0\.\d+, and 0.995"
    ):
        load_tiny(folder, "int8")


def test_inspection_counts_a_quarter_for_linear_layers_only(minilm: Path) -> None:
    found = inspect_folder(wire.ModelBoot("m", str(minilm), dtype="int8", device="cpu"), minilm)

    assert found.refusal is None
    assert found.capabilities is not None
    assert found.capabilities.dtype == "int8"
    assert found.weights is not None
    assert found.weights.memory_bytes is not None
    # 10.6 of 22.7 million numbers are weights of linear layers.
    assert 56e6 < found.weights.memory_bytes < 62e6
