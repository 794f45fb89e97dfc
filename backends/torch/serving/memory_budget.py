"""Memory of all models of one engine process: who is loaded, who is evicted, and how room is made.

Rule: only the event loop's thread touches it, but for `relieve_from_thread`.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TypeAlias

from backends.contract import ModelState, UnloadReason
from backends.contract.errors import ModelUnavailable
from backends.torch import memory, wire
from backends.torch.serving.eviction import Resident, models_to_evict
from backends.torch.serving.hosted_model import HostedModel

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
