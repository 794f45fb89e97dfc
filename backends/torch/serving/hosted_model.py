"""State of one model in an engine process, loaded or not, and of a load in progress.

Rule: only the event loop's thread touches it.
"""

import asyncio
from collections import Counter
from pathlib import Path

from backends.contract import Capabilities, ModelState, Residence, UnloadReason
from backends.torch import wire
from backends.torch.passes.engine import Engine
from backends.torch.passes.loaded_model import LoadedModel
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
