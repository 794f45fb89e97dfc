"""Several models in one engine process: loading, waiting, eviction and lack of memory."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from weakref import ref

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from backends.contract import Embed, EmbedReply, Output, Residence
from backends.contract.errors import ModelNotLoaded, ModelUnavailable
from backends.recipe.options import DTypeName
from backends.torch import wire
from backends.torch.inputs.sequences import InputSequence, Row
from backends.torch.load.inspection import inspect_folder
from backends.torch.load.load_plan import LoadOptions
from backends.torch.load.loader import RunOnDevice, estimate_bytes, load, load_model
from backends.torch.memory import held_bytes
from backends.torch.passes.loaded_model import LoadedModel
from backends.torch.serving.model_host import ModelHost
from tests.engine.checkpoints import ENCODERS, make_encoder
from tests.waiting import PATIENCE_S

HELLO = Embed(("hello",))


@pytest.fixture(scope="module")
def checkpoint(minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(ENCODERS["bert"][0](), minilm, tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def weight(checkpoint: Path) -> int:
    """Return the memory of one loaded model."""
    models = ModelHost(boot_of(checkpoint, "a"), lambda _: None)
    await embed(models, "a")
    return models.residence("a").memory_bytes


class Reports(list[wire.State]):
    """States that an engine reported."""

    def states(self, model: str) -> list[str]:
        found = [report.state for report in self if report.model == model]
        return [state for i, state in enumerate(found) if i == 0 or found[i - 1] != state]


def boot_of(checkpoint: Path, names: str, **options: bool) -> wire.EngineBoot:
    lazy = {"preload": False, **options}
    models = tuple(
        wire.ModelBoot(name, str(checkpoint), dtype="float32", device="cpu", **lazy) for name in names
    )
    return wire.EngineBoot("", 0, models)


async def embed(models: ModelHost, name: str) -> EmbedReply:
    reply = await models.run(name, HELLO)
    assert isinstance(reply, EmbedReply)
    return reply


def states(models: ModelHost, names: str) -> list[str]:
    return [models.residence(name).state for name in names]


async def test_model_is_described_at_start_and_loaded_by_its_first_request(checkpoint: Path) -> None:
    reports = Reports()
    models = ModelHost(boot_of(checkpoint, "a"), reports.append)
    await models.start()
    described = models.capabilities("a")
    reply = await embed(models, "a")

    assert described is not None
    assert not described.loaded
    assert replace(described, loaded=True) == models.capabilities("a")
    assert reply.vectors.shape == (1, 32)
    assert reports.states("a") == ["unloaded", "loading", "loaded"]


async def test_concurrent_requests_cause_one_load(checkpoint: Path) -> None:
    models = ModelHost(boot_of(checkpoint, "a"), lambda _: None)
    await asyncio.gather(*(embed(models, "a") for _ in range(20)))

    assert models.residence("a").loads == 1


async def test_evicts_the_least_recently_used_model(checkpoint: Path, weight: int) -> None:
    boot = replace(boot_of(checkpoint, "abcd"), memory_bytes=3 * weight + 1000)
    models = ModelHost(boot, lambda _: None)
    for name in "abcad":
        await embed(models, name)

    assert states(models, "abcd") == ["loaded", "unloaded", "loaded", "loaded"]
    assert models.residence("b").unloads == {"room": 1}
    assert sum(models.residence(name).memory_bytes for name in "abcd") <= 3 * weight + 1000


async def test_serves_all_models_with_room_for_one(checkpoint: Path, weight: int) -> None:
    boot = replace(boot_of(checkpoint, "abcd"), memory_bytes=weight + 1000)
    models = ModelHost(boot, lambda _: None)
    replies = await asyncio.gather(*(embed(models, name) for name in "abcd" * 5))

    assert len({reply.vectors.tobytes() for reply in replies}) == 1
    assert states(models, "abcd").count("loaded") == 1
    assert sum(models.residence(name).loads for name in "abcd") < 20


async def test_preloading_stops_when_the_budget_is_used_up(checkpoint: Path, weight: int) -> None:
    boot = replace(boot_of(checkpoint, "abc", preload=True), memory_bytes=2 * weight + 1000)
    models = ModelHost(boot, lambda _: None)
    await models.start()

    assert states(models, "abc") == ["loaded", "loaded", "unloaded"]
    assert models.capabilities("c") is not None


async def test_error_of_a_model_larger_than_the_budget_names_both_sizes(
    checkpoint: Path, weight: int
) -> None:
    for needed in (weight, estimate_bytes(boot_of(checkpoint, "a").models[0], checkpoint)):
        boot = replace(boot_of(checkpoint, "a"), memory_bytes=needed - 1)
        models = ModelHost(boot, lambda _: None)
        megabytes = f"{needed / 1e6:.0f} MB"
        with pytest.raises(ModelUnavailable, match=f"it needs {megabytes} .* is {megabytes}"):
            await embed(models, "a")

        assert models.residence("a").state == "failed"
        assert megabytes in (models.residence("a").error or "")


async def test_request_that_does_not_wait_fails_until_the_model_is_loaded(checkpoint: Path) -> None:
    loaded = asyncio.Event()
    loop = asyncio.get_running_loop()

    def report(state: wire.State) -> None:
        if state.state == "loaded":
            loop.call_soon_threadsafe(loaded.set)

    models = ModelHost(boot_of(checkpoint, "a", waits=False), report)
    with pytest.raises(ModelNotLoaded):
        await embed(models, "a")
    await loaded.wait()

    assert (await embed(models, "a")).tokens == 3


class Gate:
    """Loader that holds back the load of one model until the gate opens."""

    def __init__(self, shut: str) -> None:
        self.shut = shut
        self.open = Event()

    def __call__(
        self, boot: wire.ModelBoot, folder: Path, report: Callable[[str], None], run_on_device: RunOnDevice
    ) -> LoadedModel:
        if boot.name == self.shut:
            assert self.open.wait(PATIENCE_S)
        return load_model(boot, folder, report, run_on_device)


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate("slow")
    yield gate
    gate.open.set()


def with_slow(checkpoint: Path) -> wire.EngineBoot:
    boot = boot_of(checkpoint, "a")
    return replace(boot, models=(*boot.models, replace(boot.models[0], name="slow")))


async def test_loading_a_model_does_not_delay_another(checkpoint: Path, gate: Gate) -> None:
    models = ModelHost(with_slow(checkpoint), lambda _: None, gate)
    await embed(models, "a")
    waiting = asyncio.create_task(embed(models, "slow"))
    for _ in range(5):
        await embed(models, "a")
    assert not waiting.done()
    gate.open.set()

    assert (await waiting).tokens == 3


async def test_request_cancelled_during_a_load_releases_the_model(checkpoint: Path, gate: Gate) -> None:
    models = ModelHost(with_slow(checkpoint), lambda _: None, gate)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await embed(models, "slow")
    waiting = asyncio.create_task(embed(models, "slow"))
    gate.open.set()
    await waiting

    assert models._models["slow"].in_flight == 0
    assert models.residence("slow").loads == 1


async def test_idle_model_is_unloaded(checkpoint: Path) -> None:
    unloaded = asyncio.Event()

    def report(state: wire.State) -> None:
        if state.state == "unloaded":
            unloaded.set()

    models = ModelHost(replace(boot_of(checkpoint, "a"), idle_s=0.02), report)
    evicting = asyncio.create_task(models.evict_idle_forever())
    await embed(models, "a")
    await unloaded.wait()
    evicting.cancel()

    assert models.residence("a") == Residence("unloaded", loads=1, unloads={"idle": 1})
    assert (await embed(models, "a")).tokens == 3


async def test_failed_load_reports_its_reason_and_spares_other_models(
    checkpoint: Path, tmp_path: Path
) -> None:
    boot = boot_of(checkpoint, "ab")
    broken = replace(boot.models[1], model=str(tmp_path))
    models = ModelHost(replace(boot, models=(boot.models[0], broken)), lambda _: None)
    for _ in range(2):
        with pytest.raises(ModelUnavailable, match="not a whole checkpoint"):
            await embed(models, "b")

    assert (await embed(models, "a")).tokens == 3
    assert models.residence("b").failed_loads == 1


class SmallMemory:
    """Head with memory for `tokens_most` tokens at a time."""

    def __init__(self, head: object, tokens_most: int, error: type[Exception]) -> None:
        self.head = head
        self.tokens_most = tokens_most
        self.error = error

    def run(self, sequences: list[InputSequence], outputs: frozenset[Output]) -> list[Row]:
        if sum(len(sequence.ids) for sequence in sequences) > self.tokens_most:
            raise self.error("no memory for that many tokens")
        return self.head.run(sequences, outputs)  # type: ignore[attr-defined, no-any-return]


def short_of_memory(tokens_most: int, error: type[Exception]) -> Callable[..., LoadedModel]:
    def open_model(
        boot: wire.ModelBoot, folder: Path, report: Callable[[str], None], run_on_device: RunOnDevice
    ) -> LoadedModel:
        model = load_model(boot, folder, report, run_on_device)
        head = SmallMemory(model.head, tokens_most, error)
        return replace(model, head=head) if boot.name == "a" else model

    return open_model


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
async def test_batch_without_memory_is_split_and_later_batches_are_smaller(
    error: type[Exception], checkpoint: Path
) -> None:
    models = ModelHost(boot_of(checkpoint, "ab"), lambda _: None, short_of_memory(100, error))
    await embed(models, "b")
    work = Embed(tuple(f"word {i} " * 10 for i in range(20)))
    first = await models.run("a", work)
    missed = models.residence("a").out_of_memory
    second = await models.run("a", work)
    whole = await models.run("b", work)

    assert isinstance(first, EmbedReply)
    assert isinstance(second, EmbedReply)
    assert isinstance(whole, EmbedReply)
    np.testing.assert_allclose(first.vectors, whole.vectors, atol=1e-5)
    assert missed > 0
    assert models.residence("a").out_of_memory == missed
    assert models.residence("b").unloads == {"out_of_memory": 1}


async def test_input_too_large_for_memory_fails_alone(checkpoint: Path) -> None:
    models = ModelHost(boot_of(checkpoint, "a"), lambda _: None, short_of_memory(50, MemoryError))
    texts = ["short", "word " * 80, "also short"]
    replies = await asyncio.gather(
        *(models.run("a", Embed((text,))) for text in texts), return_exceptions=True
    )

    assert [isinstance(reply, EmbedReply) for reply in replies] == [True, False, True]
    assert "not enough memory for an input of 82 tokens" in str(replies[1])


async def test_load_without_memory_is_retried_after_unloading_the_others(checkpoint: Path) -> None:
    tries = []

    def open_model(
        boot: wire.ModelBoot, folder: Path, report: Callable[[str], None], run_on_device: RunOnDevice
    ) -> LoadedModel:
        tries.append(boot.name)
        if tries.count("b") == 1 and boot.name == "b":
            raise torch.OutOfMemoryError
        return load_model(boot, folder, report, run_on_device)

    models = ModelHost(boot_of(checkpoint, "ab"), lambda _: None, open_model)
    await embed(models, "a")
    await embed(models, "b")

    assert tries == ["a", "b", "b"]
    assert states(models, "ab") == ["unloaded", "loaded"]


async def test_unloaded_model_releases_its_network(checkpoint: Path, weight: int) -> None:
    models = ModelHost(replace(boot_of(checkpoint, "ab"), memory_bytes=weight + 1000), lambda _: None)
    await embed(models, "a")
    engine = models._models["a"].engine
    assert engine is not None
    network = ref(engine._loaded.head)
    del engine
    await embed(models, "b")

    assert states(models, "ab") == ["unloaded", "loaded"]
    assert network() is None


@pytest.mark.parametrize("served", ["float32", "bfloat16"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_memory_is_estimated_in_the_formats_of_the_loaded_weights(
    stored: torch.dtype, served: DTypeName, minilm: Path, tmp_path: Path
) -> None:
    path = make_encoder(ENCODERS["bert"][0](), minilm, tmp_path) / "model.safetensors"
    save_file({name: tensor.to(stored) for name, tensor in load_file(path).items()}, path, {"format": "pt"})
    model = load(tmp_path, "tiny", LoadOptions(served, "cpu"))
    boot = wire.ModelBoot("tiny", str(tmp_path), dtype=served, device="cpu")

    estimate = estimate_bytes(boot, tmp_path)

    # The pooler is among the files, and is not held.
    assert held_bytes(model.head) <= estimate < 1.05 * held_bytes(model.head)
    assert inspect_folder(boot, tmp_path).weights.memory_bytes == estimate
