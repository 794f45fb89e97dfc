"""Models of one engine process: loaded on demand, kept within a memory budget, unloaded when idle.

Invariant: only the event loop's thread touches this state. A load has a thread of its own that ends with it,
and each device has threads that compute. One model is loaded at a time. A model with work in flight is never
unloaded: when it is its turn to go, it takes no new work and finishes what it has.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from backends.contract import Capabilities, Reply, Residence, Work
from backends.contract.errors import ModelNotLoaded, ModelUnavailable
from backends.torch import memory, wire
from backends.torch.load.loading import LoadModel, load_model
from backends.torch.passes.engine import Engine
from backends.torch.serving.eviction import idle_models
from backends.torch.serving.hosted_model import HostedModel, PendingLoad
from backends.torch.serving.memory_budget import MemoryBudget, Report
from backends.torch.serving.model_loads import ModelLoads
from backends.torch.stats import EngineStats, Recorder, Stopwatch

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
