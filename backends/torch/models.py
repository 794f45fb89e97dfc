"""The models of one engine's process: loaded when asked for, kept under a memory budget, left when idle.

Invariant: only the event loop's thread touches what is here; loading has a thread of its own that ends with
it, and each device has those that compute. One model is loaded at a time. A model with work in flight never
leaves memory: where its turn to leave has come, it takes no more, and ends what it has.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeAlias

import msgspec
import torch

from backends.checkpoints import locate_checkpoint
from backends.contract import Capabilities, ModelState, Reply, Residence, UnloadReason, Work
from backends.errors import ModelNotLoaded, ModelUnavailable
from backends.torch import memory, wire
from backends.torch.engine import Engine
from backends.torch.hosted import Arrival, Model
from backends.torch.loader import Loaded, best_device
from backends.torch.loading import Opens, There, described, in_a_thread_of_its_own, opened
from backends.torch.residency import Resident, who_is_idle, who_leaves
from backends.torch.stats import Recorder, Stats, Watch
from backends.torch.threads import ForwardThreads

Report: TypeAlias = Callable[[wire.State], None]

logger = logging.getLogger(__name__)

# What could not be loaded is tried again when somebody asks after so long; until then its error stands.
RETRY_S = 30.0
# Calls have timeouts of their own; whoever still holds a model then is not about to end.
DRAINED_WITHIN_S = 300.0
# How long a forward pass that ran out of memory waits for others to leave it.
RELIEVED_WITHIN_S = 5.0
IDLE_LOOKS = 4


class Models:
    """All models of the process; needs a running event loop. report: told of each change of a state.

    opens: from a model's settings and its folder to all that runs it, called on the loading thread.
    """

    def __init__(self, boot: wire.Boot, report: Report, opens: Opens | None = None) -> None:
        self._models = {one.name: Model(one) for one in boot.models}
        self._memory_bytes = boot.memory_bytes
        self._idle_s = boot.idle_s
        self._report = report
        self._opens = opens or opened
        self._loop = asyncio.get_running_loop()
        self._threads: dict[torch.device, ForwardThreads] = {}
        self._turn = asyncio.Lock()

    def __contains__(self, name: str) -> bool:
        """Whether there is a model of that name."""
        return name in self._models

    def capabilities(self, name: str) -> Capabilities | None:
        """What a model can do; None while nothing is known, or its first load is yet to come."""
        model = self._models[name]
        if model.told is None:
            return None
        return msgspec.structs.replace(model.told, loaded=model.engine is not None)

    def residence(self, name: str) -> Residence:
        """Whether a model is in memory."""
        return self._models[name].residence

    def recorder(self, name: str) -> Recorder:
        """What a model has done since the process began."""
        return self._models[name].recorder

    def stats(self, name: str) -> Stats:
        """The same, as it is told."""
        model = self._models[name]
        return model.recorder.snapshot(0 if model.engine is None else model.engine.waiting_inputs)

    async def run(self, name: str, work: Work, watch: Watch | None = None) -> Reply:
        """Carry out work, having its model loaded first where it must be. watch: told where its time went.

        Raises: BackendError.
        """
        model = self._models[name]
        async with self._held(model) as engine:
            return await engine.run(work, watch)

    async def start(self) -> None:
        """Load what is to be there from the start, as far as there is room; describe the others."""
        for model in self._models.values():
            if not (model.boot.preload and await self._preloaded(model)):
                await self._described(model)

    async def keep(self) -> None:
        """Let models leave that nobody asks for; runs until cancelled."""
        while self._idle_s is not None:
            await asyncio.sleep(self._idle_s / IDLE_LOOKS)
            for name in who_is_idle(self._residents(), self._loop.time(), self._idle_s):
                self._leaves(self._models[name], "idle")
                await asyncio.to_thread(memory.give_back)

    # Holding a model.

    @asynccontextmanager
    async def _held(self, model: Model) -> AsyncIterator[Engine]:
        """The model's engine, in memory for as long as the block runs."""
        if model.engine is None or model.is_leaving:
            await self._wait_loaded(model)
        else:
            model.in_flight += 1
        assert model.engine is not None
        try:
            yield model.engine
        finally:
            model.release(self._loop.time())

    async def _wait_loaded(self, model: Model) -> None:
        """Returns holding the model. Raises: ModelNotLoaded, ModelUnavailable."""
        arrival = self._arriving(model)
        if not model.boot.waits:
            raise ModelNotLoaded("the model is being loaded")
        assert arrival.task is not None
        arrival.waiting += 1
        try:
            # Whoever leaves must not end it for the others.
            await asyncio.shield(arrival.task)
        except BaseException:
            if arrival.granted:
                model.release(self._loop.time())
            else:
                arrival.waiting -= 1
            raise

    def _arriving(self, model: Model) -> Arrival:
        """The load that is on its way, or a new one. Raises: ModelUnavailable, if it failed a moment ago."""
        if model.arrival is None:
            if model.error is not None and self._loop.time() - model.failed_s < RETRY_S:
                raise ModelUnavailable(model.error)
            arrival = model.arrival = Arrival()
            arrival.task = asyncio.create_task(self._arrive(model, arrival))
            # Where nobody waits any more, nobody hears of its failure here; its state tells.
            arrival.task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return model.arrival

    # Loading.

    async def _preloaded(self, model: Model) -> bool:
        """False where there is no room, or it cannot be loaded."""
        try:
            folder = await self._found(model)
        except ModelUnavailable as error:
            self._failed(model, error.message)
            return False
        # One that would not fit alone is told so by loading it.
        if self._leaving_for(model.needed_bytes(folder)):
            return False
        arrival = self._arriving(model)
        assert arrival.task is not None
        await asyncio.wait({arrival.task})
        return model.engine is not None

    async def _described(self, model: Model) -> None:
        try:
            model.told = await asyncio.to_thread(described, model.boot)
        except ModelUnavailable as error:
            if model.error is None:
                self._failed(model, error.message)
        else:
            if model.error is None:
                self._say(model, "unloaded", "it is loaded when it is asked for")

    async def _arrive(self, model: Model, arrival: Arrival) -> None:
        """Load a model; whoever waits holds it when this returns. Raises: ModelUnavailable."""
        try:
            self._say(model, "loading", f"looking for {model.boot.model}")
            # Nobody else waits for what may be fetched.
            folder = await self._found(model)
            async with self._turn:
                # It may not have left after all.
                if model.engine is None:
                    await self._make_room(model.needed_bytes(folder))
                    await self._move_in(model, await self._loaded(model, folder))
                model.in_flight += arrival.waiting
                arrival.granted = True
        except ModelUnavailable as error:
            self._failed(model, error.message)
            raise
        except Exception as error:
            logger.exception("loading %s failed", model.boot.name)
            message = f"loading the model failed: {type(error).__name__}"
            self._failed(model, message)
            raise ModelUnavailable(message) from error
        finally:
            model.arrival = None
            # Loading leaves as much behind as what was loaded.
            await asyncio.to_thread(memory.give_back)

    async def _found(self, model: Model) -> Path:
        if model.folder is None:
            boot = model.boot
            model.folder = await asyncio.to_thread(
                locate_checkpoint, boot.model, boot.revision, with_code=boot.trust_remote_code
            )
        return model.folder

    async def _loaded(self, model: Model, folder: Path) -> Loaded:
        """Raises: ModelUnavailable."""

        def report(detail: str) -> None:
            self._say(model, "loading", detail)

        opening = partial(self._opens, model.boot, folder, report, self._there(model.boot))
        try:
            return await in_a_thread_of_its_own(opening)
        except Exception as error:
            if not memory.is_exhausted(error):
                raise
        await self._relieve(model)
        try:
            return await in_a_thread_of_its_own(opening)
        except Exception as error:
            if not memory.is_exhausted(error):
                raise
            raise ModelUnavailable("there is not enough memory to load it") from error

    async def _move_in(self, model: Model, loaded: Loaded) -> None:
        """Raises: ModelUnavailable, if it turns out to be too large."""
        words = loaded.preparer.tokenizer.vocabulary_size
        model.memory_bytes = memory.held_bytes(loaded.head) + words * memory.TOKENIZER_BYTES_A_WORD
        await self._make_room(model.memory_bytes)
        model.engine = Engine(
            loaded,
            batch_tokens=model.batch_tokens(loaded),
            queue_tokens=model.boot.queue_tokens,
            threads=self._threads_of(model.boot),
            relieve=partial(self._relieve_soon, model),
            recorder=model.recorder,
        )
        model.told = loaded.capabilities
        model.used_s = self._loop.time()
        model.error = None
        model.loads += 1
        self._say(model, "loaded", f"{loaded.capabilities.dtype}, {_megabytes(model.memory_bytes)}")

    # Leaving.

    def _residents(self) -> list[Resident]:
        return [
            Resident(name, one.memory_bytes, one.used_s, busy=one.in_flight > 0)
            for name, one in self._models.items()
            if one.engine is not None
        ]

    def _leaving_for(self, needed_bytes: int) -> Sequence[str] | None:
        """Who has to go; None where that does not help."""
        if self._memory_bytes is None:
            return ()
        return who_leaves(self._residents(), needed_bytes, self._memory_bytes)

    async def _make_room(self, needed_bytes: int) -> None:
        """Raises: ModelUnavailable."""
        leaving = self._leaving_for(needed_bytes)
        if leaving is None:
            raise ModelUnavailable(
                f"it needs {_megabytes(needed_bytes)} to be loaded, and `engine.memory_bytes` is "
                f"{_megabytes(self._memory_bytes or 0)}"
            )
        for name in leaving:
            await self._drained(self._models[name])
            self._leaves(self._models[name], "room")
        if leaving:
            await asyncio.to_thread(memory.give_back)

    async def _drained(self, model: Model) -> None:
        """Wait until it has no work; new work waits for it to come back."""
        model.is_leaving = True
        try:
            while model.in_flight:
                model.ended.clear()
                async with asyncio.timeout(DRAINED_WITHIN_S):
                    await model.ended.wait()
        except TimeoutError as error:
            raise ModelUnavailable("there is no room: other models do not end their work") from error
        finally:
            model.is_leaving = False

    def _leaves(self, model: Model, why: UnloadReason) -> None:
        if model.engine is not None and not model.in_flight:
            model.forget(why)
            self._say(model, "unloaded", UNLOADED[why])

    async def _relieve(self, model: Model) -> None:
        """Have all leave that have no work, but this one."""
        for other in self._models.values():
            if other is not model:
                self._leaves(other, "out_of_memory")
        await asyncio.to_thread(memory.give_back)

    def _relieve_soon(self, model: Model) -> None:
        """From a thread that computes, which waits for it."""
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._relieve(model), self._loop).result(RELIEVED_WITHIN_S)

    # What is told.

    def _failed(self, model: Model, message: str) -> None:
        model.failed(message, self._loop.time())
        self._say(model, "failed", message)

    def _say(self, model: Model, state: ModelState, detail: str) -> None:
        self._report(wire.State(model.boot.name, state, detail))

    # Where a model computes.

    def _threads_of(self, boot: wire.ModelBoot) -> ForwardThreads:
        device = best_device(boot.device)
        if device not in self._threads:
            self._threads[device] = ForwardThreads(device)
        return self._threads[device]

    def _there(self, boot: wire.ModelBoot) -> There:
        """Where a model's first batches run, and are compiled."""
        threads = self._threads_of(boot)
        return lambda warm_up: threads.warm_up(warm_up).result()


UNLOADED: Mapping[UnloadReason, str] = {
    "room": "it made room for another",
    "idle": "nobody asked for it",
    "out_of_memory": "a batch of another needed its memory",
}


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.0f} MB"
