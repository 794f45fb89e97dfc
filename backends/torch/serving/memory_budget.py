"""Models of one engine process and the memory that they share: which are loaded, and which are evicted.

Rule: only the event loop's thread touches it, but for `relieve_from_thread`.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from backends.contract import Capabilities, ModelState, Residence, UnloadReason
from backends.contract.errors import ModelUnavailable
from backends.torch import memory, wire
from backends.torch.passes.engine import Engine
from backends.torch.passes.loaded_model import LoadedModel
from backends.torch.serving.eviction import Resident, models_to_evict
from backends.torch.stats import Recorder


class PendingLoad:
    """Load in progress.

    waiting: number of works that wait for it. granted: they hold the model now.
    """

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self.waiting = 0
        self.granted = False


class HostedModel:
    """One model of the process.

    in_flight: works that hold it. used_s: end of its last work, on the event loop's clock. memory_bytes: what
    it held when it was last loaded. is_leaving: it is about to be unloaded and takes no new work. idle_event:
    set whenever its last work ends.
    """

    def __init__(self, boot: wire.ModelBoot) -> None:
        self.boot = boot
        self.folder: Path | None = None
        self.capabilities: Capabilities | None = None
        self.engine: Engine | None = None
        self.pending: PendingLoad | None = None
        self.is_leaving = False
        self.in_flight = 0
        self.used_s = 0.0
        self.memory_bytes = 0
        self.error: str | None = None
        self.failed_s = 0.0
        self.loads = 0
        self.failed_loads = 0
        self.unloads: Counter[UnloadReason] = Counter()
        self.idle_event = asyncio.Event()
        self.recorder = Recorder()
        self._batch_tokens: int | None = None
        self._out_of_memory = 0

    @property
    def state(self) -> ModelState:
        """State of the model, by its engine and its pending load."""
        if self.engine is not None:
            return "loaded"
        if self.pending is not None:
            return "loading"
        return "unloaded" if self.error is None else "failed"

    @property
    def residence(self) -> Residence:
        """Report of the model to the gateway."""
        return Residence(
            self.state,
            self.error,
            0 if self.engine is None else self.memory_bytes,
            self.loads,
            self.failed_loads,
            dict(self.unloads),
            self._out_of_memory + (0 if self.engine is None else self.engine.out_of_memory),
        )

    def batch_tokens(self, loaded: LoadedModel) -> int:
        """Return the tokens of one forward pass, reduced for good after running out of memory."""
        configured = self.boot.batch_tokens or loaded.batch_tokens
        return min(configured, self._batch_tokens or configured)

    def failed(self, message: str, now_s: float) -> None:
        """Record a failed load."""
        self.error = message
        self.failed_s = now_s
        self.failed_loads += 1

    def unload(self, reason: UnloadReason) -> None:
        """Drop the engine, which frees the model's memory."""
        assert self.engine is not None
        self._out_of_memory += self.engine.out_of_memory
        if self.engine.out_of_memory:
            self._batch_tokens = self.engine.batch_tokens
        self.engine = None
        self.unloads[reason] += 1

    def release(self, now_s: float) -> None:
        """Record that one piece of work no longer holds it."""
        self.in_flight -= 1
        self.used_s = now_s
        if not self.in_flight:
            self.idle_event.set()


Report: TypeAlias = Callable[[wire.State], None]

# Work has timeouts of its own; work that still holds a model after this time is stuck.
DRAIN_TIMEOUT_S = 300.0
# Time that a forward pass without memory waits for other models to be unloaded.
RELIEF_TIMEOUT_S = 5.0

UNLOAD_DETAILS: Mapping[UnloadReason, str] = {
    "room": "it made room for another",
    "idle": "it was idle",
    "out_of_memory": "a batch of another needed its memory",
}


class MemoryBudget:
    """Budget that all loaded models share; needs a running event loop.

    memory_bytes: the most that they may hold together, None for no bound. report: called with each change of
    a model's state.
    """

    def __init__(self, models: Mapping[str, HostedModel], memory_bytes: int | None, report: Report) -> None:
        self._models = models
        self._memory_bytes = memory_bytes
        self._report = report
        self._loop = asyncio.get_running_loop()

    def report(self, model: HostedModel, state: ModelState, detail: str) -> None:
        """Report the state of a model."""
        self._report(wire.State(model.boot.name, state, detail))

    def residents(self) -> list[Resident]:
        """Return the loaded models."""
        return [
            Resident(name, model.memory_bytes, model.used_s, busy=model.in_flight > 0)
            for name, model in self._models.items()
            if model.engine is not None
        ]

    def to_evict(self, needed_bytes: int) -> Sequence[str] | None:
        """Return the models to evict for a new one, None if evicting all of them is not enough."""
        if self._memory_bytes is None:
            return ()
        return models_to_evict(self.residents(), needed_bytes, self._memory_bytes)

    async def make_room(self, needed_bytes: int) -> None:
        """Evict models until so many bytes fit. Raises: ModelUnavailable."""
        names = self.to_evict(needed_bytes)
        if names is None:
            raise ModelUnavailable(
                f"it needs {megabytes(needed_bytes)} to be loaded, and `engine.memory_bytes` is "
                f"{megabytes(self._memory_bytes or 0)}"
            )
        for name in names:
            await self._drain(self._models[name])
            self.unload(self._models[name], "room")
        if names:
            await asyncio.to_thread(memory.release_to_system)

    def unload(self, model: HostedModel, reason: UnloadReason) -> None:
        """Unload a model unless it has work."""
        if model.engine is not None and not model.in_flight:
            model.unload(reason)
            self.report(model, "unloaded", UNLOAD_DETAILS[reason])

    async def relieve(self, model: HostedModel) -> None:
        """Unload all other models that have no work."""
        for other in self._models.values():
            if other is not model:
                self.unload(other, "out_of_memory")
        await asyncio.to_thread(memory.release_to_system)

    def relieve_from_thread(self, model: HostedModel) -> None:
        """Do the same for a thread that computes, which waits for it."""
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self.relieve(model), self._loop).result(RELIEF_TIMEOUT_S)

    async def _drain(self, model: HostedModel) -> None:
        """Wait until a model has no work; new work waits for its next load."""
        model.is_leaving = True
        try:
            while model.in_flight:
                model.idle_event.clear()
                async with asyncio.timeout(DRAIN_TIMEOUT_S):
                    await model.idle_event.wait()
        except TimeoutError as error:
            raise ModelUnavailable("there is no room: other models do not end their work") from error
        finally:
            model.is_leaving = False


def megabytes(count: int) -> str:
    """Format a number of bytes for messages."""
    return f"{count / 1e6:,.0f} MB"
