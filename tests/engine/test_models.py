"""Several models in one engine: who is in memory, who waits, and what running out of memory costs."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from weakref import ref

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from backends.contract import Embed, EmbedReply, Output, Residence
from backends.errors import ModelNotLoaded, ModelUnavailable
from backends.torch import wire
from backends.torch.loaded_model import LoadedModel
from backends.torch.loading import RunOnDevice, load_model
from backends.torch.model_host import ModelHost
from backends.torch.sequences import InputSequence, Row
from tests.engine.checkpoints import ENCODERS, make_encoder

HELLO = Embed(("hello",))


@pytest.fixture(scope="module")
def checkpoint(minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(ENCODERS["bert"][0](), minilm, tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def weight(checkpoint: Path) -> int:
    """What one holds."""
    models = ModelHost(boot_of(checkpoint, "a"), lambda _: None)
    await embed(models, "a")
    return models.residence("a").memory_bytes


class Told(list[wire.State]):
    """What an engine reported."""

    def states(self, model: str) -> list[str]:
        found = [one.state for one in self if one.model == model]
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


async def test_a_model_is_described_at_once_and_loaded_when_first_asked(checkpoint: Path) -> None:
    told = Told()
    models = ModelHost(boot_of(checkpoint, "a"), told.append)
    await models.start()
    foretold = models.capabilities("a")
    reply = await embed(models, "a")

    assert foretold is not None
    assert not foretold.loaded
    assert replace(foretold, loaded=True) == models.capabilities("a")
    assert reply.vectors.shape == (1, 32)
    assert told.states("a") == ["unloaded", "loading", "loaded"]


async def test_many_that_ask_at_once_cause_one_load(checkpoint: Path) -> None:
    models = ModelHost(boot_of(checkpoint, "a"), lambda _: None)
    await asyncio.gather(*(embed(models, "a") for _ in range(20)))

    assert models.residence("a").loads == 1


async def test_the_least_recently_used_makes_room(checkpoint: Path, weight: int) -> None:
    boot = replace(boot_of(checkpoint, "abcd"), memory_bytes=3 * weight + 1000)
    models = ModelHost(boot, lambda _: None)
    for name in "abcad":
        await embed(models, name)

    assert states(models, "abcd") == ["loaded", "unloaded", "loaded", "loaded"]
    assert models.residence("b").unloads == {"room": 1}
    assert sum(models.residence(name).memory_bytes for name in "abcd") <= 3 * weight + 1000


async def test_with_room_for_one_everybody_gets_through(checkpoint: Path, weight: int) -> None:
    boot = replace(boot_of(checkpoint, "abcd"), memory_bytes=weight + 1000)
    models = ModelHost(boot, lambda _: None)
    replies = await asyncio.gather(*(embed(models, name) for name in "abcd" * 5))

    assert len({one.vectors.tobytes() for one in replies}) == 1
    assert states(models, "abcd").count("loaded") == 1
    assert sum(models.residence(name).loads for name in "abcd") < 20


async def test_preloading_stops_where_the_room_ends(checkpoint: Path, weight: int) -> None:
    boot = replace(boot_of(checkpoint, "abc", preload=True), memory_bytes=2 * weight + 1000)
    models = ModelHost(boot, lambda _: None)
    await models.start()

    assert states(models, "abc") == ["loaded", "loaded", "unloaded"]
    assert models.capabilities("c") is not None


async def test_one_that_is_larger_than_the_budget_is_refused_with_both_sizes(
    checkpoint: Path, weight: int
) -> None:
    file_bytes = (checkpoint / "model.safetensors").stat().st_size
    for needed in (weight, file_bytes):
        boot = replace(boot_of(checkpoint, "a"), memory_bytes=needed - 1)
        models = ModelHost(boot, lambda _: None)
        megabytes = f"{needed / 1e6:.0f} MB"
        with pytest.raises(ModelUnavailable, match=f"it needs {megabytes} .* is {megabytes}"):
            await embed(models, "a")

        assert models.residence("a").state == "failed"
        assert megabytes in (models.residence("a").error or "")


async def test_who_is_not_to_wait_is_told_so_and_finds_it_later(checkpoint: Path) -> None:
    told = asyncio.Event()
    loop = asyncio.get_running_loop()

    def report(said: wire.State) -> None:
        if said.state == "loaded":
            loop.call_soon_threadsafe(told.set)

    models = ModelHost(boot_of(checkpoint, "a", waits=False), report)
    with pytest.raises(ModelNotLoaded):
        await embed(models, "a")
    await told.wait()

    assert (await embed(models, "a")).tokens == 3


class Gate:
    """Opens checkpoints, one of them only when told to."""

    def __init__(self, shut: str) -> None:
        self.shut = shut
        self.open = Event()

    def __call__(
        self, boot: wire.ModelBoot, folder: Path, report: Callable[[str], None], run_on_device: RunOnDevice
    ) -> LoadedModel:
        if boot.name == self.shut:
            assert self.open.wait(15)
        return load_model(boot, folder, report, run_on_device)


@pytest.fixture
def gate() -> Iterator[Gate]:
    one = Gate("slow")
    yield one
    one.open.set()


def with_slow(checkpoint: Path) -> wire.EngineBoot:
    boot = boot_of(checkpoint, "a")
    return replace(boot, models=(*boot.models, replace(boot.models[0], name="slow")))


async def test_loading_one_never_holds_up_another(checkpoint: Path, gate: Gate) -> None:
    models = ModelHost(with_slow(checkpoint), lambda _: None, gate)
    await embed(models, "a")
    waiting = asyncio.create_task(embed(models, "slow"))
    for _ in range(5):
        await embed(models, "a")
    assert not waiting.done()
    gate.open.set()

    assert (await waiting).tokens == 3


async def test_whoever_leaves_while_it_loads_leaves_nothing_behind(checkpoint: Path, gate: Gate) -> None:
    models = ModelHost(with_slow(checkpoint), lambda _: None, gate)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await embed(models, "slow")
    waiting = asyncio.create_task(embed(models, "slow"))
    gate.open.set()
    await waiting

    assert models._models["slow"].in_flight == 0
    assert models.residence("slow").loads == 1


async def test_nobody_asks_and_it_leaves(checkpoint: Path) -> None:
    gone = asyncio.Event()

    def report(said: wire.State) -> None:
        if said.state == "unloaded":
            gone.set()

    models = ModelHost(replace(boot_of(checkpoint, "a"), idle_s=0.02), report)
    keeping = asyncio.create_task(models.evict_idle_forever())
    await embed(models, "a")
    await gone.wait()
    keeping.cancel()

    assert models.residence("a") == Residence("unloaded", loads=1, unloads={"idle": 1})
    assert (await embed(models, "a")).tokens == 3


async def test_what_cannot_be_loaded_tells_why_and_leaves_the_others_alone(
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
    """A head that has memory for so many tokens at a time."""

    def __init__(self, head: object, tokens_most: int, error: type[Exception]) -> None:
        self.head = head
        self.tokens_most = tokens_most
        self.error = error

    def run(self, sequences: list[InputSequence], outputs: frozenset[Output]) -> list[Row]:
        if sum(len(one.ids) for one in sequences) > self.tokens_most:
            raise self.error("no memory for that many tokens")
        return self.head.run(sequences, outputs)  # type: ignore[attr-defined, no-any-return]


def short_of_memory(tokens_most: int, error: type[Exception]) -> Callable[..., LoadedModel]:
    def opens(
        boot: wire.ModelBoot, folder: Path, report: Callable[[str], None], run_on_device: RunOnDevice
    ) -> LoadedModel:
        one = load_model(boot, folder, report, run_on_device)
        return replace(one, head=SmallMemory(one.head, tokens_most, error)) if boot.name == "a" else one

    return opens


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
async def test_a_batch_that_finds_no_memory_is_split_and_the_ceiling_learnt(
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


async def test_an_input_that_does_not_fit_alone_fails_alone(checkpoint: Path) -> None:
    models = ModelHost(boot_of(checkpoint, "a"), lambda _: None, short_of_memory(50, MemoryError))
    texts = ["short", "word " * 80, "also short"]
    replies = await asyncio.gather(
        *(models.run("a", Embed((text,))) for text in texts), return_exceptions=True
    )

    assert [isinstance(one, EmbedReply) for one in replies] == [True, False, True]
    assert "not enough memory for input 0, of 82 tokens" in str(replies[1])


async def test_loading_that_runs_out_of_memory_is_tried_again_without_the_others(checkpoint: Path) -> None:
    tries = []

    def opens(
        boot: wire.ModelBoot, folder: Path, report: Callable[[str], None], run_on_device: RunOnDevice
    ) -> LoadedModel:
        tries.append(boot.name)
        if tries.count("b") == 1 and boot.name == "b":
            raise torch.OutOfMemoryError
        return load_model(boot, folder, report, run_on_device)

    models = ModelHost(boot_of(checkpoint, "ab"), lambda _: None, opens)
    await embed(models, "a")
    await embed(models, "b")

    assert tries == ["a", "b", "b"]
    assert states(models, "ab") == ["unloaded", "loaded"]


async def test_what_left_memory_is_given_back(checkpoint: Path, weight: int) -> None:
    models = ModelHost(replace(boot_of(checkpoint, "ab"), memory_bytes=weight + 1000), lambda _: None)
    await embed(models, "a")
    engine = models._models["a"].engine
    assert engine is not None
    network = ref(engine._loaded.head)
    del engine
    await embed(models, "b")

    assert states(models, "ab") == ["unloaded", "loaded"]
    assert network() is None
