"""Models of one engine process: loaded on demand, kept within a memory budget, unloaded when idle.

Invariant: only the event loop's thread touches this state. A load has a thread of its own that ends with it,
and each device has threads that compute. One model is loaded at a time. A model with work in flight is never
unloaded: when it is its turn to go, it takes no new work and finishes what it has.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import msgspec
import torch

from backends.contract import Capabilities, Reply, Residence, Work
from backends.contract.errors import ModelNotLoaded, ModelUnavailable
from backends.torch import memory, wire
from backends.torch.load.loader import (
    LoadModel,
    RunOnDevice,
    best_device,
    describe_model,
    estimate_bytes,
    load_model,
    locate_model,
    require_device,
    run_in_new_thread,
)
from backends.torch.passes.engine import Engine
from backends.torch.passes.loaded_model import LoadedModel
from backends.torch.passes.threads import ForwardThreads
from backends.torch.refusals import describe_error
from backends.torch.serving.eviction import idle_models
from backends.torch.serving.memory_budget import HostedModel, MemoryBudget, PendingLoad, Report, megabytes
from backends.torch.stats import EngineStats, Recorder, Stopwatch

logger = logging.getLogger(__name__)


class ModelLoads:
    """Loads models into a memory budget. load_model: creates one, on a thread of its own."""

    def __init__(self, budget: MemoryBudget, load_model: LoadModel) -> None:
        self._budget = budget
        self._load_model = load_model
        self._loop = asyncio.get_running_loop()
        self._threads: dict[torch.device, ForwardThreads] = {}
        self._one_load = asyncio.Lock()

    async def has_room(self, model: HostedModel) -> bool:
        """Return whether a model could be loaded without evicting another."""
        try:
            needed_bytes = await self._needed_bytes(model, await self._folder(model))
        except ModelUnavailable as error:
            self._fail(model, error.message)
            return False
        # A model that does not fit even alone is to be loaded: the load reports why it cannot be.
        return not self._budget.to_evict(needed_bytes)

    async def describe(self, model: HostedModel) -> None:
        """Read the capabilities of a model that is not loaded."""
        try:
            model.capabilities = await asyncio.to_thread(describe_model, model.boot)
        except ModelUnavailable as error:
            if model.error is None:
                self._fail(model, error.message)
        else:
            if model.error is None:
                self._budget.report(model, "unloaded", "it is loaded when it is asked for")

    async def load(self, model: HostedModel, pending: PendingLoad) -> None:
        """Load a model; the work that waits holds it when this returns. Raises: ModelUnavailable."""
        try:
            # Before a download that would be in vain.
            require_device(model.boot.device)
            self._budget.report(model, "loading", f"looking for {model.boot.model}")
            # Outside the lock: other models need not wait for a download.
            folder = await self._folder(model)
            async with self._one_load:
                # A model that was about to be evicted may still be loaded.
                if model.engine is None:
                    await self._budget.make_room(await self._needed_bytes(model, folder))
                    await self._install(model, await self._open(model, folder))
                model.in_flight += pending.waiting
                pending.granted = True
        except ModelUnavailable as error:
            self._fail(model, error.message)
            raise
        except Exception as error:
            logger.exception("loading %s failed", model.boot.name)
            message = f"loading the model failed: {describe_error(error)}"
            self._fail(model, message)
            raise ModelUnavailable(message) from error
        finally:
            model.pending = None
            # A load leaves as much garbage behind as the model itself holds.
            await asyncio.to_thread(memory.release_to_system)

    async def _folder(self, model: HostedModel) -> Path:
        if model.folder is None:
            model.folder = await asyncio.to_thread(locate_model, model.boot)
        return model.folder

    async def _needed_bytes(self, model: HostedModel, folder: Path) -> int:
        """Return the memory that a load may take: its weights as they are held, or what it held last time."""
        return max(model.memory_bytes, await asyncio.to_thread(estimate_bytes, model.boot, folder))

    async def _open(self, model: HostedModel, folder: Path) -> LoadedModel:
        """Open the checkpoint, a second time after other models made room. Raises: ModelUnavailable."""

        def report(detail: str) -> None:
            self._budget.report(model, "loading", detail)

        opening = partial(self._load_model, model.boot, folder, report, self._run_on_device(model.boot))
        try:
            return await run_in_new_thread(opening)
        except Exception as error:
            if not memory.is_exhausted(error):
                raise
        await self._budget.relieve(model)
        try:
            return await run_in_new_thread(opening)
        except Exception as error:
            if not memory.is_exhausted(error):
                raise
            raise ModelUnavailable("there is not enough memory to load it") from error

    async def _install(self, model: HostedModel, loaded: LoadedModel) -> None:
        """Put an engine in front of the loaded model. Raises: ModelUnavailable if it is too large."""
        words = loaded.preparer.tokenizer.vocabulary_size
        model.memory_bytes = memory.held_bytes(loaded.head) + words * memory.TOKENIZER_BYTES_PER_WORD
        await self._budget.make_room(model.memory_bytes)
        model.engine = Engine(
            loaded,
            batch_tokens=model.batch_tokens(loaded),
            queue_tokens=model.boot.queue_tokens,
            threads=self._threads_of(model.boot),
            relieve=partial(self._budget.relieve_from_thread, model),
            recorder=model.recorder,
        )
        model.capabilities = loaded.capabilities
        model.used_s = self._loop.time()
        model.error = None
        model.loads += 1
        detail = f"{loaded.capabilities.dtype}, {megabytes(model.memory_bytes)}"
        self._budget.report(model, "loaded", detail)

    def _fail(self, model: HostedModel, message: str) -> None:
        model.failed(message, self._loop.time())
        self._budget.report(model, "failed", message)

    def _threads_of(self, boot: wire.ModelBoot) -> ForwardThreads:
        device = best_device(boot.device)
        if device not in self._threads:
            self._threads[device] = ForwardThreads(device)
        return self._threads[device]

    def _run_on_device(self, boot: wire.ModelBoot) -> RunOnDevice:
        """Return what runs a model's first batches, and compiles them."""
        threads = self._threads_of(boot)
        return lambda warm_up: threads.warm_up(warm_up).result()


# After a failed load, requests get its error for this long; then the next request tries again.
RETRY_S = 30.0
# Checks for idle models in each idle period.
IDLE_CHECKS = 4


class ModelHost:
    """All models of the process; needs a running event loop.

    report: called with each change of a model's state. load: creates a model from its settings and its
    folder, on a thread of its own.
    """

    def __init__(self, boot: wire.EngineBoot, report: Report, load: LoadModel | None = None) -> None:
        self._models = {model.name: HostedModel(model) for model in boot.models}
        self._idle_s = boot.idle_s
        self._loop = asyncio.get_running_loop()
        self._budget = MemoryBudget(self._models, boot.memory_bytes, report)
        self._loads = ModelLoads(self._budget, load or load_model)

    def __contains__(self, name: str) -> bool:
        """Return whether there is a model of that name."""
        return name in self._models

    def capabilities(self, name: str) -> Capabilities | None:
        """Return the capabilities of a model, None if they are not known before its first load."""
        model = self._models[name]
        if model.capabilities is None:
            return None
        return msgspec.structs.replace(model.capabilities, loaded=model.engine is not None)

    def residence(self, name: str) -> Residence:
        """Return whether a model is in memory."""
        return self._models[name].residence

    def recorder(self, name: str) -> Recorder:
        """Return the counters of a model."""
        return self._models[name].recorder

    def stats(self, name: str) -> EngineStats:
        """Return the statistics of a model since the process began."""
        model = self._models[name]
        return model.recorder.snapshot(0 if model.engine is None else model.engine.waiting_inputs)

    async def run(self, name: str, work: Work, stopwatch: Stopwatch | None = None) -> Reply:
        """Run work, after loading its model if necessary. stopwatch: records where the time goes.

        Raises: BackendError.
        """
        async with self._hold(self._models[name]) as engine:
            return await engine.run(work, stopwatch)

    async def start(self) -> None:
        """Load the models to preload, as far as there is room; describe the others."""
        for model in self._models.values():
            if not (model.boot.preload and await self._preload(model)):
                await self._loads.describe(model)

    async def evict_idle_forever(self) -> None:
        """Unload models that have been idle for `idle_s`; runs until cancelled."""
        while self._idle_s is not None:
            await asyncio.sleep(self._idle_s / IDLE_CHECKS)
            for name in idle_models(self._budget.residents(), self._loop.time(), self._idle_s):
                self._budget.unload(self._models[name], "idle")
                await asyncio.to_thread(memory.release_to_system)

    @asynccontextmanager
    async def _hold(self, model: HostedModel) -> AsyncIterator[Engine]:
        """Keep the model in memory while the block runs."""
        if model.engine is None or model.is_leaving:
            await self._wait_loaded(model)
        else:
            model.in_flight += 1
        assert model.engine is not None
        try:
            yield model.engine
        finally:
            model.release(self._loop.time())

    async def _wait_loaded(self, model: HostedModel) -> None:
        """Wait for the model, and return holding it. Raises: ModelNotLoaded, ModelUnavailable."""
        pending = self._pending_load(model)
        if not model.boot.waits:
            raise ModelNotLoaded("the model is being loaded")
        assert pending.task is not None
        pending.waiting += 1
        try:
            # A caller that disconnects must not cancel the load for the others.
            await asyncio.shield(pending.task)
        except BaseException:
            if pending.granted:
                model.release(self._loop.time())
            else:
                pending.waiting -= 1
            raise

    def _pending_load(self, model: HostedModel) -> PendingLoad:
        """Return the load in progress, or a new one. Raises: ModelUnavailable if a recent load failed."""
        if model.pending is None:
            if model.error is not None and self._loop.time() - model.failed_s < RETRY_S:
                raise ModelUnavailable(model.error)
            pending = model.pending = PendingLoad()
            pending.task = asyncio.create_task(self._loads.load(model, pending))
            # If no work waits any more, its failure is retrieved here; the model's state reports it.
            pending.task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return model.pending

    async def _preload(self, model: HostedModel) -> bool:
        """Load a model at start; return False if there is no room or the load fails."""
        if not await self._loads.has_room(model):
            return False
        pending = self._pending_load(model)
        assert pending.task is not None
        await asyncio.wait({pending.task})
        return model.engine is not None
